"""`GET …/live` over a real node: starts, ids, filters, topics made later, limits."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from itertools import pairwise
from typing import Any
from urllib.parse import quote

import pytest

from tests.api.watch.streams import Frame, Live, Reader, id_of, kinds, last_id
from tests.storage.fake_disk import FakeDisk
from topics_server.api.watch.cursor_ids import CursorPosition, decode_id
from topics_server.engine.subscribe import subscription

pytestmark = pytest.mark.anyio


@pytest.fixture
async def live(disk: FakeDisk) -> AsyncIterator[Live]:
    server = await Live.start(disk, max_watch_topics=4)
    yield server
    await server.stop()


def topic_stream(
    live: Live, topic: str, query: str = "", last: str | bytes | None = None
) -> Reader:
    headers = [] if last is None else [last_id(last)]
    return Reader(live.app, f"/v0/topics/{topic}/live", *headers, query=query.encode())


def stream(live: Live, query: str, last: str | None = None) -> Reader:
    headers = [] if last is None else [last_id(last)]
    return Reader(live.app, "/v0/live", *headers, query=query.encode())


async def tagged(live: Live, topic: str, *records: tuple[object, str | None]) -> None:
    """Append these values with their tags."""
    sent = [{"data": data} | ({"tag": tag} if tag else {}) for data, tag in records]
    answer = await live.http.post(f"/v0/topics/{topic}", json={"records": sent})
    assert answer.status_code in (200, 201), answer.text


def first_id(reader: Reader) -> bytes:
    """The id that a stream has before its first event."""
    retry, first = reader.received.split(b"\n\n")[:2]
    assert retry == b"retry: 2000"
    assert first.startswith(b"id: ")
    return first.removeprefix(b"id: ")


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


# --- one topic ------------------------------------------------------------------------------


async def test_a_stream_begins_with_the_first_record_and_goes_on_live(live: Live) -> None:
    await live.append("jobs", 1, 2)
    reader = topic_stream(live, "jobs")
    frames = await reader.take(2)
    assert kinds(frames) == ["record", "caught-up"]
    assert datas(frames) == [1, 2]
    assert [frame.id for frame in frames] == [id_of(jobs=2).decode()] * 2
    await live.append("jobs", 3)
    assert await reader.records(1) == [3]
    assert len(live.node.sessions) == 0
    await reader.left()
    assert live.node.state.connections == 0


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ("from_seq=3", [4, 5]),
        ("last=2", [4, 5]),
        ("last=100", [1, 2, 3, 4, 5]),
        ("tail=true", []),
        ("since=10m", [1, 2, 3, 4, 5]),
        ("since=2099-01-01T00:00:00Z", []),
        ("tag=odd", [1, 3, 5]),
        ("tag=odd&last=2", [3, 5]),
        ("tag_prefix=e", [2, 4]),
        ("node=n1", []),
        ("filter=" + quote('["Not","odd"]'), [2, 4]),
        ("filter=" + quote('["tag","In",["odd","even"]]') + "&tag=even", [2, 4]),
    ],
)
async def test_a_stream_begins_where_it_is_asked_to(
    live: Live, query: str, found: list[int]
) -> None:
    await tagged(live, "jobs", *((n, "odd" if n % 2 else "even") for n in range(1, 6)))
    reader = topic_stream(live, "jobs", query)
    frames = await reader.take(1)
    while frames[-1].event != "caught-up":
        frames += await reader.take(1)
    assert datas(frames) == found
    assert frames[-1].id == id_of(jobs=5).decode()
    await reader.left()


async def test_an_id_alone_says_where_a_stream_goes_on(live: Live) -> None:
    await live.append("jobs", *range(10))
    reader = topic_stream(live, "jobs", "limit=3")
    (first,) = await reader.take(1)
    await reader.left()
    again = topic_stream(live, "jobs", "limit=3&last=1", last=first.id)
    assert await again.records(7) == [3, 4, 5, 6, 7, 8, 9]
    await again.left()
    by_query = topic_stream(live, "jobs", f"cursor={first.id}")
    assert await by_query.records(7) == [3, 4, 5, 6, 7, 8, 9]
    await by_query.left()


async def test_the_start_is_kept_by_an_id_before_the_first_event(live: Live) -> None:
    await live.append("jobs", 1, 2)
    reader = topic_stream(live, "jobs", "tail=true")
    await reader.take(1)
    assert first_id(reader) == id_of(jobs=2)
    await reader.left()
    await live.append("jobs", 3)
    again = topic_stream(live, "jobs", "tail=true", last=id_of(jobs=2))
    assert await again.records(1) == [3]
    await again.left()


async def test_a_topic_that_does_not_exist_is_waited_for(live: Live) -> None:
    reader = topic_stream(live, "later", "last=1")
    await reader.begun()
    await live.append("later", 1, 2)
    frames = await until_data(reader, 2)
    assert frames[0].id == id_of(later=2).decode()
    await reader.left()
    # A client that lost the connection before the topic existed misses nothing either.
    early = first_id(reader)
    assert decode_id(early) == (CursorPosition(0, 0, 0),)
    again = topic_stream(live, "later", "last=1", last=early)
    assert await again.records(2) == [1, 2]
    await again.left()


async def test_a_deleted_topic_is_told_and_waited_for(live: Live) -> None:
    await live.append("jobs", 1)
    reader = topic_stream(live, "jobs")
    await reader.take(2)
    await live.http.delete("/v0/topics/jobs")
    (gone,) = await reader.take(1)
    assert (gone.event, gone.data["topic"]) == ("topic-deleted", "jobs")
    await live.append("jobs", 2)
    frames = await until_data(reader, 1)
    assert kinds(frames) == ["record"]
    assert datas(frames) == [2]
    await reader.left()
    (position,) = decode_id(str(frames[-1].id).encode())
    assert isinstance(position, CursorPosition)
    assert position.epoch == 2
    again = topic_stream(live, "jobs", last=frames[-1].id)
    assert kinds(await again.take(1)) == ["caught-up"]
    await again.left()
    # A reader that was disconnected meanwhile learns that the topic of its position is gone.
    away = topic_stream(live, "jobs", last=id_of(jobs=1))
    told = await away.take(2)
    assert kinds(told) == ["tombstone", "record"]
    assert told[0].data["reason"] == "recreated"
    await away.left()


async def test_one_that_was_away_when_its_topic_was_deleted_is_told(live: Live) -> None:
    await live.append("jobs", 1)
    await live.http.delete("/v0/topics/jobs")
    reader = topic_stream(live, "jobs", last=id_of(jobs=1))
    assert kinds(await reader.take(1)) == ["topic-deleted"]
    await live.append("jobs", 2)
    assert await reader.records(1) == [2]
    await reader.left()


async def test_one_that_was_away_when_one_of_many_named_topics_was_deleted_is_told(
    live: Live,
) -> None:
    """That also holds for an id without names, which has the named topics in the order of the
    request.
    """
    for name in ("b", "c"):
        await live.append(name, 1)
    # The first topic does not exist, so ids hold no names.
    reader = stream(live, "topics=a,b,c")
    frames = await until_data(reader, 2)
    frames += await reader.take(2 - kinds(frames).count("caught-up"))
    before = str(frames[-1].id)
    await live.http.delete("/v0/topics/b")
    assert kinds(await reader.take(1)) == ["topic-deleted"]
    await reader.left()
    away = stream(live, "topics=a,b,c", before)
    told = await away.take(2)
    assert [(each.event, each.data["topic"]) for each in told] == [
        ("topic-deleted", "b"),
        ("caught-up", "c"),
    ]
    await away.left()
    # A deleted topic keeps its position, so its next deletion is reported, too.
    after = str(told[-1].id)
    await live.http.delete("/v0/topics/c")
    again = stream(live, "topics=a,b,c", after)
    (gone,) = await again.take(1)
    assert (gone.event, gone.data["topic"]) == ("topic-deleted", "c")
    await again.left()


async def test_one_that_was_away_when_a_topic_of_a_prefix_was_deleted_is_told(live: Live) -> None:
    await live.append("p.a", 1)
    await live.http.delete("/v0/topics/p.a")
    reader = stream(live, "prefix=p.", id_of(**{"p.a": 1, "q.a": 1}).decode())
    (gone,) = await reader.take(1)
    assert (gone.event, gone.data["topic"]) == ("topic-deleted", "p.a")
    await live.append("p.a", 2)
    assert kinds(await until_data(reader, 1)) == ["topic-created", "record"]
    await reader.left()


async def test_strong_streams_and_members_of_records(live: Live) -> None:
    await tagged(live, "jobs", (1, "t"))
    reader = topic_stream(live, "jobs", "include_data=false&include_tags=false&consistency=strong")
    (frame, _) = await reader.take(2)
    assert set(frame.data["records"][0]) == {"$seq", "$ts"}
    await reader.left()
    reader = topic_stream(live, "jobs")
    (frame,) = await reader.take(1)
    assert frame.data["records"][0]["$tag"] == "t"
    await reader.left()


# --- filters --------------------------------------------------------------------------------


async def test_a_filtered_stream_moves_past_what_does_not_match(live: Live) -> None:
    await tagged(live, "jobs", (0, "a"))
    reader = topic_stream(live, "jobs", "tag=a")
    assert kinds(await reader.take(2)) == ["record", "caught-up"]
    for number in range(1, 6):
        await tagged(live, "jobs", (number, "b"))
    await tagged(live, "jobs", (6, "a"), (7, "b"))
    (frame,) = await reader.take(1)
    assert datas([frame]) == [6]
    assert frame.id == id_of(jobs=8).decode()
    assert frame.data["to_seq"] == frame.data["head_seq"] == 8
    await reader.left()


async def test_a_heartbeat_of_a_filtered_stream_has_its_position(live: Live) -> None:
    await tagged(live, "jobs", (0, "a"))
    reader = topic_stream(live, "jobs", "tag=a&heartbeat_ms=1000")
    await reader.take(2)
    await tagged(live, "jobs", *((number, "b") for number in range(9)))
    await asyncio.sleep(0.01)
    (look,) = [each.next_look for each in live.node.fanout.streams]
    assert look is not None
    (each,) = live.node.fanout.streams
    each.look(look.due_ms + 5000)
    beat = reader.frames()[-1]
    assert (beat.event, beat.id) == ("", id_of(jobs=10).decode())
    await reader.left()


async def test_a_stream_tells_its_position_when_it_skips_many(
    live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("subscription", "tag_watchers"):
        name = f"topics_server.engine.subscribe.{module}.SKIPPED_SLOTS_MAX"
        monkeypatch.setattr(name, 100)
    await tagged(live, "jobs", (0, "a"))
    reader = topic_stream(live, "jobs", "tag=a")
    await reader.take(2)
    count = len(reader.frames())
    for turn in range(30):
        await tagged(live, "jobs", *((turn, "b") for _ in range(10)))
        await asyncio.sleep(0)
    await tagged(live, "jobs", (1, "a"))
    assert await reader.records(1) == [1]
    bare = [frame for frame in reader.frames()[count:] if not frame.event]
    seqs = [decode_id(str(frame.id).encode())["jobs"] for frame in bare]  # type: ignore[call-overload]
    assert len(seqs) in (2, 3)
    assert seqs[0] >= 101
    assert all(after - before >= 100 for before, after in pairwise(seqs))
    await reader.left()


async def test_sealed_records_are_found_through_their_index(live: Live) -> None:
    rows = [(number, "rare" if number % 400 == 0 else "often") for number in range(2000)]
    for start in range(0, 2000, 500):
        await tagged(live, "jobs", *rows[start : start + 500])
        answer = await live.http.post("/v0/admin/seal", json={"topics": ["jobs"]})
        assert answer.json()["unsealed_records"] == 0, answer.text
    await tagged(live, "jobs", (5000, "rare"))
    reader = topic_stream(live, "jobs", "tag=rare")
    frames = await until_data(reader, 6)
    assert datas(frames) == [0, 400, 800, 1200, 1600, 5000]
    await reader.left()
    reader = topic_stream(live, "jobs", "tag=rare&last=3")
    assert datas(await until_data(reader, 3)) == [1200, 1600, 5000]
    await reader.left()


# --- many topics ----------------------------------------------------------------------------


async def test_topics_by_name_and_by_prefix(live: Live) -> None:
    await live.append("orders.eu", 1)
    await live.append("audit", 2)
    await live.append("other", 3)
    reader = stream(live, "topics=audit,soon&prefix=orders.")
    frames = await until_data(reader, 2)
    assert sorted(datas(frames)) == [1, 2]
    await live.append("orders.us", 4)
    await live.append("soon", 5)
    await live.append("other", 6)
    frames = await until_data(reader, 2)
    (made,) = [frame for frame in frames if frame.event == "topic-created"]
    assert made.data == {"topic": "orders.us", "epoch": 1}
    assert datas(frames, "orders.us") == [4]
    assert datas(frames, "soon") == [5]
    assert "other" not in json.dumps([frame.data for frame in reader.frames()])
    await reader.left()
    # The id holds all topics.
    again = stream(live, "topics=audit,soon&prefix=orders.", last=frames[-1].id)
    told = await again.take(4)
    assert kinds(told) == ["caught-up"] * 4
    await again.left()


async def test_a_topic_made_while_a_client_was_away_is_read_from_its_start(live: Live) -> None:
    await live.append("orders.eu", 1)
    reader = stream(live, "prefix=orders.&last=1")
    frames = await reader.take(2)
    await reader.left()
    await live.append("orders.us", 2, 3)
    again = stream(live, "prefix=orders.&last=1", last=frames[-1].id)
    frames = await until_data(again, 2)
    assert "topic-created" in kinds(frames)
    assert datas(frames, "orders.us") == [2, 3]
    await again.left()


async def test_an_empty_prefix_has_an_id_from_the_start(live: Live) -> None:
    reader = stream(live, "prefix=orders.&tail=true")
    await reader.begun()
    await asyncio.sleep(0.01)
    await reader.left()
    await live.append("orders.eu", 1)
    again = stream(live, "prefix=orders.&tail=true", last=first_id(reader).decode())
    assert await again.records(1) == [1]
    await again.left()
    observers = live.node.state.watching()[0].dispatcher.creations._commits.change_observers
    assert not any("Creations" in repr(each) for each in observers)


async def test_a_deleted_topic_of_a_prefix_may_come_again(live: Live) -> None:
    await live.append("orders.eu", 1)
    reader = stream(live, "prefix=orders.")
    await reader.take(2)
    # Without a turn between the two, the new topic exists before the old one's end is reported.
    await live.http.delete("/v0/topics/orders.eu")
    await live.append("orders.eu", 2)
    frames = await until_data(reader, 1)
    assert kinds(frames) == ["topic-deleted", "topic-created", "record"]
    assert datas(frames) == [2]
    await reader.left()


async def test_topics_beyond_the_limit_are_told_and_come_in_when_there_is_room(
    live: Live,
) -> None:
    for number in range(4):
        await live.append(f"orders.{number}", number)
    reader = stream(live, "prefix=orders.")
    await until_data(reader, 4)
    await live.append("orders.4", 4)
    frames = await reader.take(1)
    while frames[-1].event != "error":
        frames += await reader.take(1)
    assert frames[-1].data["code"] == 429
    assert frames[-1].data["topics"] == ["orders.4"]
    assert frames[-1].id is None
    late = stream(live, "prefix=orders.")
    (told,) = await late.take(1)
    assert (told.event, told.data["topics"]) == ("error", ["orders.4"])
    await late.left()
    await live.http.delete("/v0/topics/orders.1")
    frames = await until_data(reader, 1)
    assert kinds(frames)[-3:] == ["topic-deleted", "topic-created", "record"]
    assert datas(frames) == [4]
    await reader.left()


async def test_the_topics_of_an_id_come_before_others_of_the_prefix(live: Live) -> None:
    for name in "bcde":
        await live.append(f"orders.{name}", name)
    reader = stream(live, "prefix=orders.")
    frames = await reader.take(8)
    await reader.left()
    await live.append("orders.a", "a")
    await live.append("orders.e", "e2")
    again = stream(live, "prefix=orders.", last=frames[-1].id)
    told = await until_data(again, 1)
    assert datas(told) == ["e2"]
    assert told[0].data["topics"] == ["orders.a"]
    await again.left()


# --- requests -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ("", "topics"),
        ("topics=", "topics"),
        ("topics=a,,b", "topics"),
        ("topics=a,b,c,d,e", "topics"),
        ("prefix=-x", "prefix"),
        ("prefix=a b", "prefix"),
        ("prefix=" + ",".join(f"p{n}" for n in range(17)), "prefix"),
        ("topics=a&from_seq=1", "from_seq"),
        ("topics=a&last=0", "last"),
        ("topics=a&last=x", "last"),
        ("topics=a&last=1&since=1m", "last"),
        ("topics=a&since=soon", "since"),
        ("topics=a&tail=maybe", "tail"),
        ("topics=a&filter=[1]", "filter"),
        ("topics=a&consistency=weak", "consistency"),
        ("topics=a&heartbeat_ms=-1", "heartbeat_ms"),
        ("topics=a&limit=1.5", "limit"),
        ("topics=a&cursor=%21", "cursor"),
    ],
)
async def test_a_wrong_query_is_400_and_names_the_parameter(
    live: Live, query: str, field: str
) -> None:
    for method in ("GET", "POST"):
        answer = await live.http.request(method, f"/v0/live?{query}")
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["detail"]["field"] == field
    assert live.node.state.connections == 0


async def test_a_bad_id_is_refused_as_the_stream_would_begin_anew(live: Live) -> None:
    await live.append("jobs", 1)
    answer = await live.http.get("/v0/topics/jobs/live", headers={"last-event-id": "!"})
    assert answer.status_code == 400
    assert answer.json()["error"]["detail"]["field"] == "Last-Event-ID"
    answer = await live.http.get("/v0/live?topics=jobs", headers={"accept": "application/json"})
    assert answer.status_code == 406


async def test_without_keys_there_is_no_ticket_and_the_url_is_the_same(live: Live) -> None:
    answer = await live.http.post("/v0/topics/jobs/live?tag=a%26b")
    assert answer.status_code == 200
    assert set(answer.json()) == {"stream_url", "performance"}
    assert answer.json()["stream_url"] == "/v0/topics/jobs/live?tag=a%26b"


async def test_a_stream_ends_when_the_server_stops(disk: FakeDisk) -> None:
    live = await Live.start(disk)
    await live.append("jobs", 1)
    reader = stream(live, "topics=jobs&prefix=jobs.")
    await reader.take(2)
    await live.stop()
    await reader.ended()
    again = await Live.start(disk)
    reader = stream(again, "topics=jobs&prefix=jobs.", last=id_of(jobs=1).decode())
    await again.append("jobs", 2)
    assert await reader.records(1) == [2]
    await reader.left()
    await again.stop()


# --- many filtered readers ------------------------------------------------------------------


async def test_an_append_costs_the_same_for_one_reader_and_for_many_of_other_tags(
    live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    await tagged(live, "jobs", (0, None))
    readers = [topic_stream(live, "jobs", "tag=t0")]
    await readers[0].take(1)
    plans: list[object] = []

    def counted(*args: Any) -> Any:
        plans.append(args)
        return subscription.plan(*args)

    monkeypatch.setattr("topics_server.engine.subscribe.dispatcher.plan", counted)

    async def cost() -> int:
        plans.clear()
        await tagged(live, "jobs", (1, "t0"))
        assert await readers[0].records(1) == [1]
        await asyncio.sleep(0.01)
        return len(plans)

    for _ in range(2):
        await cost()
    alone = await cost()
    readers += [topic_stream(live, "jobs", f"tail=true&tag=t{number}") for number in range(1, 90)]
    for reader in readers[1:]:
        await reader.take(1)
    assert [await cost() for _ in range(3)] == [alone] * 3
    # The readers are still there, each for its tag.
    await tagged(live, "jobs", *((number, f"t{number}") for number in range(1, 90)))
    for number, reader in enumerate(readers[1:], 1):
        assert await reader.records(1) == [number]
    await tagged(live, "jobs", (2, "t50"))
    assert await readers[50].records(1) == [2]
    for reader in readers:
        await reader.left()
    assert not live.node.state.watching()[0].dispatcher._followed


async def test_a_filtered_reader_whose_socket_is_full_goes_on_where_it_was(live: Live) -> None:
    await tagged(live, "jobs", (0, "a"))
    reader = topic_stream(live, "jobs", "tag=a")
    await reader.take(2)
    reader.room.clear()
    for number in range(1, 30):
        await tagged(live, "jobs", (number, "a" if number % 3 == 0 else "b"))
        await asyncio.sleep(0)
    reader.room.set()
    assert await reader.records(9) == list(range(3, 30, 3))
    await tagged(live, "jobs", (30, "b"), (31, "a"))
    assert await reader.records(1) == [31]
    await reader.left()


async def test_a_filtered_reader_learns_that_its_topic_is_deleted(live: Live) -> None:
    await tagged(live, "jobs", (0, "a"))
    reader = topic_stream(live, "jobs", "tag=a")
    await reader.take(2)
    await live.http.delete("/v0/topics/jobs")
    assert kinds(await reader.take(1)) == ["topic-deleted"]
    await tagged(live, "jobs", (1, "b"), (2, "a"))
    assert await reader.records(1) == [2]
    await reader.left()


async def test_filtered_readers_of_many_topics_and_strong_ones(live: Live) -> None:
    for name in ("orders.a", "orders.b"):
        await tagged(live, name, (0, "x"))
    plain = stream(live, "prefix=orders.&tag=x")
    strong = stream(live, "prefix=orders.&tag_prefix=x&consistency=strong")
    readers = (plain, strong)
    for reader in readers:
        await until_data(reader, 2)
    for number in range(1, 8):
        for name in ("orders.a", "orders.b"):
            await tagged(live, name, (number, "x" if number % 2 else "y"))
        await asyncio.sleep(0.002)
    await tagged(live, "orders.c", (9, "y"), (10, "x"))
    for reader in readers:
        frames = await until_data(reader, 9)
        for name in ("orders.a", "orders.b"):
            assert datas(frames, name) == [1, 3, 5, 7]
        assert datas(frames, "orders.c") == [10]
        await reader.left()
