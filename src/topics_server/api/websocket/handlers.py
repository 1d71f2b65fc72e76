"""`GET /v0/ws`: publish and follow topics over one WebSocket (§7).

A connection is one task: it takes a message, does what it says, takes the next. Only a publish is
left behind: it goes on whether or not its client stays. Invariants: publishes of one socket are
appended in the order in which they came, topic by topic, and answered in the order in which they
came; an answer that can be given is given before what followed topics tell; a subscribe waits for
the publishes to its topics that came before it; at most `max_ws_commands` publishes of a socket are
unanswered, none is read while those hold `WS_UNANSWERED_BYTES_MAX`, and nothing is read while its
buffer is full. Answers and what topics tell leave through one `fanout.Stream`. Whatever a client
sends, the socket stays open: what cannot be read at all (no UTF-8, too large) is closed by the
protocol below. Called by `api/application`; loop thread only.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, Final, cast

import msgspec

from topics_server.api.application import Receive, Request, Response, Scope, Send, refuse_socket
from topics_server.api.context import ServerState
from topics_server.api.readiness import ConnectionSlot, admit
from topics_server.api.visibility import check_config
from topics_server.api.watch.broadcast import FAILED, GOING_AWAY, REFUSED, BroadcastStream, Fanout
from topics_server.api.watch.send_queue import Send as DrivenSend
from topics_server.api.websocket import frames as ws_frames
from topics_server.api.websocket.commands import (
    Command,
    CommandLimits,
    Ping,
    Publish,
    RefusedCommandError,
    Subscribe,
    Unsubscribe,
    decode_command,
)
from topics_server.auth.api_keys import ADMIN, EVERYBODY, READ, WRITE, Caller
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
from topics_server.values.errors import Code, StorageError, TopicsError, invalid
from topics_server.values.limits import CONTROL_BODY_BYTES_MAX, KIB, WS_UNANSWERED_BYTES_MAX

# Commands of one socket that are done before others have a turn of the loop.
_COMMANDS_A_TURN: Final = 16
_CHARS_A_TURN: Final = 64 * KIB
# A socket has no heartbeat of ours; this is how often the fan-out looks at one.
_LOOK_MS: Final = 60_000
_REVOKED: Final = "the key of this socket was revoked or changed"


def no_upgrade(_state: ServerState, _request: Request) -> Response:
    """`GET /v0/ws` without an upgrade: there is nothing to read here."""
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
        # No page can send `Authorization` with an opening, so a key does not speak for its origin.
        check_origin(headers, state.settings.allowed_origins, is_authorized=False)
        admit(state)
        slot = ConnectionSlot(state, caller.key)
    except TopicsError as refusal:
        await refuse_socket(scope, send, refusal)
        return
    try:
        selected = SUBPROTOCOL if SUBPROTOCOL in offered else None
        told = [(REQUEST_ID, request_id(headers))]
        await send({"type": "websocket.accept", "subprotocol": selected, "headers": told})
        assert state.fanout is not None, "ready means there is one"
        await Connection(state, state.fanout, send, caller).run(receive)
    finally:
        slot.free()


class _Answer:
    """The place of one publish's answer among the others; `payload` once there is one."""

    __slots__ = ("payload",)

    def __init__(self, payload: bytes | None = None) -> None:
        self.payload = payload


class _Lane:
    """Publishes of one socket to one topic that are not settled.

    The topic's next one is not begun before `blocker`, the one begun last, has its place in the
    topic; `waiting` are those behind it. `unsettled` counts all.
    """

    __slots__ = ("blocker", "unsettled", "waiting")

    def __init__(self) -> None:
        self.blocker: _Job | None = None
        self.waiting: deque[_Job] = deque()
        self.unsettled = 0

    def let_go(self, job: _Job) -> None:
        """The job has its place, or will never have one."""
        if self.blocker is job:
            self.blocker = None


class _Job:
    """One publish on its way: `rest` of it is run when `waits_for` is done.

    `began_ms` is of the monotonic clock.
    """

    __slots__ = ("answer", "began_ms", "command", "lane", "rest", "waits_for")

    def __init__(self, command: Publish, answer: _Answer, lane: _Lane, began_ms: float) -> None:
        self.command = command
        self.answer = answer
        self.lane = lane
        self.began_ms = began_ms
        self.rest: Coroutine[Any, Any, bytes]
        self.waits_for: asyncio.Future[Any] | None = None


class Connection:
    """One open socket."""

    def __init__(
        self, state: ServerState, fanout: Fanout, send: Send, caller: Caller = EVERYBODY
    ) -> None:
        self._state = state
        self._caller = caller
        self._fanout = fanout
        # The stream runs sends by hand, which an awaitable that is no coroutine would not allow.
        driven = cast(DrivenSend, send)
        self._stream: BroadcastStream = fanout.open(
            driven, ws_frames.WS, heartbeat_ms=_LOOK_MS, owner=self
        )
        # Answers to publishes, in the order of their commands.
        self._answers: deque[_Answer] = deque()
        self._lanes: dict[str, _Lane] = {}
        # Publishes that were begun, in the order in which they came.
        self._under_way: dict[_Job, None] = {}
        # What their bodies hold, and those of publishes that wait to begin.
        self._unanswered_bytes = 0
        self._moved: asyncio.Future[None] | None = None
        self._is_draining = False
        settings = state.settings
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
            self._stream.close()
        # Their records are appended whoever asked; nobody reads the answers any more.
        await self._until(lambda: not self._lanes)

    def _revoke(self) -> None:
        """The key is no more what it was."""
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
                # What has arrived is received without waiting: others would never have a turn.
                count = chars = 0
                await asyncio.sleep(0)

    def _has_room(self) -> bool:
        return (
            len(self._answers) < self._state.settings.max_ws_commands
            and self._unanswered_bytes < WS_UNANSWERED_BYTES_MAX
        )

    # --- commands -----------------------------------------------------------------------------

    async def _take(self, text: str | None) -> None:
        """Do what one message says, and answer it."""
        began_ms = monotonic_ms()
        command: Command | None = None
        try:
            if text is None:
                raise invalid("commands are JSON text messages; this one is binary")
            if len(text) > CONTROL_BODY_BYTES_MAX and not self._caller.scopes & WRITE:
                raise too_large(CONTROL_BODY_BYTES_MAX)
            command = self._decode(text)
            self._check(command)
            match command:
                case Publish():
                    admit(self._state)
                    self._publish(command, began_ms)
                case Subscribe():
                    await self._until(lambda: command.starts.keys().isdisjoint(self._lanes))
                    self._subscribe(command)
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
        """Answer with an error; a publish's has its place among the other answers."""
        if is_publish:
            self._place(payload)
        else:
            self._stream.push(payload)

    def _decode(self, text: str) -> Command:
        return decode_command(text, self._limits)

    def _check(self, command: Command) -> None:
        """Whether the caller may do this (§7, WebSocket). Raises `forbidden`."""
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
        elif isinstance(command, Subscribe):
            check_scopes(caller, READ)
            for name in command.starts:
                check_name(caller, name, "topic")

    def _subscribe(self, command: Subscribe) -> None:
        """Follow all topics of the command, or none."""
        admit(self._state)
        followed = self._followed()
        most = self._state.settings.max_watch_topics
        if len(followed.union(command.starts)) > most:
            raise invalid(f"at most {most} topics are followed at once", "topics")
        cursors: list[Cursor] = []
        told: list[tuple[str, ws_frames.Subscribed]] = []
        for name, start in command.starts.items():
            view = self._fanout.feeds.resolve(name)
            if view is None and command.wait:
                cursors.append(Cursor.waiting(name))
                told.append((name, ws_frames.Subscribed(0, 0, 1, is_waiting=True)))
                continue
            if view is None:
                message = f'topic "{name}" does not exist'
                raise TopicsError(Code.TOPIC_NOT_FOUND, message, {"topic": name})
            from_seq = view.head_seq if start.tail else start.from_seq
            cursors.append(Cursor(name, view.topic_id, view.epoch, from_seq))
            told.append((name, ws_frames.Subscribed(from_seq, view.head_seq, view.earliest_seq)))
        self._stream.push(ws_frames.subscribed(command.request_id, told))
        for cursor in cursors:
            self._stream.follow(cursor, command.options)

    def _unsubscribe(self, command: Unsubscribe) -> None:
        for name in command.names:
            if not self._stream.follows(name):
                raise invalid(f'topic "{name}" is not subscribed to', "topic")
        for name in command.names:
            self._stream.unfollow(name)
        names, is_list = command.names, command.is_list
        self._stream.push(ws_frames.unsubscribed(command.request_id, names, is_list=is_list))

    def _followed(self) -> set[str]:
        """Topics that are followed; those deleted meanwhile are forgotten."""
        stream = self._stream
        for name in [name for name in stream.cursors if not stream.follows(name)]:
            stream.unfollow(name)
        return set(stream.cursors)

    # --- publishing ---------------------------------------------------------------------------

    def _publish(self, command: Publish, began_ms: float) -> None:
        lane = self._lanes.setdefault(command.topic, _Lane())
        lane.unsettled += 1
        self._unanswered_bytes += len(command.body)
        lane.waiting.append(_Job(command, self._place(), lane, began_ms))
        self._begin(lane)

    def _begin(self, lane: _Lane) -> None:
        """Begin publishes of a lane until one has no place in its topic yet."""
        while lane.blocker is None and lane.waiting:
            lane.blocker = job = lane.waiting.popleft()
            job.rest = self._append(job)
            self._under_way[job] = None
            self._run(job)

    def _run(self, job: _Job) -> None:
        """Run a publish as far as it goes.

        By hand and not as a task: so it has its place before the next command is looked at, and can
        be answered as soon as what it waits for is done (`before_frames`).
        """
        try:
            job.waits_for = job.rest.send(None)
        except StopIteration as done:
            self._settle(job, done.value)
        except Exception:
            # Above is whoever woke it: maybe the turn in which everybody's readers are pumped.
            log.exception("defect while publishing to %s", job.command.topic)
            self._settle(job, ws_frames.error(job.command.request_id, internal()))
        else:
            assert job.waits_for is not None, "an append waits for futures only"
            job.waits_for.add_done_callback(partial(self._wake, job))

    def _wake(self, job: _Job, done: asyncio.Future[Any]) -> None:
        if job.waits_for is done:
            self._run(job)
            self._begin(job.lane)

    def before_frames(self) -> None:
        """See `fanout.Owner`: publishes that are done are answered before what topics tell."""
        for job in tuple(self._under_way):
            if job.waits_for is not None and job.waits_for.done():
                self._wake(job, job.waits_for)

    def drain(self) -> None:
        """See `fanout.Owner`: what is on its way is answered first."""
        self._is_draining = True
        self._flush_answers()

    async def _append(self, job: _Job) -> bytes:
        """Append what a publish carries; its answer."""
        command = job.command
        store = self._state.store
        assert store is not None
        throttle, parked_ms = self._state.throttle, 0.0
        try:
            if throttle.is_active:
                insists = command.decoded.disable_backpressure
                size = len(command.body)
                parked_ms = await throttle.turn(command.topic, size, insists=insists)
            done = await store.append(
                command.topic,
                command.body,
                command.decoded,
                header_key=None,
                config=command.config,
                producer=command.producer,
                submitted=partial(job.lane.let_go, job),
            )
        except TopicsError as refusal:
            return ws_frames.error(command.request_id, refusal)
        except StorageError as error:
            log.error("storage refused a publish to %s: %s", command.topic, error)
            return ws_frames.error(command.request_id, from_storage(error))
        if parked_ms:
            done = msgspec.structs.replace(done, parked_ms=done.parked_ms + parked_ms)
        return ws_frames.ack(
            command.request_id,
            command.topic,
            done,
            with_seqs=command.return_seqs,
            producer=command.producer,
            total_ms=monotonic_ms() - job.began_ms,
        )

    def _settle(self, job: _Job, payload: bytes) -> None:
        """A publish has its answer; its topic's next one may begin."""
        lane = job.lane
        job.answer.payload = payload
        job.waits_for = None
        self._unanswered_bytes -= len(job.command.body)
        del self._under_way[job]
        lane.let_go(job)
        lane.unsettled -= 1
        if not lane.unsettled:
            del self._lanes[job.command.topic]
        self._flush_answers()

    def _place(self, payload: bytes | None = None) -> _Answer:
        """The next place among the answers to publishes."""
        answer = _Answer(payload)
        self._answers.append(answer)
        if payload is not None:
            self._flush_answers()
        return answer

    def _flush_answers(self) -> None:
        """Send every answer that no earlier one is missing for."""
        answers = self._answers
        while answers and (payload := answers[0].payload) is not None:
            answers.popleft()
            self._stream.push(payload)
        if self._is_draining and not answers:
            self._stream.end(code=GOING_AWAY, at_once=True)
        if self._moved is not None and not self._moved.done():
            self._moved.set_result(None)

    async def _until(self, holds: Callable[[], bool]) -> None:
        """Return when it holds; publishes that end change it."""
        while not holds():
            self._moved = asyncio.get_running_loop().create_future()
            await self._moved
        self._moved = None
