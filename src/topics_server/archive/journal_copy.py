"""Reads entries out of the journal of a running server.

The server continues to write; the caller ensures that every entry up to `last_lsn` is synced, and
that no file with an entry from `start_lsn` on is removed meanwhile. So each shard is read until an
entry after `last_lsn`, or until its groups end; if they end before the known synced end, that is
damage. Unlike `wal/journal/replay` this does not check tails, because tails grow meanwhile. Called
by `node/backups`.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Sequence
from operator import itemgetter

from topics_server.values.entries import Entry
from topics_server.values.errors import Corrupt, NotThere
from topics_server.values.storage_types import SyncedShard
from topics_server.wal.format.groups import FILE_HEADER_BYTES, Ending
from topics_server.wal.fs import Fs
from topics_server.wal.journal.file_chain import JournalFile, Key, needed_files, open_files

# A file before the start may be removed between the listing and its opening.
_TRIES = 5


def copied_entries(
    fs: Fs, wal_dir: str, start_lsn: int, last_lsn: int, synced: Sequence[SyncedShard]
) -> Iterator[tuple[int, Entry]]:
    """*Blocking.* Entries from `start_lsn` to `last_lsn` by lsn, of all shards.

    `synced`: the known synced ends of the open shards. Raises `Corrupt`, `StartRefused`.
    """
    shards = _opened(fs, wal_dir)
    try:
        known = {(each.wal_set, each.shard): each.synced_lsn for each in synced}
        for key in known.keys() - shards.keys():
            raise Corrupt(f"the files of wal set {key[0]}, shard {key[1]} are missing", wal_dir)
        streams = []
        for key, files in sorted(shards.items()):
            needed = needed_files(wal_dir, key, files, start_lsn)
            bound = known.get(key, 0)
            streams.append(_shard_entries(key, needed, start_lsn, last_lsn, bound))
        yield from heapq.merge(*streams, key=itemgetter(0))
    finally:
        for found in itertools.chain(*shards.values()):
            found.file.close()


def _opened(fs: Fs, wal_dir: str) -> dict[Key, list[JournalFile]]:
    for _ in range(_TRIES - 1):
        try:
            return open_files(fs, wal_dir, write=False)[0]
        except NotThere:
            continue
    return open_files(fs, wal_dir, write=False)[0]


def _shard_entries(
    key: Key, needed: list[JournalFile], start_lsn: int, last_lsn: int, synced_lsn: int
) -> Iterator[tuple[int, Entry]]:
    lsn = 0
    for index, found in enumerate(needed):
        position = FILE_HEADER_BYTES
        while True:
            result = found.scan(position)
            for group in result.groups:
                for lsn, entry in group.entries:
                    if lsn > last_lsn:
                        return
                    if lsn >= start_lsn:
                        yield lsn, entry
            position = result.position
            if result.ending is not Ending.MORE:
                break
        if index + 1 < len(needed) and position != needed[index + 1].opening.previous_end:
            raise Corrupt(
                f"{result.reason or 'nothing'} at {position}, but a later file holds groups",
                found.path,
            )
    if lsn < synced_lsn and synced_lsn >= start_lsn:
        raise Corrupt(
            f"the entries of wal set {key[0]}, shard {key[1]} end at lsn {lsn}, and it was synced "
            f"up to lsn {synced_lsn}",
            needed[-1].path if needed else None,
        )
