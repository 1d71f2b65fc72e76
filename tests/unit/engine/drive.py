"""Helpers of engine tests: a sealed segment over blocks, and a topic driven without a journal."""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Sequence

from topics_server.engine.answers import Page, ReadRequest
from topics_server.engine.background import seal_plan
from topics_server.engine.log.block_slices import slice_block
from topics_server.engine.log.runs import Rows
from topics_server.engine.read.page import Fetch, PagePlan, complete, plan_page
from topics_server.engine.topic.applied import Applied
from topics_server.engine.topic.dedupe import Duplicate
from topics_server.engine.topic.producers import StampRepeated
from topics_server.engine.topic.topic import Topic
from topics_server.engine.topic.writes.append import decide_append
from topics_server.engine.topic.writes.apply import apply_entry
from topics_server.engine.topic.writes.configure import decide_put
from topics_server.engine.topic.writes.delete import (
    decide_delete,
    decide_expiry,
    segments_to_search,
)
from topics_server.values.appends import AppendLimits, decode_append
from topics_server.values.blocks import Block, record_bytes
from topics_server.values.entries import Entry, RecordsAppended
from topics_server.values.file_inventory import FlagsDigest
from topics_server.values.limits import PAGE_BYTES_MAX
from topics_server.values.model import TagMatch, TopicConfig
from topics_server.values.storage_types import SegmentPlan

Record = tuple[bytes, bytes, str | None, str | None]


class FakeIndex:
    """A sealed segment whose columns are Python objects; satisfies `SealedIndex`."""

    def __init__(self, plan: SegmentPlan) -> None:
        self.segment_id = plan.segment_id
        self.blocks = plan.blocks
        self.first_seq = plan.blocks[0].first_seq
        self.last_seq = plan.blocks[-1].last_seq
        self.disk_flags = bytearray(plan.dead)
        # Rows that cannot be read.
        self.lost_rows: set[int] = set()
        self.rows = [(block, row) for block in plan.blocks for row in range(block.count)]
        assert len(self.rows) == self.last_seq - self.first_seq + 1 == len(plan.dead)
        self.times = [block.times[row] for block, row in self.rows]

    def time(self, row: int) -> int:
        return self.times[row]

    def first_row_since(self, ts: int) -> int:
        return bisect_left(self.times, ts)

    def record_bytes(self, row: int) -> int:
        block, at = self.rows[row]
        return record_bytes(block.data(at), block.meta(at), block.tags[at], block.nodes[at])

    def record_bytes_between(self, first_row: int, end_row: int, dead: bytes | bytearray) -> int:
        assert len(dead) in (len(self.rows), end_row - first_row)
        offset = 0 if len(dead) == len(self.rows) else first_row
        rows = range(first_row, end_row)
        return sum(self.record_bytes(row) for row in rows if not dead[row - offset])

    def bytes_at_most(self, first_row: int, end_row: int) -> int:
        return (end_row - first_row) * max(map(self.record_bytes, range(len(self.rows))))

    def record_bytes_of(self, rows: Rows) -> int:
        return sum(map(self.record_bytes, rows.tolist()))

    def node_rows(self, nodes: frozenset[str], first_row: int, end_row: int) -> bytes:
        picked = self.rows[first_row:end_row]
        return bytes(block.nodes[row] in nodes for block, row in picked)

    def flags(self) -> bytes:
        return bytes(self.disk_flags)

    def damaged_rows(self, first_row: int, end_row: int) -> Sequence[tuple[int, int]]:
        return [(row, row) for row in sorted(self.lost_rows) if first_row <= row < end_row]

    def digest(self) -> FlagsDigest:
        return FlagsDigest(self.disk_flags.count(1), hash(bytes(self.disk_flags)) % 2**64)

    def tag_rows(self, match: TagMatch) -> Sequence[int]:
        return [n for n, (block, row) in enumerate(self.rows) if match.matches(block.tags[row])]

    def read(self, first_row: int, end_row: int) -> Block:
        """The rows as one block, as `Segments.read` returns them."""
        taken = self.rows[first_row:end_row]
        pieces = [slice_block(block, row, row + 1) for block, row in taken]
        whole = Block(
            first_seq=self.first_seq + first_row,
            times=pieces[0].times,
            ends=pieces[0].ends,
            body=b"".join(piece.body for piece in pieces),
            tags=[piece.tags[0] for piece in pieces],
            nodes=[piece.nodes[0] for piece in pieces],
            kinds=bytes(len(pieces)),
            hops=bytes(len(pieces)),
        )
        for piece in pieces[1:]:
            start = whole.ends[-1]
            whole.ends.extend([start + piece.ends[0], start + piece.ends[1]])
            whole.times.extend(piece.times)
        assert whole.count == end_row - first_row
        return whole


class Driver:
    """One topic with a clock, lsns and fake segments; entries are applied at once or held."""

    def __init__(self, config: TopicConfig | None = None) -> None:
        self.topic = Topic(1, "t", 1, config or TopicConfig(), 0)
        self.now_ms = 1_000
        self.lsn = 0
        self.held: list[tuple[int, Entry]] = []
        self.indexes: dict[int, FakeIndex] = {}
        self.limits = AppendLimits()

    def body(
        self,
        *records: object,
        tag: str | None = None,
        node: str | None = None,
        meta: dict[str, int] | None = None,
    ) -> bytes:
        rows: list[dict[str, object]] = []
        for data in records:
            row: dict[str, object] = {"data": data}
            if tag is not None:
                row["tag"] = tag
            if meta is not None and len(rows) % 2:
                row["meta"] = meta
            rows.append(row)
        return json.dumps({"records": rows, **({"node": node} if node else {})}).encode()

    def append(
        self,
        *records: object,
        tag: str | None = None,
        node: str | None = None,
        key: str | None = None,
    ) -> RecordsAppended | Duplicate:
        """Decide and apply an append of these payloads."""
        return self.append_body(self.body(*records, tag=tag, node=node), key)

    def append_body(self, body: bytes, key: str | None = None) -> RecordsAppended | Duplicate:
        decided = self.decide(body, key)
        if isinstance(decided, RecordsAppended):
            self.commit(decided)
        return decided

    def decide(self, body: bytes, key: str | None = None) -> RecordsAppended | Duplicate:
        decoded = decode_append(body)
        decided = decide_append(self.topic, decoded, body, key, self.now_ms, self.limits)
        assert not isinstance(decided, StampRepeated), "there is no producer"
        return decided

    def hold(self, entry: Entry) -> int:
        """Stage an entry without applying it."""
        self.lsn += 1
        self.topic.stage(self.lsn, entry)
        self.held.append((self.lsn, entry))
        return self.lsn

    def release(self) -> Applied:
        """Apply the oldest held entry."""
        lsn, entry = self.held.pop(0)
        self.topic.commit_staged(lsn)
        return apply_entry(self.topic, lsn, entry)

    def undo(self, lsn: int) -> None:
        """Fail the held entries of this lsn and later."""
        self.topic.undo_from(lsn)
        self.held = [held for held in self.held if held[0] < lsn]

    def commit(self, entry: Entry) -> Applied:
        assert not self.held
        self.hold(entry)
        return self.release()

    def replay(self, entry: Entry) -> Applied:
        """Apply an entry like recovery: nothing was staged, its body is decoded again."""
        self.lsn += 1
        return apply_entry(self.topic, self.lsn, entry)

    def delete(
        self, before_seq: int | None = None, match: TagMatch | None = None, *, hold: bool = False
    ) -> int:
        """Delete existing records; return their number (0 when held)."""
        hits: dict[int, Sequence[int]] = {}
        if match is not None:
            for segment_id in segments_to_search(self.topic, before_seq, self.now_ms):
                hits[segment_id] = self.indexes[segment_id].tag_rows(match)
        entry = decide_delete(self.topic, before_seq, match, hits, self.now_ms)
        if entry is None:
            return 0
        if hold:
            self.hold(entry)
            return 0
        return self.commit(entry).deleted

    def put(self, config: TopicConfig) -> None:
        entry = decide_put(self.topic, config, self.now_ms)
        if entry is not None:
            self.commit(entry)

    def expire(self) -> bool:
        entry = decide_expiry(self.topic, self.now_ms)
        if entry is not None:
            self.commit(entry)
        return entry is not None

    def plan_seal(self, max_records: int = 65_536, *, force: bool = True) -> SegmentPlan | None:
        return seal_plan.plan_seal(
            self.topic, self.lsn, self.now_ms, max_records, 1 << 30, 600_000, force
        )

    def finish_seal(self, plan: SegmentPlan) -> None:
        index = FakeIndex(plan)
        self.indexes[plan.segment_id] = index
        self.topic.mark_sealed(plan, index)

    def seal(self, max_records: int = 65_536) -> bool:
        """Seal one run of the present records."""
        plan = self.plan_seal(max_records)
        if plan is not None:
            self.finish_seal(plan)
        return plan is not None

    def flip(self) -> None:
        """Write the pending flips to the fake disk."""
        flips = {key: list(rows) for key, rows in self.topic.files.pending.items()}
        for segment_id, rows in flips.items():
            for row in rows:
                self.indexes[segment_id].disk_flags[row] = 1
        self.topic.flips_done(flips, {key: self.indexes[key].digest() for key in flips})

    def drop_segments(self) -> list[int]:
        ids = seal_plan.plan_drops(self.topic)
        self.topic.segments_dropped(ids)
        for segment_id in ids:
            del self.indexes[segment_id]
        return ids

    def plan(self, request: ReadRequest) -> PagePlan:
        return plan_page(self.topic, request, self.now_ms)

    def fetch(self, plan: PagePlan) -> dict[Fetch, Block]:
        return {
            fetch: self.indexes[fetch.segment_id].read(fetch.first_row, fetch.end_row)
            for fetch in plan.fetches()
        }

    def read(
        self,
        from_seq: int = 0,
        limit: int = 1000,
        max_bytes: int = PAGE_BYTES_MAX,
        nodes: frozenset[str] = frozenset(),
    ) -> Page:
        plan = self.plan(ReadRequest(from_seq, limit, max_bytes, nodes))
        return complete(plan, self.fetch(plan))


def records_of(page: Page) -> list[tuple[int, Record]]:
    """The records of a page with their seqs, in order."""
    found: list[tuple[int, Record]] = []
    for piece in page.pieces:
        block = piece.block
        for row in piece.rows:
            record = (block.data(row), block.meta(row), block.tags[row], block.nodes[row])
            found.append((block.first_seq + row, record))
    return found


def seqs_of(page: Page) -> list[int]:
    """The seqs of a page's records."""
    return [seq for seq, _ in records_of(page)]
