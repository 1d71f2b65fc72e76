"""Delivers topic events to many streams, each batch rendered once (§7.6).

A `BroadcastStream` is one connection that follows topics. The dispatcher pumps it: it takes the
ready batches, topic by topic in turn, and passes their frames to the socket together. While a
socket is full nothing is read for it: its cursors lag, and the missed records are sent later in
larger batches. Invariants: frames are sent in the order in which they were taken; frames that were
taken but not sent are taken back when the stream ends. Loop thread only. Used by `watch` and
`websocket`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Final, NamedTuple, Protocol

from topics_server.api.watch.send_queue import Dialect as Dialect
from topics_server.api.watch.send_queue import Send, send_queue_of
from topics_server.api.watch.stream_timer import EARLY_MS, Look, StreamTimer
from topics_server.engine.subscribe.cursors import Cursor
from topics_server.engine.subscribe.dispatcher import SubscriptionDispatcher, Writes
from topics_server.engine.subscribe.subscription import (
    BroadcastGroup,
    EventBatch,
    Member,
    Subscription,
    SubscriptionOptions,
    TopicDeleted,
)
from topics_server.runtime.clock import monotonic_ms, now_ms
from topics_server.values.errors import StorageError, TopicsError
from topics_server.values.json_cache import JsonCache

# Once a stream has taken so many bytes, other streams have their turn.
_PUMP_BYTES: Final = 262_144
# The longest turn of a stream: with a filter, many pages in a row may hold nothing to send.
_PUMP_MS: Final = 2.0
# How long an ended stream has to take its last frame.
_LINGER_S: Final = 5.0
_SLOW_CHECKS: Final = 8
# Close codes of WebSockets (RFC 6455); an HTTP response has none.
GOING_AWAY: Final = 1001
REFUSED: Final = 1008
TOO_SLOW: Final = 1013
FAILED: Final = 1011


class StreamOwner(Protocol):
    """The handler that also writes to a stream's connection, to answer the client."""

    def before_frames(self) -> None:
        """The stream is about to take frames: push everything that must precede them."""
        ...

    def drain(self) -> None:
        """The server is shutting down: end the stream, with `GOING_AWAY`, as soon as possible."""
        ...


class Fanout:
    """All streams of one server, and their one timer (`timer`)."""

    def __init__(
        self,
        dispatcher: SubscriptionDispatcher,
        encoded: JsonCache,
        *,
        buffer_grace_ms: int,
        slow_consumer_timeout_ms: int,
    ) -> None:
        self.dispatcher: Final = dispatcher
        self.encoded: Final = encoded
        self.buffer_grace_ms: Final = buffer_grace_ms
        self.slow_consumer_timeout_ms: Final = slow_consumer_timeout_ms
        self.streams: Final[set[BroadcastStream]] = set()
        self.slow_count = 0
        self.timer: Final = StreamTimer()

    @property
    def stream_count(self) -> int:
        """Connections that follow topics now."""
        return len(self.streams)

    def open(
        self,
        send: Send,
        dialect: Dialect,
        *,
        heartbeat_ms: int,
        id_of: Callable[[], bytes] | None = None,
        owner: StreamOwner | None = None,
        on_gone: Callable[[str], None] | None = None,
    ) -> BroadcastStream:
        """A stream on a connection whose response has been started.

        `id_of` gives the text of the `id:` line for the stream's current cursors. `on_gone` is
        called with the name of a deleted topic, after the frame that reports its deletion.
        """
        stream = BroadcastStream(self, send, dialect, heartbeat_ms, id_of, owner, on_gone)
        self.streams.add(stream)
        self.timer.beat_at(stream, monotonic_ms() + heartbeat_ms, heartbeat_ms)
        return stream

    def drain(self) -> None:
        """The server is shutting down: end every stream now; its client reconnects by itself."""
        for stream in tuple(self.streams):
            if stream.owner is None:
                stream.end(code=GOING_AWAY, at_once=True)
            else:
                stream.owner.drain()


class _Shared(NamedTuple):
    """The bytes of a batch for streams of one kind at one position: as frames, and as one write."""

    frames: list[bytes]
    wire: bytes | None
    size: int


class BroadcastStream:
    """One connection that follows topics."""

    __slots__ = (
        "_backlog",
        "_before",
        "_dialect",
        "_fanout",
        "_dispatcher",
        "_fetching",
        "_heartbeat_ms",
        "_id_of",
        "_is_filtered",
        "_is_resting",
        "_is_shared",
        "_kind",
        "_on_gone",
        "_send_queue",
        "_ready",
        "_subscriptions",
        "_waiting",
        "cursors",
        "is_over",
        "next_look",
        "on_taken",
        "owner",
    )

    def __init__(
        self,
        fanout: Fanout,
        send: Send,
        dialect: Dialect,
        heartbeat_ms: int,
        id_of: Callable[[], bytes] | None,
        owner: StreamOwner | None = None,
        on_gone: Callable[[str], None] | None = None,
    ) -> None:
        self.owner = owner
        self._on_gone = on_gone
        self.cursors: dict[str, Cursor] = {}
        # Called when the socket has taken everything up to the cursors. A stream with this callback
        # joins no broadcast group, because a group moves cursors without calling it.
        self.on_taken: Callable[[], None] | None = None
        self.is_over = False
        # Its next check.
        self.next_look: Look | None = None
        self._fanout = fanout
        self._dispatcher = fanout.dispatcher
        self._dialect = dialect
        self._id_of = id_of
        # Streams of one kind get the same bytes if their ids are the same.
        self._kind = (dialect, id_of is not None)
        # Whether its frames have no id, or an id of a single topic.
        self._is_shared = True
        # Whether cursors may move without a frame.
        self._is_filtered = False
        # The socket is full, and the dispatcher does not notify this stream.
        self._is_resting = False
        self._heartbeat_ms = heartbeat_ms
        self._send_queue = send_queue_of(send, dialect, self._on_room)
        self._subscriptions: dict[str, Subscription] = {}
        # Cursors in topics that do not exist yet.
        self._waiting: dict[str, Cursor] = {}
        # Subscriptions with something to deliver, in turn. `_backlog`: those that may not fetch
        # yet.
        self._ready: deque[Subscription] = deque()
        self._backlog: list[Subscription] = []
        self._fetching: Subscription | None = None
        # The cursors' positions before the frames that are not sent yet.
        self._before: dict[Cursor, tuple[int, int, int]] = {}

    # --- what it follows ----------------------------------------------------------------------

    def follow(self, cursor: Cursor, options: SubscriptionOptions) -> None:
        """Follow a topic from its cursor on; replaces a subscription of the same name.

        A missing topic is reported as deleted, unless its cursor waits for it.
        """
        if self.is_over:
            return
        self._leave()
        self.unfollow(cursor.name)
        self.cursors[cursor.name] = cursor
        self._is_shared = self._id_of is None or len(self.cursors) == 1
        self._is_filtered = self._is_filtered or options.matcher is not None
        subscription = self._dispatcher.follow(self, cursor, options)
        if subscription is not None:
            self._subscriptions[cursor.name] = subscription
            self.notify(subscription)
            return
        if cursor.is_waiting:
            self._waiting[cursor.name] = cursor
            self._dispatcher.creations.wait(cursor, partial(self._arrived, cursor, options))
            return
        event = TopicDeleted(cursor.name, cursor.seq)
        self._put(self._dialect.render(event, self._fanout.encoded))
        self._dispatcher.again(self)
        if self._on_gone is not None:
            self._on_gone(cursor.name)

    def _arrived(self, cursor: Cursor, options: SubscriptionOptions) -> None:
        """The topic of a waiting cursor was created."""
        if self._waiting.get(cursor.name) is cursor:
            self.follow(cursor, options)

    def unfollow(self, name: str) -> bool:
        """Stop following a topic. Returns whether it was followed or waited for."""
        subscription = self._subscriptions.pop(name, None)
        waiting = self._waiting.pop(name, None)
        if waiting is not None:
            self._dispatcher.creations.stop_waiting(waiting)
        self.cursors.pop(name, None)
        self._is_shared = self._id_of is None or len(self.cursors) == 1
        if subscription is None:
            return waiting is not None
        self._drop(subscription)
        return True

    def follows(self, name: str) -> bool:
        """Whether the topic is followed; False once it was reported as deleted."""
        return name in self._subscriptions or name in self._waiting

    def _drop(self, subscription: Subscription) -> None:
        self._dispatcher.unfollow(subscription)
        if subscription.is_ready:
            self._ready.remove(subscription)
            subscription.is_ready = False
        if subscription in self._backlog:
            self._backlog.remove(subscription)
        if self._fetching is subscription:
            self._fetched()

    def notify(self, subscription: Subscription) -> None:
        """See `dispatcher.Reader`."""
        if subscription.is_ready or subscription.is_fetching:
            return
        if self._fetching is subscription:
            self._fetched()
        subscription.is_ready = True
        self._ready.append(subscription)

    def _fetched(self) -> None:
        """The stream's only fetch is over: other subscriptions may fetch."""
        self._fetching = None
        backlog, self._backlog = self._backlog, []
        for subscription in backlog:
            self.notify(subscription)

    def fail(self, subscription: Subscription, error: TopicsError | StorageError) -> None:
        """See `TopicReader`: the stream ends, its client may reconnect."""
        message = f'topic "{subscription.cursor.name}" cannot be read'
        self.end(self._dialect.failed(500, message), FAILED)

    # --- taking -------------------------------------------------------------------------------

    def pump(self) -> None:
        """See `dispatcher.TopicReader`: take ready batches, up to a budget, and send them."""
        if self.owner is not None:
            self.owner.before_frames()
        if self.is_over or not self._send_queue.has_room():
            # Free the fetched batches: other readers need the memory.
            for subscription in self._ready:
                subscription.fetched = None
            if not self.is_over and not self._is_resting:
                self._is_resting = True
                for subscription in self._subscriptions.values():
                    self._dispatcher.rest(subscription)
            self._watch_slow()
            return
        taken_bytes = 0
        ready = self._ready
        until_ms = monotonic_ms() + _PUMP_MS
        while ready and taken_bytes < _PUMP_BYTES:
            subscription = ready.popleft()
            subscription.is_ready = False
            batch = self._dispatcher.read(self, subscription, may_fetch=self._fetching is None)
            if batch is not None:
                taken_bytes += self._take(subscription, batch)
            elif subscription.is_fetching:
                self._fetching = subscription
            else:
                self._backlog.append(subscription)
            if monotonic_ms() > until_ms:
                break
        self._flush()
        if ready and not self._send_queue.is_blocked:
            self._dispatcher.again(self)

    def _take(self, subscription: Subscription, batch: EventBatch) -> int:
        """Send a batch's frames and move the cursor behind them; returns the number of bytes."""
        cursor = subscription.cursor
        if self._is_shared:
            size = self._take_shared(subscription, batch)
        else:
            self._keep(cursor)
            size = self._take_own(subscription, batch)
        if subscription.must_tell(batch):
            head_seq = subscription.topic.log.head_seq
            self._put(self._dialect.position(cursor.name, cursor.seq, head_seq))
        self._dispatcher.await_tags(subscription)
        if batch.more:
            subscription.is_ready = True
            self._ready.append(subscription)
        elif batch.is_last:
            self._subscriptions.pop(cursor.name)
            self._drop(subscription)
            if self._on_gone is not None:
                self._on_gone(cursor.name)
        return size

    def give(
        self, subscription: Subscription, batch: EventBatch, now: float, writes: Writes
    ) -> bool:
        """See `TopicReader`: take a batch at once, unless something must be sent before it."""
        if self.owner is not None:
            self.owner.before_frames()
        if self._ready or not self._is_shared or self.is_over:
            return False
        shared: _Shared = batch.encoded.get(self._kind) or self._shared_of(subscription, batch)
        wire = shared.wire
        writer = None if wire is None else self._send_queue.writer(now)
        if wire is None or writer is None:
            return False
        # The subscription is at the head, so only its seqs change.
        subscription.cursor.seq = subscription.reported_seq = batch.end_seq
        writes.append((writer, wire))
        self._dispatcher.await_tags(subscription)
        is_alone = self.owner is None and len(self._subscriptions) == 1
        if self.on_taken is not None:
            self.on_taken()
        elif is_alone and not self._is_filtered and self._fetching is None:
            writer = self._send_queue.claim(self._leave)
            if writer is not None:
                self._dispatcher.join(subscription, self._kind, Member(writer, self._wire))
        return True

    def _leave(self) -> None:
        """The socket takes no more, or is gone: leave the broadcast group."""
        for subscription in self._subscriptions.values():
            self._dispatcher.leave(subscription)

    def _wire(self, subscription: Subscription, batch: EventBatch) -> bytes | None:
        """The bytes that deliver a batch, for every connection of this kind."""
        return self._shared_of(subscription, batch).wire

    def _shared_of(self, subscription: Subscription, batch: EventBatch) -> _Shared:
        """The bytes for every stream of this kind at this position."""
        shared: _Shared | None = batch.encoded.get(self._kind)
        if shared is None:
            shared = batch.encoded[self._kind] = self._render(subscription, batch)
        return shared

    def _take_shared(self, subscription: Subscription, batch: EventBatch) -> int:
        shared = self._shared_of(subscription, batch)
        if shared.wire is None or not self._send_queue.write(shared.wire, monotonic_ms()):
            self._keep(subscription.cursor)
            self._send_queue.put(shared.frames)
        subscription.move(batch, batch.end_seq)
        return shared.size

    def _keep(self, cursor: Cursor) -> None:
        """Remember a cursor's position before it moves for frames that are not sent yet."""
        self._before.setdefault(cursor, (cursor.topic_id, cursor.epoch, cursor.seq))

    def _render(self, subscription: Subscription, batch: EventBatch) -> _Shared:
        frames = self._frames(batch)
        if self._id_of is not None:
            cursor = subscription.cursor
            shared_cursor, cursor.shared_cursor = cursor.shared_cursor, None
            before = (cursor.topic_id, cursor.epoch, cursor.seq)
            try:
                for index, seq in enumerate(batch.seqs):
                    subscription.move(batch, seq)
                    frames[index] = b"id: %b\n%b" % (self._id_of(), frames[index])
            finally:
                cursor.topic_id, cursor.epoch, cursor.seq = before
                cursor.shared_cursor = shared_cursor
        wire = None
        if frames and self._dialect.is_joined:
            wire = self._dialect.wire(b"".join(frames))
        elif frames:
            wire = b"".join(map(self._dialect.wire, frames))
        return _Shared(frames, wire, sum(map(len, frames)))

    def _take_own(self, subscription: Subscription, batch: EventBatch) -> int:
        """Send shared frames with this stream's own ids."""
        frames: list[bytes] | None = batch.encoded.get(self._dialect)
        if frames is None:
            frames = batch.encoded[self._dialect] = self._frames(batch)
        for frame, seq in zip(frames, batch.seqs, strict=True):
            subscription.move(batch, seq)
            self._put(frame)
        subscription.move(batch, batch.end_seq)
        return sum(map(len, frames))

    def _frames(self, batch: EventBatch) -> list[bytes]:
        return [self._dialect.render(event, self._fanout.encoded) for event in batch.events]

    def _put(self, frame: bytes) -> None:
        if self._id_of is not None:
            frame = b"id: %b\n%b" % (self._id_of(), frame)
        self._send_queue.put((frame,))

    # --- sending ------------------------------------------------------------------------------

    def push(self, payload: bytes) -> None:
        """Send a frame that is no event (an answer, a comment), after the frames that are taken
        already.
        """
        if not self.is_over:
            self._send_queue.put((payload,))
            self._flush()

    async def flushed(self) -> None:
        """Return when nothing waits for the socket."""
        await self._send_queue.flushed()

    def _flush(self) -> None:
        self._send_queue.flush()
        if self._send_queue.is_blocked:
            self._watch_slow()
            return
        self._before.clear()
        if self.on_taken is not None:
            self.on_taken()

    def _on_room(self, full_ms: float) -> None:
        """The socket was full for `full_ms`, and takes more now."""
        if self.is_over:
            return
        if full_ms > self._fanout.buffer_grace_ms:
            # Records lost meanwhile are reported as for a reader that was away (§7.6).
            for subscription in self._subscriptions.values():
                subscription.was_away = True
        if not self._send_queue.is_blocked:
            self._before.clear()
            if self.on_taken is not None:
                self.on_taken()
            if self._is_resting:
                self._is_resting = False
                for subscription in self._subscriptions.values():
                    self._dispatcher.back(subscription)
            self._dispatcher.again(self)

    def _watch_slow(self) -> None:
        """The socket is full: let the timer check it soon."""
        if not self.is_over:
            self._fanout.timer.look_at(self, monotonic_ms() + self._slow_check_ms())

    def _slow_check_ms(self) -> float:
        return max(10.0, self._fanout.slow_consumer_timeout_ms / _SLOW_CHECKS)

    def look(self, now: float) -> None:
        """The timer's check: send a heartbeat if one is due, or end a stream that was slow for too
        long.
        """
        if self.is_over:
            return
        if self._send_queue.is_blocked:
            if self._send_queue.stalled_ms(now) >= self._fanout.slow_consumer_timeout_ms:
                self._fanout.slow_count += 1
                self.end(self._dialect.too_slow(), TOO_SLOW)
            else:
                self._watch_slow()
            return
        due_ms = self._sent_ms() + self._heartbeat_ms
        if due_ms <= now + EARLY_MS:
            comment = self._dialect.heartbeat(now_ms())
            if comment is not None:
                if self._is_filtered and self._id_of is not None:
                    comment = b"id: %b\n%b" % (self._id_of(), comment)
                self.push(comment)
            due_ms = now + self._heartbeat_ms
        self._fanout.timer.beat_at(self, due_ms, self._heartbeat_ms)

    def _sent_ms(self) -> float:
        """The time of the last send."""
        sent_ms = self._send_queue.sent_ms
        if len(self._subscriptions) == 1:
            # The last send as a member of a broadcast group, or before it left the group.
            (subscription,) = self._subscriptions.values()
            shared_cursor = subscription.cursor.shared_cursor
            group_sent_ms = (
                shared_cursor.group_sent_ms
                if isinstance(shared_cursor, BroadcastGroup)
                else subscription.group_sent_ms
            )
            sent_ms = max(sent_ms, group_sent_ms)
        return sent_ms

    # --- ending -------------------------------------------------------------------------------

    def end(self, last: bytes = b"", code: int = 1000, *, at_once: bool = False) -> None:
        """Send `last` and end the connection. Idempotent.

        `at_once`: close a full socket instead of waiting for it.
        """
        if self.is_over:
            return
        was_full = self._send_queue.is_stuck
        if not was_full:
            # The frames taken so far are sent before the end.
            self._before.clear()
        self.close()
        if was_full and at_once:
            self._send_queue.abort()
            return
        self._send_queue.close(last, code)
        if was_full:
            self._send_queue.close_within(_LINGER_S)

    def close(self) -> None:
        """The connection is gone or about to close: remove listeners and timers. Idempotent."""
        if self.is_over:
            return
        self.is_over = True
        if self.next_look is not None:
            self.next_look.stream = None
            self.next_look = None
        self._fanout.streams.discard(self)
        self._send_queue.drop()
        self._leave()
        self._take_back()
        if self.on_taken is not None:
            self.on_taken()
        # Break the reference cycles with the owners of the stream and of the callbacks.
        self.owner = self.on_taken = self._on_gone = None
        for subscription in self._subscriptions.values():
            self._dispatcher.unfollow(subscription)
        for cursor in self._waiting.values():
            self._dispatcher.creations.stop_waiting(cursor)
        self._subscriptions.clear()
        self._waiting.clear()
        self._ready.clear()
        self._backlog.clear()
        self._dispatcher.forget(self)

    def _take_back(self) -> None:
        """Move cursors back before the unsent frames, so that the client gets them when it
        returns.
        """
        for cursor, (topic_id, epoch, seq) in self._before.items():
            cursor.topic_id, cursor.epoch, cursor.seq = topic_id, epoch, seq
        self._before.clear()
