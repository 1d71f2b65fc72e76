"""The scrub: what it reads, how fast, what it finds, and when it waits."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from tests.unit.engine.drive import seqs_of
from tests.unit.engine.rig import HandClock, Rig
from topics_server.engine.background import scrub
from topics_server.engine.background.scrub import Scrubber, ScrubRules
from topics_server.engine.topic.topic import Topic
from topics_server.values.model import LossReason

pytestmark = pytest.mark.anyio

FAST = ScrubRules(1 << 40, 1)


class Sleeps:
    """Replaces the module's sleep: the clock moves at once. `slept`: the requested seconds, in
    order.
    """

    def __init__(self) -> None:
        self.slept: list[float] = []
        self.clock = HandClock()

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.clock.move(int(seconds * 1000) + 1)
        await asyncio.sleep(0)


@pytest.fixture
def sleeps(monkeypatch: pytest.MonkeyPatch) -> Sleeps:
    made = Sleeps()
    monkeypatch.setattr(scrub, "asyncio", SimpleNamespace(sleep=made.sleep))
    return made


async def sealed(rig: Rig, name: str, count: int) -> Topic:
    """A topic of `count` sealed records."""
    await rig.append(name, *range(count))
    topic = rig.registry.find(name)
    assert topic is not None
    await rig.sealer.tend(topic, force_seal=True)
    return topic


def scrubber_of(rig: Rig, sleeps: Sleeps, rules: ScrubRules = FAST) -> Scrubber:
    return Scrubber(rig.registry, rig.fetcher, sleeps.clock, rules, lambda: False)


async def passes(scrubber: Scrubber, count: int) -> None:
    """Run until this many passes have ended."""
    task = asyncio.get_running_loop().create_task(scrubber.run())
    while scrubber.metrics().passes < count:
        assert not task.done()
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_pass_reads_every_segment_once(sleeps: Sleeps) -> None:
    rig = Rig()
    await sealed(rig, "t", 8)
    await sealed(rig, "t", 8)
    await sealed(rig, "u", 5)
    await rig.append("u", 6)  # unsealed: not read
    scrubber = scrubber_of(rig, sleeps)
    await passes(scrubber, 1)
    assert rig.segments.reads == 3
    found = scrubber.metrics()
    assert (found.damaged_records, found.failures) == (0, 0)
    assert found.bytes >= 21 * 64
    assert found.last_pass_ts_ms > 0


async def test_damage_counts_as_if_a_reader_had_found_it(sleeps: Sleeps) -> None:
    rig = Rig()
    topic = await sealed(rig, "t", 8)
    moved: list[int] = []
    rig.fetcher.on_moved.append(moved.append)
    rig.segments.damaged[1, 1] = (2, 3)
    scrubber = scrubber_of(rig, sleeps)
    await passes(scrubber, 2)
    assert scrubber.metrics().damaged_records == 2
    assert (topic.log.damaged_records, rig.store.damaged_records) == (2, 2)
    assert moved == [topic.topic_id]
    page = await rig.read("t", 2)
    assert page.gap is not None
    assert (page.gap.gap_from, page.gap.gap_to, page.gap.reason) == (3, 4, LossReason.DAMAGED)
    assert seqs_of(page) == [5, 6, 7, 8]


async def test_damage_of_a_deleted_record_is_nothing(sleeps: Sleeps) -> None:
    rig = Rig()
    topic = await sealed(rig, "t", 8)
    await rig.store.delete_seqs("t", [3])
    rig.segments.damaged[1, 1] = (2, 2)
    scrubber = scrubber_of(rig, sleeps)
    await passes(scrubber, 1)
    assert scrubber.metrics().damaged_records == 0
    assert topic.log.damaged_records == 0


async def test_a_damaged_index_is_counted_and_the_next_segment_is_read(sleeps: Sleeps) -> None:
    rig = Rig()
    await sealed(rig, "t", 8)
    await sealed(rig, "t", 8)
    rig.segments.damaged_indexes.add((1, 1))
    scrubber = scrubber_of(rig, sleeps)
    await passes(scrubber, 1)
    assert scrubber.metrics().failures == 1
    assert rig.segments.reads == 2


async def test_a_length_that_a_damaged_index_claims_does_not_hold_the_pass_up(
    sleeps: Sleeps, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig()
    topic = await sealed(rig, "t", 8)
    (run,) = topic.log.sealed()
    monkeypatch.setattr(type(run.index), "record_bytes", lambda _index, _row: 1 << 40)
    scrubber = scrubber_of(rig, sleeps, ScrubRules(1 << 50, 1_000))
    await passes(scrubber, 1)
    assert rig.segments.reads == 8
    assert sum(sleeps.slept) < 8 * 2 * 60


async def test_a_segment_that_cannot_be_read_is_counted(sleeps: Sleeps) -> None:
    rig = Rig()
    await sealed(rig, "t", 8)
    del rig.segments.kept[1][1]
    await sealed(rig, "u", 8)
    scrubber = scrubber_of(rig, sleeps)
    await passes(scrubber, 1)
    assert scrubber.metrics().failures == 1
    assert rig.segments.reads == 1


@pytest.mark.parametrize(
    ("rules", "least_ms", "most_ms"),
    [
        (ScrubRules(1 << 40, 1_000_000), 1_000_000, 100_000_000),
        # There are 8 records of more than 64 bytes, so the bound on bytes a second decides.
        (ScrubRules(1, 1), 8 * 64 * 1000, 8 * 100 * 1000),
    ],
)
async def test_a_pass_takes_its_time_and_keeps_its_rate(
    sleeps: Sleeps, rules: ScrubRules, least_ms: int, most_ms: int
) -> None:
    rig = Rig()
    await sealed(rig, "t", 8)
    scrubber = scrubber_of(rig, sleeps, rules)
    await passes(scrubber, 1)
    assert least_ms <= sleeps.clock.steady_ms <= most_ms
    assert max(sleeps.slept) <= 60.0


async def test_it_waits_while_the_sealer_works(sleeps: Sleeps) -> None:
    rig = Rig()
    await sealed(rig, "t", 8)
    asked: list[int] = []

    def is_busy() -> bool:
        asked.append(rig.segments.reads)
        return len(asked) < 4

    scrubber = Scrubber(rig.registry, rig.fetcher, sleeps.clock, FAST, is_busy)
    await passes(scrubber, 1)
    assert asked[:4] == [0, 0, 0, 0]
    assert rig.segments.reads == 1


async def test_the_sealer_tells_whether_it_works() -> None:
    rig = Rig()
    assert not rig.sealer.is_working
    await rig.append("t", *range(8))
    assert rig.sealer.is_working


async def test_zero_is_off(sleeps: Sleeps) -> None:
    rig = Rig()
    await sealed(rig, "t", 8)
    scrubber = scrubber_of(rig, sleeps, ScrubRules(0, 1))
    await scrubber.run()
    assert rig.segments.reads == 0


class _Reads:
    """Satisfies `SealedReads`; `asked` has the topics in order."""

    def __init__(self, rig: Rig, dropped: str = "") -> None:
        self.asked: list[str] = []
        self._rig = rig
        self._dropped = dropped

    async def check(self, topic: Topic, segment_id: int, first_row: int, end_row: int) -> int:
        self.asked.append(topic.name)
        if self._dropped:
            name, self._dropped = self._dropped, ""
            await self._rig.store.drop_topic(name, if_empty=False)
        return 0

    async def check_index(self, topic: Topic, segment_id: int) -> bool:
        return False

    def note_broken(self, topic_id: int, segment_id: int) -> None:
        raise AssertionError

    def disk_bytes(self, topic_id: int) -> int:
        return 1


async def test_the_first_pass_begins_at_a_topic_that_the_time_chooses(sleeps: Sleeps) -> None:
    rig = Rig()
    for name in "abc":
        await sealed(rig, name, 8)
    orders = set()
    for now_ms in range(3):
        sleeps.clock = HandClock(now_ms)
        reads = _Reads(rig)
        await passes(Scrubber(rig.registry, reads, sleeps.clock, FAST, lambda: False), 2)
        assert reads.asked[3:6] == ["a", "b", "c"]
        orders.add("".join(reads.asked[:3]))
    assert orders == {"abc", "bca", "cab"}


async def test_a_topic_that_is_dropped_meanwhile_is_left_out(sleeps: Sleeps) -> None:
    rig = Rig()
    await sealed(rig, "a", 8)
    await sealed(rig, "b", 8)
    sleeps.clock.wall_ms = 0
    reads = _Reads(rig, dropped="b")
    await passes(Scrubber(rig.registry, reads, sleeps.clock, FAST, lambda: False), 1)
    assert reads.asked == ["a"]


async def test_many_topics_are_examined_in_slices(
    sleeps: Sleeps, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scrub, "_SLICE", 2)
    rig = Rig()
    for number in range(6):
        await rig.append(f"t{number}", 1)  # unsealed: nothing to read
    await sealed(rig, "last", 8)
    scrubber = scrubber_of(rig, sleeps)
    await passes(scrubber, 1)
    # Four slices of seven topics: once to compute the size, once for the pass.
    assert sleeps.slept.count(0) >= 8
