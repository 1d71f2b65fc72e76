"""Fixtures: the scripted server of streams."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator

import pytest

from tests.unit.cli.scripted import Handler, Script
from topics_server.cli.connection import ServerConnection


@pytest.fixture
def server() -> Iterator[http.server.ThreadingHTTPServer]:
    """The scripted server."""
    found = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    found.script = Script()  # type: ignore[attr-defined]
    thread = threading.Thread(target=found.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield found
    found.script.held.set()  # type: ignore[attr-defined]
    found.shutdown()
    thread.join()
    found.server_close()


@pytest.fixture
def script(server: http.server.ThreadingHTTPServer) -> Script:
    """The script that the server plays."""
    found: Script = server.script  # type: ignore[attr-defined]
    return found


@pytest.fixture
def client(server: http.server.ThreadingHTTPServer) -> Iterator[ServerConnection]:
    """A client of it."""
    found = ServerConnection(f"http://127.0.0.1:{server.server_port}", "secret")
    yield found
    found.close()
