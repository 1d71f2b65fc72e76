"""`StreamTimer`: heartbeats that share a check, and how many checks a turn of the loop has."""

from __future__ import annotations

import asyncio

import pytest
import uvloop

from topics_server.api.watch import stream_timer
from topics_server.api.watch.stream_timer import EARLY_MS, Look, StreamTimer
from topics_server.runtime.clock import monotonic_ms

pytestmark = pytest.mark.anyio


class Stream:
    """Notes the turn in which it is checked."""

    def __init__(self, turns: list[int], turn: list[int]) -> None:
        self.next_look: Look | None = None
        self._turns = turns
        self._turn = turn

    def look(self, now: float) -> None:
        self._turns.append(self._turn[0])


@pytest.mark.parametrize(
    ("heartbeat_ms", "step_ms"), [(1_000, 50), (3_000, 50), (15_000, 250), (60_000, 1_000)]
)
async def test_heartbeats_of_a_sixtieth_of_their_interval_share_a_check(
    heartbeat_ms: int, step_ms: int
) -> None:
    for due_ms in (0.0, 1.0, step_ms - 0.5, float(step_ms), 7.3 * step_ms):
        timer, stream = StreamTimer(), Stream([], [0])
        timer.beat_at(stream, 1e9 + due_ms, heartbeat_ms)
        look = stream.next_look
        assert look is not None
        assert look.due_ms % step_ms == 0
        assert -EARLY_MS <= look.due_ms - (1e9 + due_ms) < step_ms - EARLY_MS + 1e-6


@pytest.mark.parametrize("late_ms", [0.0, 0.4, 3.0, EARLY_MS])
async def test_a_beat_that_follows_one_sent_in_time_is_not_a_step_late(late_ms: float) -> None:
    timer, stream = StreamTimer(), Stream([], [0])
    timer.beat_at(stream, 1e9 + late_ms + 15_000, 15_000)
    look = stream.next_look
    assert look is not None
    assert look.due_ms == 1e9 + 15_000


def test_a_timer_seldom_finds_nothing_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """The timers of the server's loop have whole milliseconds: one that ends early must not be set
    again and again, ten times or more, until the check is due.
    """
    timer, turns = StreamTimer(), list[int]()
    found: list[int] = []
    look = timer._look

    def counted() -> None:
        before = len(turns)
        look()
        found.append(len(turns) - before)

    async def watched() -> None:
        for number in range(60):
            timer.look_at(Stream(turns, [0]), monotonic_ms() + 20 + 3.3 * number)
        for _ in range(1000):
            if len(turns) == 60:
                break
            await asyncio.sleep(0.01)

    monkeypatch.setattr(timer, "_look", counted)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(watched())
    assert len(turns) == 60
    assert found.count(0) <= 60


async def test_streams_that_ended_leave_the_timer_in_slices() -> None:
    timer, streams = StreamTimer(), [Stream([], [0]) for _ in range(1000)]
    for stream in streams:
        timer.look_at(stream, monotonic_ms() - 1)
        assert stream.next_look is not None
        stream.next_look.stream = None
    turns = list[int]()
    timer.look_at(last := Stream(turns, [0]), monotonic_ms() - 1)
    assert last.next_look is not None
    async with asyncio.timeout(10):
        while not turns:
            assert len(timer._looks) in range(1, 1002)
            await asyncio.sleep(0)
    assert timer._looks == []


async def test_many_checks_that_are_due_take_several_turns() -> None:
    """Ten thousand heartbeats together would hold the loop for a third of a second."""
    timer, turns, turn = StreamTimer(), list[int](), [0]
    for _ in range(3 * stream_timer._LOOKS_MAX + 1):
        timer.look_at(Stream(turns, turn), monotonic_ms() - 1)
    async with asyncio.timeout(5):
        while len(turns) < 3 * stream_timer._LOOKS_MAX + 1:
            await asyncio.sleep(0)
            turn[0] += 1
    counts = [turns.count(each) for each in sorted(set(turns))]
    assert counts == [stream_timer._LOOKS_MAX] * 3 + [1]
