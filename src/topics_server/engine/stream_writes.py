"""Stream operations beside appends: create, fork, close, touch.

A fork is made in steps: first its topic, with `is_copying` in its facts, then pages of copies with
the same seqs as in the source, then facts without `is_copying`. If a crash leaves an unfinished
fork, the next start drops it. Called by `streams/`; loop thread only.
"""

from __future__ import annotations

import msgspec

from topics_server.engine.commit.gates import gate_of
from topics_server.engine.commit.pipeline import CommitPipeline, Ticket
from topics_server.engine.ports import Clock
from topics_server.engine.preconditions import disk_nearly_full
from topics_server.engine.store import Store
from topics_server.engine.topic.producers import StampRepeated
from topics_server.engine.topic.registry import Registry
from topics_server.engine.topic.stream_facts import closed
from topics_server.engine.topic.topic import Topic
from topics_server.engine.topic.writes.append import decide_append
from topics_server.values.appends import DecodedAppend
from topics_server.values.entries import RecordsAppended, StreamChanged, TopicPut
from topics_server.values.errors import TopicsError
from topics_server.values.model import ProducerStamp, StreamFacts, TopicConfig
from topics_server.values.record_codecs import body_of, with_grammar


class StreamWrites:
    """Decides and submits the entries of streams."""

    def __init__(
        self, store: Store, registry: Registry, commits: CommitPipeline, clock: Clock
    ) -> None:
        self._store = store
        self._registry = registry
        self.commits = commits
        self._clock = clock

    async def create(
        self,
        name: str,
        facts: StreamFacts,
        config: TopicConfig,
        records: tuple[bytes, DecodedAppend] | None,
        first_seq: int = 1,
    ) -> Topic | None:
        """Create a stream's topic, with its first records if any; None if the name is taken.

        `first_seq`: lower seqs belong to the source of the fork. Durable before it returns. Raises
        the errors of `Store.check_room` for the stream's path.
        """
        store = self._store
        await store.pending_names.over(name)
        if self._registry.find(name) is not None:
            return None
        if store.checks.is_disk_low:
            raise disk_nearly_full()
        store.check_room(facts.path)
        now_ms = self._clock.now_ms()
        topic, creation = self._registry.decide_create(name, config, now_ms, facts, first_seq)
        try:
            ticket = self._submit_create(topic, creation, records, now_ms)
        except TopicsError:
            self._registry.abandon(topic.topic_id)
            raise
        await store.pending_names.hold_until_resolved(name, ticket)
        return topic

    def _submit_create(
        self,
        topic: Topic,
        creation: TopicPut,
        records: tuple[bytes, DecodedAppend] | None,
        now_ms: int,
    ) -> Ticket:
        if records is None:
            return self.commits.submit(creation, gate_of(creation, topic), topic)
        body, decoded = records
        self._store.checks.check_bytes(decoded.payload_bytes)
        limits = self._store.append_limits
        entry = decide_append(topic, decoded, body, None, now_ms, limits, creation)
        assert isinstance(entry, RecordsAppended), "a new topic has no keys and no producers"
        return self.commits.submit(entry, gate_of(entry, topic), topic)

    def copy(self, topic: Topic, decoded: DecodedAppend) -> Ticket:
        """Append records of the source to a fork that is being made. Raises `TopicsError`."""
        assert topic.stream_facts.is_copying
        self._store.checks.check_bytes(decoded.payload_bytes)
        decoded = with_grammar(decoded)
        log, staging = topic.log, topic.staging
        entry = RecordsAppended(
            topic_id=topic.topic_id,
            first_seq=topic.staged_seq + 1,
            count=decoded.count,
            ts=max(self._clock.now_ms(), log.last_ts, staging.last_ts),
            body=body_of(decoded),
            grammar=decoded.grammar,
            decoded=decoded,
        )
        return self._store.submit_append(topic, entry)

    def close(self, topic: Topic, producer: ProducerStamp | None) -> Ticket | StampRepeated | None:
        """Close a stream; None if it is closed and was not closed by a producer's request.

        Raises `stream_closed` for a producer's request that is not the one that closed the stream,
        and the errors of `Producers.check`.
        """
        facts = topic.stream_facts
        if producer is not None:
            repeated = topic.producers.check(producer, self._clock.now_ms())
            if repeated is not None:
                return repeated
        if facts.is_closed:
            if producer is not None:
                raise closed(topic.name)
            return self.commits.newest(topic.topic_id)
        return self.change(
            topic, msgspec.structs.replace(facts, is_closed=True, closed_by=producer), producer
        )

    def change(
        self, topic: Topic, facts: StreamFacts, producer: ProducerStamp | None = None
    ) -> Ticket:
        """Replace the stream's facts."""
        now_ms = self._clock.now_ms()
        first_seq = topic.staged_seq + 1 if producer is not None else 0
        entry = StreamChanged(topic.topic_id, now_ms, facts, producer, first_seq)
        return self.commits.submit(entry, gate_of(entry, topic), topic)

    def note_use(self, topic: Topic) -> None:
        """Note a use of the stream; some uses are journaled, so that they survive a restart."""
        stream = topic.stream
        if stream is None or stream.facts.ttl_s is None:
            return
        stream.used(self._clock.now_ms())
        if not stream.is_use_due() or topic.staging.has_control:
            return
        try:
            self.change(topic, msgspec.structs.replace(stream.newest, used_ms=stream.used_ms))
        except TopicsError:
            return  # nothing can be written: the stream ends sooner after a restart
