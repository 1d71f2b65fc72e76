"""Delivers topic events to many streams, each batch rendered once (§7.6).

A `BroadcastStream` is one connection that follows topics. It is pumped by the feeds: takes the
batches that are ready, topic by topic in turn, and hands their frames to the socket in one go.
While a socket is full nothing is read for it: its cursors lag, and what it missed leaves in larger
batches later. Invariants: frames leave in the order in which they were taken; what was taken and
not handed over is taken back when the stream ends. Loop thread only. Used by `watch` and `ws`.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from collections.abc import Callable
from functools import partial
from itertools import count
from math import ceil
from typing import Final, NamedTuple, Protocol

from topics_server.api.watch.send_queue import Dialect as Dialect
from topics_server.api.watch.send_queue import Send, SendQueue
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

# Bytes taken for one stream before others have their turn.
_PUMP_BYTES: Final = 262_144
# How long a stream that was ended has to take its last frame.
_LINGER_S: Final = 5.0
_SLOW_CHECKS: Final = 8
# Heartbeats that are due within so long leave together.
_BEAT_MS: Final = 50
# Close codes of WebSockets (RFC 6455); a response has none.
GOING_AWAY: Final = 1001
REFUSED: Final = 1008
TOO_SLOW: Final = 1013
FAILED: Final = 1011


class StreamOwner(Protocol):
    """Who speaks on a stream's connection beside it, in answer to the client."""

    def before_frames(self) -> None:
        """Frames are about to be taken: what is to be told before them is pushed now."""
        ...

    def drain(self) -> None:
        """The server is going down: end the stream, with `GOING_AWAY`, as soon as may be."""
        ...


class Fanout:
    """All streams of one server, and the one timer behind them."""

    def __init__(
        self,
        feeds: SubscriptionDispatcher,
        rendered: JsonCache,
        *,
        buffer_grace_ms: int,
        slow_consumer_timeout_ms: int,
    ) -> None:
        self.feeds: Final = feeds
        self.rendered: Final = rendered
        self.buffer_grace_ms: Final = buffer_grace_ms
        self.slow_consumer_timeout_ms: Final = slow_consumer_timeout_ms
        self.streams: Final[set[BroadcastStream]] = set()
        self.slow_count = 0
        # When each stream is to be looked at next, a heap.
        self._looks: list[_Look] = []
        self._ties = count()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_ms = 0.0

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
    ) -> BroadcastStream:
        """A stream on a connection whose response has been started.

        `id_of` gives the text of the `id:` line for where the stream's cursors are.
        """
        stream = BroadcastStream(self, send, dialect, heartbeat_ms, id_of, owner)
        self.streams.add(stream)
        self.beat_at(stream, monotonic_ms() + heartbeat_ms)
        return stream

    def drain(self) -> None:
        """The server is going down: every stream ends now, its client comes back by itself."""
        for stream in tuple(self.streams):
            if stream.owner is None:
                stream.end(code=GOING_AWAY, at_once=True)
            else:
                stream.owner.drain()

    def beat_at(self, stream: BroadcastStream, due_ms: float) -> None:
        """Look at the stream when its heartbeat is due; many are looked at together."""
        self.look_at(stream, ceil(due_ms / _BEAT_MS) * _BEAT_MS)

    def look_at(self, stream: BroadcastStream, due_ms: float) -> None:
        """Look at the stream at `due_ms`, unless it is looked at before that anyway."""
        look = stream.next_look
        if look is not None:
            if look.due_ms <= due_ms:
                return
            look.stream = None
        stream.next_look = look = _Look(due_ms, next(self._ties), stream)
        heapq.heappush(self._looks, look)
        self._set_timer()

    def _set_timer(self) -> None:
        looks = self._looks
        while looks and looks[0].stream is None:
            heapq.heappop(looks)
        if not looks:
            return
        due_ms = looks[0].due_ms
        if self._timer is not None:
            if self._timer_ms <= due_ms:
                return
            self._timer.cancel()
        self._timer_ms = due_ms
        delay_s = max(0.0, due_ms - monotonic_ms()) / 1000
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._look)

    def _look(self) -> None:
        self._timer = None
        now = monotonic_ms()
        looks = self._looks
        while looks and looks[0].due_ms <= now:
            stream = heapq.heappop(looks).stream
            if stream is not None:
                stream.next_look = None
                stream.look(now)
        self._set_timer()


class _Look:
    """When a stream is to be looked at; without a stream, that it was moved forward or is over."""

    __slots__ = ("due_ms", "stream", "tie")

    def __init__(self, due_ms: float, tie: int, stream: BroadcastStream) -> None:
        self.due_ms = due_ms
        self.tie = tie
        self.stream: BroadcastStream | None = stream

    def __lt__(self, other: _Look) -> bool:
        return (self.due_ms, self.tie) < (other.due_ms, other.tie)


class _Shared(NamedTuple):
    """What streams of one kind that stand at one place are sent: as frames, and as one write."""

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
        "_feeds",
        "_fetching",
        "_heartbeat_ms",
        "_id_of",
        "_is_resting",
        "_is_shared",
        "_kind",
        "_outbox",
        "_ready",
        "_tracks",
        "_waiting",
        "cursors",
        "is_over",
        "next_look",
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
    ) -> None:
        self.owner: Final = owner
        self.cursors: dict[str, Cursor] = {}
        self.is_over = False
        # When the fan-out looks at it next.
        self.next_look: _Look | None = None
        self._fanout = fanout
        self._feeds = fanout.feeds
        self._dialect = dialect
        self._id_of = id_of
        # Streams of one kind are sent the same bytes where their ids are the same.
        self._kind = (dialect, id_of is not None)
        # Whether what it is sent has no id, or one that speaks of a single topic.
        self._is_shared = True
        # Its socket is full, and bells do not reach it.
        self._is_resting = False
        self._heartbeat_ms = heartbeat_ms
        self._outbox = SendQueue(send, dialect, self._on_room)
        self._tracks: dict[str, Subscription] = {}
        # Cursors in topics that are not there yet.
        self._waiting: dict[str, Cursor] = {}
        # Tracks that have something to be told, in turn; those that wait for a fetch to be allowed.
        self._ready: deque[Subscription] = deque()
        self._backlog: list[Subscription] = []
        self._fetching: Subscription | None = None
        # Where cursors were before what is not handed over yet was taken.
        self._before: dict[Cursor, tuple[int, int, int]] = {}

    # --- what it follows ----------------------------------------------------------------------

    def follow(self, cursor: Cursor, options: SubscriptionOptions) -> None:
        """Follow a topic from its cursor on; one followed before by that name is replaced.

        A topic that does not exist is told as deleted, unless its cursor waits for it.
        """
        if self.is_over:
            return
        self._leave()
        self.unfollow(cursor.name)
        self.cursors[cursor.name] = cursor
        self._is_shared = self._id_of is None or len(self.cursors) == 1
        track = self._feeds.follow(self, cursor, options)
        if track is not None:
            self._tracks[cursor.name] = track
            self.ring(track)
            return
        if cursor.is_waiting:
            self._waiting[cursor.name] = cursor
            self._feeds.wait(cursor, partial(self._arrived, cursor, options))
            return
        told = TopicDeleted(cursor.name, cursor.seq)
        self._put(self._dialect.render(told, self._fanout.rendered))
        self._feeds.again(self)

    def _arrived(self, cursor: Cursor, options: SubscriptionOptions) -> None:
        """The topic of a cursor that waited is there."""
        if self._waiting.get(cursor.name) is cursor:
            self.follow(cursor, options)

    def unfollow(self, name: str) -> bool:
        """Tell nothing more of a topic; whether it was followed, or waited for."""
        track = self._tracks.pop(name, None)
        waiting = self._waiting.pop(name, None)
        if waiting is not None:
            self._feeds.stop_waiting(waiting)
        self.cursors.pop(name, None)
        self._is_shared = self._id_of is None or len(self.cursors) == 1
        if track is None:
            return waiting is not None
        self._drop(track)
        return True

    def follows(self, name: str) -> bool:
        """Whether the topic is followed: not so any more once it was told as deleted."""
        return name in self._tracks or name in self._waiting

    def _drop(self, track: Subscription) -> None:
        self._feeds.unfollow(track)
        if track.is_ready:
            self._ready.remove(track)
            track.is_ready = False
        if track in self._backlog:
            self._backlog.remove(track)
        if self._fetching is track:
            self._fetched()

    def ring(self, track: Subscription) -> None:
        """See `feeds.Reader`."""
        if track.is_ready or track.is_fetching:
            return
        if self._fetching is track:
            self._fetched()
        track.is_ready = True
        self._ready.append(track)

    def _fetched(self) -> None:
        """The one fetch there may be is over: others may ask for theirs."""
        self._fetching = None
        backlog, self._backlog = self._backlog, []
        for track in backlog:
            self.ring(track)

    def fail(self, track: Subscription, error: TopicsError | StorageError) -> None:
        """See `feeds.Reader`: the stream ends, its client may come back."""
        message = f'topic "{track.cursor.name}" cannot be read'
        self.end(self._dialect.failed(500, message), FAILED)

    # --- taking -------------------------------------------------------------------------------

    def pump(self) -> None:
        """See `feeds.Reader`: take what is ready, up to a budget, and send it."""
        if self.owner is not None:
            self.owner.before_frames()
        if self.is_over or not self._outbox.has_room():
            # What was read for it is let go of: others wait for memory, too.
            for track in self._ready:
                track.fetched = None
            if not self.is_over and not self._is_resting:
                self._is_resting = True
                for track in self._tracks.values():
                    self._feeds.rest(track)
            self._watch_slow()
            return
        taken_bytes = 0
        ready = self._ready
        while ready and taken_bytes < _PUMP_BYTES:
            track = ready.popleft()
            track.is_ready = False
            batch = self._feeds.read(self, track, may_fetch=self._fetching is None)
            if batch is not None:
                taken_bytes += self._take(track, batch)
            elif track.is_fetching:
                self._fetching = track
            else:
                self._backlog.append(track)
        self._flush()
        if ready and not self._outbox.is_parked:
            self._feeds.again(self)

    def _take(self, track: Subscription, batch: EventBatch) -> int:
        """Have a batch's frames sent and move the cursor behind them; how many bytes they are."""
        cursor = track.cursor
        if self._is_shared:
            size = self._take_shared(track, batch)
        else:
            self._keep(cursor)
            size = self._take_own(track, batch)
        if batch.more:
            track.is_ready = True
            self._ready.append(track)
        elif batch.is_last:
            self._tracks.pop(cursor.name)
            self._drop(track)
        return size

    def give(self, track: Subscription, batch: EventBatch, now: float, writes: Writes) -> bool:
        """See `feeds.Reader`: take a batch here and now, unless something stands before it."""
        if self.owner is not None:
            self.owner.before_frames()
        if self._ready or not self._is_shared or self.is_over:
            return False
        shared: _Shared = batch.rendered.get(self._kind) or self._shared_of(track, batch)
        wire = shared.wire
        writer = None if wire is None else self._outbox.writer(now)
        if wire is None or writer is None:
            return False
        # It is live: nothing else of it changes.
        track.cursor.seq = batch.end_seq
        writes.append((writer, wire))
        if self.owner is None and len(self._tracks) == 1 and self._fetching is None:
            writer = self._outbox.claim(self._leave)
            if writer is not None:
                self._feeds.join(track, self._kind, Member(writer, self._wire))
        return True

    def _leave(self) -> None:
        """The socket takes no more, or is gone: what comes is not to be written to it as it is."""
        for track in self._tracks.values():
            self._feeds.leave(track)

    def _wire(self, track: Subscription, batch: EventBatch) -> bytes | None:
        """What goes over the wire to tell a batch, on every connection of this kind."""
        return self._shared_of(track, batch).wire

    def _shared_of(self, track: Subscription, batch: EventBatch) -> _Shared:
        """What every stream of this kind that stands here is sent."""
        shared: _Shared | None = batch.rendered.get(self._kind)
        if shared is None:
            shared = batch.rendered[self._kind] = self._render(track, batch)
        return shared

    def _take_shared(self, track: Subscription, batch: EventBatch) -> int:
        shared = self._shared_of(track, batch)
        if shared.wire is None or not self._outbox.write(shared.wire, monotonic_ms()):
            self._keep(track.cursor)
            self._outbox.put(shared.frames)
        track.move(batch, batch.end_seq)
        return shared.size

    def _keep(self, cursor: Cursor) -> None:
        """Remember where a cursor is before it is moved for what has not left yet."""
        self._before.setdefault(cursor, (cursor.topic_id, cursor.epoch, cursor.seq))

    def _render(self, track: Subscription, batch: EventBatch) -> _Shared:
        frames = self._frames(batch)
        if self._id_of is not None:
            cursor = track.cursor
            spot, cursor.spot = cursor.spot, None
            before = (cursor.topic_id, cursor.epoch, cursor.seq)
            try:
                for index, seq in enumerate(batch.seqs):
                    track.move(batch, seq)
                    frames[index] = b"id: %b\n%b" % (self._id_of(), frames[index])
            finally:
                cursor.topic_id, cursor.epoch, cursor.seq = before
                cursor.spot = spot
        wire = None
        if frames and self._dialect.is_joined:
            wire = self._dialect.wire(b"".join(frames))
        elif frames:
            wire = b"".join(map(self._dialect.wire, frames))
        return _Shared(frames, wire, sum(map(len, frames)))

    def _take_own(self, track: Subscription, batch: EventBatch) -> int:
        """Shared frames behind ids of this stream's own."""
        frames: list[bytes] | None = batch.rendered.get(self._dialect)
        if frames is None:
            frames = batch.rendered[self._dialect] = self._frames(batch)
        for frame, seq in zip(frames, batch.seqs, strict=True):
            track.move(batch, seq)
            self._put(frame)
        track.move(batch, batch.end_seq)
        return sum(map(len, frames))

    def _frames(self, batch: EventBatch) -> list[bytes]:
        return [self._dialect.render(event, self._fanout.rendered) for event in batch.events]

    def _put(self, frame: bytes) -> None:
        if self._id_of is not None:
            frame = b"id: %b\n%b" % (self._id_of(), frame)
        self._outbox.put((frame,))

    # --- sending ------------------------------------------------------------------------------

    def push(self, payload: bytes) -> None:
        """Send a frame that is no event (an answer, a comment), behind what was taken before."""
        if not self.is_over:
            self._outbox.put((payload,))
            self._flush()

    async def flushed(self) -> None:
        """Return when nothing waits for the socket."""
        await self._outbox.flushed()

    def _flush(self) -> None:
        self._outbox.flush()
        if self._outbox.is_parked:
            self._watch_slow()
        else:
            self._before.clear()

    def _on_room(self, full_ms: float) -> None:
        """The socket was full for so long, and takes more now."""
        if self.is_over:
            return
        if full_ms > self._fanout.buffer_grace_ms:
            # What it lost meanwhile is told like to one who was away (§7.6).
            for track in self._tracks.values():
                track.is_fresh = True
        if not self._outbox.is_parked:
            self._before.clear()
            if self._is_resting:
                self._is_resting = False
                for track in self._tracks.values():
                    self._feeds.back(track)
            self._feeds.again(self)

    def _watch_slow(self) -> None:
        """The socket is full: see to it that the timer looks at it soon."""
        if not self.is_over:
            self._fanout.look_at(self, monotonic_ms() + self._slow_check_ms())

    def _slow_check_ms(self) -> float:
        return max(10.0, self._fanout.slow_consumer_timeout_ms / _SLOW_CHECKS)

    def look(self, now: float) -> None:
        """The fan-out's timer: a heartbeat, or a consumer that has been slow for too long."""
        if self.is_over:
            return
        if self._outbox.is_parked:
            if self._outbox.stalled_ms(now) >= self._fanout.slow_consumer_timeout_ms:
                self._fanout.slow_count += 1
                self.end(self._dialect.too_slow(), TOO_SLOW)
            else:
                self._watch_slow()
            return
        due_ms = self._sent_ms() + self._heartbeat_ms
        if due_ms <= now:
            comment = self._dialect.heartbeat(now_ms())
            if comment is not None:
                self.push(comment)
            due_ms = now + self._heartbeat_ms
        self._fanout.beat_at(self, due_ms)

    def _sent_ms(self) -> float:
        """When something was sent last."""
        sent_ms = self._outbox.sent_ms
        if len(self._tracks) == 1:
            # As one of a cohort, or before it left one.
            (track,) = self._tracks.values()
            spot = track.cursor.spot
            told_ms = spot.told_ms if isinstance(spot, BroadcastGroup) else track.told_ms
            sent_ms = max(sent_ms, told_ms)
        return sent_ms

    # --- ending -------------------------------------------------------------------------------

    def end(self, last: bytes = b"", code: int = 1000, *, at_once: bool = False) -> None:
        """Send `last` and end the connection; nothing else follows. Idempotent.

        `at_once`: a socket that is full is hung up on rather than waited for.
        """
        if self.is_over:
            return
        was_full = self._outbox.is_parked
        self.close()
        if was_full and at_once:
            self._outbox.abort()
            return
        self._outbox.close(last, code)
        if was_full:
            self._outbox.close_within(_LINGER_S)

    def close(self) -> None:
        """The connection is gone or about to go: let go of bells and timers. Idempotent."""
        if self.is_over:
            return
        self.is_over = True
        if self.next_look is not None:
            self.next_look.stream = None
            self.next_look = None
        self._fanout.streams.discard(self)
        self._outbox.drop()
        self._leave()
        self._take_back()
        for track in self._tracks.values():
            self._feeds.unfollow(track)
        for cursor in self._waiting.values():
            self._feeds.stop_waiting(cursor)
        self._tracks.clear()
        self._waiting.clear()
        self._ready.clear()
        self._backlog.clear()
        self._feeds.forget(self)

    def _take_back(self) -> None:
        """What was taken and never handed over is to be told again when the client is back."""
        for cursor, (topic_id, epoch, seq) in self._before.items():
            cursor.topic_id, cursor.epoch, cursor.seq = topic_id, epoch, seq
        self._before.clear()
