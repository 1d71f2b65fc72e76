"""Restores to random moments of an archive that was written under load equal the log's prefix."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.model.archive.archived import ARCHIVE, Archived, Faulty, at_time, inject, patient
from tests.storage.fake_disk import FakeDisk
from topics_server.archive.continuous.format import part_name
from topics_server.archive.continuous.history import ArchiveHistory
from topics_server.archive.continuous.moments import Moments, RestorePoint
from topics_server.archive.continuous.places.shared_folder import SharedFolder
from topics_server.archive.continuous.restoring import restore_moment
from topics_server.values.errors import Corrupt
from topics_server.values.model import Durability, TopicConfig, TopicType


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`--archive-seeds`: how many loads are archived and restored."""
    if "archive_seed" in metafunc.fixturenames:
        metafunc.parametrize("archive_seed", range(metafunc.config.getoption("--archive-seeds")))


def test_a_restore_equals_the_logs_prefix(
    archive_seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seed = archive_seed
    changes: dict[str, Any] = {"wal_shards": 1 + seed % 3}
    if seed % 2:
        changes |= {"cold_dir": Path("cold"), "hot_retain_segments": 1}
    made = Archived(seed, **changes)
    rng = random.Random(f"faults {seed}")
    if seed % 3:
        inject(monkeypatch, lambda store: patient(Faulty(store, rng, 0.1)))
    with made.world.life(seed):
        made.start()
        made.world.run(made.put_topics())
        made.world.run(made.load(25))
        if seed % 4 == 3:
            made.world.run(made.settle())
            made.world.crash(made.rng.choice(("kill", "power")))
            made.start()
        made.world.run(made.load(25))
        made.world.run(made.settle())
        found = made.verified()
        assert found.problems == []
        assert found.bases >= 1
        assert found.parts >= 3
        find, named = made.random_find()
        made.world.crash(made.rng.choice(("kill", "power")))
        moment = made.restored("restored", find)
        made.world.start()
        try:
            made.check_moment(moment)
        except AssertionError as error:
            error.add_note(named)
            raise


def test_leases_and_consumers_are_those_of_the_moment() -> None:
    """States at random moments are restored and compared."""
    made = Archived(5, archive_base_interval_ms=4_000)
    states: dict[int, object] = {}
    times: list[int] = []
    with made.world.life(5):
        made.start()
        run = made.world.run
        config = TopicConfig(type=TopicType.QUEUE, durability=Durability.FSYNC, leases_durable=True)
        run(made.store.put_topic("jobs", config, keep_type=False))
        run(made.store.put_topic("a", TopicConfig(durability=Durability.FSYNC), keep_type=False))
        run(made.store.put_consumer("a", "c", 1))

        async def stays() -> None:
            await asyncio.get_running_loop().create_future()

        async def step(number: int) -> None:
            node = made.world.node
            assert node is not None
            kind = number % 4
            if kind == 0:
                await made.append("jobs", 3)
            elif kind == 1:
                await node.queues.claim("jobs", "w", 2, 600_000, wait_ms=0, gone=stays)
            elif kind == 2:
                await made.append("a", 2)
            else:
                head = made.store.state("a", touch=False).head_seq
                await made.store.commit_consumer("a", "c", head - 1)
            states[node.commits.next_lsn - 1] = shown(made)
            times.append(made.world.clock.now_ms())
            await asyncio.sleep(made.rng.choice((0, 0.4, 1.1)))

        for number in range(24):
            run(step(number))
        run(made.settle())
        made.world.crash("power")
        for index, ts_ms in enumerate(made.rng.sample(times[6:], 5)):
            moment = made.restored(f"restored-{index}", at_time(ts_ms))
            made.world.start()
            lsn = max(each for each in states if each <= moment.lsn)
            assert shown(made) == states[lsn], f"lsn {moment.lsn}, time {ts_ms}"
            made.world.crash("kill")


@pytest.mark.parametrize("seed", range(4))
def test_topics_that_are_not_wanted_are_dropped(seed: int) -> None:
    """They are dropped together with their segments, a router's copies, and their entries in the
    journal.
    """
    made = Archived(seed)
    with made.world.life(seed):
        made.start()
        made.world.run(made.put_topics())
        made.world.run(made.load(40))
        made.world.run(made.settle())
        expected = {name: each for name, each in made.records().items() if name in "aq"}
        made.world.crash("power")
        made.restored("restored", is_wanted=lambda name: name in "aq")
        node = made.world.start()
        assert made.records() == expected
        assert {topic.name for topic in node.registry} == set(expected)
        # A name that is created again is another incarnation.
        made.world.run(node.store.put_topic("b", TopicConfig(), keep_type=False))
        assert node.store.state("b", touch=False).epoch > 1
        made.world.stop()
        made.world.start()
        assert made.records() == {**expected, "b": {}}


def shown(made: Archived) -> object:
    queue = made.store.state("jobs", touch=False).queue
    assert queue is not None
    consumer = made.store.consumer("a", "c")
    return queue.in_flight, queue.ready, consumer.seq


class Counted(SharedFolder):
    """A folder that counts how often each object is read."""

    reads: Counter[str]

    def read(self, name: str) -> Iterator[bytes]:
        self.reads[name] += 1
        return super().read(name)


def test_a_part_is_read_for_its_facts_and_for_its_entries() -> None:
    """No part is read more often, because from a bucket each read is a download."""
    made = Archived(7, archive_base_interval_ms=10**9)
    with made.world.life(7):
        made.start()
        made.world.run(made.put_topics())
        for _ in range(18):
            made.world.run(made.load(2))
            made.world.run(made.settle())
        made.world.crash("kill")
        disk = made.world.disk
        store = Counted.open(disk, ARCHIVE)
        points: list[RestorePoint] = []

        def find(moments: Moments) -> RestorePoint:
            points.append(moments.newest())
            return points[0]

        store.reads = Counter()
        restore_moment(disk, store, "restored", find)
        needed = points[0].needed
        reads = [store.reads[part_name(part.number)] for part in needed]
        assert len(needed) >= 16
        # A binary search finds the first part; the newest part gives the cut, its base, and the
        # known seqs.
        more = len(needed).bit_length() + 4
        assert 2 * len(needed) <= sum(reads) <= 2 * len(needed) + more, reads
        history = ArchiveHistory(store)
        newest = needed[-1]
        for other in (newest._replace(body_xxh3="0" * 16), newest._replace(first_lsn=1)):
            with pytest.raises(Corrupt, match="is another part than before"):
                history.entries_of(other)
        store.delete(part_name(needed[3].number))
        with pytest.raises(Corrupt, match="is missing"):
            restore_moment(FakeDisk.of(disk.image()), store, "again", lambda moments: points[0])
