"""Backs up the data directory of a stopped server.

Takes the locks of a server, changes nothing but `BACKUP_FOLDER`, and reads the journal as a start
would. It refuses a directory that a start would refuse. Called by the command line.
"""

from __future__ import annotations

from collections.abc import Iterator

from topics_server.archive.backup import BackupWriter
from topics_server.archive.format import BackupFacts
from topics_server.runtime.clock import SystemClock
from topics_server.values.entries import Entry
from topics_server.values.errors import StartRefused
from topics_server.wal.directory import Directory, lacks_heads, read_format
from topics_server.wal.fs import Fs
from topics_server.wal.restored import read_restored
from topics_server.wal.snapshots.store import PublishedSnapshots
from topics_server.wal.tools.verify import open_journal


def back_up(fs: Fs, data_dir: str, cold_dir: str | None, folder: str) -> BackupFacts:
    """*Blocking.* Make a backup of a directory that no server uses.

    Raises `StartRefused`, `Corrupt`.
    """
    found = read_format(fs, data_dir)
    if found is None:
        raise StartRefused("not a data directory of this server (no FORMAT)", data_dir)
    if not found.store_id:
        raise StartRefused("an older version wrote it, without an id: start it once", data_dir)
    directory = Directory.open(fs, data_dir, boot_id="")
    try:
        return _back_up(fs, directory, cold_dir, folder)
    finally:
        directory.close()


def _back_up(fs: Fs, directory: Directory, cold_dir: str | None, folder: str) -> BackupFacts:
    root, mark = directory.root, directory.mark
    snapshots = PublishedSnapshots(fs, root)
    image = snapshots.newest()
    if snapshots.found_damaged or lacks_heads(mark, image):
        raise StartRefused("its newest snapshot is missing or damaged: start the server once", root)
    if read_restored(fs, root) is not None:
        raise StartRefused("it was restored and never started: its backup is there already", root)
    start_lsn = 1 if image is None else image.start_lsn
    last_lsn = 0 if image is None else image.last_lsn
    if image is not None and any(s.start_lsn < start_lsn for s in image.shards):
        raise StartRefused("a shard could not be written in its last run: start it once", root)
    writer = BackupWriter.open(fs, folder, root, cold_dir, directory.store_id)
    try:
        writer.put_snapshot()
        for topic_id in writer.topic_ids():
            writer.put_topic(topic_id)
        writer.end_topics()
        replay = open_journal(fs, root, mark, image, image)

        def noted() -> Iterator[tuple[int, Entry]]:
            nonlocal last_lsn
            for lsn, entry in replay.entries(start_lsn):
                last_lsn = max(last_lsn, lsn)
                yield lsn, entry

        writer.put_journal(noted())
        return writer.finish(last_lsn, mark.run, SystemClock().now_ms())
    finally:
        writer.close()
