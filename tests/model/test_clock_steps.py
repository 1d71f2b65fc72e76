"""The wall clock is set: expired records stay expired, and leases and delays keep their length."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.design7.bench import Bench
from topics_server.queue.service import QueueService
from topics_server.queue.step_clock import StepClock
from topics_server.values.appends import decode_append
from topics_server.values.model import Durability, TopicType

TTL_MS = 60_000
BACK_MS = 3_600_000


@pytest.fixture
def benches() -> Iterator[Callable[..., Bench]]:
    made: list[Bench] = []

    def make(seed: int = 1, **changes: Any) -> Bench:
        made.append(Bench(seed, **changes))
        return made[-1]

    yield make
    for bench in made:
        bench.world.abandon()


@pytest.fixture
def bench(benches: Callable[..., Bench]) -> Bench:
    bench = benches()
    bench.put(Durability.DISK, ttl_ms=TTL_MS)
    return bench


def _count(bench: Bench) -> int:
    return bench.store.state("t", touch=False).count


def test_an_expired_record_stays_expired_when_the_clock_is_set_back(bench: Bench) -> None:
    """Guard: engine/topic/retention.py, `_expires` keeps `Log.expired_seq`."""
    bench.append(3)
    bench.world.clock.step(TTL_MS + 1)
    assert (_count(bench), bench.seqs()) == (0, [])
    bench.world.clock.step(-BACK_MS)
    assert (_count(bench), bench.seqs()) == (0, [])
    assert bench.look().gaps[0].gap_to == 3


def test_a_record_not_reported_as_expired_expires_by_the_current_clock(bench: Bench) -> None:
    bench.append(3)
    bench.world.clock.step(TTL_MS + 1)
    bench.world.clock.step(-TTL_MS)
    assert bench.seqs() == [1, 2, 3]


@pytest.mark.parametrize("end", ["clean", "kill", "power"])
def test_expired_records_stay_expired_over_a_restart(bench: Bench, end: str) -> None:
    """Guard: node.py, `_close_journal` submits the floors; after a second they are written."""
    bench.append(3)
    bench.world.clock.step(TTL_MS + 1)
    assert bench.seqs() == []
    if end == "clean":
        bench.restart()
    else:
        bench.wait(1.5)
        bench.crash("kill" if end == "kill" else "power")
    bench.world.clock.step(-BACK_MS)
    assert bench.seqs() == []


def test_a_clock_that_ran_ahead_for_a_moment_freezes_nothing(bench: Bench) -> None:
    """Only existing records expire; later ones have their own lifetime."""
    bench.append(2)
    bench.world.clock.step(BACK_MS)
    assert bench.seqs() == []
    bench.world.clock.step(-BACK_MS)
    bench.append(1)
    bench.wait(TTL_MS / 1000 - 5)
    assert bench.seqs() == [3]
    bench.wait(6)
    assert bench.seqs() == []


def test_a_put_that_lifts_the_ttl_brings_nothing_back(bench: Bench) -> None:
    bench.append(2)
    bench.world.clock.step(TTL_MS + 1)
    assert bench.seqs() == []
    bench.world.clock.step(-BACK_MS)
    bench.put(Durability.DISK, ttl_ms=0)
    bench.append(1)
    assert bench.seqs() == [3]


def test_sealed_records_also_stay_expired(benches: Callable[..., Bench]) -> None:
    for seed, sealed in itertools.product((1, 2), (True, False)):
        bench = benches(seed, segment_max_events=4)
        bench.put(Durability.FSYNC, ttl_ms=TTL_MS)
        bench.append(4)
        bench.append(4)
        if sealed:
            bench.tend(force_seal=True)
        bench.wait(30)
        bench.append(2)
        bench.wait(31)
        assert bench.seqs() == [9, 10]
        bench.world.clock.step(-BACK_MS)
        assert bench.seqs() == [9, 10]
        bench.restart()
        assert bench.seqs() == [9, 10]


# -- leases and delays ---------------------------------------------------------------------

LEASE_MS = 30_000


class _Queue:
    """A queue on a bench: claims and releases as one node does."""

    def __init__(self, bench: Bench, *, durable: bool = False) -> None:
        self.bench = bench
        self.clock = self.bench.world.clock
        self.bench.put(
            Durability.FSYNC, type=TopicType.QUEUE, lease_ms=LEASE_MS, leases_durable=durable
        )

    @property
    def service(self) -> QueueService:
        return self.bench.node.queues

    def append(self, **fields: int) -> None:
        body = json.dumps({"records": [{"data": 1, **fields}]}).encode()
        decoded = decode_append(body)
        self.bench.world.run(
            self.bench.store.append("t", body, decoded, header_key=None, config=None)
        )

    async def claiming(self) -> list[int]:
        async def stays() -> None:
            await asyncio.get_running_loop().create_future()

        found = await self.service.claim("t", "w", 10, None, wait_ms=0, gone=stays)
        assert found is not None
        return [job.seq for job in found.jobs]

    def claim(self) -> list[int]:
        return self.bench.world.run(self.claiming())

    def wait(self, ms: int) -> None:
        self.bench.wait(ms / 1000)

    def counts(self) -> tuple[int, int, int]:
        queue = self.bench.store.state("t", touch=False).queue
        assert queue is not None
        return queue.ready, queue.in_flight, queue.delayed


@pytest.mark.parametrize("step_ms", [BACK_MS, -BACK_MS])
@pytest.mark.parametrize("durable", [False, True])
def test_a_lease_lasts_as_long_as_it_was_given_for(
    benches: Callable[..., Bench], step_ms: int, durable: bool
) -> None:
    """Guard: queue/step_clock.py notifies the books; queue/leases/lease_book.py, `shift`."""
    queue = _Queue(benches(), durable=durable)
    queue.append()
    assert queue.claim() == [1]
    queue.wait(10_000)
    queue.clock.step(step_ms)
    assert queue.counts() == (0, 1, 0)
    assert queue.claim() == []
    leases = queue.bench.world.run(queue.service.leases("t", after_seq=0, page_size=10)).leases
    assert [lease.deadline_ms - queue.clock.now_ms() for lease in leases] == [LEASE_MS - 10_000]
    queue.wait(LEASE_MS - 10_000 - 50)
    assert queue.claim() == []
    queue.wait(100)
    assert queue.claim() == [1]


@pytest.mark.parametrize("step_ms", [BACK_MS, -BACK_MS])
def test_a_delay_lasts_as_long_as_it_was_given_for(
    benches: Callable[..., Bench], step_ms: int
) -> None:
    queue = _Queue(benches())
    queue.append(delay_ms=60_000)
    queue.append()
    assert queue.claim() == [2]
    queue.bench.world.run(queue.service.nack("t", "w", [2], None, delay_ms=60_000))
    queue.clock.step(step_ms)
    assert queue.counts() == (0, 0, 2)
    queue.wait(59_000)
    assert queue.claim() == []
    queue.wait(1_001)
    assert queue.claim() == [1, 2]


def test_a_job_that_names_its_time_is_given_at_that_time_by_the_wall_clock(
    benches: Callable[..., Bench],
) -> None:
    """Guard: queue/leases/unclaimed.py, `timed` is not shifted, also after a restart."""
    queue = _Queue(benches())
    queue.append(deliver_at_ms=queue.clock.now_ms() + BACK_MS)
    queue.append(delay_ms=BACK_MS)
    queue.bench.restart()
    queue.clock.step(BACK_MS)
    assert queue.counts() == (1, 0, 1)
    assert queue.claim() == [1]


@pytest.mark.parametrize("step_ms", [BACK_MS, -BACK_MS])
def test_a_lease_that_is_granted_while_the_clock_is_set_lasts_as_long(
    benches: Callable[..., Bench], step_ms: int
) -> None:
    """Guard: queue/leases/lease_table.py, an entry under way is shifted when it is applied."""
    queue = _Queue(benches(), durable=True)
    queue.append()

    async def both() -> list[int]:
        claiming = asyncio.ensure_future(queue.claiming())
        await asyncio.sleep(0)
        assert queue.bench.node.lease_table._staged, "the grant is not under way"
        queue.clock.step(step_ms)
        queue.service.counts(queue.bench.store.topic("t"))
        return await claiming

    assert queue.bench.world.run(both()) == [1]
    queue.wait(LEASE_MS - 1_000)
    assert queue.counts() == (0, 1, 0)
    queue.wait(1_001)
    assert queue.counts() == (1, 0, 0)


def test_a_thread_that_is_held_up_between_two_clocks_is_no_step() -> None:
    """Guard: queue/step_clock.py, `_agreed` reads until two readings agree."""
    # The clock is made at 1_000; the reading at 1_020 is delayed between the two clocks, the two
    # later readings are not.
    steps, readings, clock = _step_clock([0, 0, 0, 500, 0, 0])
    assert clock.now_ms() == 1_020
    clock.now_ms()
    assert (steps, readings) == ([], [])


def test_a_thread_that_is_held_up_while_the_clock_is_made_is_no_step() -> None:
    """The first reading is checked like each later one, so that no later reading looks like a step
    of the clock.
    """
    steps, readings, clock = _step_clock([500, 0, 0, 0])
    assert clock.now_ms() == 1_030
    assert (steps, readings) == ([], [])


def test_a_step_before_the_tables_exist_shifts_nothing() -> None:
    """The wall clock may be set during a start, before `on_step` is set."""

    class Clocks:
        wall = 1_000

        def now_ms(self) -> int:
            return self.wall

        def monotonic_ms(self) -> float:
            return 0.0

    source = Clocks()
    clock = StepClock(source)
    source.wall += 60_000
    assert clock.now_ms() == 61_000
    steps: list[int] = []
    clock.on_step = steps.append
    assert clock.now_ms() == 61_000
    assert not steps


def _step_clock(delays_ms: list[int]) -> tuple[list[int], list[int], StepClock]:
    """A clock whose readings are 10 ms apart; each is delayed between its two clocks."""
    steps: list[int] = []
    walls = iter(range(1_000, 2_000, 10))

    class Clocks:
        last = 0

        def now_ms(self) -> int:
            self.last = next(walls)
            return self.last

        def monotonic_ms(self) -> float:
            return float(self.last + delays_ms.pop(0))

    clock = StepClock(Clocks())
    clock.on_step = steps.append
    return steps, delays_ms, clock
