"""`topics pipeline run`, killed on this machine: each step is done once all the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.contract.driver import Server
from tests.spark.jobs.pipelines import kill_after_steps, run_whole, two_days


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_a_command_that_is_killed_after_each_step(
    spark: Any, server: Server, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """`kill -9` of all processes of the command, behind each step of the first day.

    On the second day behind the seal and behind the last step of the day; `--pipeline-kills` kills
    behind each step there too.
    """
    everywhere = bool(request.config.getoption("--pipeline-kills", default=False))

    def first(path: Path) -> None:
        assert kill_after_steps(path) >= 4
        run_whole(path)

    def second(path: Path) -> None:
        if everywhere:
            first(path)
        else:
            assert kill_after_steps(path, 3, also_last=False) >= 2

    two_days(server, tmp_path, first, second)
