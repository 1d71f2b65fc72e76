"""`pacing`: views that nobody waits for share a bounded number of batches a second."""

from __future__ import annotations

import heapq

import pytest

from topics_server.views.pacing import PAUSE_S, Pacer


def _batches(views: int, seconds: float) -> list[int]:
    """How many batches each of these views makes, if every one always has records."""
    pacer, made = Pacer(), [0] * views
    due = [(0.0, view) for view in range(views)]
    while due[0][0] < seconds:
        now_s, view = heapq.heappop(due)
        made[view] += 1
        heapq.heappush(due, (now_s + pacer.pause_s(now_s), view))
    return made


def test_one_view_rests_five_milliseconds() -> None:
    assert Pacer().pause_s(100.0) == pytest.approx(PAUSE_S)
    (made,) = _batches(1, 1.0)
    assert made == pytest.approx(200, abs=2)


@pytest.mark.parametrize("views", [2, 5, 20, 50])
def test_all_views_together_make_400_batches_a_second(views: int) -> None:
    made = _batches(views, 10.0)
    assert sum(made) <= 4_000 + views
    # Nobody is forgotten for the sake of others.
    assert min(made) >= 0.8 * max(made)


def test_a_view_never_rests_longer_than_a_quarter_of_a_second() -> None:
    pacer = Pacer()
    assert max(pacer.pause_s(1.0) for _ in range(1_000)) == pytest.approx(0.25)
