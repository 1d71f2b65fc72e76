"""A producer's batches: the next batch to send, the meaning of a response.

The caller sends requests: `take` returns them, `answered` takes the result, `next_ms` returns when
to call again. Times are milliseconds of any monotonic clock.

These rules hold even if requests or answers are lost, late or reordered:

- Under one epoch a seq is always the same batch, so an old copy that arrives late is a repeat.
- The first request of an epoch goes alone: until it is accepted, every other would be refused.
- A gap is filled from below: a batch refused as too early waits for all batches before it.
- A batch is *in doubt* if a copy of it was sent and no response came. Batches are accepted in
order: if a batch was certainly not accepted, no later batch was accepted either.
- A new epoch begins only when nothing is under way, with the unacknowledged batches from seq 0 on.
  No batch may be in doubt, unless the server recognises it by its key; otherwise the producer ends.
- A repeat that this producer cannot have caused comes from another process, so its own batch is not
stored.
- A permanent failure ends the producer, so that no later record overtakes a failed one.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from itertools import takewhile
from typing import Final, TypeAlias

import msgspec

from topics_server.client.backoff import Backoff
from topics_server.client.errors import (
    BadAnswer,
    ClientError,
    Fenced,
    Forgotten,
    InDoubt,
    Throttled,
    Undelivered,
    Unreachable,
    asked_wait_ms,
    passes,
)
from topics_server.client.producing.targets import (
    NUMBER_MAX,
    Accepted,
    Beaten,
    Repeated,
    StampGap,
    Verdict,
)

PAUSES: Final = Backoff(base_ms=50, cap_ms=5000)
# Shorter than the time for which a topic remembers a key by default (two minutes).
KEY_MS: Final = 90_000


class Stored(msgspec.Struct, frozen=True):
    """An acknowledged batch.

    `first_seq`: the seq of its first record on a topic; `offset`: the end of the stream behind it.
    None if the server did not report it, as for some repeats. `repeated`: an earlier copy was
    stored.
    """

    epoch: int
    seq: int
    first_seq: int | None = None
    offset: str | None = None
    repeated: bool = False


class SendTerms(msgspec.Struct, frozen=True, kw_only=True):
    """The options of a producer's sends; `AsyncIdempotentProducer` explains them."""

    linger_ms: float = 5
    batch_records: int = 500
    batch_bytes: int = 256 * 1024
    in_flight: int = 4
    buffer_records: int = 10_000
    buffer_bytes: int = 8 * 1024 * 1024
    patience_ms: float | None = 30_000
    claim: bool = False
    is_keyed: bool = False
    pauses: Backoff = PAUSES

    def __post_init__(self) -> None:
        least = {
            "linger_ms": 0,
            "batch_records": 1,
            "batch_bytes": 1,
            "in_flight": 1,
            "buffer_records": 1,
            "buffer_bytes": 1,
        }
        for name, low in least.items():
            if getattr(self, name) < low:
                raise ValueError(f"{name} is {low} or more")
        if self.patience_ms is not None and self.patience_ms < 0:
            raise ValueError("patience_ms must be 0 or more, or None")


class ProducerState(enum.Enum):
    """The state of a batch."""

    READY = "ready"
    FLYING = "flying"
    HELD = "held"  # refused as too early: sent again once it is the first


class RecordBatch(msgspec.Struct, eq=False):
    """Records that are sent, accepted and refused together."""

    key: str
    delivery: Future[Stored]
    opened_ms: float
    records: list[bytes] = []
    size: int = 0
    seq: int = -1
    state: ProducerState = ProducerState.READY
    is_doubtful: bool = False  # in the current epoch
    was_doubtful: bool = False  # when an earlier epoch ended
    first_sent_ms: float | None = None

    @property
    def may_be_stored(self) -> bool:
        """Whether the server may have stored the batch."""
        return self.is_doubtful or self.was_doubtful


class Outgoing(msgspec.Struct, eq=False, frozen=True):
    """A request to send. A probe appends nothing, because no producer reaches its seq."""

    batch: RecordBatch
    epoch: int
    seq: int
    lowest: int
    is_probe: bool = False


OnFinished: TypeAlias = Callable[[RecordBatch, Stored | Undelivered], None]


class ProducerBatches:
    """The state of one producer.

    Without `epoch`, it requests the server's epoch and claims the next one.

    `seq`: where to continue in a given epoch; requests that another process sent under it may be
    repeated. `on_finished` is called once for every batch.
    """

    def __init__(
        self,
        terms: SendTerms,
        on_finished: OnFinished,
        epoch: int | None = None,
        seq: int | None = None,
    ) -> None:
        assert seq is None or epoch is not None, "seq needs an epoch"
        self.terms = terms
        self.epoch = epoch
        self.failure: ClientError | None = None
        self.held_records = 0
        self.held_bytes = 0
        self._on_finished = on_finished
        self._next_seq = seq or 0
        # A repeat below this seq comes from an earlier run of this producer.
        self._news_from = 0 if seq is None else NUMBER_MAX
        self._highest = -1
        # Whether a request of this epoch was accepted, which proves that this producer owns the
        # epoch.
        self._is_owned = False
        self._is_claimed = epoch is None
        self._window: deque[RecordBatch] = deque()
        self._open: RecordBatch | None = None
        self._flying = 0
        self._is_blocked = False  # nothing is sent before the next response
        self._reason: ClientError | None = None  # why nothing is sent until all responses are here
        self._limit = terms.in_flight
        self._pause_until_ms: float | None = None
        self._failures = 0
        self._failing_since_ms = 0.0

    # -- sending ------------------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        """Whether nothing is unacknowledged and no response is awaited."""
        return not self._window and self._open is None and not self._flying

    @property
    def next_seq(self) -> int:
        """The seq of the next batch."""
        return self._next_seq

    def has_room(self, size: int) -> bool:
        """Whether a record of this size may be added now; an empty buffer takes a record of any
        size.
        """
        if not self.held_records:
            return True
        terms = self.terms
        return (
            self.held_records < terms.buffer_records
            and self.held_bytes + size <= terms.buffer_bytes
        )

    def add(self, record: bytes, key: Callable[[], str], now_ms: float) -> tuple[RecordBatch, int]:
        """Take a record; returns its batch and its index there.

        Raises `Undelivered` after the end.
        """
        self.check()
        terms = self.terms
        batch = self._open
        if batch is not None and batch.size + len(record) > terms.batch_bytes:
            self._seal()
            batch = None
        if batch is None:
            delivery: Future[Stored] = Future()
            delivery.set_running_or_notify_cancel()  # its waiters cannot cancel it
            batch = self._open = RecordBatch(key(), delivery, now_ms, [])
        index = len(batch.records)
        batch.records.append(record)
        batch.size += len(record)
        self.held_records += 1
        self.held_bytes += len(record)
        if index + 1 == terms.batch_records or batch.size >= terms.batch_bytes:
            self._seal()
        return batch, index

    def check(self) -> None:
        """Raise `Undelivered` if the producer has ended."""
        if self.failure is not None:
            raise Undelivered(self.failure, in_doubt=False)

    def flush(self) -> list[RecordBatch]:
        """Send everything without lingering; returns the batches that are unacknowledged now."""
        if self._open is not None:
            self._seal()
        return list(self._window)

    def _seal(self) -> None:
        assert self._open is not None
        self._open.seq = self._next_seq
        self._next_seq += 1
        self._window.append(self._open)
        self._open = None

    def take(self, now_ms: float) -> list[Outgoing]:
        """The requests to send now."""
        if self.failure is not None or self._reason is not None or self._is_paused(now_ms):
            return []
        if self.epoch is None:
            return self._probe(now_ms)
        limit = self._limit if self._is_owned else 1
        found: list[Outgoing] = []
        for index, batch in enumerate(self._window):
            if batch.state is ProducerState.FLYING:
                continue
            self._is_blocked = self._flying >= limit or (
                batch.state is ProducerState.HELD and index > 0
            )
            if self._is_blocked:
                return found
            found.append(self._send(batch, now_ms))
        self._is_blocked = self._flying >= limit
        if not self._is_blocked and self._is_due(now_ms):
            self._seal()
            found.append(self._send(self._window[-1], now_ms))
        return found

    def _probe(self, now_ms: float) -> list[Outgoing]:
        if self._flying:
            return []
        self._is_blocked = False
        if not (self._window or self._is_due(now_ms)):
            return []
        if not self._window:
            self._seal()
        self._flying = 1
        self._is_blocked = True
        # The server always refuses this request; the error names the producer's position.
        return [Outgoing(self._window[0], 0, NUMBER_MAX, 0, is_probe=True)]

    def _send(self, batch: RecordBatch, now_ms: float) -> Outgoing:
        assert self.epoch is not None
        batch.state = ProducerState.FLYING
        if batch.first_sent_ms is None:
            batch.first_sent_ms = now_ms
        self._flying += 1
        self._highest = max(self._highest, batch.seq)
        return Outgoing(batch, self.epoch, batch.seq, self._window[0].seq)

    def _is_due(self, now_ms: float) -> bool:
        return self._open is not None and now_ms >= self._open.opened_ms + self.terms.linger_ms

    def _is_paused(self, now_ms: float) -> bool:
        return self._pause_until_ms is not None and now_ms < self._pause_until_ms

    def next_ms(self) -> float | None:
        """When `take` may return a request without another event; None: never."""
        if self.failure is not None or self._reason is not None:
            return None
        if self._flying and self._is_blocked:
            return None
        if self._window and not self._flying:
            return self._pause_until_ms or 0.0
        if self._open is None:
            return self._pause_until_ms if self._window else None
        due_ms = self._open.opened_ms + self.terms.linger_ms
        return max(due_ms, self._pause_until_ms or due_ms)

    # -- results ----------------------------------------------------------------------------

    def answered(self, out: Outgoing, verdict: Verdict, now_ms: float, chance: float) -> None:
        """Handle the result of a request.

        `chance`, from 0 to 1, shortens the pause that may follow.
        """
        self._flying -= 1
        assert self._flying >= 0, "an answer for each request"
        if self.failure is not None:
            return
        if out.is_probe:
            self._probed(verdict, now_ms, chance)
        else:
            assert out.epoch == self.epoch, "nothing is under way when an epoch begins"
            out.batch.state = ProducerState.READY
            self._judge(out, verdict, now_ms, chance)
        if self._reason is not None and not self._flying:
            self._conclude(now_ms)

    def _probed(self, verdict: Verdict, now_ms: float, chance: float) -> None:
        match verdict:
            case StampGap(expected=expected):
                self._begin(1 if expected else 0)
            case Beaten(epoch=epoch):
                self._begin(epoch + 1)
            case ClientError():
                self._failed(verdict, now_ms, chance)
            case _:
                self._reason = BadAnswer(
                    f"the answer is not from a server that supports producers: {verdict}"
                )

    def _judge(self, out: Outgoing, verdict: Verdict, now_ms: float, chance: float) -> None:
        batch = out.batch
        match verdict:
            case Accepted(first_seq=first_seq, offset=offset):
                self._news_from = min(self._news_from, out.seq)
                self._accept(batch, Stored(out.epoch, out.seq, first_seq, offset))
            case Repeated(first_seq=first_seq, offset=offset):
                foreign = self._foreign(batch, verdict)
                if foreign is None:
                    self._accept(batch, Stored(out.epoch, out.seq, first_seq, offset, True))
                else:
                    self._stop(foreign)
            case StampGap(expected=expected):
                if out.lowest <= expected < out.seq:
                    batch.state = ProducerState.HELD
                else:
                    self._stop(
                        Forgotten(
                            f"seq {out.seq} of epoch {out.epoch} was sent, the server expects "
                            f"{expected}: it has lost requests that it acknowledged",
                            expected,
                        )
                    )
            case Beaten(epoch=epoch):
                self._stop(
                    Fenced(
                        f"epoch {out.epoch} is over; the producer has moved to epoch {epoch}", epoch
                    )
                )
            case ClientError():
                if _may_be_stored(verdict):
                    batch.is_doubtful = True
                self._failed(verdict, now_ms, chance)

    def _foreign(self, batch: RecordBatch, repeat: Repeated) -> ClientError | None:
        """The error if a repeat does not come from this producer's own requests; None if it
        does.
        """
        assert self.epoch is not None
        if batch.seq < self._news_from:
            return None
        if not batch.is_doubtful or repeat.highest > self._highest:
            return Fenced(
                f"another process uses epoch {self.epoch} too: its seq {batch.seq} was used before",
                self.epoch,
            )
        if self._is_claimed and not self._is_owned:
            # The epoch belongs to this producer, or to another process that claimed at the same
            # moment.
            return Fenced(f"whose epoch {self.epoch} is cannot be known", self.epoch)
        return None

    def _accept(self, batch: RecordBatch, stored: Stored) -> None:
        self._is_owned = True
        self._failures = 0
        self._pause_until_ms = None
        self._limit = min(self.terms.in_flight, self._limit * 2)
        self._window.remove(batch)
        self._done(batch, stored)

    def _done(self, batch: RecordBatch, outcome: Stored | Undelivered) -> None:
        self.held_records -= len(batch.records)
        self.held_bytes -= batch.size
        self._on_finished(batch, outcome)

    def _failed(self, error: ClientError, now_ms: float, chance: float) -> None:
        """Pause before the next try, or give up."""
        if not passes(error):
            self._stop(error)
            return
        if not self._failures:
            self._failing_since_ms = now_ms
        terms = self.terms
        if not self._is_paused(now_ms):
            self._failures += 1
            self._pause_until_ms = now_ms
        assert self._pause_until_ms is not None
        wait_ms = max(terms.pauses.wait_ms(max(self._failures, 1), chance), 1)
        wait_ms = max(wait_ms, asked_wait_ms(error))
        self._pause_until_ms = max(self._pause_until_ms, now_ms + wait_ms)
        # The server would refuse later batches as too early: send one at a time until one is
        # accepted.
        self._limit = 1
        waited_ms = self._pause_until_ms - self._failing_since_ms
        if terms.patience_ms is not None and waited_ms > terms.patience_ms:
            self._stop(error)

    def _stop(self, reason: ClientError) -> None:
        """Send nothing more until all responses are here; a later epoch overrides other reasons."""
        if self._reason is None or isinstance(reason, Fenced):
            self._reason = reason

    # -- the end of an epoch -----------------------------------------------------------------------

    def _conclude(self, now_ms: float) -> None:
        """Nothing is under way: begin a new epoch, or fail the remaining batches."""
        reason, self._reason = self._reason, None
        assert reason is not None
        may_claim = self.terms.claim or (self._is_claimed and not self._is_owned)
        if not (isinstance(reason, Fenced) and may_claim and self.epoch is not None):
            self.fail(reason)
            return
        doubtful = list(takewhile(lambda batch: batch.may_be_stored, self._window))
        if doubtful and not self._knows_keys(doubtful[0], now_ms):
            error = InDoubt(f"{reason}; the answers to the last requests before that were lost")
            error.__cause__ = reason
            self.fail(error)
            return
        for batch in doubtful:
            batch.was_doubtful = True
        self._begin(max(reason.epoch, self.epoch) + 1)

    def _knows_keys(self, oldest: RecordBatch, now_ms: float) -> bool:
        """Whether the server recognises a second copy of the oldest batch by its key."""
        assert oldest.first_sent_ms is not None
        return self.terms.is_keyed and now_ms - oldest.first_sent_ms <= KEY_MS

    def _begin(self, epoch: int) -> None:
        assert not self._flying
        if epoch > NUMBER_MAX:
            self.fail(Fenced("there is no later epoch", NUMBER_MAX))
            return
        self.epoch = epoch
        self._is_claimed, self._is_owned, self._news_from = True, False, 0
        self._highest = -1
        self._failures = 0
        self._pause_until_ms = None
        for seq, batch in enumerate(self._window):
            batch.seq, batch.state, batch.is_doubtful = seq, ProducerState.READY, False
        self._next_seq = len(self._window)

    def fail(self, reason: ClientError) -> None:
        """Finish the remaining batches as undelivered; nothing more is taken or sent."""
        if self.failure is not None:
            return
        self.failure = reason
        left, self._window = self._window, deque()
        if self._open is not None:
            left.append(self._open)
            self._open = None
        in_doubt = True
        for batch in left:
            # Still in flight: the caller does not wait for the response.
            in_doubt = in_doubt and (batch.may_be_stored or batch.state is ProducerState.FLYING)
            self._done(batch, Undelivered(reason, in_doubt=in_doubt))


def _may_be_stored(error: ClientError) -> bool:
    """Whether the server may have executed the request although it ended with this error."""
    if isinstance(error, Unreachable):
        return error.sent
    if isinstance(error, BadAnswer):
        return True
    status = getattr(error, "status", 0)
    return status >= 500 and not isinstance(error, Throttled)
