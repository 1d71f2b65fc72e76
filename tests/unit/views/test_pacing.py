"""`pacing`: views share a bounded number of batches a second, and a batch has a bounded time."""

from __future__ import annotations

import heapq

import pytest

from topics_server.views.pacing import PAUSE_S, BatchSize, Pacer


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


def _settled(us_a_record: float, waiting: int) -> list[int]:
    """The sizes of 20 batches; so many records wait each time."""
    size, sizes = BatchSize(), []
    for _ in range(20):
        count = min(waiting, size.records)
        sizes.append(count)
        size.note(count, count * us_a_record / 1000)
    return sizes


def test_batches_grow_while_records_wait_and_apply_is_fast() -> None:
    assert _settled(2.0, 100_000)[-1] == 8_000
    assert _settled(2.0, 500) == [500] * 20


@pytest.mark.parametrize("us_a_record", [6.0, 20.0, 200.0])
def test_a_batch_takes_no_longer_than_others_can_bear(us_a_record: float) -> None:
    """Records that take 10 ms each come in the smallest batches, which have a time of their own."""
    last = _settled(us_a_record, 100_000)[-1]
    assert last * us_a_record / 1000 <= 60
    assert _settled(10_000.0, 100_000)[-1] == 250
