"""Responses and stream frames of queue routes (§10). Pure.

A job is a member of a claim's answer, or a `job` event of a push stream. Its `data` and `meta` are
copied verbatim; bytes are base64, as in a diff. Called by `api/queues/handlers`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

import msgspec

from topics_server.api.messages.responses import render_json
from topics_server.api.watch.sse import frame
from topics_server.engine.read.exact_read import Row
from topics_server.queue.answers import (
    AckResult,
    ExtendResult,
    FirstLeases,
    LeasedJob,
    LeasePage,
    NackResult,
    Redriven,
)
from topics_server.queue.leases.jobs import SkipReason, lease_digits, lease_text
from topics_server.values.json_cache import marked_payload, payload_of

_encode: Final = msgspec.json.Encoder().encode
# The last three digits of numbers. Seqs of one claim are mostly consecutive and share the others.
_LAST_DIGITS: Final = tuple(b"%03d" % number for number in range(1000))


def render_job(job: LeasedJob) -> bytes:
    """The members of a job, without the braces around them."""
    block, row = job.block, job.row
    node, tag, payload = block.nodes[row], block.tags[row], payload_of(block, row)
    assert block.first_seq + row == job.seq
    return (
        b'"$seq":%d,"lease_id":"%b","deadline":%d,"$ts":%d%b%b%b,"deliveries":%d%b,"data":%b%b'
    ) % (
        job.seq,
        lease_text(job.lease_id).encode("ascii"),
        job.deadline_ms,
        block.times[row],
        b"" if node is None else b',"$node":%b' % _encode(node),
        b"" if tag is None else b',"$tag":%b' % _encode(tag),
        payload.trace,
        job.deliveries,
        payload.kind,
        payload.data,
        b',"meta":%b' % payload.meta if payload.meta else b"",
    )


def render_claimed(
    name: str,
    jobs: Sequence[LeasedJob] | FirstLeases,
    ready: int,
    total_ms: float,
    throttle_wait_ms: float = 0.0,
    acked: AckResult | None = None,
) -> bytes:
    """The answer to a claim (§10.2). `acked`: the result of the ack in the same request."""
    return b'{"topic":"%b",%b%b,"performance":{"server_total_ms":%.3f,"throttle_wait_ms":%.3f}}' % (
        name.encode("ascii"),
        render_jobs(jobs, ready),
        b"" if acked is None else b',"ack":%b' % _encode(_ack_members(acked)),
        total_ms,
        throttle_wait_ms,
    )


def render_jobs(jobs: Sequence[LeasedJob] | FirstLeases, ready: int) -> bytes:
    """The members of an answer for its claimed jobs, without the braces around them."""
    if isinstance(jobs, FirstLeases):
        members, count = _render_first(jobs), len(jobs.seqs)
    else:
        members = b",".join([b"{%b}" % render_job(job) for job in jobs])
        count = len(jobs)
    return b'"claimed":[%b],"count":%d,"ready":%d' % (members, count, ready)


def _render_first(leased: FirstLeases) -> bytes:
    """Jobs that were never leased; many without marks are joined from columns of texts."""
    records, count = leased.rows, len(leased.seqs)
    if isinstance(records, list):
        return _render_rows(leased, records)
    if records.marks.count(0) < count:
        return _render_rows(leased, records.rows())
    shared_seq, seqs = _seq_digits(leased.seqs)
    shared_id, ids = lease_digits(leased.first_id, count)
    before = b'","deadline":%d,"$ts":' % leased.deadline_ms
    behind = b',"deliveries":1,"data":'
    varying: list[Sequence[bytes]] = []
    times = records.times
    # Jobs that were appended by one call have one time.
    if times == times[:1] * count:
        before += b"%d" % times[0]
    else:
        varying.append([b"%d" % ts for ts in times])
    for key, texts in ((b"$node", records.nodes), (b"$tag", records.tags)):
        if texts.count(None) < count:
            varying.append(_labels(key, texts))
    # The pieces of a job: bytes that all jobs share, and columns with a text for each job.
    pieces: list[bytes | Sequence[bytes]] = [
        b'},{"$seq":%b' % shared_seq,
        seqs,
        b',"lease_id":"lease_%b' % shared_id,
        ids,
        *([before, *varying, behind] if varying else [before + behind]),
        records.datas,
    ]
    if records.metas.count(b"") < count:
        pieces.append([b',"meta":%b' % meta if meta else b"" for meta in records.metas])
    width = len(pieces)
    joined = [piece if isinstance(piece, bytes) else b"" for piece in pieces] * count
    for index, piece in enumerate(pieces):
        if not isinstance(piece, bytes):
            joined[index::width] = piece
    joined[0] = joined[0].removeprefix(b"},")
    joined.append(b"}")
    return b"".join(joined)


def _seq_digits(seqs: Sequence[int]) -> tuple[bytes, Sequence[bytes]]:
    """The digits that these ascending seqs share, and the other digits of each seq."""
    first, count = seqs[0], len(seqs)
    last = first % 1000
    if first >= 1000 and last + count <= 1000 and seqs[-1] - first == count - 1:
        return b"%d" % (first // 1000), _LAST_DIGITS[last : last + count]
    return b"", [b"%d" % seq for seq in seqs]


def _render_rows(leased: FirstLeases, rows: Iterable[Row]) -> bytes:
    jobs: list[bytes] = []
    lease_id, deadline_ms = leased.first_id, leased.deadline_ms
    for seq, (ts, node, tag, data, meta, is_marked) in zip(leased.seqs, rows, strict=True):
        kind = trace = b""
        if is_marked:
            payload = marked_payload(data, meta)
            kind, data, meta, trace = payload.kind, payload.data, payload.meta, payload.trace
        jobs.append(
            b'{"$seq":%d,"lease_id":"lease_%x","deadline":%d,"$ts":%d%b%b%b,"deliveries":1%b,'
            b'"data":%b%b}'
            % (
                seq,
                lease_id,
                deadline_ms,
                ts,
                b"" if node is None else b',"$node":%b' % _encode(node),
                b"" if tag is None else b',"$tag":%b' % _encode(tag),
                trace,
                kind,
                data,
                b',"meta":%b' % meta if meta else b"",
            )
        )
        lease_id += 1
    return b",".join(jobs)


def _labels(key: bytes, texts: Sequence[str | None]) -> list[bytes]:
    """The member `,"key":"text"` of each record, encoded once for each distinct text."""
    members = {
        text: b"" if text is None else b',"%b":%b' % (key, _encode(text)) for text in set(texts)
    }
    return [members[text] for text in texts]


def job_frame(name: str, job: LeasedJob) -> bytes:
    """A `job` event of a push stream (§10.8); its id is the job's seq."""
    members = b'{"topic":"%b",%b}' % (name.encode("ascii"), render_job(job))
    return b"id: %d\n%b" % (job.seq, frame(b"job", members))


def render_acked(name: str, done: AckResult, total_ms: float, claimed: bytes = b"") -> bytes:
    """The answer to an ack (§10.4). `claimed`: the members for the claim in the same request."""
    counts = done.counts
    return (
        b'{"topic":"%b",%b,"ready":%d,"in_flight":%d%b,"performance":'
        b'{"server_total_ms":%.3f,"wal_append_ms":%.3f,"fsync_ms":%.3f}}'
        % (
            name.encode("ascii"),
            b'"acked":%d,"skipped":[]' % done.acked
            if not done.skipped
            else _encode(_ack_members(done))[1:-1],
            counts.ready,
            counts.in_flight,
            b',"next":{%b}' % claimed if claimed else b"",
            total_ms,
            done.write_ms,
            done.sync_ms,
        )
    )


def _ack_members(done: AckResult) -> dict[str, Any]:
    return {
        "acked": done.acked,
        "skipped": done.skipped,
        **_reasons(done.skipped, done.reasons),
    }


def _reasons(skipped: Sequence[int], reasons: Sequence[SkipReason]) -> dict[str, Any]:
    """The reason of each skipped seq; empty if none was skipped."""
    if not skipped:
        return {}
    return {"reasons": {str(seq): why for seq, why in zip(skipped, reasons, strict=True)}}


def render_nacked(name: str, done: NackResult, total_ms: float) -> bytes:
    """The answer to a nack (§10.5)."""
    fields = {
        "topic": name,
        "nacked": done.nacked,
        "skipped": done.skipped,
        **_reasons(done.skipped, done.reasons),
        "ready": done.counts.ready,
        "in_flight": done.counts.in_flight,
    }
    return render_json(fields, total_ms)


def render_extended(name: str, done: ExtendResult, total_ms: float) -> bytes:
    """The answer to an extend (§10.6)."""
    fields = {
        "topic": name,
        "extended": len(done.seqs),
        "skipped": done.skipped,
        **_reasons(done.skipped, done.reasons),
        "deadlines": {str(seq): done.deadline_ms for seq in done.seqs},
    }
    return render_json(fields, total_ms)


def render_leases(name: str, page: LeasePage, next_cursor: str | None, total_ms: float) -> bytes:
    """A page of leases."""
    fields: dict[str, Any] = {
        "topic": name,
        "leases": [
            {
                "seq": lease.seq,
                "node": lease.node,
                "lease_id": lease_text(lease.lease_id),
                "deadline": lease.deadline_ms,
                "deliveries": lease.deliveries,
                "claimed_ts": lease.claimed_ts,
            }
            for lease in page.leases
        ],
    }
    if next_cursor is not None:
        fields["next_cursor"] = next_cursor
    return render_json(fields, total_ms)


def render_redriven(name: str, done: Redriven, total_ms: float) -> bytes:
    """The answer to a redrive."""
    fields = {
        "topic": name,
        "from": done.source,
        "redriven": done.redriven,
        "skipped": done.skipped,
        "more": done.more,
        "next_after_seq": done.next_after_seq,
    }
    return render_json(fields, total_ms)
