"""The official conformance suite, at the version the lock pins, all of it and nothing failing.

About a minute, most of it lifetimes that are waited for. The server is as it comes, nothing is set.
`TOPICS_STREAMS_URL` names another than a fresh one of ours. Killed servers are in
`tests/crash/test_stream_conformance.py`.
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
    """Where the server is."""
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
    outcome = official.run(suite_folder, found_node, url, tmp_path / "report.json")
    outcome.check()
