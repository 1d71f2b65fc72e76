"""Chaos of live streams: filters and prefixes, topics made meanwhile, kills.

Each reader has a URL, a session with a prefix or a subscription of a WebSocket, and a predicate.
Nothing is lost or deleted in these topics, so at the end each reader must have the records of every
topic that its predicate takes: each once, in order, however often its connection broke.
"""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import signal
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final
from urllib.parse import quote

import pytest

from tests.contract.driver import Server
from tests.crash.kills.ledger import Json
from tests.crash.kills.torture import read_view
from tests.crash.kills.writers import Connection
from tests.crash.watch.watch_chaos import ENVIRONMENT
from tests.crash.watch.watch_wire import Broken, Frames, Http, Socket, Sse
from tests.ports import lasting_port
from topics_server.wal.fs import OsFs
from topics_server.wal.tools.dump import verify

TAGS: Final = ("a", "ab", "b", "rare", None)
NAMES: Final = (*(f"orders.{n}" for n in range(10)), "other.0", "other.1")
Predicate = Callable[[str, str | None, str | None], bool]
_CALM_S: Final = 60.0

# Filters and what they mean.
FILTERS: Final[dict[str, Predicate]] = {
    "": lambda topic, tag, node: True,
    "tag=rare": lambda topic, tag, node: tag == "rare",
    "tag_prefix=a": lambda topic, tag, node: tag in ("a", "ab"),
    "node=n1": lambda topic, tag, node: node == "n1",
    "tag=b&node=n1": lambda topic, tag, node: tag == "b" and node == "n1",
    'filter=["Not","b"]': lambda topic, tag, node: tag != "b",
    'filter=["Or",["tag","Eq","rare"],["And","b",["Not",["node","Eq","n1"]]]]': (
        lambda topic, tag, node: tag == "rare" or (tag == "b" and node != "n1")
    ),
    "tag=never": lambda topic, tag, node: False,
}
NOT_B: Final = ["Not", "b"]
PLACES: Final[dict[str, Predicate]] = {
    "/v0/topics/orders.7/live?": lambda topic, tag, node: topic == "orders.7",
    "/v0/topics/other.0/live?consistency=strong&": lambda topic, tag, node: topic == "other.0",
    "/v0/live?prefix=orders.&": lambda topic, tag, node: topic.startswith("orders."),
    "/v0/live?prefix=&": lambda topic, tag, node: True,
    "/v0/live?topics=other.1,orders.2&prefix=orders.1,orders.2&": (
        lambda topic, tag, node: topic in ("other.1", "orders.1", "orders.2")
    ),
}


@dataclass
class Reader:
    """One client and what it got: by topic, its seqs."""

    name: str
    url: str
    takes: Predicate
    rng: random.Random
    got: dict[str, list[int]] = field(default_factory=dict)
    last_id: str | None = None
    marks: list[tuple[str, dict[str, int]]] = field(default_factory=list)
    connections: int = 0

    def note(self, event: str, data: Json, frame_id: str | None) -> None:
        """Check a frame, and keep its records."""
        where = f"{self.name} {self.url}: {event} {json.dumps(data)[:500]}"
        if event == "record":
            seqs = self.got.setdefault(data["topic"], [])
            for record in data["records"]:
                assert not seqs or record["$seq"] > seqs[-1], f"{seqs[-3:]}: {where}"
                assert self.takes(data["topic"], record.get("$tag"), record.get("$node")), where
                seqs.append(record["$seq"])
        else:
            assert event in ("caught-up", "topic-created", "skipped", "subscribed"), where
        if frame_id is not None:
            self.last_id = frame_id
            self.marks.append((frame_id, {name: len(seqs) for name, seqs in self.got.items()}))

    async def connect(self, port: int) -> Frames:
        """Continue after the last id, or after an older one."""
        self.connections += 1
        if self.marks and self.rng.random() < 0.3:
            index = self.rng.randrange(len(self.marks))
            self.marks = self.marks[: index + 1]
            self.last_id, lengths = self.marks[-1]
            for name, seqs in self.got.items():
                del seqs[lengths.get(name, 0) :]
        stream = await Sse.dial(port)
        try:
            await stream.ask(self.url, self.last_id)
        except BaseException:
            stream.abort()
            raise
        assert stream.status == 200, f"{self.name} {self.url}: {stream.refusal}"
        return stream

    async def run(self, port: int, is_calm: asyncio.Event) -> None:
        """Connect again and again; in the calm phase only after the connection broke."""
        while True:
            stream: Frames | None = None
            try:
                stream = await self.connect(port)
                until = asyncio.get_running_loop().time() + 2 * self.rng.random()
                while is_calm.is_set() or asyncio.get_running_loop().time() < until:
                    try:
                        async with asyncio.timeout(None if is_calm.is_set() else 0.3):
                            frames = await stream.read()
                    except TimeoutError:
                        continue
                    for frame in frames:
                        self.note(frame.event, frame.data, frame.id)
            except Broken:
                await asyncio.sleep(0.05)
            finally:
                if stream is not None:
                    stream.abort()


class SocketReader(Reader):
    """A subscription with a filter; the client keeps its position itself."""

    position = 0

    async def connect(self, port: int) -> Frames:
        self.connections += 1
        stream = await Socket.open(port)
        command: Json = {"op": "subscribe", "topic": "orders.3", "wait": True, "include_tags": True}
        try:
            await stream.send(command | {"filter": "rare", "from_seq": self.position})
        except BaseException:
            stream.abort()
            raise
        return stream

    def note(self, event: str, data: Json, frame_id: str | None) -> None:
        super().note(event, data, frame_id)
        self.position = data.get("to_seq", self.position)


class PrefixSocketReader(Reader):
    """A prefix and a filter on a socket: the client keeps the position of each topic itself."""

    positions: dict[str, int]

    async def connect(self, port: int) -> Frames:
        self.connections += 1
        self.positions = getattr(self, "positions", {})
        stream = await Socket.open(port)
        known = {name: {"from_seq": seq} for name, seq in self.positions.items()}
        command: Json = {"op": "subscribe", "topics": known, "include_tags": True, "filter": NOT_B}
        try:
            await stream.send(command | {"prefixes": {"orders.": {}}})
        except BaseException:
            stream.abort()
            raise
        return stream

    def note(self, event: str, data: Json, frame_id: str | None) -> None:
        if event == "topic_created":
            assert data["topic"] not in self.positions, f"{self.name}: {data} is known"
            event = "topic-created"
        super().note(event, data, frame_id)
        if event == "subscribed":
            starts = {name: start["from_seq"] for name, start in data["topics"].items()}
            assert starts.items() >= self.positions.items(), f"{self.name}: {data}"
            self.positions |= starts
        else:
            name = data["topic"]
            self.positions[name] = data.get("to_seq", self.positions.get(name, 0))


class SessionReader(Reader):
    """A watch session with a prefix and a filter: the server stores its position, and ids only move
    it back.
    """

    async def connect(self, port: int) -> Frames:
        if self.last_id is None:
            # For events that were sent but not received, only an id shows how far the client is.
            body = {"topics": {}, "prefixes": {"orders.": {}}, "include_tags": True}
            client = Http(port)
            try:
                status, opened = await client.ask("POST", "/v0/watch", {**body, "filter": NOT_B})
            finally:
                client.close()
            if status in (429, 503):
                raise Broken
            assert status == 200, opened
            self.url = opened["stream_url"]
            self.got.clear()
        return await super().connect(port)


async def write(port: int, number: int, rng: random.Random, is_over: asyncio.Event) -> int:
    """Append to more and more topics until the end; returns how many records were acknowledged."""
    client, count, turn = Http(port), 0, 0
    while not is_over.is_set():
        turn += 1
        name = rng.choice(NAMES[: 2 + turn // 12]) if rng.random() < 0.8 else rng.choice(NAMES[-2:])
        records: list[Json] = []
        for _ in range(rng.choice((1, 1, 3, 40))):
            tag = rng.choices(TAGS, (5, 3, 5, 1, 3))[0]
            record: Json = {"data": turn, "node": f"n{number}"}
            records.append(record if tag is None else record | {"tag": tag})
        try:
            status, answer = await client.ask("POST", f"/v0/topics/{name}", {"records": records})
        except Broken:
            client.close()
            await asyncio.sleep(0.05)
            continue
        assert status in (200, 201, 429, 503), answer
        count += len(records) if status < 300 else 0
        await asyncio.sleep(rng.uniform(0.0, 0.03))
    client.close()
    return count


def content(port: int) -> dict[str, list[Json]]:
    """All records of all topics, by a diff."""
    connection = Connection(port)
    try:
        views = {name: read_view(connection, name) for name in NAMES}
    finally:
        connection.close()
    return {name: view.records for name, view in views.items() if view is not None}


def expected(reader: Reader, everything: dict[str, list[Json]]) -> dict[str, list[int]]:
    """The state that the reader must have at the end."""
    wanted = {
        name: [r["$seq"] for r in records if reader.takes(name, r.get("$tag"), r.get("$node"))]
        for name, records in everything.items()
    }
    return {name: seqs for name, seqs in wanted.items() if seqs}


async def storm(server: Server, port: int, seed: int, count: int, kills: int) -> str:
    """Run readers, writers and kills; then the calm phase, and the verdict."""
    rng = random.Random(seed)
    places, filters = list(PLACES.items()), list(FILTERS.items())
    readers: list[Reader] = []
    plain = 0
    for number in range(count):
        dice = random.Random(f"{seed}/{number}")
        if number % 8 == 7:
            takes: Predicate = lambda topic, tag, node: topic == "orders.3" and tag == "rare"  # noqa: E731
            readers.append(SocketReader(f"s{number}", "socket", takes, dice))
            continue
        if number % 8 == 5:
            takes = lambda topic, tag, node: topic.startswith("orders.") and tag != "b"  # noqa: E731
            readers.append(PrefixSocketReader(f"p{number}", "socket", takes, dice))
            continue
        if number % 8 == 6:
            takes = lambda topic, tag, node: topic.startswith("orders.") and tag != "b"  # noqa: E731
            readers.append(SessionReader(f"w{number}", "session", takes, dice))
            continue
        url, in_place = places[plain % len(places)]
        query, passes = filters[plain % len(filters)]
        plain += 1
        head, _, value = query.partition("filter=")
        query = f"filter={quote(value)}" if value and not head else query

        def both(
            topic: str,
            tag: str | None,
            node: str | None,
            in_place: Predicate = in_place,
            passes: Predicate = passes,
        ) -> bool:
            return in_place(topic, tag, node) and passes(topic, tag, node)

        readers.append(Reader(f"r{number}", url + query, both, dice))
    is_calm, is_over = asyncio.Event(), asyncio.Event()
    async with asyncio.TaskGroup() as group:
        reading = [group.create_task(each.run(port, is_calm)) for each in readers]
        writing = [
            group.create_task(write(port, number, random.Random(f"{seed}/w{number}"), is_over))
            for number in range(3)
        ]
        for _ in range(kills):
            await asyncio.sleep(rng.uniform(1.0, 2.5))
            number = signal.SIGTERM if rng.random() < 0.2 else signal.SIGKILL
            await asyncio.to_thread(server.signal, number)
            await asyncio.to_thread(server.start)
        await asyncio.sleep(1.0)
        is_over.set()
        written = sum(await asyncio.gather(*writing))
        is_calm.set()
        everything = await asyncio.to_thread(content, port)
        late: list[Reader] = readers
        until = asyncio.get_running_loop().time() + _CALM_S
        while late and asyncio.get_running_loop().time() < until:
            await asyncio.sleep(0.05)
            late = [each for each in late if got(each) != expected(each, everything)]
        # After the end no record comes a second time.
        await asyncio.sleep(0.2)
        for task in reading:
            task.cancel()
    for each in readers:
        assert got(each) == expected(each, everything), f"seed {seed}: {each.name} {each.url}"
    total = sum(map(len, everything.values()))
    assert total >= written > 0
    delivered = sum(len(seqs) for each in readers for seqs in each.got.values())
    connections = sum(each.connections for each in readers)
    return (
        f"{kills} kills, {count} readers over {connections} connections; {total} records in "
        f"{len(everything)} topics, {delivered} delivered, each once and in order"
    )


def got(reader: Reader) -> dict[str, list[int]]:
    """The state of the reader, by topic."""
    return {name: seqs for name, seqs in reader.got.items() if seqs}


@pytest.mark.crash
@pytest.mark.timeout(0)
def test_each_matching_record_comes_once_and_in_order(
    watchers: int, kills: int, first_seed: int
) -> None:
    """The options are `--watchers`, `--kills` and `--seed`; a failing run keeps its directory."""
    directory = Path(tempfile.mkdtemp(prefix="topics-live-"))
    port = lasting_port()
    server = Server(directory, {**ENVIRONMENT, "TOPICS_PORT": str(port)})
    server.start()
    try:
        story = asyncio.run(storm(server, port, first_seed, watchers, kills))
        server.stop()
    finally:
        if server.process is not None:
            server.signal(signal.SIGKILL)
    assert verify(OsFs(), str(server.data_dir), None).problems == []
    print(f"\nseed {first_seed}: {story}")
    shutil.rmtree(directory)
