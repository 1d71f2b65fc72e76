"""`client.working.sources`: streams that are held back, and servers that do not wait."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from tests.unit.client.conftest import Chance, Start
from tests.unit.client.fake import Broken, FakeQueue, Refusal
from topics_server.client import Backoff, NotFound, Stats, Unreachable
from topics_server.client.working import sources


def test_a_stream_that_is_held_back_is_given_up(
    fake: FakeQueue, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "OPENING_MS", 50)
    fake.is_silent = True
    fake.add(1)
    run = start(lambda job: None)
    fake.wait_for(lambda: not fake.jobs)
    assert run.stop() == Stats(done=1)
    assert len(fake.calls("work")) == sources.OPENING_TRIES


def test_a_stream_that_waits_for_a_replay_is_not_given_up(
    fake: FakeQueue, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "OPENING_MS", 1000)  # the first stream waits for this test
    fake.is_silent = True
    fake.add(1)
    run = start(lambda job: None)
    fake.wait_for(lambda: fake.calls("work"))
    # More jobs than the test needs, because a busy machine notices late that the first ones were
    # sent.
    fake.faults["state"].extend([Refusal(503, "not_ready")] * 200)
    monkeypatch.setattr(sources, "OPENING_MS", 50)
    fake.wait_for(lambda: len(fake.faults["state"]) < 200 - 2 * sources.OPENING_TRIES)
    monkeypatch.setattr(sources, "OPENING_MS", 30_000)
    fake.is_silent = False
    fake.faults["state"].clear()
    fake.wait_for(lambda: not fake.jobs)
    assert run.stop() == Stats(done=1)
    assert len(fake.calls("work")) > 2 * sources.OPENING_TRIES
    assert fake.calls("claim") == []


class Recorded(Chance):
    """Real time, with every pause noted."""

    def __init__(self) -> None:
        super().__init__(1.0)
        self.pauses: list[float] = []

    async def sleep_ms(self, wait_ms: float) -> None:
        self.pauses.append(wait_ms)
        await super().sleep_ms(wait_ms)

    def of(self, *lengths: float) -> list[float]:
        """The noted pauses of these lengths, in order."""
        return [wait for wait in self.pauses if wait in lengths]


def test_a_server_that_does_not_wait_is_not_asked_all_the_time(
    fake: FakeQueue, start: Start
) -> None:
    effects = Recorded()
    fake.has_wait = False
    seen: list[Any] = []
    run = start(lambda job: seen.append(job.data), push="never", effects=effects)
    # Count the pauses: on a busy machine a claim may fail, and be sent once more.
    fake.wait_for(lambda: len(effects.of(51, 101, 201)) >= 3)
    fake.add("late")
    fake.wait_for(lambda: not fake.jobs)
    assert run.stop() == Stats(done=1)
    assert seen == ["late"]
    # A pause follows each claim without a job, twice as long as the one before.
    assert effects.of(51, 101, 201)[:3] == [51, 101, 201]


def test_pauses_grow_until_a_stream_brings_a_job(fake: FakeQueue, start: Start) -> None:
    effects = Recorded()
    fake.faults["work"].extend([Broken(), Refusal(503), Broken()])
    run = start(lambda job: None, pauses=Backoff(base_ms=8, cap_ms=5000), effects=effects)
    fake.wait_for(lambda: fake.streams == 1)
    fake.add(1)
    fake.wait_for(lambda: not fake.jobs)
    fake.cut_streams()
    fake.wait_for(lambda: fake.streams == 2)
    run.stop()
    assert effects.of(8, 16, 32, 64) == [8, 16, 32, 8]


def test_an_idle_stream_that_lived_long_is_come_back_to_at_once(
    fake: FakeQueue, start: Start
) -> None:
    effects = Recorded()
    run = start(lambda job: None, pauses=Backoff(base_ms=9, cap_ms=18), effects=effects)
    for streams in range(1, 5):
        fake.wait_for(lambda n=streams: fake.streams == n)
        threading.Event().wait(0.03)  # longer than any pause
        fake.cut_streams()
    fake.wait_for(lambda: fake.streams == 5)
    run.stop()
    assert effects.of(9, 18) == [9, 9, 9, 9]


@pytest.mark.parametrize("is_silent", [True, False])
def test_insisting_on_a_stream_that_does_not_work_is_an_error(
    is_silent: bool, fake: FakeQueue, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_silent:
        # The client gives up only a silent server; a refusal may take longer.
        monkeypatch.setattr(sources, "OPENING_MS", 50)
    fake.is_silent, fake.has_stream = is_silent, is_silent
    outcome = start(lambda job: None, push="always").end()
    assert isinstance(outcome, Unreachable if is_silent else NotFound)
    assert fake.calls("claim") == []
