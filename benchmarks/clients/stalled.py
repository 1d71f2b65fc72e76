"""Large uploads of one key that never end: one process, raw sockets, epoll.

Each of `count` connections sends the head of an append and its body of `size` bytes without the
last bytes, as fast as the server takes them, and then waits. A refused connection reads the answer
and begins again after `Retry-After`. A job also names port, key and seconds. The answer counts the
sent bytes and the refused uploads, and errors: uploads that ended in another way. Started by
`loader` as `benchmarks.clients.stalled`; standard library only, like `load`.
"""

from __future__ import annotations

import re
import select
import socket
import time
from typing import Any

from benchmarks.clients.background import answer_jobs

MISSING_BYTES = 16
CHUNK = b" " * 262_144
RETRY_AFTER = re.compile(rb"(?i)retry-after: (\d+)")
LENGTH = re.compile(rb"(?i)content-length: (\d+)")


class Upload:
    """One connection, and the unsent rest of its body."""

    __slots__ = ("answer", "left", "sock")

    def __init__(self, port: int, head: bytes, size: int) -> None:
        self.sock = socket.create_connection(("127.0.0.1", port), timeout=10)
        self.sock.sendall(head)
        self.sock.setblocking(False)
        self.left = size - MISSING_BYTES
        self.answer = b""

    def is_answered(self) -> bool:
        """Whether the whole answer was received."""
        head, end, body = self.answer.partition(b"\r\n\r\n")
        length = LENGTH.search(head)
        return bool(end) and length is not None and len(body) >= int(length[1])


class Uploads:
    """The stalled uploads of one job."""

    def __init__(self, job: dict[str, Any]) -> None:
        self.port, self.size = int(job["port"]), int(job["size"])
        self.head = (
            b"POST /v0/topics/stalled HTTP/1.1\r\nhost: localhost\r\n"
            b"content-type: application/json\r\nauthorization: Bearer %b\r\n"
            b"content-length: %d\r\n\r\n" % (str(job["key"]).encode("ascii"), self.size)
        )
        self.seconds = float(job["seconds"])
        self.sent = self.refused = self.errors = 0
        self.first_error = ""
        self.poll = select.epoll()
        self.live: dict[int, Upload] = {}
        # The start times of the uploads that have not begun.
        self.due = [0.0] * int(job["count"])

    def run(self) -> dict[str, Any]:
        """Begin uploads, and begin refused ones again, until the time is over."""
        began = now = time.perf_counter()
        while now - began < self.seconds:
            self.begin_due(now)
            for fd, event in self.poll.poll(0.02):
                self.handle(fd, event)
            now = time.perf_counter()
        for upload in self.live.values():
            upload.sock.close()
        self.poll.close()
        return {
            "seconds": now - began,
            "sent": self.sent,
            "refused": self.refused,
            "errors": self.errors,
            "first_error": self.first_error,
        }

    def begin_due(self, now: float) -> None:
        """Begin the uploads whose time has come."""
        for at in [at for at in self.due if at <= now]:
            self.due.remove(at)
            upload = Upload(self.port, self.head, self.size)
            self.live[upload.sock.fileno()] = upload
            self.poll.register(upload.sock.fileno(), select.EPOLLIN | select.EPOLLOUT)

    def handle(self, fd: int, event: int) -> None:
        """Receive the answer, or send more of the body."""
        upload = self.live[fd]
        try:
            if event & ~select.EPOLLOUT:
                received = upload.sock.recv(65536)
                upload.answer += received
                if not received or upload.is_answered():
                    self.end(fd, upload)
            elif upload.left:
                count = upload.sock.send(CHUNK[: upload.left])
                upload.left -= count
                self.sent += count
            else:
                self.poll.modify(fd, select.EPOLLIN)
        except OSError as error:
            self.end(fd, upload, repr(error))

    def end(self, fd: int, upload: Upload, error: str = "") -> None:
        """Handle the end of an upload, which begins again later."""
        told = RETRY_AFTER.search(upload.answer)
        if not error and upload.answer.startswith(b"HTTP/1.1 429 ") and told is not None:
            self.refused += 1
        else:
            self.errors += 1
            self.first_error = self.first_error or error or repr(upload.answer[:300])
        self.due.append(time.perf_counter() + (int(told[1]) if told else 1))
        self.poll.unregister(fd)
        self.live.pop(fd).sock.close()


if __name__ == "__main__":
    answer_jobs(lambda job: Uploads(job).run())
