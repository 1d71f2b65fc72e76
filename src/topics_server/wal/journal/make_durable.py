"""Makes recovered data durable: cuts torn ends, syncs the rest.

After that, no power cut removes data that recovery relied on. Every step can be repeated after a
crash in the middle, with the same outcome. Called by `replay` after the last entry was read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final

import msgspec

from topics_server.wal import layout
from topics_server.wal.folders import make_durable_dirs
from topics_server.wal.format.end_marks import EndMark
from topics_server.wal.fs import Fs
from topics_server.wal.journal.end_mark_file import EndMarkFile
from topics_server.wal.journal.file_chain import CHUNK_BYTES, JournalFile, Key

_ZEROS: Final = bytes(CHUNK_BYTES)


class TornRange(msgspec.Struct, frozen=True):
    """Bytes of an unfinished write, cut from a file and saved in the file `kept`."""

    path: str
    offset: int
    length: int
    groups_dropped: int
    reason: str
    kept: str


def make_durable(
    fs: Fs,
    wal_dir: str,
    torn_files: Sequence[tuple[JournalFile, TornRange]],
    lasts: Sequence[JournalFile],
    unused: Sequence[str],
    end_marks: Mapping[Key, EndMark] = MappingProxyType({}),
) -> int:
    """Save and cut torn ends, rewrite, sync, remove; returns how many bytes were rewritten.

    `end_marks`: the mark that each shard gets; it is valid in every later boot too.
    """
    if torn_files:
        torn_dir = layout.join(wal_dir, layout.TORN)
        make_durable_dirs(fs, torn_dir)
        for found, torn in torn_files:
            _keep_aside(fs, found, torn)
        fs.sync_dir(torn_dir)
    for found, torn in torn_files:
        for start in range(0, torn.length, len(_ZEROS)):
            piece = _ZEROS[: min(len(_ZEROS), torn.length - start)]
            found.file.pwrite(piece, torn.offset + start)
        found.file.sync()
    rewritten_bytes = sum(_write_again(found) for found in lasts)
    for (wal_set, shard), mark in end_marks.items():
        # Write unchanged marks too: a mark may be in the page cache only, and the files that it no
        # longer names are removed below.
        EndMarkFile.open(fs, wal_dir, wal_set, shard, mark).close()
    # Sync the folder too: the names of existing files, and the removal of trimmed ones, must be
    # durable.
    fs.sync_dir(wal_dir)
    for path in unused:
        fs.unlink(path)
    if unused:
        fs.sync_dir(wal_dir)
    return rewritten_bytes


def _keep_aside(fs: Fs, found: JournalFile, torn: TornRange) -> None:
    copy = fs.open(torn.kept, create=True)
    for start in range(0, torn.length, CHUNK_BYTES):
        length = min(CHUNK_BYTES, torn.length - start)
        copy.pwrite(found.file.pread(length, torn.offset + start), start)
    copy.sync()
    copy.close()


def _write_again(found: JournalFile) -> int:
    """Rewrite in place: after a failed sync the cache may hold data that the disk lacks."""
    position = found.synced_bytes
    while position < found.end:
        data = found.file.pread(min(CHUNK_BYTES, found.end - position), position)
        assert data, "the groups were read a moment ago"
        found.file.pwrite(data, position)
        position += len(data)
    found.file.sync()
    return max(0, found.end - found.synced_bytes)
