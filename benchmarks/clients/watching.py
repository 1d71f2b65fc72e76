"""Controls one watching client process: opens streams, measures writes, examines received bytes.

`Wire` describes the protocol of one side as bytes; `live_streams` opens watch sessions on our
server. Owned by the cases about watching, which end it with a `with` block.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.clients.loader import BenchmarkError, Loader, Sample
from benchmarks.clients.requests import http_request
from benchmarks.servers.process import ServerProcess


@dataclass(frozen=True, slots=True)
class Wire:
    """The protocol of one side; all texts are latin-1 for bytes."""

    ready: str  # the bytes that show that a stream is live
    end: str  # the bytes that end a message
    answer: int = -1  # the writer's answer: -1 HTTP, -2 PostgreSQL, else how many CRLF
    greeting: str = ""  # the writer's first bytes; the answer is `ready`
    noise: str = ""  # bytes between messages
    again: str = ""  # the request for the next message from {position} (of {size} bytes) on
    position: str = ""  # a regular expression for the position in a message
    width: int = 0  # least digits of the position in `again`
    # The writer's request whose answer shows that all readers have sent their next request.
    settle: str = ""


# The end of a record frame over SSE; a heartbeat ends otherwise. The chunk's own end is found at
# run time.
OURS = Wire(ready="event: caught-up", end="}\n\n")


@dataclass(frozen=True, slots=True)
class Look:
    """The bytes received on the sockets of a group."""

    sockets: int
    closed: int
    beats: int  # heartbeats
    bytes: int


class Watchers(Loader):
    """A watching client process."""

    def __init__(self) -> None:
        super().__init__("benchmarks.clients.watchers")
        self.frame = b""  # one message of the last measurement, and its end
        self.end = ""

    def call(self, **job: Any) -> dict[str, Any]:
        """Run one job to its end; raises BenchmarkError if it failed."""
        self.begin(**job)
        return self.answer()

    def open(self, group: str, port: int, requests: Path, wire: Wire) -> None:
        """Open one stream for each request; returns when all are live."""
        self.call(do="open", group=group, port=port, requests=requests, **asdict(wire))

    def measure(
        self,
        group: str,
        port: int,
        requests: Path,
        wire: Wire,
        *,
        proofs: Path | None,
        expect: int,
        seconds: float,
        rate: float = 0.0,
    ) -> Sample:
        """Write, wait until `expect` watchers have the message, and repeat.

        Returns the latency to the last byte.
        """
        answer = self.call(
            do="measure",
            group=group,
            port=port,
            requests=requests,
            proofs="" if proofs is None else proofs,
            expect=expect,
            seconds=seconds,
            rate=rate,
            **asdict(wire),
        )
        self.frame = answer.pop("frame").encode("latin-1")
        self.end = answer.pop("end")
        return self.sample(answer)

    def look(self, group: str) -> Look:
        """Read all received bytes of the sockets of a group."""
        return Look(**self.call(do="look", group=group))

    def close_group(self, group: str) -> None:
        """Close a group's sockets."""
        self.call(do="close", group=group)


def stream_request(stream_url: str) -> bytes:
    """The GET of one stream."""
    return (
        f"GET {stream_url} HTTP/1.1\r\nhost: 127.0.0.1\r\naccept: text/event-stream\r\n\r\n"
    ).encode()


def open_sessions(
    server: ServerProcess, topics: Iterable[Sequence[str]], heartbeat_ms: int
) -> list[bytes]:
    """Open a watch session for each list of topics, from the heads on.

    Return the GETs of the streams.
    """
    requests = []
    for names in topics:
        tails = {name: {"tail": True} for name in names}
        body = {"topics": tails, "heartbeat_ms": heartbeat_ms}
        answer = json.loads(server.expect("POST", "/v0/watch", json.dumps(body).encode()))
        if len(answer["topics"]) != len(names):
            raise BenchmarkError(f"a session of {len(names)} topics has {len(answer['topics'])}")
        requests.append(stream_request(answer["stream_url"]))
    return requests


LONG_POLL_DIGITS = 10


def long_poll_request(topic: str, position: str) -> bytes:
    """A diff that waits for a record after `position`, always of the same length."""
    body = b'{"from_seq":%s,"limit":256,"wait_ms":30000}' % position.rjust(LONG_POLL_DIGITS).encode(
        "latin-1"
    )
    return http_request("POST", f"/v0/topics/{topic}/diff", body)
