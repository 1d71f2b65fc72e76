"""`accept`: the client's preference for each media type."""

from __future__ import annotations

import pytest

from topics_server.api.messages.accept import accept_weights


@pytest.mark.parametrize(
    ("accept", "weights"),
    [
        (b"text/html", {b"text/html": 1.0}),
        (b"A/B;q=0.5, c/d ; x=1; Q=0.25", {b"a/b": 0.5, b"c/d": 0.25}),
        (b"a/b;q=0, a/c;q=0.000, a/d;q=0.", {b"a/b": 0.0, b"a/c": 0.0, b"a/d": 0.0}),
        (b"a/b;q=1.000, a/c;q=2, a/d;q=0.0001", {b"a/b": 1.0, b"a/c": 1.0, b"a/d": 1.0}),
        (b"a/b;q=, a/c;q=x, a/d;q", {b"a/b": 1.0, b"a/c": 1.0, b"a/d": 1.0}),
        (b"a/b;q=nan, a/c;q=inf, a/d;q=-0", {b"a/b": 1.0, b"a/c": 1.0, b"a/d": 1.0}),
        (b"", {b"": 1.0}),
    ],
)
def test_each_kind_has_its_weight(accept: bytes, weights: dict[bytes, float]) -> None:
    assert accept_weights(accept) == weights
