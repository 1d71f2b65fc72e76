"""The values of queue calls.

A handler gets a `Job`, whose payload is decoded only when it is read. Times are
milliseconds: `_ms` lengths, `ts_ms` and `deadline_ms` since 1970 by the server's clock. No I/O;
`calls` reads and writes these.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any, Final, TypeVar

import msgspec

T = TypeVar("T")
_FIRST_USE: Final = threading.Lock()


class Lost(threading.Event):
    """Set when a job's lease is lost: another worker may process the job, so stop.

    `is_set()` and `wait(timeout)` (seconds, blocking) for threads, `wait_async()` for coroutines.
    """

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[Callable[[], None]] = []
        self._adding = threading.Lock()

    def set(self) -> None:
        """Wake every waiter."""
        with self._adding:
            super().set()
            calls, self._calls = self._calls, []
        for call in calls:
            call()

    async def wait_async(self) -> None:
        """Return once it is set."""
        # Its caller runs in a loop, so this module is there; verbs without a loop need none.
        import asyncio

        loop = asyncio.get_running_loop()
        is_lost = asyncio.Event()

        def wake() -> None:
            loop.call_soon_threadsafe(is_lost.set)

        with self._adding:
            if self.is_set():
                return
            self._calls.append(wake)
        try:
            await is_lost.wait()
        finally:
            with self._adding:
                if wake in self._calls:
                    self._calls.remove(wake)


class Job(msgspec.Struct, kw_only=True, eq=False):
    """One delivery of a job.

    `seq` names the job, `lease_id` this delivery of it. `deliveries` counts from 1. `raw` and
    `raw_meta` are the enqueued JSON, byte for byte. `trace`: the `traceparent` of its append.
    `lost` is set when the lease is lost.
    """

    queue: str
    seq: int
    lease_id: str
    deadline_ms: int
    ts_ms: int
    deliveries: int
    raw: bytes
    tag: str | None = None
    raw_meta: bytes | None = None
    trace: str | None = None
    lost: Lost = msgspec.field(default_factory=Lost)

    @property
    def data(self) -> Any:
        """The payload as plain Python values."""
        return plain(self.raw)

    @property
    def meta(self) -> dict[str, Any]:
        """The decoded `meta`; empty without one."""
        found = {} if self.raw_meta is None else plain(self.raw_meta)
        assert isinstance(found, dict), "the server takes objects only"
        return found

    def data_as(self, kind: type[T]) -> T:
        """The payload as a dataclass, a msgspec Struct or any other type that msgspec supports.

        Raises `msgspec.ValidationError` if it does not fit.
        """
        return _decoder_of(kind).decode(self.raw)


def _decoder_of(kind: type[T]) -> msgspec.json.Decoder[T]:
    """A decoder of the caller's type."""
    # Two threads that use a Struct type at once for the first time crash the process (decision
    # 0361).
    with _FIRST_USE:
        return msgspec.json.Decoder(kind)


def plain(text: bytes | msgspec.Raw) -> Any:
    """A JSON text as plain values. A number that exceeds a float, like 1e400, becomes infinite."""
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        return json.loads(bytes(text))


class NewJob(msgspec.Struct, kw_only=True, frozen=True):
    """A job to enqueue with others: `data` is anything msgspec encodes as JSON.

    `msgspec.Raw(bytes)` is sent byte for byte. At most one of `delay_ms` (from now) and
    `deliver_at_ms` (since 1970) holds the job back.
    """

    data: Any
    tag: str | None = None
    meta: dict[str, Any] | None = None
    delay_ms: int | None = None
    deliver_at_ms: int | None = None


class Enqueued(msgspec.Struct):
    """Stored jobs; `deduped`: an earlier call with the same key had stored them."""

    first_seq: int
    last_seq: int
    created: bool = False
    deduped: bool = False

    @property
    def seq(self) -> int:
        """The seq of the only job."""
        assert self.first_seq == self.last_seq, "several were enqueued"
        return self.first_seq


class Claimed(msgspec.Struct):
    """Jobs leased by one call, by ascending seq; `ready` more were claimable after it.

    `ack`: the result for the finished jobs in the call; its counts of the queue are 0. None if the
    call had none, or if an older server does not support acks in claims.
    """

    jobs: list[Job]
    ready: int = 0
    ack: Acked | None = None


class Acked(msgspec.Struct):
    """`acked` jobs are done and deleted; `skipped` seqs are not, for the `reasons` by seq."""

    acked: int
    skipped: list[int] = []
    reasons: dict[int, str] = {}
    ready: int = 0
    in_flight: int = 0


class Nacked(msgspec.Struct):
    """`nacked` jobs are released; `skipped` seqs are not, for the `reasons` by seq."""

    nacked: int
    skipped: list[int] = []
    reasons: dict[int, str] = {}
    ready: int = 0
    in_flight: int = 0


class Extended(msgspec.Struct):
    """`extended` leases end at `deadlines` (ms since 1970, by seq); `skipped` seqs are lost."""

    extended: int
    skipped: list[int] = []
    reasons: dict[int, str] = {}
    deadlines: dict[int, int] = {}


class Counters(msgspec.Struct):
    """How many jobs are claimable, delayed, leased, or were moved to the dead letters."""

    ready: int = 0
    in_flight: int = 0
    dead_lettered: int = 0
    delayed: int = 0


class QueueState(msgspec.Struct):
    """A queue's state. `config` has the server's form."""

    topic: str
    head_seq: int
    count: int
    queue: Counters
    config: dict[str, Any] = {}

    @property
    def lease_ms(self) -> int:
        """How long a claim holds a job by default."""
        found = self.config.get("lease_ms", 30_000)
        assert isinstance(found, int), "a number in the contract"
        return found


class Stats(msgspec.Struct):
    """The counts of a worker's jobs.

    `done` jobs were acked after their handler returned, `dropped` jobs after `Drop` or `Dead`.
    `failed` jobs were released for another try. `lost` jobs lost their lease before their result
    was stored. `released` jobs were returned unfinished by a stop.
    """

    done: int = 0
    dropped: int = 0
    failed: int = 0
    lost: int = 0
    released: int = 0
