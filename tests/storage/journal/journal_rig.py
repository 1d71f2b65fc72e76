"""A journal on a fake disk, driven by a seed: promises are noted and checked.

One `Life` is one process: it recovers, submits, may crash. `Promises` outlives them: entries
reported as synced survive a power loss, entries reported as written survive a kill, entries
reported as failed never return, and an entry that recovery returned once exists for ever.
"""

from __future__ import annotations

import asyncio
import copy
import random
from collections.abc import Callable
from typing import Any

from tests.storage.fake_disk import FakeDisk, Mode, SimulatedCrash
from topics_server.values.entries import Entry, HeadReserved, RecordsAppended, RecordsDeleted
from topics_server.values.errors import TopicsError
from topics_server.values.storage_types import ReplayStart, ShardProgress, ShardSync
from topics_server.wal.journal.anchors import Anchors
from topics_server.wal.journal.journal import Journal
from topics_server.wal.journal.replay import JournalReplay, ReplayReport
from topics_server.wal.journal.wal_file import Sizes
from topics_server.wal.journal.workers import InlineWorker

WAL = "data/wal"
SMALL = Sizes(file_bytes=16_384, fill_step_bytes=4_096, reserve_bytes=1_024)


def append(topic_id: int, first_seq: int, body: bytes = b'{"records":[{"data":1}]}') -> Entry:
    return RecordsAppended(topic_id, first_seq, 1, 1_700_000_000_000, body)


def random_entry(rng: random.Random, lsn: int) -> Entry:
    topic_id = rng.randrange(8)
    kind = rng.random()
    if kind < 0.1:
        return HeadReserved(topic_id, lsn * 10)
    if kind < 0.2:
        run = lsn.to_bytes(8, "little")
        return RecordsDeleted(topic_id, 5, run, run)
    size = rng.choice((10, 100, 700, 3_000)) if rng.random() < 0.95 else 20_000
    return append(topic_id, lsn, bytes([65 + lsn % 26]) * rng.randint(1, size))


def never_lost(topic_id: int) -> bool:
    """No entry may be missing."""
    return False


class Noted:
    """The facts that `FORMAT` and the snapshot record about the journal, as a node does."""

    def __init__(self) -> None:
        self.wal_sets: list[tuple[int, int, int]] = []
        self.run = 0
        self.journal_run = 0
        self.boot_id = ""
        # By shard, the start of snapshots that were published while the shard was read-only.
        self.shards: list[ShardSync] = []

    def anchors(self, disk: FakeDisk) -> Anchors:
        return Anchors(
            frozenset(wal_set for wal_set, _, _ in self.wal_sets),
            run=self.run,
            journal_run=self.journal_run,
            same_boot=self.boot_id == disk.boot_id,
            shards=self.shards,
        )

    def forget_boot(self) -> None:
        self.boot_id = ""

    def note_journal(self, disk: FakeDisk, wal_set: int, shards: int, first_lsn: int) -> None:
        if wal_set not in {listed[0] for listed in self.wal_sets}:
            self.wal_sets.append((wal_set, shards, first_lsn))
        self.journal_run, self.boot_id = self.run, disk.boot_id


class Promises:
    """The entries that every later life must find; a snapshot has those before `start_lsn`."""

    def __init__(self) -> None:
        self.noted = Noted()
        self.submitted: dict[int, Entry] = {}
        self.shard: dict[int, int] = {}
        self.written: set[int] = set()
        self.synced: set[int] = set()
        self.failed: set[int] = set()
        self.unknown: set[int] = set()
        self.start_lsn = 0

    @classmethod
    def following(cls, other: Promises) -> Promises:
        """A copy of the promises: a start on it does not change these."""
        return copy.deepcopy(other)

    def check(
        self,
        found: dict[int, Entry],
        mode: Mode | None,
        may_have_lost: Callable[[int], bool] = never_lost,
    ) -> None:
        """Compare the result of a recovery with the promises before it.

        Entries that were only written may be gone if recovery says so: of a topic that
        `may_have_lost`, or of all after a power loss.
        """
        for lsn, entry in found.items():
            assert entry == self.submitted[lsn], f"lsn {lsn} came back as something else"
        kept = set(self.synced)
        if mode != "power":
            kept |= {n for n in self.written if not may_have_lost(self.submitted[n].topic_id)}
        missing = {lsn for lsn in kept if lsn >= self.start_lsn} - set(found) - self.unknown
        assert not missing, f"promised after {mode}, gone: {sorted(missing)}"
        back = self.failed & set(found)
        assert not back, f"refused, yet back: {sorted(back)}"
        # Entries that `apply` got are visible to readers from now on.
        self.unknown -= set(found)
        self.synced = set(found) | {lsn for lsn in self.synced if lsn < self.start_lsn}
        self.written = set(self.synced)
        self.unknown.clear()
        # The results of entries of earlier lives are known; later progress concerns later entries.
        self.shard.clear()

    def synced_below(self) -> int:
        """Every entry below this lsn is synced or was refused."""
        open_lsns = set(self.shard) - self.synced - self.failed
        return max(self.start_lsn, min(open_lsns, default=max(self.shard, default=0) + 1))


class Life:
    """One process on the disk, from its recovery to its end."""

    def __init__(
        self,
        disk: FakeDisk,
        promises: Promises | None = None,
        *,
        shards: int = 2,
        wal_set: int = 1,
        sync_interval_ms: int = 100_000,
        sizes: Sizes = SMALL,
        turns: Callable[[], int] | None = None,
        starts_on_snapshot: bool = False,
    ) -> None:
        self.disk = disk
        self.promises = promises or Promises()
        self.rng = disk.rng
        self.loop = asyncio.new_event_loop()
        self.loop.set_exception_handler(self._on_exception)
        self.defects: list[BaseException] = []
        self.progress: list[ShardProgress] = []
        self.found: dict[int, Entry] = {}
        self.noted = self.promises.noted
        self.report = ReplayReport()
        self.next_lsn = max(self.promises.submitted, default=0) + 1
        self.refused: list[TopicsError] = []
        self._shards = shards
        self._starts_on_snapshot = starts_on_snapshot
        self._wal_set = wal_set
        self._sync_interval_ms = sync_interval_ms
        self._sizes = sizes
        self._turns = turns or (lambda: self.rng.choice((0, 0, 1, 3)))
        self.journal: Journal

    def _on_exception(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if error is None:
            error = AssertionError(context["message"])
        if not isinstance(error, SimulatedCrash):
            self.defects.append(error)

    def recover(self, mode: Mode | None = None) -> dict[int, Entry]:
        """Replay, check the promises, open for writing; return the recovered state."""
        replay = JournalReplay(
            self.disk,
            WAL,
            wal_sets=self.noted.wal_sets,
            anchors=self.noted.anchors(self.disk),
            on_loss=self.noted.forget_boot,
        )
        found = list(replay.entries(self.promises.start_lsn))
        lsns = [lsn for lsn, _ in found]
        assert lsns == sorted(set(lsns))
        self.found = dict(found)
        self.report = replay.report
        was_forgotten = not self.noted.boot_id

        def may_have_lost(topic_id: int) -> bool:
            is_told = was_forgotten or replay.may_have_lost(topic_id)
            return self.disk.has_failed_sync and is_told

        self.promises.check(self.found, mode, may_have_lost)
        self.noted.run += 1
        self.journal = Journal.create(
            self.disk,
            WAL,
            replay,
            wal_set=self._wal_set,
            shard_count=self._shards,
            loop=self.loop,
            workers=lambda name: InlineWorker(self.loop, self._turns),
            sync_interval_ms=self._sync_interval_ms,
            sizes=self._sizes,
            file_ids=lambda: self.rng.getrandbits(64),
            run=self.noted.run,
            on_unknown=self.noted.forget_boot,
        )
        if self._starts_on_snapshot and self._wal_set not in {s[0] for s in self.noted.wal_sets}:
            # So no entry of a new wal set depends on the shard count of the previous set.
            self.promises.start_lsn = self.next_lsn
        self.noted.note_journal(self.disk, self._wal_set, self._shards, self.next_lsn)
        self.journal.listen(self._on_progress)
        return self.found

    def _on_progress(self, progress: ShardProgress) -> None:
        self.progress.append(progress)
        promises = self.promises
        for lsn, shard in promises.shard.items():
            if shard != progress.shard or lsn in promises.failed or lsn in promises.unknown:
                continue
            if lsn <= progress.synced_lsn:
                promises.synced.add(lsn)
            if lsn <= progress.written_lsn:
                promises.written.add(lsn)
            if progress.failed_from is not None and lsn >= progress.failed_from:
                if progress.error == "read_only":
                    promises.unknown.add(lsn)
                else:
                    assert lsn not in promises.written, "what was written is undone"
                    promises.failed.add(lsn)
        if progress.failed_from is not None and progress.error == "disk_full":
            self.journal.reopen(progress.shard)

    def submit(self, entry: Entry, *, urgent: bool = False, sync: bool = False) -> int | None:
        """Submit one entry; its lsn, or `None` if it was refused."""
        lsn = self.next_lsn
        shard = self.journal.shard_of(entry.topic_id)
        try:
            self.journal.submit(lsn, entry, shard=shard, urgent=urgent, sync=sync)
        except TopicsError as error:
            self.refused.append(error)
            return None
        self.next_lsn += 1
        self.promises.submitted[lsn] = entry
        self.promises.shard[lsn] = shard
        return lsn

    def turn(self, count: int = 1) -> None:
        """Run one turn of the loop."""

        async def sleep() -> None:
            for _ in range(count):
                await asyncio.sleep(0)

        self.loop.run_until_complete(sleep())

    def settle(self) -> None:
        """Let everything in flight finish."""
        self.turn(60)

    def close(self) -> None:
        """A clean stop."""
        self.loop.run_until_complete(self.journal.close())
        self.end()

    def end(self) -> None:
        """Forget the process; raise its errors."""
        for task in asyncio.all_tasks(self.loop):
            task.cancel()
        self.loop.close()
        if self.defects:
            raise self.defects[0]

    def die(self, mode: Mode) -> FakeDisk:
        """Crash; return the disk that the next process finds."""
        self.disk.crash(mode)
        self.end()
        return self.disk.reopen()


def new_disk(seed: int, *, capacity_bytes: int | None = None) -> FakeDisk:
    """A disk with an empty, synced data directory."""
    disk = FakeDisk(seed, capacity_bytes=capacity_bytes)
    disk.make_dir("data")
    disk.sync_dir(".")
    disk.make_dir(WAL)
    disk.sync_dir("data")
    return disk


def run_life(
    disk: FakeDisk,
    promises: Promises,
    mode: Mode | None,
    steps: int,
    *,
    changes_shards: bool = False,
) -> bool:
    """A random life that ends when the disk crashes under it, or after `steps` turns.

    Returns whether its recovery was complete. `changes_shards`: sometimes it has another shard
    count than the one before, and so a new wal set.
    """
    rng = disk.rng
    wal_set, shards = next(iter(promises.noted.wal_sets[-1:]), (1, 2, 1))[:2]
    if changes_shards and rng.random() < 0.4:
        wal_set, shards = wal_set + bool(promises.noted.wal_sets), rng.choice((1, 2, 3))
    life = Life(
        disk,
        promises,
        shards=shards,
        wal_set=wal_set,
        sync_interval_ms=rng.choice((0, 100_000)),
        starts_on_snapshot=True,
    )
    recovered = False
    try:
        life.recover(mode)
        recovered = True
        for _ in range(steps):
            for _ in range(rng.choice((0, 1, 1, 2, 6))):
                entry = random_entry(rng, life.next_lsn)
                urgent = isinstance(entry, RecordsDeleted)
                life.submit(entry, urgent=urgent, sync=rng.random() < 0.3)
            life.turn(rng.choice((1, 1, 2, 5)))
            if rng.random() < 0.05:
                # A snapshot is published only when every shard is synced up to its start.
                promises.start_lsn = rng.randint(promises.start_lsn, promises.synced_below())
                life.journal.trim(ReplayStart(promises.start_lsn))
            if disk.crashed:
                break
    except SimulatedCrash:
        pass
    finally:
        life.end()
    return recovered
