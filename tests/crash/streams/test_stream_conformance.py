"""The official suite of Durable Streams again, on a server that is killed by `kill -9` meanwhile.

Kills between the groups: all cases pass on a directory with the data of all earlier groups, after
as many kills. Kills inside cases: a case finds after the kill what it did before.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contract.driver import Server
from tests.ports import lasting_port
from tests.streams import node, official
from tests.streams.conftest import found_node, suite_folder

__all__ = ["found_node", "suite_folder"]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """A running server that restarts on the same port."""
    env = {"TOPICS_PORT": str(lasting_port()), "TOPICS_STREAMS_LONG_POLL_MS": "1000"}
    made = Server(tmp_path / "server", env)
    try:
        made.start()
        yield made
        made.stop()
    finally:
        if made.process is not None:
            made.signal(signal.SIGKILL)


def _run(
    server: Server, suite_folder: Path, found_node: node.Node, kills: str, report: Path
) -> int:
    """Run all cases; return the number of kills."""
    with official.killing(server.crash) as control:
        outcome = official.run(
            suite_folder, found_node, server.api.url, report, control | {"SUITE_KILLS": kills}
        )
    outcome.check()
    # Shown with `-s` or `-rP`: the figures of the run.
    print(f"\n{kills}: killed {server.starts - 1} times, {outcome.seconds:.0f} s")
    return server.starts - 1


@pytest.mark.crash
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_suite_passes_on_a_server_killed_between_its_groups(
    server: Server, suite_folder: Path, found_node: node.Node, tmp_path: Path
) -> None:
    kills = _run(server, suite_folder, found_node, "between", tmp_path / "report.json")
    assert kills == official.GROUPS - 1


@pytest.mark.crash
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_suite_passes_on_a_server_killed_inside_its_cases(
    server: Server, suite_folder: Path, found_node: node.Node, cycles: int, tmp_path: Path
) -> None:
    """`--cycles`: about this many cases have their server killed during their run."""
    every = max(1, official.CASES // max(1, cycles) // 2)
    kills = _run(server, suite_folder, found_node, f"inside:{every}", tmp_path / "report.json")
    assert kills > 0
