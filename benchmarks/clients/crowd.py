"""A crowd of writers that offers more than a server can accept: one process, raw sockets, epoll.

Each connection sends its share of the rate, one request at a time: a request that is due while the
connection waits for an answer is sent as soon as the answer arrives. After a 429, a connection that
honours `Retry-After` pauses for that time; any other connection sends on. A job names port, request
file, connections, rate (requests a second of all), seconds and whether connections honour
`Retry-After`. The answer counts acknowledged requests (by request of the file, so that a case can
look for them), throttled ones, and the time of both. Started by `loader` as
`benchmarks.clients.crowd`; standard library only, like `load`.
"""

from __future__ import annotations

import heapq
import re
import select
import time
from typing import Any

from benchmarks.clients.background import answer_jobs
from benchmarks.clients.load import CHUNK_BYTES, HEAD_BYTES_MAX, Connection, Requests, rank

RETRY_AFTER = re.compile(rb"(?i)retry-after: (\d+)")
LAST_ANSWERS_S = 5.0


class Writer(Connection):
    """One connection: its sent request, and the time of its next one."""

    __slots__ = ("answer", "due", "index", "is_waiting")

    def __init__(self, port: int, due: float) -> None:
        super().__init__(port)
        self.due = due
        self.index = 0
        self.is_waiting = False
        self.answer = b""

    def take(self, data: bytes) -> bool:
        """Take bytes of an answer; True when it is complete."""
        self.answer += data
        end = self.answer.find(b"\r\n\r\n")
        if end < 0:
            assert len(self.answer) < HEAD_BYTES_MAX
            return False
        at = self.answer.find(b"content-length: ", 0, end)
        length = int(self.answer[at + 16 : self.answer.find(b"\r\n", at)])
        return len(self.answer) >= end + 4 + length


class Crowd:
    """The connections of one job, and the answers that they have received."""

    def __init__(self, job: dict[str, Any]) -> None:
        self.requests = Requests(str(job["requests"]))
        self.honours = bool(job["honours"])
        self.step_s = int(job["connections"]) / float(job["rate"])
        self.acked = [0] * len(self.requests.items)
        self.taken_ns: list[int] = []
        self.refused_ns: list[int] = []
        self.first_error = ""
        self.errors = 0
        self.offered = 0
        self.poll = select.epoll()
        self.live: dict[int, Writer] = {}
        self.queue: list[tuple[float, int]] = []
        now = time.perf_counter()
        count = int(job["connections"])
        for number in range(count):
            writer = Writer(int(job["port"]), now + self.step_s * number / count)
            fd = writer.sock.fileno()
            self.live[fd] = writer
            self.poll.register(fd, select.EPOLLIN)
            heapq.heappush(self.queue, (writer.due, fd))
        self.end = time.perf_counter() + float(job["seconds"])

    def run(self) -> dict[str, Any]:
        """Send until the time is over, then wait for the last answers."""
        began = time.perf_counter()
        now = began
        buffer = bytearray(CHUNK_BYTES)
        while now < self.end or (
            any(writer.is_waiting for writer in self.live.values())
            and now < self.end + LAST_ANSWERS_S
        ):
            while self.queue and self.queue[0][0] <= now < self.end:
                self.send(heapq.heappop(self.queue)[1], now)
            wait = min(0.05, max(0.0, self.queue[0][0] - now)) if self.queue else 0.05
            for fd, event in self.poll.poll(wait):
                self.handle(fd, event, buffer)
            now = time.perf_counter()
        for writer in self.live.values():
            writer.sock.close()
        return self.report(now - began)

    def send(self, fd: int, now: float) -> None:
        """Send the due request of a connection."""
        writer = self.live.get(fd)
        if writer is None:
            return
        self.offered += 1
        writer.index = self.requests.cursor
        writer.is_waiting = True
        # Requests missed during the wait are not sent later: the rate is an upper bound.
        writer.due = max(writer.due + self.step_s, now)
        if not writer.send(self.requests.take()):
            self.poll.modify(fd, select.EPOLLIN | select.EPOLLOUT)

    def handle(self, fd: int, event: int, buffer: bytearray) -> None:
        """Handle the events of a connection."""
        writer = self.live[fd]
        if event & select.EPOLLOUT and writer.out is not None and writer.flush():
            self.poll.modify(fd, select.EPOLLIN)
        if event == select.EPOLLOUT:
            return
        try:
            size = writer.sock.recv_into(buffer)
        except OSError:
            size = 0
        if not size:
            self.fail("the server closed the connection")
            self.poll.unregister(fd)
            self.live.pop(fd).sock.close()
        elif writer.take(bytes(buffer[:size])):
            self.answered(fd, writer)

    def answered(self, fd: int, writer: Writer) -> None:
        """Count an answer, and decide when the connection sends again."""
        now_ns = time.perf_counter_ns()
        now = time.perf_counter()
        status, answer = writer.answer[9:12], writer.answer
        writer.answer = b""
        writer.is_waiting = False
        if status in (b"200", b"201"):
            self.acked[writer.index] += 1
            self.taken_ns.append(now_ns - writer.sent_ns)
        elif status == b"429":
            self.refused_ns.append(now_ns - writer.sent_ns)
            told = RETRY_AFTER.search(answer)
            if told is None:
                self.fail("429 without Retry-After")
            elif self.honours:
                writer.due = max(writer.due, now + int(told[1]))
        else:
            self.fail(answer[:300].decode("latin-1"))
        heapq.heappush(self.queue, (max(writer.due, now), fd))

    def fail(self, why: str) -> None:
        """Count an error."""
        self.errors += 1
        self.first_error = self.first_error or why

    def report(self, seconds: float) -> dict[str, Any]:
        """The answer to the job."""
        taken, refused = sorted(self.taken_ns), sorted(self.refused_ns)
        return {
            "seconds": seconds,
            "offered": self.offered,
            "count": len(taken),
            "rate": len(taken) / seconds,
            "p50_ms": rank(taken, 0.50) / 1e6,
            "p99_ms": rank(taken, 0.99) / 1e6,
            "throttled": len(refused),
            "throttled_p50_ms": rank(refused, 0.50) / 1e6,
            "acked": self.acked,
            "errors": self.errors,
            "first_error": self.first_error,
        }


if __name__ == "__main__":
    answer_jobs(lambda job: Crowd(job).run())
