"""Writes the parts of an archive, one after the other.

A part is put under the next number if that number is absent. Before that, its checksum is stored in
the data directory (`position`). A failed put is repeated with the same bytes. If the number has
other bytes, another server with a copy of this store has written it: then `ArchiveTaken` is raised,
and this server writes to the archive no more. All calls block, and are made one at a time. Called
by `node/archiver`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import msgspec

from topics_server.archive.continuous.format import (
    ARCHIVE,
    ARCHIVE_VERSION,
    CATCH_UP_BYTES,
    PART_BYTES,
    ArchiveMark,
    PartFacts,
    decode_mark,
    digest_of,
    encode_part,
    part_name,
)
from topics_server.archive.continuous.history import ArchiveHistory
from topics_server.archive.continuous.journal_tail import JournalTail
from topics_server.archive.continuous.places.shared_folder import ArchiveStore, is_lock, put_same
from topics_server.archive.continuous.position import (
    ArchivePosition,
    read_position,
    write_position,
)
from topics_server.archive.continuous.steps import STEP_FRAMES, Steps
from topics_server.archive.format import encode_json
from topics_server.archive.known import KnownBuilder
from topics_server.archive.object_store import read_whole
from topics_server.runtime.clock import random_hex
from topics_server.values.errors import Corrupt, StartRefused, StorageError
from topics_server.values.limits import KIB
from topics_server.values.storage_types import SyncedShard
from topics_server.wal.format.frames import RawFrame
from topics_server.wal.fs import Fs

# Before one in this many parts, check that the archive still exists. Each check is a request that
# costs money.
_LOOK_EVERY: Final = 64
# Shorter frames are joined up to about this length before they are compressed.
_JOINED_BYTES: Final = 64 * KIB


class ArchiveTaken(StorageError):
    """The archive is of another store, or another server with a copy of this store writes to it."""


class JournalLost(StorageError):
    """The journal lacks entries after the newest part: the next stretch needs a base."""


class ReadyBase(NamedTuple):
    """A complete base, which counts once a part names it."""

    name: str
    xxh3: str
    last_lsn: int
    ts_ms: int


class Shipped(NamedTuple):
    """The result of one call: the bytes of the part (0: no part), and whether more entries wait."""

    bytes: int = 0
    has_more: bool = False
    is_base_announced: bool = False


class _Pending(NamedTuple):
    """A part whose checksum is stored, until the part is known to be in the archive."""

    facts: PartFacts
    content: bytes
    base: ReadyBase | None


class ArchiveShipper:
    """One archive, open for one server."""

    def __init__(
        self, fs: Fs, store: ArchiveStore, data_dir: str, wal_dir: str, run: int, url: str
    ) -> None:
        self._fs: Final = fs
        self.store: Final = store
        self._data_dir: Final = data_dir
        self._wal_dir: Final = wal_dir
        self._run: Final = run
        self._url: Final = url
        self.writer: Final = random_hex(16)
        self.position = ArchivePosition(url=url, archive_id="")
        self._store_id = ""
        self._tail: JournalTail | None = None
        self._steps: Final = Steps()
        self._pending: _Pending | None = None

    @classmethod
    def open(
        cls,
        fs: Fs,
        store: ArchiveStore,
        data_dir: str,
        wal_dir: str,
        *,
        store_id: str,
        run: int,
        url: str,
    ) -> ArchiveShipper:
        """Begin an empty archive, or continue the archive of this data directory.

        Raises `ArchiveTaken` for the archive of another server, `StorageError` if it is unreadable.
        """
        shipper = cls(fs, store, data_dir, wal_dir, run, url)
        shipper._store_id = store_id
        position = read_position(fs, data_dir)
        mark = read_mark(store)
        if mark is None:
            position = shipper._take_empty(position)
        elif mark.store_id != store_id:
            raise ArchiveTaken(
                f"belongs to store {mark.store_id}, and this is store {store_id}: name an empty "
                "archive",
                store.path_of(ARCHIVE),
            )
        elif position is None or position.archive_id != mark.archive_id:
            raise ArchiveTaken(
                "is an archive of this store that this data directory did not write, so it is that "
                "of a copy, or an earlier one: name an empty archive",
                store.path_of(ARCHIVE),
            )
        shipper.position = msgspec.structs.replace(position, url=url)
        shipper._adopt()
        return shipper

    def _take_empty(self, position: ArchivePosition | None) -> ArchivePosition:
        """Create the archive of this store in an empty place."""
        store, path = self.store, self.store.path_of(ARCHIVE)
        is_known = position is not None and position.url == self._url
        if position is not None and is_known and position.number:
            raise StorageError(
                "is missing, and this store has an archive there: is its disk mounted? If the "
                "archive is gone for good, remove ARCHIVE_POSITION from the data directory",
                path,
            )
        others = [name for name in store.names("") if not is_lock(name)]
        if others:
            raise ArchiveTaken(
                f"holds other files ({others[0]}): name an empty folder", store.path_of("")
            )
        if position is None or not is_known:
            position = ArchivePosition(url=self._url, archive_id=random_hex(16))
            write_position(self._fs, self._data_dir, position)
        mark = ArchiveMark(ARCHIVE_VERSION, self._store_id, position.archive_id)
        if not put_same(store, ARCHIVE, encode_json(mark)):
            raise ArchiveTaken("another server took this archive: name an empty one", path)
        return position

    def _adopt(self) -> None:
        """Compare the archive's newest part with the position in this data directory."""
        position = self.position
        history = ArchiveHistory(self.store)
        newest = history.newest()
        if newest < position.number:
            raise ArchiveTaken(
                "is missing, and it was written: the archive lost its newest parts. Look whether "
                "this is the right archive; if it is, name an empty one",
                self.store.path_of(part_name(position.number)),
            )
        if newest == 0:
            return
        path = self.store.path_of(part_name(newest))
        digest = digest_of(read_whole(self.store, part_name(newest)))
        if newest == position.number and digest == position.digest:
            return
        if newest == position.number + 1 and digest in position.intents:
            # A process put the part and was killed, maybe before the sync.
            self.store.make_durable(part_name(newest))
            self._advance(history.facts(newest), digest)
            return
        raise ArchiveTaken(
            "was written by another server: this data directory is an older state, or a copy, of "
            "the one whose archive this is. Name an empty archive",
            path,
        )

    # -- facts ---------------------------------------------------------------------------------

    @property
    def needs_base(self) -> bool:
        """Whether a new stretch must begin: no part is written before a base is ready."""
        return self.position.number == 0 or self.position.is_gap

    @property
    def last_lsn(self) -> int:
        """The archive has every entry of the stretch up to this lsn."""
        return self.position.last_lsn

    # -- parts ---------------------------------------------------------------------------------

    def begin_gap(self) -> None:
        """Note that the journal is not kept any longer: the next stretch begins from a new base."""
        self._close_tail()
        if not self.needs_base:
            self.position = msgspec.structs.replace(self.position, is_gap=True)
            write_position(self._fs, self._data_dir, self.position)

    def ship(
        self,
        upto_lsn: int,
        ts_ms: int,
        synced: Sequence[SyncedShard],
        base: ReadyBase | None,
    ) -> Shipped:
        """Put the next part, if there is anything to put.

        `upto_lsn`: every shard is synced up to this lsn; `ts_ms`: the time when that was known.
        `base`: a complete base that no part has named yet. Raises `ArchiveTaken`; after another
        `StorageError` the next call tries again; `JournalLost` requires `begin_gap`.
        """
        # A part waits since an earlier call: there may be more entries after it.
        has_more = self._pending is not None
        if self._pending is None:
            try:
                has_more = self._prepare(upto_lsn, ts_ms, synced, base)
            except BaseException:
                # Read again the entries that were read but are in no part.
                self._close_tail()
                raise
        pending = self._pending
        if pending is None:
            return Shipped()
        if pending.base is not None or pending.facts.number % _LOOK_EVERY == 0:
            self._look()
        name = part_name(pending.facts.number)
        if not put_same(self.store, name, pending.content):
            self._stop(name)
        self._pending = None
        self._advance(pending.facts, digest_of(pending.content), pending.base)
        return Shipped(len(pending.content), has_more, pending.base is not None)

    def _look(self) -> None:
        """Raise `StorageError` if the archive was emptied: put no part into an empty place."""
        number = self.position.number
        for name in (ARCHIVE, part_name(number)) if number else (ARCHIVE,):
            if self.store.size(name) is None:
                raise StorageError(
                    "is missing, and was there: somebody removed it from this archive. Put it "
                    "back, or name an empty archive",
                    self.store.path_of(name),
                )

    def _stop(self, name: str) -> None:
        """Handle an existing number: from a late put of this store, or from another server."""
        content = read_whole(self.store, name)
        digest = digest_of(content)
        self._pending = None
        self._close_tail()
        if digest in self.position.intents:
            facts = ArchiveHistory(self.store).facts(self.position.number + 1)
            self._advance(facts, digest)
            raise StorageError("an earlier put arrived late, and counts", self.store.path_of(name))
        raise ArchiveTaken(
            "another server, with a copy of this store, went on in this archive: this one writes "
            "to it no more",
            self.store.path_of(name),
        )

    def _prepare(
        self,
        upto_lsn: int,
        ts_ms: int,
        synced: Sequence[SyncedShard],
        base: ReadyBase | None,
    ) -> bool:
        """Make the next part pending; return whether more entries wait."""
        position = self.position
        begins = self.needs_base
        if begins:
            if base is None:
                return False
            position = msgspec.structs.replace(
                position, last_lsn=base.last_lsn, stretch=position.number + 1
            )
            self._close_tail()
        frames = self._read(position.last_lsn + 1, upto_lsn, synced)
        last_lsn = frames[-1].lsn if frames else position.last_lsn
        if base is not None and not begins and last_lsn < base.last_lsn:
            if frames or upto_lsn < base.last_lsn:
                base = None
            else:
                # No entry between these two lsns has a frame.
                last_lsn = base.last_lsn
        if not frames and base is None:
            return False
        facts = self._facts(position, frames, last_lsn, ts_ms, base)
        content = encode_part(facts, _pieces(frames))
        self.position = self.position.intending(digest_of(content))
        write_position(self._fs, self._data_dir, self.position)
        self._pending = _Pending(facts, content, base)
        return facts.frames_bytes >= PART_BYTES

    def _read(self, start_lsn: int, upto_lsn: int, synced: Sequence[SyncedShard]) -> list[RawFrame]:
        """The next frames; `start_lsn` is the lsn of the first one."""
        try:
            if self._tail is None:
                self._tail = JournalTail(self._fs, self._wal_dir, start_lsn, self._steps)
            return self._tail.read(upto_lsn, synced, CATCH_UP_BYTES)
        except (Corrupt, StartRefused) as error:
            raise JournalLost(str(error)) from None

    def _facts(
        self,
        position: ArchivePosition,
        frames: Sequence[RawFrame],
        last_lsn: int,
        ts_ms: int,
        base: ReadyBase | None,
    ) -> PartFacts:
        known, size = KnownBuilder(), 0
        created: list[tuple[int, str]] = []
        for at in range(0, len(frames), STEP_FRAMES):
            step = frames[at : at + STEP_FRAMES]
            for frame in step:
                size += len(frame.content)
                known.note_frame(frame)
                if frame.creation is not None and frame.creation.created:
                    created.append((frame.creation.topic_id, frame.creation.name))
            self._steps.did(len(step) // 2)
        number = position.number + 1
        return PartFacts(
            store_id=self._store_id,
            archive_id=position.archive_id,
            number=number,
            previous=position.digest,
            writer=self.writer,
            run=self._run,
            ts_ms=max(ts_ms, position.ts_ms),
            first_lsn=position.last_lsn + 1,
            last_lsn=last_lsn,
            frames=len(frames),
            frames_bytes=size,
            body_xxh3="",
            stretch=position.stretch,
            base_part=position.base_part if base is None else number,
            base_before=0 if base is None else position.base_part,
            base="" if base is None else base.name,
            base_xxh3="" if base is None else base.xxh3,
            known=known.result(),
            created=created,
        )

    def _advance(self, facts: PartFacts, digest: str, base: ReadyBase | None = None) -> None:
        """Move the position: the part is in the archive."""
        position = self.position
        base_lsn, base_ts_ms = position.base_lsn, position.base_ts_ms
        if base is not None:
            base_lsn, base_ts_ms = base.last_lsn, base.ts_ms
        elif facts.base:
            base_lsn, base_ts_ms = facts.last_lsn, facts.ts_ms
        self.position = msgspec.structs.replace(
            position,
            number=facts.number,
            digest=digest,
            last_lsn=facts.last_lsn,
            ts_ms=facts.ts_ms,
            stretch=facts.stretch,
            base_part=facts.base_part,
            base_lsn=base_lsn,
            base_ts_ms=base_ts_ms,
            intents=[],
            is_gap=position.is_gap and not facts.begins_stretch,
        )

    def _close_tail(self) -> None:
        tail, self._tail = self._tail, None
        if tail is not None:
            tail.close()

    def close(self) -> None:
        """Close the files and the store."""
        self._close_tail()
        self.store.close()


def _pieces(frames: Sequence[RawFrame]) -> Iterator[bytes | memoryview]:
    """The bytes of the frames, short ones joined."""
    joined: list[bytes | memoryview] = []
    size = 0
    for frame in frames:
        joined.append(frame.content)
        size += len(frame.content)
        if size >= _JOINED_BYTES:
            # A long frame is not copied if no short ones wait.
            yield joined[0] if len(joined) == 1 else b"".join(joined)
            joined, size = [], 0
    yield b"".join(joined)


def read_mark(store: ArchiveStore) -> ArchiveMark | None:
    """The mark that names the archive's store, if any. Raises `Corrupt`, `StartRefused`."""
    if store.size(ARCHIVE) is None:
        return None
    return decode_mark(read_whole(store, ARCHIVE), store.path_of(ARCHIVE))
