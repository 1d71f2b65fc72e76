"""Fixtures of the contract tests: any server by URL, or our own as a process.

`TOPICS_CONTRACT_URL` names a running server; tests that need a server of their own (other limits, a
restart, a crash) are then skipped. Without it, one server is started for the whole session and
stopped at the end by SIGTERM; it must exit with 0.

`--door uvicorn` and `--door mounted` run the same tests through plain uvicorn, or through another
application that mounts the server (`tests/contract/doors.py`). Tests of our own connection or
process are marked `connection(reason=...)` and skipped there; `connection("mounted", reason=...)`
is skipped behind that door only.
"""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.contract.driver import Api, Server
from tests.contract.watch.subscriptions import Clients

URL: Final = os.environ.get("TOPICS_CONTRACT_URL", "").rstrip("/")
_numbers: Final = itertools.count(1)
_run: Final = os.urandom(4).hex()

NewServer = Callable[..., Server]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Choose the door; skip the tests that do not apply to it."""
    Server.door = config.getoption("door")
    if Server.door != "connection":
        for item in items:
            marker = item.get_closest_marker("connection")
            if marker is not None and Server.door in (marker.args or (Server.door,)):
                reason = f"not behind the door {Server.door}: {marker.kwargs['reason']}"
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    """A client of the shared server."""
    if URL:
        client = Api(URL)
        yield client
        client.close()
        return
    server = Server(tmp_path_factory.mktemp("contract"))
    yield server.start()
    server.stop()


@pytest.fixture
def topic() -> str:
    """An unused topic name."""
    return new_name("t")


def new_name(stem: str) -> str:
    """An unused topic name that starts with `stem`."""
    return f"{stem}-{_run}-{next(_numbers)}"


@pytest.fixture
def names() -> Callable[[str], str]:
    """`new_name`, for tests that need several."""
    return new_name


@pytest.fixture
def clients() -> Iterator[Clients]:
    """Opens streams and sockets, and closes those that a test left open."""
    with Clients() as opened:
        yield opened


@pytest.fixture
def own(tmp_path: Path) -> Iterator[NewServer]:
    """A factory of further servers: `own(TOPICS_X="1")` is a `Server`, not yet started."""
    if URL:
        pytest.skip("needs a server of its own; TOPICS_CONTRACT_URL names a shared one")
    servers: list[Server] = []

    def make(**env: str) -> Server:
        server = Server(tmp_path / f"server-{len(servers)}", env)
        servers.append(server)
        return server

    yield make
    for server in servers:
        if server.process is not None:
            server.signal(signal.SIGKILL)
        for client in server.clients:
            client.close()
