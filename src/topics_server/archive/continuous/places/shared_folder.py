"""A folder to which several servers may write, without replacing any object.

An object is written under a temporary name. A lock is held only while its final name is checked and
the file renamed, so that an object is put only if it is absent, whatever other servers write. Bases
and prunes also take the lock of a backup folder: a prune must not remove files that a base relies
on. If a folder has lost its archive's mark, it was emptied: nothing is written to it. Called by
`opening`.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable, Iterator
from typing import Final, Protocol, Self

from topics_server.archive.continuous.format import ARCHIVE
from topics_server.archive.object_store import FolderStore, ObjectStore
from topics_server.runtime.clock import pause, random_hex
from topics_server.values.errors import StartRefused, StorageError
from topics_server.wal import layout
from topics_server.wal.atomic_write import remove_quietly, write_temp
from topics_server.wal.fs import Buffer, Fs, Lock

_PUT_LOCK: Final = "PUT"
_BASE_LOCK: Final = "LOCK"
_TRIES: Final = 200
_PAUSE_S: Final = 0.02


class ArchiveStore(ObjectStore, Protocol):
    """The storage of an archive."""

    def lock_bases(self) -> Lock:
        """Lock out other bases and prunes. Raises `StartRefused` if one is under way."""
        ...

    def lock_holder(self) -> str | None:
        """The owner and the time of a lock that outlived its process; None if there is none."""
        ...

    def break_lock(self) -> None:
        """Remove such a lock: its process is dead."""
        ...


class SharedFolder(FolderStore):
    """See the module. Safe to call from several threads."""

    def __init__(self, fs: Fs, root: str, identity: tuple[int, int], lock: Lock | None) -> None:
        super().__init__(fs, root, identity, lock)
        self._token: Final = random_hex(16)
        self._numbers: Final = itertools.count(1)
        self._turn: Final = threading.Lock()
        self._is_marked = False
        self.bytes_per_s = 0

    @classmethod
    def open(cls, fs: Fs, root: str, *, write: bool = False) -> Self:
        """Open a folder that exists. Raises `StorageError`."""
        return super().open(fs, root, write=False)

    def put_if_absent(self, name: str, pieces: Iterable[Buffer]) -> bool:
        """See `ObjectStore`."""
        self._check_folder()
        path = self.path_of(name)
        if self._fs.exists(path):
            self.make_durable(name)
            return False
        with self._turn:
            if not self._fs.exists(layout.parent(path)):
                # A prune has removed the empty folder meanwhile.
                self._made.clear()
                self._durable_folders.clear()
            self._make_folders(name)
        beside = f"{path}.{self._token}{next(self._numbers)}"
        write_temp(self._fs, beside, self._paced(pieces))
        try:
            with self._turn:
                is_put = self._rename(layout.temp(beside), path)
        except BaseException:
            remove_quietly(self._fs, layout.temp(beside))
            raise
        if not is_put:
            remove_quietly(self._fs, layout.temp(beside))
            self.make_durable(name)
        return is_put

    def _rename(self, beside: str, path: str) -> bool:
        lock = self._put_lock()
        try:
            self._check_folder()
            if self._fs.exists(path):
                return False
            self._publish(beside, path)
            return True
        finally:
            lock.release()

    def _check_folder(self) -> None:
        """Check also that the folder has not lost its mark."""
        super()._check_folder()
        path = self.path_of(ARCHIVE)
        if self._fs.exists(path):
            self._is_marked = True
        elif self._is_marked:
            raise StorageError(
                "is missing, and was there: somebody emptied this archive. Put it back, or name an "
                "empty one",
                path,
            )

    def _put_lock(self) -> Lock:
        path = self.path_of(_PUT_LOCK)
        for _ in range(_TRIES):
            try:
                return self._fs.lock(path, "a put")
            except StartRefused:
                pause(_PAUSE_S)
        raise StorageError("another process holds this lock", path)

    def _paced(self, pieces: Iterable[Buffer]) -> Iterator[Buffer]:
        """Yield the pieces, at most `bytes_per_s`; 0: without a limit."""
        for piece in pieces:
            yield piece
            if self.bytes_per_s:
                pause(len(piece) / self.bytes_per_s)

    def remove_unfinished(self, folder: str) -> None:
        """See `ObjectStore`. A put that is under way fails, and its caller repeats it."""
        self._check_folder()
        path = self.path_of(folder)
        for name in filter(layout.is_temp, self._fs.list_dir(path)):
            self._fs.unlink(layout.join(path, name), missing_ok=True)

    def lock_bases(self) -> Lock:
        """See `ArchiveStore`."""
        self._check_folder()
        return self._fs.lock(self.path_of(_BASE_LOCK), "a base or a prune")

    def lock_holder(self) -> str | None:
        """See `ArchiveStore`: the system releases a file lock with its process."""
        return None

    def break_lock(self) -> None:
        """See `ArchiveStore`: there is nothing to remove."""


def is_lock(name: str) -> bool:
    """Whether a file in the root of the folder is a lock or belongs to the file system."""
    return name in (_PUT_LOCK, _BASE_LOCK, "lost+found")


def put_same(store: ObjectStore, name: str, content: bytes) -> bool:
    """Put an object, or find that it is there with this content; False if it has another.

    A failed put may have succeeded, or may still succeed later, so existing content is compared.
    """
    if store.put_if_absent(name, [content]):
        return True
    return b"".join(store.read(name)) == content
