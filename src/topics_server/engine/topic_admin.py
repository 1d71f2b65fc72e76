"""Creates, configures, drops, lists and shows topics.

Each change is one entry and is durable before its call returns; meanwhile commands on the name wait
(`commit/pending_names`). Called through `store`; loop thread only.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from topics_server.engine.answers import PutOutcome, QueueCounts, TopicPage, TopicState
from topics_server.engine.commit.gates import gate_of
from topics_server.engine.commit.pending_names import PendingNames
from topics_server.engine.commit.pipeline import CommitPipeline
from topics_server.engine.commit.ticket_waits import resolved
from topics_server.engine.ports import Clock
from topics_server.engine.preconditions import Preconditions
from topics_server.engine.read.segment_reader import Fetcher
from topics_server.engine.read.topic_states import state_of
from topics_server.engine.topic.registry import MayName, Registry
from topics_server.engine.topic.topic import Topic
from topics_server.engine.topic.writes.condition import ConditionCheck
from topics_server.engine.topic.writes.configure import decide_drop, decide_put
from topics_server.values.errors import TopicsError
from topics_server.values.model import TopicConfig, TopicType


class TopicAdmin:
    """Creates, configures, drops and shows topics. `queue_counts`: a queue's current jobs."""

    def __init__(
        self,
        registry: Registry,
        commits: CommitPipeline,
        fetcher: Fetcher,
        clock: Clock,
        checks: Preconditions,
        pending_names: PendingNames,
    ) -> None:
        self._registry = registry
        self._commits = commits
        self._fetcher = fetcher
        self._clock = clock
        self._checks = checks
        self._pending_names = pending_names
        # Set by the wiring.
        self.queue_counts: Callable[[Topic], QueueCounts] | None = None

    async def stable_topic(self, name: str) -> Topic:
        """The topic of a name, once no create, configure or drop of it is in flight."""
        await self._pending_names.over(name)
        return self._registry.existing(name)

    async def create_topic(self, name: str, beside: Topic | None = None) -> Topic:
        """The topic of a name, durable; created on the shard of `beside` if it does not exist."""
        await self._pending_names.over(name)
        topic = self._registry.find(name)
        while topic is None:
            if beside is not None:
                self._commits.place_beside(beside.topic_id)
            self._checks.check_topics((name,))
            made, entry = self._registry.decide_create(name, TopicConfig(), self._clock.now_ms())
            try:
                ticket = self._commits.submit(entry, gate_of(entry, made), made)
            except TopicsError:
                self._registry.abandon(made.topic_id)
                raise
            await self._pending_names.hold_until_resolved(name, ticket)
            await self._pending_names.over(name)
            topic = self._registry.find(name)
        return topic

    def check_room(self, *names: str) -> None:
        """Raise `throttled` or the errors of `Registry.check_free` if these may not be created."""
        self._checks.check_topics(names)

    async def put_topic(
        self,
        name: str,
        config: TopicConfig,
        *,
        keep_type: bool,
        check: ConditionCheck | None = None,
    ) -> PutOutcome:
        """Create a topic or replace its configuration (§1.1); durable before it returns."""

        def replaced(old: TopicConfig | None) -> TopicConfig:
            if old is None or not keep_type:
                return config
            return msgspec.structs.replace(config, type=old.type)

        return await self.configure(name, replaced, check=check)

    async def configure(
        self,
        name: str,
        change: Callable[[TopicConfig | None], TopicConfig],
        *,
        check: ConditionCheck | None = None,
    ) -> PutOutcome:
        """Change a topic's configuration: `change` gets the old one (None: a new topic).

        `change` is called in the step that decides, so that no other change is overwritten. Raises
        what `check` raises, before anything is staged.
        """
        await self._pending_names.over(name)
        now_ms = self._clock.now_ms()
        topic = self._registry.find(name)
        before = None if topic is None else topic.config
        config = change(before)
        _decide_condition(check, name, topic, now_ms)
        if topic is None:
            self._checks.check_topics((name,))
            topic, entry = self._registry.decide_create(name, config, now_ms)
        else:
            changed = decide_put(topic, config, now_ms)
            if changed is None:
                return PutOutcome(config=config, before=before)
            entry = changed
        try:
            ticket = self._commits.submit(entry, gate_of(entry, topic), topic)
        except TopicsError:
            self._registry.abandon(topic.topic_id)
            raise
        await self._pending_names.hold_until_resolved(name, ticket)
        return PutOutcome(config, before, ticket.write_ms, ticket.sync_ms)

    async def drop_topic(
        self, name: str, *, if_empty: bool, check: ConditionCheck | None = None
    ) -> bool:
        """Drop a topic with its records (§1.4); durable before this returns. False: no such topic.

        Raises what `check` raises, before anything is staged.
        """
        while True:
            await self._pending_names.over(name)
            topic = self._registry.find(name)
            _decide_condition(check, name, topic, self._clock.now_ms())
            if topic is None:
                return False
            in_flight = self._commits.newest(topic.topic_id)
            if not if_empty or in_flight is None:
                break
            await resolved(in_flight)
        entry = decide_drop(topic, self._clock.now_ms(), if_empty=if_empty)
        await self._pending_names.hold_until_resolved(
            name, self._commits.submit(entry, gate_of(entry, topic), topic, urgent=True)
        )
        return True

    def state(self, name: str, *, touch: bool) -> TopicState:
        """The state of a topic (§1.2)."""
        topic = self._registry.existing(name)
        now_ms = self._clock.now_ms()
        if touch:
            topic.last_read_ts = now_ms
        return self._state_of(topic, now_ms)

    def list_topics(
        self, *, prefix: str, after: str | None, page_size: int, touch: bool, keep: MayName = None
    ) -> TopicPage:
        """Topics in name order after `after` (§1.3)."""
        topics, next_after = self._registry.page(prefix, after, page_size, keep)
        now_ms = self._clock.now_ms()
        if touch:
            for topic in topics:
                topic.last_read_ts = now_ms
        return TopicPage([self._state_of(topic, now_ms) for topic in topics], next_after)

    def _state_of(self, topic: Topic, now_ms: int) -> TopicState:
        queue = None
        if topic.config.type is TopicType.QUEUE and self.queue_counts is not None:
            queue = self.queue_counts(topic)
        disk_bytes = self._fetcher.disk_bytes(topic.topic_id)
        return state_of(topic, now_ms, disk_bytes=disk_bytes, queue=queue)


def _decide_condition(
    check: ConditionCheck | None, name: str, topic: Topic | None, now_ms: int
) -> None:
    """Raise the condition's error unless the topic of a name, or its absence, meets it."""
    if check is None:
        return
    if topic is None:
        check.decide_absent(name)
    else:
        check.decide(topic, now_ms)
