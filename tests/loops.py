"""The event loop of tests marked `anyio`: asyncio's, with the checks of its debug mode."""

from __future__ import annotations

import asyncio


class StrictLoop(asyncio.SelectorEventLoop):
    """A loop whose debug mode checks and keeps no stacks, which cost a third of a test's time.

    The loop checks by its own flag: calls from another thread, callbacks that are none, sockets
    that block. Handles, futures and tasks ask `get_debug` whether they keep the stack of their
    maker, and the second method asks that of coroutines.
    """

    def get_debug(self) -> bool:
        """Whether stacks are kept."""
        return False

    def _set_coroutine_origin_tracking(self, enabled: bool) -> None:
        """Keep no stacks of coroutines."""
