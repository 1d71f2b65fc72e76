"""Appends to one topic: decides and applies them. Pure.

`decide_append` and `decide_page` read the visible and the staged state, change nothing, and return
an entry or raise an error. `apply_append` applies an entry and never fails. Called by
`engine/appends`, `engine/stream_writes` and `apply`.
"""

from __future__ import annotations

from topics_server.engine.topic import retention
from topics_server.engine.topic.applied import NOTIFY, Applied
from topics_server.engine.topic.dedupe import Duplicate
from topics_server.engine.topic.producers import StampRepeated
from topics_server.engine.topic.stream_facts import stepped
from topics_server.engine.topic.topic import Topic
from topics_server.engine.topic.writes.condition import ConditionCheck
from topics_server.engine.topic.writes.delete import apply_floor
from topics_server.engine.topic.writes.keyed_records import (
    check_key,
    is_per_record,
    missing_records,
)
from topics_server.values.appends import (
    PLAIN_GRAMMAR,
    AppendLimits,
    DecodedAppend,
    check_limits,
)
from topics_server.values.entries import RecordsAppended, RouterPage, Source, TopicPut
from topics_server.values.errors import invalid
from topics_server.values.model import LossReason, ProducerStamp
from topics_server.values.record_codecs import decode_body


def decide_append(
    topic: Topic,
    decoded: DecodedAppend,
    body: bytes,
    header_key: str | None,
    now_ms: int,
    limits: AppendLimits,
    creation: TopicPut | None = None,
    source: Source | None = None,
    producer: ProducerStamp | None = None,
    check: ConditionCheck | None = None,
) -> RecordsAppended | Duplicate | StampRepeated:
    """An append with its seqs, time and floor, or the request that it repeats.

    `source`: the origin of moved records; these were within the limits before, and the server's
    stamps on them do not count. `producer`: the producer and the number of its request; a repeated
    request is detected before a repeated idempotency key. `check`: the check of the append's
    condition; it is ignored if the append is a repeat. If each record has a key, the entry has only
    the records whose keys are new.

    Raises `TopicsError`: invalid_request, batch_too_large, record_too_large, topic_full, and
    the errors of `Producers.check`, `ConditionCheck.decide` and `StreamState.check`.
    """
    if decoded.count == 0:
        raise invalid("records must not be empty", "records")
    key = decoded.idempotency_key
    if decoded.idempotency is not None and is_per_record(decoded.idempotency):
        if producer is not None:
            raise invalid("give idempotency or producer headers, not both", "idempotency")
        missing = missing_records(topic, decoded, body, header_key, now_ms)
        if isinstance(missing, Duplicate):
            return missing
        decoded, body = missing
        key = header_key = None
    elif key is not None or header_key is not None:
        key = check_key(key, header_key)
    config = topic.config
    if producer is not None:
        repeated = topic.producers.check(producer, now_ms)
        if repeated is not None:
            return repeated
    if key is not None:
        known = topic.keys.find(key, config.idempotency_window_ms, now_ms)
        if known is not None:
            return known
    if check is not None and creation is None:
        check.decide(topic, now_ms)
    if topic.stream is not None and creation is None:
        topic.stream.check(topic.name, decoded.step)
    if source is None:
        check_limits(decoded, limits)
    log, staging = topic.log, topic.staging
    ts = max(now_ms, log.last_ts, staging.last_ts)
    floor = None
    if config.cap_records or config.cap_bytes:
        name, consumers = topic.name, topic.consumers
        holds = consumers.holds() if consumers.holding else ()
        floor = retention.append_floor(log, staging, config, decoded, now_ms, name, holds)
    first_seq = max(log.head_seq, staging.last_seq) + 1
    assert floor is None or floor.seq < first_seq + decoded.count, "the newest record stays"
    return RecordsAppended(
        topic_id=topic.topic_id,
        first_seq=first_seq,
        count=decoded.count,
        ts=ts,
        body=body,
        header_key=header_key if decoded.idempotency_key is None else None,
        creation=creation,
        floor=floor,
        grammar=decoded.grammar if decoded.form or decoded.delays else PLAIN_GRAMMAR,
        decoded=decoded,
        source=source,
        producer=producer,
        step=decoded.step,
        trace=decoded.trace,
    )


def decide_page(
    topic: Topic, page: RouterPage, decoded: DecodedAppend, body: bytes, now_ms: int
) -> RecordsAppended:
    """The copies of a router's page with their seqs, time and floor.

    `body` is empty if replay finds the records elsewhere. Raises `topic_full` and the errors of
    `StreamState.check`.
    """
    log, config = topic.log, topic.config
    if topic.stream is not None:
        topic.stream.check(topic.name, None)
    slots = 1 if page.lost else 0
    assert decoded.count == page.copy_count
    assert decoded.count + slots > 0
    floor = None
    if decoded.count and (config.cap_records or config.cap_bytes):
        holds = topic.consumers.holds()
        floor = retention.append_floor(
            log, topic.staging, config, decoded, now_ms, topic.name, holds, slots
        )
    return RecordsAppended(
        topic_id=topic.topic_id,
        first_seq=topic.staged_seq + 1,
        count=decoded.count + slots,
        ts=max(now_ms, log.last_ts, topic.staging.last_ts),
        body=body,
        floor=floor,
        grammar=decoded.grammar,
        decoded=decoded,
        page=page,
    )


def apply_append(topic: Topic, lsn: int, entry: RecordsAppended) -> Applied:
    """Add the records, and remember key, producer, stream step and floor of the call."""
    log = topic.log
    decoded = entry.decoded or decode_body(entry.body, entry.grammar, entry.trace)
    first_seq = entry.first_seq
    if entry.page is not None:
        first_seq += _apply_page(topic, entry, entry.page)
    assert decoded.count == entry.count - (first_seq - entry.first_seq)
    ahead = first_seq - log.head_seq - 1
    if ahead == 0:
        if decoded.count:
            log.append(entry.ts, decoded, lsn)
    else:
        _replay_records(topic, lsn, entry, decoded, first_seq)
    if entry.creation is not None or not topic.is_ephemeral:
        topic.journaled_seq = log.head_seq
    if topic.last_write_ts is None or topic.last_write_ts < entry.ts:
        topic.last_write_ts = entry.ts
    key = decoded.idempotency_key
    if key is None:
        key = entry.header_key
    if key is not None:
        window_ms = topic.config.idempotency_window_ms
        topic.own_keys().remember(key, entry.first_seq, entry.count, entry.ts, window_ms)
    elif decoded.record_keys:
        window_ms = topic.config.idempotency_window_ms
        topic.own_keys().remember_each(decoded.record_keys, entry.first_seq, entry.ts, window_ms)
    if entry.producer is not None:
        topic.own_producers().accept(entry.producer, entry.first_seq, entry.count, entry.ts)
    if entry.step is not None:
        stream = topic.as_stream()
        stream.apply(lsn, stepped(stream.facts, entry.step, entry.producer))
    if topic.stream is not None:
        topic.stream.used(entry.ts)
    return NOTIFY if entry.floor is None else apply_floor(topic, entry.floor)


def _apply_page(topic: Topic, entry: RecordsAppended, page: RouterPage) -> int:
    """Apply the effects of a router page other than its records.

    Returns how many seqs have no record.
    """
    topic.advance_cursor(page.router_id, page.cursor_seq, page.copy_count)
    if not page.lost:
        return 0
    topic.log.jump_head(entry.first_seq - 1, LossReason.DAMAGED)
    topic.log.lose_slot(entry.first_seq, page.lost)
    return 1


def _replay_records(
    topic: Topic, lsn: int, entry: RecordsAppended, decoded: DecodedAppend, first_seq: int
) -> None:
    """Replay: records up to the head are included already; the seqs above it become a hole."""
    log = topic.log
    log.jump_head(first_seq - 1, LossReason.DAMAGED)
    log.note_replayed(first_seq + decoded.count - 1)
    known = log.head_seq + 1 - first_seq
    if known < decoded.count:
        log.append(max(entry.ts, log.last_ts), decoded.since(known) if known else decoded, lsn)
