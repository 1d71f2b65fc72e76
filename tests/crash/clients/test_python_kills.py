"""The Python client on a server that is killed: no record is lost or doubled, and no error reaches
the user. Both kinds of client run one thread each for a writer, a producer, a follower with its
cursor in a file, a follower whose position the server keeps, a thread that queues jobs, and a
worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from tests.contract.clients.both import on_loop
from tests.contract.driver import Server, eventually, good
from tests.ports import lasting_port
from topics_server.client import CaughtUpItem, Client, FileCursor, Job, RecordItem

# Records that are acknowledged between two kills.
BETWEEN: Final = 40
WITHIN_S: Final = 180.0
PATIENCE_MS: Final = 600_000


@contextlib.contextmanager
def made(kind: str, url: str) -> Iterator[Any]:
    """A client with plain calls, for one thread."""
    if kind == "blocking":
        with Client(url, patience_ms=PATIENCE_MS) as client:
            yield client
        return
    loop = asyncio.new_event_loop()
    try:
        with on_loop(loop, url, patience_ms=PATIENCE_MS) as client:
            yield client
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.run_until_complete(loop.shutdown_default_executor())
    finally:
        loop.close()


class Crowd:
    """The roles: what each of them did, and the errors that reached them."""

    def __init__(self, kind: str, url: str, cursor: Path) -> None:
        self._kind = kind
        self._url = url
        self._cursor = cursor
        self.is_over = threading.Event()
        self.written: list[int] = []
        self.sent: list[int] = []
        self.queued: list[int] = []
        self.followed: list[int] = []
        self.consumed: list[int] = []
        self.worked: list[int] = []
        self.errors: list[BaseException] = []
        roles = (self.write, self.produce, self.follow, self.consume, self.enqueue, self.work)
        self.threads = [threading.Thread(target=self._run, args=(role,)) for role in roles]

    def _run(self, role: Callable[[Any], None]) -> None:
        try:
            with made(self._kind, self._url) as client:
                role(client)
        except BaseException as error:
            self.errors.append(error)
            raise

    @property
    def repeats(self) -> int:
        """Jobs that were done again, because their ack was lost with the server."""
        return len(self.worked) - len(set(self.worked))

    @property
    def story(self) -> str:
        """The actions of all roles, in one line."""
        return (
            f"{len(self.written):,} appended, {len(self.sent):,} sent by the producer, "
            f"{len(self.followed):,} followed, {len(self.consumed):,} consumed, "
            f"{len(self.queued):,} jobs, {self.repeats} of them done twice"
        )

    def wait_for(self, count: int) -> None:
        """Wait until so many records are acknowledged, or an error reached a role."""
        eventually(
            lambda: bool(self.errors) or len(self.written) >= count, f"{count} records", WITHIN_S
        )

    def write(self, client: Any) -> None:
        while not self.is_over.is_set():
            client.append("events", len(self.written) + 1)
            self.written.append(len(self.written) + 1)
        client.append("events", None, tag="last")

    def produce(self, client: Any) -> None:
        with client.producer("readings", "p", patience_ms=None, linger_ms=0) as producer:
            while not self.is_over.is_set():
                producer.send(len(self.sent) + 1)
                self.sent.append(len(self.sent) + 1)
                if len(self.sent) % 20 == 0:
                    producer.flush()

    def follow(self, client: Any) -> None:
        with contextlib.closing(client.live("events", cursor=FileCursor(self._cursor))) as items:
            for item in items:
                if isinstance(item, RecordItem):
                    self.followed.append(item.seq)
                    if item.tag == "last":
                        return

    def consume(self, client: Any) -> None:
        """Read as a consumer: after each catch-up begin anew at the position that the server
        keeps.
        """
        consumer = client.consumer("events", "c")
        while True:
            with contextlib.closing(consumer.live()) as items:
                for item in items:
                    if isinstance(item, CaughtUpItem):
                        break
                    assert isinstance(item, RecordItem)
                    self.consumed.append(item.seq)
                    if item.tag == "last":
                        return

    def enqueue(self, client: Any) -> None:
        queue = client.queue("jobs")
        while not self.is_over.is_set():
            queue.enqueue(len(self.queued) + 1)
            self.queued.append(len(self.queued) + 1)

    def work(self, client: Any) -> None:
        @client.worker("jobs", concurrency=2, lease_ms=5_000)  # type: ignore[untyped-decorator]
        def done(job: Job) -> None:
            self.worked.append(job.data)

        stopping = threading.Thread(target=self._stop_worker, args=(done,))
        stopping.start()
        done.run()
        stopping.join()

    def _stop_worker(self, worker: Any) -> None:
        """Stop the worker once it has handled all queued jobs."""
        self.is_over.wait()
        self.threads[4].join()
        eventually(lambda: set(self.queued) <= set(self.worked), "every job is done", WITHIN_S)
        worker.stop()


@pytest.mark.crash
@pytest.mark.timeout(0)
@pytest.mark.parametrize("kind", ["blocking", "async"])
def test_nothing_reaches_user_code_over_kills(tmp_path: Path, cycles: int, kind: str) -> None:
    """`--cycles` kills under both kinds of client."""
    server = Server(tmp_path / "server", {"TOPICS_PORT": str(lasting_port())})
    api = server.start()
    for name, config in (("events", {}), ("readings", {}), ("jobs", {"type": "queue"})):
        good(api.put(name, {**config, "idempotency_window_ms": 3_600_000}))
    crowd = Crowd(kind, api.url, tmp_path / "cursor")
    for thread in crowd.threads:
        thread.start()
    try:
        for _ in range(cycles):
            crowd.wait_for(len(crowd.written) + BETWEEN)
            server.crash()
    finally:
        crowd.is_over.set()
        for thread in crowd.threads:
            thread.join(WITHIN_S)
    try:
        assert crowd.errors == []
        assert not any(thread.is_alive() for thread in crowd.threads)
        stored = server.api.read_all("events")
        assert [record["data"] for record in stored] == [*crowd.written, None]
        seqs = [record["$seq"] for record in stored]
        assert crowd.followed == seqs
        assert crowd.consumed == seqs
        assert [record["data"] for record in server.api.read_all("readings")] == crowd.sent
        assert set(crowd.worked) == set(crowd.queued)
        assert crowd.queued
        print(f"\n{kind}: {cycles} kills; {crowd.story}")
    finally:
        server.stop()
