"""The rows of `topics bench`, one after the other, each group with a topic of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final

import msgspec
import uvloop

from topics_server.cli.benching.following import FollowLoad
from topics_server.cli.benching.loads import ClosedLoop, Load
from topics_server.cli.benching.measured import Row, Sample, row_of
from topics_server.cli.benching.own_topics import OwnTopics
from topics_server.cli.benching.requests import (
    VARIANTS,
    ClaimScript,
    RepeatedScript,
    Script,
    append_body,
    target_of,
)
from topics_server.cli.connection import Failure, ServerConnection, topic_path
from topics_server.runtime.clock import random_bytes

GROUPS: Final = ("append", "batch", "read", "follow", "queue")
BATCH: Final = 100
PAGE: Final = 1000
JOBS: Final = (1, 64)


class _Page(msgspec.Struct):
    records: list[msgspec.Raw]


_PAGE: Final = msgspec.json.Decoder(_Page)


class BenchRun:
    """One run; `emit` gets each row as soon as it is measured."""

    def __init__(
        self,
        client: ServerConnection,
        topics: OwnTopics,
        *,
        seconds: float,
        connections: int,
        emit: Callable[[Row], None],
    ) -> None:
        self._client = client
        self._topics = topics
        self._target = target_of(client.url, client.authorization)
        self._seconds = seconds
        self._connections = connections
        self._emit = emit
        self._padding = random_bytes(64)
        self.samples: list[Sample] = []

    def run(self, groups: tuple[str, ...]) -> None:
        """Measure these groups. Raises the error that ended a load."""
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            self._run = runner.run
            for group in groups:
                getattr(self, f"_{group}")()

    def _append(self) -> None:
        self._appends("append-1", 1)

    def _batch(self) -> None:
        self._appends(f"append-{BATCH}", BATCH)

    def _appends(self, row: str, records: int) -> None:
        topic = self._topics.create(row)
        for connections in self._counts():
            self._loop(row, connections, self._appending(topic, records))
        self._topics.remove(topic)

    def _read(self) -> None:
        topic = self._topics.create("read")
        path = topic_path(topic)
        for _ in range(PAGE // BATCH):
            self._client.call("POST", path, append_body(self._padding, BATCH))
        body = msgspec.json.encode({"from_seq": 0, "limit": PAGE})
        answer = self._client.call("POST", f"{path}/diff", body)
        found = len(_PAGE.decode(answer).records)
        if not found:
            raise Failure(f"a read of {PAGE} records got none")
        request = self._target.request("POST", f"{path}/diff", body)
        for connections in self._counts():
            self._loop(f"diff-{found}", connections, RepeatedScript([request], found))
        self._topics.remove(topic)

    def _follow(self) -> None:
        topic = self._topics.create("follow")
        stream = self._target.request("GET", f"{topic_path(topic)}/live")
        script = self._appending(topic, 1)

        async def measured() -> tuple[Load, Sample]:
            load = FollowLoad(self._client.url, script, stream, self._seconds)
            return load, await load.run()

        self._finish("follow", 1, *self._run(measured()))
        self._topics.remove(topic)

    def _queue(self) -> None:
        for jobs in JOBS:
            topic = self._topics.create(f"queue-{jobs}", type="queue")
            path = topic_path(topic)
            self._loop(f"enqueue-{jobs}", self._connections, self._appending(topic, jobs))
            claims = ClaimScript(self._target, path, jobs)
            self._loop(f"claim-{jobs}", self._connections, claims)
            acks = claims.acks(self._target, path)
            self._loop(f"ack-{jobs}", self._connections, acks)
            self._topics.remove(topic)

    def _counts(self) -> list[int]:
        return sorted({1, self._connections})

    def _appending(self, topic: str, records: int) -> RepeatedScript:
        path = topic_path(topic)
        requests = [
            self._target.request("POST", path, append_body(random_bytes(64), records))
            for _ in range(VARIANTS)
        ]
        return RepeatedScript(requests, records)

    def _loop(self, row: str, connections: int, script: Script) -> None:
        async def measured() -> tuple[Load, Sample]:
            load = ClosedLoop(self._client.url, script, self._seconds)
            return load, await load.run(connections)

        self._finish(row, connections, *self._run(measured()))

    def _finish(self, row: str, connections: int, load: Load, sample: Sample) -> None:
        self.samples.append(sample)
        self._emit(row_of(row, connections, sample))
        if load.fatal is not None:
            raise load.fatal

    _run: Callable[[Any], Any]
