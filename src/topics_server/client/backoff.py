"""Computes retry delays: exponential with full jitter.

Plain arithmetic; `chance` is a random number from 0 to 1 that the caller passes.
"""

from __future__ import annotations

import msgspec

_LEADING_BITS = 4


class Backoff(msgspec.Struct, frozen=True, kw_only=True):
    """A random pause between 0 and a limit: `base_ms`, doubled with each try, at most `cap_ms`.

    With full jitter, clients that failed together do not come back together.
    """

    base_ms: int = 1000
    cap_ms: int = 300_000

    def __post_init__(self) -> None:
        if not 0 < self.base_ms <= self.cap_ms:
            raise ValueError("a back-off needs 0 < base_ms <= cap_ms")

    def wait_ms(self, tries: int, chance: float) -> int:
        """The pause after the `tries`-th failed try (from 1)."""
        assert tries >= 1, "something failed before one waits"
        assert 0 <= chance <= 1
        # 2**63 ms is more than any cap. The bound keeps the power small.
        longest_ms = min(self.cap_ms, self.base_ms * 2 ** min(tries - 1, 63))
        return int(longest_ms * chance)


def rounded_ms(wait_ms: int) -> int:
    """A wait rounded to its four leading bits, so that many waits can share a few requests."""
    spare = max(0, wait_ms.bit_length() - _LEADING_BITS)
    return wait_ms >> spare << spare
