"""Reads the newest synced entries of a running server's journal repeatedly.

The server continues to write. The caller passes an lsn up to which every shard is synced, and how
far each shard is synced. Each shard's files are read from where the last call ended; a group that
begins after the caller's lsn is left for a later call, because it may still be undone. It is damage
if a shard ends before its known synced end, or if a file is missing. Frames are read as raw bytes:
the checksums of their groups are compared, and no payload is decoded. Called by `shipper`.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Final

from topics_server.archive.continuous.steps import Steps
from topics_server.values.errors import Corrupt, NotThere, StorageError
from topics_server.values.limits import KIB
from topics_server.values.storage_types import SyncedShard
from topics_server.wal.format.frames import RawFrame
from topics_server.wal.format.groups import FILE_HEADER_BYTES, Ending, Scan, raw_group
from topics_server.wal.fs import Fs
from topics_server.wal.journal.file_chain import JournalFile, Key, needed_files, open_files

# A file before the start may be removed between the listing and its opening.
_TRIES: Final = 5
# Bytes of one read; more for a larger group.
_CHUNK_BYTES: Final = 256 * KIB


class JournalTail:
    """The journal from one lsn on. All calls block."""

    def __init__(self, fs: Fs, wal_dir: str, start_lsn: int, steps: Steps) -> None:
        """Raise `StartRefused` or `Corrupt` if entries from `start_lsn` on are missing."""
        self._fs: Final = fs
        self._wal_dir: Final = wal_dir
        self._shards: Final[dict[Key, _ShardTail]] = {}
        found = _opened(fs, wal_dir, None)
        try:
            for key, files in sorted(found.items()):
                needed = needed_files(wal_dir, key, files, start_lsn)
                self._shards[key] = _ShardTail(fs, wal_dir, key, needed, start_lsn, steps)
        finally:
            kept = {id(file) for shard in self._shards.values() for file in shard.files}
            for files in found.values():
                for each in files:
                    if id(each) not in kept:
                        each.file.close()

    def read(self, upto_lsn: int, synced: Sequence[SyncedShard], max_bytes: int) -> list[RawFrame]:
        """The next frames of all shards up to an lsn, by lsn, about `max_bytes` of them.

        `synced`: how far each open shard is synced; every shard has synced all its entries up to
        `upto_lsn`. Raises `Corrupt`.
        """
        known = {(each.wal_set, each.shard): each.synced_lsn for each in synced}
        for key in known.keys() - self._shards.keys():
            raise Corrupt(f"the files of wal set {key[0]}, shard {key[1]} are missing")
        fronts: list[tuple[int, Key]] = []
        for key in self._shards:
            self._push(fronts, key, upto_lsn, known)
        frames: list[RawFrame] = []
        left = max_bytes
        while fronts and left > 0:
            _, key = heapq.heappop(fronts)
            bound = min(upto_lsn, fronts[0][0]) if fronts else upto_lsn
            left -= self._shards[key].take(frames, bound, left)
            self._push(fronts, key, upto_lsn, known)
        return frames

    def _push(
        self, fronts: list[tuple[int, Key]], key: Key, upto_lsn: int, known: Mapping[Key, int]
    ) -> None:
        lsn = self._shards[key].front(upto_lsn, known.get(key))
        if lsn is not None:
            heapq.heappush(fronts, (lsn, key))

    def close(self) -> None:
        """Close the files."""
        for shard in self._shards.values():
            for each in shard.files:
                each.file.close()
            shard.files.clear()


class _ShardTail:
    """One shard. `files`: the file that is read, and the known files after it."""

    def __init__(
        self,
        fs: Fs,
        wal_dir: str,
        key: Key,
        files: list[JournalFile],
        start_lsn: int,
        steps: Steps,
    ) -> None:
        self._fs = fs
        self._wal_dir = wal_dir
        self._key = key
        self.files = deque(files)
        self._position = FILE_HEADER_BYTES
        self._steps = steps
        # Frames up to this lsn were read; some may still wait in `_frames`.
        self._read_lsn = start_lsn - 1
        self._frames: deque[RawFrame] = deque()

    def front(self, upto_lsn: int, known_lsn: int | None) -> int | None:
        """The lsn of the next frame up to `upto_lsn`; None if there is none yet."""
        if not self._frames:
            self._fill(upto_lsn, known_lsn)
        if self._frames and self._frames[0].lsn <= upto_lsn:
            return self._frames[0].lsn
        return None

    def take(self, frames: list[RawFrame], upto_lsn: int, max_bytes: int) -> int:
        """Move waiting frames up to an lsn to `frames`, about `max_bytes`; returns their bytes."""
        waiting, size, before = self._frames, 0, len(frames)
        while waiting and waiting[0].lsn <= upto_lsn and size < max_bytes:
            frame = waiting.popleft()
            frames.append(frame)
            size += len(frame.content)
        # With several shards, mostly one frame at a time is taken.
        self._steps.did((len(frames) - before) / 4)
        return size

    def _fill(self, upto_lsn: int, known_lsn: int | None) -> None:
        """Read until there is a frame. `known_lsn`: the shard's synced lsn; None: an old set."""
        while not self._frames:
            if known_lsn is not None and self._read_lsn >= known_lsn:
                return
            if not self.files and not self._find_files(None):
                if known_lsn is None:
                    return
                raise self._ended(known_lsn, None)
            is_taken, ended = self._read_on(upto_lsn)
            if is_taken:
                continue
            if ended is None:
                # The next group begins after `upto_lsn`.
                return
            if not self._next_file(ended.position):
                if known_lsn is None:
                    return
                raise self._ended(known_lsn, ended)

    def _read_on(self, upto_lsn: int) -> tuple[bool, Scan | None]:
        """Keep the frames of the groups up to an lsn in the next chunk that has any.

        Returns whether there was such a group, and how the file ends, if it ends. A group without
        frames is passed only together with a group after it, because it may be undone.
        """
        found, position, length = self.files[0], self._position, _CHUNK_BYTES
        found.size = found.file.size()
        file_id, is_taken = found.header.file_id, False
        while True:
            buffer = found.file.pread(min(length, found.size - position), position)
            base = position
            while True:
                try:
                    group = raw_group(buffer, position - base, position, file_id, found.size)
                except Corrupt as error:
                    raise Corrupt(str(error), found.path) from error
                if isinstance(group, Scan):
                    break
                if group.frames:
                    if group.frames[0].lsn > upto_lsn:
                        return is_taken, None
                    is_taken = True
                    self._position = group.end
                    self._keep(group.frames)
                position = group.end
            if is_taken or group.ending is not Ending.MORE:
                return is_taken, group
            if position == base and length >= group.needed_bytes:
                raise StorageError("the file became shorter while it was read", found.path)
            length = max(_CHUNK_BYTES, group.needed_bytes)

    def _keep(self, frames: list[RawFrame]) -> None:
        """Keep the frames that were not read before."""
        for frame in frames:
            if frame.lsn > self._read_lsn:
                self._frames.append(frame)
                self._read_lsn = frame.lsn
        self._steps.did(len(frames))

    def _next_file(self, end: int) -> bool:
        """Continue with the file after this one; False if there is none."""
        current = self.files[0]
        if len(self.files) == 1 and not self._find_files(current):
            return False
        follower = self.files[1]
        opening = follower.opening
        if (opening.previous_number, opening.previous_end) != (current.header.number, end):
            raise Corrupt(
                f"ends at {end}, but a later file continues file {opening.previous_number} from "
                f"{opening.previous_end}",
                current.path,
            )
        self.files.popleft()
        current.file.close()
        self._position = FILE_HEADER_BYTES
        return True

    def _find_files(self, current: JournalFile | None) -> bool:
        """Add the files with groups after the current one. Raises `StartRefused` for a gap."""
        number = 0 if current is None else current.header.number
        found = _opened(self._fs, self._wal_dir, (self._key, number)).get(self._key, [])
        used = [each for each in found if each.first is not None]
        for each in found:
            if each.first is None:
                each.file.close()
        if current is None and used:
            needed = needed_files(self._wal_dir, self._key, used, self._read_lsn + 1)
            for each in used:
                if each not in needed:
                    each.file.close()
            used = needed
        self.files.extend(used)
        return bool(used)

    def _ended(self, known_lsn: int, result: Scan | None) -> Corrupt:
        reason = "" if result is None or not result.reason else f" ({result.reason})"
        return Corrupt(
            f"the entries of wal set {self._key[0]}, shard {self._key[1]} end at lsn "
            f"{self._read_lsn}, and it was synced up to lsn {known_lsn}{reason}",
            self.files[0].path if self.files else self._wal_dir,
        )


def _opened(fs: Fs, wal_dir: str, behind: tuple[Key, int] | None) -> dict[Key, list[JournalFile]]:
    """All files of the journal, or those of one shard above a number."""
    for attempt in range(_TRIES):
        try:
            return open_files(fs, wal_dir, write=False, behind=behind)[0]
        except NotThere:
            if attempt + 1 == _TRIES:
                raise
    raise AssertionError("the last attempt returns or raises")
