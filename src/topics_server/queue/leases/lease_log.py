"""The lease log of a queue, appended to an ordinary topic.

Off the claim's path: events are noted in memory and appended in batches by a task of their own. A
topic that is full, refused or too slow loses events, which is told once in the server's log, and
never holds up a queue. Called by `queue/service` and `queue/dispatch/dead_letter_moves`; loop
thread only.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable
from typing import Final, Literal, Protocol

import msgspec

from topics_server.engine.answers import Appended
from topics_server.queue.leases.jobs import lease_text
from topics_server.runtime.metrics import log
from topics_server.values.appends import DecodedAppend, decode_append
from topics_server.values.errors import StorageError, TopicsError
from topics_server.values.model import TopicConfig

Event = Literal["claimed", "acked", "released", "extended", "expired", "dead_lettered"]

# Events of one append, and of one topic that wait for theirs.
_BATCH_EVENTS: Final = 1_000
WAITING_EVENTS_MAX: Final = 65_536

_encode: Final = msgspec.json.Encoder().encode


class LeaseEvent(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """One thing that happened to a lease, as it stands in the log.

    `epoch`: which incarnation of the queue's name it was; a queue that was dropped and made again
    gives the same seqs once more. `deadline`: when the lease ends, or ended; `available`: when the
    job can be claimed again. All times in ms.
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
) -> LeaseEvent:
    """An event about the lease of this number; 0 is no lease."""
    shown = lease_text(lease_id) if lease_id else ""
    return LeaseEvent(
        event, queue, epoch, seq, ts, node, shown, deliveries, deadline_ms, available_ms
    )


class Appender(Protocol):
    """What the log needs of the store."""

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
        """Have events appended to the topic `name`, soon and in this order."""
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
        """Return when everything noted is appended or lost."""
        while self._writing is not None:
            await asyncio.wait((self._writing,))

    async def _write(self) -> None:
        try:
            # The task starts in the next turn: events of this one go together.
            while self._waiting:
                name = next(iter(self._waiting))
                # Out and, if there is more, in again: every log has its turn.
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
