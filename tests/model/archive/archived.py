"""A node under load that is archived all the time, and restores of it to any moment.

`Archived` is the node of `tests/model/backups` with an archive in `/archive` of its disk. `Faulty`
is a layer between the archiver and that folder that fails as an object store does: before a call,
or after it, so that the object of a "failed" put exists.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from tests.model.backups.backed_up import BackedUp
from tests.model.world import SMALL
from topics_server.archive.continuous.history import ArchiveHistory
from topics_server.archive.continuous.moments import Moments, RestorePoint
from topics_server.archive.continuous.places.retrying import RetryingStore
from topics_server.archive.continuous.places.shared_folder import ArchiveStore, SharedFolder
from topics_server.archive.continuous.restoring import RestoredMoment, restore_moment
from topics_server.archive.continuous.verifying import VerifiedArchive, verify_archive
from topics_server.node import archiver as archiver_module
from topics_server.node.archiver import Archiver
from topics_server.values.entries import RecordsAppended
from topics_server.values.errors import StorageError
from topics_server.wal.fs import Buffer, Fs, Lock
from topics_server.wal.tools.dump import verify

ARCHIVE: Final = "/archive"
URL: Final = f"file://{ARCHIVE}"
Find = Callable[[Moments], RestorePoint]


def newest(moments: Moments) -> RestorePoint:
    """The newest moment."""
    return moments.newest()


def at_time(ts_ms: int) -> Find:
    """The newest moment up to a time."""
    return lambda moments: moments.at_time(ts_ms)


class Archived(BackedUp):
    """See the module."""

    def __init__(self, seed: int, **changes: Any) -> None:
        settings = {"archive_url": URL, "archive_rate_bytes": 0, "archive_base_interval_ms": 3_000}
        super().__init__(seed, **{**settings, **changes})
        self.world.disk.make_dir(ARCHIVE)
        self.world.disk.sync_dir("/")

    def start(self) -> None:
        """Start a node and observe its entries; forget entries that a crash lost."""
        super().start()
        node = self.world.node
        assert node is not None
        end = node.commits.next_lsn
        self.ledger.entries = {lsn: each for lsn, each in self.ledger.entries.items() if lsn < end}

    @property
    def archiver(self) -> Archiver:
        """The archiver of the running node."""
        node = self.world.node
        assert node is not None
        assert node.archiver is not None
        return node.archiver

    @property
    def folder(self) -> SharedFolder:
        """The archive as it is on the disk."""
        return SharedFolder.open(self.world.disk, ARCHIVE)

    async def settle(self, least_bases: int = 0) -> None:
        """Return once everything is in the archive."""
        for _ in range(400):
            await asyncio.sleep(0.25)
            shown = self.archiver.metrics()
            if shown.stopped or (
                shown.lag_s == 0 and shown.base_ts_ms and shown.bases >= least_bases
            ):
                return
        raise AssertionError(f"the archive stays behind: {shown}")

    def verified(self) -> VerifiedArchive:
        """Read the whole archive."""
        return verify_archive(self.folder)

    def history(self) -> ArchiveHistory:
        """The parts as they are on the disk."""
        return ArchiveHistory(self.folder)

    def restored(self, target: str, find: Find = newest, **how: Any) -> RestoredMoment:
        """Restore, compare the directory with itself, and make it the world's data directory."""
        disk = self.world.disk
        made = restore_moment(disk, self.folder, target, find, sizes=SMALL, **how)
        problems = verify(disk, target).problems
        assert not problems, problems
        self.world.changes |= {"data_dir": Path(target), "archive_url": None}
        if "cold_dir" in self.world.changes:
            self.world.changes["cold_dir"] = Path(f"{target}-cold")
        return made

    def check_moment(self, made: RestoredMoment) -> None:
        """Check that the started node has exactly the log's prefix, and uses no seq again."""
        node = self.world.node
        assert node is not None
        # A topic that was made again under its name counts its seqs from 1.
        highest = {topic.name: self.highest_of(topic.topic_id) for topic in node.registry}
        self.check_records(self.ledger.prefix(made.lsn), highest)

    def highest_of(self, topic_id: int) -> int:
        """The highest seq that any record of this topic ever had."""
        return max(
            (
                entry.first_seq + entry.count - 1
                for entry in self.ledger.entries.values()
                if isinstance(entry, RecordsAppended) and entry.topic_id == topic_id
            ),
            default=0,
        )

    def random_find(self) -> tuple[Find, str]:
        """A random moment, and the option that names it."""
        history = self.history()
        numbers = history.numbers()
        part = history.facts(self.rng.choice(numbers))
        kind = self.rng.choice(("newest", "time", "time", "seq", "seq"))
        if kind == "newest":
            return newest, kind
        if kind == "time":
            ts_ms = part.ts_ms + self.rng.choice((0, 0, 1, 400))
            return at_time(ts_ms), f"time {ts_ms}"
        named = [
            (self.named(entry.topic_id), entry.first_seq)
            for lsn, entry in self.ledger.entries.items()
            if hasattr(entry, "first_seq") and history.facts(numbers[0]).first_lsn <= lsn
        ]
        topic, seq = self.rng.choice([each for each in named if each[0]])
        return (lambda moments: moments.at_seq(topic, seq)), f"seq {topic}={seq}"

    def named(self, topic_id: int) -> str:
        """The name of a topic that still has the record; else empty."""
        assert self.world.node is not None
        topic = self.world.node.registry.get(topic_id)
        return "" if topic is None else topic.name


class Faulty:
    """An archive of whose calls a `share` fails, half of these before they do anything."""

    def __init__(self, inner: ArchiveStore, rng: random.Random, share: float) -> None:
        self._inner = inner
        self._rng = rng
        self.share = share
        self.failed = 0

    def _call(self, call: Callable[[], Any]) -> Any:
        fails = self._rng.random() < self.share
        before = fails and self._rng.random() < 0.5
        if before:
            self.failed += 1
            raise StorageError("503 slow down", ARCHIVE)
        found = call()
        if fails:
            self.failed += 1
            raise StorageError("timed out", ARCHIVE)
        return found

    def path_of(self, name: str) -> str:
        return self._inner.path_of(name)

    def put_if_absent(self, name: str, pieces: Iterable[Buffer]) -> bool:
        return bool(self._call(lambda: self._inner.put_if_absent(name, pieces)))

    def read(self, name: str) -> Iterator[bytes]:
        chunks: list[bytes] = self._call(lambda: list(self._inner.read(name)))
        return iter(chunks)

    def size(self, name: str) -> int | None:
        found: int | None = self._call(lambda: self._inner.size(name))
        return found

    def make_durable(self, name: str) -> None:
        self._call(lambda: self._inner.make_durable(name))

    def names(self, folder: str) -> list[str]:
        found: list[str] = self._call(lambda: self._inner.names(folder))
        return found

    def remove_unfinished(self, folder: str) -> None:
        self._call(lambda: self._inner.remove_unfinished(folder))

    def delete(self, name: str) -> None:
        self._call(lambda: self._inner.delete(name))

    def delete_folder(self, folder: str) -> None:
        self._call(lambda: self._inner.delete_folder(folder))

    def lock_bases(self) -> Lock:
        return self._inner.lock_bases()

    def lock_holder(self) -> str | None:
        return self._inner.lock_holder()

    def break_lock(self) -> None:
        self._inner.break_lock()

    def close(self) -> None:
        self._inner.close()


def patient(store: ArchiveStore) -> ArchiveStore:
    """A store that repeats failed calls without waiting."""
    return RetryingStore(store, wait=lambda seconds: None)


def inject(monkeypatch: pytest.MonkeyPatch, wrap: Callable[[ArchiveStore], ArchiveStore]) -> None:
    """Let archivers that are started from now on use a wrapped store."""

    def opened(fs: Fs, url: str, **how: object) -> ArchiveStore:
        return wrap(SharedFolder.open(fs, ARCHIVE))

    monkeypatch.setattr(archiver_module, "open_archive", opened)
