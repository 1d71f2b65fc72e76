"""A prune during a restore, a base or a stop removes nothing that is still needed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from tests.model.archive.archived import ARCHIVE, Archived
from tests.model.archive.test_interrupted_archive import locked
from tests.storage.fake_disk import FakeDisk
from topics_server.archive.continuous import shipper as shipper_module
from topics_server.archive.continuous.bases import ArchiveBases
from topics_server.archive.continuous.format import ARCHIVE as ARCHIVE_MARK
from topics_server.archive.continuous.format import part_name
from topics_server.archive.continuous.history import ArchiveHistory
from topics_server.archive.continuous.places.shared_folder import SharedFolder
from topics_server.archive.continuous.prune import PrunePlan, plan_prune, prune_archive
from topics_server.archive.continuous.restoring import restore_moment
from topics_server.archive.continuous.shipper import ArchiveShipper, ArchiveTaken
from topics_server.archive.object_store import FolderStore, read_whole
from topics_server.archive.retention import parse_rules
from topics_server.node.archiver import Archiver
from topics_server.values.errors import StartRefused
from topics_server.values.model import Durability, TopicConfig
from topics_server.wal.restored import read_restored


async def append_new(made: Archived, name: str, count: int) -> None:
    await made.store.put_topic(name, TopicConfig(durability=Durability.FSYNC), keep_type=False)
    await made.append(name, count)


class Pruned(SharedFolder):
    """A folder in which a prune runs just before one of its reads or lists."""

    calls = 0
    nth = 0
    plan: PrunePlan

    def _note(self) -> None:
        self.calls += 1
        if self.calls == self.nth:
            prune_archive(SharedFolder.open(self._fs, ARCHIVE), self.plan)

    def names(self, folder: str) -> list[str]:
        self._note()
        return super().names(folder)

    def read(self, name: str) -> Iterator[bytes]:
        self._note()
        return super().read(name)


def test_a_restore_beside_a_prune_is_right_or_says_so() -> None:
    """The prune comes at any call of the restore of a base that it keeps as a single moment."""
    made = Archived(11, archive_base_interval_ms=1_000)
    with made.world.life(11):
        made.start()
        made.world.run(made.put_topics())
        for number in range(3):
            made.world.run(made.load(10))
            if number == 2:
                made.world.run(made.store.drop_topic("gone", if_empty=False))
            else:
                # The topic's later seqs are only in parts that the prune removes, and in no base
                # that stays.
                made.world.run(append_new(made, "gone", 5))
            made.world.run(asyncio.sleep(1.5))
            made.world.run(made.append("a", 1))
            made.world.run(made.settle(number + 1))
        made.world.crash("kill")
        image = made.world.disk.image()
        disk = FakeDisk.of(image)
        folder = SharedFolder.open(disk, ARCHIVE)
        kept = ArchiveBases(folder, ArchiveHistory(folder)).kept()
        oldest = kept[-1].part
        assert len(kept) >= 3
        plan = plan_prune(folder, parse_rules("1"))
        bases = ArchiveBases(folder, ArchiveHistory(folder))
        plan = replace(
            plan,
            bases=[bases.opened(kept[0]), bases.opened(kept[-1])],
            gone=kept[1:-1],
        )
        whole = Pruned.open(disk, ARCHIVE)
        restore_moment(disk, whole, "whole", lambda moments: moments.at_base(oldest))
        expected = read_restored(disk, "whole")
        assert expected is not None
        reasons: list[str] = []
        for nth in range(1, whole.calls + 1):
            disk = FakeDisk.of(image)
            beside = Pruned.open(disk, ARCHIVE)
            beside.nth, beside.plan = nth, plan
            target = f"restored-{nth}"
            try:
                restore_moment(disk, beside, target, lambda moments: moments.at_base(oldest))
            except StartRefused as error:
                reasons.append(str(error))
                # Start the restore once more, as the message says.
                target = "again"
                restore_moment(disk, beside, target, lambda moments: moments.at_base(oldest))
            found = read_restored(disk, target)
            assert found is not None
            for topic_id, head in expected.heads.items():
                assert found.heads.get(topic_id, 0) >= head, (nth, topic_id)
        assert len(reasons) < whole.calls
        assert all("A prune ran meanwhile: restore once more" in each for each in reasons)


def test_a_base_that_waits_for_its_part_is_no_prey_of_a_prune(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The server stops when a base is complete; the server's last part names the base."""
    made = Archived(13, archive_base_interval_ms=1_000)
    events: list[str] = []
    lock_bases, ship = SharedFolder.lock_bases, ArchiveShipper.ship

    def locking(store: SharedFolder) -> Any:
        lock = lock_bases(store)
        release = lock.release

        class Noted:
            def release(self) -> None:
                events.append("let go")
                release()

        events.append("held")
        return Noted()

    def shipping(shipper: ArchiveShipper, *args: Any) -> Any:
        shipped = ship(shipper, *args)
        if shipped.is_base_announced:
            events.append("named")
        return shipped

    with made.world.life(13):
        made.start()
        run = made.world.run
        run(made.put_topics())
        run(made.load(10))
        run(made.settle())
        monkeypatch.setattr(SharedFolder, "lock_bases", locking)
        monkeypatch.setattr(ArchiveShipper, "ship", shipping)

        async def is_whole() -> None:
            for _ in range(100_000):
                if events and made.archiver._base is not None:
                    return
                if not events:
                    await made.append("a", 1)
                await asyncio.sleep(0.001)
            raise AssertionError("no base is made")

        run(is_whole())
        events.clear()
        made.world.stop()
    assert events == ["named", "let go"]


def test_a_server_that_stops_archiving_keeps_no_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    """The base becomes complete after that: the other server must make its own base."""
    made = Archived(14, archive_base_interval_ms=1_000)
    make = Archiver._made_base

    async def late(archiver: Archiver, shipper: ArchiveShipper) -> Any:
        base = await make(archiver, shipper)
        await archiver._stop(ArchiveTaken("another server"))
        return base

    with made.world.life(14):
        made.start()
        run = made.world.run
        run(made.put_topics())
        run(made.load(10))
        run(made.settle())
        monkeypatch.setattr(Archiver, "_made_base", late)
        run(made.load(10))
        run(asyncio.sleep(5))
        assert made.archiver.metrics().stopped
        assert made.archiver.failures == ["nothing is archived any more: see the log"]
        locked(made).release()


def test_a_part_goes_nowhere_once_the_archive_was_emptied(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bucket has no folder that would show it, so the archiver checks from time to time."""
    monkeypatch.setattr(shipper_module, "_LOOK_EVERY", 2)
    monkeypatch.setattr(SharedFolder, "_check_folder", FolderStore._check_folder)
    made = Archived(15, archive_base_interval_ms=3_600_000)
    with made.world.life(15):
        made.start()
        run = made.world.run
        run(made.put_topics())
        run(made.load(10))
        run(made.settle())
        folder = made.folder
        for name in (ARCHIVE_MARK, ""):
            position = made.archiver._shipper.position  # type: ignore[union-attr]
            name = name or part_name(position.number)
            content = read_whole(folder, name)
            put_parts = made.archiver.metrics().parts
            folder.delete(name)
            for _ in range(4):
                run(made.append("a", 1))
                run(asyncio.sleep(1.5))
            shown = made.archiver.metrics()
            assert shown.parts - put_parts <= 1
            assert shown.lag_s > 0
            assert made.archiver.failures == ["archiving fails: see the log"]
            folder.put_if_absent(name, [content])
            run(asyncio.sleep(40))
            run(made.settle())
            assert made.archiver.failures == []
        assert made.verified().problems == []
