"""Must-show 4: after `kill -9` under eight mixed writers nothing is lost, doubled or back after its
delete.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from pathlib import Path

import pytest

from tests.crash.kills.torture import Torture
from topics_server.wal.fs import OsFs
from topics_server.wal.tools.dump import verify


@pytest.mark.crash
@pytest.mark.timeout(0)
def test_kill_9_loses_doubles_and_brings_back_nothing(cycles: int, first_seed: int) -> None:
    """`--cycles` sets the number of kills; a failing run keeps its directory and names it."""
    directory = Path(tempfile.mkdtemp(prefix="topics-torture-"))
    torture = Torture(directory, first_seed)
    began = time.monotonic()
    torture.set_up()
    try:
        for _ in range(cycles):
            torture.run_cycle()
    finally:
        torture.tear_down()
    seconds = time.monotonic() - began
    # Shown with `-s` or `-rP`: the figures of the run.
    report = verify(OsFs(), str(torture.server.data_dir), str(torture.cold))
    assert not report.problems
    print(f"\n{torture.story()}; {seconds / cycles:.2f} s a cycle")
    assert torture.kills >= cycles
    shutil.rmtree(directory)
