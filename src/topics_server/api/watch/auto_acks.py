"""Commits the positions of consumers up to the records that a stream's socket took: `ack: auto`.

A commit means that the bytes were sent, not that the client handled the records: delivery is at
most once. One commit of a consumer is in flight at a time; the next commits the newest position. A
commit that fails for now is repeated with the next records, or at the end of the stream. Loop
thread only. Used by `handlers`, `api/live/stream` and `api/websocket/handlers`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from topics_server.api.context import StorePort
from topics_server.api.watch.broadcast import BroadcastStream
from topics_server.engine.subscribe.cursors import Cursor
from topics_server.engine.subscribe.dispatcher import SubscriptionDispatcher
from topics_server.runtime.metrics import log
from topics_server.values.errors import Code, StorageError, TopicsError

# After an error with one of these codes, the consumer needs no more commits.
_LOST: Final = (Code.CONSUMER_NOT_FOUND, Code.TOPIC_NOT_FOUND, Code.INVALID_REQUEST)
# Commits under way; a loop holds its tasks only weakly.
_tasks: Final[set[asyncio.Task[None]]] = set()


class _Ack:
    """One consumer. `seq`: the newest position to commit. `topic_id`: the id of its topic."""

    __slots__ = ("consumer", "is_committing", "seq", "topic_id")

    def __init__(self, consumer: str, topic_id: int, seq: int) -> None:
        self.consumer = consumer
        self.topic_id = topic_id
        self.seq = seq
        self.is_committing = False


class AutoAcks:
    """The consumers of one stream, by topic."""

    def __init__(
        self,
        store: StorePort,
        dispatcher: SubscriptionDispatcher,
        stream: BroadcastStream,
        lost: Callable[[TopicsError], bytes],
    ) -> None:
        """`lost` makes the frame that reports a consumer that no longer exists."""
        self._store = store
        self._dispatcher = dispatcher
        self._stream = stream
        self._lost = lost
        self._acks: dict[str, _Ack] = {}
        stream.on_taken = self._taken

    def add(self, cursor: Cursor, consumer: str) -> None:
        """Commit for a consumer from now on.

        The caller follows the cursor's topic right after this.
        """
        view = self._dispatcher.resolve(cursor.name)
        if view is not None:
            # The cursor may be of an earlier topic of that name.
            seq = cursor.seq if cursor.topic_id == view.topic_id else 0
            self._acks[cursor.name] = _Ack(consumer, view.topic_id, seq)

    def remove(self, name: str) -> None:
        """Commit nothing more for a topic."""
        self._acks.pop(name, None)

    def _taken(self) -> None:
        """The socket has taken all records up to the positions of the cursors."""
        for name, ack in self._acks.items():
            cursor = self._stream.cursors.get(name)
            # A topic that was created again has other consumers.
            if cursor is None or cursor.topic_id != ack.topic_id or cursor.seq <= ack.seq:
                continue
            before, ack.seq = ack.seq, cursor.seq
            if not ack.is_committing:
                ack.is_committing = True
                task = asyncio.get_running_loop().create_task(self._commit(name, ack, before))
                _tasks.add(task)
                task.add_done_callback(_tasks.discard)

    async def _commit(self, name: str, ack: _Ack, committed: int) -> None:
        try:
            while committed < ack.seq:
                seq = ack.seq
                await self._store.commit_consumer(name, ack.consumer, seq, topic_id=ack.topic_id)
                committed = seq
        except TopicsError as error:
            if error.code in _LOST:
                self._lose(name, ack, error)
            else:
                log.debug("no commit for %s of %s: %s", ack.consumer, name, error.message)
        except StorageError as error:
            log.debug("no commit for %s of %s: %s", ack.consumer, name, error)
        finally:
            ack.is_committing = False
            ack.seq = committed

    def _lose(self, name: str, ack: _Ack, error: TopicsError) -> None:
        """The consumer no longer exists: report that, and continue the stream without commits."""
        if self._acks.get(name) is ack:
            del self._acks[name]
            self._stream.push(self._lost(error))
