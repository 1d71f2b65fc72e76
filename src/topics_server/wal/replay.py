"""The journal as found at start: its entries by lsn, what of it is torn, and making it durable.

Each shard's files form a chain: a file's first group names the file before it, where that one ended
and its last lsn. A chain that does not reach back to the snapshot's start, or has a gap above it,
refuses start. Where a group fails its check (DESIGN §4, Torn or corrupt):

- a later file holds a valid group -> this file was synced whole: *corrupt*;
- a readable group behind it says it was synced, by its mark or by an lsn the snapshot is known to
  be synced up to -> *corrupt*;
- a header fails although bytes follow it -> *corrupt*, for headers are synced before any group;
- otherwise nobody was told of it -> *torn*: kept aside, zeroed, reported. Groups behind it were
  part of the same unsynced tail: pages of one sync may land out of order.

When the last entry has been taken, `entries` makes durable what it found: cut torn tails, write
again in place what is not known to be synced, sync it and the directory, remove unused files. Only
then may a `Journal` be opened. Called by the server's start and by `dump`.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Sequence
from operator import itemgetter
from typing import Final, NoReturn

import msgspec

from topics_server.entries import Entry
from topics_server.errors import Corrupt, StartRefused
from topics_server.limits import MIB
from topics_server.wal import layout
from topics_server.wal.frames import Opening
from topics_server.wal.fs import File, Fs
from topics_server.wal.groups import (
    ALIGNMENT,
    FILE_HEADER_BYTES,
    GROUP_HEADER_BYTES,
    Ending,
    FileHeader,
    Group,
    Scan,
    decode_file_header,
    find_group,
    scan,
)

_CHUNK_BYTES: Final = MIB
_ZEROS: Final = bytes(_CHUNK_BYTES)

assert _CHUNK_BYTES % ALIGNMENT == 0


class TornRange(msgspec.Struct, frozen=True):
    """Bytes of an unfinished write, cut from a file and kept aside in `kept`."""

    path: str
    offset: int
    length: int
    groups_dropped: int
    reason: str
    kept: str


class ReplayReport(msgspec.Struct):
    """What was found, for the log at start and for `dump`."""

    files: int = 0
    files_read: int = 0
    groups: int = 0
    entries: int = 0
    bytes: int = 0
    rewritten_bytes: int = 0
    last_lsn: int = 0
    torn: list[TornRange] = []
    removed: list[str] = []


class ShardEnd(msgspec.Struct, frozen=True):
    """Where a shard of a wal set goes on: number of its next file, and what that one opens with."""

    next_number: int
    opening: Opening


class OldFile(msgspec.Struct, frozen=True):
    """A file that stays until the journal is trimmed; its entries have lsns <= `last_lsn`."""

    path: str
    last_lsn: int


class _Found:
    """One file as it lies there. `first`: its first group, `None` if it has no valid one."""

    def __init__(self, path: str, file: File, size: int, header: FileHeader) -> None:
        self.path = path
        self.file = file
        self.size = size
        self.header = header
        self.first: Group | None = None
        # Filled while it is read.
        self.last_lsn = 0
        self.synced_bytes = FILE_HEADER_BYTES
        self.end = FILE_HEADER_BYTES


class JournalReplay:
    """One reading of the journal in `wal_dir`.

    `wal_sets` (from `FORMAT`): (set, shards, first lsn) of the sets whose files must be there.
    `synced_lsn`: every entry up to here is known to have been synced (the snapshot's `last_lsn`).
    """

    def __init__(
        self,
        fs: Fs,
        wal_dir: str,
        *,
        wal_sets: Sequence[tuple[int, int, int]] = (),
        synced_lsn: int = 0,
        read_only: bool = False,
    ) -> None:
        self._fs: Final = fs
        self._wal_dir: Final = wal_dir
        self._wal_sets: Final = sorted(wal_sets)
        self._synced_lsn: Final = synced_lsn
        self._read_only: Final = read_only
        self._bytes_total = 1
        self._bytes_done = 0
        self._unused: list[str] = []
        self._torn: list[tuple[_Found, TornRange]] = []
        self._lasts: list[_Found] = []
        self.is_finished = False
        self.report: Final = ReplayReport()
        self.ends: Final[dict[tuple[int, int], ShardEnd]] = {}
        self.old_files: Final[list[OldFile]] = []

    @property
    def progress(self) -> float:
        """0.0 to 1.0 of the bytes to read."""
        return min(1.0, self._bytes_done / self._bytes_total)

    def entries(self, start_lsn: int) -> Iterator[tuple[int, Entry]]:
        """*Blocking.* Entries with lsn >= start, merged by lsn; see the module's text.

        Raises `StartRefused`, `Corrupt`; then nothing was changed on disk.
        """
        assert not self.is_finished, "a journal is read once"
        shards = self._open_files()
        self._check_sets(set(shards), start_lsn)
        streams = []
        for key, files in sorted(shards.items()):
            chain = self._chain(key, files, start_lsn)
            self._bytes_total += sum(found.size for found in chain)
            streams.append(self._shard_entries(key, files, chain, start_lsn))
        try:
            for lsn, entry in heapq.merge(*streams, key=itemgetter(0)):
                self.report.entries += 1
                yield lsn, entry
            if not self._read_only:
                self._make_durable()
        finally:
            for found in itertools.chain(*shards.values()):
                found.file.close()
        self._bytes_done = self._bytes_total
        self.is_finished = True

    # -- which files -----------------------------------------------------------------------

    def _open_files(self) -> dict[tuple[int, int], list[_Found]]:
        """Files by (set, shard), ascending by number; every header checked, first groups read."""
        shards: dict[tuple[int, int], list[_Found]] = {}
        names = [layout.parse_wal_file(name) for name in self._fs.list_dir(self._wal_dir)]
        for name in sorted(name for name in names if name is not None):
            path = layout.join(self._wal_dir, layout.wal_file(name))
            self.report.files += 1
            file = self._fs.open(path, write=not self._read_only)
            size = file.size()
            header = decode_file_header(file.pread(FILE_HEADER_BYTES, 0))
            if header is None:
                if any(_dirty_chunks(file, FILE_HEADER_BYTES, size)):
                    raise Corrupt("the file header fails its check", path)
                # Its making was cut short: no group was ever written to it.
                file.close()
                self._unused.append(path)
                self._seen_number(name)
                continue
            if header[:3] != name:
                raise Corrupt(f"the header says {layout.wal_file(_name_of(header))}", path)
            found = _Found(path, file, size, header)
            first = self._scan_from(found, FILE_HEADER_BYTES, one=True)
            found.first = first.groups[0] if first.groups else None
            if found.first is not None and found.first.opening is None:
                raise Corrupt("the first group does not say which file it continues", path)
            shards.setdefault((name.wal_set, name.shard), []).append(found)
            self._seen_number(name)
        return shards

    def _seen_number(self, name: layout.WalName) -> None:
        self.ends[name.wal_set, name.shard] = ShardEnd(name.number + 1, Opening(0, 0, 0))

    def _check_sets(self, present: set[tuple[int, int]], start_lsn: int) -> None:
        """Every shard of a set that is needed has a file: a missing one is not an empty one."""
        for index, (wal_set, shard_count, _) in enumerate(self._wal_sets):
            is_last = index + 1 == len(self._wal_sets)
            if not is_last and self._wal_sets[index + 1][2] <= start_lsn:
                continue
            for shard in range(shard_count):
                if (wal_set, shard) not in present:
                    raise StartRefused(
                        f"journal files of wal set {wal_set}, shard {shard} are missing",
                        self._wal_dir,
                    )

    def _chain(self, key: tuple[int, int], files: list[_Found], start_lsn: int) -> list[_Found]:
        """The files that hold groups and must be read: from the last back to `start_lsn`."""
        used = [found for found in files if found.first is not None]
        needed: list[_Found] = []
        opening = Opening(0, 0, 0)
        for found in reversed(used):
            if needed and opening.previous_lsn < start_lsn:
                break
            if needed and opening.previous_number != found.header.number:
                self._refuse_gap(key, files, opening, start_lsn)
            needed.append(found)
            assert found.first is not None
            assert found.first.opening is not None
            opening = found.first.opening
        after_lsn = opening.previous_lsn if needed else max(f.header.after_lsn for f in files)
        if after_lsn >= max(start_lsn, 1):
            raise StartRefused(
                f"the journal of wal set {key[0]}, shard {key[1]} begins after lsn {after_lsn}, "
                f"but replay starts at lsn {start_lsn}",
                self._wal_dir,
            )
        self._note_old_files(used)
        needed.reverse()
        return needed

    def _refuse_gap(
        self, key: tuple[int, int], files: list[_Found], opening: Opening, start_lsn: int
    ) -> NoReturn:
        number = opening.previous_number
        for found in files:
            if found.header.number == number:
                raise Corrupt("no valid group, but a later file holds groups", found.path)
        raise StartRefused(
            f"journal file {number} of wal set {key[0]}, shard {key[1]} is missing; replay starts "
            f"at lsn {start_lsn}",
            self._wal_dir,
        )

    def _note_old_files(self, used: list[_Found]) -> None:
        for found, follower in itertools.pairwise(used):
            assert follower.first is not None
            assert follower.first.opening is not None
            self.old_files.append(OldFile(found.path, follower.first.opening.previous_lsn))

    # -- entries ---------------------------------------------------------------------------

    def _shard_entries(
        self, key: tuple[int, int], files: list[_Found], chain: list[_Found], start_lsn: int
    ) -> Iterator[tuple[int, Entry]]:
        last_lsn = 0
        for index, found in enumerate(chain):
            self.report.files_read += 1
            follower = chain[index + 1] if index + 1 < len(chain) else None
            found.last_lsn = last_lsn
            for group in self._groups(found, follower, start_lsn):
                self.report.groups += 1
                self.report.bytes += group.length
                for lsn, entry in group.entries:
                    if lsn <= last_lsn:
                        raise Corrupt(f"lsn {lsn} follows {last_lsn}", found.path)
                    last_lsn = found.last_lsn = lsn
                    if lsn >= start_lsn:
                        yield lsn, entry
            self._bytes_done += found.size
        if not chain:
            last_lsn = max(found.header.after_lsn for found in files)
        self._check_synced_tail(files, last_lsn, start_lsn)
        self._end_shard(key, files, chain, last_lsn, start_lsn)

    def _groups(self, found: _Found, follower: _Found | None, start_lsn: int) -> Iterator[Group]:
        """Groups of one file; judges where they end."""
        position = FILE_HEADER_BYTES
        while True:
            result = self._scan_from(found, position)
            for group in result.groups:
                found.end = group.end
                found.synced_bytes = max(found.synced_bytes, group.synced_bytes)
                yield group
            position = result.position
            if result.ending is not Ending.MORE:
                break
            if not result.groups:
                # The scan was given all it asked for: the file ends inside the group.
                result = result._replace(ending=Ending.FAILED, reason="the file ends in a group")
                break
        if follower is not None:
            assert follower.first is not None
            assert follower.first.opening is not None
            expected = follower.first.opening.previous_end
            if result.ending is Ending.FAILED or position != expected:
                raise Corrupt(
                    f"{result.reason or 'nothing'} at {position}, but the file was synced up to "
                    f"{expected}: a later file holds groups",
                    found.path,
                )
        else:
            self._judge_tail(found, position, result.reason, start_lsn)

    def _scan_from(self, found: _Found, position: int, *, one: bool = False) -> Scan:
        """Decode what one chunk holds from a position on; reads on for a group larger than it."""
        length = GROUP_HEADER_BYTES if one else _CHUNK_BYTES
        while True:
            buffer = found.file.pread(min(length, found.size - position), position)
            try:
                result = scan(buffer, position, found.header.file_id, found.size)
            except Corrupt as error:
                raise Corrupt(str(error), found.path) from error
            if result.ending is not Ending.MORE or result.groups:
                return result
            if length >= result.needed_bytes:
                return result  # the file is shorter than it said
            length = result.needed_bytes

    def _judge_tail(self, found: _Found, position: int, reason: str, start_lsn: int) -> None:
        """Nothing valid at `position` of a shard's last file: clean, torn or corrupt?"""
        dirty_end = max(_dirty_chunks(found.file, position, found.size), default=position)
        if dirty_end == position:
            return
        known_lsn = max(self._synced_lsn, start_lsn - 1)
        dropped = 0
        for group in self._groups_behind(found, position):
            dropped += 1
            first_lsn = group.entries[0][0] if group.entries else None
            if group.synced_bytes > position or (first_lsn and first_lsn <= known_lsn):
                raise Corrupt(
                    f"{reason or 'nothing'} at {position}, but the group at {group.position} "
                    "shows that it was synced",
                    found.path,
                )
        name = layout.torn_file(_name_of(found.header), position)
        kept = layout.join(self._wal_dir, layout.TORN, name)
        reason = reason or "zeros where a group begins"
        torn = TornRange(found.path, position, dirty_end - position, dropped, reason, kept)
        self._torn.append((found, torn))
        self.report.torn.append(torn)

    def _groups_behind(self, found: _Found, position: int) -> Iterator[Group]:
        """Every valid group behind a bad one, wherever it begins."""
        position += ALIGNMENT
        while found.size - position >= GROUP_HEADER_BYTES:
            length = min(_CHUNK_BYTES + GROUP_HEADER_BYTES, found.size - position)
            buffer = found.file.pread(length, position)
            offset = find_group(buffer, 0, len(buffer), position, found.size)
            if offset < 0:
                position += _CHUNK_BYTES
                continue
            result = self._scan_from(found, position + offset, one=True)
            yield from result.groups
            position = result.groups[-1].end if result.groups else position + offset + ALIGNMENT

    # -- the end ---------------------------------------------------------------------------

    def _check_synced_tail(self, files: list[_Found], last_lsn: int, start_lsn: int) -> None:
        """A header made when the shard was synced up to an lsn proves that its entries existed."""
        for found in files:
            if found.header.after_lsn > last_lsn and found.header.after_lsn >= start_lsn:
                raise Corrupt(
                    f"the shard was synced up to lsn {found.header.after_lsn}, but its entries "
                    f"end at lsn {last_lsn}",
                    found.path,
                )

    def _end_shard(
        self,
        key: tuple[int, int],
        files: list[_Found],
        chain: list[_Found],
        last_lsn: int,
        start_lsn: int,
    ) -> None:
        opening = Opening(0, 0, last_lsn)
        if chain:
            last = chain[-1]
            self._lasts.append(last)
            self.old_files.append(OldFile(last.path, last_lsn))
            opening = Opening(last.header.number, last.end, last_lsn)
        for found in files:
            if found.first is None and found.header.number > opening.previous_number:
                # Never used, or its first group is torn; nothing in it counts.
                self._judge_tail(found, FILE_HEADER_BYTES, "", start_lsn)
                self._unused.append(found.path)
        self.ends[key] = ShardEnd(self.ends[key].next_number, opening)
        self.report.last_lsn = max(self.report.last_lsn, last_lsn)

    def _make_durable(self) -> None:
        """Cut, rewrite, sync: a later power cut takes back nothing that recovery relied on."""
        if self.report.torn:
            torn_dir = layout.join(self._wal_dir, layout.TORN)
            self._fs.make_dir(torn_dir)
            for found, torn in self._torn:
                self._keep_aside(found, torn)
            self._fs.sync_dir(torn_dir)
            self._fs.sync_dir(self._wal_dir)
        for found, torn in self._torn:
            for start in range(0, torn.length, len(_ZEROS)):
                piece = _ZEROS[: min(len(_ZEROS), torn.length - start)]
                found.file.pwrite(piece, torn.offset + start)
            found.file.sync()
        for found in self._lasts:
            self._write_again(found)
        self._fs.sync_dir(self._wal_dir)
        for path in self._unused:
            self._fs.unlink(path)
            self.report.removed.append(path)
        if self._unused:
            self._fs.sync_dir(self._wal_dir)

    def _keep_aside(self, found: _Found, torn: TornRange) -> None:
        copy = self._fs.open(torn.kept, create=True)
        for start in range(0, torn.length, _CHUNK_BYTES):
            length = min(_CHUNK_BYTES, torn.length - start)
            copy.pwrite(found.file.pread(length, torn.offset + start), start)
        copy.sync()
        copy.close()

    def _write_again(self, found: _Found) -> None:
        """In place: after a failed sync the cache may hold what the disk does not."""
        position = found.synced_bytes
        while position < found.end:
            data = found.file.pread(min(_CHUNK_BYTES, found.end - position), position)
            assert data, "the groups were read a moment ago"
            found.file.pwrite(data, position)
            position += len(data)
            self.report.rewritten_bytes += len(data)
        found.file.sync()


def _name_of(header: FileHeader) -> layout.WalName:
    return layout.WalName(header.wal_set, header.shard, header.number)


def _dirty_chunks(file: File, position: int, size: int) -> Iterator[int]:
    """Position behind the last byte that is not zero, for each chunk that has one."""
    while position < size:
        data = file.pread(min(_CHUNK_BYTES, size - position), position)
        if not data:
            return
        if data.count(0) != len(data):
            yield position + len(data.rstrip(b"\0"))
        position += len(data)
