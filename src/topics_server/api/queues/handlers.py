"""Queue routes (§10): claim, ack, nack, extend, push stream, leases, redrive.

Plain functions of the server's state and one request. Most claims and acks need no task: a claim is
answered at once, an ack when its delete is committed. For all others the handler returns a
coroutine. A started ack, nack, extend or redrive continues when its client disconnects. A waiting
claim ends when its client disconnects or loses its key; so does a push stream, whose jobs are
released at once. Called through the route table in `api/routes`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from typing import Any, Final, cast

from topics_server.api.context import ServerState
from topics_server.api.messages.requests import query_page_size
from topics_server.api.queues.requests import (
    ClaimRequest,
    HeldRequest,
    QueueLimits,
    decode_ack,
    decode_claim,
    decode_extend,
    decode_nack,
    decode_redrive,
    encode_leases_cursor,
    query_leases_cursor,
    query_work,
)
from topics_server.api.queues.responses import (
    job_frame,
    render_acked,
    render_claimed,
    render_extended,
    render_jobs,
    render_leases,
    render_nacked,
    render_redriven,
)
from topics_server.api.readiness import ConnectionSlot, admit, check_accepts_stream, until_ready
from topics_server.api.request import (
    Answer,
    EventStream,
    Pending,
    Receive,
    Request,
    Response,
    Send,
    end,
    released,
)
from topics_server.api.waiting_turn import WaitingTurn
from topics_server.api.watch.broadcast import FAILED, BroadcastStream
from topics_server.api.watch.send_queue import Send as DrivenSend
from topics_server.api.watch.sse import RETRY, REVOKED, SSE, STREAM_HEADERS, error_frame
from topics_server.auth.api_keys import Caller
from topics_server.auth.authorize import check_name, check_scopes
from topics_server.engine.topic.topic import Topic
from topics_server.http.error_responses import status_of
from topics_server.http.sockets import until_left
from topics_server.queue.answers import AckResult, FirstLeases, LeasedJob
from topics_server.queue.push import Push
from topics_server.queue.service import QueueService
from topics_server.runtime.clock import now_ms
from topics_server.values.errors import Code, TopicsError
from topics_server.values.texts.key_list import READ, WRITE
from topics_server.values.texts.query_string import parse_query

# An awaitable that returns when no answer may be sent any more.
Gone = Callable[[], Awaitable[None]]
Jobs = Sequence[LeasedJob] | FirstLeases
# Makes the response from the claimed jobs, the number of ready jobs left, and the ack in the same
# request.
Render = Callable[[Request, Jobs, int, AckResult | None], Response]

_HEARTBEAT_MS: Final = 15_000
# The stream's last event when the topic is no longer a queue (§10.8).
_NO_QUEUE: Final = error_frame(409, "the topic is no longer a queue")


def _admitted(state: ServerState) -> tuple[QueueService, QueueLimits]:
    """The queue service and the bounds of a request. Raises if the server takes no requests now."""
    admit(state)
    assert state.queues is not None, "ready means there are queues"
    return state.queues, state.settings


def claim(state: ServerState, request: Request) -> Response | Pending | Coroutine[Any, Any, Answer]:
    """`POST /v0/topics/{topic}/claim`: lease jobs to a node, and complete others with `ack`."""
    admit(state)
    queues, asked = state.queues, decode_claim(request.body, state.settings)
    assert queues is not None, "ready means there are queues"
    return _in_turn(state, queues, request, asked, _claimed)


def _in_turn(
    state: ServerState, queues: QueueService, request: Request, asked: ClaimRequest, render: Render
) -> Response | Pending | Coroutine[Any, Any, Answer]:
    """Claim now; under pressure, claim when it is the request's turn."""
    throttle = state.throttle
    if throttle.is_active and (throttle.is_backed_up or not throttle.passes(request.name)):
        if asked.wait_ms or queues.coalesces(request.name):
            return _claim_in_turn(state, queues, request, asked, render)
        begin = partial(_claim, queues, asked, render, gone=_stays)
        waiting = WaitingTurn(state, request, request.name, begin)
        return Pending(waiting.when_resolved, waiting.answer)
    return _claim(queues, asked, render, request)


def _claim(
    queues: QueueService,
    asked: ClaimRequest,
    render: Render,
    request: Request,
    gone: Gone | None = None,
) -> Response | Pending | Coroutine[Any, Any, Answer]:
    """Claim now, or return a coroutine that waits until `gone` returns."""
    name, ack = request.name, asked.ack
    if ack is None:
        done = queues.claim_at_once(
            name, asked.node, asked.max_jobs, asked.lease_ms, waits=asked.wait_ms > 0
        )
        if done is not None:
            return render(request, done, done.ready, None)
    else:
        begun = queues.claim_and_begin_ack(
            name,
            asked.node,
            asked.max_jobs,
            asked.lease_ms,
            seqs=ack.seqs,
            lease_ids=ack.lease_ids,
            waits=asked.wait_ms > 0,
        )
        if begun is not None:
            pending, leased = begun

            def answer() -> Response:
                try:
                    acked = pending.outcome()
                except TopicsError:
                    queues.give_back_first(pending.topic, leased)
                    raise
                return render(request, leased, leased.ready, acked)

            return Pending(pending.when_resolved, answer)
    return _claim_slowly(queues, asked, render, request, gone or partial(released, request))


async def _claim_in_turn(
    state: ServerState, queues: QueueService, request: Request, asked: ClaimRequest, render: Render
) -> Response:
    """A claim that waits for its turn, and then perhaps for jobs."""
    request.throttle_wait_ms = await state.throttle.turn(request.name, len(request.body))
    return await _claim_slowly(queues, asked, render, request, partial(released, request))


async def _claim_slowly(
    queues: QueueService, asked: ClaimRequest, render: Render, request: Request, gone: Gone
) -> Response:
    """A claim that may wait: for its ack, its topic, a sync, blocks on the disk, or a job."""
    ack, acked = asked.ack, None
    if ack is not None:
        acked = await queues.ack(request.name, asked.node, ack.seqs, ack.lease_ids)
    done = await queues.claim(
        request.name,
        asked.node,
        asked.max_jobs,
        asked.lease_ms,
        wait_ms=asked.wait_ms,
        gone=gone,
    )
    if done is None:
        end(request)
    return render(request, done.jobs, done.ready, acked)


def _claimed(request: Request, jobs: Jobs, ready: int, acked: AckResult | None) -> Response:
    """The answer to a claim."""
    waited_ms = request.throttle_wait_ms or 0.0
    body = render_claimed(request.name, jobs, ready, request.elapsed_ms(), waited_ms, acked)
    return Response(200, body)


def _acked_and_claimed(
    request: Request, jobs: Jobs, ready: int, acked: AckResult | None
) -> Response:
    """The answer to an ack with `claim_next`."""
    assert acked is not None
    claimed = render_jobs(jobs, ready)
    return Response(200, render_acked(request.name, acked, request.elapsed_ms(), claimed))


async def _stays() -> None:
    """Never returns.

    A claim that waits only for its turn does not check its client: if the client left, its leases
    expire.
    """
    await asyncio.get_running_loop().create_future()


def ack(state: ServerState, request: Request) -> Response | Pending | Coroutine[Any, Any, Answer]:
    """`POST /v0/topics/{topic}/ack`: complete jobs, which deletes them; `claim_next` takes others.

    Under pressure an ack starts at once; an ack with `claim_next` waits for its turn like a claim.
    """
    admit(state)
    queues, asked = state.queues, decode_ack(request.body, state.settings)
    assert queues is not None, "ready means there are queues"
    if asked.claim_next is not None:
        check_scopes(request.caller, READ | WRITE)
        return _in_turn(state, queues, request, asked.claim_next, _acked_and_claimed)
    pending = queues.begin_ack(request.name, asked.node, asked.seqs, asked.lease_ids)
    if pending is None:
        return _ack_slowly(queues, request, asked)
    return Pending(pending.when_resolved, partial(_acked, request, pending.outcome))


async def _ack_slowly(queues: QueueService, request: Request, asked: HeldRequest) -> Response:
    """An ack that waits for its topic, or for another ack."""
    done = await queues.ack(request.name, asked.node, asked.seqs, asked.lease_ids)
    return Response(200, render_acked(request.name, done, request.elapsed_ms()))


def _acked(request: Request, outcome: Callable[[], AckResult]) -> Response:
    """The answer to an ack that has ended. Raises the error of `outcome`."""
    return Response(200, render_acked(request.name, outcome(), request.elapsed_ms()))


async def nack(state: ServerState, request: Request) -> Response:
    """`POST /v0/topics/{topic}/nack`: release jobs."""
    queues, limits = _admitted(state)
    asked = decode_nack(request.body, limits)
    done = await queues.nack(
        request.name,
        asked.node,
        asked.seqs,
        asked.lease_ids,
        delay_ms=asked.delay_ms,
        error=asked.error,
    )
    return Response(200, render_nacked(request.name, done, request.elapsed_ms()))


async def extend(state: ServerState, request: Request) -> Response:
    """`POST /v0/topics/{topic}/extend`: extend leases."""
    queues, limits = _admitted(state)
    asked = decode_extend(request.body, limits)
    done = await queues.extend(
        request.name,
        asked.node,
        asked.seqs,
        asked.lease_ids,
        lease_ms=asked.lease_ms,
        no_more=asked.no_more,
    )
    return Response(200, render_extended(request.name, done, request.elapsed_ms()))


async def redrive(state: ServerState, request: Request) -> Response:
    """`POST /v0/topics/{topic}/redrive`: turn dead letters of this queue into jobs again."""
    queues, limits = _admitted(state)
    asked = decode_redrive(request.body, request.name, limits)
    done = await queues.redrive(
        request.name,
        _source(state, request, asked.source),
        seqs=asked.seqs,
        match=asked.match,
        after_seq=asked.after_seq,
        max_jobs=asked.max_jobs,
    )
    return Response(200, render_redriven(request.name, done, request.elapsed_ms()))


def _source(state: ServerState, request: Request, source: str | None) -> str | None:
    """The source of a redrive; raises `forbidden` if the caller may not name it."""
    caller = request.caller
    if source is not None:
        check_name(caller, source, "from")
    elif caller.prefixes:
        source = admit(state).state(request.name, touch=False).config.dead_letter
        if source is not None and not caller.may_name(source):
            raise TopicsError(
                Code.FORBIDDEN,
                "the key gives no access to the queue's dead_letter topic",
                {"field": "from"},
            )
    return source


async def leases(state: ServerState, request: Request) -> Response:
    """`GET /v0/topics/{topic}/leases`: the leases with holder and deadline."""
    queues, _ = _admitted(state)
    query = parse_query(request.query)
    page = await queues.leases(
        request.name, after_seq=query_leases_cursor(query), page_size=query_page_size(query)
    )
    after_seq = page.next_after_seq
    cursor = None if after_seq is None else encode_leases_cursor(after_seq)
    return Response(200, render_leases(request.name, page, cursor, request.elapsed_ms()))


# --- the push stream --------------------------------------------------------------------------


async def work(state: ServerState, request: Request) -> Answer:
    """`GET /v0/topics/{topic}/work`: jobs as they come, at most `max` in flight.

    During replay the request waits, like the GET of a watch session.
    """
    check_accepts_stream(request.headers.get(b"accept"))
    asked = query_work(parse_query(request.query), state.settings)
    await until_ready(state, request)
    queues = state.queues
    assert queues is not None, "ready means there are queues"
    topic, _ = await queues.queue(request.name)
    # Check again: the line before may have waited for a change of the topic.
    await until_ready(state, request)
    slot = ConnectionSlot(state, request.caller.key)
    if request.method == "HEAD":
        return EventStream(STREAM_HEADERS, _nothing, slot.free)
    worker = WorkerStream(state, queues, topic, asked, request.caller)
    return EventStream(STREAM_HEADERS, worker.run, slot.free)


async def _nothing(_receive: Receive, _send: Send) -> None:
    """The empty body of a HEAD."""


class WorkerStream:
    """One push stream: sends the jobs that its `Push` claims as frames."""

    __slots__ = ("_asked", "_caller", "_push", "_queues", "_state", "_stream", "_topic")

    def __init__(
        self,
        state: ServerState,
        queues: QueueService,
        topic: Topic,
        asked: ClaimRequest,
        caller: Caller,
    ) -> None:
        self._state = state
        self._queues = queues
        self._topic = topic
        self._asked = asked
        self._caller = caller
        # Set by `run`.
        self._push: Push
        self._stream: BroadcastStream

    async def run(self, receive: Receive, send: Send) -> None:
        """Stream until the client disconnects or the stream ends."""
        asked = self._asked
        fanout, _ = self._state.watching()
        stream = self._stream = fanout.open(
            # The stream steps through each send itself, so `send` must return coroutines.
            cast(DrivenSend, send),
            SSE,
            heartbeat_ms=_HEARTBEAT_MS,
        )
        push = self._push = Push(
            self._queues,
            self._topic,
            asked.node,
            asked.max_jobs,
            asked.lease_ms,
            deliver=self._deliver,
            tell=self._tell,
        )
        try:
            # Sending the head may have waited for the socket. Meanwhile the server may have begun
            # to shut down.
            if self._state.phase != "ready":
                stream.end(at_once=True)
            elif not self._caller.until_revoked(self._revoke):
                self._revoke()
            else:
                stream.push(RETRY + SSE.heartbeat(now_ms()))
                push.start()
            await until_left(receive, send)
        finally:
            self._caller.forget(self._revoke)
            push.close()
            stream.close()

    def _revoke(self) -> None:
        """The key was revoked or changed: release its jobs."""
        self._push.close()
        self._stream.end(REVOKED)

    async def _deliver(self, jobs: Sequence[LeasedJob]) -> None:
        """Send jobs; return when the socket has taken them."""
        name = self._topic.name
        self._stream.push(b"".join([job_frame(name, job) for job in jobs]))
        await self._stream.flushed()
        if self._stream.is_over:
            # The client did not read for too long. Its connection may stay open for a while.
            self._push.close()

    def _tell(self, error: TopicsError, is_last: bool) -> None:
        """Send an error frame, and end the stream if the frame is the last one."""
        if error.code is Code.TOPIC_NOT_FOUND:
            frame = _NO_QUEUE
        else:
            frame = error_frame(status_of(error), error.message)
        if is_last:
            self._stream.end(frame, FAILED)
        else:
            self._stream.push(frame)
