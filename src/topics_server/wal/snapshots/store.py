"""Published snapshots: two are kept, and the newest valid one is used.

The newest is the one with the highest number, unless a lower number turns out to be newer
(`age_of`): then the file with the higher number is an older copy that was put in its place.

Owns `snapshots/`. A snapshot is written to a temporary file in pieces (the interpreter's lock is
free between them), synced and renamed, and its directory is synced. Only then are older snapshots
removed. Invariant: both kept snapshots are valid: one was loaded at start or written since, and the
other was written after it. Used by one thread at a time; the loop never calls it.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from topics_server.runtime.metrics import log
from topics_server.values.errors import Corrupt, StartRefused, StorageError
from topics_server.values.limits import SNAPSHOTS_KEPT
from topics_server.values.storage_types import (
    JOURNAL_PART,
    EncodedPart,
    JournalPart,
    ReplayStart,
    SnapshotImage,
)
from topics_server.wal import layout
from topics_server.wal.atomic_write import remove_quietly, rename_temp
from topics_server.wal.folders import make_durable_dirs
from topics_server.wal.format.snapshot import (
    HEADER_BYTES,
    SnapshotHeader,
    check_table,
    decode_header,
    decode_journal,
    decode_parts,
    encode_header,
    encode_journal,
    encode_pieces,
    spans,
)
from topics_server.wal.fs import File, Fs


class PublishedSnapshots:
    """See the module."""

    def __init__(self, fs: Fs, data_dir: str) -> None:
        self._fs: Final = fs
        self._folder: Final = layout.join(data_dir, layout.SNAPSHOTS)
        # Number and start of valid snapshots, ascending; `None` before the folder was read.
        self._kept: list[tuple[int, ReplayStart]] | None = None
        self._is_folder_safe = False
        # Whether a snapshot newer than the result of `newest` is unreadable or an older copy.
        self.found_damaged = False
        # The length of the newest snapshot, as an estimate for the next one.
        self.newest_bytes = 0

    def newest(self) -> SnapshotImage | None:
        """See `ports.Snapshots.newest`. Raises `StartRefused` for a newer format."""
        names = self._fs.list_dir(self._folder)
        if names:
            # A power cut must not undo the rename that recovery relies on.
            self._fs.sync_dir(self._folder)
        for name in filter(layout.is_temp, names):
            self._fs.unlink(layout.join(self._folder, name))
        self._kept = []
        numbers = sorted(self._numbers(names), reverse=True)
        for index, number in enumerate(numbers):
            image = self._valid(number)
            if image is None:
                # Keep it until the next snapshot is written: another start before that must find it
                # too.
                self.found_damaged = True
                continue
            for lower in numbers[index + 1 :]:
                newer = self._newer(lower, image)
                if newer is not None:
                    log.error(
                        "%s is an older copy: %s is newer", self._path(number), self._path(lower)
                    )
                    self.found_damaged = True
                    number, image = lower, newer
            self._kept = [(number, image.replay_start)]
            self.newest_bytes = self._fs.file_size(self._path(number))
            return image
        return None

    def _valid(self, number: int) -> SnapshotImage | None:
        try:
            return load_snapshot(self._fs, self._path(number))
        except Corrupt:
            return None

    def _newer(self, number: int, image: SnapshotImage) -> SnapshotImage | None:
        """The snapshot of this number if it is valid and newer than `image`; else None.

        Reads only the header if the header shows that it is older. Returns None if it is
        unreadable.
        """
        path = self._path(number)
        try:
            file = self._fs.open(path)
            try:
                header = decode_header(file.pread(HEADER_BYTES, 0))
            finally:
                file.close()
            if header.last_lsn <= image.last_lsn:
                return None
            found = load_snapshot(self._fs, path)
        except (StorageError, StartRefused):
            return None
        return found if age_of(found) > age_of(image) else None

    def write(self, image: SnapshotImage) -> ReplayStart:
        """See `ports.Snapshots.write`."""
        assert image.start_lsn <= image.last_lsn + 1
        if self._kept is None:
            self.newest()
        assert self._kept is not None
        assert all(start.lsn <= image.start_lsn for _, start in self._kept)
        self._make_folder()
        names = self._fs.list_dir(self._folder)
        number = max(self._numbers(names), default=0) + 1
        path = self._path(number)
        if layout.temp(layout.snapshot_file(number)) in names:
            # The server may be unable to open this file, but can still remove it.
            remove_quietly(self._fs, layout.temp(path))
        try:
            self._write_temp(layout.temp(path), image)
        except StorageError:
            remove_quietly(self._fs, layout.temp(path))
            raise
        rename_temp(self._fs, path)
        self._fs.sync_dir(self._folder)
        self._kept = [*self._kept, (number, image.replay_start)][-SNAPSHOTS_KEPT:]
        kept = {number for number, _ in self._kept}
        for old in self._numbers(names):
            if old not in kept:
                remove_quietly(self._fs, self._path(old))
        return self._kept[0][1] if len(self._kept) == SNAPSHOTS_KEPT else ReplayStart()

    def _write_temp(self, path: str, image: SnapshotImage) -> None:
        file = self._fs.open(path, create=True)
        try:
            offset, tables = HEADER_BYTES, []
            parts = [(JOURNAL_PART, encode_journal(image.run, image.shards)), *image.parts]
            for bodies, rows in encode_pieces(parts):
                file.pwritev(bodies, offset)
                offset += int(rows["length"].sum())
                tables.append(rows)
            table = np.concatenate(tables).tobytes() if tables else b""
            file.pwrite(table, offset)
            header = SnapshotHeader(
                start_lsn=image.start_lsn,
                last_lsn=image.last_lsn,
                next_topic_id=image.next_topic_id,
                part_count=len(parts),
                table_offset=offset,
            )
            file.pwrite(encode_header(header, table), 0)
            file.sync()
            self.newest_bytes = offset + len(table)
        finally:
            file.close()

    def _make_folder(self) -> None:
        if not self._is_folder_safe:
            make_durable_dirs(self._fs, self._folder)
            self._is_folder_safe = True

    def _path(self, number: int) -> str:
        return layout.join(self._folder, layout.snapshot_file(number))

    def _numbers(self, names: list[str]) -> list[int]:
        found = map(layout.parse_snapshot_file, names)
        return [number for number in found if number is not None]


def age_of(image: SnapshotImage) -> tuple[int, int]:
    """The key by which snapshots ascend in age: the run, then the last lsn.

    The lsn alone is not enough: after a start without the newest snapshot, lsns without a frame are
    used again.
    """
    return image.run, image.last_lsn


def load_snapshot(fs: Fs, path: str) -> SnapshotImage:
    """Load a snapshot and verify every checksum. Raises `Corrupt`, `StartRefused` (newer)."""
    file = fs.open(path)
    try:
        return _load(file)
    except (Corrupt, StartRefused) as error:
        raise type(error)(str(error), path) from None
    finally:
        file.close()


def _load(file: File) -> SnapshotImage:
    encoded = file.pread(HEADER_BYTES, 0)
    header = decode_header(encoded)
    if header.file_bytes != file.size():
        raise Corrupt("the size of the snapshot does not match its header")
    table = check_table(encoded, file.pread(header.table_bytes, header.table_offset))
    parts: list[tuple[int, EncodedPart]] = []
    for first, end, offset, length in spans(table):
        parts += decode_parts(file.pread(length, offset), table[first:end])
    assert len(parts) == header.part_count
    journal = JournalPart(1, 0, ())
    if parts and parts[0][0] == JOURNAL_PART:
        journal = decode_journal(parts[0][1])
        del parts[0]
    return SnapshotImage(
        start_lsn=header.start_lsn,
        last_lsn=header.last_lsn,
        next_topic_id=header.next_topic_id,
        parts=parts,
        run=journal.run,
        shards=journal.shards,
    )
