"""The producers of one topic: next sequence, repeats, fenced epochs.

A producer's state is its last accepted request: either in flight, or applied in one entry together
with its records. Requests are checked against those in flight, so that a request may follow one
that is not applied yet. A producer without appends for `PRODUCER_KEPT_MS` is forgotten; while
`PRODUCERS_PER_TOPIC_MAX` producers are known, a new one is refused. The rules are those of the
producer headers. Called by `engine/topic/topic.py` and `engine/background/capture.py`.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

import msgspec

from topics_server.values.errors import Code, TopicsError, invalid
from topics_server.values.limits import PRODUCER_KEPT_MS, PRODUCERS_PER_TOPIC_MAX
from topics_server.values.model import ProducerStamp


class StampAccepted(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A producer's last accepted request: its records, and their commit time in ms."""

    epoch: int
    seq: int
    first_seq: int
    count: int
    ts: int


class StampRepeated(msgspec.Struct, frozen=True):
    """A request that was accepted before.

    `last` is the highest accepted request of the producer, `is_last` says whether it is this
    request; `staged_lsn` is set while `last` is in flight.
    """

    last: StampAccepted
    is_last: bool
    staged_lsn: int | None


class Producers:
    """The known producers, ordered by their last append, the oldest first."""

    __slots__ = ("_due_ms", "_staged", "known")

    def __init__(self) -> None:
        # Not a dict: finding its first key means passing the places of all moved keys, so 100,000
        # producers that append in turn would cost ten times as much.
        self.known: OrderedDict[str, StampAccepted] = OrderedDict()
        # The requests in flight by producer, each with its lsn, in order of arrival; lists, because
        # most have one element.
        self._staged: dict[str, list[tuple[int, StampAccepted]]] = {}
        # The earliest time at which a producer can be forgotten.
        self._due_ms = 0

    def check(self, stamp: ProducerStamp, now_ms: int) -> StampRepeated | None:
        """None if this request is the producer's next; the earlier request if it is a repeat.

        Raises `TopicsError`: `producer_fenced` for an older epoch, `producer_seq_conflict` for a
        seq that is not the next, `invalid_request` for a new epoch that begins with another seq
        than 0, `throttled` if there are too many producers.
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
                f"the producer has moved to epoch {last.epoch}",
                {"epoch": last.epoch},
            )
        if stamp.seq != 0:
            raise invalid(
                "the first request of a new Producer-Epoch must have Producer-Seq 0", "Producer-Seq"
            )
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
                f"the topic has reached its limit of {PRODUCERS_PER_TOPIC_MAX} producers",
                {"limit": "producers_per_topic", "max": PRODUCERS_PER_TOPIC_MAX},
            )

    def stage(self, lsn: int, stamp: ProducerStamp, first_seq: int, count: int, ts: int) -> None:
        """Note a request in flight."""
        assert self is not NO_PRODUCERS, "all topics share it"
        accepted = StampAccepted(stamp.epoch, stamp.seq, first_seq, count, ts)
        staged = self._staged.get(stamp.producer_id)
        if staged is None:
            self._staged[stamp.producer_id] = [(lsn, accepted)]
        else:
            staged.append((lsn, accepted))

    def undo(self, producer_id: str) -> None:
        """Undo the newest request in flight of this producer: it has failed."""
        staged = self._staged[producer_id]
        staged.pop()
        if not staged:
            del self._staged[producer_id]

    def accept(self, stamp: ProducerStamp, first_seq: int, count: int, ts: int) -> None:
        """Note an applied request; forget producers whose time has passed at `ts`."""
        assert self is not NO_PRODUCERS, "all topics share it"
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
        # Times ascend, so a producer that appends moves to the end.
        known.move_to_end(producer_id)
        if ts >= self._due_ms:
            self._forget(ts)

    def _forget(self, ts: int) -> None:
        known = self.known
        while ts - known[oldest := next(iter(known))].ts >= PRODUCER_KEPT_MS:
            del known[oldest]
        self._due_ms = known[oldest].ts + PRODUCER_KEPT_MS


# The producers of every topic that never had one. They never change.
NO_PRODUCERS: Final = Producers()


def _gap(stamp: ProducerStamp, expected: int) -> TopicsError:
    return TopicsError(
        Code.PRODUCER_SEQ_CONFLICT,
        f"the next Producer-Seq is {expected}",
        {"expected_seq": expected, "received_seq": stamp.seq},
    )
