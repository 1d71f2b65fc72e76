"""Router pages in flight, and what a snapshot capture waits for.

A page may leave the payloads of its copies out where replay is certain to meet the records
themselves: source and destination are on the same shard, and every record of the page was journaled
at or after the start of the newest snapshot, published or being captured. So for each source the
first such seq is kept (`_fresh`); a capture begins when no page without payloads is in flight, and
moves it behind the head (ARCHITECTURE, Routers). Loop thread only. Called by `routers/pump`, the
checkpointer (captures) and by commits (as an observer).
"""

from __future__ import annotations

import asyncio

from topics_server.engine.commit.pipeline import CommitPipeline, Ticket
from topics_server.engine.topic.registry import Registry
from topics_server.engine.topic.topic import Applied, Topic
from topics_server.values.entries import Entry, TopicDropped, TopicPut


class RouterPages:
    """The pages of one server. `sources`: topics whose records replay has to keep at hand."""

    def __init__(self, registry: Registry, commits: CommitPipeline, sources: set[int]) -> None:
        self._sources = sources
        self._registry = registry
        self._commits = commits
        # By source: the first seq whose record replay is certain to meet.
        self._fresh: dict[int, int] = {}
        self._bare_count = 0
        self._capture_waiters: list[asyncio.Future[None]] = []
        # Until then no page goes without its payloads.
        self._is_capture_waiting = False

    def add_source(self, topic_id: int) -> None:
        """The topic is the source of a router; again is no harm."""
        topic = self._registry.get(topic_id)
        if topic is not None and topic_id not in self._fresh:
            self._fresh[topic_id] = topic.staged_seq + 1
        self._sources.add(topic_id)

    def remove_source(self, topic_id: int) -> None:
        """No router copies from this topic any more. Replay may ask for its records still."""
        self._fresh.pop(topic_id, None)

    def observe(self, lsn: int, entry: Entry, applied: Applied) -> None:
        """Hear of an applied entry: records of another class are not journaled as before."""
        if entry.topic_id in self._fresh:
            if isinstance(entry, TopicPut):
                topic = self._registry.get(entry.topic_id)
                if topic is not None:
                    self._fresh[entry.topic_id] = topic.staged_seq + 1
            elif isinstance(entry, TopicDropped):
                self._fresh.pop(entry.topic_id)

    def may_go_bare(self, source: Topic, dest: Topic, first_seq: int) -> bool:
        """Whether copies of the source from `first_seq` on may be journaled without payloads."""
        fresh = self._fresh.get(source.topic_id)
        return (
            fresh is not None
            and first_seq >= fresh
            and not self._is_capture_waiting
            and not source.is_ephemeral
            and self._commits.same_shard(source.topic_id, dest.topic_id)
        )

    def follow_bare(self, ticket: Ticket) -> None:
        """A page without payloads was submitted."""
        if not ticket.is_done:
            self._bare_count += 1
            ticket.waiters.append(self._bare_settled)

    def _bare_settled(self) -> None:
        self._bare_count -= 1
        if self._bare_count == 0:
            waiters, self._capture_waiters = self._capture_waiters, []
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_result(None)

    async def quiesced(self) -> None:
        """Return when no page without payloads is in flight; none sets out until the capture.

        To be followed by `begin_capture` in the same turn of the loop.
        """
        self._is_capture_waiting = True
        try:
            while self._bare_count:
                waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
                self._capture_waiters.append(waiter)
                await waiter
        except asyncio.CancelledError:
            self._is_capture_waiting = False
            raise

    def begin_capture(self) -> None:
        """A capture begins now: what was applied until now, replay need not meet."""
        assert self._bare_count == 0
        self._is_capture_waiting = False
        for topic_id in self._fresh:
            topic = self._registry.get(topic_id)
            if topic is not None:
                self._fresh[topic_id] = topic.log.head_seq + 1
        self._sources.clear()
        self._sources.update(self._fresh)
