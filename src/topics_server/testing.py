"""Fixtures for pytest: a real server for the tests of an application.

In `conftest.py`: `pytest_plugins = ["topics_server.testing"]`. The server runs in its own process
over a temporary folder, on a free port, for the whole session. The fixture `topics_server` removes
all topics and passes the server to a test.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from urllib.parse import quote

import msgspec
import pytest

from topics_server.cli.connection import ServerConnection
from topics_server.cli.server.child import child_server


@dataclass(frozen=True, slots=True)
class RunningServer:
    """A running server; `url` is its address."""

    url: str

    def clear(self) -> None:
        """Remove every topic, with its records, views and routers."""
        client = ServerConnection(self.url)
        try:
            while True:
                page = msgspec.json.decode(client.call("GET", "/v0/topics?page_size=1000"))
                if not page["topics"]:
                    return
                for topic in page["topics"]:
                    client.call("DELETE", f"/v0/topics/{quote(topic['topic'], safe='')}")
        finally:
            client.close()


@pytest.fixture(scope="session")
def topics_server_session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """The server of the session; tests use the fixture `topics_server`."""
    folder = tmp_path_factory.mktemp("topics-server")
    with child_server(folder, 0, threading.Event()) as (_, url):
        yield RunningServer(url)


@pytest.fixture
def topics_server(topics_server_session: RunningServer) -> RunningServer:
    """The running server, with all topics removed."""
    topics_server_session.clear()
    return topics_server_session
