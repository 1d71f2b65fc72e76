"""Killed processes, no job lost or acked twice; fair shares."""

from __future__ import annotations

import shutil
import signal
import tempfile
import time
from pathlib import Path

import pytest

from tests.contract.driver import Api, Server, eventually, good
from tests.crash.queues.queue_chaos import Chaos, Crew
from tests.crash.queues.queue_worker import read_file

BURSTS = 25
EACH = 8
JITTER_MS = 200
# The largest allowed difference of a worker from the mean, and the least share without a window.
EVEN = 0.10
STARVING = 0.5


@pytest.mark.crash
@pytest.mark.timeout(0)
def test_every_job_is_done_and_acked_once(
    jobs: int, workers: int, kills: int, first_seed: int
) -> None:
    """The options are `--jobs`, `--workers`, `--kills` and `--seed`; a failing run keeps its
    directory and names it.
    """
    directory = Path(tempfile.mkdtemp(prefix="topics-workers-"))
    chaos = Chaos(directory, first_seed, jobs, workers, kills)
    began = time.monotonic()
    try:
        chaos.run()
    finally:
        chaos.tear_down()
    # Shown with `-s` or `-rP`: the figures of the run.
    print(f"\nseed {first_seed}: {chaos.story()}; {time.monotonic() - began:.1f} s")
    shutil.rmtree(directory)


class FairRun:
    """A server with the queue `fair`, and workers that only claim and ack."""

    def __init__(self, directory: Path, workers: int, fair_max: int, jitter_ms: int) -> None:
        self._server = Server(directory / "server")
        self.api: Api = self._server.start()
        good(self.api.put("fair", {"type": "queue", "claim_jitter_ms": jitter_ms}))
        port = int((self._server.directory / "port").read_text())
        self._crew = Crew(directory, port, workers, "fair")
        for slot in self._crew.slots:
            self._crew.begin(slot, ["fair"], fair_max)

    def wait_for_workers(self) -> None:
        """Wait until every worker has noted its claim and nothing since."""
        eventually(lambda: all(self._is_waiting(s.file) for s in self._crew.slots), "all wait", 30)

    @staticmethod
    def _is_waiting(path: Path) -> bool:
        lines = list(read_file(path, tail_bytes=4096))
        return bool(lines) and lines[-1][0] == "waiting"

    def burst(self, count: int) -> None:
        """Enqueue this many jobs at once, and wait until they are done."""
        good(self.api.append("fair", [{"data": {"id": f"{n}"}} for n in range(count)]))
        eventually(lambda: self.api.get_state("fair")["count"] == 0, "the burst is done", 30)

    def finish(self) -> list[int]:
        """End all workers; return the number of jobs of each."""
        assert self._crew.end() == []
        self._server.stop()
        return [
            sum(line[0] == "effect" for line in read_file(slot.file)) for slot in self._crew.slots
        ]

    def tear_down(self) -> None:
        """End all remaining processes."""
        self._crew.tear_down()
        if self._server.process is not None:
            self._server.signal(signal.SIGKILL)


@pytest.mark.crash
@pytest.mark.timeout(0)
def test_waiting_workers_share_bursts_evenly(tmp_path: Path, workers: int) -> None:
    """A coalescing window divides a burst among all workers, whichever is fastest (§10.2)."""
    run = FairRun(tmp_path, workers, 64, JITTER_MS)
    try:
        for _ in range(BURSTS):
            run.wait_for_workers()
            run.burst(EACH * workers)
        shares = run.finish()
    finally:
        run.tear_down()
    print(f"\n{workers} workers, {BURSTS} bursts of {EACH * workers}: {sorted(shares)}")
    mean = BURSTS * EACH
    assert sum(shares) == mean * workers
    assert all(abs(share - mean) <= EVEN * mean for share in shares), sorted(shares)


@pytest.mark.crash
@pytest.mark.timeout(0)
def test_no_worker_starves_without_a_window(tmp_path: Path, workers: int) -> None:
    """There are fewer jobs at a time than workers, and each worker takes one: every worker gets its
    turn.
    """
    run = FairRun(tmp_path, workers, 1, 0)
    count = max(1, workers // 2)
    bursts = BURSTS * EACH * workers // (4 * count)
    try:
        run.wait_for_workers()
        for _ in range(bursts):
            run.burst(count)
        shares = run.finish()
    finally:
        run.tear_down()
    print(f"\n{workers} workers, {bursts} bursts of {count}: {sorted(shares)}")
    mean = bursts * count / workers
    assert sum(shares) == bursts * count
    assert min(shares) >= STARVING * mean, sorted(shares)
