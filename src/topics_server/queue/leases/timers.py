"""Jobs of one queue by time: delayed ones and returned ones. Pure.

Jobs have no timer and cost no work of their own: jobs due in the same millisecond share a bucket,
and a due bucket moves as a whole. So 100,000 leases that end within a second cost at most a
thousand steps. A seq is in at most one bucket, and a caller that removes it knows its time. A heap
holds the buckets' times, including some of removed buckets. Used by `kept_jobs`, `lease_book` and
`unclaimed`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from heapq import heapify, heappop, heappush
from itertools import chain
from typing import Final

from topics_server.queue.leases.jobs import HeldJob

# A heap may hold this many times of removed buckets in addition to as many times of live ones.
_STALE_TIMES_MAX: Final = 64


def shifted(at_ms: int, by_ms: int) -> int:
    """The same moment after the wall clock was set by `by_ms`; 0 (no time) stays 0."""
    return max(1, at_ms + by_ms) if at_ms else 0


class JobTimers:
    """Seqs that become due at a later time, in ms. `count`: their number.

    `times`: a heap of the buckets' times; nothing is due before the first one.
    """

    __slots__ = ("_buckets", "count", "times")

    def __init__(self) -> None:
        self._buckets: dict[int, set[int]] = {}
        self.times: list[int] = []
        self.count = 0

    def put(self, seq: int, at_ms: int) -> None:
        """Add a seq that is due at this time; it must not be here yet."""
        bucket = self._buckets.get(at_ms)
        if bucket is None:
            bucket = self._buckets[at_ms] = set()
            heappush(self.times, at_ms)
        assert seq not in bucket
        bucket.add(seq)
        self.count += 1

    def put_all(self, seqs: Sequence[int], at_ms: int) -> None:
        """Add distinct seqs that are due at the same time; none may be here yet."""
        bucket = self._buckets.get(at_ms)
        if bucket is None:
            self._buckets[at_ms] = set(seqs)
            heappush(self.times, at_ms)
        else:
            assert bucket.isdisjoint(seqs)
            bucket.update(seqs)
        self.count += len(seqs)

    def discard(self, seq: int, at_ms: int) -> bool:
        """Remove a seq; returns whether it was here."""
        bucket = self._buckets.get(at_ms)
        if bucket is None or seq not in bucket:
            return False
        bucket.remove(seq)
        self.count -= 1
        if not bucket:
            self._drop(at_ms)
        return True

    def discard_all(self, seqs: Sequence[int], at_ms: int) -> bool:
        """Remove distinct seqs if all of them are here at this time; returns whether they were."""
        bucket = self._buckets.get(at_ms)
        if bucket is None or not bucket.issuperset(seqs):
            return False
        bucket.difference_update(seqs)
        self.count -= len(seqs)
        if not bucket:
            self._drop(at_ms)
        return True

    def _drop(self, at_ms: int) -> None:
        """Remove an empty bucket."""
        del self._buckets[at_ms]
        if len(self.times) > 2 * len(self._buckets) + _STALE_TIMES_MAX:
            self.times = list(self._buckets)
            heapify(self.times)

    def take_due(self, now_ms: int) -> Iterator[tuple[int, set[int]]]:
        """Remove and yield the due buckets. Run it to its end."""
        while self.times and self.times[0] <= now_ms:
            at_ms = heappop(self.times)
            bucket = self._buckets.pop(at_ms, None)
            if bucket is not None:
                self.count -= len(bucket)
                yield at_ms, bucket

    def seqs(self) -> Iterator[int]:
        """All seqs."""
        return chain.from_iterable(self._buckets.values())

    def due(self, now_ms: int) -> Iterator[int]:
        """The seqs that are due."""
        due = (bucket for at_ms, bucket in self._buckets.items() if at_ms <= now_ms)
        return chain.from_iterable(due)

    def next_ms(self) -> int | None:
        """The time of the next due seq; None if there is none."""
        while self.times and self.times[0] not in self._buckets:
            heappop(self.times)
        return self.times[0] if self.times else None


class _Bucket:
    """Seqs claimable since one time. `order`: the seqs, descending, built on first use.

    `order` may hold removed seqs, but never at its end.
    """

    __slots__ = ("order", "seqs")

    def __init__(self, seqs: set[int]) -> None:
        self.seqs = seqs
        self.order: list[int] | None = None

    def ascending(self) -> Iterator[int]:
        if self.order is None:
            self.order = sorted(self.seqs, reverse=True)
        return (seq for seq in reversed(self.order) if seq in self.seqs)

    def remove_all(self, seqs: Sequence[int]) -> None:
        self.seqs.difference_update(seqs)
        order = self.order
        while order and order[-1] not in self.seqs:
            order.pop()

    def add(self, seqs: set[int]) -> None:
        self.seqs |= seqs
        self.order = None


class Returned:
    """Seqs that may be leased again: the longest waiting first, then the lowest."""

    __slots__ = ("_buckets", "_times", "count")

    def __init__(self) -> None:
        self._buckets: dict[int, _Bucket] = {}
        self._times: list[int] = []
        self.count = 0

    def seqs(self) -> Iterator[int]:
        """All seqs."""
        return chain.from_iterable(bucket.seqs for bucket in self._buckets.values())

    def add(self, at_ms: int, seqs: set[int]) -> None:
        """Add seqs that are claimable since `at_ms`; the bucket takes over the set."""
        assert seqs
        self.count += len(seqs)
        bucket = self._buckets.get(at_ms)
        if bucket is None:
            self._buckets[at_ms] = _Bucket(seqs)
            heappush(self._times, at_ms)
        else:
            assert bucket.seqs.isdisjoint(seqs)
            bucket.add(seqs)

    def discard(self, seq: int, at_ms: int) -> bool:
        """Remove a seq; returns whether it was here."""
        bucket = self._buckets.get(at_ms)
        if bucket is None or seq not in bucket.seqs:
            return False
        bucket.remove_all((seq,))
        self._shrunk(at_ms, bucket, 1)
        return True

    def _shrunk(self, at_ms: int, bucket: _Bucket, by: int) -> None:
        """Count removed seqs of a bucket."""
        self.count -= by
        if not bucket.seqs:
            del self._buckets[at_ms]
            if len(self._times) > 2 * len(self._buckets) + _STALE_TIMES_MAX:
                self._times = list(self._buckets)
                heapify(self._times)

    def discard_all(self, seqs: Sequence[int], at_ms: int) -> bool:
        """Remove distinct seqs if all of them are here at this time; returns whether they were."""
        bucket = self._buckets.get(at_ms)
        if bucket is None or not bucket.seqs.issuperset(seqs):
            return False
        bucket.remove_all(seqs)
        self._shrunk(at_ms, bucket, len(seqs))
        return True

    def visit(self, wants_more: Callable[[int], bool]) -> None:
        """Call `wants_more` with seqs in order until it is False; it must not change this."""
        seen: list[int] = []
        goes_on = self.count > 0
        while goes_on and self._times:
            at_ms = heappop(self._times)
            bucket = self._buckets.get(at_ms)
            if bucket is None or (seen and seen[-1] == at_ms):
                continue
            seen.append(at_ms)
            goes_on = all(wants_more(seq) for seq in bucket.ascending())
        for at_ms in seen:
            heappush(self._times, at_ms)


class JobPlaces:
    """The places of jobs without an entry in flight; a job is in exactly one of them.

    `leased`: by the end of the lease; `resting`: delayed by a nack; `returned`: claimable again.
    """

    __slots__ = ("leased", "resting", "returned")

    def __init__(self) -> None:
        self.leased = JobTimers()
        self.resting = JobTimers()
        self.returned = Returned()

    def advance(self, now_ms: int) -> None:
        """Make jobs whose time has come claimable again."""
        for schedule in (self.leased, self.resting):
            times = schedule.times
            if times and times[0] <= now_ms:
                for at_ms, seqs in schedule.take_due(now_ms):
                    self.returned.add(at_ms, seqs)

    def waiting(self) -> Iterator[int]:
        """The jobs that wait to be leased again."""
        return chain(self.resting.seqs(), self.returned.seqs())

    def due(self, now_ms: int) -> Iterator[int]:
        """The jobs that `advance` would move."""
        for schedule in (self.leased, self.resting):
            if schedule.times and schedule.times[0] <= now_ms:
                yield from schedule.due(now_ms)

    def next_times(self) -> tuple[int | None, int | None]:
        """The times at which the next leased and the next resting job become claimable."""
        return self.leased.next_ms(), self.resting.next_ms()

    def take_one(self, seq: int, at_ms: int) -> None:
        """Remove a job from its place."""
        taken = (
            self.leased.discard(seq, at_ms)
            or self.resting.discard(seq, at_ms)
            or self.returned.discard(seq, at_ms)
        )
        assert taken, "a job that is not parked is in one of the three places"

    def take_out(self, seqs: Sequence[int], at_ms: int) -> None:
        """Remove distinct jobs of one time from their places, in one step if they are together."""
        if not (
            self.leased.discard_all(seqs, at_ms)
            or self.resting.discard_all(seqs, at_ms)
            or self.returned.discard_all(seqs, at_ms)
        ):
            for seq in seqs:
                self.take_one(seq, at_ms)

    def shift(self, jobs: Mapping[int, HeldJob], by_ms: int) -> None:
        """Adjust times to a wall clock set by `by_ms`: leases and delays keep their length."""
        moved: list[tuple[JobTimers | Returned, int]] = []
        for seq, job in jobs.items():
            places = (self.leased, self.resting, self.returned)
            place = next((each for each in places if each.discard(seq, job.at_ms)), None)
            if not job.is_timed:
                job.at_ms = shifted(job.at_ms, by_ms)
            if place is not None:
                moved.append((place, seq))
        for place, seq in moved:
            at_ms = jobs[seq].at_ms
            if isinstance(place, JobTimers):
                place.put(seq, at_ms)
            else:
                place.add(at_ms, {seq})
