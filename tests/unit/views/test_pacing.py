"""`pacing`: views rest together, for a bounded time, and a batch has a bounded time."""

from __future__ import annotations

import asyncio

import pytest

from topics_server.views.pacing import PAUSE_S, BatchSize, Pacer, pause_s

pytestmark = pytest.mark.anyio


class Timers:
    """The timers that are set on the loop, which go off when the test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.delays_s: list[float] = []
        self._callbacks: list[object] = []
        monkeypatch.setattr(asyncio.get_running_loop(), "call_later", self._call_later)

    def _call_later(self, delay_s: float, callback: object) -> None:
        self.delays_s.append(delay_s)
        self._callbacks.append(callback)

    def go_off(self) -> None:
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            assert callable(callback)
            callback()


@pytest.fixture
async def timers(monkeypatch: pytest.MonkeyPatch) -> Timers:
    return Timers(monkeypatch)


def test_one_view_rests_five_milliseconds() -> None:
    assert pause_s(1) == pause_s(2) == pytest.approx(PAUSE_S)


@pytest.mark.parametrize("views", [3, 5, 20, 100])
def test_all_views_together_make_400_batches_a_second(views: int) -> None:
    assert views / pause_s(views) == pytest.approx(400)


def test_a_view_never_rests_longer_than_a_quarter_of_a_second() -> None:
    assert pause_s(100_000) == pytest.approx(0.25)


async def test_views_that_rest_go_on_together(timers: Timers) -> None:
    """All of them share one timer; their number determines the length of the next rest."""
    pacer = Pacer()
    for delay_s in (pause_s(1), pause_s(10), pause_s(10)):
        rests = [pacer.rest() for _ in range(10)]
        assert timers.delays_s == [delay_s]
        assert not any(rest.done() for rest in rests)
        timers.go_off()
        assert all(rest.done() for rest in rests)
        timers.delays_s.clear()
    pacer.rest()
    assert timers.delays_s == [pause_s(10)]
    timers.go_off()
    pacer.rest()
    assert timers.delays_s == [pause_s(10), pause_s(1)]


async def test_a_rest_may_end_before_the_others(timers: Timers) -> None:
    pacer = Pacer()
    early, cancelled, late = (pacer.rest() for _ in range(3))
    early.set_result(None)
    cancelled.cancel()
    assert not late.done()
    timers.go_off()
    assert late.done()


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
    """Records that take 10 ms each come in the smallest batches, which have a separate time
    limit.
    """
    last = _settled(us_a_record, 100_000)[-1]
    assert last * us_a_record / 1000 <= 60
    assert _settled(10_000.0, 100_000)[-1] == 250
