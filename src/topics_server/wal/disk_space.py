"""Free disk space: when appends are refused and the ballast is released.

Looks once a second, and at once when a flip or a drop was refused by the disk. Below the floor
(`TOPICS_MIN_FREE_BYTES`, and what the ballast lacks) appends are refused and journal files are not
filled ahead; deletes, acks, drops, manifests, flips and checkpoints go on. The ballast gives these
what they lack and no more, a snapshot only what makes it fit; until it is whole again nothing new
is sealed. Called by `node`, on the loop; the disk is asked off it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Final

from topics_server.engine.ports import Offload
from topics_server.runtime.metrics import log
from topics_server.values.errors import DiskFull, StorageError
from topics_server.values.limits import KIB
from topics_server.wal.ballast import Ballast
from topics_server.wal.fs import Fs

_CHECK_S: Final = 1.0
# What a refused manifest or flip is given, and what a snapshot needs beside its own bytes.
_PIECE_BYTES: Final = 64 * KIB


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
        self.min_free_bytes: Final = min_free_bytes
        self._ballast.want(ballast_bytes())

    @property
    def floor_bytes(self) -> int:
        """What appends leave free. Safe on any thread."""
        return self.min_free_bytes + self._ballast.missing_bytes

    def may_fill(self, size: int) -> bool:
        """*Blocking, briefly.* Whether so many bytes may be taken for what is not yet there.

        Asked by a journal's worker before it fills a file with zeros. Any thread.
        """
        return self._fs.free_bytes(self._root) - size >= self.floor_bytes

    def may_seal(self) -> bool:
        """Whether new segments may be made: not from the room that the ballast gave back."""
        return not self._ballast.missing_bytes

    def make_room_for_start(self, size: int) -> None:
        """*Blocking.* A start writes some small files before anything can be let go."""
        self._give_back(size, self._fs.free_bytes(self._root))

    async def make_room(self, snapshot_bytes: int) -> None:
        """Let a snapshot fit if the ballast can: else it is kept for a smaller one."""
        await self._offload.run(partial(self._make_room, snapshot_bytes + _PIECE_BYTES))

    def _make_room(self, size: int) -> None:
        free = self._fs.free_bytes(self._root)
        if free + self._ballast.held_bytes >= size:
            self._give_back(size, free)

    def _give_back(self, size: int, free: int) -> None:
        """Give back what is missing to `size` free bytes."""
        if free < size and (given := self._ballast.release(size - free)):
            log.warning("%d bytes are free: %d bytes of ballast were given back", free, given)

    def note_refused(self) -> None:
        """A flip or a drop was refused by the disk: look now."""
        self._refused.set()

    async def watch(self, tell_low: Callable[[bool, int], None]) -> None:
        """Look again and again, until cancelled; `tell_low(is_low, free bytes)` after each."""
        while True:
            look = partial(self._look, was_refused=self._refused.is_set())
            self._refused.clear()
            try:
                free = await self._offload.run(look)
            except StorageError as error:
                log.warning("the free space cannot be read: %s", error)
            else:
                tell_low(free < self.floor_bytes, free)
            try:
                async with asyncio.timeout(_CHECK_S):
                    await self._refused.wait()
            except TimeoutError:
                pass

    def _look(self, *, was_refused: bool) -> int:
        """*Blocking.* Give the ballast back, or make it again; bytes that are free then."""
        ballast, root = self._ballast, self._root
        free = self._fs.free_bytes(root)
        ballast.want(self._ballast_bytes())
        if was_refused:
            # More with each refusal: a manifest may be large.
            self._give_back(2 * max(_PIECE_BYTES // 2, ballast.missing_bytes), free)
        else:
            ballast.restore(free, self.min_free_bytes)
        return self._fs.free_bytes(root)


def reasons_of(checkpoints: StorageError | None, sealing: StorageError | None) -> list[str]:
    """What fails in the background, in words that name no topic and no file."""
    found = (("checkpoints fail", checkpoints), ("sealing fails", sealing))
    return [f"{what}: {_cause_of(error)}" for what, error in found if error is not None]


def _cause_of(error: StorageError) -> str:
    return "the disk takes no more" if isinstance(error, DiskFull) else "see the log"
