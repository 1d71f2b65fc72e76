"""The current journal file of a shard: preallocation, writes, rotation.

Plain blocking calls without threads or loop. The holder of the shard's turn (its worker, or the
loop while the worker is idle) calls them, one at a time, with one exception: `write` may run on the
loop while `sync` runs on the worker. No field is changed by both, and `sync` notes what it covers
before it begins. Invariants:

- Groups are written only below `filled`, where the file is zeros already: a write never grows it.
- A file's header and name are synced before its first group is written, and a file is synced whole
  before the next one gets its first group. Recovery relies on this to tell torn from corrupt.
- A *spare* is the next file, made ahead, with `reserve_bytes` filled. Ordinary groups are written
  only while a spare exists, so a full disk leaves a whole spare for urgent entries.
- Room for ordinary entries is made only where `may_fill` says that enough stays free; urgent ones
  (deletes, acks, drops) may use up the spare and the rest of the disk.
- After a failed write nothing is written before `cut` has zeroed its possible remains.
- The end mark never claims more than is true: it is written after each write and each sync. Before
  a file gets its first group, a synced mark names the file, so the mark never names a trimmed file.
  The mark reports a sync as under way from before the sync until it has succeeded: after a failure
  the kernel may forget the writes since the last sync. The holder of the turn writes the mark;
  during a sync or a fill on the worker that is the loop. The mark is made durable before anything
  outside the journal relies on a sync (a snapshot, delete flags, a segment).

Called by `wal_writer`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

import msgspec

from topics_server.runtime.clock import pause
from topics_server.runtime.metrics import log
from topics_server.values.errors import DiskFull, StorageError, SyncFailed
from topics_server.values.limits import (
    GROUP_BYTES_MAX,
    KIB,
    MIB,
    WAL_FILE_BYTES,
    WAL_FILL_STEP_BYTES,
)
from topics_server.wal import layout
from topics_server.wal.format.end_marks import EndMark
from topics_server.wal.format.frames import FRAME_HEADER_BYTES, Opening, encode_opening
from topics_server.wal.format.groups import (
    FILE_HEADER_BYTES,
    GROUP_HEADER_BYTES,
    FileHeader,
    encode_file_header,
    encode_group,
    group_length,
)
from topics_server.wal.fs import File, Fs
from topics_server.wal.journal.end_mark_file import EndMarkFile
from topics_server.wal.journal.group_commit import NextGroup

RESERVE_BYTES: Final = MIB
# Bytes filled in one call. The kernel locks the file during the call, so the loop's writes wait;
# and after each call the worker must take the interpreter's lock again.
_ZEROS: Final = memoryview(bytes(256 * KIB))
# Pause in seconds after a fill step if another thread is writing. The waiting thread gets the
# file's lock only if this one does not take it again at once (Linux lets a waiter go first after 4
# ms).
_PAUSE_S: Final = 0.0001
_OPENING_BYTES: Final = FRAME_HEADER_BYTES + 16

assert RESERVE_BYTES < WAL_FILL_STEP_BYTES <= WAL_FILE_BYTES
assert GROUP_BYTES_MAX < WAL_FILE_BYTES


class Sizes(NamedTuple):
    """How large journal files are and how far ahead they are filled; tests use small ones."""

    file_bytes: int = WAL_FILE_BYTES
    fill_step_bytes: int = WAL_FILL_STEP_BYTES
    reserve_bytes: int = RESERVE_BYTES


class ClosedFile(NamedTuple):
    """A journal file without further groups; every entry in it has an lsn <= `last_lsn`."""

    path: str
    last_lsn: int
    bytes: int = 0


class _Live:
    """A file that is open for writing."""

    __slots__ = ("file", "file_id", "filled", "is_written", "number")

    def __init__(self, file: File, file_id: int, number: int) -> None:
        self.file = file
        self.file_id = file_id
        self.number = number
        self.filled = 0
        # Whether a group is being written.
        self.is_written = False

    def fill(self, upto: int) -> None:
        """Write zeros up to a position; what a failed call has filled is not counted."""
        position = self.filled
        while position < upto:
            step = min(len(_ZEROS), upto - position)
            self.file.pwrite(_ZEROS[:step], position)
            position += step
            self.filled = position
            if self.is_written:
                pause(_PAUSE_S)


class WalFile:
    """The state of one shard's file.

    `end`: the position of the next group; `last_lsn`: the last written lsn.

    `written_bytes`, `covered_bytes`: bytes of groups ever written and ever synced (marks do not
    count). `spares`: the next files; without a spare only urgent entries are written.
    """

    def __init__(
        self,
        fs: Fs,
        wal_dir: str,
        wal_set: int,
        shard: int,
        *,
        number: int,
        opening: Opening,
        new_file_id: Callable[[], int],
        sizes: Sizes,
        run: int = 0,
        may_fill: Callable[[int], bool] = lambda size: True,
    ) -> None:
        assert sizes.reserve_bytes > FILE_HEADER_BYTES + group_length(_OPENING_BYTES)
        assert sizes.file_bytes >= sizes.fill_step_bytes >= sizes.reserve_bytes
        self._fs: Final = fs
        self._wal_dir: Final = wal_dir
        self._wal_set: Final = wal_set
        self._shard: Final = shard
        self._new_file_id: Final = new_file_id
        self._sizes: Final = sizes
        self._may_fill: Final = may_fill
        # When fewer than this many bytes of a file are left, a second spare is made.
        self._near_end: Final = sizes.file_bytes // 4
        self._ahead_bytes = sizes.fill_step_bytes
        self._run: Final = run
        self._next_number = number
        self._last_number = opening.previous_number
        self._opening: Opening | None = opening
        self.spares: list[_Live] = []
        self._limit = sizes.file_bytes
        self._marked = FILE_HEADER_BYTES
        self._broken_bytes = 0
        self._refused_bytes = 0
        self.closed: list[ClosedFile] = []
        self.last_lsn = self.synced_lsn = opening.previous_lsn
        self.written_bytes = self.covered_bytes = 0
        self.rotations = 0
        self.end = self.synced_bytes = FILE_HEADER_BYTES
        self._live = self._make_file(FILE_HEADER_BYTES)
        self._is_syncing = False
        # Whether the newest note is missing in the end mark, because the disk refused it.
        self.is_mark_refused = False
        # Whether the end mark has everything that was written.
        self.is_noted = True
        # The mark that is known to be durable, and the mark that is being made durable.
        self._held = self._end_mark_now()
        self._holding: EndMark | None = None
        self._end_mark = EndMarkFile.open(fs, wal_dir, wal_set, shard, self._held)

    # -- state -----------------------------------------------------------------------------

    @property
    def path(self) -> str:
        """The file that groups are written to."""
        return self._live.file.path

    def has_room(self, frames_bytes: int) -> bool:
        """Whether a group with this many bytes of frames fits into the filled part of the file."""
        if self._opening is not None:
            frames_bytes += _OPENING_BYTES
        # The body of `group_length`, inlined, because every write needs it.
        return self.end + ((GROUP_HEADER_BYTES + frames_bytes + 7) & ~7) <= self._live.filled

    @property
    def dirty_bytes(self) -> int:
        """Bytes of unsynced groups."""
        return self.written_bytes - self.covered_bytes

    @property
    def wants_room(self) -> bool:
        """Whether `prepare` has work to do."""
        end, limit, filled = self.end, self._limit, self._live.filled
        # Fill little at a time: a request beside a long fill waits for the disk.
        if filled < limit and filled < end + self._ahead_bytes * 7 // 8:
            return True
        # Near the end of a file a second spare is made too, so that no request waits for it.
        return not self.spares or (limit - end < self._near_end and len(self.spares) < 2)

    @property
    def may_rotate(self) -> bool:
        """Whether `prepare` may change to the next file: then nothing may be written meanwhile."""
        return self._refused_bytes > 0

    @property
    def is_broken(self) -> bool:
        """Whether a write failed and `cut` has not succeeded since."""
        return self._broken_bytes > 0

    # -- room ------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Fill ahead, make a spare, and make room for the last refused write. Raises `DiskFull`.

        Without `may_rotate`, other calls may write meanwhile: this changes nothing below `filled`.
        """
        wanted = 2 if self._limit - self.end < self._near_end else 1
        if len(self.spares) < wanted:
            self._make_spare()
        if self._refused_bytes:
            self._make_ordinary_room(self._refused_bytes)
            self._refused_bytes = 0
        # Fill one step at a time: a sync may run between two steps.
        step = max(self._live.filled, self.end) + self._sizes.fill_step_bytes
        self._fill_ahead_to(min(self._limit, self.end + self._ahead_bytes, step))

    def make_room(self, frames_bytes: int, *, urgent: bool) -> None:
        """Make `has_room` true. Raises `DiskFull`; urgent entries may use up the spare first."""
        if self.has_room(frames_bytes):
            if not urgent and not self.spares:
                self._make_spare()
            return
        try:
            self._make_ordinary_room(frames_bytes)
        except DiskFull:
            if not urgent:
                # A group of unusual size must not delay ordinary ones.
                self._refused_bytes = min(frames_bytes, self._sizes.fill_step_bytes)
                raise
            if not self.has_room(frames_bytes) and self.spares and self._opening is None:
                self._rotate()
            if not self.has_room(frames_bytes):
                self._fill_to(self.end + group_length(frames_bytes + _OPENING_BYTES))
        assert self.has_room(frames_bytes)

    def _make_ordinary_room(self, frames_bytes: int) -> None:
        if not self.spares:
            self._make_spare()
        needed = group_length(frames_bytes + _OPENING_BYTES)
        if self.end + needed > self._limit and self._opening is None:
            # Make the spare after the next one, before this one is used.
            if len(self.spares) < 2:
                self._make_spare()
            self._rotate()
        if self.end + needed > self._limit:
            assert self.end == FILE_HEADER_BYTES
            self._limit = self.end + needed
        elif self.end > FILE_HEADER_BYTES:
            # Filling is too slow: syncs take long, or much is written.
            self._ahead_bytes = min(2 * self._ahead_bytes, self._sizes.file_bytes // 2)
        self._fill_ahead_to(min(self._limit, self.end + max(needed, self._sizes.reserve_bytes)))

    def _fill_ahead_to(self, upto: int) -> None:
        """Like `_fill_to`, for ordinary entries: keeps the required free space."""
        if upto > self._live.filled:
            self._leave_floor(upto - self._live.filled)
            self._fill_to(upto)

    def _leave_floor(self, size: int) -> None:
        if not self._may_fill(size):
            raise DiskFull(f"{size} bytes more would leave less free than must be", self._wal_dir)

    def _fill_to(self, upto: int) -> None:
        if upto > self._live.filled:
            self._live.fill(upto)

    def _make_spare(self) -> None:
        self._leave_floor(self._sizes.reserve_bytes)
        self.spares.append(self._make_file(self._sizes.reserve_bytes))

    def _make_file(self, fill_bytes: int) -> _Live:
        """Make a file with a header, filled, and synced together with its name."""
        number = self._next_number
        path = layout.join(
            self._wal_dir, layout.wal_file(layout.WalName(self._wal_set, self._shard, number))
        )
        file_id = self._new_file_id()
        header = FileHeader(
            self._wal_set,
            self._shard,
            number,
            file_id,
            self.synced_lsn,
            predecessor=self._last_number,
            run=self._run,
            declared_bytes=fill_bytes,
        )
        file = self._fs.open(path, create=True)
        live = _Live(file, file_id, number)
        try:
            live.fill(fill_bytes)
            file.pwrite(encode_file_header(header), 0)
            file.sync()
            self._fs.sync_dir(self._wal_dir)
        except SyncFailed:
            raise
        except StorageError:
            # Free the space. If the removal fails, recovery finds the file unused.
            file.close()
            self._fs.unlink(path, missing_ok=True)
            raise
        self._next_number = number + 1
        self._last_number = number
        return live

    def _rotate(self) -> None:
        assert self.spares
        assert self._opening is None, "an empty file is never left behind"
        old, new = self._live, self.spares[0]
        self.note_syncing()
        self.sync()
        self._is_syncing = False
        # Do this before any field changes: if the disk refuses, the old file stays in use.
        beginning = msgspec.structs.replace(
            self._end_mark_now(),
            number=new.number,
            file_id=new.file_id,
            written_end=FILE_HEADER_BYTES,
            synced_end=FILE_HEADER_BYTES,
        )
        self._end_mark.begin(beginning)
        self._held = beginning
        self._opening = Opening(old.number, self.end, self.last_lsn)
        self.closed.append(ClosedFile(old.file.path, self.last_lsn, old.filled))
        self._live = new
        del self.spares[0]
        self._limit = self._sizes.file_bytes
        self.end = self.synced_bytes = self._marked = FILE_HEADER_BYTES
        self._ahead_bytes = max(self._sizes.fill_step_bytes, self._ahead_bytes // 2)
        self.rotations += 1
        old.file.close()

    # -- bytes -----------------------------------------------------------------------------

    def write(self, group: NextGroup, *, sync_follows: bool = False) -> None:
        """Write one group. After a failure nothing counts as written, and `cut` must follow.

        `sync_follows`: the caller syncs next, and nothing is written before that. `note_end` must
        follow in any case, before a sync begins.
        """
        assert not self._broken_bytes, "cut before writing again"
        assert group.first_lsn > self.last_lsn, "lsns of a shard ascend"
        buffers, frames_bytes = group.buffers, group.frames_bytes
        count = group.frame_count
        if self._opening is not None:
            buffers = [encode_opening(self._opening), *buffers]
            frames_bytes += _OPENING_BYTES
            count += 1
        self._write(buffers, frames_bytes, count)
        self._opening = None
        self.last_lsn = group.last_lsn
        self.written_bytes += frames_bytes
        self._is_syncing |= sync_follows
        self.is_noted = False

    def _write(self, buffers: list[bytes], frames_bytes: int, count: int) -> None:
        live, end, synced = self._live, self.end, self.synced_bytes
        length = (GROUP_HEADER_BYTES + frames_bytes + 7) & ~7
        assert end + length <= live.filled, "never write where the file is not zeros"
        encoded = encode_group(
            buffers,
            frames_bytes,
            count,
            file_id=live.file_id,
            position=end,
            synced_bytes=synced,
        )
        self._broken_bytes = length
        live.is_written = True
        try:
            if len(encoded) == 1:
                live.file.pwrite(encoded[0], end)
            else:
                live.file.pwritev(encoded, end)
        finally:
            live.is_written = False
        self._broken_bytes = 0
        self.end = end + length
        self._marked = synced

    def sync(self) -> None:
        """Make every group written before this call durable. A failure is final."""
        end, last_lsn, written_bytes = self.end, self.last_lsn, self.written_bytes
        self._live.file.sync()
        self.synced_bytes = end
        self.synced_lsn = last_lsn
        self.covered_bytes = written_bytes

    def mark(self) -> None:
        """Write into the file how far it is synced, unless a group there already says so.

        The mark itself is neither synced nor counted as dirty: losing it does no harm.
        """
        has_space = self._live.filled >= self.end + GROUP_HEADER_BYTES
        if self._marked < self.synced_bytes and self._opening is None and has_space:
            self._write([], 0, 0)

    def cut(self) -> None:
        """Zero or truncate the possible remains of a failed write, and sync; may raise."""
        length = self._broken_bytes
        assert length
        self.note_syncing()
        try:
            for start in range(0, length, len(_ZEROS)):
                self._live.file.pwrite(_ZEROS[: length - start], self.end + start)
        except DiskFull:
            # A copy-on-write disk may have no room even for zeros; then truncate the file.
            self._live.file.truncate(self.end)
            self._live.filled = self.end
        self.sync()
        self.note_synced()
        self._broken_bytes = 0

    # -- the end mark ----------------------------------------------------------------------

    def note_syncing(self) -> None:
        """Mark a sync as under way: until it has succeeded, unsynced groups may vanish.

        The mark of a group that was written with `sync_follows` says so already.
        """
        if not (self._is_syncing and self.is_noted):
            self._is_syncing = True
            self.note_end()

    def note_synced(self) -> None:
        """Write the synced end into the end mark: the sync has succeeded."""
        self._is_syncing = False
        self.note_end()

    def finish(self) -> None:
        """Sync the end mark; no write follows. Raises `StorageError`."""
        self._end_mark.begin(self._end_mark_now())

    @property
    def is_held(self) -> bool:
        """Whether the end mark on disk covers everything that is synced now."""
        return (self._held.number, self._held.synced_end) == (self._live.number, self.synced_bytes)

    def begin_hold(self) -> None:
        """Write the end mark; `hold` then makes it durable."""
        self._holding = None
        mark = self._end_mark_now()
        try:
            self._end_mark.write_beginning(mark)
        except StorageError as error:
            log.warning("an end mark was not written and is behind: %s", error)
        else:
            self._holding = mark

    def hold(self) -> None:
        """*Blocking.* Make the mark durable.

        If the disk refuses, the older mark stays, which is also true.
        """
        if self._holding is None:
            return
        try:
            self._end_mark.sync_beginning()
        except StorageError as error:
            log.warning("an end mark was not synced and is behind: %s", error)
            return
        self._held = self._holding

    def note_end(self) -> None:
        """Write the end mark. If the disk refuses, the old mark stays, which is also true."""
        try:
            self._end_mark.note(self._end_mark_now())
        except StorageError as error:
            if not self.is_mark_refused:
                log.warning("an end mark was not written and is behind: %s", error)
            self.is_mark_refused = True
        else:
            self.is_mark_refused = False
        self.is_noted = not self.is_mark_refused

    def _end_mark_now(self) -> EndMark:
        live = self._live
        return EndMark(
            self._run,
            live.number,
            live.file_id,
            self.end,
            self.synced_bytes,
            self.last_lsn,
            self.synced_lsn,
            self._is_syncing,
        )

    def close(self) -> None:
        """Close the files; the next recovery removes an unused spare."""
        for live in (self._live, *self.spares):
            live.file.close()
        self._end_mark.close()
