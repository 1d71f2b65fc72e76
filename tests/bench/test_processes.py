"""The processes of the benchmarks: an interrupted run leaves none behind."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.servers import floor
from benchmarks.servers.cpu_time import family, read_proc
from benchmarks.servers.fanout_floor import start_fanout_floor
from benchmarks.servers.process import Reply, ServerProcess

REPLY = Reply(200, (("Content-Type", "application/json"),), b"{}")


def is_running(pid: int) -> bool:
    """Whether the process exists and is no zombie, which a machine without an init keeps."""
    stat = read_proc(f"{pid}/stat")
    return bool(stat) and stat.rpartition(")")[2].split()[0] != "Z"


def test_sigterm_ends_the_servers_and_removes_their_folder(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "benchmarks.check", "--dir", str(tmp_path)]
    deadline = time.monotonic() + 120
    with subprocess.Popen(words, stdout=subprocess.PIPE) as running:
        while len(started := family(running.pid)[1:]) < 3:  # the generator, a server, its child
            assert running.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)
        running.terminate()
        assert running.wait(60) == 128 + signal.SIGTERM
    assert list(tmp_path.iterdir()) == []
    deadline = time.monotonic() + 60
    while left := [pid for pid in started if is_running(pid)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("wait", "start"),
    [
        ("wait_ready", lambda folder: floor.start_floor(folder, "x", REPLY)),
        ("wait_port", lambda folder: start_fanout_floor(folder, "x", b"frame", b"answer", 1)),
    ],
)
def test_a_floor_that_does_not_start_is_ended(
    wait: str,
    start: Callable[[Path], ServerProcess],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No caller has the process yet, so none could end it: at SIGTERM, for instance."""
    started: list[int] = []

    def interrupted(process: ServerProcess, *_: object) -> float:
        started.append(process.pid)
        raise SystemExit(143)

    monkeypatch.setattr(ServerProcess, wait, interrupted)
    with pytest.raises(SystemExit):
        start(tmp_path)
    [pid] = started
    assert not is_running(pid)
