"""`client.retries`: which errors are retried, and when retrying ends."""

from __future__ import annotations

import pytest

from topics_server.client.backoff import Backoff
from topics_server.client.errors import ClientError, InvalidRequest, Throttled, Unreachable
from topics_server.client.retries import RetryPolicy

AWAY = Unreachable("away", sent=False)


def test_pauses_grow_until_they_are_used_up() -> None:
    patience = RetryPolicy(1000, Backoff(base_ms=100, cap_ms=400))
    assert [patience.pause_ms(AWAY, 1.0) for _ in range(5)] == [100, 200, 400, None, None]


def test_a_server_that_says_when_is_not_asked_earlier() -> None:
    patience = RetryPolicy(5000)
    slow = Throttled(429, "throttled", "slow", None, 3000)
    assert patience.pause_ms(slow, 0.0) == 3000
    assert patience.pause_ms(slow, 0.0) is None  # 3 s of 5 have passed


@pytest.mark.parametrize("error", [InvalidRequest(400, "c", "m"), ClientError("m")])
def test_what_does_not_pass_is_not_tried_again(error: ClientError) -> None:
    assert RetryPolicy(10_000).pause_ms(error, 0.0) is None


def test_no_patience_is_one_try() -> None:
    assert RetryPolicy(0).pause_ms(AWAY, 0.0) is None
