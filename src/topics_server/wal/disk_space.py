"""Free disk space: when appends are refused and the ballast is released.

Checks the free space once a second, and at once after the disk refused a flip or a drop. Below the
floor (`TOPICS_MIN_FREE_BYTES`, plus the missing part of the ballast) appends are refused and
journal files are not filled ahead; deletes, acks, drops, manifests, flips and checkpoints continue.
The ballast gives these writes exactly the space that they lack; it gives space to a snapshot only
if the snapshot then fits. The last piece of the ballast is for the small writes that free space. No
new segment is sealed while a part of the ballast is missing, except at a start that has room for
all of it. A snapshot or segment that cannot fit is refused before its first byte: otherwise each
attempt would fill the disk for a moment, and other writes would fail. Called by `node`, on the
loop; the free space is read off the loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Final

from topics_server.runtime.metrics import log
from topics_server.values.errors import DiskFull, StorageError
from topics_server.values.limits import KIB
from topics_server.values.storage_types import Offload
from topics_server.wal.ballast import Ballast
from topics_server.wal.fs import Fs

_CHECK_S: Final = 1.0
# Ballast bytes released for a refused manifest or flip, and the margin of a snapshot beside its own
# bytes.
_PIECE_BYTES: Final = 64 * KIB
# The ballast keeps this much for manifests, flips and snapshots up to this size.
_LAST_BYTES: Final = 2 * _PIECE_BYTES


class Space:
    """See the module. `ballast_bytes`: how large the ballast should be now."""

    def __init__(
        self,
        fs: Fs,
        root: str,
        *,
        min_free_bytes: int,
        ballast_bytes: Callable[[], int],
        offload: Offload,
    ) -> None:
        self._fs: Final = fs
        self._root: Final = root
        self._ballast_bytes: Final = ballast_bytes
        self._offload: Final = offload
        self._ballast: Final = Ballast(fs, root)
        self._refused = asyncio.Event()
        # Ballast bytes to release for the next refused manifest or flag write: more after each
        # refusal, because the write may be large.
        self._next_piece_bytes = _PIECE_BYTES
        # Called when a refused write got room from the ballast.
        self.on_given: list[Callable[[], None]] = []
        self.min_free_bytes: Final = min_free_bytes
        self._ballast.want(ballast_bytes())
        # Whether the ballast lacks a part, as of the last check or release. A part that is only not
        # written yet does not count: after a start, or while a larger ballast is written.
        self._is_short = bool(self._ballast.missing_bytes) and not self._has_room_for_it()

    @property
    def floor_bytes(self) -> int:
        """The free space that appends must leave. Safe on any thread."""
        return self.min_free_bytes + self._ballast.missing_bytes

    def may_fill(self, size: int) -> bool:
        """*Blocking, briefly.* Whether `size` bytes may be taken for preallocation.

        A journal's worker calls this before it fills a file with zeros. Safe on any thread.
        """
        return self._fs.free_bytes(self._root) - size >= self.floor_bytes

    def may_seal(self) -> bool:
        """Whether new segments may be made; the ballast's released space is not for them."""
        return not self._is_short

    def check_seal(self, size: int) -> None:
        """*Blocking, briefly.* Raises `DiskFull` where a segment of `size` bytes cannot fit."""
        self._check(size + _PIECE_BYTES, self._fs.free_bytes(self._root), "segment")

    def _check(self, size: int, free: int, what: str) -> None:
        if free < size:
            raise DiskFull(f"a {what} takes {size} bytes, and only {free} can be had", self._root)

    def _has_room_for_it(self) -> bool:
        """*Blocking, briefly.* Whether the missing part of the ballast fits above the floor."""
        try:
            return self._fs.free_bytes(self._root) >= self.floor_bytes
        except StorageError:
            return False

    def make_room_for_start(self, size: int) -> None:
        """*Blocking.* Release ballast for the small files that a start writes at first."""
        self._give_back(size, self._fs.free_bytes(self._root))

    async def make_room(self, snapshot_bytes: int) -> None:
        """Release ballast if that makes a snapshot fit; otherwise keep it for a smaller one.

        Raises `DiskFull` if the snapshot cannot fit.
        """
        await self._offload.run(partial(self._make_room, snapshot_bytes))

    def _make_room(self, size: int) -> None:
        free, held = self._fs.free_bytes(self._root), self._ballast.held_bytes
        if size > _LAST_BYTES:
            held = max(0, held - _LAST_BYTES)
        self._check(size, free + held, "snapshot")
        self._give_back(min(size + _PIECE_BYTES, free + held), free)

    def _give_back(self, size: int, free: int) -> int:
        """Release ballast until `size` bytes are free; returns how many bytes were released."""
        given = self._ballast.release(size - free) if free < size else 0
        if given:
            self._is_short = True
            log.warning("%d bytes are free: %d bytes of ballast were released", free, given)
        return given

    def note_refused(self) -> None:
        """Check the free space now: the disk refused a flip or a drop."""
        self._refused.set()

    async def watch(self, tell_low: Callable[[bool, int], None]) -> None:
        """Check until cancelled; call `tell_low(is_low, free bytes)` after each check."""
        while True:
            look = partial(self._look, was_refused=self._refused.is_set())
            self._refused.clear()
            try:
                free, given = await self._offload.run(look)
            except StorageError as error:
                log.warning("the free space cannot be read: %s", error)
            else:
                tell_low(free < self.floor_bytes, free)
                for callback in self.on_given if given else ():
                    callback()
            try:
                async with asyncio.timeout(_CHECK_S):
                    await self._refused.wait()
            except TimeoutError:
                pass

    def _look(self, *, was_refused: bool) -> tuple[int, int]:
        """*Blocking.* Release the ballast, or fill it again.

        Returns the free bytes after that, and the bytes released for a refused write.
        """
        ballast, root, given = self._ballast, self._root, 0
        free = self._fs.free_bytes(root)
        ballast.want(self._ballast_bytes())
        if was_refused:
            given = self._give_back(self._next_piece_bytes, free)
            if given:
                self._next_piece_bytes *= 2
        elif ballast.restore(free, self.min_free_bytes):
            self._next_piece_bytes = _PIECE_BYTES
        self._is_short = bool(ballast.missing_bytes)
        return self._fs.free_bytes(root), given


def reasons_of(checkpoints: StorageError | None, sealing: StorageError | None) -> list[str]:
    """Describe a failure of background work without naming a topic or a file."""
    found = (("checkpoints fail", checkpoints), ("sealing fails", sealing))
    return [f"{what}: {_cause_of(error)}" for what, error in found if error is not None]


def _cause_of(error: StorageError) -> str:
    return "the disk takes no more" if isinstance(error, DiskFull) else "see the log"
