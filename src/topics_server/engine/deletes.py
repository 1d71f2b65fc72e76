"""Deletes: by seq and tag, or of exact seqs.

A tag delete searches sealed segments off the loop before it decides; the entry names the exact
seqs. Called through `store`; loop thread only.
"""

from __future__ import annotations

from collections.abc import Sequence

from topics_server.engine.answers import Deleted, DeletedSeqs
from topics_server.engine.commit.appending import SeqsDelete
from topics_server.engine.commit.gates import gate_of
from topics_server.engine.commit.pending_names import PendingNames
from topics_server.engine.commit.pipeline import CommitPipeline
from topics_server.engine.commit.repeats import applied
from topics_server.engine.ports import Clock
from topics_server.engine.read.exact_read import decide_delete_seqs, deletable
from topics_server.engine.read.segment_reader import Fetcher
from topics_server.engine.topic.registry import Registry
from topics_server.engine.topic.topic import Topic
from topics_server.engine.topic.writes.delete import decide_delete, segments_to_search
from topics_server.values.model import TagMatch


class Deletes:
    """The deletes of all topics."""

    def __init__(
        self,
        registry: Registry,
        commits: CommitPipeline,
        fetcher: Fetcher,
        clock: Clock,
        pending_names: PendingNames,
    ) -> None:
        self._registry = registry
        self._commits = commits
        self._fetcher = fetcher
        self._clock = clock
        self._pending_names = pending_names

    async def delete(self, name: str, *, before_seq: int | None, match: TagMatch | None) -> Deleted:
        """Delete what exists now by seq, tag or both (§5), as durable as the topic's class."""
        assert before_seq is not None or match is not None
        searched: dict[int, Sequence[int]] = {}
        while True:
            await self._pending_names.over(name)
            topic = self._registry.existing(name)
            if match is None:
                break
            wanted = segments_to_search(topic, before_seq, self._clock.now_ms())
            missing = [segment_id for segment_id in wanted if segment_id not in searched]
            if not missing:
                break
            found = await self._fetcher.find_tags(topic.topic_id, missing, match)
            # A segment dropped meanwhile has no live record left.
            searched.update({segment_id: found.get(segment_id, ()) for segment_id in missing})
        now_ms = self._clock.now_ms()
        entry = decide_delete(topic, before_seq, match, searched, now_ms)
        write_ms = sync_ms = 0.0
        count = 0
        if entry is not None:
            ticket = self._commits.submit(entry, gate_of(entry, topic), topic, urgent=True)
            await applied(ticket)
            assert ticket.applied is not None
            count, write_ms, sync_ms = ticket.applied.deleted, ticket.write_ms, ticket.sync_ms
        left_count, left_bytes = topic.live(now_ms)
        return Deleted(
            deleted=count,
            earliest_seq=topic.earliest_seq(now_ms),
            head_seq=topic.log.head_seq,
            count=left_count,
            bytes=left_bytes,
            write_ms=write_ms,
            sync_ms=sync_ms,
        )

    def start_delete(self, topic: Topic, seqs: Sequence[int]) -> SeqsDelete:
        """Submit the delete of those of these seqs (ascending) that live, if any; no waiting.

        What another delete under way takes is not among them. Nothing may be settling on the
        topic (`stable_topic`). Raises `TopicsError` when it is refused; then nothing was staged.
        """
        assert not topic.staging.has_control
        live = deletable(topic, seqs)
        if not live:
            return SeqsDelete([], None)
        entry = decide_delete_seqs(topic, live, self._clock.now_ms())
        return SeqsDelete(
            live, self._commits.submit(entry, gate_of(entry, topic), topic, urgent=True)
        )

    async def finish_delete(self, delete: SeqsDelete) -> DeletedSeqs:
        """Wait until the delete is as durable as its topic's class. Raises what it failed with."""
        ticket = delete.ticket
        if ticket is None:
            return DeletedSeqs(delete.seqs)
        await applied(ticket)
        return DeletedSeqs(delete.seqs, ticket.write_ms, ticket.sync_ms)

    async def delete_seqs(self, name: str, seqs: Sequence[int]) -> DeletedSeqs:
        """Delete exact seqs (ascending): those that lived, told to one caller only."""
        await self._pending_names.over(name)
        topic = self._registry.existing(name)
        return await self.finish_delete(self.start_delete(topic, seqs))
