"""Reads the journal at start: entries by lsn, torn ends, durability.

`file_chain` decides which files are read. When a group fails its check (FORMATS, Torn or corrupt):

- a later file holds a valid group -> this file was synced whole: *corrupt*;
- a readable group after it proves a sync, by its mark or by an lsn that the shard had synced
  according to the snapshot -> *corrupt*;
- a header fails although bytes follow it -> *corrupt*: headers are synced before any group;
- an anchor (an end mark, `FORMAT`, the snapshot) proves that more was written -> *corrupt*;
- otherwise no client got an answer for it -> *torn*: kept aside, zeroed, reported. Groups after it
  belong to the same unsynced tail: pages of one sync may reach the disk out of order.

A torn shard, or one that ends before its end mark without proof of damage, *may have lost* entries
that were acknowledged as written, in any boot: seqs of its topics must not be used again.

After the last entry, `entries` makes the found files durable: it cuts torn tails, rewrites in place
the groups that are not known to be synced, syncs them and the directory, and removes unused files.
Only then may a `Journal` be opened. Called by the server's start and by `dump`.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator, Sequence
from operator import itemgetter
from typing import Final

import msgspec

from topics_server.values.entries import Entry
from topics_server.values.errors import Corrupt
from topics_server.wal import layout
from topics_server.wal.format.end_marks import EndMark
from topics_server.wal.format.frames import Opening
from topics_server.wal.format.groups import FILE_HEADER_BYTES, Ending, Group
from topics_server.wal.fs import Fs
from topics_server.wal.journal.anchors import (
    NO_ANCHORS,
    Anchors,
    is_excused,
    judge_end,
    judge_files,
    read_marks,
)
from topics_server.wal.journal.file_chain import (
    JournalFile,
    Key,
    check_sets,
    needed_files,
    open_files,
)
from topics_server.wal.journal.make_durable import TornRange, make_durable


class ReplayReport(msgspec.Struct):
    """The findings, for the log at start and for `dump`."""

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
    """The end of a shard of a wal set: the number and the opening of the shard's next file."""

    next_number: int
    opening: Opening


class OldFile(msgspec.Struct, frozen=True):
    """A file that stays until the journal is trimmed; its entries have lsns <= `last_lsn`."""

    path: str
    last_lsn: int
    key: Key
    bytes: int = 0


class JournalReplay:
    """One reading of the journal in `wal_dir`.

    `wal_sets` (from `FORMAT`): (set, shards, first lsn) of the sets whose files must exist.
    `synced_lsn`: every entry up to it is known to have been synced (the snapshot's `last_lsn`),
    unless `anchors.shards` has another value for its shard. `on_loss` is called before anything is
    changed, if a shard may have lost entries in this boot; an exception that it raises stops the
    replay.
    """

    def __init__(
        self,
        fs: Fs,
        wal_dir: str,
        *,
        wal_sets: Sequence[tuple[int, int, int]] = (),
        synced_lsn: int = 0,
        read_only: bool = False,
        anchors: Anchors = NO_ANCHORS,
        on_loss: Callable[[], None] | None = None,
    ) -> None:
        self._fs: Final = fs
        self._wal_dir: Final = wal_dir
        self._wal_sets: Final = sorted(wal_sets)
        self._synced_lsn: Final = synced_lsn
        self._read_only: Final = read_only
        self._anchors: Final = anchors
        self._on_loss: Final = on_loss
        self._of_snapshot: Final = {(s.wal_set, s.shard): s for s in anchors.shards}
        self._marks: dict[Key, EndMark] = {}
        self._final_marks: dict[Key, EndMark] = {}
        self._lossy: set[Key] = set()
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
        """The share of the bytes that was read, 0.0 to 1.0."""
        return min(1.0, self._bytes_done / self._bytes_total)

    def may_have_lost(self, topic_id: int) -> bool:
        """Whether acknowledged entries of the topic may be lost although the boot is the same."""
        if not self._lossy:
            return False
        counts = {wal_set: count for wal_set, count, _ in self._wal_sets}
        return any(
            wal_set not in counts or topic_id % counts[wal_set] == shard
            for wal_set, shard in self._lossy
        )

    def entries(self, start_lsn: int) -> Iterator[tuple[int, Entry]]:
        """*Blocking.* Entries with lsn >= start, merged by lsn; see the module's text.

        Raises `StartRefused`, `Corrupt`; then nothing was changed on disk.
        """
        assert not self.is_finished, "a journal is read once"
        shards, unfinished = open_files(self._fs, self._wal_dir, write=not self._read_only)
        self._note_numbers(shards, unfinished)
        self._marks = self._read_marks(shards, start_lsn)
        streams = []
        for key, files in sorted(shards.items()):
            start = self._start_of(key, start_lsn)
            needed = needed_files(self._wal_dir, key, files, start, self._marks.get(key))
            self._note_old_files(files)
            self._bytes_total += sum(found.size for found in needed)
            streams.append(self._shard_entries(key, files, needed, start))
        try:
            for lsn, entry in heapq.merge(*streams, key=itemgetter(0)):
                self.report.entries += 1
                yield lsn, entry
            if not self._read_only:
                self._keep_one_file(shards)
                if self._lossy and self._anchors.same_boot and self._on_loss is not None:
                    self._on_loss()
                self.report.rewritten_bytes = make_durable(
                    self._fs,
                    self._wal_dir,
                    self._torn,
                    self._lasts,
                    self._unused,
                    self._final_marks,
                )
                self.report.removed += self._unused
        finally:
            for found in itertools.chain(*shards.values()):
                found.file.close()
        self._bytes_done = self._bytes_total
        self.is_finished = True

    # -- which files -----------------------------------------------------------------------

    def _read_marks(
        self, shards: dict[Key, list[JournalFile]], start_lsn: int
    ) -> dict[Key, EndMark]:
        """Read the end marks and compare the files. Raises `Corrupt`, `StartRefused`."""
        marks = read_marks(self._fs, self._wal_dir, self._wal_sets, self._anchors, start_lsn)
        excused: set[Key] = set()
        for key, mark in marks.items():
            if is_excused(mark, self._wal_sets, key, start_lsn):
                excused.add(key)
            else:
                judge_files(self._wal_dir, key, shards.get(key, []), mark)
        check_sets(self._wal_dir, self._wal_sets, shards.keys() | excused, start_lsn)
        return {key: mark for key, mark in marks.items() if key not in excused}

    def _start_of(self, key: Key, start_lsn: int) -> int:
        """The first lsn that replay needs of a shard."""
        of_snapshot = self._of_snapshot.get(key)
        return start_lsn if of_snapshot is None else min(start_lsn, of_snapshot.start_lsn)

    def _note_numbers(
        self, shards: dict[Key, list[JournalFile]], unfinished: list[layout.WalName]
    ) -> None:
        """Choose each shard's next file number above all found ones, removed files included."""
        names = unfinished + [found.name for found in itertools.chain(*shards.values())]
        for name in sorted(names):
            self.ends[name.wal_set, name.shard] = ShardEnd(name.number + 1, Opening(0, 0, 0))
        self._unused += [layout.join(self._wal_dir, layout.wal_file(name)) for name in unfinished]
        self.report.files = len(names)

    def _note_old_files(self, files: list[JournalFile]) -> None:
        used = [found for found in files if found.first is not None]
        for found, follower in itertools.pairwise(used):
            last_lsn = follower.opening.previous_lsn
            self.old_files.append(OldFile(found.path, last_lsn, found.key, found.size))

    def _keep_one_file(self, shards: dict[Key, list[JournalFile]]) -> None:
        """Keep one file of every shard: a shard without any file counts as missing after a crash.

        The kept file's header is synced.
        """
        for files in shards.values():
            if all(found.path in self._unused for found in files):
                self._unused.remove(files[-1].path)
                files[-1].synced_bytes = 0
                self._lasts.append(files[-1])

    # -- entries ---------------------------------------------------------------------------

    def _shard_entries(
        self, key: Key, files: list[JournalFile], needed: list[JournalFile], start_lsn: int
    ) -> Iterator[tuple[int, Entry]]:
        last_lsn = needed[0].opening.previous_lsn if needed else 0
        for index, found in enumerate(needed):
            self.report.files_read += 1
            follower = needed[index + 1] if index + 1 < len(needed) else None
            for group in self._groups(found, follower, start_lsn):
                self.report.groups += 1
                self.report.bytes += group.length
                if group.passed is not None:
                    _ascending(group.passed[0], last_lsn, found)
                    last_lsn = group.passed[1]
                for lsn, entry in group.entries:
                    last_lsn = _ascending(lsn, last_lsn, found)
                    if lsn >= start_lsn:
                        yield lsn, entry
            self._bytes_done += found.size
        if not needed:
            last_lsn = max(found.header.after_lsn for found in files)
        self._check_synced_tail(key, files, last_lsn, start_lsn)
        self._end_shard(key, files, needed, last_lsn, start_lsn)

    def _groups(
        self, found: JournalFile, follower: JournalFile | None, start_lsn: int
    ) -> Iterator[Group]:
        """Yield the groups of one file, then check the file's end."""
        position = FILE_HEADER_BYTES
        while True:
            result = found.scan(position, from_lsn=start_lsn)
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
        """Judge the invalid bytes at `position` of a shard's last file: clean, torn or corrupt."""
        mark = self._marks.get(found.key)
        is_live = mark is not None and mark.number == found.header.number
        if (
            is_live
            and mark is not None
            and judge_end(found, position, mark, same_boot=self._anchors.same_boot)
        ):
            self._lossy.add(found.key)
        dirty_end = found.dirty_end(position)
        if dirty_end == position:
            return
        of_snapshot = self._of_snapshot.get(found.key)
        synced_lsn = self._synced_lsn if of_snapshot is None else of_snapshot.synced_lsn
        known_lsn = max(synced_lsn, start_lsn - 1)
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
        if is_live or mark is None:
            self._lossy.add(found.key)
        self._torn.append((found, torn))
        self.report.torn.append(torn)

    # -- the end ---------------------------------------------------------------------------

    def _check_synced_tail(
        self, key: Key, files: list[JournalFile], last_lsn: int, start_lsn: int
    ) -> None:
        """Raise `Corrupt` if a proof shows that the shard had more entries than were read.

        A header, an end mark or a snapshot that was made after a sync is such a proof.
        """
        mark, of_snapshot = self._marks.get(key), self._of_snapshot.get(key)
        path, synced_lsn = max((found.header.after_lsn, found.path) for found in files)[::-1]
        if mark is not None:
            synced_lsn = max(synced_lsn, mark.synced_lsn)
            # Name the file in use; before it has a group, name the file before it.
            live = next(found for found in files if found.header.number == mark.number)
            used = [found.path for found in files if found.first is not None]
            is_begun = live.first is not None or mark.synced_end > FILE_HEADER_BYTES
            path = used[-1] if used and not is_begun else live.path
        if of_snapshot is not None:
            synced_lsn = max(synced_lsn, of_snapshot.synced_lsn)
        if synced_lsn > last_lsn and synced_lsn >= start_lsn:
            raise Corrupt(
                f"the shard was synced up to lsn {synced_lsn}, but its entries end at lsn "
                f"{last_lsn}",
                path,
            )

    def _end_shard(
        self,
        key: Key,
        files: list[JournalFile],
        needed: list[JournalFile],
        last_lsn: int,
        start_lsn: int,
    ) -> None:
        opening = Opening(0, 0, last_lsn)
        mark = self._marks.get(key)
        if mark is not None:
            live = next(found for found in files if found.header.number == mark.number)
            self._final_marks[key] = msgspec.structs.replace(
                mark,
                written_end=live.end,
                synced_end=live.end,
                written_lsn=last_lsn,
                synced_lsn=last_lsn,
                is_syncing=False,
            )
        if needed:
            last = needed[-1]
            self._lasts.append(last)
            self.old_files.append(OldFile(last.path, last_lsn, key, last.size))
            opening = Opening(last.header.number, last.end, last_lsn)
        for found in files:
            if found.first is None and found.header.number > opening.previous_number:
                # The file was never used, or its first group is torn: nothing in it counts.
                self._judge_tail(found, FILE_HEADER_BYTES, "", start_lsn)
                if mark is not None and found.header.number == mark.number:
                    # The file stays until the end mark names another file.
                    self.old_files.append(OldFile(found.path, last_lsn, key, found.size))
                else:
                    self._unused.append(found.path)
            elif found.first is None:
                # The file ends before the start of replay: it is not checked, and is removed with
                # its neighbours.
                self.old_files.append(OldFile(found.path, last_lsn, key, found.size))
        self.ends[key] = ShardEnd(self.ends[key].next_number, opening)
        self.report.last_lsn = max(self.report.last_lsn, last_lsn)


def _ascending(lsn: int, last_lsn: int, found: JournalFile) -> int:
    """The lsn of the next entry of a shard. Raises `Corrupt` if it is not above the last one."""
    if lsn <= last_lsn:
        raise Corrupt(f"lsn {lsn} follows {last_lsn}", found.path)
    return lsn
