"""The lease log of a queue, appended to an ordinary topic.

It does not slow claims: events are collected in memory, and a task appends them in batches. If the
topic is full, refuses appends or is too slow, events are lost; the server's log reports this once,
and the queue never waits. Called by `queue/service` and `queue/dispatch/dead_letter_moves`; loop
thread only.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Iterable
from typing import Final, Literal, Protocol

import msgspec

from topics_server.engine.answers import Appended
from topics_server.queue.leases.jobs import lease_text
from topics_server.values.appends import DecodedAppend, decode_append
from topics_server.values.errors import StorageError, TopicsError
from topics_server.values.model import TopicConfig

log: Final = logging.getLogger(__name__)

Event = Literal["claimed", "acked", "released", "extended", "expired", "dead_lettered"]

# The maximum of events in one append, and of events that wait for one topic.
_BATCH_EVENTS: Final = 1_000
WAITING_EVENTS_MAX: Final = 65_536

_encode: Final = msgspec.json.Encoder().encode


class LeaseEvent(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """One lease event as the log stores it.

    `epoch`: the incarnation of the queue's name; a queue that was dropped and made again uses the
    same seqs again. `deadline`: when the lease ends, or ended; `available`: when the job can be
    claimed again. All times in ms. `error`: the reason of the nack, or the job's last reason when
    it becomes a dead letter.
    """

    event: Event
    queue: str
    epoch: int
    seq: int
    ts: int
    node: str = ""
    lease_id: str = ""
    deliveries: int = 0
    deadline: int = 0
    available: int = 0
    error: str = ""


def lease_event(
    event: Event,
    queue: str,
    epoch: int,
    seq: int,
    ts: int,
    *,
    node: str = "",
    lease_id: int = 0,
    deliveries: int = 0,
    deadline_ms: int = 0,
    available_ms: int = 0,
    error: str = "",
) -> LeaseEvent:
    """An event about the lease with this id; 0: no lease."""
    shown = lease_text(lease_id) if lease_id else ""
    return LeaseEvent(
        event, queue, epoch, seq, ts, node, shown, deliveries, deadline_ms, available_ms, error
    )


class Appender(Protocol):
    """The method of the store that the log calls."""

    async def append(
        self,
        name: str,
        body: bytes,
        decoded: DecodedAppend,
        *,
        header_key: str | None,
        config: TopicConfig | None,
    ) -> Appended:
        """See `engine.store`."""
        ...


class LeaseLogs:
    """The lease logs of all queues."""

    def __init__(self, store: Appender) -> None:
        self._store = store
        self._waiting: dict[str, deque[LeaseEvent]] = {}
        self._writing: asyncio.Task[None] | None = None
        self._is_refused = False
        self.lost_count = 0

    def note(self, name: str, events: Iterable[LeaseEvent]) -> None:
        """Append events to the topic `name`, soon and in this order."""
        waiting = self._waiting.setdefault(name, deque())
        waiting.extend(events)
        over = len(waiting) - WAITING_EVENTS_MAX
        if over > 0:
            for _ in range(over):
                waiting.popleft()
            self._lose(name, over, "it is slower than the queue")
        if self._writing is None and waiting:
            self._writing = asyncio.get_running_loop().create_task(self._write())

    async def flush(self) -> None:
        """Return when every event is appended or lost."""
        while self._writing is not None:
            await asyncio.wait((self._writing,))

    async def _write(self) -> None:
        try:
            # The task starts in the next turn, so that events of this turn are appended together.
            while self._waiting:
                name = next(iter(self._waiting))
                # Move this log to the end if it has more events, so that every log gets its turn.
                waiting = self._waiting.pop(name)
                batch = [waiting.popleft() for _ in range(min(len(waiting), _BATCH_EVENTS))]
                if waiting:
                    self._waiting[name] = waiting
                await self._append(name, batch)
        finally:
            self._writing = None

    async def _append(self, name: str, batch: list[LeaseEvent]) -> None:
        body = _encode({"records": [{"data": event, "tag": event.event} for event in batch]})
        try:
            await self._store.append(name, body, decode_append(body), header_key=None, config=None)
        except TopicsError as error:
            self._lose(name, len(batch), error.message)
        except StorageError as error:
            self._lose(name, len(batch), str(error))
        else:
            self._is_refused = False

    def _lose(self, name: str, count: int, why: str) -> None:
        self.lost_count += count
        if not self._is_refused:
            self._is_refused = True
            log.warning("lease log %s loses events: %s", name, why)
