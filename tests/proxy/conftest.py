"""One nginx and one server for each test module, both on ports that stay the same."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest

from tests.browser import chromium
from tests.contract.driver import Server
from tests.ports import lasting_port
from tests.proxy import nginx
from tests.proxy.nginx import Proxy


@pytest.fixture(scope="session")
def nginx_path() -> str:
    """The path of nginx."""
    path = nginx.program()
    if path is None or shutil.which("openssl") is None:
        pytest.skip(nginx.INSTALL)
    return path


@pytest.fixture(scope="session")
def curl() -> str:
    """The path of curl."""
    path = shutil.which("curl")
    if path is None:
        pytest.skip("no curl here; on Debian: apt-get install curl")
    return path


@pytest.fixture(scope="module")
def behind(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A running server that restarts on the same port."""
    made = Server(tmp_path_factory.mktemp("behind"), {"TOPICS_PORT": str(lasting_port())})
    made.start()
    yield made
    if made.process is not None:
        made.signal(signal.SIGKILL)


@pytest.fixture(scope="module")
def proxy(
    nginx_path: str, behind: Server, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Proxy]:
    """The nginx in front of it."""
    port = urlsplit(behind.api.url).port
    assert port is not None
    with nginx.running(nginx_path, tmp_path_factory.mktemp("nginx") / "run", port) as started:
        yield started


@pytest.fixture(scope="session")
def browser() -> Iterator[chromium.Browser]:
    """A Chromium that accepts our certificate."""
    path = chromium.program()
    if path is None:
        pytest.skip(chromium.INSTALL)
    with chromium.running(path, "--ignore-certificate-errors") as found:
        yield found
