"""A topic against a plain dict: random appends, deletes, floors, seals, restarts, page by page."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.unit.engine.drive import Driver, Record, records_of
from topics_server.engine.background.capture import capture, restore
from topics_server.engine.topic.writes.configure import decide_put
from topics_server.engine.topic.writes.delete import decide_expiry
from topics_server.values.appends import decode_append
from topics_server.values.blocks import record_bytes
from topics_server.values.entries import Entry, Floor, RecordsAppended
from topics_server.values.errors import Code, TopicsError
from topics_server.values.limits import PAGE_SCAN_SLOTS_MAX
from topics_server.values.model import Discard, LossReason, TagMatch, TopicConfig
from topics_server.values.storage_types import TOPIC_PARTS

TAGS = st.sampled_from([None, "a", "a:1", "a:2", "b"])
NODES = st.sampled_from([None, "n1", "n2"])
MATCHES = st.builds(TagMatch, st.sampled_from(["", "a", "a:", "a:1", "b", "zz"]), st.booleans())
CONFIGS = st.builds(
    TopicConfig,
    ttl_ms=st.sampled_from([0, 0, 20, 60]),
    cap_records=st.sampled_from([0, 0, 3, 40, 300]),
    cap_bytes=st.sampled_from([0, 0, 90, 4_000]),
    discard=st.sampled_from([Discard.OLD, Discard.OLD, Discard.REJECT]),
)


class Naive:
    """A topic as a dict of live records, and a dict of the reasons of lost seqs."""

    def __init__(self) -> None:
        self.head = 0
        self.floor = 1
        self.records: dict[int, Record] = {}
        self.times: dict[int, int] = {}
        self.lost: dict[int, LossReason] = {}
        self.last_ts = 0
        # The first seq that was never found expired: a clock that is set back revives no record.
        self.unexpired = 0

    def live_at(self, config: TopicConfig, now_ms: int) -> list[int]:
        live = sorted(self.records)
        cutoff = now_ms - config.ttl_ms if config.ttl_ms else 0
        if live and self.times[live[0]] < cutoff:
            young = (seq for seq, ts in self.times.items() if ts >= cutoff)
            self.unexpired = max(self.unexpired, next(young, self.head + 1))
        return [seq for seq in live if seq >= self.unexpired]

    def size(self, seqs: list[int]) -> int:
        return sum(record_bytes(*self.records[seq]) for seq in seqs)

    def apply(self, entry: Entry) -> None:
        if isinstance(entry, RecordsAppended):
            decoded = decode_append(entry.body)
            for offset in range(entry.count):
                self.head += 1
                assert self.head == entry.first_seq + offset
                self.records[self.head] = (
                    bytes(decoded.datas[offset]),
                    decoded.metas[offset],
                    decoded.tags[offset],
                    decoded.nodes[offset],
                )
                self.times[self.head] = entry.ts
            self.last_ts = entry.ts
        floor = getattr(entry, "floor", None)
        if isinstance(floor, Floor):
            for seq in range(self.floor, floor.seq):
                self.lost[seq] = floor.reason
                self.records.pop(seq, None)
            self.floor = max(self.floor, floor.seq)

    def delete(self, seqs: list[int]) -> None:
        for seq in seqs:
            del self.records[seq]


class TopicMachine(RuleBasedStateMachine):
    """Every rule changes the topic and the dict alike; every page is compared."""

    def __init__(self) -> None:
        super().__init__()
        self.driver = Driver()
        self.naive = Naive()

    @initialize(config=CONFIGS)
    def configure(self, config: TopicConfig) -> None:
        self.driver.topic.config = config

    # -- commands --------------------------------------------------------------------------

    @rule(
        count=st.integers(1, 9),
        times=st.integers(1, 60),
        tag=TAGS,
        node=NODES,
        size=st.integers(0, 30),
    )
    def append(self, count: int, times: int, tag: str | None, node: str | None, size: int) -> None:
        meta = {"m": size} if size % 2 else None
        for _ in range(times):
            self.append_once(self.driver.body(*["x" * size] * count, tag=tag, node=node, meta=meta))

    @rule(count=st.integers(200, 700), tag=TAGS)
    def append_many(self, count: int, tag: str | None) -> None:
        self.append_once(self.driver.body(*range(count), tag=tag))

    def append_once(self, body: bytes) -> None:
        config, naive, now_ms = self.driver.topic.config, self.naive, self.driver.now_ms
        capped = bool(config.cap_records or config.cap_bytes)
        decoded = decode_append(body)
        live = naive.live_at(config, now_ms) if capped else sorted(naive.records)
        new = [
            record_bytes(*r)
            for r in zip(decoded.datas, decoded.metas, decoded.tags, decoded.nodes, strict=True)
        ]
        sizes = [(seq, record_bytes(*naive.records[seq])) for seq in live]
        sizes += [(naive.head + 1 + n, size) for n, size in enumerate(new)]
        over = _over(config, sizes)
        if config.discard is Discard.REJECT and over:
            with pytest.raises(TopicsError) as refusal:
                self.driver.decide(body)
            assert refusal.value.code is Code.TOPIC_FULL
            return
        while _over(config, sizes) and len(sizes) > 1:
            sizes.pop(0)
        before = set(naive.records)
        entry = self.driver.append_body(body)
        assert isinstance(entry, RecordsAppended)
        assert entry.ts == max(now_ms, naive.last_ts)
        naive.apply(entry)
        expected = [seq for seq, _ in sizes]
        if entry.floor is not None:
            lost = entry.floor.seq - 1
            assert lost not in expected
            assert lost in before or lost >= entry.first_seq, "what was deleted is nobody's loss"
        assert sorted(naive.records) == expected, "exactly the oldest are evicted"

    @rule(share=st.floats(0, 1.1))
    def delete_before(self, share: float) -> None:
        before = int(self.naive.head * share) + 1
        config, now_ms = self.driver.topic.config, self.driver.now_ms
        hit = [seq for seq in self.naive.live_at(config, now_ms) if seq < before]
        assert self.driver.delete(before) == len(hit)
        self.naive.delete(hit)

    @rule(match=MATCHES, share=st.none() | st.floats(0, 1.1))
    def delete_match(self, match: TagMatch, share: float | None) -> None:
        before = None if share is None else int(self.naive.head * share) + 1
        config, now_ms = self.driver.topic.config, self.driver.now_ms
        hit = [
            seq
            for seq in self.naive.live_at(config, now_ms)
            if match.matches(self.naive.records[seq][2]) and (before is None or seq < before)
        ]
        assert self.driver.delete(before, match) == len(hit)
        self.naive.delete(hit)

    @rule(config=CONFIGS)
    def put(self, config: TopicConfig) -> None:
        old = self.driver.topic.config
        gone_ttl = set(self.naive.records) - set(self.naive.live_at(old, self.driver.now_ms))
        entry = decide_put(self.driver.topic, config, self.driver.now_ms)
        if entry is None:
            assert config == old
            return
        self.driver.commit(entry)
        self.naive.apply(entry)
        assert not gone_ttl & set(self.naive.records), "what had expired stays lost"

    @rule()
    def expire(self) -> None:
        topic, now_ms = self.driver.topic, self.driver.now_ms
        entry = decide_expiry(topic, now_ms)
        if entry is not None:
            assert entry.floor.seq - 1 in self.naive.records
            self.driver.commit(entry)
            self.naive.apply(entry)
        assert sorted(self.naive.records) == self.naive.live_at(topic.config, now_ms)
        assert decide_expiry(topic, now_ms) is None

    @rule(ms=st.integers(-5, 40))
    def wait(self, ms: int) -> None:
        self.driver.now_ms += ms

    # -- changes that no reader may notice -------------------------------------------------

    @rule(max_records=st.sampled_from([1, 7, 100, 256, 300, 65_536]))
    def seal(self, max_records: int) -> None:
        self.driver.seal(max_records)

    @rule(max_records=st.sampled_from([7, 256, 65_536]), match=MATCHES, share=st.floats(0, 1))
    def delete_while_sealing(self, max_records: int, match: TagMatch, share: float) -> None:
        plan = self.driver.plan_seal(max_records)
        self.delete_match(match, None)
        self.delete_before(share)
        self.append(3, 1, "a", None, 3)
        if plan is not None:
            self.driver.finish_seal(plan)

    @rule()
    def flip_and_drop(self) -> None:
        self.driver.flip()
        self.driver.drop_segments()

    @rule(seal_after=st.booleans())
    def restart(self, seal_after: bool) -> None:
        part = capture(self.driver.topic)
        if seal_after:
            self.driver.seal()
        sealed = sorted(self.driver.indexes.values(), key=lambda index: index.first_seq)
        self.driver.topic = restore(TOPIC_PARTS.decode(part), sealed)
        # Only the running server remembers what it found expired.
        self.naive.unexpired = 0
        assert capture(self.driver.topic) == part or seal_after or sealed

    # -- reading ---------------------------------------------------------------------------

    @rule(
        share=st.floats(0, 1),
        limit=st.sampled_from([1, 3, 250, 1000]),
        max_bytes=st.sampled_from([1, 100, 2_000, 1 << 20]),
        nodes=st.sampled_from([frozenset[str](), frozenset({"n1"}), frozenset({"n1", "n2"})]),
    )
    def read_on(self, share: float, limit: int, max_bytes: int, nodes: frozenset[str]) -> None:
        naive, now_ms = self.naive, self.driver.now_ms
        cursor = int(naive.head * share)
        live = naive.live_at(self.driver.topic.config, now_ms)
        earliest = live[0] if live else naive.head + 1
        lost = [seq for seq in naive.records if seq < earliest]
        floor = max([naive.floor, *(seq + 1 for seq in lost)])
        expected = [seq for seq in live if seq > cursor and naive.records[seq][3] not in nodes]
        first = True
        for _ in range(100_000):
            page = self.driver.read(cursor, limit, max_bytes, nodes)
            found = records_of(page)
            assert (page.head_seq, page.earliest_seq) == (naive.head, earliest)
            assert page.scanned <= PAGE_SCAN_SLOTS_MAX
            if first and cursor + 1 < floor:
                assert page.gap is not None
                assert (page.gap.gap_from, page.gap.gap_to) == (cursor + 1, earliest - 1)
                reasons = {naive.lost.get(seq, LossReason.TTL) for seq in range(cursor + 1, floor)}
                reason = reasons.pop() if len(reasons) == 1 else LossReason.MIXED
                assert page.gap.reason is reason
            else:
                assert page.gap is None
            assert found == [(seq, naive.records[seq]) for seq in expected[: len(found)]]
            assert len(found) <= limit
            weight = sum(record_bytes(*record) for _, record in found)
            assert weight <= max_bytes or len(found) == 1
            del expected[: len(found)]
            assert page.caught_up or page.next_from_seq > cursor
            assert all(seq > page.next_from_seq for seq in expected)
            cursor, first = page.next_from_seq, False
            if page.caught_up:
                break
            assert found or page.gap, "without a filter or dead slots to cross, a page moves"
        assert not expected

    @invariant()
    def counters_agree(self) -> None:
        log = self.driver.topic.log
        assert log.head_seq == self.naive.head
        assert log.evict_floor == self.naive.floor
        assert log.live_count == len(self.naive.records)
        assert log.live_bytes == self.naive.size(list(self.naive.records))
        assert log.earliest_seq == min(self.naive.records, default=self.naive.head + 1)
        assert log.live_count == sum(run.live_count for run in log.runs)
        assert log.live_bytes == sum(run.live_bytes for run in log.runs)
        assert all(run.live_count == run.dead.count(0) for run in log.runs)
        tail = log.runs[log.sealed_count :]
        assert log.tail_count == sum(run.count for run in tail)
        assert log.tail_bytes == sum(run.live_bytes for run in tail)
        ends = [(run.first_seq, run.last_seq) for run in log.runs]
        assert all(a[1] < b[0] for a, b in pairwise(ends))


def _over(config: TopicConfig, sizes: list[tuple[int, int]]) -> bool:
    too_many = config.cap_records and len(sizes) > config.cap_records
    return bool(
        too_many or (config.cap_bytes and sum(size for _, size in sizes) > config.cap_bytes)
    )


TestTopicAgainstADict = TopicMachine.TestCase
TestTopicAgainstADict.settings = settings(
    max_examples=60,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
