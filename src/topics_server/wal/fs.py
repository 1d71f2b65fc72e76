"""The file system interface: the only module that opens, writes and syncs.

Owns every `os` call on the data directory and the translation of `OSError` into our errors. All of
`wal/` takes an `Fs`; `OsFs` is the real one, `tests/storage/fake_disk.py` a failing one. Paths are
strings joined with "/". Nothing is durable before `File.sync` (bytes) or `Fs.sync_dir` (names: a
creation, a rename, an unlink). Every call blocks; all may be made from any thread, each file by
one thread at a time for writing. A path that is not there (ENOENT, ENOTDIR) is `NotThere`; no other
error is ever taken for absence.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import time
from collections.abc import Sequence
from typing import Final, Protocol

import numpy as np

from topics_server.values.errors import DiskFull, NotThere, StartRefused, StorageError, SyncFailed

Buffer = bytes | bytearray | memoryview

# Errors that may be temporary: the server reports a full disk and continues.
_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EMFILE, errno.ENFILE})
# Errors of a path that does not exist.
_ABSENT: Final = frozenset({errno.ENOENT, errno.ENOTDIR})
# Errors of a pipe or a socket in the place of a file.
_NO_FILE: Final = frozenset({errno.ESPIPE, errno.ENXIO})
_LOCK_WAIT_S: Final = 1.0
_LOCK_RETRY_S: Final = 0.02
# Errors of a file system that cannot lock a directory (network file systems lock files only).
_NO_DIRECTORY_LOCK: Final = frozenset(
    {errno.EBADF, errno.EINVAL, errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP}
)
# Vectors per pwritev on every known system.
_VECTORS_MAX: Final = 1024
# A longer write is done in parts. Linux makes larger pages for a longer write, often from memory
# that was not used for long: it then takes up to eight times the processor's time. With many parts
# the thread waits for the interpreter's lock as often.
_WRITE_BYTES_MAX: Final = 1 << 20


class File(Protocol):
    """An open file; offsets and sizes in bytes."""

    @property
    def path(self) -> str:
        """The path it was opened by."""
        ...

    def pwrite(self, data: Buffer, offset: int) -> None:
        """Write all of `data` at `offset`. `DiskFull`/`StorageError` may follow a partial write."""
        ...

    def pwritev(self, buffers: Sequence[Buffer], offset: int) -> None:
        """Like `pwrite`, for buffers that follow each other; few system calls."""
        ...

    def pread(self, length: int, offset: int) -> bytes:
        """Up to `length` bytes; fewer only at the end of the file."""
        ...

    def pread_now(self, length: int, offset: int) -> bytes | memoryview | None:
        """`length` bytes if they are in memory; None if the read would wait, or fails."""
        ...

    def sync(self) -> None:
        """Make bytes and size durable (fdatasync); never call it again after a failure."""
        ...

    def size(self) -> int:
        """Length in bytes."""
        ...

    def truncate(self, size: int) -> None:
        """Set the length; not durable before `sync`."""
        ...

    def close(self) -> None:
        """Release the handle; idempotent; does not sync."""
        ...


class Lock(Protocol):
    """A lock that is held until `release` or until the process ends."""

    def release(self) -> None:
        """Release the lock; idempotent."""
        ...


class Fs(Protocol):
    """A file system; every error is a `StorageError` or one of its kinds."""

    def open(self, path: str, *, write: bool = False, create: bool = False) -> File:
        """Open for reading, with `write` also for writing; `create` implies `write`.

        `create` makes an empty file, and empties an existing one. A missing file is `NotThere`.
        """
        ...

    def rename(self, old: str, new: str) -> None:
        """Replace `new` by `old` atomically; both in the same directory."""
        ...

    def move(self, old: str, new: str) -> None:
        """Give a file or directory a name in another directory of the same file system.

        The path `new` must not exist. Durable once both directories are synced.
        """
        ...

    def unlink(self, path: str, *, missing_ok: bool = False) -> None:
        """Remove a file's name."""
        ...

    def list_dir(self, path: str) -> list[str]:
        """Names in a directory, sorted; none if it is missing."""
        ...

    def make_dir(self, path: str, mode: int = 0o700) -> None:
        """Make a directory in an existing one; not an error if it exists already.

        Its name is durable once its parent is synced: `folders.make_durable_dirs` does both.
        """
        ...

    def remove_dir(self, path: str) -> None:
        """Remove an empty directory; not an error if it is missing."""
        ...

    def sync_dir(self, path: str) -> None:
        """Make the names in a directory durable.

        A directory that cannot be opened is `DiskFull` (too many open files), `NotThere` or plain
        `StorageError`; then nothing has changed and the caller may retry. A failure of the sync
        itself is `SyncFailed`: it is then unknown what is durable, so never retry.
        """
        ...

    def hold_dir(self, path: str) -> Lock:
        """Keep a directory open until `release`, so that syncing it needs no free descriptor.

        For the few directories that are synced as long as the server runs. A directory is held once
        at a time, is not renamed meanwhile, and is not synced during or after `release`.
        """
        ...

    def exists(self, path: str) -> bool:
        """Whether a file or directory has this path. Raises if that is unknown."""
        ...

    def identity(self, path: str) -> tuple[int, int] | None:
        """Device and inode of a path; `None` if it does not exist."""
        ...

    def real_path(self, path: str) -> str:
        """The absolute path without symbolic links; also for a path that does not exist yet."""
        ...

    def file_size(self, path: str) -> int:
        """Length of a file in bytes."""
        ...

    def free_bytes(self, path: str) -> int:
        """Bytes this process may still use on the file system that holds `path`."""
        ...

    def total_bytes(self, path: str) -> int:
        """Size of the file system that holds `path`."""
        ...

    def map(self, path: str) -> memoryview:
        """A read-only view of a whole file; shows later writes, and is freed with its views."""
        ...

    def lock(self, path: str, text: str) -> Lock:
        """Lock a file (made if missing) and write `text` into it.

        Raises `StartRefused` with the file's text if another process holds it.
        """
        ...

    def lock_dir(self, path: str) -> Lock | None:
        """Lock a directory itself; `None` where the file system cannot lock directories.

        Raises `StartRefused` if another process holds it.
        """
        ...


def storage_error(error: OSError, path: str, *, writing: bool = False) -> StorageError:
    """Our error for an `OSError`; `writing` makes EIO a full disk (it may be relocated)."""
    reason = error.strerror or str(error)
    if error.errno in _NO_FILE:
        return StorageError("not a regular file", path)
    if error.errno in _ABSENT:
        return NotThere(reason, path)
    if error.errno in _FULL or (writing and error.errno == errno.EIO):
        return DiskFull(reason, path)
    return StorageError(reason, path)


class OsFile:
    """`File` over a descriptor."""

    __slots__ = ("_fd", "path")

    def __init__(self, path: str, fd: int) -> None:
        self.path = path
        self._fd = fd

    def pwrite(self, data: Buffer, offset: int) -> None:
        """See `File.pwrite`."""
        try:
            if len(data) > _WRITE_BYTES_MAX:
                self._write_rest(memoryview(data), offset)
                return
            written = os.pwrite(self._fd, data, offset)
            if written < len(data):
                self._write_rest(memoryview(data)[written:], offset + written)
        except OSError as error:
            raise storage_error(error, self.path, writing=True) from error

    def pwritev(self, buffers: Sequence[Buffer], offset: int) -> None:
        """See `File.pwritev`."""
        if len(buffers) == 1:
            self.pwrite(buffers[0], offset)
            return
        try:
            for first in range(0, len(buffers), _VECTORS_MAX):
                part = buffers[first : first + _VECTORS_MAX]
                written = os.pwritev(self._fd, part, offset)
                for buffer in part:
                    # The write was short: write the rest buffer by buffer.
                    if written < len(buffer):
                        start = max(written, 0)
                        self._write_rest(memoryview(buffer)[start:], offset + start)
                    written -= len(buffer)
                    offset += len(buffer)
        except OSError as error:
            raise storage_error(error, self.path, writing=True) from error

    def _write_rest(self, rest: memoryview, offset: int) -> None:
        while rest:
            written = os.pwrite(self._fd, rest[:_WRITE_BYTES_MAX], offset)
            if written == 0:
                raise OSError(errno.ENOSPC, "the disk takes no more bytes")
            rest = rest[written:]
            offset += written

    def pread(self, length: int, offset: int) -> bytes:
        """See `File.pread`."""
        assert length >= 0
        try:
            data = os.pread(self._fd, length, offset)
            while len(data) < length:
                more = os.pread(self._fd, length - len(data), offset + len(data))
                if not more:
                    break
                data += more
        except OSError as error:
            raise storage_error(error, self.path) from error
        return data

    def pread_now(self, length: int, offset: int) -> bytes | memoryview | None:
        """See `File.pread_now`."""
        # Unlike a `bytearray` it is not filled with zeros first.
        data = np.empty(length, np.uint8).data
        try:
            # Not all file systems support it, and macOS does not.
            found = os.preadv(self._fd, [data], offset, os.RWF_NOWAIT)
        except (OSError, AttributeError):
            return None
        return data if found == length else None

    def sync(self) -> None:
        """See `File.sync`."""
        try:
            _sync_data(self._fd)
        except OSError as error:
            raise SyncFailed(error.strerror or str(error), self.path) from error

    def size(self) -> int:
        """See `File.size`."""
        try:
            return os.fstat(self._fd).st_size
        except OSError as error:
            raise storage_error(error, self.path) from error

    def truncate(self, size: int) -> None:
        """See `File.truncate`."""
        try:
            os.ftruncate(self._fd, size)
        except OSError as error:
            raise storage_error(error, self.path, writing=True) from error

    def close(self) -> None:
        """See `File.close`."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def _sync_data(fd: int) -> None:
    # macOS syncs only to the drive's own cache by default.
    full_sync = getattr(fcntl, "F_FULLFSYNC", None)
    if full_sync is not None:
        fcntl.fcntl(fd, full_sync)
    else:
        os.fdatasync(fd)


def _lock(fd: int) -> None:
    """Lock the open file; raises `BlockingIOError` after `_LOCK_WAIT_S`.

    The server starts helper processes. Between its fork and its exec a helper holds copies of the
    server's descriptors, so the lock of a killed server may outlive it by some milliseconds.
    """
    deadline = time.monotonic() + _LOCK_WAIT_S
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise
            time.sleep(_LOCK_RETRY_S)
        else:
            return


def _open_dir(path: str) -> int:
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


class OsLock:
    """`Lock` over a descriptor that holds the `flock`."""

    __slots__ = ("_fd",)

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def release(self) -> None:
        """See `Lock.release`."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


class _HeldDir:
    """A directory that is kept open for its syncs; see `Fs.hold_dir`."""

    __slots__ = ("_held", "_path", "fd")

    def __init__(self, held: dict[str, _HeldDir], path: str, fd: int) -> None:
        self._held = held
        self._path = path
        self.fd = fd
        held[path] = self

    def release(self) -> None:
        """See `Lock.release`."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            del self._held[self._path]
            os.close(fd)


class OsFs:
    """`Fs` over the operating system; `file_mode` is given to every file it makes."""

    def __init__(self, file_mode: int = 0o600) -> None:
        self._file_mode = file_mode
        self._held: dict[str, _HeldDir] = {}

    def open(self, path: str, *, write: bool = False, create: bool = False) -> File:
        """See `Fs.open`."""
        # The flag keeps a pipe in the place of a file from blocking its reader; files ignore it.
        flags = (os.O_RDWR if write or create else os.O_RDONLY) | os.O_NONBLOCK
        if create:
            flags |= os.O_CREAT | os.O_TRUNC
        try:
            return OsFile(path, os.open(path, flags | os.O_CLOEXEC, self._file_mode))
        except OSError as error:
            raise storage_error(error, path, writing=create) from error

    def rename(self, old: str, new: str) -> None:
        """See `Fs.rename`."""
        assert old.rpartition("/")[0] == new.rpartition("/")[0]
        try:
            os.rename(old, new)
        except OSError as error:
            raise storage_error(error, new, writing=True) from error

    def move(self, old: str, new: str) -> None:
        """See `Fs.move`."""
        try:
            if os.path.lexists(new):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
            os.rename(old, new)
        except OSError as error:
            raise storage_error(error, new, writing=True) from error

    def unlink(self, path: str, *, missing_ok: bool = False) -> None:
        """See `Fs.unlink`."""
        try:
            os.unlink(path)
        except FileNotFoundError as error:
            if not missing_ok:
                raise storage_error(error, path) from error
        except OSError as error:
            raise storage_error(error, path) from error

    def list_dir(self, path: str) -> list[str]:
        """See `Fs.list_dir`."""
        try:
            return sorted(os.listdir(path))
        except FileNotFoundError:
            return []
        except OSError as error:
            raise storage_error(error, path) from error

    def make_dir(self, path: str, mode: int = 0o700) -> None:
        """See `Fs.make_dir`."""
        try:
            os.mkdir(path, mode)
        except FileExistsError as error:
            if not os.path.exists(path):
                raise StorageError("a link to a path that does not exist", path) from error
            if not os.path.isdir(path):
                raise storage_error(error, path) from error
        except OSError as error:
            raise storage_error(error, path, writing=True) from error

    def remove_dir(self, path: str) -> None:
        """See `Fs.remove_dir`."""
        try:
            os.rmdir(path)
        except FileNotFoundError:
            return
        except OSError as error:
            raise storage_error(error, path) from error

    def sync_dir(self, path: str) -> None:
        """See `Fs.sync_dir`."""
        held = self._held.get(path)
        try:
            fd = _open_dir(path) if held is None else held.fd
        except OSError as error:
            raise storage_error(error, path, writing=True) from error
        try:
            os.fsync(fd)
        except OSError as error:
            raise SyncFailed(error.strerror or str(error), path) from error
        finally:
            if held is None:
                os.close(fd)

    def hold_dir(self, path: str) -> Lock:
        """See `Fs.hold_dir`."""
        assert path not in self._held, "held once at a time"
        try:
            return _HeldDir(self._held, path, _open_dir(path))
        except OSError as error:
            raise storage_error(error, path, writing=True) from error

    def exists(self, path: str) -> bool:
        """See `Fs.exists`."""
        return self.identity(path) is not None

    def identity(self, path: str) -> tuple[int, int] | None:
        """See `Fs.identity`."""
        try:
            found = os.stat(path)
        except OSError as error:
            if error.errno in _ABSENT:
                return None
            raise storage_error(error, path) from error
        return found.st_dev, found.st_ino

    def real_path(self, path: str) -> str:
        """See `Fs.real_path`."""
        try:
            return os.path.realpath(path)
        except OSError as error:
            raise storage_error(error, path) from error

    def file_size(self, path: str) -> int:
        """See `Fs.file_size`."""
        try:
            return os.stat(path).st_size
        except OSError as error:
            raise storage_error(error, path) from error

    def free_bytes(self, path: str) -> int:
        """See `Fs.free_bytes`."""
        try:
            stat = os.statvfs(path)
        except OSError as error:
            raise storage_error(error, path) from error
        return stat.f_bavail * stat.f_frsize

    def total_bytes(self, path: str) -> int:
        """See `Fs.total_bytes`."""
        try:
            stat = os.statvfs(path)
        except OSError as error:
            raise storage_error(error, path) from error
        return stat.f_blocks * stat.f_frsize

    def map(self, path: str) -> memoryview:
        """See `Fs.map`."""
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                if os.fstat(fd).st_size == 0:
                    return memoryview(b"")
                return memoryview(mmap.mmap(fd, 0, access=mmap.ACCESS_READ))
            finally:
                os.close(fd)
        except OSError as error:
            raise storage_error(error, path) from error

    def lock(self, path: str, text: str) -> Lock:
        """See `Fs.lock`."""
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, self._file_mode)
        except OSError as error:
            raise storage_error(error, path, writing=True) from error
        try:
            _lock(fd)
            os.ftruncate(fd, 0)
            os.pwrite(fd, text.encode(), 0)
        except BlockingIOError as error:
            holder = os.pread(fd, 200, 0).decode(errors="replace").strip()
            os.close(fd)
            raise StartRefused(f"in use by another server ({holder})", path) from error
        except OSError as error:
            os.close(fd)
            raise storage_error(error, path, writing=True) from error
        return OsLock(fd)

    def lock_dir(self, path: str) -> Lock | None:
        """See `Fs.lock_dir`."""
        try:
            fd = _open_dir(path)
        except OSError as error:
            raise storage_error(error, path) from error
        try:
            _lock(fd)
        except OSError as error:
            os.close(fd)
            if isinstance(error, BlockingIOError):
                raise StartRefused("in use by another server", path) from error
            if error.errno in _NO_DIRECTORY_LOCK:
                return None
            raise storage_error(error, path) from error
        return OsLock(fd)
