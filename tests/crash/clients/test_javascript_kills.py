"""The JavaScript client on a server that is killed: no record is lost or doubled, and no error
reaches the user.

One Node appends numbered records, another follows them. The answers of appends are lost with the
server; their repeats carry the same idempotency key.
"""

from __future__ import annotations

import json
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from tests.contract.driver import ROOT, Server, eventually, good
from tests.ports import lasting_port
from tests.streams import node
from tests.streams.conftest import found_node

__all__ = ["found_node"]

HERE: Final = Path(__file__).parent
FOLLOW: Final = ROOT / "tests" / "clients" / "follow.mjs"
# Records that are acknowledged between two kills.
BETWEEN: Final = 40
WITHIN_S: Final = 120.0


class NodeProgram:
    """A Node whose lines of JSON are collected while it runs."""

    def __init__(self, found: node.Node, script: Path, *words: str) -> None:
        self.process = subprocess.Popen(
            [found.path, str(script), *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=found.environment(),
        )
        self.lines: list[Any] = []
        self._thread = threading.Thread(target=self._listen)
        self._thread.start()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(json.loads(line))

    def wait_for(self, count: int) -> None:
        """Wait until so many lines were printed."""
        eventually(lambda: len(self.lines) >= count, f"{count} lines", WITHIN_S)

    def close(self) -> None:
        """End the program if it runs, and read what it printed."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._thread.join()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """A server that restarts on the same port."""
    made = Server(tmp_path / "server", {"TOPICS_PORT": str(lasting_port())})
    made.start()
    yield made
    made.stop()


@pytest.mark.crash
@pytest.mark.timeout(0)
def test_appends_are_stored_once_and_followed_once_over_kills(
    server: Server, cycles: int, found_node: node.Node, tmp_path: Path
) -> None:
    good(server.api.put("events", {"idempotency_window_ms": 3_600_000}))
    url = server.api.url
    follower = NodeProgram(found_node, FOLLOW, url, "events", str(tmp_path / "cursor"))
    writer = NodeProgram(found_node, HERE / "append.mjs", url, "events")
    try:
        for _ in range(cycles):
            wanted = len(writer.lines) + BETWEEN
            writer.wait_for(wanted)
            server.crash()
        assert writer.process.stdin is not None
        writer.process.stdin.write("stop\n")
        writer.process.stdin.flush()
        assert writer.process.wait(WITHIN_S) == 0
        assert follower.process.wait(WITHIN_S) == 0
    finally:
        writer.close()
        follower.close()
    assert writer.lines == list(range(1, len(writer.lines) + 1))
    stored = server.api.read_all("events")
    assert [record["data"] for record in stored] == [*writer.lines, None]
    assert [item["kind"] for item in follower.lines] == ["record"] * len(stored)
    assert [item["seq"] for item in follower.lines] == [record["$seq"] for record in stored]
    print(
        f"\nJavaScript: {cycles} kills; {len(stored):,} appended, {len(follower.lines):,} followed"
    )
