"""The deliveries a worker holds, and their lease deadlines.

Pure state: times are milliseconds of any clock that does not go back. A delivery is held from
`take` until `settled` or until it is lost. Extending begins a third of the lease after the last
success and is due from then on, so that two tries may fail. A lease that ran out by our clock is
told to the handler but stays held: only the server knows, and its fence decides.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from topics_server.client.calls import CLAIM_MAX
from topics_server.client.errors import ClientError, Refused
from topics_server.client.values import Job


class Held(msgspec.Struct, eq=False):
    """One delivery that is ours."""

    job: Job
    extend_ms: float
    ends_ms: float


class InFlight:
    """What one worker holds; `lost` counts what was taken from it."""

    def __init__(self, lease_ms: int) -> None:
        assert lease_ms > 0
        self.lease_ms = lease_ms
        self.lost = 0
        # Deliveries of one request; a server may be set to take fewer.
        self.batch_max = CLAIM_MAX
        self._held: dict[int, Held] = {}

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, held: Held) -> bool:
        return self._held.get(held.job.seq) is held

    @property
    def all(self) -> list[Held]:
        """Everything held."""
        return list(self._held.values())

    def shrink(self, error: ClientError, size: int) -> bool:
        """Whether a request of `size` was refused for its size only; the next ones are smaller."""
        if not (isinstance(error, Refused) and error.code == "batch_too_large" and size > 1):
            return False
        allowed = error.detail.get("max_claim")
        self.batch_max = allowed if isinstance(allowed, int) and 0 < allowed < size else size // 2
        return True

    def take(self, job: Job, leased_ms: float) -> Held:
        """Hold a delivery; an older one of the same job is lost by that."""
        older = self._held.get(job.seq)
        if older is not None:
            self.lose(older)
        held = self._held[job.seq] = Held(job, 0, 0)
        self._renew(held, leased_ms)
        return held

    def settled(self, held: Held) -> None:
        """The server knows how this delivery ended."""
        if held in self:
            del self._held[held.job.seq]
        else:
            self.lost -= 1  # an extend crossed the ack, and came too late because of it
            assert self.lost >= 0, "what is not held was lost"

    def lose(self, held: Held) -> None:
        """The lease is gone: tell the handler."""
        if held in self:
            del self._held[held.job.seq]
            self.lost += 1
        held.job.lost.set()

    def due(self, now_ms: float) -> list[Held]:
        """Whose lease is to be extended now. Those due soon come along, to save requests."""
        found = [held for held in self._held.values() if held.extend_ms <= now_ms]
        if not found:
            return found
        soon_ms = now_ms + self.lease_ms / 12
        return [held for held in self._held.values() if held.extend_ms <= soon_ms]

    def extended(
        self, asked: Iterable[Held], skipped: Iterable[int], asked_ms: float
    ) -> list[Held]:
        """Note an answer to `asked`, sent at `asked_ms`; returns those that are lost."""
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
        """Everything may be lost (a stream broke): extend it all at once."""
        for held in self._held.values():
            held.extend_ms = min(held.extend_ms, now_ms)

    def warn(self, now_ms: float) -> None:
        """Tell handlers whose lease ran out by our clock."""
        for held in self._held.values():
            if held.ends_ms <= now_ms:
                held.job.lost.set()

    def next_ms(self) -> float | None:
        """When something is due or runs out next."""
        times = [
            min(held.extend_ms, held.ends_ms if not held.job.lost.is_set() else held.extend_ms)
            for held in self._held.values()
        ]
        return min(times, default=None)

    def _renew(self, held: Held, leased_ms: float) -> None:
        held.extend_ms = leased_ms + self.lease_ms / 3
        held.ends_ms = leased_ms + self.lease_ms
