"""`client.queue`: the calls on a loop, and the frames of a stream of jobs."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

import pytest

from tests.unit.client.conftest import Chance
from tests.unit.client.fake import Broken, FakeQueue, Refusal
from topics_server.client import (
    AsyncQueue,
    BadAnswer,
    ClientError,
    Job,
    NewJob,
    NotAQueue,
    NotFound,
    Throttled,
    Unavailable,
    Unreachable,
)
from topics_server.client.queue import Advice

Script = Callable[[AsyncQueue], Awaitable[None]]


def run(url: str, script: Script) -> None:
    """Run a coroutine with a client of the fake queue."""

    async def whole() -> None:
        queue = AsyncQueue("q", url=url, token="secret", effects=Chance(0.0))
        async with queue, asyncio.timeout(20):
            await script(queue)

    asyncio.run(whole())


def test_a_job_from_enqueue_to_ack(url: str, fake: FakeQueue) -> None:
    async def script(queue: AsyncQueue) -> None:
        assert (await queue.enqueue({"n": 1}, key="k", delay_ms=0)).seq == 1
        assert (await queue.enqueue_many([NewJob(data=2)])).seq == 2
        claimed = await queue.claim("n", max_jobs=5, lease_ms=1000)
        first, second = claimed.jobs
        assert (await queue.extend("n", [first], lease_ms=500)).extended == 1
        assert (await queue.nack("n", [second])).skipped == []
        assert (await queue.ack("n", [first])).acked == 1
        assert (await queue.state()).queue.ready == 1

    run(url, script)
    assert fake.tokens == {"Bearer secret"}


@pytest.mark.parametrize("has_rounds", [True, False])
def test_a_claim_acks_what_is_finished(url: str, fake: FakeQueue, has_rounds: bool) -> None:
    fake.has_rounds = has_rounds

    async def script(queue: AsyncQueue) -> None:
        await queue.enqueue_many([NewJob(data=number) for number in range(3)])
        first = await queue.claim("n", max_jobs=2)
        assert first.ack is None
        second = await queue.claim("n", finished=first.jobs)
        assert [job.data for job in second.jobs] == [2]
        if has_rounds:
            assert second.ack is not None
            assert (second.ack.acked, second.ack.skipped) == (2, [])
        else:
            assert second.ack is None, "an older server: its caller acks them"
            assert (await queue.ack("n", first.jobs)).acked == 2

    run(url, script)
    assert [entry.seq for entry in fake.jobs.values()] == [3]


def test_enqueue_outlives_a_server_that_fails(url: str, fake: FakeQueue) -> None:
    fake.faults["append"].extend([Broken(done=True), Refusal(503), Broken(), Broken(done=True)])

    async def script(queue: AsyncQueue) -> None:
        assert (await queue.enqueue("once")).deduped

    run(url, script)
    assert len(fake.jobs) == 1


def test_a_claim_waits_for_the_first_job(url: str, fake: FakeQueue) -> None:
    async def script(queue: AsyncQueue) -> None:
        claim = asyncio.create_task(queue.claim("n", wait_ms=10_000))
        await asyncio.to_thread(fake.wait_for, lambda: fake.calls("claim"))
        fake.add("late")
        assert [job.data for job in (await claim).jobs] == ["late"]
        fake.faults["claim"].append(Refusal(429, "throttled", {"Retry-After": "3"}))
        with pytest.raises(Throttled):
            await queue.claim("n")

    run(url, script)


def test_a_stream_brings_jobs_and_frees_them_at_its_end(url: str, fake: FakeQueue) -> None:
    fake.add("a", "b", "c")

    async def script(queue: AsyncQueue) -> None:
        async with contextlib.aclosing(queue.work("n", max_jobs=2, lease_ms=9000)) as frames:
            assert await anext(frames) == Advice()
            jobs = [await anext(frames), await anext(frames)]
            assert [job.data for job in jobs if isinstance(job, Job)] == ["a", "b"]
            assert fake.leased == [1, 2]
        await asyncio.to_thread(fake.wait_for, lambda: not fake.leased)

    run(url, script)
    assert fake.calls("work") == [{"node": "n", "max": "2", "lease_ms": "9000"}]


async def _end_of(queue: AsyncQueue) -> ClientError:
    with pytest.raises(ClientError) as caught:
        async for _ in queue.work("n"):
            pass
    return caught.value


def test_how_streams_end(url: str, fake: FakeQueue) -> None:
    fake.faults["work"].extend(
        [Refusal(404, "topic_not_found"), Refusal(409, "not_a_queue"), Broken()]
    )

    async def script(queue: AsyncQueue) -> None:
        assert isinstance(await _end_of(queue), NotFound)
        assert isinstance(await _end_of(queue), NotAQueue)
        assert isinstance(await _end_of(queue), Unreachable)
        fake.frames.append(b'event: error\ndata: {"code":429,"error":"slow"}\n\n')
        for frames, kind in (([], Unreachable), ([b'{"code":503,"error":"x"}'], Unavailable)):
            fake.frames.extend(b"event: error\ndata: " + frame + b"\n\n" for frame in frames)
            stream = queue.work("n")
            await anext(stream)
            await asyncio.to_thread(fake.wait_for, lambda: not fake.frames)
            fake.cut_streams()
            with pytest.raises(kind) as caught:
                async for _ in stream:
                    pass
            assert type(caught.value) is kind
        fake.frames.append(b'event: job\ndata: {"no":"job"}\n\n')
        assert isinstance(await _end_of(queue), BadAnswer)

    run(url, script)


def test_a_page_in_place_of_a_stream(url: str, fake: FakeQueue) -> None:
    async def script(queue: AsyncQueue) -> None:
        assert isinstance(await _end_of(queue), BadAnswer)

    fake.is_page = True
    run(url, script)
