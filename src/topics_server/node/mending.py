"""Fetches undamaged copies of damaged segments from the archive, and puts them in place.

Copies are read by a thread of the archiver, so that a slow archive takes no thread from the store;
files are put in place by a thread of the store. Made by `boot` where there is an archive.
"""

from __future__ import annotations

from functools import partial
from typing import Final

from topics_server.archive.continuous.segment_copies import ArchivedSegments
from topics_server.engine.ports import SealedIndex
from topics_server.node.archiver import Archiver
from topics_server.node.ground import Ground
from topics_server.values.file_inventory import KnownFlags
from topics_server.values.limits import MIB
from topics_server.wal.segments.mending import PreparedMend


class ArchiveMending:
    """Satisfies `engine.background.mender.MendingPort`."""

    def __init__(self, ground: Ground, archiver: Archiver) -> None:
        self._ground: Final = ground
        self._archiver: Final = archiver

    async def prepare(self, topic_id: int, segment_id: int, known: KnownFlags) -> PreparedMend:
        """See `MendingPort`. Reads at most as fast as the scrub."""
        rate = self._ground.settings.scrub_mib_per_second * MIB
        segments = self._ground.segments
        return await self._archiver.read(
            lambda store, check: segments.prepare_mend(
                topic_id, segment_id, ArchivedSegments(store, rate, check), known
            )
        )

    async def finish(self, files: PreparedMend, known: KnownFlags) -> tuple[SealedIndex, bytes]:
        """See `MendingPort`."""
        segments = self._ground.segments

        def finished() -> tuple[SealedIndex, bytes]:
            index = segments.finish_mend(files, known)
            return index, index.flags()

        return await self._ground.offload.run(finished)

    async def discard(self, files: PreparedMend) -> None:
        """See `MendingPort`."""
        await self._ground.offload.run(partial(self._ground.segments.discard_mend, files))
