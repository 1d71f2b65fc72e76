"""Every read with a filter, a range or an order equals the same choice from a plain list.

Random logs on a disk in memory: records are appended, deleted, evicted by a cap and by age, sealed,
captured and recovered after kills. Only the test writes the plain list.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from typing import Any, Final

import pytest

from tests.model.judging import read_both_ways
from tests.model.world import World
from topics_server.engine.answers import (
    BackwardRequest,
    Moment,
    Page,
    Piece,
    ReadRequest,
    ReadStart,
)
from topics_server.engine.filters import AllOf, AnyOf, Filter, NodeLeaf, Not, TagLeaf
from topics_server.engine.store import Store
from topics_server.values.appends import decode_append
from topics_server.values.json_cache import DATA, META, TAGS, render_rows
from topics_server.values.limits import SEQ_MAX
from topics_server.values.model import Durability, TagMatch, TopicConfig

TOPIC: Final = "t"
TAGS_USED: Final = (None, "a", "ab", "abc", "b", "c/1", "c/2", "rare")
NODES_USED: Final = (None, "n1", "n2")
ALL: Final = DATA | META | TAGS
QUERIES: Final = 25


@dataclass(frozen=True)
class Rec:
    """One record of the plain list."""

    seq: int
    ts: int
    tag: str | None
    node: str | None
    data: int


def passes(wanted: Any, rec: Rec) -> bool:
    """The filter, by its definition, on the plain list's record."""
    if wanted is None:
        return True
    match wanted:
        case TagLeaf(matches):
            return rec.tag is not None and any(
                rec.tag.startswith(leaf.text) if leaf.is_prefix else rec.tag == leaf.text
                for leaf in matches
            )
        case NodeLeaf(nodes):
            return rec.node in nodes
        case AnyOf(parts):
            return any(passes(part, rec) for part in parts)
        case AllOf(parts):
            return all(passes(part, rec) for part in parts)
        case Not(part):
            return not passes(part, rec)
        case _:
            raise AssertionError(wanted)


@dataclass
class PlainReads:
    """One topic and its plain list, from one seed."""

    seed: int
    queries: int = 0
    matched: int = 0
    records: dict[int, Rec] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rng = rng = random.Random(f"reads {self.seed}")
        self.world = World(
            self.seed, wal_shards=1, segment_max_events=rng.choice((3, 8, 20)), max_limit=1000
        )
        self._number = 0

    def run(self) -> None:
        """A life of some starts. Raises `AssertionError` with the seed."""
        with self.world.life(self.seed):
            for number in range(3):
                self.world.start()
                if number == 0:
                    config = TopicConfig(durability=Durability.FSYNC)
                    self.world.run(self.store.put_topic(TOPIC, config, keep_type=False))
                for _ in range(self.rng.randint(3, 6)):
                    self.change()
                    for _ in range(QUERIES):
                        self.world.run(self.query())
                if self.rng.random() < 0.5:
                    self.world.crash("kill")
                else:
                    self.world.stop()

    @property
    def store(self) -> Store:
        """The running store."""
        assert self.world.node is not None
        return self.world.node.store

    # -- changes ---------------------------------------------------------------------------

    def change(self) -> None:
        """One random change of the topic, done to the list too."""
        world, rng, node = self.world, self.rng, self.world.node
        assert node is not None
        what = rng.choice(("append", "append", "append", "delete", "tag", "seal", "cap", "time"))
        if what == "append":
            for _ in range(rng.randint(1, 6)):
                self.append(rng.choice((1, 1, 3, 30)))
        elif what == "delete":
            live = sorted(self.records)
            if live:
                gone = rng.sample(live, rng.randint(1, len(live)))
                world.run(self.store.delete_seqs(TOPIC, sorted(gone)))
                for seq in gone:
                    del self.records[seq]
        elif what == "tag":
            match = TagMatch(rng.choice(("a", "c/")), is_prefix=rng.random() < 0.5)
            world.run(self.store.delete(TOPIC, before_seq=None, match=match))
            self.records = {k: v for k, v in self.records.items() if not match.matches(v.tag)}
        elif what == "seal":
            world.run(node.sealer.seal_topics([TOPIC]))
            if rng.random() < 0.5:
                world.run(node.checkpointer.take())
        elif what == "cap":
            config = TopicConfig(durability=Durability.FSYNC, cap_records=rng.choice((0, 5, 60)))
            world.run(self.store.put_topic(TOPIC, config, keep_type=False))
            self.append(1)
        else:
            world.clock.step(rng.choice((10, 5000)))

    def append(self, count: int) -> None:
        """Append records, and drop from the list what the cap evicts."""
        rng = self.rng
        sent: list[dict[str, Any]] = []
        for _ in range(count):
            self._number += 1
            record: dict[str, Any] = {"data": self._number}
            tag = rng.choice(TAGS_USED[:-1]) if rng.random() < 0.97 else "rare"
            node = rng.choice(NODES_USED)
            record |= {} if tag is None else {"tag": tag}
            record |= {} if node is None else {"node": node}
            sent.append(record)
        body = json.dumps({"records": sent}).encode()
        done = self.world.run(
            self.store.append(TOPIC, body, decode_append(body), header_key=None, config=None)
        )
        topic = self.store.topic(TOPIC)
        for seq, record in zip(range(done.first_seq, done.last_seq + 1), sent, strict=True):
            if seq < topic.log.evict_floor:
                continue
            ts = topic.log.time_of(seq)
            self.records[seq] = Rec(seq, ts, record.get("tag"), record.get("node"), record["data"])
        floor = topic.log.evict_floor
        self.records = {seq: rec for seq, rec in self.records.items() if seq >= floor}

    # -- queries ---------------------------------------------------------------------------

    def filter(self, depth: int = 1) -> Filter:
        """A random filter."""
        rng = self.rng
        kind = rng.choice(("eq", "in", "prefix", "node", "or", "and", "not"))
        if depth == 4 or kind == "eq":
            return TagLeaf((TagMatch(rng.choice(("a", "ab", "rare", "none"))),))
        if kind == "in":
            return TagLeaf(tuple(TagMatch(tag) for tag in rng.sample(("a", "b", "c/1", "x"), 2)))
        if kind == "prefix":
            return TagLeaf((TagMatch(rng.choice(("", "a", "c/", "z")), is_prefix=True),))
        if kind == "node":
            return NodeLeaf(frozenset(rng.sample(("n1", "n2", "n3"), rng.randint(1, 2))))
        if kind == "not":
            return Not(self.filter(depth + 1))
        parts = tuple(self.filter(depth + 1) for _ in range(rng.randint(1, 3)))
        return AnyOf(parts) if kind == "or" else AllOf(parts)

    async def query(self) -> None:
        """One random read, page by page, against the list."""
        rng, self.queries = self.rng, self.queries + 1
        head = self.store.topic(TOPIC).log.head_seq
        wanted = self.filter() if rng.random() < 0.8 else None
        times = [rec.ts for rec in self.records.values()] or [0]
        since = rng.choice(times) + rng.choice((0, 0, 1)) if rng.random() < 0.3 else None
        until = rng.choice(times) + rng.choice((0, 0, 1)) if rng.random() < 0.3 else None
        before = rng.randint(1, head + 2) if rng.random() < 0.3 else SEQ_MAX + 1
        after = rng.randint(0, head) if since is None and rng.random() < 0.4 else 0
        last = None
        if since is None and after == 0 and rng.random() < 0.3:
            last = rng.choice((1, 2, 7))
        limit = rng.choice((1, 2, 5, 1000))
        expected = [
            rec
            for _, rec in sorted(self.records.items())
            if after < rec.seq < before
            and (since is None or rec.ts >= since)
            and (until is None or rec.ts < until)
            and passes(wanted, rec)
        ]
        asked = f"{wanted} since {since} until {until} before {before} after {after} last {last}"
        since_at = None if since is None else Moment(since)
        until_at = None if until is None else Moment(until)
        if rng.random() < 0.5:
            if last is not None:
                expected = expected[-last:]
            start = None if since_at is None and last is None else ReadStart(since_at, last)
            request = ReadRequest(
                after,
                limit,
                1 << 20,
                filter=wanted,
                start=start,
                before_seq=before,
                until=until_at,
            )
            found = await self._forward(request)
        else:
            below = BackwardRequest(before, after, limit, 1 << 20, since=since_at, until=until_at)
            found = await self._backward(below, wanted)
            expected = expected[::-1]
        self.matched += len(expected)
        assert found == expected, f"query {self.queries}: {asked}"

    async def _forward(self, request: ReadRequest) -> list[Rec]:
        found: list[Rec] = []
        pages = 0
        while True:
            page = await read_both_ways(self.store, TOPIC, request, self.world.clock)
            records = _records(page.pieces)
            assert len(records) <= request.limit
            assert page.gap is None or self._is_lost(page)
            found += records
            bound = min(self.store.upto_seq(TOPIC, request), page.head_seq)
            if page.next_from_seq >= bound:
                return found
            assert request.start is not None or page.next_from_seq > request.from_seq
            request = ReadRequest(
                page.next_from_seq,
                request.limit,
                request.max_bytes,
                filter=request.filter,
                before_seq=request.before_seq,
                until=request.until,
            )
            pages += 1
            assert pages < 10_000

    def _is_lost(self, page: Page) -> bool:
        """Whether a gap names no record that is there."""
        gap = page.gap
        assert gap is not None
        return not any(gap.gap_from <= seq <= gap.gap_to for seq in self.records)

    async def _backward(self, request: BackwardRequest, wanted: Filter | None) -> list[Rec]:
        found: list[Rec] = []
        before = request.before_seq
        while True:
            asked = BackwardRequest(
                before,
                request.after_seq,
                request.limit,
                request.max_bytes,
                since=request.since,
                until=request.until,
            )
            page = await self.store.read_backward(TOPIC, asked, wanted)
            records = _records(page.pieces)[::-1]
            assert len(records) <= request.limit
            if page.gap is not None:
                gap = page.gap
                assert not any(gap.gap_from <= seq <= gap.gap_to for seq in self.records)
            found += records
            if page.is_complete:
                return found
            assert page.next_before_seq < before, "no progress"
            before = page.next_before_seq


def _records(pieces: list[Piece]) -> list[Rec]:
    found: list[Rec] = []
    for piece in pieces:
        for text in render_rows(piece.block, list(piece.rows), ALL):
            one = json.loads(text.encode("latin-1"))
            labels = one.get("$tag"), one.get("$node")
            found.append(Rec(one["$seq"], one["$ts"], *labels, one["data"]))
    return found


@pytest.mark.timeout(0)
def test_every_read_equals_a_choice_from_a_plain_list(request: pytest.FixtureRequest) -> None:
    """`--read-seeds 300` makes over 100,000 queries."""
    count = request.config.getoption("--read-seeds")
    runs = [PlainReads(seed) for seed in range(count)]
    for run in runs:
        run.run()
    asked = sum(run.queries for run in runs)
    matched = sum(run.matched for run in runs)
    print(f"\n{asked} queries of {count} logs, {matched} records matched")
    assert asked >= count * QUERIES
    assert matched > asked
