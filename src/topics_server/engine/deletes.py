"""Deletes: by seq and tag, or of exact seqs.

Before a delete by tag is decided, sealed segments are searched off the loop, and unsealed blocks in
slices on the loop; the entry has the exact seqs. Called through `store`; loop thread only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

import msgspec
import numpy as np

from topics_server.engine.answers import Deleted, DeletedSeqs
from topics_server.engine.commit.gates import gate_of
from topics_server.engine.commit.pending_names import PendingNames
from topics_server.engine.commit.pipeline import CommitPipeline, Ticket
from topics_server.engine.commit.ticket_waits import applied
from topics_server.engine.log.runs import Rows, TailBlock
from topics_server.engine.ports import Clock
from topics_server.engine.read.exact_read import decide_delete_seqs, deletable
from topics_server.engine.read.segment_reader import Fetcher
from topics_server.engine.topic.registry import Registry
from topics_server.engine.topic.topic import Topic
from topics_server.engine.topic.writes.condition import ConditionCheck
from topics_server.engine.topic.writes.delete import (
    blocks_to_search,
    decide_delete,
    segments_to_search,
)
from topics_server.values.errors import StorageError
from topics_server.values.model import TagMatch

# The time for which one turn of the loop searches unsealed blocks.
_SEARCH_SLICE_MS: Final = 1.0


class SeqsDelete(msgspec.Struct, frozen=True):
    """A submitted delete of exact seqs; `seqs`: the live ones, none without a ticket."""

    seqs: list[int]
    ticket: Ticket | None


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

    async def delete(
        self,
        name: str,
        *,
        before_seq: int | None,
        match: TagMatch | None,
        check: ConditionCheck | None = None,
    ) -> Deleted:
        """Delete what exists now by seq, tag or both (§5), as durable as the topic's class.

        Raises what `check` raises, before anything is staged.
        """
        assert before_seq is not None or match is not None
        searched: dict[int, Sequence[int]] = {}
        blocks: dict[TailBlock, Rows] | None = None
        searched_topic: Topic | None = None
        while True:
            await self._pending_names.over(name)
            topic = self._registry.existing(name)
            if match is None:
                break
            if topic is not searched_topic:
                # The topic was created again meanwhile, and its segments may have the same ids.
                searched_topic, searched, blocks = topic, {}, None
            wanted = segments_to_search(topic, before_seq, self._clock.now_ms())
            missing = [segment_id for segment_id in wanted if segment_id not in searched]
            if missing:
                found = await self._fetcher.find_tags(topic.topic_id, missing, match)
                # A segment that was dropped meanwhile has no live record left.
                searched.update({segment_id: found.get(segment_id, ()) for segment_id in missing})
            elif blocks is None:
                # Search once: records appended meanwhile are searched when the delete is decided.
                blocks = await self._search_blocks(topic, before_seq, match)
            else:
                break
        now_ms = self._clock.now_ms()
        if check is not None:
            check.decide(topic, now_ms)
        entry = decide_delete(topic, before_seq, match, searched, now_ms, blocks or {})
        write_ms = sync_ms = 0.0
        count = 0
        if entry is not None:
            ticket = self._commits.submit(entry, gate_of(entry, topic), topic, urgent=True)
            await applied(ticket)
            assert ticket.applied is not None
            count, write_ms, sync_ms = ticket.applied.deleted, ticket.write_ms, ticket.sync_ms
        earliest_seq, left_count, left_bytes = _left(topic, now_ms)
        return Deleted(
            deleted=count,
            earliest_seq=earliest_seq,
            head_seq=topic.log.head_seq,
            count=left_count,
            bytes=left_bytes,
            write_ms=write_ms,
            sync_ms=sync_ms,
        )

    async def _search_blocks(
        self, topic: Topic, before_seq: int | None, match: TagMatch
    ) -> dict[TailBlock, Rows]:
        """The matching rows of the unsealed blocks, in slices; the first search indexes a block."""
        found: dict[TailBlock, Rows] = {}
        began_ms = self._clock.monotonic_ms()
        for block in blocks_to_search(topic, before_seq, self._clock.now_ms()):
            found[block] = np.asarray(block.rows_of(match), np.int64)
            if self._clock.monotonic_ms() - began_ms >= _SEARCH_SLICE_MS:
                await asyncio.sleep(0)
                began_ms = self._clock.monotonic_ms()
        return found

    def start_delete(self, topic: Topic, seqs: Sequence[int]) -> SeqsDelete:
        """Submit the delete of the live ones of these ascending seqs, if any, without waiting.

        Seqs that a staged delete removes count as dead. No create, configure or drop of the topic
        may be in flight (`stable_topic`). Raises `TopicsError` when the delete is refused; then
        nothing was staged.
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
        """Wait until the delete is as durable as its topic's class; raise its error if any."""
        ticket = delete.ticket
        if ticket is None:
            return DeletedSeqs(delete.seqs)
        await applied(ticket)
        return DeletedSeqs(delete.seqs, ticket.write_ms, ticket.sync_ms)

    async def delete_seqs(self, name: str, seqs: Sequence[int]) -> DeletedSeqs:
        """Delete exact seqs (ascending); returns those that were live, each to one caller only."""
        await self._pending_names.over(name)
        topic = self._registry.existing(name)
        return await self.finish_delete(self.start_delete(topic, seqs))


def _left(topic: Topic, now_ms: int) -> tuple[int, int, int]:
    """The first live seq, the live records and their bytes, for the answer to a finished delete.

    Only an index shows which records are expired. If it cannot be read, they count as live until
    expiry removes them: an error now would report an applied delete as failed.
    """
    try:
        return topic.earliest_seq(now_ms), *topic.live(now_ms)
    except StorageError:
        return topic.log.earliest_seq, topic.log.live_count, topic.log.live_bytes
