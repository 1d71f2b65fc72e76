"""An engine over lists: journal, segments and snapshots that the test drives.

`ListJournal` accepts entries and reports nothing until the test says so; `ListSegments` keeps runs
as Python objects and notes its operations in order; `Rig` wires them like `node.py`. There is no
disk, no thread, and only the test's time.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from tests.unit.engine.drive import FakeIndex
from topics_server.engine.answers import Appended, Deleted, Page, ReadRequest
from topics_server.engine.background.checkpointer import Checkpointer
from topics_server.engine.background.sealer import Sealer, SealingRules
from topics_server.engine.commit.notifier import Notifier
from topics_server.engine.commit.pipeline import CommitPipeline
from topics_server.engine.commit.transfers import Transfers
from topics_server.engine.ports import SealedIndex
from topics_server.engine.read.segment_reader import Fetcher
from topics_server.engine.store import Store
from topics_server.engine.topic.quotas import Quotas
from topics_server.engine.topic.registry import Registry
from topics_server.engine.topic.topic import Topic
from topics_server.values.appends import AppendLimits, DecodedAppend, decode_append
from topics_server.values.blocks import Block
from topics_server.values.columns.json_rows import JsonBlock
from topics_server.values.entries import Entry
from topics_server.values.errors import Code, Damaged, StorageError, TopicsError
from topics_server.values.file_inventory import Anchor, FlagsDigest, FoundTopic, Suspect
from topics_server.values.json_cache import render_block
from topics_server.values.limits import BLOCK_RECORDS_MAX
from topics_server.values.model import TagMatch, TopicConfig
from topics_server.values.storage_types import (
    PackedSegment,
    ReplayStart,
    SegmentPlan,
    ShardProgress,
    SnapshotImage,
    SyncedShard,
    TopicFacts,
)

T = TypeVar("T")


@dataclass(frozen=True)
class Submitted:
    """One entry as the journal got it."""

    lsn: int
    entry: Entry
    shard: int
    urgent: bool
    sync: bool


class ListJournal:
    """Satisfies `Journal`: reports no result until a test calls `write`, `sync` or `fail`.

    Topic t belongs to shard t mod `shard_count`.
    """

    def __init__(self, shard_count: int = 2) -> None:
        self.shard_count = shard_count
        self.submitted: list[Submitted] = []
        self.refusal: TopicsError | None = None
        self.reopened: list[int] = []
        self.trimmed: list[int] = []
        self.read_only: list[int] = []
        # The number of events when an end mark was made durable.
        self.holds: list[int] = []
        self.events: list[str] = []
        self.written = [0] * shard_count
        self.synced = [0] * shard_count
        self._told: Callable[[ShardProgress], None] = lambda progress: None

    def shard_of(self, topic_id: int) -> int:
        return topic_id % self.shard_count

    def listen(self, callback: Callable[[ShardProgress], None]) -> None:
        self._told = callback

    def submit(self, lsn: int, entry: Entry, *, shard: int, urgent: bool, sync: bool) -> None:
        if self.refusal is not None:
            raise self.refusal
        assert shard == self.shard_of(entry.topic_id)
        self.submitted.append(Submitted(lsn, entry, shard, urgent, sync))

    def flush(self, shard: int) -> None:
        self.events.append(f"flush {shard}")

    def reopen(self, shard: int) -> None:
        self.reopened.append(shard)

    def read_only_shards(self) -> Sequence[int]:
        return self.read_only

    async def sync_all(self) -> None:
        self.events.append("sync_all")
        self.sync_everything()

    async def hold_end(self, topic_id: int) -> None:
        self.holds.append(len(self.events))

    async def sync_open_shards(self) -> Sequence[SyncedShard]:
        self.events.append("sync_all")
        for shard in set(range(self.shard_count)) - set(self.read_only):
            self.sync(shard)
        return [
            SyncedShard(1, shard, self.synced[shard], shard in self.read_only)
            for shard in range(self.shard_count)
        ]

    def trim(self, start: ReplayStart) -> None:
        self.trimmed.append(start.lsn)

    async def close(self) -> None:
        self.events.append("close")

    # -- calls of tests --------------------------------------------------------------------

    @property
    def entries(self) -> list[Entry]:
        return [item.entry for item in self.submitted]

    def last_lsn(self, shard: int) -> int:
        return max((item.lsn for item in self.submitted if item.shard == shard), default=0)

    def write(self, shard: int, lsn: int | None = None) -> None:
        """Everything up to `lsn` (default: all) is written, not synced."""
        self.written[shard] = self.last_lsn(shard) if lsn is None else lsn
        self.post(shard, write_ms=0.5)

    def sync(self, shard: int, lsn: int | None = None) -> None:
        """Everything up to `lsn` is written and synced."""
        self.synced[shard] = self.last_lsn(shard) if lsn is None else lsn
        self.written[shard] = max(self.written[shard], self.synced[shard])
        self.post(shard, write_ms=0.5, sync_ms=2.0)

    def sync_everything(self) -> None:
        for shard in range(self.shard_count):
            self.sync(shard)

    def fail(self, shard: int, failed_from: int, error: str) -> None:
        """The group that starts at this lsn failed; it and all later entries are gone."""
        self.submitted = [
            item for item in self.submitted if item.shard != shard or item.lsn < failed_from
        ]
        self.post(shard, failed_from=failed_from, error=error)

    def post(
        self,
        shard: int,
        *,
        failed_from: int | None = None,
        error: str | None = None,
        write_ms: float = 0.0,
        sync_ms: float = 0.0,
    ) -> None:
        self._told(
            ShardProgress(
                shard=shard,
                written_lsn=self.written[shard],
                synced_lsn=self.synced[shard],
                failed_from=failed_from,
                error=error,
                write_ms=write_ms,
                sync_ms=sync_ms,
            )
        )


class ListSegments:
    """Satisfies `Segments`; `events` has its operations in order."""

    def __init__(self) -> None:
        self.kept: dict[int, dict[int, FakeIndex]] = {}
        self.facts: dict[int, TopicFacts] = {}
        self.generations: dict[int, int] = {}
        self.cold: set[tuple[int, int]] = set()
        self.events: list[str] = []
        self.fault: StorageError | None = None
        self.damaged: dict[tuple[int, int], tuple[int, int]] = {}
        self.damaged_indexes: set[tuple[int, int]] = set()
        self.reads = self.json_reads = 0
        # Whether `read_now` returns rows.
        self.is_in_memory = False
        # Called once, in the middle of the next job: events on the loop meanwhile.
        self.meanwhile: Callable[[], None] | None = None
        self.packed: list[int] = []

    def _step(self, event: str) -> None:
        if self.fault is not None:
            raise self.fault
        self.events.append(event)
        meanwhile, self.meanwhile = self.meanwhile, None
        if meanwhile is not None:
            meanwhile()

    def _index(self, topic_id: int, segment_id: int) -> FakeIndex:
        if self.fault is not None:
            raise self.fault
        found = self.kept.get(topic_id, {}).get(segment_id)
        if found is None:
            raise StorageError(f"no segment {segment_id} of topic {topic_id}")
        return found

    def pack(self, plan: SegmentPlan) -> PackedSegment:
        self.packed.append(plan.segment_id)
        return PackedSegment(b"", b"")

    def put(
        self, plan: SegmentPlan, facts: TopicFacts, packed: PackedSegment | None = None
    ) -> SealedIndex:
        self._step(f"put {plan.segment_id}")
        index = FakeIndex(plan)
        self.kept.setdefault(plan.topic_id, {})[plan.segment_id] = index
        self._publish(facts)
        return index

    def _publish(self, facts: TopicFacts) -> None:
        self.facts[facts.topic_id] = facts
        self.generations[facts.topic_id] = self.generations.get(facts.topic_id, 0) + 1

    def read(
        self,
        topic_id: int,
        segment_id: int,
        first_row: int,
        end_row: int,
        unwanted: Sequence[tuple[int, int]] = (),
    ) -> Block:
        index = self._index(topic_id, segment_id)
        self.reads += 1
        bad = self.damaged.get((topic_id, segment_id))
        if bad is not None and bad[0] < end_row and first_row <= bad[1] and bad not in unwanted:
            raise Damaged(bad)
        return index.read(first_row, end_row)

    def read_now(self, topic_id: int, segment_id: int, rows: range, most: int) -> Block | None:
        if not self.is_in_memory or (topic_id, segment_id) in self.damaged:
            return None
        block = self._index(topic_id, segment_id).read(rows.start, rows.stop)
        return block if len(block.body) <= most else None

    def read_json_now(
        self, topic_id: int, segment_id: int, rows: range, most: int, shown: int
    ) -> JsonBlock | None:
        block = self.read_now(topic_id, segment_id, rows, most)
        if block is None or block.kinds.strip(b"\0"):
            return None
        return render_block(block, shown)

    def read_json(
        self, topic_id: int, segment_id: int, rows: range, most: int, shown: int
    ) -> JsonBlock | None:
        block = self._index(topic_id, segment_id).read(rows.start, rows.stop)
        is_sound = (topic_id, segment_id) not in self.damaged
        if not is_sound or block.kinds.strip(b"\0") or len(block.body) > most:
            return None
        self.json_reads += 1
        return render_block(block, shown)

    def read_rows(
        self, topic_id: int, segment_id: int, rows: Sequence[int], max_bytes: int
    ) -> list[Block]:
        found: list[Block] = []
        for row in rows:
            found.append(self.read(topic_id, segment_id, row, row + 1))
            max_bytes -= len(found[-1].body)
            if max_bytes <= 0:
                break
        return found

    def find_tags(self, topic_id: int, segment_id: int, match: TagMatch) -> Sequence[int]:
        rows = self._index(topic_id, segment_id).tag_rows(match)
        self._step(f"find {segment_id}")
        return rows

    def check_index(self, topic_id: int, segment_id: int) -> None:
        self._index(topic_id, segment_id)
        if (topic_id, segment_id) in self.damaged_indexes:
            raise StorageError("fails its check")

    def flip(self, topic_id: int, rows: dict[int, Sequence[int]]) -> dict[int, FlagsDigest]:
        self._step(f"flip {sorted(rows)}")
        for segment_id, dead in rows.items():
            for row in dead:
                self.kept[topic_id][segment_id].disk_flags[row] = 1
        return {segment_id: self.flags_digest(topic_id, segment_id) for segment_id in rows}

    def drop(self, topic_id: int, segment_ids: Sequence[int], facts: TopicFacts) -> None:
        self._step(f"drop {list(segment_ids)}")
        self._publish(facts)
        for segment_id in segment_ids:
            del self.kept[topic_id][segment_id]

    def drop_topic(self, topic_id: int) -> None:
        self._step(f"drop topic {topic_id}")
        self.kept.pop(topic_id, None)
        self.facts.pop(topic_id, None)

    def relocate(self, topic_id: int, segment_id: int, facts: TopicFacts) -> None:
        self._step(f"relocate {segment_id}")
        self._publish(facts)
        self.cold.add((topic_id, segment_id))

    def write_manifest(self, facts: TopicFacts) -> None:
        self._step("manifest")
        self._publish(facts)

    def open_topic(
        self, topic_id: int, anchor: Anchor | None = None
    ) -> tuple[FoundTopic, Sequence[SealedIndex]]:
        path = self.manifest_path(topic_id)
        if topic_id not in self.facts:
            return FoundTopic(topic_id, path), []
        kept = self.kept.get(topic_id, {})
        flags = {segment_id: index.digest() for segment_id, index in kept.items()}
        next_id = max(kept, default=0) + 1
        generation = self.generations[topic_id]
        report = FoundTopic(topic_id, path, generation, next_id, next_id, self.facts[topic_id])
        report.flags = flags
        for segment_id, index in kept.items():
            anchored = anchor.flags.get(segment_id) if anchor else None
            if anchor and anchored is not None and anchored != flags[segment_id]:
                report.suspects[segment_id] = Suspect(
                    index.first_seq,
                    index.last_seq,
                    known_dead=index.disk_flags.count(1),
                    anchored_dead=anchored.dead_count,
                    is_touched=segment_id in anchor.flips,
                )
        return report, list(kept.values())

    def finish_recovery(self, topic_id: int, untrusted: Collection[int] = ()) -> None:
        pass

    def manifest_path(self, topic_id: int) -> str:
        return f"segments/{topic_id}/manifest"

    def generation_of(self, topic_id: int) -> int:
        return self.generations.get(topic_id, 0)

    def flags_digest(self, topic_id: int, segment_id: int) -> FlagsDigest:
        return self.kept[topic_id][segment_id].digest()

    def published_config(self, topic_id: int) -> TopicConfig | None:
        facts = self.facts.get(topic_id)
        return facts.config if facts else None

    def topics_on_disk(self) -> list[int]:
        return sorted(self.kept)

    def bytes_of(self, topic_id: int) -> tuple[int, int]:
        sizes = [
            (len(index.rows), (topic_id, segment_id) in self.cold)
            for segment_id, index in self.kept.get(topic_id, {}).items()
        ]
        return sum(n for n, cold in sizes if not cold), sum(n for n, cold in sizes if cold)

    def is_cold(self, topic_id: int, segment_id: int) -> bool:
        return (topic_id, segment_id) in self.cold


class ListSnapshots:
    """Satisfies `Snapshots`: keeps every image; returns the start of the older kept one."""

    def __init__(self, events: list[str]) -> None:
        self.images: list[SnapshotImage] = []
        self.fault: StorageError | None = None
        self._events = events

    def write(self, image: SnapshotImage) -> ReplayStart:
        if self.fault is not None:
            raise self.fault
        self._events.append("publish")
        # The checkpointer releases its list of parts; published ones stay.
        self.images.append(msgspec.structs.replace(image, parts=list(image.parts)))
        return self.images[-2].replay_start if len(self.images) > 1 else ReplayStart()

    def newest(self) -> SnapshotImage | None:
        return self.images[-1] if self.images else None


class ListReplay:
    """Satisfies `Replay` with these entries."""

    def __init__(self, *entries: tuple[int, Entry]) -> None:
        self._entries = entries
        self.asked_from: int | None = None

    def entries(self, start_lsn: int) -> Iterator[tuple[int, Entry]]:
        self.asked_from = start_lsn
        yield from ((lsn, entry) for lsn, entry in self._entries if lsn >= start_lsn)

    def may_have_lost(self, topic_id: int) -> bool:
        return False

    @property
    def progress(self) -> float:
        return 1.0 if self.asked_from is not None else 0.0


class NowOffload:
    """Satisfies `Offload`: runs blocking calls immediately."""

    async def run(self, call: Callable[[], T]) -> T:
        return call()


class HandClock:
    """Satisfies `Clock`: stands still until a test moves it."""

    def __init__(self, now_ms: int = 1_000_000) -> None:
        self.wall_ms = now_ms
        self.steady_ms = 0.0

    def now_ms(self) -> int:
        return self.wall_ms

    def monotonic_ms(self) -> float:
        return self.steady_ms

    def move(self, by_ms: int) -> None:
        self.wall_ms += by_ms
        self.steady_ms += by_ms


RULES = SealingRules(
    max_records=8,
    max_bytes=1 << 30,
    max_age_ms=600_000,
    retain_segments=1,
    retain_bytes=0,
    has_cold=False,
)
NO_QUOTAS = Quotas(
    max_topics=0, max_total_bytes=0, max_tail_records=1 << 30, max_tail_bytes=1 << 40
)


class Rig:
    """One engine, wired like `node.py`; by default its journal finishes every entry at once."""

    def __init__(
        self,
        *,
        is_prompt: bool = True,
        quotas: Quotas = NO_QUOTAS,
        rules: SealingRules = RULES,
    ) -> None:
        self.registry = Registry()
        self.notifier = Notifier()
        self.clock = HandClock()
        self.journal = PromptJournal() if is_prompt else ListJournal()
        self.segments = ListSegments()
        self.segments.events = self.journal.events
        self.snapshots = ListSnapshots(self.journal.events)
        self.commits = CommitPipeline(self.registry, self.journal, self.notifier, 1)
        offload = NowOffload()
        self.sealer = Sealer(
            self.registry, self.commits, self.journal, self.segments, offload, self.clock, rules
        )
        self.checkpointer = Checkpointer(
            self.registry,
            self.commits,
            self.journal,
            self.snapshots,
            offload,
            self.clock,
            self.sealer.seal_tails,
        )
        self.checkpointer.on_taken.append(self.sealer.snapshot_taken)
        self.sealer.on_moved += [self.checkpointer.moved, self.notifier.notify]
        self.fetcher = Fetcher(self.registry, self.segments, offload)
        self.fetcher.on_moved.append(self.checkpointer.moved)
        self.moves = Transfers(self.registry, self.commits, self.clock)
        self.store = Store(
            self.registry,
            self.commits,
            self.notifier,
            self.fetcher,
            self.clock,
            AppendLimits(),
            quotas,
            self.moves,
        )

    async def append(
        self,
        name: str,
        *datas: object,
        tag: str | None = None,
        key: str | None = None,
        create: bool | None = None,
        config: TopicConfig | None = None,
    ) -> Appended:
        """Append one record for each datum, each with this tag."""
        body, decoded = body_of(*datas, tag=tag, create=create)
        return await self.store.append(name, body, decoded, header_key=key, config=config)

    async def read(self, name: str, from_seq: int = 0, wait_ms: int = 0) -> Page:
        return await self.store.read(name, ReadRequest(from_seq, 1000, 1 << 20, wait_ms=wait_ms))

    async def delete(
        self, name: str, *, before_seq: int | None = None, tag: str | None = None
    ) -> Deleted:
        match = None if tag is None else TagMatch(tag)
        return await self.store.delete(name, before_seq=before_seq, match=match)


class PromptJournal(ListJournal):
    """A disk that finishes an entry before the next turn of the loop."""

    def submit(self, lsn: int, entry: Entry, *, shard: int, urgent: bool, sync: bool) -> None:
        super().submit(lsn, entry, shard=shard, urgent=urgent, sync=sync)
        asyncio.get_running_loop().call_soon(self.sync, shard, lsn)

    def sync(self, shard: int, lsn: int | None = None) -> None:
        """Sync, but never move back behind an earlier sync."""
        newest = self.last_lsn(shard) if lsn is None else lsn
        super().sync(shard, max(newest, self.synced[shard]))


def body_of(
    *datas: object, tag: str | None = None, create: bool | None = None
) -> tuple[bytes, DecodedAppend]:
    """An append's bytes, and their decoded form."""
    records = [{"data": data, **({} if tag is None else {"tag": tag})} for data in datas]
    body: dict[str, object] = {"records": records}
    if create is not None:
        body["create"] = create
    encoded = json.dumps(body).encode()
    return encoded, decode_append(encoded)


async def sealed_topic(rig: Rig, records: Sequence[dict[str, object]]) -> Topic:
    """Topic `t` with these records, all of them sealed."""
    for first in range(0, len(records), BLOCK_RECORDS_MAX):
        body = json.dumps({"records": records[first : first + BLOCK_RECORDS_MAX]}).encode()
        await rig.store.append("t", body, decode_append(body), header_key=None, config=None)
    topic = rig.registry.existing("t")
    await rig.sealer.tend(topic, force_seal=True)
    assert topic.log.sealed_seq == len(records)
    return topic


def throttled(limit: str = "queue") -> TopicsError:
    """The detail of a full queue's refusal."""
    return TopicsError(Code.THROTTLED, "full", {"limit": limit})
