"""The producers of one topic: next sequence, repeats, fenced epochs.

A producer's state is the last request of it that was accepted: on its way, or applied with the
records it brought, in one entry. Judged against what is on its way, so that requests sent one
behind another are each other's successors. A producer that appended nothing for `PRODUCER_KEPT_MS`
is forgotten; while there are `PRODUCERS_PER_TOPIC_MAX` that are not, a new one is refused. The
rules are those of the producer headers. Called by `engine/topic/topic.py` and
`engine/background/capture.py`.
"""

from __future__ import annotations

from collections import OrderedDict

import msgspec

from topics_server.values.errors import Code, TopicsError, invalid
from topics_server.values.limits import PRODUCER_KEPT_MS, PRODUCERS_PER_TOPIC_MAX
from topics_server.values.model import ProducerStamp


class StampAccepted(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The last request accepted of a producer: its records, and when they were committed, ms."""

    epoch: int
    seq: int
    first_seq: int
    count: int
    ts: int


class StampRepeated(msgspec.Struct, frozen=True):
    """A request that was accepted before.

    `last` is the highest accepted one of its producer, `is_last` tells whether it is this one;
    `staged_lsn` while that is under way.
    """

    last: StampAccepted
    is_last: bool
    staged_lsn: int | None


class Producers:
    """Who is known, the one whose last append is the oldest first."""

    __slots__ = ("_due_ms", "_staged", "known")

    def __init__(self) -> None:
        # Not a dict, which looks for its first key past every one that moved: 100,000 that come in
        # turn would cost each other ten times what one costs.
        self.known: OrderedDict[str, StampAccepted] = OrderedDict()
        # Each with its lsn, in the order in which they came. Lists, as they have one entry mostly.
        self._staged: dict[str, list[tuple[int, StampAccepted]]] = {}
        # Before this time nobody is to be forgotten.
        self._due_ms = 0

    def check(self, stamp: ProducerStamp, now_ms: int) -> StampRepeated | None:
        """None if this request is the producer's next; what it repeats, if it was accepted before.

        Raises `TopicsError`: `producer_fenced` for an older epoch, `producer_seq_conflict` for a
        seq that is not the next, `invalid_request` for a new epoch that begins with another seq
        than 0, `throttled` for one producer too many.
        """
        lsn, last = self._last(stamp.producer_id, now_ms)
        if last is None:
            if stamp.seq != 0:
                raise _gap(stamp, 0)
            self._check_room(now_ms)
            return None
        if stamp.epoch == last.epoch:
            expected = last.seq + 1
            if stamp.seq == expected:
                return None
            if stamp.seq > expected:
                raise _gap(stamp, expected)
            return StampRepeated(last, stamp.seq == last.seq, lsn)
        if stamp.epoch < last.epoch:
            raise TopicsError(
                Code.PRODUCER_FENCED,
                f"the producer is in epoch {last.epoch} by now",
                {"epoch": last.epoch},
            )
        if stamp.seq != 0:
            raise invalid("a new Producer-Epoch begins with Producer-Seq 0", "Producer-Seq")
        return None

    def _last(self, producer_id: str, now_ms: int) -> tuple[int | None, StampAccepted | None]:
        staged = self._staged.get(producer_id)
        if staged is not None:
            return staged[-1]
        known = self.known.get(producer_id)
        if known is None or now_ms - known.ts >= PRODUCER_KEPT_MS:
            return None, None
        return None, known

    def _check_room(self, now_ms: int) -> None:
        if len(self.known) + len(self._staged) < PRODUCERS_PER_TOPIC_MAX:
            return
        oldest = next(iter(self.known.values()), None)
        if oldest is None or now_ms - oldest.ts < PRODUCER_KEPT_MS:
            raise TopicsError(
                Code.THROTTLED,
                f"the topic has {PRODUCERS_PER_TOPIC_MAX} producers already",
                {"limit": "producers_per_topic", "max": PRODUCERS_PER_TOPIC_MAX},
            )

    def stage(self, lsn: int, stamp: ProducerStamp, first_seq: int, count: int, ts: int) -> None:
        """Note a request that is on its way."""
        accepted = StampAccepted(stamp.epoch, stamp.seq, first_seq, count, ts)
        staged = self._staged.get(stamp.producer_id)
        if staged is None:
            self._staged[stamp.producer_id] = [(lsn, accepted)]
        else:
            staged.append((lsn, accepted))

    def undo(self, producer_id: str) -> None:
        """The newest request of this producer that is on its way failed."""
        staged = self._staged[producer_id]
        staged.pop()
        if not staged:
            del self._staged[producer_id]

    def accept(self, stamp: ProducerStamp, first_seq: int, count: int, ts: int) -> None:
        """Note a request that is applied; forget who appended nothing for long enough at `ts`."""
        producer_id = stamp.producer_id
        staged = self._staged.get(producer_id)
        if staged is None:
            accepted = StampAccepted(stamp.epoch, stamp.seq, first_seq, count, ts)
        else:
            _, accepted = staged.pop(0)
            assert accepted.epoch == stamp.epoch
            assert accepted.seq == stamp.seq
            if not staged:
                del self._staged[producer_id]
        known = self.known
        known[producer_id] = accepted
        # Times ascend, so who comes again moves to the end.
        known.move_to_end(producer_id)
        if ts >= self._due_ms:
            self._forget(ts)

    def _forget(self, ts: int) -> None:
        known = self.known
        while ts - known[oldest := next(iter(known))].ts >= PRODUCER_KEPT_MS:
            del known[oldest]
        self._due_ms = known[oldest].ts + PRODUCER_KEPT_MS


def _gap(stamp: ProducerStamp, expected: int) -> TopicsError:
    return TopicsError(
        Code.PRODUCER_SEQ_CONFLICT,
        f"the next Producer-Seq is {expected}",
        {"expected_seq": expected, "received_seq": stamp.seq},
    )
