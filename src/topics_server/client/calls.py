"""Queue requests (§10) as values: what to send, how to read the response.

Pure: `queue` (async) and `blocking` perform a `Call`; paths and bodies are defined only here. A
`repeatable` call may be sent twice without harm: it has a lease id or an idempotency key, or
changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, Generic, TypeVar
from urllib.parse import urlencode

import msgspec

from topics_server.client.addresses import checked_url, segment
from topics_server.client.errors import BadAnswer, NotAQueue
from topics_server.client.values import (
    Acked,
    Claimed,
    Counters,
    Enqueued,
    Extended,
    Job,
    Nacked,
    NewJob,
    QueueState,
)

T = TypeVar("T")
DEFAULT_URL: Final = "http://127.0.0.1:4000"
CLAIM_MAX: Final = 1000
_TOPICS: Final = "/v0/topics/"


class Call(msgspec.Struct, Generic[T], frozen=True, kw_only=True):
    """One request. `read` turns the answer's body into a value.

    `headers` replace the request's content type of JSON. `read_headers` replaces `read`: it turns
    the answer's headers (with lower-case names) and body into a value. `is_removal`: if an earlier
    try may have been executed, "not found" means that it was.
    """

    method: str
    path: str
    body: bytes | None
    read: Callable[[bytes], T]
    repeatable: bool
    wait_ms: int = 0  # how long the server may wait before it answers
    headers: Mapping[str, str] | Mapping[bytes, bytes] | None = None
    read_headers: Callable[[Mapping[str, str], bytes], T] | None = None
    is_removal: bool = False


class QueueAddress(msgspec.Struct, frozen=True):
    """A queue and its server."""

    url: str
    name: str

    def path(self, rest: str = "") -> str:
        """The path of the queue; the name is quoted into one segment."""
        return f"{_TOPICS}{segment(self.name)}{rest}"


def place(queue: str, url: str | None) -> QueueAddress:
    """A queue by name, or by its URL (`http://host:4000/v0/topics/jobs`).

    Raises `ValueError` for anything else.
    """
    if "://" in queue:
        base, found, name = queue.partition(_TOPICS)
        if url is not None:
            raise ValueError("the URL already names the queue: leave url out")
        if not found or not name or "/" in name:
            raise ValueError(
                f"{queue!r} is not the URL of a queue; such a URL ends in {_TOPICS}NAME"
            )
    else:
        base, name = url or DEFAULT_URL, queue
    checked_url(base, DEFAULT_URL)
    if not name:
        raise ValueError("a queue's name must not be empty")
    segment(name)  # raise for a wrong name now, not at its first use
    return QueueAddress(base.rstrip("/"), name)


class _Row(msgspec.Struct):
    """A claimed job in the server's form."""

    seq: int = msgspec.field(name="$seq")
    ts_ms: int = msgspec.field(name="$ts")
    lease_id: str
    deadline: int
    deliveries: int
    data: msgspec.Raw
    tag: str | None = msgspec.field(name="$tag", default=None)
    trace: str | None = msgspec.field(name="$trace", default=None)
    meta: msgspec.Raw = msgspec.Raw(b"null")

    def job(self, queue: str) -> Job:
        meta = bytes(self.meta)
        return Job(
            queue=queue,
            seq=self.seq,
            lease_id=self.lease_id,
            deadline_ms=self.deadline,
            ts_ms=self.ts_ms,
            deliveries=self.deliveries,
            raw=bytes(self.data),
            tag=self.tag,
            trace=self.trace,
            raw_meta=None if meta == b"null" else meta,
        )


class _Claimed(msgspec.Struct):
    claimed: list[_Row]
    ready: int = 0
    ack: Acked | None = None


class _Stored(msgspec.Struct):
    first_seq: int
    last_seq: int
    created: bool = False
    deduped: bool = False


class _State(msgspec.Struct):
    topic: str
    head_seq: int
    count: int
    queue: Counters | None = None
    config: dict[str, Any] = {}


def reader(kind: type[T]) -> Callable[[bytes], T]:
    """A decoder of answers of this type; it raises `BadAnswer` for any other answer."""
    decoder = msgspec.json.Decoder(kind)

    def read(answer: bytes) -> T:
        try:
            return decoder.decode(answer)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise BadAnswer(f"the answer is not from a topics server: {error}") from None

    return read


_read_acked: Final = reader(Acked)
_read_nacked: Final = reader(Nacked)
_read_extended: Final = reader(Extended)
_read_state: Final = reader(_State)
_read_claimed: Final = reader(_Claimed)
_read_row: Final = reader(_Row)
_read_stored: Final = reader(_Stored)


def _post(
    where: QueueAddress,
    rest: str,
    body: Mapping[str, Any],
    read: Callable[[bytes], T],
    *,
    repeatable: bool,
) -> Call[T]:
    text = msgspec.json.encode(body)
    return Call(method="POST", path=where.path(rest), body=text, read=read, repeatable=repeatable)


def traced(call: Call[T], traceparent: str | None) -> Call[T]:
    """The call with this `traceparent` in its headers; a trace that no header can carry is left
    out.
    """
    if not traceparent or not (traceparent.isascii() and traceparent.isprintable()):
        return call
    headers = {"Content-Type": "application/json", "traceparent": traceparent}
    return msgspec.structs.replace(call, headers=headers)


def enqueue(
    where: QueueAddress,
    jobs: Iterable[NewJob],
    *,
    key: str,
    create: bool | None,
    config: Mapping[str, Any],
    traceparent: str | None = None,
) -> Call[Enqueued]:
    """Append jobs, all or none. A missing topic becomes a queue with `config`."""
    records = [_record(job) for job in jobs]
    if not records:
        raise ValueError("there is no job to enqueue")
    body: dict[str, Any] = {
        "records": records,
        "idempotency_key": key,
        "config": {"type": "queue", **config},
    }
    if create is not None:
        body["create"] = create
    call = _post(where, "?return_seqs=false", body, _enqueued, repeatable=True)
    return traced(call, traceparent)


def _record(job: NewJob) -> dict[str, Any]:
    if job.delay_ms is not None and job.deliver_at_ms is not None:
        raise ValueError("delay_ms and deliver_at_ms: give one of them")
    fields = {
        "tag": job.tag,
        "meta": job.meta,
        "delay_ms": job.delay_ms,
        "deliver_at_ms": job.deliver_at_ms,
    }
    return {"data": job.data, **{k: v for k, v in fields.items() if v is not None}}


def _enqueued(answer: bytes) -> Enqueued:
    found = _read_stored(answer)
    return Enqueued(found.first_seq, found.last_seq, found.created, found.deduped)


def claim(
    where: QueueAddress,
    node: str,
    *,
    max_jobs: int,
    lease_ms: int | None,
    wait_ms: int,
    finished: Sequence[Job] = (),
) -> Call[Claimed]:
    """Lease up to `max_jobs`, waiting up to `wait_ms` for the first; ack `finished` jobs."""
    if max_jobs < 1:
        raise ValueError("a claim must ask for one job or more")
    body: dict[str, Any] = {"node": node, "max": min(max_jobs, CLAIM_MAX)}
    if lease_ms is not None:
        body["lease_ms"] = lease_ms
    if wait_ms:
        body["wait_ms"] = wait_ms
    if finished:
        body["ack"] = {
            key: value for key, value in _fenced(finished, node).items() if key != "node"
        }

    def read(answer: bytes) -> Claimed:
        found = _read_claimed(answer)
        return Claimed([row.job(where.name) for row in found.claimed], found.ready, found.ack)

    call = _post(where, "/claim", body, read, repeatable=False)
    return msgspec.structs.replace(call, wait_ms=wait_ms)


def _fenced(jobs: Sequence[Job], node: str) -> dict[str, Any]:
    if not 0 < len(jobs) <= CLAIM_MAX:
        raise ValueError(f"a call names 1 to {CLAIM_MAX} jobs")
    return {
        "node": node,
        "seqs": [job.seq for job in jobs],
        "lease_ids": [job.lease_id for job in jobs],
    }


def ack(where: QueueAddress, node: str, jobs: Sequence[Job]) -> Call[Acked]:
    """Delete these jobs; jobs with another lease by now are skipped."""
    return _post(where, "/ack", _fenced(jobs, node), _read_acked, repeatable=True)


def nack(
    where: QueueAddress,
    node: str,
    jobs: Sequence[Job],
    *,
    delay_ms: int,
    error: str | None = None,
) -> Call[Nacked]:
    """Release these jobs; jobs with another lease by now are skipped.

    `error` gives the reason; the server keeps its first 1,024 bytes with the job's dead letter.
    """
    body = {**_fenced(jobs, node), "delay_ms": delay_ms}
    if error:
        body["error"] = error
    return _post(where, "/nack", body, _read_nacked, repeatable=True)


def extend(
    where: QueueAddress, node: str, jobs: Sequence[Job], *, lease_ms: int, no_more: bool = False
) -> Call[Extended]:
    """Let these leases last `lease_ms` from now.

    `no_more`: the streams that delivered these jobs must not deliver more.
    """
    body = {**_fenced(jobs, node), "lease_ms": lease_ms}
    if no_more:
        body["no_more"] = True
    return _post(where, "/extend", body, _read_extended, repeatable=True)


def state(where: QueueAddress) -> Call[QueueState]:
    """Counters and configuration."""
    return Call(
        method="GET",
        path=where.path("?touch=false"),
        body=None,
        read=_state_of,
        repeatable=True,
    )


def _state_of(answer: bytes) -> QueueState:
    found = _read_state(answer)
    if found.queue is None:
        raise NotAQueue(409, "not_a_queue", f"topic {found.topic!r} is a plain log")
    return QueueState(found.topic, found.head_seq, found.count, found.queue, found.config)


def work_path(where: QueueAddress, node: str, *, max_jobs: int, lease_ms: int | None) -> str:
    """The path of a stream that pushes jobs."""
    query: dict[str, str | int] = {"node": node, "max": min(max_jobs, CLAIM_MAX)}
    if lease_ms is not None:
        query["lease_ms"] = lease_ms
    return where.path(f"/work?{urlencode(query)}")


def pushed(where: QueueAddress, payload: bytes) -> Job:
    """The job in a stream's frame."""
    return _read_row(payload).job(where.name)
