"""Busy polling: a loop does not sleep while one client alone sends quickly, and then it does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from topics_server.runtime import busy_polling
from topics_server.runtime.busy_polling import BusyPolling

MOST_MS = 0.1
# Each request takes this long, ms.
ANSWER_MS = 0.04


class Loop:
    """A loop whose turns the test makes; `ready` are the calls of the next turn."""

    def __init__(self) -> None:
        self.ready: list[Callable[[], object]] = []

    def call_soon(self, callback: Callable[..., object], *args: object) -> None:
        self.ready.append(lambda: callback(*args))

    def turn(self) -> None:
        due, self.ready = self.ready, []
        for call in due:
            call()

    @property
    def sleeps(self) -> bool:
        return not self.ready


class Rig:
    """A server with one client that sends again some time after each answer."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, most_us: int = 100) -> None:
        self.now_ms = 1_000_000.0
        monkeypatch.setattr(busy_polling, "monotonic_s", lambda: self.now_ms / 1000)
        self.loop: Any = Loop()
        self.polling = BusyPolling(most_us)

    def request(self, pause_ms: float = 0.02) -> None:
        self.now_ms += pause_ms
        started_ms = self.now_ms
        self.now_ms += ANSWER_MS
        self.polling.answered_again(self.loop, started_ms)

    def requests(self, count: int, pause_ms: float = 0.02) -> None:
        for _ in range(count):
            self.request(pause_ms)


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Rig:
    return Rig(monkeypatch)


def test_the_loop_polls_after_eight_requests_that_came_soon(rig: Rig) -> None:
    rig.requests(8)  # the first one has no answer before it
    assert rig.loop.sleeps
    rig.request()
    for _ in range(3):
        assert not rig.loop.sleeps
        rig.now_ms += MOST_MS / 4
        rig.loop.turn()
    rig.now_ms += MOST_MS / 4
    rig.loop.turn()
    assert rig.loop.sleeps


def test_one_call_polls_however_many_requests_come(rig: Rig) -> None:
    rig.requests(100)
    assert len(rig.loop.ready) == 1
    rig.loop.turn()
    assert len(rig.loop.ready) == 1
    # The time counts from the newest answer.
    rig.request(MOST_MS * 0.9)
    rig.loop.turn()
    assert not rig.loop.sleeps


def test_a_request_that_comes_late_ends_the_streak(rig: Rig) -> None:
    rig.requests(20)
    rig.now_ms += 1
    rig.loop.turn()
    assert rig.loop.sleeps
    rig.requests(8)
    assert rig.loop.sleeps
    rig.request()
    assert not rig.loop.sleeps


def test_a_client_that_is_never_soon_is_never_polled_for(rig: Rig) -> None:
    rig.requests(100, pause_ms=MOST_MS * 1.1)
    assert rig.loop.sleeps


def test_the_loop_sleeps_while_another_thread_works(rig: Rig) -> None:
    is_resting = True
    rig.polling.is_resting = lambda: is_resting
    rig.requests(20)
    rig.loop.turn()
    assert not rig.loop.sleeps
    is_resting = False
    rig.loop.turn()
    assert rig.loop.sleeps
    # Work that has ended does not cost the streak.
    is_resting = True
    rig.request()
    rig.loop.turn()
    assert not rig.loop.sleeps


def test_without_time_the_loop_never_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(monkeypatch, most_us=0)
    rig.requests(100, pause_ms=0.0)
    assert rig.loop.sleeps
