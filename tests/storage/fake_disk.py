"""A disk in memory that forgets unsynced writes and fails on request. Satisfies `wal.fs.Fs`.

Its model, with one seed per disk:

- Every write stays in the "page cache" until its file is synced; creations, renames and unlinks
  until their directory is. Reads see the cache.
- `crash("kill")`: the process dies, the cache stays. `crash("power")`: each 512-byte sector of an
  unsynced file has its content after some prefix of the writes, each sector on its own; of the
  unsynced operations of one directory a prefix survives (a journaling file system), each directory
  on its own. `reopen()` then gives the disk that the next process finds.
- A failed sync leaves its pages clean although some are not on the platter: a later sync does not
  help, only another write does. Linux behaves like this.
- `evicts`: clean pages may leave the cache at a `kill`; then the bytes that a failed sync did not
  write to the platter are missing.
- `lose` and `put` change files behind the server; `image` and `of` copy whole disks.
- `fail(op, error, ...)`: the nth matching operation, or look, fails. `error` is one of `eio`,
  `eacces`, `enospc`, `emfile`, `partial` (part of the write lands, then EIO) and `crash`
  (`SimulatedCrash`, part of a write may have landed). `capacity_bytes` makes a disk that can really
  become full.
"""

from __future__ import annotations

import dataclasses
import errno
import fnmatch
import random
from collections.abc import Sequence
from typing import Final, Literal

from topics_server.values.errors import DiskFull, NotThere, StartRefused, StorageError, SyncFailed
from topics_server.wal.fs import Buffer, File, Lock

SECTOR: Final = 512
_PAGE: Final = 8 * SECTOR
Op = Literal["open", "write", "sync", "truncate", "rename", "unlink", "make_dir", "sync_dir", "any"]
# Calls that change nothing: they can fail, but no crash happens at one.
Look = Literal["stat", "list", "read", "map"]
Fault = Literal["eio", "eacces", "enospc", "emfile", "partial", "crash"]
Mode = Literal["kill", "power"]
# (offset, bytes), or (size, None) for a truncation.
_Write = tuple[int, bytes | None]


class SimulatedCrash(BaseException):
    """The machine is gone; not an `Exception`, so that no product code can catch it."""


@dataclasses.dataclass(frozen=True)
class DiskImage:
    """A whole disk at one moment: contents by path, directories, the boot it belongs to."""

    files: dict[str, bytes]
    dirs: frozenset[str]
    boot_id: str


@dataclasses.dataclass
class _Rule:
    op: Op | Look
    error: Fault
    path: str
    skip: int
    times: int | None
    inode: _Inode | None = None  # the inode of the open file, even if another file takes its name


class _Inode:
    """A file's bytes: the content of the cache, of the platter, and the unsynced writes."""

    __slots__ = ("data", "durable", "pending")

    def __init__(self) -> None:
        self.data = bytearray()
        self.durable = bytearray()
        # (offset, bytes) or (size, None) for a truncation, in order.
        self.pending: list[_Write] = []

    def write(self, data: bytes, offset: int) -> None:
        self.data = _written(self.data, data, offset)
        self.pending.append((offset, data))

    def truncate(self, size: int) -> None:
        self.data = _truncated(self.data, size)
        self.pending.append((size, None))

    def sync(self) -> None:
        for offset, data in self.pending:
            self.durable = _applied(self.durable, offset, data)
        self.pending.clear()

    def sync_failed(self, rng: random.Random) -> None:
        """The cache keeps showing the written bytes; which of them reached the platter is decided
        now.
        """
        self.durable = _torn(self.durable, self.pending, rng)
        self.pending.clear()

    def evict(self, rng: random.Random) -> None:
        """Clean pages leave the cache, some or all: the platter's content is read again."""
        if self.data == self.durable:
            return
        share = rng.choice((0.0, 0.5, 1.0))
        dirty = {page for offset, data in self.pending for page in _pages(offset, data)}
        size = len(self.data) if self.pending else len(self.durable)
        kept = _truncated(bytearray(self.data), size)
        for page in range(-(-size // _PAGE)):
            if page not in dirty and rng.random() < share:
                start = page * _PAGE
                end = min(size, start + _PAGE)
                kept[start:end] = _truncated(self.durable[start:end], end - start)
        self.data = kept

    def lose_power(self, rng: random.Random) -> None:
        self.durable = _torn(self.durable, self.pending, rng)
        self.data = bytearray(self.durable)
        self.pending.clear()


def _pages(offset: int, data: bytes | None) -> range:
    """The pages that a write touches; a truncation touches no kept page."""
    return range(0) if not data else range(offset // _PAGE, -(-(offset + len(data)) // _PAGE))


def _written(target: bytearray, data: bytes, offset: int) -> bytearray:
    end = offset + len(data)
    if end <= len(target):
        target[offset:end] = data
        return target
    # A new object: a mapped one cannot grow.
    grown = target + bytes(end - len(target))
    grown[offset:end] = data
    return grown


def _truncated(target: bytearray, size: int) -> bytearray:
    return target[:size] if size <= len(target) else target + bytes(size - len(target))


def _applied(target: bytearray, offset: int, data: bytes | None) -> bytearray:
    return _truncated(target, offset) if data is None else _written(target, data, offset)


def _torn(durable: bytearray, history: Sequence[_Write], rng: random.Random) -> bytearray:
    """Every sector (or page) after some prefix of the writes; the size too."""
    style = rng.choice(("all", "none", "prefix", "sectors", "sectors", "pages"))
    if not history or style == "none":
        return durable
    if style in ("all", "prefix"):
        kept = len(history) if style == "all" else rng.randint(0, len(history))
        for offset, data in history[:kept]:
            durable = _applied(durable, offset, data)
        return durable
    unit = SECTOR if style == "sectors" else _PAGE
    count = len(history)
    size_after = rng.randint(0, count)
    size = len(durable)
    cutoffs: dict[int, int] = {}
    for index, (offset, data) in enumerate(history):
        if data is None:
            if index < size_after:
                size = offset
                durable = _truncated(durable, offset)
            continue
        end = offset + len(data)
        if index < size_after:
            size = max(size, end)
        position = offset
        while position < end:
            sector = position // unit
            boundary = min(end, (sector + 1) * unit)
            cutoff = cutoffs.get(sector)
            if cutoff is None:
                cutoff = cutoffs[sector] = count if rng.random() < 0.5 else rng.randint(0, count)
            if index < cutoff:
                piece = data[position - offset : boundary - offset]
                durable = _written(durable, piece, position)
            position = boundary
    return _truncated(durable, size)


class _FakeFile:
    def __init__(self, disk: FakeDisk, inode: _Inode, path: str, write: bool) -> None:
        self._disk = disk
        self._inode = inode
        self._write = write
        self._closed = False
        self.path = path

    def pwrite(self, data: Buffer, offset: int) -> None:
        assert self._write, f"{self.path} is open for reading"
        assert not self._closed, f"{self.path} is closed"
        assert offset >= 0
        self._disk.before_write(self._inode, self.path, bytes(data), offset)

    def pwritev(self, buffers: Sequence[Buffer], offset: int) -> None:
        self.pwrite(b"".join(buffers), offset)

    def pread(self, length: int, offset: int) -> bytes:
        self._disk.look("read", self.path)
        assert not self._closed, f"{self.path} is closed"
        return bytes(self._inode.data[offset : offset + length])

    def pread_now(self, length: int, offset: int) -> bytes | memoryview | None:
        self._disk.check_alive()
        if not self._disk.is_cached:
            return None
        assert not self._closed, f"{self.path} is closed"
        found = bytes(self._inode.data[offset : offset + length])
        return memoryview(found) if len(found) == length else None

    def sync(self) -> None:
        assert not self._closed, f"{self.path} is closed"
        try:
            self._disk.step("sync", self.path)
        except StorageError as error:
            self._disk.failed_syncs += 1
            self._inode.sync_failed(self._disk.rng)
            self._disk.has_failed_sync = True
            # The same error whatever the cause, as in OsFs: a failed sync is not a full disk.
            raise SyncFailed(str(error)) from error
        self._inode.sync()

    def size(self) -> int:
        self._disk.check_alive()
        return len(self._inode.data)

    def truncate(self, size: int) -> None:
        assert self._write, f"{self.path} is open for reading"
        self._disk.step("truncate", self.path)
        self._disk.make_room(size - len(self._inode.data), self.path)
        self._inode.truncate(size)

    def close(self) -> None:
        self._closed = True


class _FakeLock:
    def __init__(self, locks: dict[_Inode | str, str], key: _Inode | str) -> None:
        self._locks = locks
        self._key: _Inode | str | None = key

    def release(self) -> None:
        if self._key is not None:
            self._locks.pop(self._key, None)
        self._key = None


# A directory operation: ("link", name, inode), ("unlink", name, None), ("rename" or "move", new,
# old name); a move is pending in the old name's directory.
_DirOp = tuple[str, str, "_Inode | str | None"]


class FakeDisk:
    """`Fs` in memory. `seed` decides every choice; `boot_id` changes with each power loss.

    `evicts`: after a `kill` pages may be read from the platter again, as under memory pressure;
    only a failed sync has left other content there (see `_Inode.sync_failed`).
    """

    def __init__(self, seed: int = 0, *, capacity_bytes: int | None = None) -> None:
        self.rng = random.Random(seed)
        self.capacity_bytes = capacity_bytes
        self.boot_id = "boot-1"
        self.evicts = False
        # Whether the page cache has every file, so that `pread_now` returns its bytes.
        self.is_cached = False
        self.failed_syncs = 0
        # Files whose last write was refused.
        self.refused: set[str] = set()
        # A sync of some file has failed on this disk.
        self.has_failed_sync = False
        self.ops = 0
        self.crashed = False
        self.log: list[tuple[str, str]] = []
        self._boots = 1
        self._crash_at: int | None = None
        self._rules: list[_Rule] = []
        self._files: dict[str, _Inode] = {}
        self._durable: dict[str, _Inode] = {}
        self._dirs: set[str] = {"", ".", "/"}
        self._durable_dirs: set[str] = set(self._dirs)
        self._pending: dict[str, list[_DirOp]] = {}
        # Text by the locked object: a file itself, whatever its current name, or a directory's
        # path.
        self._locks: dict[_Inode | str, str] = {}
        self._numbers: dict[str, int] = {}
        # Directories that are kept open, as locks of their own.
        self._held: dict[_Inode | str, str] = {}

    # -- faults ----------------------------------------------------------------------------

    def fail(
        self, op: Op | Look, error: Fault, *, nth: int = 1, path: str = "*", times: int | None = 1
    ) -> None:
        """From the nth matching operation on, `times` of them (`None`: for ever) fail.

        `any` stands for all changing operations, not for looks.
        """
        self._rules.append(_Rule(op, error, path, nth - 1, times))

    def forbid(self, path: str, error: Fault, *ops: Op | Look) -> None:
        """These operations fail on the file that has this name now, until it is removed."""
        self._rules += [_Rule(op, error, path, 0, None, self._files.get(path)) for op in ops]

    def heal(self) -> None:
        """Remove every rule."""
        self._rules.clear()
        self._crash_at = None

    def crash_at(self, nth: int) -> None:
        """Raise `SimulatedCrash` at the nth changing operation from now (1 = the next)."""
        self._crash_at = self.ops + nth

    def crash(self, mode: Mode) -> None:
        """The process dies; every later call raises until `reopen`."""
        self.crashed = True
        self._locks.clear()
        if mode == "power":
            self._boots += 1
            self.boot_id = f"boot-{self._boots}"
            self._lose_power()
        elif self.evicts:
            for inode in self._files.values():
                inode.evict(self.rng)

    def reopen(self) -> FakeDisk:
        """The same disk for the next process: old handles stay dead, rules are gone."""
        assert self.crashed, "reopen follows a crash"
        disk = FakeDisk(0, capacity_bytes=self.capacity_bytes)
        disk.rng = self.rng
        disk.boot_id, disk._boots = self.boot_id, self._boots
        disk.evicts = self.evicts
        disk.has_failed_sync = self.has_failed_sync
        disk.refused = self.refused
        disk._files, disk._durable = self._files, self._durable
        disk._dirs, disk._durable_dirs = self._dirs, self._durable_dirs
        disk._pending = self._pending
        return disk

    def check_alive(self) -> None:
        """Raise after a crash."""
        if self.crashed:
            raise SimulatedCrash

    def step(self, op: Op, path: str) -> None:
        """Count a changing operation and raise the error of a rule."""
        fault = self._fault(op, path)
        if fault is not None:
            self._raise(fault, path)

    def _fault(self, op: Op, path: str) -> Fault | None:
        self.check_alive()
        self.ops += 1
        self.log.append((op, path))
        if self.ops == self._crash_at:
            return "crash"
        return self._ruled((op, "any"), path)

    def look(self, op: Look, path: str) -> None:
        """A call that changes nothing; it may fail too."""
        self.check_alive()
        if self._rules and (fault := self._ruled((op,), path)) is not None:
            self._raise(fault, path)

    def _ruled(self, ops: tuple[str, ...], path: str) -> Fault | None:
        for rule in self._rules:
            if rule.op in ops and fnmatch.fnmatch(path, rule.path) and rule.times != 0:
                if rule.inode is not None and self._files.get(path) is not rule.inode:
                    continue
                if rule.skip:
                    rule.skip -= 1
                    continue
                if rule.times is not None:
                    rule.times -= 1
                return rule.error
        return None

    def _raise(self, fault: Fault, path: str) -> None:
        match fault:
            case "crash":
                self.crashed = True
                raise SimulatedCrash
            case "enospc" | "emfile" | "partial":
                code = errno.EMFILE if fault == "emfile" else errno.ENOSPC
                raise DiskFull(errno.errorcode[code], path)
            case "eio":
                raise StorageError("EIO", path)
            case "eacces":
                raise StorageError("EACCES", path)

    # -- bytes -----------------------------------------------------------------------------

    def before_write(self, inode: _Inode, path: str, data: bytes, offset: int) -> None:
        """One write with its faults: nothing, a part or all of it lands."""
        self.refused.add(path)
        self._write_some(inode, path, data, offset)
        self.refused.discard(path)

    def _write_some(self, inode: _Inode, path: str, data: bytes, offset: int) -> None:
        fault = self._fault("write", path)
        if fault in ("partial", "crash", "enospc") and data:
            landed = self.rng.choice((0, self.rng.randrange(len(data)), len(data)))
            if fault == "partial":
                landed = max(1, landed - 1)
            if landed:
                inode.write(data[:landed], offset)
        if fault is not None:
            if fault in ("eio", "partial"):
                raise DiskFull("EIO", path)  # the error that OsFs makes of EIO on a write
            self._raise(fault, path)
        room = self.room_bytes()
        grows = offset + len(data) - len(inode.data)
        if grows > room:
            landed = max(0, len(data) - (grows - room))
            if landed:
                inode.write(data[:landed], offset)
            raise DiskFull("ENOSPC", path)
        inode.write(data, offset)

    def room_bytes(self) -> int:
        """Bytes that can still be allocated."""
        return 2**62 if self.capacity_bytes is None else self.capacity_bytes - self.used_bytes()

    def used_bytes(self) -> int:
        """Bytes allocated to files that have a name."""
        return sum(len(inode.data) for inode in self._files.values())

    def make_room(self, grows: int, path: str) -> None:
        """Refuse an allocation for which the disk has no room."""
        if grows > 0 and grows > self.room_bytes():
            raise DiskFull("ENOSPC", path)

    def corrupt(self, path: str, offset: int, flip: int = 0x01) -> None:
        """Flip bits of one byte, on the platter and in the cache."""
        inode = self._files[path]
        inode.data[offset] ^= flip
        if offset < len(inode.durable):
            inode.durable[offset] ^= flip

    def lose(self, path: str) -> None:
        """Remove a file as somebody else would: its name is gone from the platter too."""
        self._apply_dir_ops(self._pending.pop(_parent(path), []))
        del self._files[path]
        self._durable.pop(path, None)

    def put(self, path: str, content: bytes) -> None:
        """Put a synced file here as somebody else would: a new inode with the old name."""
        self._apply_dir_ops(self._pending.pop(_parent(path), []))
        inode = _Inode()
        inode.data, inode.durable = bytearray(content), bytearray(content)
        folder = _parent(path)
        while folder not in self._dirs:
            self._dirs.add(folder)
            self._durable_dirs.add(folder)
            folder = _parent(folder)
        self._files[path] = self._durable[path] = inode

    def image(self) -> DiskImage:
        """The content that a reader sees now."""
        files = {path: bytes(inode.data) for path, inode in self._files.items()}
        return DiskImage(files, frozenset(self._dirs), self.boot_id)

    @classmethod
    def of(cls, image: DiskImage, seed: int = 0) -> FakeDisk:
        """A disk that holds a synced copy of this image."""
        disk = cls(seed)
        disk.boot_id = image.boot_id
        disk._boots = int(image.boot_id.rpartition("-")[2])
        disk._dirs, disk._durable_dirs = set(image.dirs), set(image.dirs)
        for path, content in image.files.items():
            disk.put(path, content)
        return disk

    def content(self, path: str) -> bytes:
        """The bytes that a reader sees now."""
        return bytes(self._files[path].data)

    def durable_content(self, path: str) -> bytes:
        """The content that certainly survives a power loss."""
        return bytes(self._files[path].durable)

    def unsynced_files(self) -> list[str]:
        """Paths with unsynced writes."""
        return sorted(p for p, i in self._files.items() if i.pending)

    # -- names -----------------------------------------------------------------------------

    def _lose_power(self) -> None:
        for ops in self._pending.values():
            kept = self.rng.choice((0, len(ops), self.rng.randint(0, len(ops))))
            self._apply_dir_ops(ops[:kept])
        self._pending = {}
        # A removed directory takes its files along.
        self._dirs = {d for d in self._durable_dirs if self._is_reachable(d)}
        self._durable_dirs = set(self._dirs)
        reachable = {p: i for p, i in self._durable.items() if _parent(p) in self._dirs}
        self._files, self._durable = dict(reachable), reachable
        for inode in {id(i): i for i in self._files.values()}.values():
            inode.lose_power(self.rng)

    def _is_reachable(self, path: str) -> bool:
        while path not in ("", ".", "/"):
            if path not in self._durable_dirs:
                return False
            path = _parent(path)
        return True

    def _apply_dir_ops(self, ops: Sequence[_DirOp]) -> None:
        for op, path, value in ops:
            if op == "link":
                assert isinstance(value, _Inode)
                self._durable[path] = value
            elif op == "unlink":
                self._durable.pop(path, None)
            elif op in ("rename", "move"):
                assert isinstance(value, str)
                self._durable[path] = self._durable.pop(value)
            elif op == "mkdir":
                self._durable_dirs.add(path)
            else:
                assert op == "rmdir"
                self._durable_dirs.discard(path)

    def _note(self, op: str, path: str, value: _Inode | str | None = None) -> None:
        self._pending.setdefault(_parent(path), []).append((op, path, value))

    def open(self, path: str, *, write: bool = False, create: bool = False) -> File:
        """See `Fs.open`."""
        self.step("open", path)
        inode = self._files.get(path)
        if create:
            if _parent(path) not in self._dirs:
                raise NotThere("ENOENT", path)
            if inode is None:
                inode = self._files[path] = _Inode()
                self._note("link", path, inode)
            else:
                inode.truncate(0)
        elif inode is None:
            raise NotThere("ENOENT", path)
        return _FakeFile(self, inode, path, write or create)

    def rename(self, old: str, new: str) -> None:
        """See `Fs.rename`."""
        assert _parent(old) == _parent(new)
        self.step("rename", new)
        if old not in self._files:
            raise NotThere("ENOENT", old)
        self._files[new] = self._files.pop(old)
        self._note("rename", new, old)

    def move(self, old: str, new: str) -> None:
        """See `Fs.move`. A directory's move is durable at once, with all its content."""
        self.step("rename", new)
        if _parent(new) not in self._dirs or (old not in self._files and old not in self._dirs):
            raise NotThere("ENOENT", old)
        if new in self._files or new in self._dirs:
            raise StorageError("EEXIST", new)
        if old in self._files:
            self._files[new] = self._files.pop(old)
            self._pending.setdefault(_parent(old), []).append(("move", new, old))
            return
        for folder in (_parent(old), _parent(new), *self._dirs):
            self._apply_dir_ops(self._pending.pop(folder, []))

        def moved(path: str) -> str:
            return new + path[len(old) :] if path == old or path.startswith(f"{old}/") else path

        self._files = {moved(path): inode for path, inode in self._files.items()}
        self._durable = {moved(path): inode for path, inode in self._durable.items()}
        self._dirs = set(map(moved, self._dirs))
        self._durable_dirs = set(map(moved, self._durable_dirs))

    def unlink(self, path: str, *, missing_ok: bool = False) -> None:
        """See `Fs.unlink`."""
        self.step("unlink", path)
        if self._files.pop(path, None) is not None:
            self._note("unlink", path)
        elif not missing_ok:
            raise NotThere("ENOENT", path)

    def list_dir(self, path: str) -> list[str]:
        """See `Fs.list_dir`."""
        self.look("list", path)
        names = {p for p in (*self._files, *self._dirs) if p and _parent(p) == path and p != path}
        return sorted(name.rpartition("/")[2] for name in names)

    def make_dir(self, path: str, mode: int = 0o700) -> None:
        """See `Fs.make_dir`."""
        self.check_alive()
        if path in self._dirs:
            return
        if _parent(path) not in self._dirs:
            raise NotThere("ENOENT", path)
        self.step("make_dir", path)
        self._dirs.add(path)
        self._note("mkdir", path)

    def remove_dir(self, path: str) -> None:
        """See `Fs.remove_dir`."""
        self.check_alive()
        if path not in self._dirs:
            return
        if self.list_dir(path):
            raise StorageError("ENOTEMPTY", path)
        self._dirs.discard(path)
        self._note("rmdir", path)

    def sync_dir(self, path: str) -> None:
        """See `Fs.sync_dir`."""
        self.check_alive()
        if path not in self._dirs:
            raise NotThere("ENOENT", path)
        try:
            self.step("sync_dir", path)
        except DiskFull as error:
            if errno.errorcode[errno.EMFILE] not in str(error):
                raise SyncFailed(str(error)) from error
            if path not in self._held:
                raise  # the directory could not be opened, so no sync was tried
        except StorageError as error:
            raise SyncFailed(str(error)) from error
        for ops in [ops for parent, ops in self._pending.items() if parent != path]:
            # A move into this directory takes effect with what its old directory saw before it.
            moves = [n for n, op in enumerate(ops) if op[0] == "move" and _parent(op[1]) == path]
            if moves:
                self._apply_dir_ops(ops[: moves[-1] + 1])
                del ops[: moves[-1] + 1]
        self._apply_dir_ops(self._pending.pop(path, []))

    def hold_dir(self, path: str) -> Lock:
        """See `Fs.hold_dir`."""
        self.check_alive()
        if path not in self._dirs:
            raise NotThere("ENOENT", path)
        assert path not in self._held, "held once at a time"
        self._held[path] = "held"
        return _FakeLock(self._held, path)

    def exists(self, path: str) -> bool:
        """See `Fs.exists`."""
        self.look("stat", path)
        return path in self._files or path in self._dirs

    def identity(self, path: str) -> tuple[int, int] | None:
        """See `Fs.identity`; there are no links, so a path is its own inode."""
        return (
            (1, self._numbers.setdefault(path, len(self._numbers))) if self.exists(path) else None
        )

    def real_path(self, path: str) -> str:
        """See `Fs.real_path`."""
        return path

    def file_size(self, path: str) -> int:
        """See `Fs.file_size`."""
        self.look("stat", path)
        if path not in self._files:
            raise NotThere("ENOENT", path)
        return len(self._files[path].data)

    def free_bytes(self, path: str) -> int:
        """See `Fs.free_bytes`."""
        return max(0, min(self.room_bytes(), 2**40))

    def total_bytes(self, path: str) -> int:
        """See `Fs.total_bytes`."""
        return 2**40 if self.capacity_bytes is None else self.capacity_bytes

    def map(self, path: str) -> memoryview:
        """See `Fs.map`; the view shows later writes as long as the file keeps its size."""
        self.look("map", path)
        if path not in self._files:
            raise NotThere("ENOENT", path)
        return memoryview(self._files[path].data).toreadonly()

    def lock(self, path: str, text: str) -> Lock:
        """See `Fs.lock`."""
        self.check_alive()
        if path not in self._files:
            self.open(path, create=True)
        return self._lock(self._files[path], path, text)

    def lock_dir(self, path: str) -> Lock | None:
        """See `Fs.lock_dir`."""
        self.check_alive()
        if path not in self._dirs:
            raise NotThere("ENOENT", path)
        return self._lock(path, path, "a server")

    def _lock(self, key: _Inode | str, path: str, text: str) -> Lock:
        if key in self._locks:
            raise StartRefused(f"in use by another server ({self._locks[key]})", path)
        self._locks[key] = text
        return _FakeLock(self._locks, key)


def _parent(path: str) -> str:
    head, slash, _ = path.rpartition("/")
    return head or ("/" if slash else ".")
