"""`Client` and `AsyncClient` against a server: the same calls, items and errors."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.contract.clients.conftest import NewClient
from tests.contract.conftest import NewServer
from tests.contract.driver import Api, Server, eventually, good
from tests.ports import lasting_port
from topics_server.client import (
    AsyncClient,
    CaughtUpItem,
    ConditionFailed,
    DeletedItem,
    FileCursor,
    GapItem,
    Job,
    NewRecord,
    NotFound,
    RecordItem,
    Refused,
    StreamChunk,
    StreamGap,
    Unreachable,
)


@pytest.fixture
def client(new_client: NewClient, api: Api) -> Any:
    """A client of the shared server."""
    return new_client(api.url)


def seqs(items: Iterator[Any]) -> list[Any]:
    """The seq of each record, the reason of each gap."""
    return [item.seq if isinstance(item, RecordItem) else item.reason for item in items]


def taken(items: Iterator[Any], count: int) -> list[Any]:
    """The first items; all but the last are handled, then the iterator is closed."""
    with contextlib.closing(items) as open_items:  # type: ignore[type-var]
        return [next(open_items) for _ in range(count)]


def test_topics_and_records(client: Any, topic: str) -> None:
    assert client.put_topic(topic, cap_records=1000).created
    first = client.append(topic, {"n": 1}, tag="a", node="w", meta={"k": [1]}, if_={"head_seq": 0})
    assert (first.first_seq, first.condition) == (1, "met")
    with pytest.raises(ConditionFailed) as caught:
        client.append(topic, 2, if_={"head_seq": 0})
    assert caught.value.detail["head_seq"] == 1
    many = client.append_many(topic, [NewRecord(2), NewRecord(None, tag="b:1")], key="k")
    assert client.append_many(topic, [NewRecord(2), NewRecord(None, tag="b:1")], key="k").deduped
    assert (many.first_seq, many.last_seq) == (2, 3)
    items = list(client.read(topic))
    assert [type(item) for item in items] == [RecordItem] * 3
    assert (items[0].data, items[0].tag, items[0].node, items[0].meta) == (
        *({"n": 1}, "a", "w"),
        {"k": [1]},
    )
    assert (items[2].data, items[2].tag, items[2].topic, items[2].kind) == (
        *(None, "b:1"),
        *(topic, "record"),
    )
    assert items[0].ts_ms <= items[2].ts_ms
    described = client.topic(topic)
    assert (described.count, described.head_seq, described.config["cap_records"]) == (3, 3, 1000)
    assert [each.topic for each in client.topics(prefix=topic)] == [topic]
    assert client.delete(topic, tag_prefix="b:") == 1
    assert client.delete(topic, tag="a", before_seq=1) == 0
    assert seqs(client.read(topic)) == [1, 2]
    assert client.call("GET", f"/v0/topics/{topic}/records/2")["record"]["data"] == 2
    client.drop_topic(topic)
    with pytest.raises(NotFound):
        client.topic(topic)
    with pytest.raises(ValueError, match="give a tag"):
        client.delete(topic)


def test_a_read_has_many_pages_starts_and_filters(client: Any, topic: str) -> None:
    client.append_many(topic, [NewRecord(n, tag="ab"[n % 2]) for n in range(1, 26)])
    assert seqs(client.read(topic, limit=4)) == list(range(1, 26))
    assert seqs(client.read(topic, last=3)) == [23, 24, 25]
    assert seqs(client.read(topic, from_seq=20, filter_="b", limit=2)) == [21, 23, 25]
    assert seqs(client.read(topic, since="1h", limit=20)) == list(range(1, 26))
    with pytest.raises(Refused):
        list(client.read(topic, from_seq=1, last=1))


def test_a_read_ends_at_the_head_that_it_found(client: Any, topic: str) -> None:
    client.append_many(topic, [NewRecord(n) for n in range(4)])
    found = []
    for item in client.read(topic, limit=1):
        found.append(item.seq)
        client.append(topic, "more")
    assert found == [1, 2, 3, 4]


def test_gaps_are_items(client: Any, topic: str) -> None:
    client.put_topic(topic, cap_records=2)
    for n in range(5):
        client.append(topic, n)
    gap, *records = client.read(topic)
    assert (gap.kind, gap.from_seq, gap.to_seq, gap.missed) == ("gap", 1, 3, 3)
    assert [item.data for item in records] == [3, 4]
    live_gap, first = taken(client.live(topic), 2)
    assert isinstance(live_gap, GapItem)
    assert (live_gap.from_seq, live_gap.to_seq) == (1, 3)
    assert first.data == 3


def test_a_cursor_goes_on_behind_its_item(client: Any, topic: str) -> None:
    client.append_many(topic, [NewRecord(n) for n in range(1, 10)])
    cursor = taken(client.read(topic, limit=4), 6)[-1].cursor
    assert seqs(client.read(topic, cursor=cursor)) == [7, 8, 9]
    # A live stream accepts the cursor of a read, and its own cursor from the middle of an event.
    items = taken(client.live(topic, cursor=cursor), 2)
    assert [item.seq for item in items] == [7, 8]
    again = taken(client.live(topic, cursor=items[-1].cursor), 2)
    assert again[0].seq == 9
    assert isinstance(again[1], CaughtUpItem)
    with pytest.raises(ValueError, match="not the cursor"):
        list(client.read(topic, cursor=items[-1].cursor))
    with pytest.raises(ValueError, match="not the cursor"):
        list(client.read(topic, cursor="garbage"))


def test_a_topic_that_is_made_again_is_a_gap(client: Any, topic: str) -> None:
    client.append_many(topic, [NewRecord(n) for n in range(3)])
    cursor = list(client.read(topic))[-1].cursor
    client.drop_topic(topic)
    client.append_many(topic, [NewRecord(n) for n in range(9)])
    assert seqs(client.read(topic, cursor=cursor)) == ["recreated", *range(1, 10)]
    assert seqs(iter(taken(client.live(topic, cursor=cursor), 4))) == ["recreated", 1, 2, 3]


def test_positions_are_kept_in_a_file(client: Any, topic: str, tmp_path: Path) -> None:
    store = FileCursor(tmp_path / "cursor")
    assert store.load() is None
    client.append_many(topic, [NewRecord(n) for n in range(1, 7)])
    # The fourth item was not handled: the loop did not ask for the next one.
    assert len(taken(client.read(topic, cursor=store, limit=2), 4)) == 4
    assert seqs(client.read(topic, cursor=store)) == [4, 5, 6]
    assert list(client.read(topic, cursor=store)) == []
    client.append(topic, 7)
    assert [item.seq for item in taken(client.live(topic, cursor=store), 2)[:1]] == [7]
    client.append(topic, 8)
    assert taken(client.live(topic, cursor=store), 1)[0].seq == 8
    assert [path.name for path in tmp_path.iterdir()] == ["cursor"]


def test_positions_are_kept_on_the_server(client: Any, topic: str) -> None:
    client.append_many(topic, [NewRecord(n) for n in range(1, 7)])
    billing = client.consumer(topic, "billing")
    assert seqs(iter(taken(billing.read(limit=2), 3))) == [1, 2, 3]
    place = billing.place()
    assert (place.seq, place.lag) == (2, 4)
    assert seqs(billing.read()) == [3, 4, 5, 6]
    assert billing.place().lag == 0
    client.append(topic, 7)
    record, caught_up = taken(billing.live(), 2)
    assert (record.seq, caught_up.kind) == (7, "caught-up")
    assert billing.place().seq == 7
    assert billing.rewind(2, if_seq=7).seq == 2
    assert billing.commit(5).moved
    # The consumer exists already, so it stays where it is.
    assert client.consumer(topic, "billing", "head").place().seq == 5
    with pytest.raises(ValueError, match="two starts"):
        billing.read(from_seq=3)
    with pytest.raises(ValueError, match="one topic"):
        client.live([topic, "other"], consumer="billing")
    assert billing.delete()
    with pytest.raises(NotFound):
        list(billing.read())


def test_live_follows_many_topics_and_tells_their_news(
    client: Any, names: Callable[[str], str]
) -> None:
    one, two = names("orders"), names("orders")
    client.append(one, 1)
    with contextlib.closing(client.live([one, two])) as items:
        assert next(items).seq == 1
        assert isinstance(next(items), CaughtUpItem)
        client.append(two, "first", tag="t")
        found = next(items)
        while not isinstance(found, RecordItem):
            found = next(items)
        assert (found.topic, found.seq, found.tag) == (two, 1, "t")
        client.drop_topic(two)
        while not isinstance(found, DeletedItem):
            found = next(items)
        assert found.topic == two


def test_tail_begins_with_the_last_records(client: Any, topic: str) -> None:
    client.append_many(topic, [NewRecord(n, tag="ab"[n % 2]) for n in range(1, 21)])
    assert [item.seq for item in taken(client.tail(topic, 3), 3)] == [18, 19, 20]
    assert [item.seq for item in taken(client.tail(topic, 2, tag="a"), 2)] == [18, 20]
    with contextlib.closing(client.tail(topic, 0)) as items:
        assert isinstance(next(items), CaughtUpItem)
        client.append(topic, "new")
        assert next(items).data == "new"


def test_numbers_beyond_a_float_end_no_reader(client: Any, api: Api, topic: str) -> None:
    body = b'{"records":[{"data":1e400,"meta":{"big":1e400}},{"data":123456789012345678901234}]}'
    url = f"/v0/topics/{topic}"
    good(api.http.post(url, content=body, headers={"content-type": "application/json"}))
    for items in (client.read(topic), client.live(topic)):
        huge, exact = taken(items, 2)
        assert huge.data == float("inf")
        assert huge.meta["big"] == float("inf")
        assert exact.data == 123456789012345678901234


def test_views(client: Any, topic: str) -> None:
    view = client.view(topic, "by-tag")
    client.put_topic(topic)
    view.define(shortcut={"count_by_tag": True})
    seq = client.append(topic, 1, tag="a").last_seq
    answer = view.query("SELECT tag, count FROM counts", after=seq)
    assert answer.dicts() == [{"tag": "a", "count": 1}]
    view.close()
    # A view has no connections of its own, so the client still works.
    assert client.topic(topic).head_seq == 1


def test_queues_and_workers(client: Any, topic: str) -> None:
    queue = client.queue(topic, create=True)
    queue.enqueue({"n": 1}, key="once")
    assert queue.enqueue({"n": 1}, key="once").deduped
    [job] = queue.claim("w").jobs
    assert queue.ack("w", [job]).acked == 1
    done: list[Any] = []

    @client.worker(topic, concurrency=1)  # type: ignore[untyped-decorator]
    def work(job: Job) -> None:
        done.append(job.data)
        if len(done) == 3:
            work.stop()

    for n in range(3):
        queue.enqueue(n)
    thread = threading.Thread(target=work.run)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    assert sorted(done) == [0, 1, 2]


def test_producers(client: Any, topic: str) -> None:
    with client.producer(topic, "till-7") as till:
        for n in range(50):
            till.send({"n": n}, tag="t")
        till.flush()
    assert [item.data["n"] for item in client.read(topic)] == list(range(50))


def test_a_stream_of_messages(client: Any, names: Callable[[str], str]) -> None:
    chat = client.stream(f"chat/{names('c')}")
    with pytest.raises(NotFound):
        chat.append({"n": 0})
    assert chat.create().is_empty
    assert list(chat.read()) == []
    chat.append({"n": 1}, [2, 3], key="k")
    chat.append({"n": 1}, [2, 3], key="k")
    chat.append("x")
    pages = list(chat.read())
    assert [message for page in pages for message in page.messages] == [{"n": 1}, [2, 3], "x"]
    assert list(chat.read(pages[-1].cursor)) == []
    with contextlib.closing(chat.live(pages[-1].cursor)) as items:
        end = chat.append("last", close=True)
        assert end.is_closed
        assert [page.messages for page in items] == [["last"]]
    assert chat.end().is_closed
    with pytest.raises(Refused) as caught:
        chat.append("too late")
    assert caught.value.code == "stream_closed"
    chat.delete()
    with pytest.raises(NotFound):
        chat.end()


def test_a_stream_of_bytes(client: Any, names: Callable[[str], str]) -> None:
    answer = client.stream(f"answers/{names('a')}", "text/plain")
    answer.create("Once ")
    answer.append("upon ", b"a ")
    pages = list(answer.read())
    assert b"".join(page.data for page in pages) == b"Once upon a "
    answer.append("time.", close=True)
    rest = list(answer.live(pages[-1].cursor))
    assert [(page.data, page.is_closed) for page in rest] == [(b"time.", True)]
    with pytest.raises(TypeError):
        answer.append({"n": 1})


def test_what_a_stream_has_lost_is_a_gap(
    client: Any, api: Api, names: Callable[[str], str]
) -> None:
    path = names("s")
    stream = client.stream(path)
    stream.create()
    stream.append(1)
    cursor = list(stream.read())[-1].cursor
    for n in range(2, 6):
        stream.append(n)
    # A stream path that is a topic's name refers to that topic.
    good(api.http.patch(f"/v0/topics/{path}", json={"cap_records": 2}))
    eventually(lambda: api.get_state(path)["count"] == 2, "the cap holds")
    gap, page = stream.read(cursor)
    assert isinstance(gap, StreamGap)
    assert gap.from_offset == cursor
    assert isinstance(page, StreamChunk)
    assert page.messages == [4, 5]


def test_a_server_that_is_away_is_waited_for(own: NewServer, new_client: NewClient) -> None:
    server = own(TOPICS_PORT=str(lasting_port()))
    url = server.start().url
    client = new_client(url, patience_ms=60_000)
    client.append_many("t", [NewRecord(n) for n in range(1, 8)])
    items = client.read("t", limit=2)
    assert [next(items).seq, next(items).seq] == [1, 2]
    server.signal(signal.SIGKILL)
    thread = threading.Thread(target=server.start)
    thread.start()
    assert seqs(items) == [3, 4, 5, 6, 7]
    thread.join()
    assert client.append("t", 8).first_seq == 8
    server.stop()
    hasty = new_client(url, patience_ms=0)
    with pytest.raises(Unreachable):
        list(hasty.read("t"))
    with pytest.raises(Unreachable):
        hasty.append("t", 9)


def test_nothing_is_lost_or_doubled_over_kills(
    own: NewServer, new_client: NewClient, tmp_path: Path
) -> None:
    """A reader keeps its position in a file, another on the server; the server is killed."""
    server = own(TOPICS_PORT=str(lasting_port()))
    url = server.start().url
    client = new_client(url, patience_ms=60_000)
    client.put_topic("t", durability="fsync")
    client.consumer("t", "c")
    by_file, by_consumer = [], []
    for turn in range(3):
        client.append_many("t", [NewRecord(n) for n in range(10)], key=f"turn-{turn}")
        by_file += followed(
            client.live("t", cursor=FileCursor(tmp_path / "f")), server, 10 * turn + 10
        )
        by_consumer += followed(client.live("t", consumer="c"), server, 10 * turn + 10)
    assert by_file == list(range(1, 31))
    assert by_consumer == list(range(1, 31))


def followed(items: Iterator[Any], server: Server, last: int) -> list[int]:
    """The seqs up to `last`; the server is killed after the third record."""
    found: list[int] = []
    with contextlib.closing(items) as open_items:  # type: ignore[type-var]
        for item in open_items:
            if isinstance(item, CaughtUpItem) and item.head_seq == last and found[-1:] == [last]:
                return found
            if isinstance(item, RecordItem):
                found.append(item.seq)
                if len(found) == 3:
                    server.crash()
    raise AssertionError("a live stream ends only with an error")


def test_a_cancelled_reader_is_cancelled_although_its_server_is_away(own: NewServer) -> None:
    """The reader's position cannot be committed, so the items come again."""
    server = own()
    url = server.start().url

    async def script() -> None:
        async with AsyncClient(url, patience_ms=0) as client:
            await client.append("t", 1)
            await client.append("t", 2)
            consumer = await client.consumer("t", "c")
            waits = asyncio.Event()

            async def follow() -> None:
                async for item in consumer.live(save_every_ms=600_000):
                    if item.kind == "caught-up":
                        waits.set()

            reader = asyncio.create_task(follow())
            await waits.wait()
            await asyncio.to_thread(server.stop)
            reader.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reader

    asyncio.run(script())


def test_news_of_a_topic_do_not_hide_the_position_behind_its_records(
    client: Any, topic: str
) -> None:
    client.append_many(topic, [NewRecord(n) for n in range(2)])
    consumer = client.consumer(topic, "c")
    with contextlib.closing(consumer.live(save_every_ms=600_000)) as items:
        for item in items:
            if isinstance(item, CaughtUpItem):
                client.append(topic, "breaks the loop")
            elif item.data == "breaks the loop":
                break
    assert consumer.place().seq == 2
