"""Reserved disk space that is released when the disk is full.

Owns `ballast` in the data directory's root. With zero bytes free neither a manifest nor a snapshot
can be written, so deleted data could never be removed. The ballast is as large as the next snapshot
and some manifests. `release` shortens the ballast when such a write needs the room; `restore` fills
it again once the disk has room for it beside the required free space. While a part is missing
(`missing_bytes`), appends, journal files and new segments leave that much space free. The ballast
holds random bytes, because a file system may compress or share other bytes. Blocking; one thread at
a time, except for `missing_bytes`. Called by `disk_space`.
"""

from __future__ import annotations

from typing import Final

from topics_server.runtime.clock import random_bytes
from topics_server.values.errors import NotThere, StorageError
from topics_server.values.limits import KIB
from topics_server.wal import layout
from topics_server.wal.atomic_write import remove_quietly
from topics_server.wal.fs import Fs

_PIECE_BYTES: Final = 256 * KIB


class Ballast:
    """See the module."""

    def __init__(self, fs: Fs, root: str) -> None:
        self._fs: Final = fs
        self._path: Final = layout.join(root, layout.BALLAST)
        self._wanted_bytes = 0
        self._bytes = self._size()

    @property
    def missing_bytes(self) -> int:
        """The bytes that the ballast lacks, and that must stay free. Safe on any thread."""
        return max(0, self._wanted_bytes - self._bytes)

    @property
    def held_bytes(self) -> int:
        """The current size of the ballast."""
        return self._bytes

    def want(self, size: int) -> None:
        """Set the wanted size of the ballast."""
        self._wanted_bytes = size

    def release(self, size: int) -> int:
        """*Blocking.* Release at least `size` bytes, or all; returns how many were released.

        It releases no more than needed: other programs could take the rest, and none would be left.
        """
        held, left = self._bytes, max(0, self._bytes - size)
        if held:
            self._cut(left)
        return held - self._bytes

    def restore(self, free_bytes: int, keep_free_bytes: int) -> bool:
        """*Blocking.* Fill it if that leaves `keep_free_bytes` free; returns whether it is full.

        If a write fails, the ballast keeps the bytes that it had, because other programs would take
        the space. A ballast larger than wanted keeps its size until the next release.
        """
        if not self.missing_bytes:
            return True
        if free_bytes - self.missing_bytes < keep_free_bytes:
            return False
        try:
            self._grow()
        except StorageError:
            if self._bytes:
                self._cut(self._bytes)
            else:
                remove_quietly(self._fs, self._path)
                self._bytes = self._size()
            return False
        return True

    def _grow(self) -> None:
        is_new = self._bytes == 0
        file = self._fs.open(self._path, create=is_new, write=True)
        try:
            position = self._bytes
            while position < self._wanted_bytes:
                piece = random_bytes(min(_PIECE_BYTES, self._wanted_bytes - position))
                file.pwrite(piece, position)
                position += len(piece)
            # Bytes are written, not only a length set: a sparse file reserves no space.
            file.sync()
        finally:
            file.close()
        self._bytes = position

    def _cut(self, size: int) -> None:
        """Shorten the ballast to `size` bytes; if that fails, remove it."""
        try:
            file = self._fs.open(self._path, write=True)
            try:
                file.truncate(size)
            finally:
                file.close()
        except StorageError:
            remove_quietly(self._fs, self._path)
        self._bytes = self._size()

    def _size(self) -> int:
        try:
            return self._fs.file_size(self._path)
        except NotThere:
            return 0
