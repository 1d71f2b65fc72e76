"""Keeps damaged segment files aside after their replacement.

Owns `quarantine/TOPIC/` of the data directory. A damaged file is copied here before it is replaced,
so that a repair loses no byte. A copy is removed with its segment or its topic. Used by
`wal/segments/store.py`, which holds the topic's lock.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from topics_server.values.errors import StorageError
from topics_server.values.limits import MIB
from topics_server.wal import layout
from topics_server.wal.atomic_write import rename_temp, write_temp
from topics_server.wal.folders import make_durable_dirs
from topics_server.wal.fs import File, Fs

_PAGE_BYTES: Final = 4096


class Quarantine:
    """See the module. *Blocking.*"""

    def __init__(self, fs: Fs, data_dir: str, dir_mode: int) -> None:
        self._fs: Final = fs
        self._root: Final = layout.join(data_dir, layout.QUARANTINE)
        self._dir_mode: Final = dir_mode

    def topics(self) -> list[int]:
        """Ids of topics that have a folder here."""
        numbers = map(layout.parse_topic_dir, self._fs.list_dir(self._root))
        return [number for number in numbers if number is not None]

    def sizes(self, topic_id: int) -> dict[str, int]:
        """The paths of a topic's files in quarantine, with their lengths in bytes."""
        folder = self._folder(topic_id)
        paths = [layout.join(folder, name) for name in self._fs.list_dir(folder)]
        return {path: self._fs.file_size(path) for path in paths}

    def keep(self, topic_id: int, path: str) -> str:
        """Copy a damaged file into quarantine, durably; returns the path of the copy.

        Bytes that the disk cannot read are zeros in the copy.
        """
        folder = self._folder(topic_id)
        make_durable_dirs(self._fs, folder, self._dir_mode)
        name = path.rpartition("/")[2]
        taken = set(self._fs.list_dir(folder))
        number = 1
        while layout.quarantined_file(name, number) in taken:
            number += 1
        copy = layout.join(folder, layout.quarantined_file(name, number))
        file = self._fs.open(path)
        try:
            write_temp(self._fs, copy, _readable(file))
        finally:
            file.close()
        rename_temp(self._fs, copy)
        self._fs.sync_dir(folder)
        return copy

    def drop_segment(self, kept: dict[str, int], segment_id: int) -> None:
        """Remove a segment's files from quarantine; `kept`: the topic's files, from `sizes`."""
        for path in list(kept):
            if layout.parse_quarantined_file(path.rpartition("/")[2]) == segment_id:
                self._fs.unlink(path, missing_ok=True)
                del kept[path]

    def drop_topic(self, topic_id: int) -> None:
        """Remove all files of a topic from quarantine."""
        folder = self._folder(topic_id)
        for name in self._fs.list_dir(folder):
            self._fs.unlink(layout.join(folder, name), missing_ok=True)
        self._fs.remove_dir(folder)

    def _folder(self, topic_id: int) -> str:
        return layout.join(self._root, layout.topic_dir(topic_id))


def _readable(file: File) -> Iterator[bytes]:
    """All bytes of a file; zeros for pages that cannot be read."""
    size = file.size()
    for at in range(0, size, MIB):
        length = min(MIB, size - at)
        try:
            yield file.pread(length, at)
        except StorageError:
            for page in range(at, at + length, _PAGE_BYTES):
                yield _page(file, min(_PAGE_BYTES, at + length - page), page)


def _page(file: File, length: int, at: int) -> bytes:
    try:
        return file.pread(length, at)
    except StorageError:
        return bytes(length)
