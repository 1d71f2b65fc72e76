"""Clients that mean no good, many at a time from one process: what they send, and how slowly.

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
# Each says something so often; in how many portions all of them do.
_TICK_S: Final = 0.5
_SLICES: Final = 250


def slow_head(number: int, turn: int) -> bytes:
    """A header field now and then, and never the end."""
    return HEAD if not turn else b"X-%d-%d: y\r\n" % (number, turn)


def slow_body(number: int, turn: int) -> bytes:
    """A byte of a long body now and then."""
    return HEAD + b"Content-Length: 1000000\r\n\r\n" if not turn else b" "


def silence(number: int, turn: int) -> bytes:
    """Nothing at all."""
    return b""


def greedy(number: int, turn: int) -> bytes:
    """Large answers that are never read."""
    body = b'{"max_batch_bytes":8388608,"limit":1000}'
    ask = HEAD.replace(b"honest", b"large/diff") + b"Content-Length: %d\r\n\r\n" % len(body) + body
    return ask * 2 if not turn else b""


class Crowd:
    """Sockets of one kind, held by a process of its own: what it does costs the honest client no
    time but the server's. Those that the server ended are opened anew if `comes_again`. They speak
    one after another, spread over each tick, as strangers do.
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
        """How many connections were made so far."""
        return int(self._opened.value)

    @property
    def ended(self) -> int:
        """How many of them the server ended."""
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
    """A number that two processes see."""

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
    """The crowd's process: open all, then go round until told to stop.

    It has what server and honest client leave, as it would be on machines of its own.
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
    # The kernel keeps little of what nobody reads.
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
    """Say what is to be said in this turn; false if the server ended the connection."""
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
        # A connection that was used is waited for longer than one that never was.
        self.append(1, 0.0)
        return self

    def __exit__(self, *_: object) -> None:
        self.sock.close()

    def append(self, count: int, every_s: float) -> list[float]:
        """So many appends; returns how long each took."""
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
