"""The load generator: one process, raw sockets, epoll. It handles only bytes.

Reads jobs from standard input, one JSON object a line, and answers each with one line: requests a
second, latency percentiles, errors, and its own CPU time a request, so that a report can show that
the generator was not the bottleneck. Started by `loader`. Standard library only: it starts in
milliseconds, and the cost of an HTTP client does not count as the server's.

Invariants: a job and each answer are bounded in time, and a job in count if requested; every
connection has at most one request in flight; every result other than a complete 2xx answer is an
error.

With `pid`, the answer has the CPU time of that process and its children for each request. A
connection's first request is then not counted, so that neither its opening nor its first head is
part of the cost; HTTP only. With `refusals`, an answer 429 is no error: it is counted as refused.

With `stamp`, a request names its producer: the generator replaces `{producer}` by a name that no
other connection of any job has, and `{turn}` by the number of the request on its connection, from
0.

PostgreSQL's protocol: with `ending`, the last bytes of a successful answer, every connection first
sends `greeting` and waits for its answer; that is not measured.
"""

from __future__ import annotations

import gc
import json
import os
import select
import socket
import struct
import sys
import time
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.clients import postgres
from benchmarks.servers.cpu_time import cpu_seconds

CHUNK_BYTES = 1 << 20
STALL_SECONDS = 30.0
STALL_NS = int(STALL_SECONDS * 1e9)
ENDLESS = f"an answer that has no end after {STALL_SECONDS:.0f} s"
HEAD_BYTES_MAX = 1 << 16
# The rest of a body is only counted, so let the kernel discard it without a copy.
DISCARD = socket.MSG_TRUNC
DIGIT_2 = ord("2")
# Longer than any error of PostgreSQL in the benchmarks.
TAIL_BYTES = 400
# The end of a chunked body; the measured bodies do not contain these bytes.
LAST_CHUNK = b"\r\n0\r\n\r\n"


class Connection:
    """One socket and the answer that it waits for."""

    __slots__ = ("head", "missing", "out", "producer", "sent_ns", "sock", "tail", "turn", "wrong")

    def __init__(self, port: int, producer: bytes = b"", greeting: bytes = b"") -> None:
        self.sock = socket.create_connection(("127.0.0.1", port), timeout=5)
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if greeting:
            greet(self.sock, greeting)
        self.sock.setblocking(False)
        self.head = b""  # an incomplete head (HTTP) or reply (RESP)
        self.missing = 0  # remaining bytes of the body
        self.out: memoryview | None = None  # bytes for which the socket buffer had no room
        self.sent_ns = 0
        self.wrong = b""  # start of an answer other than 2xx
        self.tail = b""  # the last bytes of a chunked body, while there is one
        self.producer = producer
        self.turn = 0

    def stamped(self, request: bytes) -> bytes:
        """The request with this producer's name and next number, if it has a name."""
        if not self.producer:
            return request
        request = request.replace(b"{producer}", self.producer, 1)
        request = request.replace(b"{turn}", b"%d" % self.turn, 1)
        self.turn += 1
        return request

    def send(self, request: bytes) -> bool:
        """Send a request; False if part of it must wait for room."""
        self.sent_ns = time.perf_counter_ns()
        try:
            sent = self.sock.send(request)
        except BlockingIOError:
            sent = 0
        if sent == len(request):
            return True
        self.out = memoryview(request)[sent:]
        return False

    def flush(self) -> bool:
        """Send more of the waiting bytes; True when all are sent."""
        assert self.out is not None
        try:
            sent = self.sock.send(self.out)
        except BlockingIOError:
            return False
        self.out = self.out[sent:] if sent < len(self.out) else None
        return self.out is None

    def receive_http(self, buffer: bytearray, size: int) -> bool:
        """Take `size` bytes of an HTTP answer; True when it is complete."""
        if self.missing:
            self.missing -= size
            assert self.missing >= 0, "more bytes than the answer announced"
            return self.missing == 0
        if self.tail:
            return self._more_chunks(bytes(buffer[max(0, size - len(LAST_CHUNK)) : size]))
        if self.head:
            data = bytearray(self.head) + buffer[:size]
            size = len(data)
            self.head = b""
        else:
            data = buffer
        end = data.find(b"\r\n\r\n", 0, size)
        if end < 0:
            assert size < HEAD_BYTES_MAX, "endless head"
            self.head = bytes(data[:size])
            return False
        at = data.find(b"content-length: ", 0, end)
        if at < 0:
            at = data[:end].lower().find(b"content-length: ")
        if data[9] != DIGIT_2:
            self.wrong = bytes(data[: min(size, 400)])
        if at < 0:
            return self._has_no_length(bytes(data[:size]), end)
        self.missing = end + 4 + int(data[at + 16 : data.find(b"\r\n", at)]) - size
        assert self.missing >= 0, "more bytes than the answer announced"
        return self.missing == 0

    def _has_no_length(self, data: bytes, end: int) -> bool:
        """Handle the head of an answer without a length; True if that is the whole answer."""
        if b"\r\ntransfer-encoding: chunked" in data[:end].lower():
            self.tail = b"\r\n"  # end of the head, before a first chunk that is also the last
            return self._more_chunks(data[end + 4 :])
        assert data.startswith(b"204", 9), "an answer without content-length"
        assert len(data) == end + 4, "a body where there must be none"
        return True

    def _more_chunks(self, piece: bytes) -> bool:
        self.tail = (self.tail + piece)[-len(LAST_CHUNK) :]
        if self.tail != LAST_CHUNK:
            return False
        self.tail = b""
        return True

    def receive_resp(self, buffer: bytearray, size: int, replies: int) -> bool:
        """Take bytes of `replies` bulk-string replies; True when the last one is complete."""
        data = self.head + bytes(buffer[:size])
        if data.startswith(b"-") or b"\r\n-" in data:
            self.wrong = data[:400]
            self.head = b""
            return True
        complete = data.count(b"\r\n") >= 2 * replies
        self.head = b"" if complete else data
        return complete

    def receive_postgres(self, buffer: bytearray, size: int, ending: bytes) -> bool:
        """Take bytes of one answer; True when it is complete. Another ending is an error.

        Only the last bytes are kept: an answer of 1,000 rows has no length in its head.
        """
        data = self.tail + bytes(buffer[max(0, size - TAIL_BYTES) : size])
        if not data.endswith(postgres.READY):
            self.tail = data[-TAIL_BYTES:]
            return False
        self.tail = b""
        if not data.endswith(ending):
            self.wrong = data
        return True


def greet(sock: socket.socket, greeting: bytes) -> None:
    """Send the first bytes of a connection to PostgreSQL and wait for their answer."""
    sock.sendall(greeting)
    data = b""
    while not postgres.is_greeted(data):
        piece = sock.recv(CHUNK_BYTES)
        assert piece, f"closed by the server after {data[-200:]!r}"
        data += piece


class Requests:
    """A request file in memory. Each job takes the requests that follow those of the job before."""

    def __init__(self, path: str) -> None:
        blob = Path(path).read_bytes()
        self.items: list[bytes] = []
        at = 0
        while at < len(blob):
            (length,) = struct.unpack_from("<I", blob, at)
            self.items.append(blob[at + 4 : at + 4 + length])
            at += 4 + length
        assert self.items, "a request file without requests"
        self.cursor = 0

    def take(self) -> bytes:
        """The next request."""
        at = self.cursor
        self.cursor = at + 1 if at + 1 < len(self.items) else 0
        return self.items[at]


class Tally:
    """The measurements of one job."""

    def __init__(self, pid: int = 0, *, may_refuse: bool = False) -> None:
        self._pid = pid
        self._may_refuse = may_refuse
        self.refused = 0
        self._server_cpu = cpu_seconds(pid) if pid else 0.0
        self.latencies_ns = array("Q")
        self.errors = 0
        self.first_error = ""
        self.started_ns = time.perf_counter_ns()
        self.ended_ns = self.started_ns
        self.cpu = time.process_time()

    def done(self, connection: Connection, now_ns: int) -> None:
        """Count one complete answer."""
        if self._may_refuse and is_refusal(connection.wrong):
            self.refused += 1
            connection.wrong = b""
            return
        self.latencies_ns.append(now_ns - connection.sent_ns)
        if connection.wrong:
            self.fail(connection.wrong.decode("latin-1"))
            connection.wrong = b""

    def fail(self, why: str) -> None:
        """Count one error; keep the first for the report."""
        self.errors += 1
        self.first_error = self.first_error or why

    def report(self) -> dict[str, Any]:
        """The answer to the job; latencies in milliseconds."""
        cpu = time.process_time() - self.cpu
        server_cpu = cpu_seconds(self._pid) - self._server_cpu if self._pid else 0.0
        count = len(self.latencies_ns)
        seconds = max((self.ended_ns - self.started_ns) / 1e9, 1e-9)
        ordered = sorted(self.latencies_ns)
        return {
            "count": count,
            "seconds": seconds,
            "rate": count / seconds,
            "p50_ms": rank(ordered, 0.50) / 1e6,
            "p90_ms": rank(ordered, 0.90) / 1e6,
            "p99_ms": rank(ordered, 0.99) / 1e6,
            "max_ms": (ordered[-1] if ordered else 0) / 1e6,
            "generator_cpu_us": cpu / max(count, 1) * 1e6,
            "server_cpu_us": server_cpu / max(count, 1) * 1e6,
            "refused": self.refused,
            "errors": self.errors,
            "first_error": self.first_error,
        }


def is_refusal(answer: bytes) -> bool:
    """Whether an answer is 429: the server is overloaded."""
    return answer.startswith(b"429", 9)


def rank(ordered: Sequence[int], share: float) -> int:
    """The nearest-rank percentile of sorted values; 0 of none."""
    if not ordered:
        return 0
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def producer_name(job: dict[str, Any], number: int) -> bytes:
    """A name for one connection of one job, if its requests are stamped."""
    return b"p-%d-%x" % (number, time.time_ns()) if job.get("stamp") else b""


def first_answer(connection: Connection, buffer: bytearray, *, may_refuse: bool) -> None:
    """Wait for the answer to a connection's first request, which is not counted."""
    connection.sock.settimeout(STALL_SECONDS)
    complete = False
    while not complete:
        size = connection.sock.recv_into(buffer, 0, DISCARD if connection.missing else 0)
        assert size, "the server closed the connection"
        complete = connection.receive_http(buffer, size)
        assert complete or time.perf_counter_ns() - connection.sent_ns <= STALL_NS, ENDLESS
    connection.sock.setblocking(False)
    if not (may_refuse and is_refusal(connection.wrong)):
        assert not connection.wrong, connection.wrong.decode("latin-1")
    connection.wrong = b""


def closed_loop(job: dict[str, Any], requests: Requests) -> dict[str, Any]:
    """Every connection sends its next request as soon as it has the answer to the last one."""
    replies = int(job.get("replies", 0))
    greeting, ending = (str(job.get(name, "")).encode("latin-1") for name in ("greeting", "ending"))
    left = int(job.get("count") or 1 << 62)
    pid, may_refuse = int(job.get("pid", 0)), bool(job.get("refusals"))
    buffer = bytearray(CHUNK_BYTES)
    poll = select.epoll()
    live: dict[int, Connection] = {}
    for number in range(min(int(job["connections"]), left)):
        connection = Connection(int(job["port"]), producer_name(job, number), greeting)
        live[connection.sock.fileno()] = connection
        poll.register(connection.sock, select.EPOLLIN)
        if pid:  # a server closes connections that send nothing for long
            is_sent = connection.send(connection.stamped(requests.take()))
            assert is_sent, "the socket has no room for a first request"
    for connection in live.values() if pid else ():
        first_answer(connection, buffer, may_refuse=may_refuse)
    ended: list[Connection] = []
    tally = Tally(pid, may_refuse=may_refuse)
    end_ns = tally.started_ns + int(float(job["seconds"]) * 1e9)

    def start(fd: int, connection: Connection) -> None:
        nonlocal left
        left -= 1
        if not connection.send(connection.stamped(requests.take())):
            poll.modify(fd, select.EPOLLIN | select.EPOLLOUT)

    def retire(fd: int) -> None:
        poll.unregister(fd)
        ended.append(live.pop(fd))  # closed below, so that closing is not part of the cost

    for fd, connection in live.items():
        start(fd, connection)
    while live:
        events = poll.poll(STALL_SECONDS)
        if not events:
            tally.fail(f"no answer for {STALL_SECONDS:.0f} s on {len(live)} connections")
            break
        for fd, event in events:
            connection = live[fd]
            if event & select.EPOLLOUT and connection.out is not None and connection.flush():
                poll.modify(fd, select.EPOLLIN)
            if event == select.EPOLLOUT:
                continue
            try:
                size = connection.sock.recv_into(buffer, 0, DISCARD if connection.missing else 0)
            except OSError as error:
                size = 0
                tally.first_error = tally.first_error or repr(error)
            if not size:
                tally.fail("the server closed the connection")
                retire(fd)
                continue
            if replies:
                complete = connection.receive_resp(buffer, size, replies)
            elif ending:
                complete = connection.receive_postgres(buffer, size, ending)
            else:
                complete = connection.receive_http(buffer, size)
            if complete:
                now_ns = time.perf_counter_ns()
                tally.done(connection, now_ns)
                tally.ended_ns = now_ns
                if left > 0 and now_ns < end_ns:
                    start(fd, connection)
                else:
                    retire(fd)
            elif time.perf_counter_ns() - connection.sent_ns > STALL_NS:
                tally.fail(ENDLESS)
                retire(fd)
    report = tally.report()
    for connection in (*live.values(), *ended):
        connection.sock.close()
    poll.close()
    return report


def alone(job: dict[str, Any], requests: Requests) -> dict[str, Any]:
    """One connection on a blocking socket: no poll, so one call fewer for each request.

    With `rate`, it sends a request every 1/rate seconds, like a probe; a late request is sent at
    once. Without `rate`, the next request follows the answer. A file that appears at `stop` ends
    the job early.
    """
    stop = str(job.get("stop", ""))
    replies = int(job.get("replies", 0))
    greeting, ending = (str(job.get(name, "")).encode("latin-1") for name in ("greeting", "ending"))
    left = int(job.get("count") or 1 << 62)
    rate = float(job.get("rate", 0))
    step_ns = int(1e9 / rate) if rate else 0
    buffer = bytearray(CHUNK_BYTES)
    connection = Connection(int(job["port"]), producer_name(job, 0), greeting)
    sock = connection.sock
    sock.settimeout(None)  # a timeout would add a poll before every call
    # The kernel applies the time limit instead.
    sock.setsockopt(
        socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", int(STALL_SECONDS), 0)
    )
    pid, may_refuse = int(job.get("pid", 0)), bool(job.get("refusals"))
    is_counted = not pid
    tally = Tally(pid, may_refuse=may_refuse)
    now_ns = due_ns = tally.started_ns
    end_ns = due_ns + int(float(job["seconds"]) * 1e9)
    while due_ns < end_ns and left > 0:
        if stop and os.path.exists(stop):
            break
        left -= 1
        if due_ns > now_ns:
            time.sleep((due_ns - now_ns) / 1e9)
        try:
            request = connection.stamped(requests.take())
            connection.sent_ns = time.perf_counter_ns()
            sock.sendall(request)
            complete, size = False, 1
            while size and not complete:
                rest = min(connection.missing, CHUNK_BYTES)
                size = sock.recv_into(buffer, rest, DISCARD | socket.MSG_WAITALL if rest else 0)
                if replies:
                    complete = connection.receive_resp(buffer, size, replies)
                elif ending:
                    complete = connection.receive_postgres(buffer, size, ending)
                elif size:
                    complete = connection.receive_http(buffer, size)
                if not complete and time.perf_counter_ns() - connection.sent_ns > STALL_NS:
                    raise TimeoutError(ENDLESS)
        except OSError as error:
            tally.fail(repr(error))
            break
        if not complete:
            tally.fail("the server closed the connection")
            break
        if not is_counted and not connection.wrong:
            is_counted = True
            left += 1
            tally = Tally(pid, may_refuse=may_refuse)
            now_ns = due_ns = tally.started_ns
            end_ns = due_ns + int(float(job["seconds"]) * 1e9)
            continue
        now_ns = time.perf_counter_ns()
        tally.done(connection, now_ns)
        tally.ended_ns = now_ns
        # After a pause, later probes are delayed: a burst would hide the pause.
        due_ns = max(due_ns + step_ns, now_ns)
    report = tally.report()
    sock.close()
    return report


def main() -> None:
    """Answer jobs until standard input ends."""
    gc.disable()  # this process makes no cycles, and a collection would count as latency
    files: dict[str, Requests] = {}
    for line in sys.stdin:
        job = json.loads(line)
        path = str(job["requests"])
        if path not in files:
            files[path] = Requests(path)
        requests = files[path]
        if job.get("from_start"):
            requests.cursor = 0
        try:
            one = job.get("rate") or job["connections"] == 1
            answer = alone(job, requests) if one else closed_loop(job, requests)
        except (OSError, AssertionError, postgres.PostgresError) as error:
            answer = {"failed": repr(error)}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
