"""The answer to a producer's retry on a stream: its end, and only durable facts."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from tests.design7.bench import Bench
from topics_server.streams.service import Streams
from topics_server.streams.values import AppendAsked, CreateAsked
from topics_server.values.appends import decode_append
from topics_server.values.model import ProducerStamp

FIRST = ProducerStamp("p", 0, 0)
BODY = b'{"records":[{"data":1}]}'


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    try:
        bench.world.run(bench.node.streams.create("s", CreateAsked("text/plain")))
        yield bench
    finally:
        bench.world.abandon()


def append(
    streams: Streams, body: bytes, producer: ProducerStamp | None = None
) -> asyncio.Task[int]:
    async def tail() -> int:
        asked = AppendAsked("text/plain", producer=producer)
        return (await streams.append("s", body, asked)).tail.seq

    return asyncio.get_running_loop().create_task(tail())


def test_a_repeat_tells_its_own_end_whatever_it_asks_for(bench: Bench) -> None:
    streams = bench.node.streams

    async def story() -> None:
        assert await append(streams, b"1", FIRST) == 1
        assert await append(streams, b"2") == 2
        assert await append(streams, b"1", FIRST) == 1
        closing = await streams.close("s", FIRST)
        assert (closing.tail.seq, closing.is_closed, closing.is_repeat) == (1, False, True)

    bench.world.run(story())


def test_a_repeat_does_not_tell_of_a_close_that_is_not_written_yet(bench: Bench) -> None:
    streams = bench.node.streams

    async def story() -> None:
        await append(streams, b"1", FIRST)
        closing = asyncio.get_running_loop().create_task(streams.close("s", None))
        await asyncio.sleep(0)
        asked = AppendAsked("text/plain", producer=FIRST)
        for call in (streams.append("s", b"1", asked), streams.close("s", FIRST)):
            done = await call
            assert not closing.done(), "the disk was quicker than the test"
            assert (done.is_repeat, done.is_closed) == (True, False)
        await closing
        assert (await streams.append("s", b"1", asked)).is_closed

    bench.world.run(story())


def test_a_repeat_of_a_close_has_no_position_of_records(bench: Bench) -> None:
    """That holds through `/v0` too: otherwise the answer would have a first seq after the last
    one.
    """
    streams, store = bench.node.streams, bench.store

    async def story() -> None:
        await append(streams, b"1")
        await streams.close("s", FIRST)
        done = await store.append(
            "s", BODY, decode_append(BODY), header_key=None, config=None, producer=FIRST
        )
        assert done.repeat is not None
        assert (done.repeat.epoch, done.repeat.seq, done.repeat.is_last) == (0, 0, False)

    bench.world.run(story())
