"""The event loop of tests marked `anyio`: asyncio's, with the checks of its debug mode."""

from __future__ import annotations

import asyncio


class StrictLoop(asyncio.SelectorEventLoop):
    """A loop whose debug mode checks and keeps no stacks, which cost a third of a test's time.

    The loop's own flag turns on the checks: calls from another thread, callbacks that are not
    callable, blocking sockets. Handles, futures and tasks ask `get_debug` whether to keep the stack
    of their creation; `_set_coroutine_origin_tracking` is the same switch for coroutines.
    """

    def get_debug(self) -> bool:
        """Whether stacks are kept."""
        return False

    def _set_coroutine_origin_tracking(self, enabled: bool) -> None:
        """Keep no stacks of coroutines."""
