"""Answers a repeated append with the original's result.

An idempotency key or a producer identifies a repeat. A repeat by key alone may still be a
producer's next request: then the producer advances without records. Used by `engine/appends` and
`streams/service`.
"""

from __future__ import annotations

from topics_server.engine.answers import Appended, ProducerRepeat
from topics_server.engine.commit.gates import gate_of
from topics_server.engine.commit.pipeline import CommitPipeline, Ticket
from topics_server.engine.commit.ticket_waits import applied
from topics_server.engine.topic.dedupe import Duplicate
from topics_server.engine.topic.producers import StampRepeated
from topics_server.engine.topic.topic import Topic
from topics_server.values.entries import ProducerMoved
from topics_server.values.model import ProducerStamp


async def repeated(
    commits: CommitPipeline,
    topic: Topic,
    original: Duplicate | StampRepeated,
    producer: ProducerStamp | None,
    now_ms: int,
) -> Appended:
    """Answer a retry once the original is durable. Submits before it waits."""
    if isinstance(original, StampRepeated):
        return await _of_producer(commits, topic, original)
    return await _of_key(commits, topic, original, producer, now_ms)


async def _of_key(
    commits: CommitPipeline,
    topic: Topic,
    duplicate: Duplicate,
    producer: ProducerStamp | None,
    now_ms: int,
) -> Appended:
    """Answer a retry with the original seqs, once the original is durable; advances `producer`."""
    first_seq, count = duplicate.first_seq, duplicate.count
    moved: Ticket | None = None
    if producer is not None:
        entry = ProducerMoved(topic.topic_id, now_ms, producer, first_seq, count)
        moved = commits.submit(entry, gate_of(entry, topic), topic)
    if duplicate.staged_lsn is not None:
        original = commits.find(topic.topic_id, duplicate.staged_lsn)
        if original is not None:
            await applied(original)
    if moved is not None:
        await applied(moved)
    last_seq = first_seq + count - 1
    head_seq = max(last_seq, topic.log.head_seq)
    return Appended(first_seq, last_seq, head_seq, deduped=True, seqs=duplicate.seqs)


async def _of_producer(commits: CommitPipeline, topic: Topic, repeated: StampRepeated) -> Appended:
    """Answer a producer's retry, once its newest request is durable."""
    if repeated.staged_lsn is not None:
        newest = commits.find(topic.topic_id, repeated.staged_lsn)
        if newest is not None:
            await applied(newest)
    last = repeated.last
    last_seq = last.first_seq + last.count - 1
    # A request that only closed a stream has no records.
    producer_repeat = ProducerRepeat(
        last.epoch, last.seq, is_last=repeated.is_last and last.count > 0
    )
    head_seq = max(last_seq, topic.log.head_seq)
    return Appended(last.first_seq, last_seq, head_seq, deduped=True, repeat=producer_repeat)
