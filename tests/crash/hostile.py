"""Clients that mean no good, many at a time from one thread: what they send, and how slowly.

`Crowd` holds raw sockets of one kind and keeps them busy from a thread of its own. Used by
`test_hostile_clients`.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

HEAD: Final = (
    b"POST /v0/topics/honest HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
)
_TICK_S: Final = 0.5


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


@dataclass(slots=True)
class Crowd:
    """Sockets of one kind. Those that the server ended are opened anew if `comes_again`."""

    port: int
    count: int
    says: Callable[[int, int], bytes]
    comes_again: bool = False
    opened: int = 0
    ended: int = 0
    _sockets: dict[int, socket.socket] = field(default_factory=dict)
    _stop: threading.Event = field(default_factory=threading.Event)
    _full: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def __enter__(self) -> Crowd:
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._full.wait(60), f"{self.opened} of {self.count} sockets"
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        assert self._thread is not None
        self._thread.join(60)
        for sock in self._sockets.values():
            sock.close()
        self._sockets.clear()

    def _open(self, number: int) -> None:
        sock = socket.socket()
        # The kernel keeps little of what nobody reads.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        try:
            sock.connect(("127.0.0.1", self.port))
            sock.setblocking(False)
            sock.send(self.says(number, 0))
        except OSError:
            sock.close()
            return
        self.opened += 1
        self._sockets[number] = sock

    def _run(self) -> None:
        for number in range(self.count):
            if self._stop.is_set():
                break
            self._open(number)
        self._full.set()
        turn = 1
        while not self._stop.wait(_TICK_S):
            for number in range(self.count):
                self._go_on(number, turn)
            turn += 1

    def _go_on(self, number: int, turn: int) -> None:
        sock = self._sockets.get(number)
        if sock is None:
            if self.comes_again:
                self._open(number)
            return
        try:
            said = self.says(number, turn)
            if said:
                sock.send(said)
            if self.says is not greedy and sock.recv(65536) == b"":
                raise ConnectionResetError
        except BlockingIOError:
            pass
        except OSError:
            self.ended += 1
            self._sockets.pop(number).close()


@dataclass(slots=True)
class Honest:
    """One client that appends at a steady pace on one connection; latencies in seconds."""

    port: int
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
        request = HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body
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
