"""Writes entries into the journal of a restored store.

The store has one wal set of one shard, with its end mark: the same files as those of a server that
wrote and synced these entries. Called by `restore`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Final

from topics_server.values.entries import Entry
from topics_server.values.limits import MIB
from topics_server.wal.format.frames import Opening, encode_entry
from topics_server.wal.fs import Fs
from topics_server.wal.journal.group_commit import QueuedFrame, take_group
from topics_server.wal.journal.journal import new_file_id
from topics_server.wal.journal.wal_file import Sizes, WalFile

WAL_SET: Final = 1
SHARD_COUNT: Final = 1
_GROUP_BYTES: Final = MIB


def write_journal(
    fs: Fs, wal_dir: str, run: int, entries: Iterable[tuple[int, Entry]], sizes: Sizes
) -> int:
    """*Blocking.* Write and sync a journal with these entries; returns how many there were."""
    tail = WalFile(
        fs,
        wal_dir,
        WAL_SET,
        0,
        number=1,
        opening=Opening(0, 0, 0),
        new_file_id=new_file_id,
        sizes=sizes,
        run=run,
    )
    count = 0
    try:
        queue: deque[QueuedFrame] = deque()
        queued_bytes = 0
        for lsn, entry in entries:
            buffers = encode_entry(lsn, entry)
            length = sum(map(len, buffers))
            queue.append(QueuedFrame(lsn, buffers, length, sync=False, urgent=False))
            queued_bytes += length
            count += 1
            if queued_bytes >= _GROUP_BYTES:
                _write(tail, queue)
                queued_bytes = 0
        _write(tail, queue)
        tail.note_syncing()
        tail.sync()
        tail.note_synced()
        tail.finish()
    finally:
        tail.close()
    fs.sync_dir(wal_dir)
    return count


def _write(tail: WalFile, queue: deque[QueuedFrame]) -> None:
    while queue:
        group = take_group(queue)
        tail.make_room(group.frames_bytes, urgent=False)
        tail.write(group)
