"""`client.backoff`: doubling, a cap, full jitter."""

from __future__ import annotations

import pytest

from topics_server.client.backoff import Backoff, rounded_ms


def test_the_longest_wait_doubles_up_to_the_cap() -> None:
    backoff = Backoff(base_ms=1000, cap_ms=300_000)
    waits = [backoff.wait_ms(tries, 1.0) for tries in (1, 2, 3, 9, 10, 11, 10_000)]
    assert waits == [1000, 2000, 4000, 256_000, 300_000, 300_000, 300_000]


def test_jitter_is_full() -> None:
    backoff = Backoff(base_ms=1000, cap_ms=300_000)
    assert [backoff.wait_ms(3, chance) for chance in (0.0, 0.25, 1.0)] == [0, 1000, 4000]


@pytest.mark.parametrize(("base_ms", "cap_ms"), [(0, 1), (-1, 1), (2, 1)])
def test_nonsense_is_refused(base_ms: int, cap_ms: int) -> None:
    with pytest.raises(ValueError, match="base_ms"):
        Backoff(base_ms=base_ms, cap_ms=cap_ms)


def test_rounding_keeps_four_bits_and_never_adds() -> None:
    assert [rounded_ms(ms) for ms in (0, 1, 15, 16, 17, 1000, 299_999)] == [
        0,
        1,
        15,
        16,
        16,
        960,
        294_912,
    ]
    for ms in range(5000):
        assert ms * 8 / 9 < rounded_ms(ms) + 1 <= ms + 1
