"""Clients that begin large uploads and stall, many at a time from one process.

Each sends the head of an append and as much of its body as the server accepts, except for the last
bytes, and then waits. A refused client reads the answer to its end, notes whether it is that of the
contract, and starts again after `Retry-After`. Used by `test_uploads`.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import select
import socket
import time
from multiprocessing.synchronize import Event
from typing import Final, Protocol

from tests.crash.hostile.flood import answer_length, retry_after_s

_CHUNK: Final = b" " * 262_144
# The last bytes of each body, which are never sent.
_MISSING: Final = 16


class _Counter(Protocol):
    """A number that two processes share."""

    value: int


class StalledUploads:
    """`count` uploads of `size` bytes each, which never end."""

    def __init__(self, port: int, count: int, size: int, token: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._sent = context.Value("q", 0)
        self._refused, self._reset = context.Value("q", 0), context.Value("q", 0)
        self._full, self._stop = context.Event(), context.Event()
        self._process = context.Process(
            target=_upload,
            args=(port, count, size, token),
            kwargs={
                "sent": self._sent,
                "refused": self._refused,
                "reset": self._reset,
                "full": self._full,
                "stop": self._stop,
            },
            daemon=True,
        )

    @property
    def sent(self) -> int:
        """Bytes of bodies sent so far."""
        return int(self._sent.value)

    @property
    def refused(self) -> int:
        """The number of uploads that got 429 in the contract's envelope."""
        return int(self._refused.value)

    @property
    def reset(self) -> int:
        """The number of uploads that ended without a readable answer."""
        return int(self._reset.value)

    def __enter__(self) -> StalledUploads:
        self._process.start()
        assert self._full.wait(60), "the uploads have not begun"
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._process.join(60)
        assert self._process.exitcode == 0


class _Client:
    """One unfinished upload."""

    def __init__(self, port: int, size: int, token: str) -> None:
        self.sock = socket.create_connection(("127.0.0.1", port), 30)
        self.sock.setblocking(False)
        head = b"POST /v0/topics/stalled HTTP/1.1\r\nHost: localhost\r\n"
        head += b"Content-Type: application/json\r\n"
        if token:
            head += b"Authorization: Bearer %b\r\n" % token.encode("ascii")
        self.sock.send(head + b"Content-Length: %d\r\n\r\n" % size)
        self.left = size - _MISSING
        self.answer = b""


def _upload(
    port: int,
    count: int,
    size: int,
    token: str,
    *,
    sent: _Counter,
    refused: _Counter,
    reset: _Counter,
    full: Event,
    stop: Event,
) -> None:
    """The main function of the process of all uploads. It gets only the processor time that the
    server leaves.
    """
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    poll = select.epoll()
    clients: dict[int, _Client] = {}
    due: list[float] = [0.0] * count
    while not stop.is_set():
        now = time.monotonic()
        for at in [at for at in due if at <= now]:
            due.remove(at)
            client = _Client(port, size, token)
            clients[client.sock.fileno()] = client
            poll.register(client.sock.fileno(), select.EPOLLIN | select.EPOLLOUT)
        full.set()
        for fd, event in poll.poll(0.02):
            client = clients[fd]
            try:
                if event & select.EPOLLIN:
                    received = client.sock.recv(65536)
                    client.answer += received
                    if received and not _is_whole(client.answer):
                        continue
                    if _is_refusal(client.answer):
                        refused.value += 1
                        due.append(time.monotonic() + retry_after_s(client.answer))
                    else:
                        reset.value += 1
                        due.append(time.monotonic() + 1.0)
                    _end(poll, clients, fd)
                elif client.left:
                    count_sent = client.sock.send(_CHUNK[: client.left])
                    client.left -= count_sent
                    sent.value += count_sent
                else:
                    poll.modify(fd, select.EPOLLIN)
            except OSError:
                reset.value += 1
                due.append(time.monotonic() + 1.0)
                _end(poll, clients, fd)
    for client in clients.values():
        client.sock.close()


def _end(poll: select.epoll, clients: dict[int, _Client], fd: int) -> None:
    poll.unregister(fd)
    clients.pop(fd).sock.close()


def _is_whole(answer: bytes) -> bool:
    length = answer_length(answer)
    return length is not None and len(answer) >= length


def _is_refusal(answer: bytes) -> bool:
    """Whether this is 429 in the contract's envelope, with the limit's name."""
    head, _, body = answer.partition(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 429 ") or not _is_whole(answer):
        return False
    error = json.loads(body)["error"]
    return bool(error["code"] == "throttled" and error["detail"]["limit"] == "max_receiving_bytes")
