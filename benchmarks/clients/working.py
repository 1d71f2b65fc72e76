"""Controls one queue client process: makes queues, runs rounds, measures deliveries.

Owned by the cases about queues, which end it with a `with` block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from benchmarks.clients.loader import Loader, Sample

PHASES: Final = ("enqueue", "claim", "ack")


@dataclass(frozen=True, slots=True)
class QueueSide:
    """A queue server: its wire (see `queue_wires`), its port and its process."""

    label: str
    port: int
    pid: int


class Workers(Loader):
    """A queue client process. Rates are jobs a second, CPU is per job, latency is per call."""

    def __init__(self) -> None:
        super().__init__("benchmarks.clients.workers")

    def _call(self, do: str, side: QueueSide, **job: Any) -> dict[str, Any]:
        self.begin(do=do, side=side.label, port=side.port, pid=side.pid, **job)
        return self.answer()

    def setup(self, side: QueueSide) -> None:
        """Make the queue."""
        self._call("setup", side)

    def round(self, side: QueueSide, *, workers: int, batch: int, jobs: int) -> dict[str, Sample]:
        """Enqueue, claim and ack this number of jobs on this number of connections, one batch per
        call.
        """
        answer = self._call("round", side, workers=workers, batch=batch, jobs=jobs)
        return {phase: self.sample(answer[phase]) for phase in PHASES}

    def turns(
        self, side: QueueSide, *, workers: int, batch: int, jobs: int, joined: bool
    ) -> Sample:
        """Enqueue jobs, not measured; then claim and ack them in turns, one batch per call.

        Our queue only. `joined`: an ack is part of the next claim. The latency is per request.
        """
        answer = self._call("turns", side, workers=workers, batch=batch, jobs=jobs, joined=joined)
        return self.sample(answer)

    def idle(self, side: QueueSide, seconds: float) -> Sample:
        """Enqueue one job at a time: latency from its enqueue to its delivery."""
        return self.sample(self._call("idle", side, seconds=seconds))
