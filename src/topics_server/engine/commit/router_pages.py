"""Router pages in flight; a snapshot capture waits for them.

A page may omit the payloads of its copies if replay is certain to read the records themselves:
source and destination are on the same shard, and every record of the page was journaled at or after
the start of the newest snapshot, published or being captured. For each source, `_replayable_from`
is the first such seq. A capture begins when no page without payloads is in flight, and moves that
seq to after the head (ARCHITECTURE, Routers). Loop thread only. Called by `routers/pump`, the
checkpointer (captures) and by commits (as an observer).
"""

from __future__ import annotations

import asyncio

from topics_server.engine.commit.pipeline import CommitPipeline, Ticket
from topics_server.engine.topic.applied import Applied
from topics_server.engine.topic.registry import Registry
from topics_server.engine.topic.topic import Topic
from topics_server.values.entries import Entry, TopicDropped, TopicPut


class RouterPages:
    """The router pages of one server. `sources`: topics whose records replay must keep."""

    def __init__(self, registry: Registry, commits: CommitPipeline, sources: set[int]) -> None:
        self._sources = sources
        self._registry = registry
        self._commits = commits
        # By source: the first seq whose record replay is certain to read.
        self._replayable_from: dict[int, int] = {}
        self._open_page_count = 0
        self._capture_waiters: list[asyncio.Future[None]] = []
        # Whether a capture waits to begin: until then every page includes its payloads.
        self._is_capture_waiting = False

    def add_source(self, topic_id: int) -> None:
        """Add a topic that became the source of a router; a second call has no effect."""
        topic = self._registry.get(topic_id)
        if topic is not None and topic_id not in self._replayable_from:
            self._replayable_from[topic_id] = topic.staged_seq + 1
        self._sources.add(topic_id)

    def remove_source(self, topic_id: int) -> None:
        """Remove a topic that is no source any more. Replay may still need its records."""
        self._replayable_from.pop(topic_id, None)

    def observe(self, lsn: int, entry: Entry, applied: Applied) -> None:
        """Observe an applied entry: a new class changes how the topic's records are journaled."""
        if entry.topic_id in self._replayable_from:
            if isinstance(entry, TopicPut):
                topic = self._registry.get(entry.topic_id)
                if topic is not None:
                    self._replayable_from[entry.topic_id] = topic.staged_seq + 1
            elif isinstance(entry, TopicDropped):
                self._replayable_from.pop(entry.topic_id)

    def may_omit_payloads(self, source: Topic, dest: Topic, first_seq: int) -> bool:
        """Whether copies of the source from `first_seq` on may be journaled without payloads."""
        replayable_from = self._replayable_from.get(source.topic_id)
        return (
            replayable_from is not None
            and first_seq >= replayable_from
            and not self._is_capture_waiting
            and not source.is_ephemeral
            and self._commits.same_shard(source.topic_id, dest.topic_id)
        )

    def follow_page(self, ticket: Ticket) -> None:
        """Count a submitted page without payloads until its ticket resolves."""
        if not ticket.is_done:
            self._open_page_count += 1
            ticket.waiters.append(self._page_resolved)

    def _page_resolved(self) -> None:
        self._open_page_count -= 1
        if self._open_page_count == 0:
            waiters, self._capture_waiters = self._capture_waiters, []
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_result(None)

    async def quiesced(self) -> None:
        """Return once no page without payloads is in flight; none starts until the capture.

        Call `begin_capture` in the same loop turn.
        """
        self._is_capture_waiting = True
        try:
            while self._open_page_count:
                waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
                self._capture_waiters.append(waiter)
                await waiter
        except asyncio.CancelledError:
            self._is_capture_waiting = False
            raise

    def begin_capture(self) -> None:
        """Begin a capture: replay need not read the entries that are applied so far."""
        assert self._open_page_count == 0
        self._is_capture_waiting = False
        for topic_id in self._replayable_from:
            topic = self._registry.get(topic_id)
            if topic is not None:
                self._replayable_from[topic_id] = topic.log.head_seq + 1
        self._sources.clear()
        self._sources.update(self._replayable_from)
