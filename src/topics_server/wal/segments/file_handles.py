"""Open files for reading, with a bound; closes the least recently used.

Used by `wal/segments/store.py` from many worker threads. A dropped file stays open for its current
readers; the last of them closes it. Invariant: no handle in use is ever closed.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager

from topics_server.values.errors import DiskFull, StorageError
from topics_server.wal.fs import File, Fs


class _Handle:
    __slots__ = ("dropped", "file", "is_read_now", "users")

    def __init__(self, file: File) -> None:
        self.file = file
        self.users = 0
        # Whether the loop's thread reads it, which only that thread changes.
        self.is_read_now = False
        self.dropped = False

    @property
    def is_idle(self) -> bool:
        return self.users == 0 and not self.is_read_now


class FileHandles:
    """At most `max_open` open files, or more if more are read at the same moment."""

    def __init__(self, fs: Fs, max_open: int) -> None:
        assert max_open > 0
        self._fs = fs
        self._max_open = max_open
        self._open: OrderedDict[Hashable, _Handle] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._open)

    @contextmanager
    def lease(self, key: Hashable, path_of: Callable[[], str]) -> Iterator[File]:
        """The open file of `key`; `path_of` gives its current path if it has to be opened."""
        handle = self._acquire(key, path_of)
        try:
            yield handle.file
        finally:
            self._release(handle)

    def read_now(self, key: Hashable, length: int, offset: int) -> bytes | memoryview | None:
        """Bytes of a file that is open; None if they are not in memory, or a file is opened.

        For one thread, that of the loop. It does not hold the lock while it reads: worker threads
        would wait for the lock, then hold it until they get the interpreter back, and each of the
        loop's next reads would find it taken.
        """
        if not self._lock.acquire(blocking=False):
            return None
        try:
            handle = self._open.get(key)
            if handle is None:
                return None
            self._open.move_to_end(key)
            handle.is_read_now = True
        finally:
            self._lock.release()
        try:
            return handle.file.pread_now(length, offset)
        finally:
            handle.is_read_now = False
            if handle.dropped:
                self._close_dropped(handle)

    def drop(self, key: Hashable) -> None:
        """Close the file of `key` once no thread reads it; the next lease opens it again."""
        with self._lock:
            handle = self._open.pop(key, None)
            if handle is not None:
                handle.dropped = True
                if handle.is_idle:
                    handle.file.close()

    def _close_dropped(self, handle: _Handle) -> None:
        with self._lock:
            if handle.is_idle:
                handle.file.close()

    def close(self) -> None:
        """Close all idle files."""
        with self._lock:
            self._evict(0)

    def _acquire(self, key: Hashable, path_of: Callable[[], str]) -> _Handle:
        with self._lock:
            handle = self._open.get(key)
            if handle is None:
                handle = self._open[key] = _Handle(self._open_now(path_of))
            self._open.move_to_end(key)
            handle.users += 1
            self._evict(self._max_open)
            return handle

    def _open_now(self, path_of: Callable[[], str]) -> File:
        path = path_of()
        try:
            return self._fs.open(path)
        except DiskFull:
            # The process is out of descriptors: close the idle files, then try again.
            self._evict(0)
            return self._fs.open(path)
        except StorageError:
            moved_to = path_of()
            if moved_to == path:
                raise
            return self._fs.open(moved_to)

    def _release(self, handle: _Handle) -> None:
        with self._lock:
            handle.users -= 1
            assert handle.users >= 0
            if handle.dropped and handle.is_idle:
                handle.file.close()

    def _evict(self, keep: int) -> None:
        if len(self._open) <= keep:
            return
        for key in [key for key, handle in self._open.items() if handle.is_idle]:
            if len(self._open) <= keep:
                break
            self._open.pop(key).file.close()
