"""All topics by name and id, their epochs and totals.

A name has at most one visible topic. Epochs survive a drop, so that the next topic of that name
gets a higher one: the last `DROPPED_NAMES_MAX` dropped names keep their own epoch, all older ones
share `epoch_floor`. Ids are never reused. A topic that is being created is `pending`, together with
its staged entries, until its creation is applied. Called by commits, the store and recovery.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

from msgspec import UNSET, UnsetType

from topics_server.engine.ports import SealedIndex
from topics_server.engine.topic.applied import Applied
from topics_server.engine.topic.prefix_counts import PrefixCounts
from topics_server.engine.topic.topic import Topic
from topics_server.engine.topic.writes.apply import apply_entry
from topics_server.values import limits
from topics_server.values.entries import Entry, Floor, RecordsAppended, TopicDropped, TopicPut
from topics_server.values.errors import Code, TopicsError, clipped, invalid, topic_not_found
from topics_server.values.model import (
    Durability,
    LossReason,
    StreamFacts,
    TopicConfig,
    TopicType,
    is_hashed_name,
)

# Decides which names a caller may see; None: all.
MayName = Callable[[str], bool] | None
# Above this many new names the list is sorted once, instead of inserting each name.
_INSERTS_MAX: Final = 32
_NOTHING_COUNTED: Final = (0, 0)


def own_path(topic: Topic) -> str:
    """A stream's own path; for a topic that was not created as a stream, its name."""
    return topic.name if topic.stream is None else topic.stream.facts.path


class Registry:
    """The topics. `next_topic_id`: ids below it may have been used.

    `epoch_floor`: at least the last epoch of every dropped name that is not in `dropped_epochs`.
    `sealed_of`: set in replay only; the segments found on disk for a topic that is created again.
    """

    def __init__(self) -> None:
        self._by_name: Final[dict[str, Topic]] = {}
        self._by_id: Final[dict[int, Topic]] = {}
        self._ids: Final[array[int]] = array("Q")  # of the same topics, ascending
        # Topics by name, and by id unless they are pending; every request needs a look-up.
        self.find: Final[Callable[[str], Topic | None]] = self._by_name.get
        self.get: Final[Callable[[int], Topic | None]] = self._by_id.get
        self.pending: dict[int, Topic] = {}
        self.dropped_epochs: dict[str, int] = {}
        self.epoch_floor = 0
        self.next_topic_id = 1
        self.sealed_of: Callable[[int], Sequence[SealedIndex]] | None = None
        self.records_live = 0
        self.bytes_live = 0
        # The number of records lost to damage: of all topics, and by topic.
        self.damaged_records = 0
        self._damaged: dict[int, int] = {}
        self.queue_topics = 0
        # The number of forks of the stream of a path, direct or not.
        self.fork_counts: Counter[str] = Counter()
        self._classes: Counter[Durability] = Counter()
        self._counted: dict[int, tuple[int, int]] = {}
        self._prefix_counts = PrefixCounts()
        self._names: list[str] = []
        self._new_names: list[str] = []
        self._newest_config = TopicConfig()

    def __len__(self) -> int:
        return len(self._by_name)

    def existing(self, name: str) -> Topic:
        """The topic of a name, unless it is an unfinished fork. Raises `topic_not_found`."""
        topic = self._by_name.get(name)
        if topic is None or (topic.stream is not None and topic.stream.facts.is_copying):
            raise topic_not_found(name)
        return topic

    def path_of(self, name: str) -> str | None:
        """The own path of the stream whose topic has this name, or the name of a plain topic."""
        topic = self._by_name.get(name)
        return None if topic is None else own_path(topic)

    def ids(self) -> array[int]:
        """A copy of the ids of the current topics, ascending.

        A copy of 100,000 ids takes 0.1 ms. An array made from a dict of them took 36 to 52 ms in a
        large server, and held the loop. Python's collector examines no item of an array.
        """
        return self._ids[:]

    def __iter__(self) -> Iterator[Topic]:
        return iter(list(self._by_id.values()))

    def counts_by_class(self) -> dict[Durability, int]:
        """The number of topics of each class."""
        return {durability: self._classes[durability] for durability in Durability}

    def count_of(self, prefix: str, prefixes: frozenset[str]) -> int:
        """The number of topics with own paths of a prefix, pending ones included.

        `prefixes`: all current prefixes; if they have changed, all topics are counted again.
        """
        counts = self._prefix_counts
        if counts.prefixes != prefixes:
            counts.expect(prefixes, map(own_path, self._by_name.values()))
        pending = (own_path(topic) for topic in self.pending.values())
        return counts.of(prefix) + sum(path.startswith(prefix) for path in pending)

    def decide_create(
        self,
        name: str,
        config: TopicConfig,
        now_ms: int,
        stream: StreamFacts | UnsetType = UNSET,
        first_seq: int = 1,
    ) -> tuple[Topic, TopicPut]:
        """A pending topic with a new id, and the entry that creates it; `stream`: its stream facts.

        The caller has called `check_free`. It submits the entry (or an append that includes it); if
        that fails, it abandons the topic.
        """
        assert name not in self._by_name
        epoch = max(self.dropped_epochs.get(name, 0), self.epoch_floor) + 1
        floor = Floor(first_seq, LossReason.CAP) if first_seq > 1 else None
        creation = TopicPut(
            self.next_topic_id, name, epoch, config, now_ms, first_seq - 1, True, floor, stream
        )
        self.next_topic_id += 1
        topic = Topic.provisional(creation)
        self.pending[topic.topic_id] = topic
        return topic, creation

    def check_free(self, paths: Iterable[str], *, held: Code = Code.STREAM_CONFLICT) -> None:
        """Whether topics may be created: the one rule for `/v0`, routers, queues and streams.

        `paths`: names of topics, or the own paths of streams. Raises `held` if a deleted stream of
        that path still has forks, `invalid_request` for a name that only a stream's path may map
        to.
        """
        for path in paths:
            if self.fork_counts and self.fork_counts[path]:
                message = f'stream "{clipped(path)}" was deleted and still has forks'
                raise TopicsError(held, message, {"stream": path})
            if is_hashed_name(path):
                raise invalid(
                    "names of ds: and 40 hexadecimal digits belong to the streams API; create the "
                    "stream by its path below /v1/stream",
                    "topic",
                )

    def abandon(self, topic_id: int) -> None:
        """Forget a pending topic whose creation failed; its id is not used again."""
        self.pending.pop(topic_id, None)

    # -- applying --------------------------------------------------------------------------

    def apply(self, lsn: int, entry: Entry) -> Applied:
        """Apply an entry to its topic; an entry of a dropped topic changes nothing (replay)."""
        topic = self._by_id.get(entry.topic_id)
        if topic is None:
            creation = self.creation_by(entry)
            if creation is None:
                return Applied()
            topic = self._create(creation)
        before = topic.config
        applied = apply_entry(topic, lsn, entry)
        if isinstance(entry, TopicDropped):
            if lsn == topic.applied_lsn:
                self._remove(topic)
            return applied
        if topic.config is not before:
            self._count_kind(before, -1)
            self._count_kind(topic.config, 1)
        self.recount(topic)
        return applied

    def recount(self, topic: Topic) -> None:
        """Update the totals by the topic's counts; call this after a change without an entry."""
        log = topic.log
        records, weight = self._counted[topic.topic_id]
        if records != log.live_count or weight != log.live_bytes:
            self.records_live += log.live_count - records
            self.bytes_live += log.live_bytes - weight
            self._counted[topic.topic_id] = (log.live_count, log.live_bytes)
        if log.damaged_records or topic.topic_id in self._damaged:
            self.damaged_records += log.damaged_records - self._damaged.get(topic.topic_id, 0)
            self._damaged[topic.topic_id] = log.damaged_records
        assert self.records_live >= 0
        assert self.bytes_live >= 0

    def adopt(self, topic: Topic) -> None:
        """Make a restored or newly created topic visible."""
        name, topic_id = topic.name, topic.topic_id
        assert name not in self._by_name
        assert topic_id not in self._by_id
        self._by_name[name] = topic
        self._by_id[topic_id] = topic
        insort(self._ids, topic_id)  # nearly always at the end
        if topic_id >= self.next_topic_id:
            self.next_topic_id = topic_id + 1
        self.dropped_epochs.pop(name, None)
        self._new_names.append(name)
        if topic.stream is not None:
            self._note_ancestors(topic, 1)
        self._prefix_counts.note(own_path(topic), 1)
        # Most topics are configured like the one before: they share a value that never changes.
        if topic.config == self._newest_config:
            topic.config = self._newest_config
        else:
            self._newest_config = topic.config
        self._count_kind(topic.config, 1)
        self._counted[topic_id] = _NOTHING_COUNTED
        self.recount(topic)

    def creation_by(self, entry: Entry) -> TopicPut | None:
        """The creation in this entry, if the entry would create a topic that does not exist yet."""
        creation = entry.creation if isinstance(entry, RecordsAppended) else entry
        if not isinstance(creation, TopicPut) or not creation.created:
            return None
        if entry.topic_id in self._by_id or self._is_superseded(creation):
            return None
        return creation

    def _is_superseded(self, creation: TopicPut) -> bool:
        """Replay: whether the name has, or had, a topic that was created later.

        Replay of a shard may begin before that of other shards, and find topics whose drop or
        successor is only in the snapshot. A creation whose sync failed may have the same epoch as
        its successor, but never the same id.
        """
        later = self._by_name.get(creation.name)
        if later is not None and later.topic_id > creation.topic_id:
            return True
        return creation.epoch <= self.dropped_epochs.get(creation.name, 0)

    def _create(self, entry: TopicPut) -> Topic:
        older = self._by_name.get(entry.name)
        if older is not None:
            # The drop of the older topic is on a shard that replay has not read yet, or was never
            # synced.
            self._remove(older)
        topic = self.pending.pop(entry.topic_id, None) or Topic.provisional(entry)
        if self.sealed_of is not None:
            for index in self.sealed_of(entry.topic_id):
                topic.log.adopt_sealed(index, bytearray(index.flags()))
            if topic.log.head_seq:
                topic.log.replayed_seq = 0
        self.adopt(topic)
        return topic

    def _remove(self, topic: Topic) -> None:
        self._merge_names()
        del self._by_name[topic.name]
        del self._by_id[topic.topic_id]
        del self._ids[bisect_left(self._ids, topic.topic_id)]
        records, weight = self._counted.pop(topic.topic_id)
        self.records_live -= records
        self.bytes_live -= weight
        self.damaged_records -= self._damaged.pop(topic.topic_id, 0)
        self._count_kind(topic.config, -1)
        self._note_ancestors(topic, -1)
        self._prefix_counts.note(own_path(topic), -1)
        del self._names[bisect_left(self._names, topic.name)]
        self.remember_epoch(topic.name, topic.epoch)

    def remember_epoch(self, name: str, epoch: int) -> None:
        """Remember a dropped name's last epoch; beyond the bound the oldest raises the floor."""
        self.dropped_epochs.pop(name, None)
        self.dropped_epochs[name] = epoch
        if len(self.dropped_epochs) > limits.DROPPED_NAMES_MAX:
            oldest = next(iter(self.dropped_epochs))
            self.raise_epoch_floor(self.dropped_epochs.pop(oldest))

    def raise_epoch_floor(self, epoch: int) -> None:
        """Raise the epoch floor: names that are not remembered begin above it."""
        self.epoch_floor = max(self.epoch_floor, epoch)

    def _note_ancestors(self, topic: Topic, step: int) -> None:
        if topic.stream is None:
            return
        for ancestor in topic.stream.facts.ancestors:
            self.fork_counts[ancestor.path] += step
            if not self.fork_counts[ancestor.path]:
                del self.fork_counts[ancestor.path]

    def _count_kind(self, config: TopicConfig, step: int) -> None:
        self._classes[config.durability] += step
        if config.type is TopicType.QUEUE:
            self.queue_topics += step

    # -- listing ---------------------------------------------------------------------------

    def page(
        self,
        prefix: str,
        after: str | None,
        page_size: int,
        may_name: MayName = None,
    ) -> tuple[list[Topic], str | None]:
        """Up to `page_size` topics in name order, and the name to continue after if more follow.

        `may_name`: return only topics whose name it accepts.
        """
        assert page_size > 0
        self._merge_names()
        names = self._names
        start = bisect_left(names, prefix)
        if after is not None:
            start = max(start, bisect_right(names, after))
        found: list[Topic] = []
        for index in range(start, len(names)):
            name = names[index]
            if not name.startswith(prefix):
                break
            if may_name is not None and not may_name(name):
                continue
            if len(found) == page_size:
                return found, found[-1].name
            found.append(self._by_name[name])
        return found, None

    def _merge_names(self) -> None:
        new = self._new_names
        if not new:
            return
        if len(new) > _INSERTS_MAX:
            self._names += new
            self._names.sort()
        else:
            for name in new:
                insort(self._names, name)
        self._new_names = []
        assert len(self._names) == len(self._by_name)
