"""Reads sealed blocks for the next pages of routers.

The block cache alone is not enough: a page of a sparse source can need more blocks than the cache
holds, so its reads would never be complete. A router keeps the blocks that were read for it until
its page is planned again; that plan includes later deletes. Only a few routers hold blocks at the
same time; the others wait. Loop thread only. Called by `routers/pump`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from topics_server.engine.read.page import Fetch, PagePlan
from topics_server.engine.store import Store
from topics_server.engine.topic.topic import Topic
from topics_server.routers.routes import RouterWork
from topics_server.values.blocks import Block

# The maximum of routers that hold blocks at the same time. One page needs the blocks of up to
# `PAGE_SCAN_SLOTS_MAX` records.
_HOLDERS_MAX: Final = 2


class PageFetches:
    """The fetches of all routers."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._slots = asyncio.Semaphore(_HOLDERS_MAX)

    async def fetch(
        self, route: RouterWork, source: Topic, plan: PagePlan, is_copied: Callable[[], bool]
    ) -> None:
        """Read the blocks of a plan and keep them for the router until `take`.

        `is_copied` returns whether another router has copied the same page meanwhile. Raises
        `StorageError` when a listed segment cannot be read.
        """
        await self._slots.acquire()
        try:
            page = None if is_copied() else await self._store.complete(source, plan)
            if page is not None and not route.is_over:
                route.blocks = source.topic_id, plan.fetched_blocks(page)
        finally:
            if route.blocks is None:
                self._slots.release()

    def take(self, route: RouterWork, source: Topic | None) -> dict[Fetch, Block] | None:
        """The blocks that were read for this router if they are of this source; frees its slot."""
        if route.blocks is None:
            return None
        (topic_id, blocks), route.blocks = route.blocks, None
        self._slots.release()
        return blocks if source is not None and topic_id == source.topic_id else None
