"""Files and objects with one interface, which executors read by ranges.

A process opens a bucket once. The credentials come from the environment of that process.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, Protocol, TypeVar

from topics_server.values.errors import NotThere, StorageError

if TYPE_CHECKING:
    from topics_server.archive.continuous.places.ranges import BucketRanges

# If two wanted records of a file are closer than this, one read takes both and the bytes between.
_FILE_GAP_BYTES: Final = 16 * 1024
# The same distance for objects, where each range costs a request.
_OBJECT_GAP_BYTES: Final = 2**20
# Bytes that the first request for an object reads: a small object needs no second request.
_HEAD_BYTES: Final = 64 * 1024

T = TypeVar("T")


class OpenFile(Protocol):
    """An open file or object. Errors are `StorageError` with its path."""

    @property
    def path(self) -> str:
        """The path or URL, for messages."""
        ...

    @property
    def gap_bytes(self) -> int:
        """Ranges that are closer than this are read as one."""
        ...

    def size(self) -> int:
        """The size in bytes."""
        ...

    def read(self, start: int, length: int) -> bytes:
        """Up to `length` bytes; fewer only at the end."""
        ...

    def close(self) -> None:
        """Close the file."""
        ...


class LocalFile:
    """A file of this machine's file system."""

    gap_bytes: Final = _FILE_GAP_BYTES

    def __init__(self, path: str) -> None:
        """Raises `NotThere`, `StorageError`."""
        self.path: Final = path
        try:
            self._descriptor: Final = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError):
            raise NotThere("does not exist", path) from None
        except OSError as error:
            raise StorageError(f"cannot be opened: {error.strerror}", path) from None

    def size(self) -> int:
        """See `OpenFile`."""
        return self._try(lambda: os.fstat(self._descriptor).st_size)

    def read(self, start: int, length: int) -> bytes:
        """See `OpenFile`."""
        return self._try(lambda: os.pread(self._descriptor, length, start))

    def close(self) -> None:
        """See `OpenFile`."""
        os.close(self._descriptor)

    def _try(self, call: Callable[[], T]) -> T:
        try:
            return call()
        except OSError as error:
            raise StorageError(f"cannot be read: {error.strerror}", self.path) from None


class BucketObject:
    """An object of a bucket. Its beginning is read when it is opened."""

    gap_bytes: Final = _OBJECT_GAP_BYTES

    def __init__(self, url: str, name: str) -> None:
        """Raises `NotThere`, `StorageError`."""
        self.path: Final = f"{url}/{name}"
        self._name: Final = name
        self._bucket: Final = _bucket(url)
        self._head, self._size = self._bucket.read(name, 0, _HEAD_BYTES)

    def size(self) -> int:
        """See `OpenFile`."""
        return self._size

    def read(self, start: int, length: int) -> bytes:
        """See `OpenFile`."""
        end = min(start + length, self._size)
        if start >= end:
            return b""
        if end <= len(self._head):
            return self._head[start:end]
        return self._bucket.read(self._name, start, end - start).content

    def close(self) -> None:
        """See `OpenFile`: nothing stays open."""


@functools.lru_cache(maxsize=8)
def _bucket(url: str) -> BucketRanges:
    # Imported here, so that an executor that reads files need not load this library.
    from topics_server.archive.continuous.places.ranges import BucketRanges

    return BucketRanges.open(url)
