"""Runs the engine's blocking calls on a thread pool.

Called by `node`.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Callable
from typing import Any, Final, TypeVar

T = TypeVar("T")

_OFFLOAD_THREADS: Final = 4


class ThreadOffload:
    """Blocking calls on a few threads of our own."""

    def __init__(self, threads: int = _OFFLOAD_THREADS, name: str = "offload") -> None:
        self._pool = concurrent.futures.ThreadPoolExecutor(threads, name)
        # The calls under way.
        self.under_way: set[concurrent.futures.Future[Any]] = set()

    async def run(self, call: Callable[[], T]) -> T:
        """See `values.storage_types.Offload`."""
        under_way = self._pool.submit(call)
        self.under_way.add(under_way)
        under_way.add_done_callback(self.under_way.discard)
        finished = asyncio.wrap_future(under_way)
        try:
            return await finished
        finally:
            # An error refers to this frame. If the frame referred to the futures, which refer to
            # the error, only a collection would free them and the frames of all callers.
            del under_way, finished

    async def idle(self) -> None:
        """Return when no call is under way; a call outlives its cancelled task."""
        while calls := [call for call in self.under_way if not call.done()]:
            await asyncio.wait([asyncio.wrap_future(call) for call in calls])

    def close(self) -> None:
        """Wait for calls under way; then refuse new ones."""
        self._pool.shutdown()
