"""One Chromium, one static file server, and topics servers on a port that stays the same.

`pages.origin` serves the pages, and the servers list it; the same pages are also at
`pages.stranger`, an origin that no server lists.
"""

from __future__ import annotations

import functools
import http.server
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.browser import chromium
from tests.contract.driver import ROOT, Server
from tests.ports import lasting_port


class Pages(NamedTuple):
    """The URLs of the example pages."""

    origin: str
    stranger: str


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Serves files without logging."""

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""


@pytest.fixture(scope="session")
def browser() -> Iterator[chromium.Browser]:
    """The browser of the session."""
    path = chromium.program()
    if path is None:
        pytest.skip(chromium.INSTALL)
    with chromium.running(path) as found:
        yield found


@pytest.fixture(scope="session")
def pages() -> Iterator[Pages]:
    """The folder of the examples, served as `python -m http.server` serves it."""
    handler = functools.partial(Quiet, directory=str(ROOT / "examples" / "browser"))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    port = server.server_port
    yield Pages(f"http://127.0.0.1:{port}", f"http://localhost:{port}")
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def server(tmp_path: Path, pages: Pages) -> Iterator[Server]:
    """A running server that lists the pages' origin and restarts on the same port."""
    (tmp_path / "backups").mkdir()
    env = {
        "TOPICS_CORS_ORIGINS": pages.origin,
        "TOPICS_PORT": str(lasting_port()),
        "TOPICS_BACKUP_DIR": str(tmp_path / "backups"),
    }
    made = Server(tmp_path / "server", env)
    made.start()
    yield made
    if made.process is not None:
        made.signal(signal.SIGKILL)
