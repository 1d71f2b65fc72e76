"""Producers of the client that write while their server is killed repeatedly.

Used by the contract tests (few kills) and by `tests/crash` (any number).
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable

from tests.contract.driver import Api, Server, eventually
from tests.ports import lasting_port
from topics_server.client import IdempotentProducer

WITHIN_S = 60.0


class Writer:
    """One producer and its thread; `acknowledged` counts the records that the server certainly
    has.
    """

    def __init__(self, number: int, place: str, *, epoch: int | None) -> None:
        self.number = number
        self.sent = 0
        self.acknowledged = 0
        self.error: Exception | None = None
        self._stopping = threading.Event()
        self._producer = IdempotentProducer(
            place,
            f"w{number}",
            epoch=epoch,
            linger_ms=1,
            batch_records=5,
            buffer_records=50,
            patience_ms=None,
        )
        self._thread = threading.Thread(target=self._write)
        self._thread.start()

    def _write(self) -> None:
        try:
            with self._producer as producer:
                receipts = []
                while not self._stopping.is_set():
                    receipts.append(producer.send({"w": self.number, "n": self.sent}))
                    self.sent += 1
                    while receipts and receipts[0].done():
                        receipts.pop(0).result()
                        self.acknowledged += 1
        except Exception as error:  # set by `stop`
            self.error = error

    def stop(self) -> None:
        """Send nothing more and wait until all records are acknowledged."""
        self._stopping.set()
        self._thread.join(WITHIN_S)
        assert not self._thread.is_alive(), "a producer does not end"
        if self.error is not None:
            raise self.error


def storm(server: Server, kills: int, place: Callable[[Api], str]) -> dict[int, int]:
    """Run three producers through `kills` kills of the server; return how much each sent.

    `place` creates the topic or stream and names it. The server stays on its port.
    """
    server.env = {**server.env, "TOPICS_PORT": str(lasting_port())}
    where = place(server.start())
    # The first producer claims an epoch itself, the others are given one.
    writers = [Writer(n, where, epoch=None if n == 0 else 5) for n in range(3)]
    try:
        for _ in range(kills):
            before = [writer.acknowledged for writer in writers]
            eventually(
                lambda before=before: all(  # type: ignore[misc]
                    writer.acknowledged >= count + 100 or writer.error
                    for writer, count in zip(writers, before, strict=True)
                ),
                "every producer gets on",
                WITHIN_S,
            )
            server.crash()
    finally:
        for writer in writers:
            writer.stop()
    return {writer.number: writer.sent for writer in writers}


STREAM = "/v1/stream/producers/all"


def stream_in(api: Api) -> str:
    """A new JSON stream."""
    answer = api.http.put(STREAM, headers={"Content-Type": "application/json"})
    assert answer.status_code == 201
    return api.url + STREAM


def messages_in(api: Api) -> list[dict[str, int]]:
    """The messages of the stream."""
    found: list[dict[str, int]] = []
    offset = "-1"
    while True:
        answer = api.http.get(STREAM, params={"offset": offset})
        assert answer.status_code == 200
        found += answer.json()
        offset = answer.headers["Stream-Next-Offset"]
        if answer.headers.get("Stream-Up-To-Date") == "true":
            return found


def check(found: list[dict[str, int]], sent: dict[int, int]) -> None:
    """Check that no message is lost, doubled or out of order."""
    by_writer: dict[int, list[int]] = defaultdict(list)
    for record in found:
        by_writer[record["w"]].append(record["n"])
    for number, count in sent.items():
        assert by_writer[number] == list(range(count)), f"writer {number}"
