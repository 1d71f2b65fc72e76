"""The journal as found at start: its entries by lsn, what of it is torn, and making it durable.

Which files are read is for `chain` to say. Where a group fails its check (DESIGN §4, Torn or
corrupt):

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
from typing import Final

import msgspec

from topics_server.entries import Entry
from topics_server.errors import Corrupt
from topics_server.wal import layout
from topics_server.wal.chain import JournalFile, Key, check_sets, needed_chain, open_files
from topics_server.wal.frames import Opening
from topics_server.wal.fs import Fs
from topics_server.wal.groups import FILE_HEADER_BYTES, Ending, Group
from topics_server.wal.repair import TornRange, make_durable


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
        self._torn: list[tuple[JournalFile, TornRange]] = []
        self._lasts: list[JournalFile] = []
        self.is_finished = False
        self.report: Final = ReplayReport()
        self.ends: Final[dict[Key, ShardEnd]] = {}
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
        shards, unfinished = open_files(self._fs, self._wal_dir, write=not self._read_only)
        self._note_numbers(shards, unfinished)
        check_sets(self._wal_dir, self._wal_sets, set(shards), start_lsn)
        streams = []
        for key, files in sorted(shards.items()):
            chain = needed_chain(self._wal_dir, key, files, start_lsn)
            self._note_old_files(files)
            self._bytes_total += sum(found.size for found in chain)
            streams.append(self._shard_entries(key, files, chain, start_lsn))
        try:
            for lsn, entry in heapq.merge(*streams, key=itemgetter(0)):
                self.report.entries += 1
                yield lsn, entry
            if not self._read_only:
                self._keep_one_file(shards)
                self.report.rewritten_bytes = make_durable(
                    self._fs, self._wal_dir, self._torn, self._lasts, self._unused
                )
                self.report.removed += self._unused
        finally:
            for found in itertools.chain(*shards.values()):
                found.file.close()
        self._bytes_done = self._bytes_total
        self.is_finished = True

    # -- which files -----------------------------------------------------------------------

    def _note_numbers(
        self, shards: dict[Key, list[JournalFile]], unfinished: list[layout.WalName]
    ) -> None:
        """No number is given twice, not even that of a file that is about to be removed."""
        names = unfinished + [found.name for found in itertools.chain(*shards.values())]
        for name in sorted(names):
            self.ends[name.wal_set, name.shard] = ShardEnd(name.number + 1, Opening(0, 0, 0))
        self._unused += [layout.join(self._wal_dir, layout.wal_file(name)) for name in unfinished]
        self.report.files = len(names)

    def _note_old_files(self, files: list[JournalFile]) -> None:
        used = [found for found in files if found.first is not None]
        for found, follower in itertools.pairwise(used):
            self.old_files.append(OldFile(found.path, follower.opening.previous_lsn))

    def _keep_one_file(self, shards: dict[Key, list[JournalFile]]) -> None:
        """A shard without any file counts as missing: a crash must not find it so.

        Nor may it find the one that is kept as it was before its header was synced.
        """
        for files in shards.values():
            if all(found.path in self._unused for found in files):
                self._unused.remove(files[-1].path)
                files[-1].synced_bytes = 0
                self._lasts.append(files[-1])

    # -- entries ---------------------------------------------------------------------------

    def _shard_entries(
        self, key: Key, files: list[JournalFile], chain: list[JournalFile], start_lsn: int
    ) -> Iterator[tuple[int, Entry]]:
        last_lsn = 0
        for index, found in enumerate(chain):
            self.report.files_read += 1
            follower = chain[index + 1] if index + 1 < len(chain) else None
            for group in self._groups(found, follower, start_lsn):
                self.report.groups += 1
                self.report.bytes += group.length
                for lsn, entry in group.entries:
                    if lsn <= last_lsn:
                        raise Corrupt(f"lsn {lsn} follows {last_lsn}", found.path)
                    last_lsn = lsn
                    if lsn >= start_lsn:
                        yield lsn, entry
            self._bytes_done += found.size
        if not chain:
            last_lsn = max(found.header.after_lsn for found in files)
        self._check_synced_tail(files, last_lsn, start_lsn)
        self._end_shard(key, files, chain, last_lsn, start_lsn)

    def _groups(
        self, found: JournalFile, follower: JournalFile | None, start_lsn: int
    ) -> Iterator[Group]:
        """Groups of one file; judges where they end."""
        position = FILE_HEADER_BYTES
        while True:
            result = found.scan(position)
            for group in result.groups:
                found.end = group.end
                found.synced_bytes = max(found.synced_bytes, group.synced_bytes)
                yield group
            position = result.position
            if result.ending is not Ending.MORE:
                break
            assert result.groups, "a scan reads on until it has a group whole"
        if follower is not None:
            expected = follower.opening.previous_end
            if result.ending is Ending.FAILED or position != expected:
                raise Corrupt(
                    f"{result.reason or 'nothing'} at {position}, but the file was synced up to "
                    f"{expected}: a later file holds groups",
                    found.path,
                )
        else:
            self._judge_tail(found, position, result.reason, start_lsn)

    def _judge_tail(self, found: JournalFile, position: int, reason: str, start_lsn: int) -> None:
        """Nothing valid at `position` of a shard's last file: clean, torn or corrupt?"""
        dirty_end = found.dirty_end(position)
        if dirty_end == position:
            return
        known_lsn = max(self._synced_lsn, start_lsn - 1)
        dropped = 0
        for group in found.groups_behind(position):
            dropped += 1
            first_lsn = group.entries[0][0] if group.entries else None
            if group.synced_bytes > position or (first_lsn and first_lsn <= known_lsn):
                raise Corrupt(
                    f"{reason or 'nothing'} at {position}, but the group at {group.position} "
                    "shows that it was synced",
                    found.path,
                )
        name = layout.torn_file(found.name, position)
        kept = layout.join(self._wal_dir, layout.TORN, name)
        reason = reason or "zeros where a group begins"
        torn = TornRange(found.path, position, dirty_end - position, dropped, reason, kept)
        self._torn.append((found, torn))
        self.report.torn.append(torn)

    # -- the end ---------------------------------------------------------------------------

    def _check_synced_tail(self, files: list[JournalFile], last_lsn: int, start_lsn: int) -> None:
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
        key: Key,
        files: list[JournalFile],
        chain: list[JournalFile],
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
            elif found.first is None:
                # Below what was read: not judged, removed when its neighbours are.
                self.old_files.append(OldFile(found.path, last_lsn))
        self.ends[key] = ShardEnd(self.ends[key].next_number, opening)
        self.report.last_lsn = max(self.report.last_lsn, last_lsn)
