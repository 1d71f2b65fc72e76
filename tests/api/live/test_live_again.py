"""`GET /v0/live` with topics of a prefix that are deleted and come again."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.api.watch.streams import Frame, Live, Reader, kinds, last_id
from tests.storage.fake_disk import FakeDisk

pytestmark = pytest.mark.anyio


@pytest.fixture
async def live(disk: FakeDisk) -> AsyncIterator[Live]:
    server = await Live.start(disk, max_watch_topics=2)
    yield server
    await server.stop()


def stream(live: Live, query: bytes, last: str | None = None) -> Reader:
    headers = [] if last is None else [last_id(last)]
    return Reader(live.app, "/v0/live", *headers, query=query)


async def until(reader: Reader, kind: str) -> list[Frame]:
    """The frames up to the first of this kind."""
    frames: list[Frame] = []
    while kind not in kinds(frames):
        frames += await reader.take(1)
    return frames


async def test_the_epoch_of_a_created_topic_is_that_of_the_records_that_follow(live: Live) -> None:
    """The client has read an earlier topic of the name, and missed that it was created again."""
    await live.append("p.a", 1)
    await live.http.delete("/v0/topics/p.a")
    await live.append("p.a", 2)
    reader = stream(live, b"prefix=p.")
    before = (await until(reader, "caught-up"))[-1].id
    await reader.left()
    await live.http.delete("/v0/topics/p.a")
    await live.append("p.a", 3)
    away = stream(live, b"prefix=p.", before)
    created, tombstone, record = await until(away, "record")
    assert (created.event, created.data) == ("topic-created", {"topic": "p.a", "epoch": 3})
    assert (tombstone.event, tombstone.data["reason"]) == ("tombstone", "recreated")
    assert [each["data"] for each in record.data["records"]] == [3]
    await away.left()


async def test_a_topic_that_comes_again_without_a_place_is_told_as_left_out(live: Live) -> None:
    for name in ("p.1", "p.2"):
        await live.append(name, name)
    reader = stream(live, b"prefix=p.")
    for _ in range(2):
        await until(reader, "caught-up")
    await live.append("p.0", "p.0")
    assert (await until(reader, "error"))[-1].data["topics"] == ["p.0"]
    # The client gets all these events at once. p.0, the first in name order, takes the place of
    # p.2.
    reader.room.clear()
    await live.append("p.1", "more")
    await live.http.delete("/v0/topics/p.2")
    await live.append("p.2", "again")
    reader.room.set()
    frames = await until(reader, "error")
    assert (frames[-1].data["code"], frames[-1].data["topics"]) == (429, ["p.2"])
    created = [each.data["topic"] for each in frames if each.event == "topic-created"]
    assert created == ["p.0"]
    await reader.left()
