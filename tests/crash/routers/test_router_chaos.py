"""Routers of a killed server; no record lost, doubled or back after its
delete.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from pathlib import Path

import pytest

from tests.crash.routers.router_chaos import Chaos


@pytest.mark.crash
@pytest.mark.timeout(0)
def test_every_copy_exists_once_and_never_changes(cycles: int, first_seed: int) -> None:
    """`--cycles`, `--seed`; a run that fails keeps its directory, which its message names."""
    directory = Path(tempfile.mkdtemp(prefix="topics-routers-"))
    chaos = Chaos(directory, first_seed)
    began = time.monotonic()
    try:
        chaos.set_up()
        for _ in range(cycles):
            chaos.run_cycle()
    finally:
        chaos.tear_down()
    # Shown with `-s` or `-rP`: the figures of the run.
    print(f"\nseed {first_seed}: {chaos.story()}; {time.monotonic() - began:.1f} s")
    shutil.rmtree(directory)
