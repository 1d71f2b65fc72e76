"""The storage of backups: named objects, each put once, completely or not at all.

`ObjectStore` is the interface for the rest of the package; `FolderStore` stores objects in a
folder. Invariants: an object under its name is complete and durable, and never changes; putting an
existing name changes nothing and returns False. The folder itself is never created here: if it is
missing, or another folder has replaced it while it is open, its disk is probably not mounted. All
calls block.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final, Protocol, Self

from topics_server.values.errors import StorageError
from topics_server.values.limits import MIB
from topics_server.wal import layout
from topics_server.wal.atomic_write import remove_quietly, write_temp
from topics_server.wal.fs import Buffer, Fs, Lock

_LOCK: Final = "LOCK"


class ObjectStore(Protocol):
    """Objects by name; parts of a name are separated by "/"."""

    def path_of(self, name: str) -> str:
        """The path of an object, for messages."""
        ...

    def put_if_absent(self, name: str, pieces: Iterable[Buffer]) -> bool:
        """Store an object, durably; False, and nothing is read from `pieces`, if it exists."""
        ...

    def read(self, name: str) -> Iterator[bytes]:
        """The content in chunks. Raises `NotThere`."""
        ...

    def size(self, name: str) -> int | None:
        """Length of an object; None if it does not exist."""
        ...

    def make_durable(self, name: str) -> None:
        """Make an object durable that this process has not put.

        The process that put it may have died between the rename and the sync of its folder. Call
        this before anything elsewhere refers to the object.
        """
        ...

    def names(self, folder: str) -> list[str]:
        """Names directly in a folder, objects and folders, sorted; none if it does not exist."""
        ...

    def remove_unfinished(self, folder: str) -> None:
        """Remove unfinished files of killed writers directly in a folder."""
        ...

    def delete(self, name: str) -> None:
        """Remove an object; not an error if it does not exist."""
        ...

    def delete_folder(self, folder: str) -> None:
        """Remove a folder and the objects directly in it."""
        ...

    def close(self) -> None:
        """Release the store for other writers."""
        ...


class FolderStore:
    """Stores objects as files in a folder. One writer at a time holds the folder's lock."""

    def __init__(self, fs: Fs, root: str, identity: tuple[int, int], lock: Lock | None) -> None:
        self.root: Final = root
        self._fs: Final = fs
        self._identity: Final = identity
        self._lock = lock
        self._made: set[str] = set()
        # Paths of folders whose objects are all durable, except those that are being put.
        self._durable_folders: set[str] = set()

    @classmethod
    def open(cls, fs: Fs, root: str, *, write: bool) -> Self:
        """Open a folder that exists. Raises `StorageError`, `StartRefused` if another writes."""
        identity = fs.identity(root)
        if identity is None:
            raise StorageError(
                "this folder does not exist: is its disk mounted? A new one is made by hand", root
            )
        lock = None
        if write:
            lock = fs.lock(layout.join(root, _LOCK), "a backup or a prune")
        return cls(fs, root, identity, lock)

    def path_of(self, name: str) -> str:
        """See `ObjectStore`."""
        return layout.join(self.root, name)

    def put_if_absent(self, name: str, pieces: Iterable[Buffer]) -> bool:
        """See `ObjectStore`. The lock covers the check and the rename."""
        assert self._lock is not None
        self._check_folder()
        path = self.path_of(name)
        if self._fs.exists(path):
            self.make_durable(name)
            return False
        self._make_folders(name)
        write_temp(self._fs, path, pieces)
        try:
            self._check_folder()
        except StorageError:
            remove_quietly(self._fs, layout.temp(path))
            raise
        self._publish(layout.temp(path), path)
        return True

    def _publish(self, beside: str, path: str) -> None:
        """Give a complete file its name, durably."""
        folder = layout.parent(path)
        try:
            self._fs.rename(beside, path)
            self._fs.sync_dir(folder)
        except BaseException:
            # The name may exist without being durable.
            self._durable_folders.discard(folder)
            raise
        self._durable_folders.add(folder)

    def make_durable(self, name: str) -> None:
        """See `ObjectStore`. Its content was synced before it got its name."""
        folder = layout.parent(self.path_of(name))
        if folder not in self._durable_folders:
            self._make_folders(name)
            self._fs.sync_dir(folder)
            self._durable_folders.add(folder)

    def read(self, name: str) -> Iterator[bytes]:
        """See `ObjectStore`."""
        file = self._fs.open(self.path_of(name))
        try:
            at = 0
            while chunk := file.pread(MIB, at):
                at += len(chunk)
                yield chunk
        finally:
            file.close()

    def size(self, name: str) -> int | None:
        """See `ObjectStore`."""
        path = self.path_of(name)
        return self._fs.file_size(path) if self._fs.exists(path) else None

    def names(self, folder: str) -> list[str]:
        """See `ObjectStore`; unfinished files do not count."""
        found = self._fs.list_dir(self.path_of(folder) if folder else self.root)
        return [name for name in found if not layout.is_temp(name)]

    def remove_unfinished(self, folder: str) -> None:
        """See `ObjectStore`. Only the holder of the lock writes such files."""
        assert self._lock is not None
        self._check_folder()
        path = self.path_of(folder)
        for name in filter(layout.is_temp, self._fs.list_dir(path)):
            self._fs.unlink(layout.join(path, name), missing_ok=True)

    def delete(self, name: str) -> None:
        """See `ObjectStore`."""
        self._check_folder()
        path = self.path_of(name)
        self._fs.unlink(path, missing_ok=True)
        if self._fs.exists(layout.parent(path)):
            self._fs.sync_dir(layout.parent(path))

    def delete_folder(self, folder: str) -> None:
        """See `ObjectStore`; also removes unfinished files in it."""
        self._check_folder()
        path = self.path_of(folder)
        if not self._fs.exists(path):
            return
        for name in self._fs.list_dir(path):
            self._fs.unlink(layout.join(path, name), missing_ok=True)
        self._fs.remove_dir(path)
        self._fs.sync_dir(layout.parent(path))
        self._made.discard(folder)
        self._durable_folders.discard(path)

    def close(self) -> None:
        """See `ObjectStore`."""
        lock, self._lock = self._lock, None
        if lock is not None:
            lock.release()

    def _check_folder(self) -> None:
        """Check that the folder is still the opened one: its disk may be gone or replaced."""
        if self._fs.identity(self.root) != self._identity:
            raise StorageError(
                "this folder is gone, or another took its place: is its disk mounted?", self.root
            )

    def _make_folders(self, name: str) -> None:
        """Make the missing folders below the root; the root itself is never made."""
        folder = ""
        for part in name.split("/")[:-1]:
            parent, folder = folder, f"{folder}/{part}" if folder else part
            if folder in self._made:
                continue
            path = self.path_of(folder)
            self._fs.make_dir(path)
            # Sync even for an existing folder: the process that made it may have died before its
            # sync.
            self._fs.sync_dir(self.path_of(parent) if parent else self.root)
            self._made.add(folder)


def read_whole(store: ObjectStore, name: str) -> bytes:
    """The content of a small object. Raises `NotThere`."""
    return b"".join(store.read(name))
