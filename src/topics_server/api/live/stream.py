"""One live stream: its topics, topics that are created later, and its ids.

The server keeps nothing of a stream after its connection ends: each frame's id holds the positions
in all topics, so any stream of the same URL can continue from that id. The stream waits for a named
topic that does not exist or is deleted. A prefix adds the topics that are created with it, up to
the limit of topics. Beyond the limit the stream reports the topics that it leaves out, and adds one
of them when a topic is deleted. Loop thread only. Used by `handlers`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from topics_server.api.context import ServerState
from topics_server.api.live.positions import resumed, started
from topics_server.api.live.requests import LiveRequest
from topics_server.api.readiness import ConnectionSlot, admit
from topics_server.api.request import Receive, Send
from topics_server.api.watch.auto_acks import AutoAcks
from topics_server.api.watch.broadcast import GOING_AWAY, BroadcastStream
from topics_server.api.watch.growing import GrowingTopics
from topics_server.api.watch.send_queue import Send as DrivenSend
from topics_server.api.watch.sse import RETRY, REVOKED, SSE, consumer_lost
from topics_server.auth.api_keys import Caller
from topics_server.engine.subscribe.cursors import Cursor
from topics_server.engine.subscribe.dispatcher import TopicView
from topics_server.http.sockets import until_left


class LiveStream:
    """One GET. The code that makes it calls `free`, whether or not `run` was called."""

    def __init__(self, state: ServerState, sent: LiveRequest, caller: Caller) -> None:
        """Take a slot. Raises `throttled`."""
        self._slot = ConnectionSlot(state, caller.key)
        self._state = state
        self._sent = sent
        self._caller = caller
        self._fanout, _ = state.watching()
        self._dispatcher = self._fanout.dispatcher
        self._stream: BroadcastStream | None = None
        most = state.settings.max_watch_topics
        self._topics = GrowingTopics(self._dispatcher, caller, sent.prefixes, most, {})
        # Topics that are missing from the client's event id.
        self._new: list[str] = []

    async def begin(self) -> None:
        """Find where the stream begins in each topic."""
        sent, positions = self._sent, self._sent.positions
        topics = self._topics
        topics.watch()
        named = dict.fromkeys(sent.topics)
        # Topics that the client follows already come first.
        known = [] if positions is None else list(topics.known(positions))
        others = topics.choose(named, known)
        views = self._views([*named, *others])
        if positions is None:
            found = await started(admit(self._state), views, sent)
        else:
            self._new = [name for name in others if name not in known]
            found = resumed(views, sent.topics, positions, topics.has_prefix)
        for name in sent.topics:
            topics.cursors[name] = found.pop(name) if name in found else Cursor.waiting(name)
        topics.cursors |= found

    def _views(self, names: Sequence[str]) -> dict[str, TopicView]:
        """The views of the topics that exist."""
        views = ((name, self._dispatcher.resolve(name)) for name in names)
        return {name: view for name, view in views if view is not None}

    async def run(self, receive: Receive, send: Send) -> None:
        """Stream until the client disconnects or the stream ends."""
        stream = self._stream = self._fanout.open(
            # The stream steps through each send itself, so `send` must return coroutines.
            cast(DrivenSend, send),
            SSE,
            heartbeat_ms=self._sent.heartbeat_ms,
            id_of=self._topics.id_of,
            on_gone=self._gone,
        )
        try:
            # Sending the head may have waited for the socket.
            if not self._caller.until_revoked(self._revoke):
                self._revoke()
            elif self._state.phase != "ready":
                stream.end(code=GOING_AWAY)
            else:
                self._topics.renew_id()
                # Send an id at once, so that a client which loses the connection before the first
                # frame resumes here.
                stream.push(RETRY + self._topics.id_line())
                read_as = self._sent.read_as
                if read_as is not None and read_as.commits:
                    (name,) = self._sent.topics
                    acks = AutoAcks(admit(self._state), self._dispatcher, stream, consumer_lost)
                    acks.add(self._topics.cursors[name], read_as.consumer)
                self._topics.begin(stream, self._sent.options, self._new)
            await until_left(receive, send)
        finally:
            self._caller.forget(self._revoke)
            stream.close()

    def _gone(self, name: str) -> None:
        """The stream has reported that a topic was deleted."""
        stream, topics = self._stream, self._topics
        assert stream is not None
        stream.unfollow(name)
        if name not in self._sent.topics:
            topics.gone(name)
            return
        # The new cursor takes the same place: an id has the named topics in their order.
        cursor = topics.cursors[name] = Cursor.waiting(name)
        topics.renew_id()
        stream.push(topics.id_line())
        # If the topic was created again meanwhile, the stream follows it at once.
        stream.follow(cursor, self._sent.options)

    def _revoke(self) -> None:
        """The key was revoked or changed."""
        if self._stream is not None:
            self._stream.end(REVOKED)

    def free(self) -> None:
        """Give the slot back."""
        self._topics.stop()
        self._slot.free()
