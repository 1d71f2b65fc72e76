"""The engine's async front: the calls of the API and of the services, under one name.

`appends`, `deletes`, `reads` and `topic_admin` do the work: each call decides by visible and staged
state (in pure modules), submits one entry and waits for its ticket. If the caller is cancelled, the
write continues, because tickets belong to `commits`. Loop thread only.
"""

from __future__ import annotations

from collections.abc import Sequence

from topics_server.engine.appends import Appends
from topics_server.engine.commit.notifier import Notifier
from topics_server.engine.commit.pending_names import PendingNames
from topics_server.engine.commit.pipeline import CommitPipeline
from topics_server.engine.commit.transfers import Transfers
from topics_server.engine.conditions import Conditions
from topics_server.engine.consumers import ConsumerCursors
from topics_server.engine.deletes import Deletes
from topics_server.engine.ports import Clock
from topics_server.engine.preconditions import Preconditions
from topics_server.engine.read.segment_reader import Fetcher
from topics_server.engine.reads import Reads
from topics_server.engine.topic.quotas import Quotas
from topics_server.engine.topic.registry import Registry
from topics_server.engine.topic.writes.condition import ConditionCounts
from topics_server.engine.topic_admin import TopicAdmin
from topics_server.values.appends import AppendLimits
from topics_server.values.model import Durability


class Store:
    """All calls of the API and the services; `engine/answers.py` has the values they return."""

    def __init__(
        self,
        registry: Registry,
        commits: CommitPipeline,
        notifier: Notifier,
        fetcher: Fetcher,
        clock: Clock,
        append_limits: AppendLimits,
        quotas: Quotas,
        transfers: Transfers,
    ) -> None:
        self._registry = registry
        self._commits = commits
        # Names with a create, configure or drop in flight: other commands wait until it is applied
        # or has failed.
        self.pending_names = PendingNames()
        self.append_limits = append_limits
        self.checks = checks = Preconditions(registry, quotas, notifier, clock)
        self.appends = appends = Appends(
            registry, commits, clock, checks, self.pending_names, append_limits, transfers
        )
        self.deletes = deletes = Deletes(registry, commits, fetcher, clock, self.pending_names)
        self.reads = reads = Reads(registry, notifier, fetcher, clock)
        self.topics = topics = TopicAdmin(
            registry, commits, fetcher, clock, checks, self.pending_names
        )
        self.conditions = conditions = Conditions(commits, fetcher)
        self.check_of, self.decided = conditions.check_of, conditions.decided
        self.consumers = consumers = ConsumerCursors(registry, commits, clock, self.pending_names)
        self.put_consumer, self.commit_consumer = consumers.put_consumer, consumers.commit_consumer
        self.delete_consumer, self.consumer = consumers.delete_consumer, consumers.consumer
        self.list_consumers, self.read_start = consumers.list_consumers, consumers.read_start
        self.consumer_lags = consumers.consumer_lags
        # Bind the methods once, so that a call through the store needs no additional frame. `topic`
        # raises `topic_not_found`; `topic_of` takes an id.
        self.topic, self.topic_of = registry.existing, registry.get
        self.append, self.begin_append = appends.append, appends.begin_append
        self.append_derived, self.append_page = appends.append_derived, appends.append_page
        self.submit_append = appends.submit_append
        self.delete, self.delete_seqs = deletes.delete, deletes.delete_seqs
        self.start_delete, self.finish_delete = deletes.start_delete, deletes.finish_delete
        self.read, self.read_resident = reads.read, reads.read_resident
        self.read_json, self.read_json_from_disk = reads.read_json, reads.read_json_from_disk
        self.read_rows, self.resident_rows = reads.read_rows, reads.resident_rows
        self.read_backward, self.range_mark = reads.read_backward, reads.range_mark
        self.dead_slots = reads.dead_slots
        self.cursor_of = reads.cursor_of
        self.upto_seq = reads.upto_seq
        self.complete, self.resident, self.drain = reads.complete, reads.resident, reads.drain
        self.stable_topic, self.create_topic = topics.stable_topic, topics.create_topic
        self.put_topic, self.configure = topics.put_topic, topics.configure
        self.drop_topic, self.check_room = topics.drop_topic, topics.check_room
        self.state, self.list_topics = topics.state, topics.list_topics

    # -- switches --------------------------------------------------------------------------

    @property
    def is_disk_low(self) -> bool:
        """Whether appends are refused because the disk is nearly full."""
        return self.checks.is_disk_low

    @is_disk_low.setter
    def is_disk_low(self, is_low: bool) -> None:
        self.checks.is_disk_low = is_low

    @property
    def is_draining(self) -> bool:
        """Whether the server is shutting down."""
        return self.reads.is_draining

    # -- facts for probes ------------------------------------------------------------------

    @property
    def condition_counts(self) -> ConditionCounts:
        """How many conditions of writes were true, and how many were false."""
        return self.conditions.counts

    @property
    def topic_count(self) -> int:
        """The number of topics."""
        return len(self._registry)

    @property
    def records_live(self) -> int:
        """The number of live records of all topics."""
        return self._registry.records_live

    @property
    def bytes_live(self) -> int:
        """The live bytes of all topics."""
        return self._registry.bytes_live

    @property
    def queue_topics(self) -> int:
        """Topics of type queue."""
        return self._registry.queue_topics

    @property
    def damaged_records(self) -> int:
        """The number of records of all topics that were lost to damage."""
        return self._registry.damaged_records

    def counts_by_class(self) -> dict[Durability, int]:
        """The number of topics by durability class."""
        return self._registry.counts_by_class()

    def read_only_shards(self) -> Sequence[int]:
        """Journal shards that accept no writes until a restart."""
        return self._commits.read_only_shards
