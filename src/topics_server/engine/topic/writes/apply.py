"""Applies any entry of a topic: all changes of visible state by entries begin here. Pure.

`apply_entry` never fails. An entry with an lsn up to `applied_lsn` is already included and changes
nothing: replay also reads entries that a snapshot includes. Called by `registry`, live and in
replay.
"""

from __future__ import annotations

from typing import assert_never

from topics_server.engine.topic.applied import NOTHING, NOTIFY, Applied
from topics_server.engine.topic.consumers.changes import apply_consumer
from topics_server.engine.topic.topic import Topic
from topics_server.engine.topic.writes.append import apply_append
from topics_server.engine.topic.writes.configure import apply_put, apply_stream
from topics_server.engine.topic.writes.delete import apply_delete, apply_floor
from topics_server.values.entries import (
    ConsumerDeleted,
    ConsumerMoved,
    CursorMoved,
    Entry,
    FloorMoved,
    HeadReserved,
    OfNoTopic,
    ProducerMoved,
    RecordsAppended,
    RecordsDeleted,
    StreamChanged,
    TopicDropped,
    TopicPut,
)
from topics_server.values.limits import HEAD_RESERVE_SEQS_MAX


def apply_entry(topic: Topic, lsn: int, entry: Entry) -> Applied:
    """Change visible state. Never fails; an entry that is already included changes nothing."""
    if lsn <= topic.applied_lsn:
        return NOTHING
    applied = NOTHING
    if isinstance(entry, RecordsAppended):
        applied = apply_append(topic, lsn, entry)
    elif isinstance(entry, RecordsDeleted):
        applied = apply_delete(topic, entry)
    elif isinstance(entry, FloorMoved):
        applied = apply_floor(topic, entry.floor)
    elif isinstance(entry, TopicPut):
        applied = apply_put(topic, entry)
    elif isinstance(entry, HeadReserved):
        topic.ceiling_seq = max(topic.ceiling_seq, entry.ceiling_seq)
        topic.reserve_seqs = min(2 * topic.reserve_seqs, HEAD_RESERVE_SEQS_MAX)
    elif isinstance(entry, CursorMoved):
        topic.advance_cursor(entry.router_id, entry.cursor_seq)
    elif isinstance(entry, ProducerMoved):
        topic.own_producers().accept(entry.producer, entry.first_seq, entry.count, entry.ts)
    elif isinstance(entry, StreamChanged):
        applied = apply_stream(topic, lsn, entry)
    elif isinstance(entry, ConsumerMoved | ConsumerDeleted):
        applied = apply_consumer(topic, lsn, entry)
    elif isinstance(entry, TopicDropped):
        applied = NOTIFY
    else:
        assert not isinstance(entry, OfNoTopic), "of no topic"
        assert_never(entry)
    topic.applied_lsn = lsn
    topic.revision += 1
    assert topic.log.evict_floor <= topic.log.earliest_seq <= topic.log.head_seq + 1
    return applied
