"""The clock: wall time, monotonic time, random ids.

Drivers take a `SystemClock` (or a fake of the same shape) or call the functions; pure modules get
`now_ms` and ids as arguments, so that replay decides as the first run did.
"""

from __future__ import annotations

import secrets
import time
from typing import Final

# The clock of `monotonic_ms`, in seconds: a plain C call, because every request reads it.
monotonic_s: Final = time.monotonic
# Seconds of processor time that this process has used.
cpu_s: Final = time.process_time


def now_ms() -> int:
    """Wall clock in ms since the epoch; may step in either direction."""
    return time.time_ns() // 1_000_000


def monotonic_ms() -> float:
    """Monotonic clock in ms; for durations and deadlines only."""
    return time.monotonic_ns() / 1_000_000


def pause(seconds: float) -> None:
    """*Blocking.* Let other threads run; never call it on the loop."""
    time.sleep(seconds)


def random_id(size: int = 16) -> str:
    """An unguessable URL-safe id of `size` random bytes (16: 128 bits)."""
    assert size >= 8, "an id of so few bytes is guessable and may collide"
    return secrets.token_urlsafe(size)


def random_hex(size: int) -> str:
    """An id of `size` random bytes, as lower-case hexadecimal digits."""
    assert size >= 16, "an id of so few bytes may collide"
    return secrets.token_hex(size)


def random_bytes(size: int) -> bytes:
    """Random bytes, which no file system can compress."""
    return secrets.token_bytes(size)


def random_u64() -> int:
    """A random start for a counter, so that its numbers never repeat those of an earlier start."""
    return secrets.randbits(64)


class SystemClock:
    """The machine's clocks behind the methods that `engine.ports.Clock` names."""

    # The wall clock in ms since the epoch (it may step), and the monotonic clock in ms.
    now_ms = staticmethod(now_ms)
    monotonic_ms = staticmethod(monotonic_ms)
