"""One live stream: its topics, those made later, its ids.

Nothing of it outlives its connection: each frame's id holds the positions in all topics, so any
stream of the same URL goes on from it. A named topic that does not exist, or is deleted, is waited
for. A prefix adds the topics that are created with it, up to the limit of topics; beyond it the
stream says so, and takes one of the others when a topic is deleted. Loop thread
only. Used by `handlers`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Final, cast

from topics_server.api.context import ServerState
from topics_server.api.live.positions import resumed, started
from topics_server.api.live.requests import LiveRequest
from topics_server.api.readiness import ConnectionSlot, admit
from topics_server.api.request import Receive, Send
from topics_server.api.watch.broadcast import GOING_AWAY, BroadcastStream
from topics_server.api.watch.cursor_ids import IdOf, Positions
from topics_server.api.watch.send_queue import Send as DrivenSend
from topics_server.api.watch.sse import RETRY, REVOKED, SSE, error_frame, topic_created
from topics_server.auth.api_keys import Caller
from topics_server.engine.subscribe.cursors import Cursor
from topics_server.engine.subscribe.dispatcher import TopicView
from topics_server.http.sockets import until_left

# Topics beyond the limit that an `error` frame names at the start.
_NAMED_MAX: Final = 16


class LiveStream:
    """One GET. Its maker calls `free`, whether it was run or not."""

    def __init__(self, state: ServerState, sent: LiveRequest, caller: Caller) -> None:
        """Take a place. Raises `throttled`."""
        self._slot = ConnectionSlot(state, caller.key)
        self._state = state
        self._sent = sent
        self._caller = caller
        self._fanout, _ = state.watching()
        self._dispatcher = self._fanout.dispatcher
        self._stream: BroadcastStream | None = None
        self._cursors: dict[str, Cursor] = {}
        self._id_of = IdOf(())
        # Topics that the id of the client does not know, and some of those beyond the limit.
        self._new: list[str] = []
        self._left_out: list[str] = []
        # Topics created before the stream was open.
        self._early: list[str] = []

    async def begin(self) -> None:
        """Find where the stream begins in each topic."""
        sent, positions = self._sent, self._sent.positions
        for prefix in sent.prefixes:
            self._dispatcher.creations.watch(prefix, self._created)
        named = dict.fromkeys(sent.topics)
        # Those that the client follows already come first.
        known = [] if positions is None else list(self._known(positions))
        others = [name for name in known if name not in named]
        room = self._state.settings.max_watch_topics - len(named)
        others += self._matching({*named, *others}, max(0, room - len(others)) + _NAMED_MAX)
        others, self._left_out = others[:room], others[room:]
        views = self._views([*named, *others])
        if positions is None:
            found = await started(admit(self._state), views, sent)
        else:
            self._new = [name for name in others if name not in known]
            found = resumed(views, sent.topics, positions, self._has_prefix)
        for name in sent.topics:
            self._cursors[name] = found.pop(name) if name in found else Cursor.waiting(name)
        self._cursors |= found

    def _views(self, names: Sequence[str]) -> dict[str, TopicView]:
        """Those of these topics that exist."""
        views = ((name, self._dispatcher.resolve(name)) for name in names)
        return {name: view for name, view in views if view is not None}

    def _known(self, positions: Positions) -> Iterator[str]:
        """The topics of an id that exist and have a prefix of the stream."""
        if isinstance(positions, dict):
            names: Iterable[str | None] = positions
        else:
            names = (self._dispatcher.name_of(each.topic_id) for each in positions)
        for name in names:
            if name is None or not self._has_prefix(name):
                continue
            if self._dispatcher.resolve(name) is not None:
                yield name

    def _has_prefix(self, name: str) -> bool:
        """Whether a topic of this name is one of a prefix."""
        return name.startswith(self._sent.prefixes) and self._caller.may_name(name)

    def _matching(self, followed: Collection[str], count: int) -> list[str]:
        """The next topics of the prefixes, at most so many, in name order."""

        def is_new(name: str) -> bool:
            return name not in followed and name not in found and self._caller.may_name(name)

        found: dict[str, None] = {}
        for prefix in self._sent.prefixes:
            if count > len(found):
                names = self._dispatcher.names(prefix, count - len(found), is_new)
                found |= dict.fromkeys(names)
        return list(found)

    async def run(self, receive: Receive, send: Send) -> None:
        """Stream until the client disconnects or the stream ends."""
        stream = self._stream = self._fanout.open(
            # The stream runs sends by hand: they must be coroutines.
            cast(DrivenSend, send),
            SSE,
            heartbeat_ms=self._sent.heartbeat_ms,
            id_of=lambda: self._id_of(),
            on_gone=self._gone,
        )
        try:
            # The head may have waited for its socket.
            if not self._caller.until_revoked(self._revoke):
                self._revoke()
            elif self._state.phase != "ready":
                stream.end(code=GOING_AWAY)
            else:
                self._follow_all(stream)
            await until_left(receive, send)
        finally:
            self._caller.forget(self._revoke)
            stream.close()

    def _follow_all(self, stream: BroadcastStream) -> None:
        cursors = list(self._cursors.values())
        self._renew_id()
        # A client that loses the connection before the first frame goes on from here, too.
        stream.push(RETRY + self._id_line())
        if self._left_out:
            self._tell_left_out(self._left_out)
        for cursor in cursors:
            if cursor.name in self._new:
                self._tell_created(cursor)
            stream.follow(cursor, self._sent.options)
        early, self._early = self._early, []
        for name in early:
            self._created(name)

    def _created(self, name: str) -> None:
        """A topic of a prefix was created, or found."""
        stream = self._stream
        if stream is None:
            self._early.append(name)
            return
        if stream.is_over or name in self._cursors or name in self._left_out:
            return
        view = self._dispatcher.resolve(name)
        if view is None or not self._caller.may_name(name):
            return
        if len(self._cursors) >= self._state.settings.max_watch_topics:
            self._tell_left_out([name])
            return
        cursor = self._cursors[name] = Cursor(name, view.topic_id, view.epoch, 0)
        self._renew_id()
        self._tell_created(cursor)
        stream.follow(cursor, self._sent.options)

    def _gone(self, name: str) -> None:
        """The client was told that a topic is deleted."""
        stream = self._stream
        assert stream is not None
        stream.unfollow(name)
        if name in self._sent.topics:
            # In the same place: an id has the named topics in their order.
            cursor = self._cursors[name] = Cursor.waiting(name)
            self._renew_id()
            stream.push(self._id_line())
            # Follows at once a topic that was created again meanwhile.
            stream.follow(cursor, self._sent.options)
            return
        del self._cursors[name]
        self._renew_id()
        stream.push(self._id_line())
        self._left_out.clear()
        for other in self._matching(self._cursors, 1):
            self._created(other)

    def _tell_created(self, cursor: Cursor) -> None:
        assert self._stream is not None
        created = topic_created(cursor.name, cursor.epoch)
        self._stream.push(b"id: %b\n%b" % (self._id_of(), created))

    def _tell_left_out(self, names: Sequence[str]) -> None:
        assert self._stream is not None
        most = self._state.settings.max_watch_topics
        message = f"the stream follows {most} topics, its maximum; it leaves out more that match"
        self._stream.push(error_frame(429, message, topics=names))

    def _renew_id(self) -> None:
        self._id_of = IdOf(self._cursors.values())

    def _id_line(self) -> bytes:
        """An id without an event: the position of a client that comes back."""
        return b"id: %b\n\n" % self._id_of()

    def _revoke(self) -> None:
        """The key was revoked or changed."""
        if self._stream is not None:
            self._stream.end(REVOKED)

    def free(self) -> None:
        """Give the place back."""
        for prefix in self._sent.prefixes:
            self._dispatcher.creations.stop_watching(prefix, self._created)
        self._slot.free()
