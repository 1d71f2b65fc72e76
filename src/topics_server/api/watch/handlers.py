"""Watch routes: `POST /v0/watch` and `GET /v0/watch/{wid}` (§7).

The POST makes a session and returns, before any stream opens, each topic's start position. The GET
is one `Watcher`: it owns the session from its first byte to its last, takes it over from an earlier
GET that is still open, and leaves the cursors where its client must continue. `broadcast` chooses
the events, `sse` renders them. Called through the route table in `api/routes`; loop thread only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, cast

from topics_server.api.context import ServerState
from topics_server.api.messages.filters import decode_filter
from topics_server.api.messages.requests import query_bool
from topics_server.api.messages.responses import render_json
from topics_server.api.readiness import ConnectionSlot, admit, check_accepts_stream, until_ready
from topics_server.api.request import Answer, EventStream, Receive, Request, Response, Send
from topics_server.api.topics.config_requests import ignored_members
from topics_server.api.watch.auto_acks import AutoAcks
from topics_server.api.watch.broadcast import GOING_AWAY, BroadcastStream
from topics_server.api.watch.cursor_ids import Positions
from topics_server.api.watch.growing import GrowingTopics
from topics_server.api.watch.requests import WATCH_MEMBERS, Start, WatchRequest, decode_watch
from topics_server.api.watch.resuming import FIRST_EPOCH, NO_TOPIC_ID, resume
from topics_server.api.watch.send_queue import Send as DrivenSend
from topics_server.api.watch.sse import (
    RETRY,
    REVOKED,
    SSE,
    STREAM_HEADERS,
    consumer_lost,
    error_frame,
)
from topics_server.api.watch.starts import begin_seqs
from topics_server.auth.api_keys import Caller
from topics_server.auth.authorize import check_name, check_scopes, unauthorized
from topics_server.auth.tickets import TICKET_TTL_MS
from topics_server.engine.filters import Matcher
from topics_server.engine.subscribe.cursors import Cursor
from topics_server.engine.subscribe.dispatcher import SubscriptionDispatcher, TopicView
from topics_server.engine.subscribe.sessions import WatchSession
from topics_server.engine.subscribe.subscription import SubscriptionOptions
from topics_server.http.sockets import until_left
from topics_server.runtime.clock import monotonic_ms, random_id
from topics_server.values.errors import Code, TopicsError
from topics_server.values.limits import FILTER_BYTES_MAX, U64_MAX
from topics_server.values.texts.key_list import READ, WRITE
from topics_server.values.texts.query_string import parse_query

_TAKEN_OVER: Final = error_frame(409, "another connection has taken this watch session over")
_TICKET_BYTES: Final = 16
# The answer for a topic that does not exist yet.
_WAITING: Final = {"from_seq": 0, "head_seq": 0, "earliest_seq": 1, "waiting": True}


async def open_session(state: ServerState, request: Request) -> Response:
    """`POST /v0/watch`: make a session; its stream is opened by a GET."""
    admit(state)
    settings = state.settings
    sent = decode_watch(
        request.body,
        max_topics=settings.max_watch_topics,
        max_limit=settings.max_limit,
        max_node_bytes=settings.max_node_bytes,
    )
    for name in sent.topics:
        check_name(request.caller, name, f"topics.{name}")
    for prefix in sent.prefixes:
        check_name(request.caller, prefix, f"prefixes.{prefix}")
    acks = {
        name: start.consumer
        for name, start in sent.topics.items()
        if start.commits and start.consumer is not None
    }
    if acks:
        check_scopes(request.caller, READ | WRITE)
    query = parse_query(request.query)
    is_lenient = query_bool(query, "lenient", False)
    with_ticket = query_bool(query, "ticket", False)
    fanout, sessions = state.watching()
    topics = GrowingTopics(
        fanout.dispatcher, request.caller, tuple(sent.prefixes), settings.max_watch_topics, {}
    )
    starts = _starts(sent, topics)
    views = _resolve(fanout.dispatcher, starts, may_miss=is_lenient, awaits=sent.wait)
    nodes = frozenset(sent.options.nodes)
    seqs = await begin_seqs(admit(state), views, starts, nodes, sent.wanted)
    found = _starting(views, seqs, sent.positions or {})
    awaited = [name for name in sent.topics if name not in views] if sent.wait else []
    found |= {name: Cursor.waiting(name) for name in awaited}
    cursors = {name: found[name] for name in starts if name in found}
    key = request.caller.key
    owner = None if key is None else key.owner
    sharing: dict[str, list[str]] = {}
    if sessions.max_per_prefix:
        sharing = {prefix: state.keys.owners_of(prefix) for prefix in request.caller.prefixes}
    begin = list(cursors.values())
    prefixes = tuple(sent.prefixes)
    session = await sessions.open(sent.options, begin, owner, sharing, sent.filter, prefixes, acks)
    fields = {
        "wid": session.wid,
        "stream_url": f"/v0/watch/{session.wid}",
        "session_ttl_ms": sessions.ttl_ms,
        "topics": {
            name: {
                "from_seq": cursors[name].seq,
                "head_seq": view.head_seq,
                "earliest_seq": view.earliest_seq,
            }
            for name, view in views.items()
        }
        | dict.fromkeys(awaited, _WAITING),
    }
    if topics.left_out:
        fields |= {"left_out": topics.left_out}
    if with_ticket:
        ticket = f"ticket_{random_id(_TICKET_BYTES)}"
        state.tickets.issue(ticket, session.wid, request.caller, monotonic_ms())
        fields |= {"ticket": ticket, "ticket_ttl_ms": TICKET_TTL_MS}
    if ignored := ignored_members(request.body, WATCH_MEMBERS):
        fields |= {"ignored": ignored}
    return Response(200, render_json(fields, request.elapsed_ms()))


def _starts(sent: WatchRequest, topics: GrowingTopics) -> dict[str, Start]:
    """The start of each named topic, and of each topic that matches a prefix.

    Named topics without a prefix come first: they have these places in all ids of the session.
    """
    starts = {name: sent.topics[name] for name in sorted(sent.topics, key=topics.has_prefix)}
    is_new = sent.positions is None
    known = () if sent.positions is None else tuple(topics.known(sent.positions))
    for name in topics.choose(sent.topics, known):
        given = (start for prefix, start in sent.prefixes.items() if name.startswith(prefix))
        # A topic that is missing from the id was created after it, so it is read from its start.
        starts[name] = next(given) if is_new else Start()
    return starts


def _resolve(
    dispatcher: SubscriptionDispatcher, starts: Mapping[str, Start], *, may_miss: bool, awaits: bool
) -> dict[str, TopicView]:
    """The current topics. Raises `topic_not_found`, unless some may be missing.

    `awaits`: wait for missing topics. A start at a consumer still needs an existing topic.
    """
    views: dict[str, TopicView] = {}
    for name, start in starts.items():
        view = dispatcher.resolve(name)
        if view is not None:
            views[name] = view
        elif start.consumer is not None if awaits else not may_miss:
            message = f'topic "{name}" does not exist'
            raise TopicsError(Code.TOPIC_NOT_FOUND, message, {"topic": name})
    return views


def _starting(
    views: Mapping[str, TopicView], seqs: Mapping[str, int], positions: Positions
) -> dict[str, Cursor]:
    """A new session's start position in each topic; the position in the sent `cursor` comes
    first.
    """
    cursors: dict[str, Cursor] = {}
    for name, view in views.items():
        cursors[name] = Cursor(name, view.topic_id, view.epoch, seqs[name])
    if isinstance(positions, dict):
        for name in positions.keys() & views.keys():
            view = views[name]
            # The JSON form refers only to the first topic of each name.
            topic_id = view.topic_id if view.epoch == FIRST_EPOCH else NO_TOPIC_ID
            cursors[name] = Cursor(name, topic_id, FIRST_EPOCH, positions[name])
        return cursors
    by_topic = {position.topic_id: position for position in positions}
    for name, view in views.items():
        position = by_topic.pop(view.topic_id, None)
        if position is not None:
            cursors[name].seq = position.seq
    kept = {position.topic_id for position in positions} - by_topic.keys()
    # A cursor of epoch 0 waited for its topic: it reads the current topic from its start.
    epochs = {position.epoch for position in by_topic.values()}
    oldest = min(epochs - {0} or epochs, default=U64_MAX)
    for name, view in views.items():
        if view.topic_id not in kept and oldest < view.epoch:
            # Positions hold no names. A remaining position may be in an earlier topic of this name.
            # Report that topic as deleted; otherwise the reader would miss the new topic's records.
            cursors[name] = Cursor(name, NO_TOPIC_ID, oldest, 0)
    return cursors


async def stream(state: ServerState, request: Request) -> Answer:
    """`GET /v0/watch/{wid}`: the stream of a session."""
    check_accepts_stream(request.headers.get(b"accept"))
    await until_ready(state, request)
    _, sessions = state.watching()
    session = sessions.find(request.name)
    if session is None:
        raise TopicsError(
            Code.NOT_FOUND,
            "there is no such watch session, or it has expired: POST /v0/watch",
        )
    if state.keys.is_on:
        _check_owner(session, request.caller)
    if request.method == "HEAD":
        return EventStream(STREAM_HEADERS, _nothing, ConnectionSlot(state, request.caller.key).free)
    watcher = Watcher(state, session, request.caller, request.headers.get(b"last-event-id"))
    return EventStream(STREAM_HEADERS, watcher.run, watcher.free)


def _check_owner(session: WatchSession, caller: Caller) -> None:
    """Only the key that made a session may open it, while it may name its topics (§7.1)."""
    if caller.key is None or session.owner != caller.key.owner:
        raise unauthorized("this watch session was created with another key")
    for name in session.cursors:
        check_name(caller, name, f"topics.{name}")
    for prefix in session.prefixes:
        check_name(caller, prefix, f"prefixes.{prefix}")


async def _nothing(_receive: Receive, _send: Send) -> None:
    """The empty body of a HEAD."""


class Watcher:
    """One GET of a session.

    The code that makes it calls `free`, whether or not `run` was called.
    """

    __slots__ = (
        "_caller",
        "_is_replaced",
        "_matcher",
        "_new",
        "_session",
        "_slot",
        "_state",
        "_stream",
        "_topics",
    )

    def __init__(
        self, state: ServerState, session: WatchSession, caller: Caller, last_id: bytes | None
    ) -> None:
        """Take the session over. Raises `throttled`."""
        self._matcher: Matcher | None = None
        if session.filter is not None:
            # The session may have been made under another bound for nodes, so decode with the
            # widest one.
            self._matcher = Matcher(decode_filter(session.filter.encode(), FILTER_BYTES_MAX))
        older = session.stream
        if isinstance(older, Watcher):
            older.replace()
        self._state = state
        self._session = session
        self._caller = caller
        self._stream: BroadcastStream | None = None
        self._is_replaced = False
        self._slot = ConnectionSlot(state, caller.key)
        fanout, sessions = state.watching()
        most = state.settings.max_watch_topics
        self._topics = topics = GrowingTopics(
            fanout.dispatcher, caller, session.prefixes, most, session.cursors
        )
        new: list[str] = []
        if session.prefixes:
            topics.watch()
            new = topics.add_matching()
        if last_id is not None:
            new += resume(fanout.dispatcher, session, topics, last_id)
        # Topics that were not reported to the client yet.
        self._new = {name for name in new if topics.is_at_beginning(name)}
        topics.renew_id()
        sessions.begin(session)
        session.stream = self

    def replace(self) -> None:
        """Another GET has taken the session over."""
        self._is_replaced = True
        if self._stream is not None:
            self._stream.end(_TAKEN_OVER)
        # Free the slot now, not when the client has disconnected: otherwise a session could block
        # itself.
        self._slot.free()

    async def run(self, receive: Receive, send: Send) -> None:
        """Stream until the client disconnects or the stream ends."""
        session = self._session
        options = session.options
        fanout, _ = self._state.watching()
        stream = self._stream = fanout.open(
            # The stream steps through each send itself, so `send` must return coroutines.
            cast(DrivenSend, send),
            SSE,
            heartbeat_ms=options.heartbeat_ms,
            id_of=self._topics.id_of,
            on_gone=self._gone if session.prefixes else None,
        )
        try:
            # Sending the head may have waited for the socket. Meanwhile another GET may have come.
            if self._is_replaced:
                stream.end(_TAKEN_OVER)
            elif not self._caller.until_revoked(self._revoke):
                self._revoke()
            elif self._state.phase != "ready":
                stream.end(code=GOING_AWAY)
            else:
                stream.push(RETRY)
                followed = SubscriptionOptions(
                    limit=options.limit,
                    max_bytes=options.max_batch_bytes,
                    nodes=frozenset(options.nodes),
                    shown=options.shown,
                    strong=options.strong,
                    matcher=self._matcher,
                )
                if session.acks:
                    self._commit_for(stream)
                self._topics.begin(stream, followed, self._new)
            await until_left(receive, send)
        finally:
            self._caller.forget(self._revoke)
            stream.close()

    def _commit_for(self, stream: BroadcastStream) -> None:
        """Commit for the session's consumers up to the records that the socket takes."""
        fanout, _ = self._state.watching()
        acks = AutoAcks(admit(self._state), fanout.dispatcher, stream, consumer_lost)
        for name, consumer in self._session.acks.items():
            if name in self._session.cursors:
                acks.add(self._session.cursors[name], consumer)

    def _gone(self, name: str) -> None:
        """The stream has reported a topic as deleted.

        A topic with a prefix may be created again.
        """
        assert self._stream is not None
        if self._topics.has_prefix(name):
            self._stream.unfollow(name)
            self._topics.gone(name)

    def _revoke(self) -> None:
        """The key was revoked or changed."""
        if self._stream is not None:
            self._stream.end(REVOKED)

    def free(self) -> None:
        """Release the session; its cursors stay where the stream left them."""
        self._topics.stop()
        session = self._session
        if session.stream is self:
            session.stream = None
        _, sessions = self._state.watching()
        sessions.end(session)
        self._slot.free()
