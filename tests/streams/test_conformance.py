"""The official conformance suite, at the pinned version: all cases must pass.

It takes about a minute, mostly waiting for lifetimes. The server has default settings.
`TOPICS_STREAMS_URL` names another server than a new one of ours.
`tests/crash/streams/test_stream_conformance.py` has the tests with killed servers.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contract.driver import Server
from tests.streams import node, official


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    """The URL of the server."""
    if given := os.environ.get("TOPICS_STREAMS_URL"):
        yield given
        return
    server = Server(tmp_path / "server")
    try:
        yield server.start().url
        server.stop()
    finally:
        if server.process is not None:
            server.signal(signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_official_suite_passes(
    suite_folder: Path, found_node: node.Node, url: str, tmp_path: Path
) -> None:
    report = tmp_path / "report.json"
    outcome = official.run(suite_folder, found_node, url, report)
    for _ in range(2):
        if outcome.is_late():
            again = official.run(suite_folder, found_node, url, report, only=outcome.failed)
            outcome = outcome.after(again)
    outcome.check()


def test_only_cases_that_measure_lifetimes_run_again() -> None:
    def outcome(passed: tuple[str, ...], *failed: str) -> official.Outcome:
        return official.Outcome(passed, dict.fromkeys(failed, "why"), (), 1.0)

    late = outcome(("a",), "TTL Behavior > b", "Read > should expire")
    assert late.is_late()
    assert not outcome(("a",), "TTL Behavior > b", "Append > c").is_late()
    assert not outcome(("a",)).is_late()
    ended = late.after(outcome(("TTL Behavior > b",), "Read > should expire"))
    assert ended.passed == ("a", "TTL Behavior > b")
    assert list(ended.failed) == ["Read > should expire"]
