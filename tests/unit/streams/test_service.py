"""Streams as the API calls them: the rules, and their state after a crash."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest

from topics_server.engine.answers import ReadRequest
from topics_server.node.boot import Boot
from topics_server.node.ground import Ground
from topics_server.node.node import Node
from topics_server.settings import Settings
from topics_server.streams import service
from topics_server.streams.service import Streams
from topics_server.streams.values import (
    BEGINNING,
    AppendAsked,
    CreateAsked,
    ForkAsked,
    Position,
    StreamPage,
)
from topics_server.values.errors import Code, TopicsError
from topics_server.values.model import ProducerStamp

T = TypeVar("T")

JSON = CreateAsked("application/json")
TEXT = CreateAsked("text/plain")
BYTES = CreateAsked("application/octet-stream")


class Server:
    """A node on a directory; `kill` leaves the directory like a killed process."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.node: Node

    async def start(self) -> Streams:
        settings = Settings(data_dir=self.root, wal_shards=2)
        self.node = await Boot(Ground.open(settings, 1024)).start()
        return self.node.streams

    async def restart(self) -> Streams:
        await self.node.close()
        return await self.start()

    async def all_of(self, path: str) -> bytes:
        return joined(await self.node.streams.read(path, BEGINNING, 1 << 20, explicit=False))


def joined(page: StreamPage) -> bytes:
    return (b"," if page.view.is_json else b"").join(page.datas)


def appended(content_type: str, **asked: Any) -> AppendAsked:
    return AppendAsked(content_type, **asked)


async def refused(call: Coroutine[Any, Any, T]) -> TopicsError:
    with pytest.raises(TopicsError) as raised:
        await call
    return raised.value


@pytest.fixture
def server(tmp_path: Path) -> Server:
    return Server(tmp_path / "data")


def run(story: Coroutine[Any, Any, None]) -> None:
    asyncio.run(story)


def test_json_messages_are_records_and_survive_a_restart(server: Server) -> None:
    async def story() -> None:
        streams = await server.start()
        made = await streams.create("chat", JSON)
        assert made.is_new
        assert made.view.tail == BEGINNING
        await streams.append("chat", b' [1, {"a": 2}] ', appended("application/json; charset=x"))
        done = await streams.append("chat", b'[["x"]]', appended("APPLICATION/JSON"))
        assert done.tail.seq == 3
        streams = await server.restart()
        page = await streams.read("chat", BEGINNING, 1 << 20, explicit=False)
        assert [bytes(data) for data in page.datas] == [b"1", b'{"a": 2}', b'["x"]']
        assert page.next == done.tail == page.ends[-1]
        assert page.is_up_to_date
        assert not page.is_closed
        records = await server.node.store.read("chat", ReadRequest(0, 100, 1 << 20))
        assert records.head_seq == 3
        await server.node.close()

    run(story())


def test_bytes_are_kept_as_bytes(server: Server) -> None:
    async def story() -> None:
        streams = await server.start()
        await streams.create("a/b c", BYTES)
        await streams.append("a/b c", b"\x00\xff\n", appended("application/octet-stream"))
        await streams.append("a/b c", b'{"no": json', appended("application/octet-stream"))
        streams = await server.restart()
        assert await server.all_of("a/b c") == b'\x00\xff\n{"no": json'
        await server.node.close()

    run(story())


def test_what_differs_is_a_conflict(server: Server) -> None:
    async def story() -> None:
        streams = await server.start()
        await streams.create("s", CreateAsked("text/plain", ttl_s=60))
        assert not (await streams.create("s", CreateAsked("Text/Plain; x=y", ttl_s=60))).is_new
        for other in (
            TEXT,
            CreateAsked("text/plain", ttl_s=61),
            CreateAsked("text/html", ttl_s=60),
        ):
            assert (await refused(streams.create("s", other))).code is Code.STREAM_CONFLICT
        error = await refused(streams.append("s", b"x", appended("application/json")))
        assert error.code is Code.STREAM_CONFLICT
        assert (await refused(streams.append("no", b"x", appended("a/b")))).code is (
            Code.STREAM_NOT_FOUND
        )
        assert server.node.store.topic_count == 1
        await server.node.close()

    run(story())


def test_stream_seq_only_rises(server: Server) -> None:
    async def story() -> None:
        streams = await server.start()
        await streams.create("s", TEXT)
        await streams.append("s", b"1", appended("text/plain", seq="09"))
        await streams.append("s", b"2", appended("text/plain", seq="10"))
        streams = await server.restart()
        for low in ("10", "09", "1"):
            error = await refused(streams.append("s", b"x", appended("text/plain", seq=low)))
            assert error.code is Code.STREAM_CONFLICT
        await streams.append("s", b"3", appended("text/plain", seq="2"))
        assert await server.all_of("s") == b"123"
        await server.node.close()

    run(story())


def test_a_closed_stream_takes_nothing_by_either_door(server: Server) -> None:
    async def story() -> None:
        streams = await server.start()
        await streams.create("s", JSON)
        await streams.append("s", b"1", appended("application/json", closes=True))
        streams = await server.restart()
        error = await refused(streams.append("s", b"2", appended("application/json")))
        assert error.code is Code.STREAM_CLOSED
        assert error.detail["next_offset"].startswith("0000000000000001_")
        assert (await streams.close("s", None)).is_closed
        page = await streams.wait("s", BEGINNING, 1 << 20, 10_000)
        assert page.is_closed
        page = await streams.wait("s", page.next, 1 << 20, 10_000)
        assert page.is_closed
        assert not page.datas
        await server.node.close()

    run(story())


def test_a_stream_may_be_made_closed_with_all_it_will_ever_have(server: Server) -> None:
    async def story() -> None:
        streams = await server.start()
        asked = CreateAsked("text/plain", closes=True, body=b"all")
        assert (await streams.create("s", asked)).view.is_closed
        assert not (await streams.create("s", asked)).is_new
        assert (await refused(streams.create("s", TEXT))).code is Code.STREAM_CONFLICT
        streams = await server.restart()
        page = await streams.read("s", BEGINNING, 1 << 20, explicit=False)
        assert (joined(page), page.is_closed) == (b"all", True)
        await streams.create("f", CreateAsked(fork=ForkAsked("s", None), body=b"more"))
        assert await server.all_of("f") == b"allmore"
        await server.node.close()

    run(story())


def test_producers_close_once(server: Server) -> None:
    async def story() -> None:
        streams = await server.start()
        await streams.create("s", TEXT)
        first, second = ProducerStamp("p", 0, 0), ProducerStamp("p", 0, 1)
        done = await streams.append("s", b"1", appended("text/plain", producer=first))
        assert (done.epoch, done.seq, done.is_repeat) == (0, 0, False)
        done = await streams.close("s", second)
        assert (done.seq, done.is_closed, done.is_repeat) == (1, True, False)
        streams = await server.restart()
        done = await streams.close("s", second)
        assert (done.seq, done.is_repeat) == (1, True)
        done = await streams.append("s", b"1", appended("text/plain", producer=first))
        assert (done.seq, done.is_repeat, done.is_closed) == (1, True, True)
        for stamp in (ProducerStamp("p", 0, 2), ProducerStamp("q", 0, 0)):
            assert (await refused(streams.close("s", stamp))).code is Code.STREAM_CLOSED
        await server.node.close()

    run(story())


def test_a_fork_has_the_positions_of_its_source(server: Server) -> None:
    async def story() -> None:
        streams = await server.start()
        await streams.create("s", JSON)
        await streams.append("s", b"[1,2,3,4]", appended("application/json"))
        await server.node.store.delete_seqs("s", [2])
        page = await streams.read("s", BEGINNING, 1 << 20, explicit=False)
        at = page.ends[1]  # after 3
        made = await streams.create("f", CreateAsked(fork=ForkAsked("s", at)))
        assert made.view.tail == at
        await streams.append("f", b'"mine"', appended("application/json"))
        await streams.append("s", b'"theirs"', appended("application/json"))
        streams = await server.restart()
        assert await server.all_of("f") == b'1,3,"mine"'
        assert await server.all_of("s") == b'1,3,4,"theirs"'
        assert joined(await streams.read("f", at, 1 << 20, explicit=True)) == b'"mine"'
        again = await streams.create("f", CreateAsked(fork=ForkAsked("s", at)))
        assert not again.is_new
        await streams.delete("s")
        assert (await refused(streams.read("s", at, 1, explicit=True))).code is Code.STREAM_GONE
        assert (await refused(streams.create("s", JSON))).code is Code.STREAM_CONFLICT
        streams = await server.restart()
        assert (await refused(streams.delete("s"))).code is Code.STREAM_GONE
        await streams.delete("f")
        assert (await streams.create("s", JSON)).is_new
        error = await refused(streams.read("s", at, 1, explicit=True))
        assert error.code is Code.STREAM_GONE
        await server.node.close()

    run(story())


def test_a_fork_may_begin_inside_of_a_message(server: Server) -> None:
    async def story() -> None:
        streams = await server.start()
        await streams.create("s", TEXT)
        first = await streams.append("s", b"hello ", appended("text/plain"))
        await streams.append("s", b"world", appended("text/plain"))
        fork = ForkAsked("s", first.tail, 3)
        await streams.create("f", CreateAsked(fork=fork, body=b"!"))
        assert await server.all_of("f") == b"hello wor!"
        await streams.create("g", CreateAsked(fork=ForkAsked("f", None)))
        assert await server.all_of("g") == b"hello wor!"
        for bad in (
            ForkAsked("s", first.tail, 6),
            ForkAsked("s", Position(9, first.tail.topic_id)),
        ):
            error = await refused(streams.create("h", CreateAsked(fork=bad)))
            assert error.code is Code.INVALID_REQUEST
        assert server.node.registry.find("h") is None
        await server.node.close()

    run(story())


def test_lifetimes_slide_on_reads_and_outlive_a_restart(server: Server) -> None:
    async def story() -> None:
        streams = await server.start()
        await streams.create("s", CreateAsked("text/plain", ttl_s=1, body=b"x"))
        for _ in range(4):
            await asyncio.sleep(0.4)
            assert await server.all_of("s") == b"x"
        streams = await server.restart()
        assert await server.all_of("s") == b"x"
        for _ in range(100):
            await asyncio.sleep(0.1)
            if server.node.registry.find("s") is None:
                break
        error = await refused(streams.read("s", BEGINNING, 1, explicit=False))
        assert error.code is Code.STREAM_NOT_FOUND
        assert (await streams.create("s", TEXT)).is_new
        await server.node.close()

    run(story())


def test_a_waiting_reader_hears_of_records_and_of_the_end(server: Server) -> None:
    async def story() -> None:
        streams = await server.start()
        await streams.create("s", JSON)
        waiting = asyncio.ensure_future(streams.wait("s", BEGINNING, 1 << 20, 20_000))
        await asyncio.sleep(0.02)
        await streams.append("s", b"7", appended("application/json"))
        page = await waiting
        assert page.datas == [b"7"]
        waiting = asyncio.ensure_future(streams.wait("s", page.next, 1 << 20, 20_000))
        await asyncio.sleep(0.02)
        await streams.close("s", None)
        assert (await waiting).is_closed
        await server.node.close()

    run(story())


def test_readers_who_waited_for_the_same_messages_share_their_page(server: Server) -> None:
    async def story() -> None:
        streams = await server.start()
        await streams.create("s", JSON)
        waiting = [
            asyncio.ensure_future(streams.wait("s", BEGINNING, limit, 20_000))
            for limit in (1 << 20, 1 << 20, 1)
        ]
        await asyncio.sleep(0.02)
        await streams.append("s", b"7", appended("application/json"))
        one, other, smaller = await asyncio.gather(*waiting)
        assert one is other
        assert smaller is not one
        assert one.datas == smaller.datas == [b"7"]
        # Every change makes the page old.
        await streams.append("s", b"8", appended("application/json"))
        assert (await streams.wait("s", BEGINNING, 1 << 20, 20_000)).datas == [b"7", b"8"]
        await server.node.store.delete("s", before_seq=2, match=None)
        assert (await streams.wait("s", BEGINNING, 1 << 20, 20_000)).datas == [b"8"]
        await streams.close("s", None)
        assert (await streams.wait("s", BEGINNING, 1 << 20, 20_000)).is_closed
        await server.node.close()

    run(story())


def test_a_shared_page_is_kept_for_a_moment(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "_SHARED_S", 0.02)

    async def story() -> None:
        streams = await server.start()
        await streams.create("kept", JSON)
        for number in range(3):
            waiting = asyncio.ensure_future(
                streams.wait("kept", streams.head("kept").tail, 1 << 20, 20_000)
            )
            await asyncio.sleep(0.02)
            await streams.append("kept", b"%d" % number, appended("application/json"))
            assert (await waiting).datas == [b"%d" % number]
        del waiting
        for _ in range(200):
            await asyncio.sleep(0.1)
            pages = [each for each in gc.get_objects() if isinstance(each, StreamPage)]
            kept = [page for page in pages if page.view.path == "kept"]
            del pages
            if not kept:
                break
        assert not kept
        await server.node.close()

    run(story())


def test_readers_of_records_that_expire_share_no_page(server: Server) -> None:
    async def story() -> None:
        streams = await server.start()
        await streams.create("s", JSON)
        topic = server.node.store.topic("s")
        topic.config = msgspec.structs.replace(topic.config, ttl_ms=3_600_000)
        waiting = [
            asyncio.ensure_future(streams.wait("s", BEGINNING, 1 << 20, 20_000)) for _ in range(2)
        ]
        await asyncio.sleep(0.02)
        await streams.append("s", b"7", appended("application/json"))
        one, other = await asyncio.gather(*waiting)
        assert one is not other
        assert one == other
        await server.node.close()

    run(story())


def test_a_fork_is_there_once_it_is_whole(server: Server) -> None:
    async def story() -> None:
        streams = await server.start()
        await streams.create("s", JSON)
        await streams.append("s", b"[1,2,3,4]", appended("application/json"))
        await server.node.store.delete_seqs("s", [2, 3])
        making = asyncio.ensure_future(streams.create("f", CreateAsked(fork=ForkAsked("s", None))))
        seen: list[list[bytes]] = []
        while not making.done():
            with contextlib.suppress(TopicsError):
                page = await server.node.store.read("f", ReadRequest(0, 100, 1 << 20))
                seen.append(
                    [data for piece in page.pieces for data in piece.block.datas(piece.rows)]
                )
            await asyncio.sleep(0)
        assert all(datas == [b"1", b"4"] for datas in seen), seen
        assert await server.all_of("f") == b"1,4"
        await server.node.close()

    run(story())
