"""Reads and writes a shard's end mark file.

The file is written under a temporary name and renamed, and never emptied afterwards. A failed write
is repeated in the same slot, so the newest valid slots always stay. Called by `wal_file` and
`make_durable` (write), and by `anchors` and the offline tools.
"""

from __future__ import annotations

from typing import Final

from topics_server.values.errors import Corrupt, StartRefused
from topics_server.wal import layout
from topics_server.wal.format.end_marks import (
    BEGINNINGS,
    FILE_BYTES,
    NOTES,
    SLOT_DISTANCE,
    EndMark,
    decode,
    encode_slot,
)
from topics_server.wal.fs import File, Fs


def end_mark_path(wal_dir: str, wal_set: int, shard: int) -> str:
    """Path of a shard's end mark."""
    return layout.join(wal_dir, layout.end_mark(wal_set, shard))


def read_end_mark(fs: Fs, wal_dir: str, wal_set: int, shard: int) -> EndMark:
    """*Blocking.* The end mark of a shard that must have one.

    Raises `Corrupt` if the file is missing or has no valid slot, `StorageError` if it cannot be
    read, `StartRefused` for a newer version.
    """
    path = end_mark_path(wal_dir, wal_set, shard)
    if not fs.exists(path):
        raise Corrupt(
            "the end mark of this shard is missing; `topics repair` writes a new one", path
        )
    file = fs.open(path)
    try:
        found = _decode(file, wal_set, shard)
    finally:
        file.close()
    if not found:
        raise Corrupt(
            "the end mark of this shard fails its check; `topics repair` writes a new one", path
        )
    # A power cut may leave one counter in two slots: the mark with the higher positions counts.
    return max(found.values())[1]


class EndMarkFile:
    """The end mark of a shard, open for writing. One thread at a time."""

    def __init__(
        self, file: File, wal_set: int, shard: int, slots: dict[int, tuple[int, EndMark]]
    ) -> None:
        self._file: Final = file
        self._wal_set: Final = wal_set
        self._shard: Final = shard
        counters = {slot: counter for slot, (counter, _) in slots.items()}
        self._counter = max(counters.values(), default=0)
        # The next slot of each pair: the older one, or an invalid one.
        self._note = min(NOTES, key=lambda slot: counters.get(slot, -1))
        self._beginning = min(BEGINNINGS, key=lambda slot: counters.get(slot, -1))

    @classmethod
    def open(cls, fs: Fs, wal_dir: str, wal_set: int, shard: int, first: EndMark) -> EndMarkFile:
        """*Blocking.* Open the file, or make it with `first` as its beginning."""
        path = end_mark_path(wal_dir, wal_set, shard)
        if not fs.exists(path):
            file = fs.open(layout.temp(path), create=True)
            try:
                file.pwrite(bytes(FILE_BYTES), 0)
                made = cls(file, wal_set, shard, {})
                made.begin(first)
            finally:
                file.close()
            fs.rename(layout.temp(path), path)
            fs.sync_dir(wal_dir)
        file = fs.open(path, write=True)
        opened = cls(file, wal_set, shard, _decode(file, wal_set, shard))
        opened.begin(first)
        return opened

    def note(self, mark: EndMark) -> None:
        """Write the mark without a sync: it survives a killed process, but maybe not a power cut.

        Raises `StorageError`; then the valid slots stay valid.
        """
        # The body of `_write`, inlined: every group writes a note.
        slot, counter = self._note, self._counter + 1
        encoded = encode_slot(self._wal_set, self._shard, slot, counter, mark)
        self._file.pwrite(encoded, slot * SLOT_DISTANCE)
        self._counter = counter
        self._note = 1 - slot

    def begin(self, mark: EndMark) -> None:
        """*Blocking.* Write the mark and make it durable, with all notes before it."""
        self.write_beginning(mark)
        self.sync_beginning()

    def write_beginning(self, mark: EndMark) -> None:
        """Write the mark; call `sync_beginning` before the next mark is written."""
        self._write(self._beginning, mark)

    def sync_beginning(self) -> None:
        """*Blocking.* Make the mark durable.

        Until that has succeeded, the next beginning is written to the same slot.
        """
        self._file.sync()
        self._beginning = sum(BEGINNINGS) - self._beginning

    def _write(self, slot: int, mark: EndMark) -> None:
        counter = self._counter + 1
        self._file.pwrite(
            encode_slot(self._wal_set, self._shard, slot, counter, mark), slot * SLOT_DISTANCE
        )
        self._counter = counter

    def close(self) -> None:
        """Release the file; does not sync."""
        self._file.close()


def _decode(file: File, wal_set: int, shard: int) -> dict[int, tuple[int, EndMark]]:
    try:
        return decode(file.pread(FILE_BYTES, 0), wal_set, shard)
    except StartRefused as error:
        raise StartRefused(str(error), file.path) from None
