"""`GET /v0/ws`: publish and follow topics over one WebSocket (§7).

A connection is one task: it receives a message, executes it, receives the next. Only a publish runs
outside the task: it continues when its client disconnects. Invariants: publishes of one socket are
appended in order of arrival, topic by topic, and answered in order of arrival; a ready answer is
sent before events of followed topics; a subscribe waits for the earlier publishes to its topics; at
most `max_ws_commands` publishes of a socket are unanswered; no message is received while the
unanswered publishes hold `WS_UNANSWERED_BYTES_MAX`, or while the socket's buffer is full. Answers
and events are sent through one `BroadcastStream`. An invalid command never closes the socket. The
protocol layer below closes it after an unreadable message (invalid UTF-8, too large). Called by
`api/application`; loop thread only.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, Final, cast

import msgspec

from topics_server.api.context import ServerState
from topics_server.api.front_door import refuse_socket
from topics_server.api.messages.conditions import check_condition_scopes
from topics_server.api.messages.visibility import check_config
from topics_server.api.readiness import ConnectionSlot, admit
from topics_server.api.request import Receive, Request, Response, Scope, Send
from topics_server.api.watch.auto_acks import AutoAcks
from topics_server.api.watch.broadcast import FAILED, GOING_AWAY, REFUSED, BroadcastStream, Fanout
from topics_server.api.watch.requests import Start
from topics_server.api.watch.send_queue import Send as DrivenSend
from topics_server.api.watch.starts import begin_seqs
from topics_server.api.websocket import frames as ws_frames
from topics_server.api.websocket.commands import (
    Command,
    CommandLimits,
    Ping,
    Publish,
    RefusedCommandError,
    Subscribe,
    Unsubscribe,
    check_head,
    decode_command,
)
from topics_server.api.websocket.prefixes import SocketPrefixes
from topics_server.auth.api_keys import EVERYBODY, Caller
from topics_server.auth.authorize import (
    SUBPROTOCOL,
    authorized_socket,
    check_name,
    check_scopes,
    unauthorized,
)
from topics_server.auth.origin import check_origin
from topics_server.engine.subscribe.cursors import Cursor
from topics_server.http.error_responses import from_storage, internal, too_large
from topics_server.http.request_ids import NAME as REQUEST_ID
from topics_server.http.request_ids import request_id
from topics_server.runtime.clock import monotonic_ms
from topics_server.runtime.metrics import log
from topics_server.values.errors import Code, StorageError, TopicsError, clipped, invalid
from topics_server.values.limits import CONTROL_BODY_BYTES_MAX, KIB, WS_UNANSWERED_BYTES_MAX
from topics_server.values.texts.key_list import ADMIN, READ, WRITE

# Commands of one socket that run in one loop turn.
_COMMANDS_A_TURN: Final = 16
_CHARS_A_TURN: Final = 64 * KIB
# Sockets get no heartbeat frames; this is how often `broadcast` checks a socket.
_LOOK_MS: Final = 60_000
# How many characters of a message are searched for `config`, so that an error names every missing
# scope.
_NAMED_CHARS_MAX: Final = 4096
# The scope that every command of this kind requires.
_SCOPES_OF_OPS: Final = {"publish": WRITE, "subscribe": READ}
# The start of a topic that is created with a followed prefix.
_FIRST: Final = Start()
_REVOKED: Final = "the key of this socket was revoked or changed"


def no_upgrade(_state: ServerState, _request: Request) -> Response:
    """`GET /v0/ws` without an upgrade: 400."""
    raise invalid("/v0/ws is a WebSocket: open it as ws://, with Upgrade: websocket", "Upgrade")


async def serve(state: ServerState, scope: Scope, receive: Receive, send: Send) -> None:
    """`GET /v0/ws`: one socket from its opening to its end."""
    if (await receive())["type"] != "websocket.connect":
        return
    try:
        headers = dict(scope["headers"])
        state.hosts.check(headers.get(b"host"))
        offered = scope.get("subprotocols", ())
        caller = authorized_socket(state.keys, headers, offered)
        # A web page cannot send `Authorization` when it opens a WebSocket, so a key does not prove
        # that the page's origin is allowed.
        check_origin(headers, state.settings.allowed_origins, is_authorized=False)
        admit(state)
        slot = ConnectionSlot(state, caller.key)
    except TopicsError as refusal:
        await refuse_socket(scope, send, refusal)
        return
    try:
        selected = SUBPROTOCOL if SUBPROTOCOL in offered else None
        accept_headers = [(REQUEST_ID, request_id(headers))]
        await send({"type": "websocket.accept", "subprotocol": selected, "headers": accept_headers})
        assert state.fanout is not None, "ready means there is one"
        await Connection(state, state.fanout, send, caller).run(receive)
    finally:
        slot.free()


class _Answer:
    """The answer to one publish, in its place among the others.

    `payload` is set when it is ready.
    """

    __slots__ = ("payload",)

    def __init__(self, payload: bytes | None = None) -> None:
        self.payload = payload


class _Lane:
    """Unfinished publishes of one socket to one topic.

    `blocker` is the publish that started last; the next one starts once `blocker` has its seqs.
    `waiting` holds the publishes behind it. `unsettled` counts all of them.
    """

    __slots__ = ("blocker", "unsettled", "waiting")

    def __init__(self) -> None:
        self.blocker: _Job | None = None
        self.waiting: deque[_Job] = deque()
        self.unsettled = 0

    def let_go(self, job: _Job) -> None:
        """Let the next publish start: this one has its seqs, or will never have any."""
        if self.blocker is job:
            self.blocker = None


class _Job:
    """One publish. Once it has started, `rest` continues it when `awaited` is done.

    `began_ms` is by the monotonic clock.
    """

    __slots__ = ("answer", "began_ms", "command", "lane", "rest", "awaited")

    def __init__(self, command: Publish, answer: _Answer, lane: _Lane, began_ms: float) -> None:
        self.command = command
        self.answer = answer
        self.lane = lane
        self.began_ms = began_ms
        self.rest: Coroutine[Any, Any, bytes]
        self.awaited: asyncio.Future[Any] | None = None


class Connection:
    """One open socket."""

    def __init__(
        self, state: ServerState, fanout: Fanout, send: Send, caller: Caller = EVERYBODY
    ) -> None:
        self._state = state
        self._caller = caller
        self._fanout = fanout
        # The stream steps through each send itself, so `send` must return coroutines.
        driven = cast(DrivenSend, send)
        self._stream: BroadcastStream = fanout.open(
            driven, ws_frames.WS, heartbeat_ms=_LOOK_MS, owner=self, on_gone=self._gone
        )
        # Answers to publishes, in the order of their commands.
        self._answers: deque[_Answer] = deque()
        self._lanes: dict[str, _Lane] = {}
        # Started publishes, in order of arrival.
        self._under_way: dict[_Job, None] = {}
        # Bytes of the bodies of all publishes without an answer, whether or not they have started.
        self._unanswered_bytes = 0
        self._moved: asyncio.Future[None] | None = None
        self._is_draining = False
        # Set by the first subscription with `ack: auto`.
        self._acks: AutoAcks | None = None
        settings = state.settings
        self._prefixes = SocketPrefixes(
            fanout.dispatcher, caller, self._stream, settings.max_watch_topics
        )
        self._limits = CommandLimits(
            max_limit=settings.max_limit,
            max_topics=settings.max_watch_topics,
            max_node_bytes=settings.max_node_bytes,
            max_batch_records=settings.max_batch_records,
        )

    async def run(self, receive: Receive) -> None:
        """Take messages until the client or the stream ends the connection."""
        try:
            if not self._caller.until_revoked(self._revoke):
                self._revoke()
            await self._take_all(receive)
        except Exception:
            log.exception("defect while serving a WebSocket")
            self._stream.end(ws_frames.error(None, internal()), FAILED)
            raise
        finally:
            self._caller.forget(self._revoke)
            self._prefixes.stop()
            self._stream.close()
        # Wait for the started publishes: their records are appended even if nothing reads the
        # answers.
        await self._until(lambda: not self._lanes)

    def _revoke(self) -> None:
        """The key was revoked or changed."""
        self._stream.end(ws_frames.error(None, unauthorized(_REVOKED)), REFUSED)

    async def _take_all(self, receive: Receive) -> None:
        count = chars = 0
        while True:
            await self._until(self._has_room)
            await self._stream.flushed()
            message = await receive()
            if message["type"] == "websocket.disconnect":
                return
            text = message.get("text")
            await self._take(text)
            count += 1
            chars += len(text or "")
            if count >= _COMMANDS_A_TURN or chars >= _CHARS_A_TURN:
                # Receiving a message that has arrived does not wait, so let other tasks run.
                count = chars = 0
                await asyncio.sleep(0)

    def _has_room(self) -> bool:
        return (
            len(self._answers) < self._state.settings.max_ws_commands
            and self._unanswered_bytes < WS_UNANSWERED_BYTES_MAX
        )

    # --- commands -----------------------------------------------------------------------------

    async def _take(self, text: str | None) -> None:
        """Execute and answer one message."""
        began_ms = monotonic_ms()
        command: Command | None = None
        try:
            if text is None:
                raise invalid("commands are JSON text messages; this one is binary")
            if len(text) > CONTROL_BODY_BYTES_MAX and not self._caller.scopes & WRITE:
                raise too_large(CONTROL_BODY_BYTES_MAX)
            await self._state.body_turns.turn(len(text))
            if self._is_restricted:
                has_config = '"config"' in text[:_NAMED_CHARS_MAX]
                check_head(text, partial(self._check_head, has_config))
            command = self._decode(text)
            self._check(command)
            match command:
                case Publish():
                    admit(self._state)
                    self._publish(command, began_ms)
                case Subscribe():
                    await self._until(partial(self._is_published, command))
                    await self._subscribe(command)
                case Unsubscribe():
                    self._unsubscribe(command)
                case Ping():
                    self._stream.push(ws_frames.pong(command.request_id))
        except RefusedCommandError as error:
            payload = ws_frames.error(error.request_id, error.refusal)
            self._refuse(payload, is_publish=error.op == "publish")
        except TopicsError as refusal:
            request_id = None if command is None else command.request_id
            payload = ws_frames.error(request_id, refusal)
            self._refuse(payload, is_publish=isinstance(command, Publish))

    def _refuse(self, payload: bytes, *, is_publish: bool) -> None:
        """Answer with an error. The error of a publish keeps its place among the answers."""
        if is_publish:
            self._place(payload)
        else:
            self._stream.push(payload)

    def _decode(self, text: str) -> Command:
        return decode_command(text, self._limits)

    @property
    def _is_restricted(self) -> bool:
        """Whether the key forbids any command or topic."""
        return bool(self._caller.prefixes) or not self._caller.can(READ | WRITE)

    def _check_head(self, has_config: bool, op: str, topic: str | None) -> None:
        """Raise `forbidden` if the head of a message shows that the caller may not do this.

        `has_config`: the publish seems to hold a configuration. If the caller may not even append,
        the error then names both missing scopes.
        """
        scopes = _SCOPES_OF_OPS.get(op)
        if scopes is not None:
            if has_config and scopes == WRITE and not self._caller.can(WRITE):
                scopes |= ADMIN
            check_scopes(self._caller, scopes)
            if topic is not None:
                check_name(self._caller, topic, "topic")

    def _check(self, command: Command) -> None:
        """Raise `forbidden` unless the caller may execute the command (§7, WebSocket)."""
        caller = self._caller
        if caller.key is None:
            return
        if caller.is_stale:
            raise unauthorized(_REVOKED)
        if isinstance(command, Publish):
            check_scopes(caller, WRITE if command.config is None else WRITE | ADMIN)
            check_name(caller, command.topic, "topic")
            if command.config is not None:
                check_config(caller, command.config, "config.")
            if command.condition is not None:
                check_condition_scopes(caller, command.condition)
        elif isinstance(command, Subscribe):
            check_scopes(caller, READ)
            for name, start in command.starts.items():
                check_name(caller, name, "topic")
                if start.commits:
                    check_scopes(caller, READ | WRITE)
            for prefix in command.prefixes:
                check_name(caller, prefix, f"prefixes.{prefix}")

    def _is_published(self, command: Subscribe) -> bool:
        """Whether no publish to a topic of this command is under way."""
        starts, prefixes = command.starts, tuple(command.prefixes)
        return not any(name in starts or name.startswith(prefixes) for name in self._lanes)

    async def _subscribe(self, command: Subscribe) -> None:
        """Follow all topics and prefixes of the command, or none."""
        store, stream = admit(self._state), self._stream
        resolve = self._fanout.dispatcher.resolve
        self._prefixes.check(command.prefixes)
        known = self._prefixes.choose(command.prefixes, {*stream.cursors, *command.starts})
        starts = command.starts | known
        placed = [name for name, start in starts.items() if start.is_looked_up]
        views = {name: view for name in placed if (view := resolve(name)) is not None}
        options = command.options
        wanted = None if options.matcher is None else options.matcher.wanted
        seqs = await begin_seqs(store, views, starts, options.nodes, wanted)
        followed = {*stream.cursors, *command.starts}
        most = self._state.settings.max_watch_topics
        if len(followed) > most:
            raise invalid(f"at most {most} topics are followed at once", "topics")
        # Choose again: topics may have been created or deleted. A new topic is read from its first
        # record.
        found = self._prefixes.choose(command.prefixes, followed)
        cursors: list[Cursor] = []
        subscribed: list[tuple[str, ws_frames.Subscribed]] = []
        for name in (*command.starts, *found):
            start = starts.get(name, _FIRST)
            # If a topic was created again meanwhile, the old view is used, so that the stream
            # reports it.
            view = views.get(name) or resolve(name)
            if view is None and command.wait and start.consumer is None:
                cursors.append(Cursor.waiting(name))
                subscribed.append((name, ws_frames.Subscribed(0, 0, 1, is_waiting=True)))
                continue
            if view is None:
                message = f'topic "{name}" does not exist'
                raise TopicsError(Code.TOPIC_NOT_FOUND, message, {"topic": name})
            from_seq = view.head_seq if start.tail else seqs.get(name, start.from_seq)
            cursors.append(Cursor(name, view.topic_id, view.epoch, from_seq))
            subscribed.append(
                (name, ws_frames.Subscribed(from_seq, view.head_seq, view.earliest_seq))
            )
        left_out = self._prefixes.left_out if command.prefixes else ()
        stream.push(ws_frames.subscribed(command.request_id, subscribed, left_out))
        self._prefixes.begin(command.prefixes, options)
        self._prefixes.brought.difference_update(command.starts)
        self._prefixes.brought.update(found)
        for cursor in cursors:
            self._ack(cursor, starts.get(cursor.name, _FIRST))
            stream.follow(cursor, options)

    def _ack(self, cursor: Cursor, start: Start) -> None:
        """Commit for the subscription's consumer if it has `ack: auto`.

        Replaces the topic's earlier consumer.
        """
        if start.commits and start.consumer is not None:
            if self._acks is None:
                dispatcher, store = self._fanout.dispatcher, admit(self._state)
                self._acks = AutoAcks(
                    store, dispatcher, self._stream, partial(ws_frames.error, None)
                )
            self._acks.add(cursor, start.consumer)
        elif self._acks is not None:
            self._acks.remove(cursor.name)

    def _unsubscribe(self, command: Unsubscribe) -> None:
        names, prefixes = command.names, command.prefixes
        for prefix in prefixes:
            if not self._prefixes.follows(prefix):
                raise invalid(f'prefix "{clipped(prefix)}" is not subscribed to', "prefixes")
        for name in names:
            if not self._stream.follows(name):
                raise invalid(f'topic "{name}" is not subscribed to', "topic")
            by_prefix = self._prefixes.prefix_of(name, prefixes)
            if by_prefix is not None:
                message = f'topic "{name}" has prefix "{clipped(by_prefix)}": unsubscribe that'
                raise invalid(message, "topic")
        self._prefixes.end(prefixes)
        for name in names:
            self._stream.unfollow(name)
            if self._acks is not None:
                self._acks.remove(name)
        answer = ws_frames.unsubscribed(
            command.request_id, names, prefixes, is_list=command.is_list
        )
        self._stream.push(answer)
        self._prefixes.fill()

    def _gone(self, name: str) -> None:
        """The stream has reported a followed topic as deleted.

        A topic with a prefix may be created again.
        """
        self._stream.unfollow(name)
        self._prefixes.brought.discard(name)
        self._prefixes.fill()
        # The topic may have been created again before its deletion was reported.
        self._prefixes.created(name)

    # --- publishing ---------------------------------------------------------------------------

    def _publish(self, command: Publish, began_ms: float) -> None:
        lane = self._lanes.setdefault(command.topic, _Lane())
        lane.unsettled += 1
        self._unanswered_bytes += len(command.body)
        lane.waiting.append(_Job(command, self._place(), lane, began_ms))
        self._begin(lane)

    def _begin(self, lane: _Lane) -> None:
        """Start publishes of a lane until one does not have its seqs yet."""
        while lane.blocker is None and lane.waiting:
            lane.blocker = job = lane.waiting.popleft()
            job.rest = self._append(job)
            self._under_way[job] = None
            self._run(job)

    def _run(self, job: _Job) -> None:
        """Run a publish until it has to wait.

        Stepping it here, without a task, gives the publish its seqs before the next command is
        read, and its answer as soon as its wait is over (`before_frames`).
        """
        try:
            job.awaited = job.rest.send(None)
        except StopIteration as done:
            self._finish(job, done.value)
        except Exception:
            # Do not raise: the caller may be the dispatcher, which has other readers to serve.
            log.exception("defect while publishing to %s", job.command.topic)
            self._finish(job, ws_frames.error(job.command.request_id, internal()))
        else:
            assert job.awaited is not None, "an append waits for futures only"
            job.awaited.add_done_callback(partial(self._wake, job))

    def _wake(self, job: _Job, done: asyncio.Future[Any]) -> None:
        if job.awaited is done:
            self._run(job)
            self._begin(job.lane)

    def before_frames(self) -> None:
        """See `StreamOwner`: answer finished publishes before events of topics."""
        for job in tuple(self._under_way):
            if job.awaited is not None and job.awaited.done():
                self._wake(job, job.awaited)

    def drain(self) -> None:
        """See `StreamOwner`: answer publishes in flight first."""
        self._is_draining = True
        self._flush_answers()

    async def _append(self, job: _Job) -> bytes:
        """Append a publish's records; returns its answer."""
        command = job.command
        store = self._state.store
        assert store is not None
        throttle, throttle_wait_ms = self._state.throttle, 0.0
        try:
            if throttle.is_active:
                must_run = command.decoded.disable_backpressure
                size = len(command.body)
                throttle_wait_ms = await throttle.turn(command.topic, size, must_run=must_run)
            condition = command.condition
            check = None if condition is None else store.check_of(condition)
            attempt = partial(
                store.append,
                command.topic,
                command.body,
                command.decoded,
                header_key=None,
                config=command.config,
                producer=command.producer,
                submitted=partial(job.lane.let_go, job),
                check=check,
            )
            done = await store.decided(check, attempt)
        except TopicsError as refusal:
            return ws_frames.error(command.request_id, refusal)
        except StorageError as error:
            log.error("storage refused a publish to %s: %s", command.topic, error)
            return ws_frames.error(command.request_id, from_storage(error))
        if throttle_wait_ms:
            done = msgspec.structs.replace(
                done, throttle_wait_ms=done.throttle_wait_ms + throttle_wait_ms
            )
        return ws_frames.ack(
            command.request_id,
            command.topic,
            done,
            with_seqs=command.return_seqs,
            producer=command.producer,
            is_met=check is not None,
            total_ms=monotonic_ms() - job.began_ms,
        )

    def _finish(self, job: _Job, payload: bytes) -> None:
        """Store the answer of a publish. The topic's next publish may start."""
        lane = job.lane
        job.answer.payload = payload
        job.awaited = None
        self._unanswered_bytes -= len(job.command.body)
        del self._under_way[job]
        lane.let_go(job)
        lane.unsettled -= 1
        if not lane.unsettled:
            del self._lanes[job.command.topic]
        self._flush_answers()

    def _place(self, payload: bytes | None = None) -> _Answer:
        """Reserve the next place among the answers to publishes."""
        answer = _Answer(payload)
        self._answers.append(answer)
        if payload is not None:
            self._flush_answers()
        return answer

    def _flush_answers(self) -> None:
        """Send every answer whose predecessors are sent."""
        answers = self._answers
        while answers and (payload := answers[0].payload) is not None:
            answers.popleft()
            self._stream.push(payload)
        if self._is_draining and not answers:
            self._stream.end(code=GOING_AWAY, at_once=True)
        if self._moved is not None and not self._moved.done():
            self._moved.set_result(None)

    async def _until(self, holds: Callable[[], bool]) -> None:
        """Return when the condition holds. The condition is checked after each publish."""
        while not holds():
            self._moved = asyncio.get_running_loop().create_future()
            await self._moved
        self._moved = None
