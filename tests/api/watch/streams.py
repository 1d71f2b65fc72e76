"""A real node on a disk in memory behind the application, and readers of its event streams."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import json
from collections.abc import MutableMapping, Sequence
from typing import Any

import httpx

from tests.storage.fake_disk import FakeDisk
from tests.unit.engine.rig import HandClock
from tests.unit.test_node import append, opened
from topics_server.api.application import Application, build_app
from topics_server.http.sockets import EXTENSION
from topics_server.node.node import Node

WITHIN_S = 10.0
Message = MutableMapping[str, Any]


@dataclasses.dataclass
class Frame:
    """One event of a stream, or a comment (then `event` is empty)."""

    event: str
    data: Any
    id: str | None


class Pipe:
    """Replaces the transport of a connection of ours; its calls have no effect."""

    def get_write_buffer_size(self) -> int:
        return 0

    def abort(self) -> None: ...

    def close(self) -> None: ...


class Reader:
    """The client side of one request: the messages that it got, and its disconnect.

    While `room` is not set, its socket accepts no bytes.
    """

    def __init__(
        self,
        app: Application,
        path: str,
        *headers: tuple[bytes, bytes],
        method: str = "GET",
        room: bool = True,
        query: bytes = b"",
    ) -> None:
        self.transport = Pipe()
        self.head: Message | None = None
        self.received = b""
        self.is_ended = False
        self.room = asyncio.Event()
        if room:
            self.room.set()
        self._moved = asyncio.Event()
        self._incoming: asyncio.Queue[Message] = asyncio.Queue()
        self._incoming.put_nowait({"type": "http.request", "body": b"", "more_body": False})
        self._taken = 0
        scope = {
            "type": "http",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "query_string": query,
            "headers": list(headers),
            "extensions": {EXTENSION: self.transport},
        }
        self.serving = asyncio.create_task(app(scope, self._receive, self._send))
        self.serving.add_done_callback(lambda _: self._moved.set())

    async def _receive(self) -> Message:
        return await self._incoming.get()

    async def _send(self, message: Message) -> None:
        await self.room.wait()
        if message["type"] == "http.response.start":
            assert self.head is None
            self.head = message
        else:
            assert not self.is_ended
            self.received += message["body"]
            if not message.get("more_body", False):
                self.is_ended = True
                # As uvicorn does: after a complete response the application gets a disconnect.
                self.leave()
        self._moved.set()

    def leave(self) -> None:
        """Disconnect."""
        self._incoming.put_nowait({"type": "http.disconnect"})

    async def left(self) -> None:
        """Disconnect, and wait until the server has noticed."""
        self.leave()
        await asyncio.wait_for(self.serving, WITHIN_S)

    async def _until(self, holds: Any) -> None:
        async with asyncio.timeout(WITHIN_S):
            while not holds():
                assert not self.serving.done(), self.received
                self._moved.clear()
                await self._moved.wait()

    async def begun(self) -> None:
        """Return when the head has arrived."""
        await self._until(lambda: self.head is not None)

    async def ended(self) -> None:
        """Return when the stream has ended."""
        await asyncio.wait_for(self.serving, WITHIN_S)
        assert self.is_ended

    @property
    def status(self) -> int:
        assert self.head is not None
        return int(self.head["status"])

    @property
    def headers(self) -> dict[bytes, bytes]:
        assert self.head is not None
        return dict(self.head["headers"])

    def frames(self) -> list[Frame]:
        """All complete frames so far."""
        return [parsed(part) for part in self.received.split(b"\n\n")[:-1]]

    async def take(self, count: int) -> list[Frame]:
        """The next frames, without comments and the retry line."""
        await self._until(lambda: len(self._events()) >= self._taken + count)
        taken = self._events()[self._taken : self._taken + count]
        self._taken += count
        return taken

    def _events(self) -> list[Frame]:
        return [frame for frame in self.frames() if frame.event]

    async def records(self, count: int) -> list[Any]:
        """Data of the next records, over as many frames as needed; other frames are skipped."""
        found: list[Any] = []
        while len(found) < count:
            (frame,) = await self.take(1)
            if frame.event == "record":
                found += [record["data"] for record in frame.data["records"]]
        assert len(found) == count
        return found


def parsed(part: bytes) -> Frame:
    event, found_id, data = "", None, []
    for line in part.decode().split("\n"):
        name, _, value = line.partition(": ")
        if name == "event":
            event = value
        elif name == "id":
            found_id = value
        elif name == "data":
            data.append(value)
    return Frame(event, json.loads("\n".join(data)) if data else None, found_id)


def id_of(**seqs: int) -> bytes:
    """An id in the form in which a client gets it."""
    raw = json.dumps(seqs, separators=(",", ":")).encode()
    return base64.urlsafe_b64encode(raw).rstrip(b"=")


def last_id(text: bytes | str | None) -> tuple[bytes, bytes]:
    """The header that a client sends when it reconnects."""
    assert text is not None
    return b"last-event-id", text if isinstance(text, bytes) else text.encode()


class Live:
    """One ready server: node, application and a client for ordinary requests."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.app = build_app(node.state)
        self.http = httpx.AsyncClient(
            transport=httpx.ASGITransport(app=self.app),
            base_url="http://topics",
            headers={"accept-encoding": "identity"},
        )

    @classmethod
    async def start(cls, disk: FakeDisk, **settings: object) -> Live:
        """A server on this disk."""
        return cls(await opened(disk, boot_id=None, **settings).start())

    @property
    def clock(self) -> HandClock:
        clock = self.node.ground.clock
        assert isinstance(clock, HandClock)
        return clock

    async def append(self, topic: str, *datas: object) -> int:
        return await append(self.node, topic, *datas)

    async def post(self, *, query: str = "", **body: object) -> httpx.Response:
        """`POST /v0/watch`."""
        return await self.http.post(f"/v0/watch{query}", json=body)

    async def session(self, *names: str, **more: Any) -> str:
        """Open a session over these topics, from their first records; return its wid."""
        return await self.session_of({name: {} for name in names}, **more)

    async def session_of(self, topics: dict[str, Any], **more: Any) -> str:
        """Open a session over these topics, each with its own options; return its wid."""
        answer = await self.post(topics=topics, **more)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["wid"])

    def get(self, wid: str, *headers: tuple[bytes, bytes], **more: Any) -> Reader:
        """`GET /v0/watch/{wid}`."""
        return Reader(self.app, f"/v0/watch/{wid}", *headers, **more)

    async def stop(self) -> None:
        """Stop the server as a signal would."""
        await self.http.aclose()
        self.node.begin_drain()
        await self.node.close()


def kinds(frames: Sequence[Frame]) -> list[str]:
    return [frame.event for frame in frames]
