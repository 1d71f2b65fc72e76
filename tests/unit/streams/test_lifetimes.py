"""Expiry of streams in virtual time: when, for which requests, and what counts as a use."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from tests.design7.bench import Bench
from topics_server.engine.topic.topic import Topic
from topics_server.streams.lifetimes import Lifetimes
from topics_server.streams.values import BEGINNING, AppendAsked, CreateAsked, ForkAsked
from topics_server.values.appends import decode_append
from topics_server.values.errors import Code, TopicsError
from topics_server.values.model import TopicConfig

TTL = CreateAsked("text/plain", ttl_s=16, body=b"x")


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    try:
        yield bench
    finally:
        bench.world.abandon()


def create(bench: Bench, asked: CreateAsked = TTL, path: str = "s") -> None:
    assert bench.world.run(bench.node.streams.create(path, asked)).is_new


def read(bench: Bench) -> int:
    page = bench.node.streams.read("s", BEGINNING, 1 << 20, explicit=False)
    return len(bench.world.run(page).datas)


def is_there(bench: Bench) -> bool:
    """Whether a request finds the stream; reading the head does not count as a use."""
    try:
        bench.node.streams.head("s")
    except TopicsError as error:
        return error.code is not Code.STREAM_NOT_FOUND
    return True


def is_kept(bench: Bench) -> bool:
    return bench.node.registry.find("s") is not None


def test_a_stream_ends_so_long_after_its_last_use(bench: Bench) -> None:
    create(bench)
    for _ in range(3):
        bench.wait(15)
        assert read(bench) == 1
    for _ in range(15):
        bench.wait(1)
        assert is_there(bench)
    bench.wait(1.1)
    assert not is_there(bench)
    bench.wait(1.5)
    assert not is_kept(bench)


def test_an_expired_stream_is_refused_before_it_is_dropped(bench: Bench) -> None:
    create(bench)
    bench.wait(15.5)
    bench.world.clock.step(1_000)
    assert is_kept(bench)
    streams = bench.node.streams
    calls = (
        lambda: streams.append("s", b"y", AppendAsked("text/plain")),
        lambda: streams.close("s", None),
        lambda: streams.delete("s"),
        lambda: streams.read("s", BEGINNING, 1, explicit=True),
        lambda: streams.create("f", CreateAsked(fork=ForkAsked("s"))),
    )
    for call in calls:
        with pytest.raises(TopicsError) as raised:
            bench.world.run(call())
        assert raised.value.code is Code.STREAM_NOT_FOUND
    create(bench, CreateAsked("application/json"))
    bench.wait(60)
    assert is_there(bench), "the next stream at this path has a life of its own"


@pytest.mark.parametrize("how", ["stream append", "append", "wait"])
def test_writing_and_waiting_are_uses(bench: Bench, how: str) -> None:
    create(bench)
    bench.wait(12)
    if how == "stream append":
        bench.world.run(bench.node.streams.append("s", b"y", AppendAsked("text/plain")))
    elif how == "append":
        body = b'{"records":[{"data":1}]}'
        bench.world.run(
            bench.store.append("s", body, decode_append(body), header_key=None, config=None)
        )
    else:
        tail = bench.node.streams.head("s").tail
        bench.world.run(bench.node.streams.wait("s", tail, 1 << 20, 10))
    bench.wait(12)
    assert is_there(bench)
    bench.wait(6)
    assert not is_there(bench)


def test_a_stream_does_not_expire_while_a_reader_waits(bench: Bench) -> None:
    create(bench)

    async def story() -> None:
        streams = bench.node.streams
        tail = streams.head("s").tail
        waiting = asyncio.ensure_future(streams.wait("s", tail, 1 << 20, 50_000))
        await asyncio.sleep(49)
        assert is_there(bench)
        assert not waiting.done()
        assert (await waiting).is_up_to_date
        await asyncio.sleep(15)
        assert is_there(bench)
        await asyncio.sleep(3)

    bench.world.run(story())
    assert not is_kept(bench)


def test_a_time_to_end_is_that_time_whatever_happens(bench: Bench) -> None:
    ends_ms = bench.world.clock.now_ms() + 10_000
    create(bench, CreateAsked("text/plain", expires_at="soon", expires_at_ms=ends_ms, body=b"x"))

    async def story() -> None:
        streams = bench.node.streams
        for _ in range(9):
            await asyncio.sleep(1)
            await streams.append("s", b"y", AppendAsked("text/plain"))
        waiting = asyncio.ensure_future(streams.wait("s", streams.head("s").tail, 1, 60_000))
        await asyncio.sleep(3)
        assert waiting.done()
        error = waiting.exception()
        assert isinstance(error, TopicsError)
        assert error.code is Code.STREAM_NOT_FOUND

    bench.world.run(story())
    assert not is_kept(bench)


def test_a_stream_without_a_lifetime_stays(bench: Bench) -> None:
    create(bench, CreateAsked("text/plain"))
    bench.put()
    bench.wait(1_000)
    assert is_there(bench)


@pytest.mark.parametrize("how", ["stop", "kill", "power"])
def test_a_use_outlives_a_restart_within_a_sixteenth(bench: Bench, how: str) -> None:
    """After a restart the lifetime is longer by at most a sixteenth, never shorter."""
    create(bench)
    config = TopicConfig()
    bench.world.run(bench.store.put_topic("s", config, keep_type=False))
    for _ in range(20):
        bench.wait(1)
        assert read(bench) == 1
    if how == "stop":
        bench.restart()
    else:
        bench.wait(0.5)
        bench.crash("kill" if how == "kill" else "power")
    bench.wait(14.5)
    assert is_there(bench)
    bench.wait(3)
    assert not is_there(bench)


def test_what_ended_while_the_server_was_down_is_not_there(bench: Bench) -> None:
    create(bench)
    create(bench, CreateAsked("text/plain"), "stays")
    bench.world.stop()
    bench.world.clock.step(20_000)
    bench.world.start()
    assert not is_there(bench)
    bench.wait(2)
    assert not is_kept(bench)
    assert bench.node.registry.find("stays") is not None


def test_a_drop_that_the_disk_refuses_is_tried_again(bench: Bench) -> None:
    create(bench)
    bench.wait(15)
    bench.world.disk.fail("write", "enospc", times=None)
    bench.wait(5)
    assert not is_there(bench)
    assert is_kept(bench)
    bench.world.disk.heal()
    bench.wait(11)
    assert not is_kept(bench)


def test_many_that_end_at_once_are_all_dropped(bench: Bench) -> None:
    for number in range(300):
        create(bench, CreateAsked("text/plain", ttl_s=5 + number % 2), f"s{number}")
    bench.wait(8)
    assert bench.store.topic_count == 0


@pytest.mark.anyio
async def test_the_start_examines_many_topics_in_several_turns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    topics = [Topic(number, str(number), 1, TopicConfig(), 0) for number in range(1, 1001)]
    # Only the registry is used before the first sweep.
    unused: Any = None
    registry: Any = topics
    lifetimes = Lifetimes(unused, registry, unused, {})
    adopted: list[int] = []
    monkeypatch.setattr(lifetimes, "adopt", lambda topic: adopted.append(topic.topic_id))
    running = asyncio.create_task(lifetimes.run())
    turns = set()
    while len(adopted) < len(topics):
        await asyncio.sleep(0)
        turns.add(len(adopted))
    running.cancel()
    assert adopted == list(range(1, 1001))
    assert len(turns) >= 4
