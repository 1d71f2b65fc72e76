"""Packs segments: one that is due, and the next one while the first is written.

Packing takes the processor, and writing takes the disk, so both together let the sealer keep up
with about half again as many records. Called by `sealer`; the event loop's thread only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Final

import msgspec

from topics_server.engine.background.seal_plan import is_front, is_same
from topics_server.engine.ports import SegmentsPort
from topics_server.engine.topic.registry import Registry
from topics_server.values.storage_types import Offload, PackedSegment, SegmentPlan


def size_of(plan: SegmentPlan) -> int:
    """The bytes of the payloads of a segment."""
    return sum(len(block.body) for block in plan.blocks)


class _Ahead(msgspec.Struct, frozen=True):
    """A segment that is packed before it is due."""

    plan: SegmentPlan
    packed: asyncio.Future[PackedSegment]

    def is_for(self, plan: SegmentPlan) -> bool:
        """Whether a plan has the same records; some may have died since."""
        mine = self.plan
        is_next = (mine.topic_id, mine.segment_id) == (plan.topic_id, plan.segment_id)
        return is_next and is_same(mine.blocks, plan.blocks)


class Packing:
    """See the module. `check_room` is blocking; it raises `StorageError` without room."""

    def __init__(
        self, offload: Offload, segments: SegmentsPort, check_room: Callable[[int], None]
    ) -> None:
        self._offload: Final = offload
        self._segments: Final = segments
        self._check_room: Final = check_room
        self._ahead: _Ahead | None = None

    async def take(self, plan: SegmentPlan) -> tuple[SegmentPlan, PackedSegment]:
        """The plan as it was packed, and its segment. Raises `StorageError`.

        If records have died since it was packed, they are live in the plan that is returned.
        """
        ahead = self._ahead
        if ahead is not None and ahead.is_for(plan):
            self._ahead = None
            return ahead.plan, await ahead.packed
        self.drop()
        return plan, await self._offload.run(partial(self._pack, plan))

    def begin(self, plan: SegmentPlan) -> None:
        """Begin to pack the segment that will be due next."""
        self.drop()
        packed = asyncio.ensure_future(self._offload.run(partial(self._pack, plan)))
        # An error is reported when the segment is due, or not at all.
        packed.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._ahead = _Ahead(plan, packed)

    def drop_stale(self, registry: Registry) -> None:
        """Drop the segment that is packed ahead if its records are not the next to be sealed."""
        ahead = self._ahead
        if ahead is None:
            return
        topic = registry.get(ahead.plan.topic_id)
        if topic is None or not is_front(topic.log, ahead.plan.blocks):
            self.drop()

    def drop(self) -> None:
        """Drop the segment that is packed ahead."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            ahead.packed.cancel()

    def _pack(self, plan: SegmentPlan) -> PackedSegment:
        """*Blocking.* Pack a segment, unless the disk has no room for it."""
        self._check_room(size_of(plan))
        return self._segments.pack(plan)
