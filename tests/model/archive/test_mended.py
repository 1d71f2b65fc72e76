"""Damaged segments of a running node are mended from its archive, whatever fails or dies meanwhile.

No record is lost, no deleted record comes back, and no damaged file is gone.
"""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

from tests.model.archive.archived import ARCHIVE, Archived, Faulty, inject, patient
from tests.storage.fake_disk import Mode, SimulatedCrash
from topics_server.engine.background.mender import Mender
from topics_server.runtime.metrics import MendingMetrics
from topics_server.values.errors import StorageError
from topics_server.values.file_inventory import KnownFlags
from topics_server.values.model import TagMatch
from topics_server.wal.format.segment import DATA_HEADER_BYTES, HASH_BYTES, decode_index
from topics_server.wal.segments.mending import PreparedMend
from topics_server.wal.tools.dump import verify

DAMAGES = ("flags", "record", "records", "cut", "lost", "index", "lost index", "both")
# A start refuses a segment of which a file is missing, and may not notice a single changed flag.
STARTABLE = ("record", "records", "cut", "index", "both")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`--mend-seeds`: how many loads are damaged and mended."""
    if "mend_seed" in metafunc.fixturenames:
        metafunc.parametrize("mend_seed", range(metafunc.config.getoption("--mend-seeds")))


class Mended(Archived):
    """A node that scrubs all the time; all its records are sealed and archived."""

    def __init__(self, seed: int, **changes: object) -> None:
        settings: dict[str, object] = {
            "segment_max_events": 6,
            "scrub_mib_per_second": 64,
            "scrub_pass_ms": 1_000,
            "archive_base_interval_ms": 2_000,
        }
        super().__init__(seed, **{**settings, **changes})

    def prepare(self, steps: int = 25) -> None:
        """Records in segments of which the archive has copies."""
        self.start()
        run = self.world.run
        run(self.put_topics())
        run(self.load(steps))
        run(self.seal())
        run(self.based())

    @property
    def mender(self) -> Mender[PreparedMend]:
        assert self.world.node is not None
        assert self.world.node.mender is not None
        return self.world.node.mender

    @property
    def mending(self) -> MendingMetrics:
        return self.mender.metrics()

    async def seal(self) -> None:
        """Seal all records into segments."""
        assert self.world.node is not None
        node = self.world.node
        await node.sealer.seal_topics([topic.name for topic in node.registry])

    async def based(self) -> None:
        """Wait until the archive has a base with all present segments."""
        before = self.archiver.metrics().bases
        for _ in range(2):
            await self.append("a", 1)
            await self.settle(before + 1)
            before += 1

    async def healed(self) -> None:
        """Return once the scrub has read every segment and no mend waits."""
        assert self.world.node is not None
        scrubber = self.world.node.scrubber
        passes = scrubber.metrics().passes
        for _ in range(2_000):
            await asyncio.sleep(0.5)
            found = scrubber.metrics()
            if found.passes >= passes + 2 and not self.mending.waiting:
                return
        raise AssertionError(f"it stays damaged: {self.mending}, {found}")

    async def claimed(self) -> list[int]:
        """Lease the jobs of the queue that can be claimed."""
        assert self.world.node is not None
        queues = self.world.node.queues
        found = await queues.claim("q", "w", 10, 1_000, wait_ms=0, gone=_stays)
        assert found is not None
        return [job.seq for job in found.jobs]

    def sealed_files(self) -> list[str]:
        """The `.data` files, hot and cold."""
        return sorted(
            path
            for path in self.world.disk._files
            if path.endswith(".data") and path.startswith(("data/segments/", "cold/"))
        )

    def damage(self, path: str, kind: str, rng: random.Random) -> None:
        """Damage a segment as a disk does."""
        disk = self.world.disk
        index = path.removesuffix(".data") + ".idx"
        size = disk.file_size(path)
        if kind in ("record", "records", "both"):
            columns = decode_index(disk.content(index), verify=False)
            for _ in range(1 if kind == "record" else 5):
                row = rng.randrange(columns.record_count)
                # The damage is not in the record's own checksum, because no reader needs that.
                end = columns.record_end(row) - HASH_BYTES
                disk.corrupt(path, rng.randrange(int(columns.rows["offset"][row]), end))
        if kind == "flags":
            disk.corrupt(path, size - 1, 0xFF)
        if kind == "cut":
            disk.put(path, disk.content(path)[: rng.randrange(size)])
        if kind in ("index", "both"):
            disk.corrupt(index, rng.randrange(disk.file_size(index)))
        if kind == "lost":
            disk.lose(path)
        if kind == "lost index":
            disk.lose(index)

    def check(self, expected: dict[str, dict[int, bytes]]) -> None:  # type: ignore[override]
        """Check that all records exist, that no topic reports damage, and that the counts match."""
        node = self.world.node
        assert node is not None
        assert self.records() == expected
        for topic in node.registry:
            log = topic.log
            assert not [run for run in log.sealed() if run.has_damage], topic.name
            assert log.live_count == len(expected[topic.name])
            assert log.live_count == sum(run.live_count for run in log.runs)
            assert log.live_bytes == sum(run.live_bytes for run in log.runs)
        totals = [topic.log.live_count for topic in node.registry]
        assert node.registry.records_live == sum(totals)
        damaged = sum(topic.log.damaged_records for topic in node.registry)
        assert node.registry.damaged_records == damaged == 0


def test_damage_is_mended_while_clients_read_and_delete(mend_seed: int) -> None:
    seed = mend_seed
    changes: dict[str, object] = {"wal_shards": 1 + seed % 2}
    if seed % 3 == 2:
        changes |= {"cold_dir": Path("cold"), "hot_retain_segments": 1}
    made = Mended(seed, **changes)
    rng = random.Random(f"damage {seed}")
    with made.world.life(seed):
        made.prepare()
        run = made.world.run
        expected = made.records()
        damaged: list[bytes] = []
        for path in rng.sample(made.sealed_files(), min(3, len(made.sealed_files()))):
            kind = rng.choice(DAMAGES)
            made.damage(path, kind, rng)
            if "lost" not in kind:
                name = path.replace(".data", ".idx") if kind == "index" else path
                damaged.append(made.world.disk.content(name))

        async def delete(tag: int) -> None:
            for name in ("a", "b", "q"):
                hit = sorted(seq for seq, data in expected[name].items() if int(data) % 5 == tag)
                if hit:
                    await made.store.delete_seqs(name, hit)

        if seed % 2:
            # The records are deleted before the damage is known, or after it.
            run(delete(1))
            expected = _without(expected, 1)
        run(made.healed())
        assert made.mending.segments >= 1
        made.check(expected)
        if seed % 4 == 1:
            run(delete(2))
            expected = _without(expected, 2)
            made.check(expected)
        if not seed % 2:
            kept = [
                made.world.disk.content(path)
                for path in made.world.disk._files
                if path.startswith("data/quarantine/")
            ]
            assert all(content in kept for content in damaged)
        assert made.world.node is not None
        run(made.world.node.journal.sync_all())
        mode: Mode = rng.choice(("kill", "power"))
        made.world.crash(mode)
        problems = verify(made.world.disk, "data", _cold(made)).problems
        assert problems == []
        made.start()
        made.check(expected)
        run(made.healed())
        assert made.mending.segments == 0, "nothing was left to mend"


def _cold(made: Mended) -> str | None:
    cold = made.world.changes.get("cold_dir")
    return None if cold is None else str(cold)


def _without(records: dict[str, dict[int, bytes]], tag: int) -> dict[str, dict[int, bytes]]:
    """Delete the records of a tag; the router's copies stay."""
    return {
        name: {
            seq: data
            for seq, data in each.items()
            if name == "copies" or name == "x" or int(data) % 5 != tag
        }
        for name, each in records.items()
    }


@pytest.mark.parametrize("seed", range(12))
def test_a_mend_that_dies_at_any_call_loses_nothing(seed: int) -> None:
    made = Mended(seed)
    rng = random.Random(f"death {seed}")
    with made.world.life(seed):
        made.prepare(15)
        expected = made.records()
        for _ in range(4):
            path = rng.choice(made.sealed_files())
            made.damage(path, rng.choice(STARTABLE), rng)
            folder = rng.choice(("data/segments/*", "data/quarantine*", "data/segments/*"))
            disk = made.world.disk
            disk.fail("any", "crash", path=folder, nth=rng.randrange(1, 9))
            try:
                made.world.run(made.healed())
            except SimulatedCrash:
                mode: Mode = rng.choice(("kill", "power"))
                made.world.crash(mode)
                made.world.disk.heal()
                made.start()
            made.world.disk.heal()
            made.world.run(made.healed())
            made.check(expected)


@pytest.mark.parametrize("seed", range(4))
def test_an_archive_that_fails_is_tried_again(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Mended(seed)
    stores: list[Faulty] = []

    def opened(store: object) -> object:
        stores.append(Faulty(store, random.Random(seed), 0.1))  # type: ignore[arg-type]
        return patient(stores[-1])

    inject(monkeypatch, opened)  # type: ignore[arg-type]
    with made.world.life(seed):
        made.prepare()
        expected = made.records()
        for store in stores:
            store.share = 1.0
        path = made.sealed_files()[0]
        made.damage(path, "records", random.Random(seed))
        before = made.world.disk.content(path)

        async def failed() -> None:
            for _ in range(1_000):
                await asyncio.sleep(0.5)
                if made.mending.failures >= 2:
                    return
            raise AssertionError(made.mending)

        made.world.run(failed())
        assert made.mender.failed == 1
        assert made.world.disk.content(path) == before, "a failed mend changes nothing"
        assert made.world.node is not None
        assert made.world.node.state.reasons() == ["1 damaged segments are not mended: see the log"]
        for store in stores:
            store.share = 0.1
        made.world.run(made.healed())
        assert made.world.node.state.reasons() == []
        made.check(expected)


def test_a_copy_that_is_damaged_as_well_is_not_taken() -> None:
    made = Mended(1)
    with made.world.life(1):
        made.prepare()
        path = made.sealed_files()[0]
        disk = made.world.disk
        segment_id, topic_id = int(path.split("/")[-1].split(".")[0]), path.split("/")[-2]
        (copy,) = [
            each
            for each in disk._files
            if each.startswith(f"{ARCHIVE}/segments/{topic_id}/{segment_id:010d}-")
            and each.endswith(".data")
        ]
        disk.corrupt(copy, DATA_HEADER_BYTES + 30)
        made.damage(path, "record", random.Random(1))
        before = disk.content(path)

        async def failed() -> None:
            for _ in range(1_000):
                await asyncio.sleep(0.5)
                if made.mending.failures:
                    return
            raise AssertionError(made.mending)

        made.world.run(failed())
        assert disk.content(path) == before
        assert not [each for each in disk._files if each.endswith(".tmp")]
        assert made.mending.segments == 0


def test_flags_that_are_lost_come_from_a_base_and_no_deleted_record_comes_back() -> None:
    made = Mended(3)
    with made.world.life(3):
        made.prepare()
        run = made.world.run
        run(made.store.delete("a", before_seq=None, match=TagMatch("t3")))
        run(made.seal())
        run(made.based())
        expected = made.records()
        made.world.stop()
        cut = 0
        for path in made.sealed_files():
            content = made.world.disk.content(path)
            made.world.disk.put(path, content[:-3])
            cut += 1
        assert cut
        made.start()
        node = made.world.node
        assert node is not None
        run(made.healed())
        assert made.mending.segments == cut
        made.check(expected)
        made.world.crash("power")
        made.start()
        made.check(expected)


def test_without_an_archive_damage_stays_as_it_is() -> None:
    made = Mended(2)
    with made.world.life(2):
        made.prepare()
        path = made.sealed_files()[0]
        made.world.stop()
        made.world.changes["archive_url"] = None
        made.world.start()
        node = made.world.node
        assert node is not None
        assert node.mender is None
        made.damage(path, "record", random.Random(2))

        async def found() -> None:
            for _ in range(1_000):
                await asyncio.sleep(0.5)
                if node.registry.damaged_records:
                    return
            raise AssertionError

        made.world.run(found())
        content = made.world.disk.content(path)
        made.world.run(asyncio.sleep(100))
        assert made.world.disk.content(path) == content


def test_a_job_that_was_damaged_is_handed_out_once_it_is_back() -> None:
    made = Mended(4, archive_base_interval_ms=1_000)
    with made.world.life(4):
        made.start()
        run = made.world.run
        run(made.put_topics())
        run(made.append("q", 6))
        run(made.seal())
        run(made.based())
        path = next(each for each in made.sealed_files() if f"/{_id(made, 'q')}/" in each)
        made.damage(path, "records", random.Random(4))
        away = _Away()
        mender = made.mender
        files, mender._files = mender._files, away
        got = run(made.claimed())
        assert len(got) < 6
        # The leases of the damaged jobs end, and no worker can claim these jobs.
        run(asyncio.sleep(5))
        assert sorted(run(made.claimed())) == sorted(got)
        mender._files = files
        run(made.healed())
        assert sorted(run(made.claimed())) == [1, 2, 3, 4, 5, 6]


def test_a_job_whose_file_was_put_back_is_handed_out_after_a_start() -> None:
    made = Mended(6, archive_url=None)
    with made.world.life(6):
        made.start()
        run = made.world.run
        run(made.put_topics())
        run(made.append("q", 6))
        run(made.seal())
        (path,) = made.sealed_files()
        content = made.world.disk.content(path)
        made.damage(path, "records", random.Random(4))
        got = run(made.claimed())
        assert len(got) < 6
        run(asyncio.sleep(5))
        assert sorted(run(made.claimed())) == sorted(got)
        made.world.stop()
        made.world.disk.put(path, content)
        made.start()
        run(asyncio.sleep(5))
        assert sorted(run(made.claimed())) == [1, 2, 3, 4, 5, 6]


class _Away:
    """An archive that cannot be read."""

    async def prepare(self, topic_id: int, segment_id: int, known: KnownFlags) -> PreparedMend:
        raise StorageError("is away")

    async def finish(self, files: PreparedMend, known: KnownFlags) -> tuple[Any, bytes]:
        raise AssertionError

    async def discard(self, files: PreparedMend) -> None:
        raise AssertionError


def _id(made: Mended, name: str) -> int:
    assert made.world.node is not None
    topic = made.world.node.registry.find(name)
    assert topic is not None
    return topic.topic_id


async def _stays() -> None:
    await asyncio.get_running_loop().create_future()


def test_no_mend_waits_for_a_closed_archive() -> None:
    made = Mended(5)
    with made.world.life(5):
        made.prepare(10)
        archiver = made.archiver
        made.world.stop()
        loop = asyncio.new_event_loop()
        try:
            with pytest.raises(StorageError, match="not open"):
                loop.run_until_complete(archiver.read(lambda store, check: None))
        finally:
            loop.close()
