"""Hostile clients, many at a time from one process: the bytes that they send, and how slowly.

`Crowd` holds raw sockets of one kind and keeps them busy from a process of its own. Used by
`test_hostile_clients`.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.synchronize import Event
from typing import Final, Protocol

HEAD: Final = (
    b"POST /v0/topics/honest HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
)
# The time between two messages of a connection, and the number of portions of the crowd.
_TICK_S: Final = 0.5
_SLICES: Final = 250


def slow_head(number: int, turn: int) -> bytes:
    """Send a header field from time to time, but never the end of the head."""
    return HEAD if not turn else b"X-%d-%d: y\r\n" % (number, turn)


def slow_body(number: int, turn: int) -> bytes:
    """Send a byte of a long body from time to time."""
    return HEAD + b"Content-Length: 1000000\r\n\r\n" if not turn else b" "


def silence(number: int, turn: int) -> bytes:
    """Send nothing at all."""
    return b""


def greedy(number: int, turn: int) -> bytes:
    """Ask for large answers and never read them."""
    body = b'{"max_batch_bytes":8388608,"limit":1000}'
    ask = HEAD.replace(b"honest", b"large/diff") + b"Content-Length: %d\r\n\r\n" % len(body) + body
    return ask * 2 if not turn else b""


class Crowd:
    """Sockets of one kind in a process of its own: the crowd takes no time of the honest client,
    only of the server. Connections that the server ended are opened again if `comes_again`. The
    sockets send one after another, spread over each tick, like independent clients.
    """

    def __init__(
        self,
        port: int,
        count: int,
        says: Callable[[int, int], bytes],
        *,
        comes_again: bool = False,
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self.count = count
        self._opened = context.Value("i", 0)
        self._ended = context.Value("i", 0)
        self._full, self._stop = context.Event(), context.Event()
        self._process = context.Process(
            target=_hold,
            args=(port, count, says, comes_again),
            kwargs={
                "opened": self._opened,
                "ended": self._ended,
                "full": self._full,
                "stop": self._stop,
            },
            daemon=True,
        )

    @property
    def opened(self) -> int:
        """The number of connections made so far."""
        return int(self._opened.value)

    @property
    def ended(self) -> int:
        """The number of connections that the server ended."""
        return int(self._ended.value)

    def __enter__(self) -> Crowd:
        self._process.start()
        assert self._full.wait(120), f"{self.opened} of {self.count} sockets"
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._process.join(60)
        assert self._process.exitcode == 0


class _Counter(Protocol):
    """A number that two processes share."""

    value: int


def _hold(
    port: int,
    count: int,
    says: Callable[[int, int], bytes],
    comes_again: bool,
    *,
    opened: _Counter,
    ended: _Counter,
    full: Event,
    stop: Event,
) -> None:
    """The main function of the crowd's process: open all sockets, then serve them in turn until
    stopped.

    It gets only the time that server and honest client leave, because a real crowd runs on other
    machines.
    """
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    sockets: dict[int, socket.socket] = {}

    def open_one(number: int) -> None:
        sock = _connected(port, says(number, 0))
        if sock is not None:
            opened.value += 1
            sockets[number] = sock

    for number in range(count):
        open_one(number)
    full.set()
    turn = 1
    while not stop.is_set():
        for slice_number in range(_SLICES):
            began = time.monotonic()
            for number in range(slice_number, count, _SLICES):
                sock = sockets.get(number)
                if sock is None:
                    if comes_again:
                        open_one(number)
                elif not _goes_on(sock, says, number, turn):
                    ended.value += 1
                    sockets.pop(number).close()
            stop.wait(max(0.0, _TICK_S / _SLICES - (time.monotonic() - began)))
        turn += 1
    for sock in sockets.values():
        sock.close()


def _connected(port: int, first: bytes) -> socket.socket | None:
    sock = socket.socket()
    # With this option the kernel keeps few unread bytes.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    try:
        sock.connect(("127.0.0.1", port))
        sock.setblocking(False)
        sock.send(first)
    except OSError:
        sock.close()
        return None
    return sock


def _goes_on(
    sock: socket.socket, says: Callable[[int, int], bytes], number: int, turn: int
) -> bool:
    """Send this turn's bytes; False if the server ended the connection."""
    try:
        said = says(number, turn)
        if said:
            sock.send(said)
        return says is greedy or sock.recv(65536) != b""
    except BlockingIOError:
        return True
    except OSError:
        return False


@dataclass(slots=True)
class Honest:
    """One client that appends at a steady pace on one connection; latencies in seconds."""

    port: int
    token: str = ""
    sock: socket.socket = field(init=False)

    def __post_init__(self) -> None:
        self.sock = socket.create_connection(("127.0.0.1", self.port), 30)
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def __enter__(self) -> Honest:
        # The server waits longer for a used connection than for an unused one.
        self.append(1, 0.0)
        return self

    def __exit__(self, *_: object) -> None:
        self.sock.close()

    def append(self, count: int, every_s: float) -> list[float]:
        """Append this often; return the latency of each append."""
        body = b'{"records":[{"data":1}]}'
        head = HEAD
        if self.token:
            head += b"Authorization: Bearer %b\r\n" % self.token.encode("ascii")
        request = head + b"Content-Length: %d\r\n\r\n" % len(body) + body
        taken: list[float] = []
        for _ in range(count):
            began = time.perf_counter()
            self.sock.sendall(request)
            answer = self.sock.recv(65536)
            taken.append(time.perf_counter() - began)
            assert answer.startswith((b"HTTP/1.1 200 ", b"HTTP/1.1 201 ")), answer[:200]
            time.sleep(every_s)
        return taken


def p99_ms(samples: list[float]) -> float:
    """The 99th percentile, in milliseconds."""
    assert len(samples) >= 100, "too few samples"
    return sorted(samples)[len(samples) * 99 // 100] * 1000
