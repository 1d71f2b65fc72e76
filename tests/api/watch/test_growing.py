"""Watch sessions with prefixes: topics made later, deleted ones, ids, restarts, the limit."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from tests.api.watch.streams import Frame, Live, Reader, id_of, kinds, last_id
from tests.storage.fake_disk import FakeDisk
from topics_server.api.watch.cursor_ids import CursorPosition, decode_id

pytestmark = pytest.mark.anyio

ORDERS: dict[str, Any] = {"orders.": {}}


@pytest.fixture
async def live(disk: FakeDisk) -> AsyncIterator[Live]:
    server = await Live.start(disk, max_watch_topics=4)
    yield server
    await server.stop()


def datas(frames: Sequence[Frame], topic: str | None = None) -> list[Any]:
    return [
        record["data"]
        for frame in frames
        if frame.event == "record" and topic in (None, frame.data["topic"])
        for record in frame.data["records"]
    ]


async def until_data(reader: Reader, count: int) -> list[Frame]:
    """The frames up to the one that completes so many records."""
    frames: list[Frame] = []
    while len(datas(frames)) < count:
        frames += await reader.take(1)
    assert len(datas(frames)) == count
    return frames


async def until_caught_up(reader: Reader, *topics: str) -> list[Frame]:
    """The frames up to the `caught-up` event of the last of these topics."""
    frames: list[Frame] = []
    left = set(topics)
    while left:
        frames += await reader.take(1)
        if frames[-1].event == "caught-up":
            left.discard(frames[-1].data["topic"])
    return frames


async def session(live: Live, prefixes: dict[str, Any] | None = None, **more: Any) -> str:
    answer = await live.post(prefixes=ORDERS if prefixes is None else prefixes, **more)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["wid"])


async def test_a_session_has_the_topics_of_its_prefixes(live: Live) -> None:
    await live.append("orders.eu", 1, 2)
    await live.append("audit", 3)
    await live.append("other", 4)
    answer = await live.post(topics={"audit": {}}, prefixes={"orders.": {"last": 1}})
    assert {name: each["from_seq"] for name, each in answer.json()["topics"].items()} == {
        "audit": 0,
        "orders.eu": 1,
    }
    reader = live.get(answer.json()["wid"])
    assert sorted(datas(await until_data(reader, 2))) == [2, 3]
    # A topic that is created later begins with its first record.
    await live.append("orders.us", 5, 6)
    await live.append("other", 7)
    frames = await until_data(reader, 2)
    (made,) = [frame for frame in frames if frame.event == "topic-created"]
    assert made.data == {"topic": "orders.us", "epoch": 1}
    assert decode_id((made.id or "").encode()) == {"audit": 1, "orders.eu": 2, "orders.us": 0}
    assert datas(frames, "orders.us") == [5, 6]
    await reader.left()


async def test_named_topics_have_their_own_start(live: Live) -> None:
    await live.append("orders.a", 1, 2)
    await live.append("orders.b", 3, 4)
    await live.append("x", 5)
    answer = await live.post(
        topics={"orders.b": {"from_seq": 1}, "x": {}},
        prefixes={"orders.b": {"last": 1}, "orders.": {"tail": True}},
    )
    starts = {name: each["from_seq"] for name, each in answer.json()["topics"].items()}
    assert starts == {"x": 0, "orders.b": 1, "orders.a": 2}
    assert next(iter(starts)) == "x", "those without a prefix come first"


async def test_a_session_goes_on_by_itself_where_its_stream_ended(live: Live) -> None:
    await live.append("orders.a", 1)
    wid = await session(live)
    reader = live.get(wid)
    await until_caught_up(reader, "orders.a")
    await live.append("orders.b", 2)
    await until_caught_up(reader, "orders.b")
    await reader.left()
    await live.append("orders.b", 3)
    await live.append("orders.c", 4)
    reader = live.get(wid)
    frames = await until_data(reader, 2)
    assert datas(frames, "orders.b") == [3]
    assert datas(frames, "orders.c") == [4]
    created = [frame.data["topic"] for frame in frames if frame.event == "topic-created"]
    assert created == ["orders.c"]
    await reader.left()


@pytest.mark.parametrize("is_known", [True, False])
async def test_an_id_leads_back_also_in_topics_made_since(live: Live, is_known: bool) -> None:
    await live.append("orders.a", 1)
    wid = await session(live)
    reader = live.get(wid)
    first = await until_caught_up(reader, "orders.a")
    await live.append("orders.b", 2, 3)
    later = await until_caught_up(reader, "orders.b")
    await reader.left()
    # The client has received either everything, or nothing after it caught up with the first topic.
    again = live.get(wid, last_id((later if is_known else first)[-1].id))
    await live.append("orders.b", 4)
    frames = await until_data(again, 1 if is_known else 3)
    assert datas(frames) == ([4] if is_known else [2, 3, 4])
    assert ("topic-created" in kinds(frames)) is not is_known
    await again.left()


async def test_a_deleted_topic_may_come_again(live: Live) -> None:
    await live.append("orders.eu", 1)
    reader = live.get(await session(live))
    await until_caught_up(reader, "orders.eu")
    await live.http.delete("/v0/topics/orders.eu")
    await live.append("orders.eu", 2)
    frames = await until_data(reader, 1)
    assert kinds(frames) == ["topic-deleted", "topic-created", "record"]
    assert frames[1].data == {"topic": "orders.eu", "epoch": 2}
    positions = decode_id((frames[-1].id or "").encode())
    assert [each.seq for each in positions if isinstance(each, CursorPosition)] == [1]
    await reader.left()


async def test_one_that_was_away_when_a_topic_came_again_is_told(live: Live) -> None:
    await live.append("orders.a", 1)
    await live.append("orders.b", 2)
    wid = await session(live)
    reader = live.get(wid)
    frames = await until_caught_up(reader, "orders.a", "orders.b")
    await reader.left()
    for _ in range(2):
        await live.http.delete("/v0/topics/orders.a")
        await live.append("orders.a", 3)
    for headers in ((), (last_id(frames[-1].id),)):
        again = live.get(wid, *headers)
        told = await until_data(again, 1)
        assert datas(told) == [3]
        lost = [frame.data["reason"] for frame in told if frame.event == "tombstone"]
        assert lost == ["recreated"]
        await again.left()


async def test_a_token_finds_topics_in_any_order(live: Live) -> None:
    for name in ("x", "orders.b", "orders.c"):
        await live.append(name, 1)
    await live.http.delete("/v0/topics/x")
    await live.append("x", 1)
    wid = await session(live, topics={"x": {}})
    reader = live.get(wid)
    await until_caught_up(reader, "x", "orders.b", "orders.c")
    await live.append("orders.a", 1)
    frames = await until_caught_up(reader, "orders.a")
    positions = decode_id((frames[-1].id or "").encode())
    assert [each.seq for each in positions if isinstance(each, CursorPosition)] == [1, 1, 1, 1]
    await reader.left()
    # An id of the same topics, as before a restart: after the named topic they come in another
    # order.
    session_now = live.node.sessions.find(wid)
    assert session_now is not None
    for name in ("orders.b", "orders.a"):
        session_now.cursors[name] = session_now.cursors.pop(name)
    again = live.get(wid, last_id(frames[-1].id))
    told = await again.take(4)
    assert kinds(told) == ["caught-up"] * 4
    await again.left()


async def test_an_id_of_another_session_changes_nothing(live: Live) -> None:
    await live.append("orders.a", 1)
    await live.append("x", 1)
    await live.append("y", 1)
    wid = await session(live, topics={"x": {}, "y": {}})
    reader = live.get(wid)
    await until_caught_up(reader, "x", "y", "orders.a")
    await reader.left()
    for wrong in (b"nonsense", id_of(other=1, x=9, y=9, **{"orders.a": 9})):
        again = live.get(wid, last_id(wrong))
        assert kinds(await again.take(3)) == ["caught-up"] * 3
        await again.left()


async def test_topics_beyond_the_limit_are_left_out(live: Live) -> None:
    for number in range(6):
        await live.append(f"orders.{number}", number)
    answer = await live.post(topics={"soon": {}}, prefixes=ORDERS, wait=True)
    told = answer.json()
    assert list(told["topics"]) == ["orders.0", "orders.1", "orders.2", "soon"]
    assert told["left_out"] == ["orders.3", "orders.4", "orders.5"]
    reader = live.get(told["wid"])
    (error,) = await reader.take(1)
    assert (error.event, error.data["code"]) == ("error", 429)
    assert error.data["topics"] == ["orders.3", "orders.4", "orders.5"]
    await until_data(reader, 3)
    await live.http.delete("/v0/topics/orders.1")
    frames = await until_data(reader, 1)
    assert datas(frames) == [3]
    await reader.left()


async def test_a_cursor_begins_a_session_of_prefixes(live: Live) -> None:
    for name in ("orders.b", "orders.c", "orders.d"):
        await live.append(name, 1)
    reader = live.get(await session(live))
    frames = await until_caught_up(reader, "orders.b", "orders.c", "orders.d")
    await reader.left()
    await live.append("orders.a", 2)
    await live.append("orders.a2", 3)
    # The topics of the id come first; a topic that is not in the id is read from its start.
    answer = await live.post(prefixes={"orders.": {"tail": True}}, cursor=frames[-1].id)
    starts = {name: each["from_seq"] for name, each in answer.json()["topics"].items()}
    assert starts == {"orders.b": 1, "orders.c": 1, "orders.d": 1, "orders.a": 0}
    assert answer.json()["left_out"] == ["orders.a2"]


async def test_nobody_listens_for_topics_after_the_stream(live: Live) -> None:
    wid = await session(live)
    reader = live.get(wid)
    await reader.begun()
    other = live.get(wid)
    await reader.ended()
    await other.begun()
    await live.append("orders.a", 1)
    assert datas(await until_data(other, 1)) == [1]
    await other.left()
    creations = live.node.state.watching()[0].dispatcher.creations
    assert not creations._prefixes
    await live.append("orders.b", 1)
    await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("prefixes", "field"),
    [
        (5, "prefixes"),
        (["orders."], "prefixes"),
        ({"": 1}, "prefixes."),
        ({"-": {}}, "prefixes"),
        ({"a b": {}}, "prefixes"),
        ({"x" * 256: {}}, "prefixes"),
        ({"a": {"from_seq": 1}}, "prefixes.a.from_seq"),
        ({"a": {"consumer": "c"}}, "prefixes.a.consumer"),
        ({"a": {"tail": 1}}, "prefixes.a.tail"),
        ({"a": {"last": 0}}, "prefixes.a.last"),
        ({"a": {"since": "soon"}}, "prefixes.a.since"),
        ({"a": {"last": 1, "tail": True}}, "prefixes.a.last"),
        ({"a": {"ack": "auto"}}, "prefixes.a.ack"),
        ({f"p{number}": {} for number in range(17)}, "prefixes"),
        ({f"{'p' * 200}{number}": {} for number in range(300)}, "prefixes"),
    ],
)
async def test_malformed_prefixes_are_refused(live: Live, prefixes: Any, field: str) -> None:
    answer = await live.post(prefixes=prefixes)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["detail"]["field"] == field
    assert len(live.node.sessions) == 0
