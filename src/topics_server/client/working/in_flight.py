"""The deliveries that a worker holds, and their lease deadlines.

Pure state: times are milliseconds of any monotonic clock. A delivery is held from `take` until
`ended` or until it is lost. An extension is due a third of the lease after the last success, so
that two tries may fail. If a lease ran out by the local clock, the handler is notified, but the
delivery stays held: only the server's check of the lease id decides.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from topics_server.client.calls import CLAIM_MAX
from topics_server.client.errors import ClientError, Refused
from topics_server.client.values import Job


class Held(msgspec.Struct, eq=False):
    """One held delivery."""

    job: Job
    extend_ms: float
    ends_ms: float


class InFlight:
    """The deliveries of one worker; `lost` counts lost leases."""

    def __init__(self, lease_ms: int) -> None:
        assert lease_ms > 0
        self.lease_ms = lease_ms
        self.lost = 0
        # The most deliveries in one request; lowered if the server's limit is lower.
        self.batch_max = CLAIM_MAX
        self._held: dict[int, Held] = {}

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, held: Held) -> bool:
        return self._held.get(held.job.seq) is held

    @property
    def all(self) -> list[Held]:
        """All held deliveries."""
        return list(self._held.values())

    def shrink(self, error: ClientError, size: int) -> bool:
        """Whether a request of `size` was refused only for its size.

        Then the next requests are smaller.
        """
        if not (isinstance(error, Refused) and error.code == "batch_too_large" and size > 1):
            return False
        allowed = error.detail.get("max_claim")
        self.batch_max = allowed if isinstance(allowed, int) and 0 < allowed < size else size // 2
        return True

    def take(self, job: Job, leased_ms: float) -> Held:
        """Hold a delivery. An older delivery of the same job counts as lost."""
        older = self._held.get(job.seq)
        if older is not None:
            self.lose(older)
        held = self._held[job.seq] = Held(job, 0, 0)
        self._renew(held, leased_ms)
        return held

    def ended(self, held: Held) -> None:
        """Stop holding a delivery whose end the server has stored."""
        if held in self:
            del self._held[held.job.seq]
        else:
            self.lost -= 1  # an extend crossed the ack, so its refusal was no loss
            assert self.lost >= 0, "what is not held was lost"

    def lose(self, held: Held) -> None:
        """The lease is lost: notify the handler."""
        if held in self:
            del self._held[held.job.seq]
            self.lost += 1
        held.job.lost.set()

    def due(self, now_ms: float) -> list[Held]:
        """Deliveries to extend now; those due soon are included, to save requests."""
        found = [held for held in self._held.values() if held.extend_ms <= now_ms]
        if not found:
            return found
        soon_ms = now_ms + self.lease_ms / 12
        return [held for held in self._held.values() if held.extend_ms <= soon_ms]

    def extended(
        self, asked: Iterable[Held], skipped: Iterable[int], asked_ms: float
    ) -> list[Held]:
        """Handle the answer to an extend of `asked`, sent at `asked_ms`.

        Returns the lost deliveries.
        """
        gone = set(skipped)
        lost = []
        for held in asked:
            if held not in self:
                continue
            if held.job.seq in gone:
                self.lose(held)
                lost.append(held)
            else:
                self._renew(held, asked_ms)
        return lost

    def doubt(self, now_ms: float) -> None:
        """Every lease may be lost (a stream broke): extend all at once."""
        for held in self._held.values():
            held.extend_ms = min(held.extend_ms, now_ms)

    def warn(self, now_ms: float) -> None:
        """Notify the handlers whose lease ran out by the local clock."""
        for held in self._held.values():
            if held.ends_ms <= now_ms:
                held.job.lost.set()

    def next_ms(self) -> float | None:
        """The next time at which an extension is due or a lease runs out."""
        times = [
            min(held.extend_ms, held.ends_ms if not held.job.lost.is_set() else held.extend_ms)
            for held in self._held.values()
        ]
        return min(times, default=None)

    def _renew(self, held: Held, leased_ms: float) -> None:
        held.extend_ms = leased_ms + self.lease_ms / 3
        held.ends_ms = leased_ms + self.lease_ms
