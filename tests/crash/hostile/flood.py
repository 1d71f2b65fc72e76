"""A flood of appends to one topic, and honest clients that append beside it at a low rate.

`Flood` runs closed-loop connections in a process of its own: each sends its next append as soon as
the last one has its answer. `HonestClients` runs one thread per topic: each appends at a steady
pace, waits for `Retry-After` when it gets 429, and notes the tries and the time of every append.
Used by `test_starvation`.
"""

from __future__ import annotations

import multiprocessing
import re
import select
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.synchronize import Event
from typing import Final, Protocol

from tests.crash.hostile.clients import HEAD

_LENGTH: Final = re.compile(rb"(?i)content-length: (\d+)")
_RETRY: Final = re.compile(rb"(?i)retry-after: (\d+)")
_CONNECT_WITHIN_S: Final = 60.0


def append_request(topic: str, records: int = 1) -> bytes:
    """The bytes of an append of small records."""
    body = b'{"records":[%b]}' % b",".join([b'{"data":{"flood":true}}'] * records)
    head = HEAD.replace(b"/honest ", b"/%b " % topic.encode("ascii"))
    return head + b"Content-Length: %d\r\n\r\n" % len(body) + body


def answer_length(answer: bytes) -> int | None:
    """The length of a complete answer, head and body; None while its head is incomplete."""
    end = answer.find(b"\r\n\r\n")
    if end < 0:
        return None
    length = _LENGTH.search(answer, 0, end)
    assert length is not None, answer[:200]
    return end + 4 + int(length[1])


def retry_after_s(answer: bytes) -> float:
    """The wait that a 429 asks for."""
    told = _RETRY.search(answer)
    assert told is not None, "429 without Retry-After"
    return float(told[1])


class _Counter(Protocol):
    """A number that two processes share."""

    value: int


class Flood:
    """`count` closed-loop connections that append to one topic; `rate` is valid after the block."""

    def __init__(self, port: int, count: int, request: bytes) -> None:
        context = multiprocessing.get_context("spawn")
        self._taken = context.Value("q", 0)
        self._refused = context.Value("q", 0)
        self._full, self._stop = context.Event(), context.Event()
        self._process = context.Process(
            target=_flood,
            args=(port, count, request),
            kwargs={
                "taken": self._taken,
                "refused": self._refused,
                "full": self._full,
                "stop": self._stop,
            },
            daemon=True,
        )

    @property
    def taken(self) -> int:
        """The number of acknowledged appends so far."""
        return int(self._taken.value)

    @property
    def refused(self) -> int:
        """The number of 429 answers."""
        return int(self._refused.value)

    def __enter__(self) -> Flood:
        self._process.start()
        assert self._full.wait(_CONNECT_WITHIN_S), "the flood is not connected"
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._process.join(60)
        assert self._process.exitcode == 0


def _flood(
    port: int,
    count: int,
    request: bytes,
    *,
    taken: _Counter,
    refused: _Counter,
    full: Event,
    stop: Event,
) -> None:
    """The main function of the flood's process."""
    poll = select.epoll()
    sockets: dict[int, socket.socket] = {}
    answers: dict[int, bytes] = {}
    due: dict[int, float] = {}
    for _ in range(count):
        sock = socket.create_connection(("127.0.0.1", port), 30)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sockets[sock.fileno()] = sock
        answers[sock.fileno()] = b""
        poll.register(sock.fileno(), select.EPOLLIN)
    full.set()
    for sock in sockets.values():
        sock.sendall(request)
    while not stop.is_set():
        now = time.monotonic()
        for fd in [fd for fd, at in due.items() if at <= now]:
            del due[fd]
            sockets[fd].sendall(request)
        count_taken = 0
        for fd, _ in poll.poll(0.02):
            received = sockets[fd].recv(65536)
            assert received, "the server closed a connection of the flood"
            answer = answers[fd] + received
            length = answer_length(answer)
            if length is None or len(answer) < length:
                answers[fd] = answer
                continue
            answers[fd] = b""
            if answer[9:12] == b"429":
                refused.value += 1
                due[fd] = time.monotonic() + retry_after_s(answer)
            else:
                assert answer[9:12] in (b"200", b"201"), answer[:300]
                count_taken += 1
                sockets[fd].sendall(request)
        taken.value += count_taken
    for sock in sockets.values():
        sock.close()


@dataclass(slots=True)
class Served:
    """One honest append: seconds until its acknowledgement, and the number of tries."""

    topic: str
    seconds: float
    tries: int


@dataclass(slots=True)
class HonestClients:
    """A thread per topic that appends `count` times, `every_s` apart, each at most `tries_max`."""

    port: int
    topics: Sequence[str]
    count: int
    every_s: float = 0.05
    tries_max: int = 10
    served: list[Served] = field(default_factory=list)
    # Topics whose append was refused at every try.
    starved: list[str] = field(default_factory=list)

    def run(self) -> None:
        """Run all threads; return when all are done."""
        threads = [threading.Thread(target=self._append, args=(topic,)) for topic in self.topics]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _append(self, topic: str) -> None:
        request = append_request(topic)
        with socket.create_connection(("127.0.0.1", self.port), 30) as sock:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for _ in range(self.count):
                began = time.perf_counter()
                for number in range(1, self.tries_max + 1):
                    answer = _exchange(sock, request)
                    if answer[9:12] in (b"200", b"201"):
                        seconds = time.perf_counter() - began
                        self.served.append(Served(topic, seconds, number))
                        break
                    assert answer[9:12] == b"429", answer[:300]
                    time.sleep(retry_after_s(answer))
                else:
                    self.starved.append(topic)
                    return
                time.sleep(self.every_s)

    def unfair(self, within_s: float, tries: int) -> list[Served]:
        """Appends that took both longer than `within_s` and more than `tries`."""
        return [one for one in self.served if one.seconds > within_s and one.tries > tries]


def _exchange(sock: socket.socket, request: bytes) -> bytes:
    sock.sendall(request)
    answer = b""
    while True:
        received = sock.recv(65536)
        assert received, "the server closed the connection"
        answer += received
        length = answer_length(answer)
        if length is not None and len(answer) >= length:
            return answer
