"""Whatever happens, a watcher's history equals a fold over diffs."""

from __future__ import annotations

import shutil
import tempfile
import time
from pathlib import Path

import pytest

from tests.crash.watch.watch_chaos import Chaos


@pytest.mark.crash
@pytest.mark.timeout(0)
def test_no_watcher_misses_repeats_or_silently_loses(
    watchers: int, kills: int, first_seed: int
) -> None:
    """The options are `--watchers`, `--kills` and `--seed`; a failing run keeps its directory and
    names it.
    """
    directory = Path(tempfile.mkdtemp(prefix="topics-watchers-"))
    chaos = Chaos(directory, first_seed, watchers, kills)
    began = time.monotonic()
    try:
        chaos.run()
    finally:
        chaos.tear_down()
    # Shown with `-s` or `-rP`: the figures of the run.
    print(f"\nseed {first_seed}: {chaos.story()}; {time.monotonic() - began:.1f} s")
    shutil.rmtree(directory)
