"""The client's clock, sleep, randomness and host name.

Only this module of the package reads them, so that tests can pass another `Effects`. Times are
milliseconds of the event loop's clock, never of the wall clock, which may jump.
"""

from __future__ import annotations

import os
import random
import secrets
import socket
import time

NODE_BYTES_MAX = 128


class Effects:
    """The real clock, sleep and randomness."""

    def now_ms(self) -> float:
        """Milliseconds since some moment; never goes back."""
        import asyncio  # there already, as its caller runs in a loop; a verb without one needs none

        return asyncio.get_running_loop().time() * 1000

    async def sleep_ms(self, wait_ms: float) -> None:
        """Wait without blocking the event loop."""
        import asyncio

        await asyncio.sleep(wait_ms / 1000)

    def chance(self) -> float:
        """A number from 0 to 1."""
        return random.random()


def blocking_now_ms() -> float:
    """Milliseconds since some moment, for clients without an event loop; never goes back."""
    return time.monotonic() * 1000


def process_id() -> int:
    """The id of this process; it differs in a child of `fork`."""
    return os.getpid()


def new_key() -> str:
    """A new random idempotency key."""
    return secrets.token_hex(16)


def new_node() -> str:
    """A name for a worker: host, process, and a random part, because a process may have several
    workers.
    """
    tail = f"-{os.getpid()}-{secrets.token_hex(4)}"
    host = socket.gethostname().encode()[: NODE_BYTES_MAX - len(tail)]
    return host.decode(errors="ignore") + tail
