"""End marks for `topics repair`: reads intact ones, writes new ones.

A mark that is missing, unreadable or contradicts its files proves nothing: then only the files show
the end of the shard. The repair writes new marks last, after it has mended the files; a crash
before that leaves marks that contradict the files, and the next repair finds them. Called by
`repair`.
"""

from __future__ import annotations

from typing import Final

import msgspec

from topics_server.values.errors import Corrupt
from topics_server.wal.directory import FormatMark
from topics_server.wal.format.end_marks import EndMark
from topics_server.wal.format.groups import FILE_HEADER_BYTES
from topics_server.wal.fs import Fs
from topics_server.wal.journal.anchors import Anchors, is_excused, is_needed, judge_files
from topics_server.wal.journal.end_mark_file import EndMarkFile, end_mark_path, read_end_mark
from topics_server.wal.journal.file_chain import JournalFile, Key, open_files


class KnownEnd(msgspec.Struct, frozen=True):
    """The facts of an end mark: a file's groups end at `end`, the shard's entries at `lsn`."""

    path: str
    number: int
    end: int
    lsn: int


NOTHING_KNOWN: Final = KnownEnd("", 0, 0, 0)


def known_ends(
    fs: Fs,
    wal_dir: str,
    format_mark: FormatMark,
    anchors: Anchors,
    shards: dict[Key, list[JournalFile]],
    start_lsn: int,
) -> tuple[dict[Key, KnownEnd], list[str]]:
    """The facts that end marks prove, and the paths of marks that must be rewritten.

    Raises `Corrupt` for a missing file that a mark names: nothing can replace it.
    """
    ends: dict[Key, KnownEnd] = {}
    unfit: list[str] = []
    sets = [(s.wal_set, s.shard_count, s.first_lsn) for s in format_mark.wal_sets]
    for index, (wal_set, shard_count, _) in enumerate(sets):
        if wal_set not in anchors.marked_sets or not is_needed(sets, index, start_lsn):
            continue
        for key in [(wal_set, shard) for shard in range(shard_count)]:
            files = shards.get(key, [])
            try:
                mark = read_end_mark(fs, wal_dir, *key)
            except Corrupt:
                unfit.append(end_mark_path(wal_dir, *key))
                continue
            if is_excused(mark, sets, key, start_lsn):
                continue
            is_older = index + 1 == len(sets) and mark.run < anchors.journal_run
            if is_older or not _fits(wal_dir, key, files, mark):
                unfit.append(end_mark_path(wal_dir, *key))
                continue
            ends[key] = _known_end(end_mark_path(wal_dir, *key), mark, anchors)
    return ends, unfit


def _fits(wal_dir: str, key: Key, files: list[JournalFile], mark: EndMark) -> bool:
    is_there = any(found.header.number == mark.number for found in files)
    try:
        judge_files(wal_dir, key, files, mark)
    except Corrupt:
        if not is_there:
            raise
        return False
    return True


def _known_end(path: str, mark: EndMark, anchors: Anchors) -> KnownEnd:
    if anchors.same_boot and not mark.is_syncing:
        return KnownEnd(path, mark.number, mark.written_end, mark.written_lsn)
    return KnownEnd(path, mark.number, mark.synced_end, mark.synced_lsn)


def mark_ends(fs: Fs, wal_dir: str, format_mark: FormatMark) -> None:
    """*Blocking.* Write every end mark for the current files, durably."""
    marked = {s.wal_set for s in format_mark.wal_sets if s.has_marks}
    shards, _ = open_files(fs, wal_dir, write=True, is_whole=False)
    try:
        for key, files in sorted(shards.items()):
            if key[0] in marked:
                last = next((each for each in reversed(files) if each.first), files[-1])
                last.file.sync()
                EndMarkFile.open(fs, wal_dir, *key, _mark_of(last, format_mark.run)).close()
    finally:
        for files in shards.values():
            for each in files:
                each.file.close()


def _mark_of(last: JournalFile, run: int) -> EndMark:
    """The mark of a shard whose last file is `last`, all of it synced."""
    groups = last.every_group()
    end = groups[-1].end if groups else FILE_HEADER_BYTES
    opening = groups[0].opening if groups else None
    after_lsn = last.header.after_lsn if opening is None else opening.previous_lsn
    lsn = max((lsn for group in groups for lsn, _ in group.entries), default=after_lsn)
    return EndMark(run, last.header.number, last.header.file_id, end, end, lsn, lsn)
