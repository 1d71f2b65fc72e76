"""The client of the queue cases: enqueues, claims and acks on many sockets; one process.

Reads jobs from standard input like `load`, one JSON object a line, and answers each with one line.
A round has three phases (all jobs are enqueued, then claimed, then acked), so that each rate
measures one operation. Requests are built before a phase is timed, and answers are examined after
it. Started by `working`; standard library only.

Invariants: every connection has at most one request in flight; each round proves that the claimed
jobs are the enqueued ones, each once, and that no job remains; every wait is bounded.
"""

from __future__ import annotations

import contextlib
import gc
import json
import select
import socket
import sys
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from benchmarks.clients.load import STALL_SECONDS, Tally, rank
from benchmarks.clients.postgres_queue import POSTGRES_WIRES
from benchmarks.clients.queue_wires import WIRES, Ours, Wire, WireError, numbers, payload
from benchmarks.servers.cpu_time import cpu_seconds

# For a larger buffer the allocator calls the kernel three times, which costs more than the rest of
# a call.
READ_BYTES = 1 << 16
# The pause of the queue before each job of the latency measurement.
REST_SECONDS = 0.002
LOOK_TURNS, LOOK_SECONDS = 20_000, 0.001
_SIDES = WIRES | POSTGRES_WIRES

Job = dict[str, Any]
Whole = Callable[[bytes], bool]


class Failed(Exception):
    """A job that cannot continue; the message is its answer."""


def now_ms() -> int:
    """The wall clock in ms, for deadlines that a client sets."""
    return time.time_ns() // 1_000_000


class Connection:
    """One socket, its partial answer, and its unsent bytes."""

    __slots__ = ("data", "number", "out", "sent_ns", "sock")

    def __init__(self, port: int, number: int, wire: Wire) -> None:
        self.number = number
        self.sock = socket.create_connection(("127.0.0.1", port), timeout=STALL_SECONDS)
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.data = b""
        self.out: memoryview | None = None
        self.sent_ns = 0
        greeting = wire.greeting(number)
        if greeting:
            self.call(greeting, wire.greeted)

    def call(self, request: bytes, is_whole: Whole) -> bytes:
        """Send and wait for the complete answer."""
        self.sock.sendall(request)
        return self.receive(is_whole)

    def receive(self, is_whole: Whole) -> bytes:
        """Wait for a whole answer."""
        data = b""
        while True:
            piece = self.sock.recv(READ_BYTES)
            if not piece:
                raise Failed(f"closed by the server after {data[-200:]!r}")
            data += piece
            if is_whole(data):
                return data

    def send(self, request: bytes) -> bool:
        """Send as many bytes as the socket takes. Returns whether all are sent."""
        self.data = b""
        self.sent_ns = time.perf_counter_ns()
        self.out = memoryview(request)
        return self.flush()

    def flush(self) -> bool:
        """Send more of the waiting bytes."""
        assert self.out is not None
        try:
            sent = self.sock.send(self.out)
        except BlockingIOError:
            sent = 0
        self.out = self.out[sent:] if sent < len(self.out) else None
        return self.out is None


class Phase:
    """One phase: each connection has its own requests, and sends the next one when the last is
    answered.
    """

    def __init__(
        self,
        connections: Sequence[Connection],
        requests: Sequence[Sequence[bytes]],
        is_whole: Whole,
    ) -> None:
        self._connections = connections
        self._queues = [list(reversed(found)) for found in requests]
        self._is_whole = is_whole
        self.answers: list[tuple[int, bytes]] = []  # the connection of each request

    def run(self, poll: select.epoll, tally: Tally) -> None:
        """Send all requests, and wait for every answer."""
        by_fd = {connection.sock.fileno(): connection for connection in self._connections}
        live = sum(self._start(poll, connection) for connection in self._connections)
        while live:
            events = poll.poll(STALL_SECONDS)
            if not events:
                raise Failed(f"no answer for {STALL_SECONDS:.0f} s on {live} connections")
            for fd, event in events:
                connection = by_fd[fd]
                if connection.out is not None and event & select.EPOLLOUT and connection.flush():
                    poll.modify(fd, select.EPOLLIN)
                if not event & ~select.EPOLLOUT:
                    continue
                piece = connection.sock.recv(READ_BYTES)
                if not piece:
                    raise Failed("the server closed a connection")
                data = connection.data = connection.data + piece if connection.data else piece
                if self._has_whole(connection):
                    tally.ended_ns = time.perf_counter_ns()
                    tally.latencies_ns.append(tally.ended_ns - connection.sent_ns)
                    self.answers.append((connection.number, data))
                    live -= not self._start(poll, connection)

    def _start(self, poll: select.epoll, connection: Connection) -> bool:
        request = self._next(connection)
        if not request:
            return False
        if not connection.send(request):
            poll.modify(connection.sock.fileno(), select.EPOLLIN | select.EPOLLOUT)
        return True

    def _next(self, connection: Connection) -> bytes:
        """The next request of a connection; empty if it has sent all."""
        queue = self._queues[connection.number]
        return queue.pop() if queue else b""

    def _has_whole(self, connection: Connection) -> bool:
        """Whether the bytes of a connection are a whole answer."""
        return self._is_whole(connection.data)


class Turns(Phase):
    """A phase of our queue in which each worker claims jobs and completes them, again and again.

    `joined`: each ack is part of the next claim, so that a turn is one request instead of two. The
    last jobs of a worker are completed by an ack alone.
    """

    def __init__(
        self,
        connections: Sequence[Connection],
        claims: Sequence[int],
        wire: Ours,
        batch: int,
        *,
        joined: bool,
    ) -> None:
        super().__init__(connections, [()] * len(connections), bool)
        self._wire = wire
        self._batch = batch
        self._joined = joined
        self._claims = list(claims)  # the remaining claims of each worker
        # What the last request of each worker did.
        self._claimed = [False] * len(claims)
        self._acked = [False] * len(claims)

    def _next(self, connection: Connection) -> bytes:
        worker = connection.number
        acks = self._claimed[worker]
        claims = self._claims[worker] > 0 and (self._joined or not acks)
        self._claims[worker] -= claims
        self._claimed[worker], self._acked[worker] = claims, acks
        if acks and claims:
            return self._wire.ack_and_claim(worker, connection.data, self._batch)
        if acks:
            return self._wire.ack(worker, connection.data)
        return self._wire.claim(worker, self._batch, 0) if claims else b""

    def _has_whole(self, connection: Connection) -> bool:
        worker, data = connection.number, connection.data
        return (not self._claimed[worker] or self._wire.claimed(data, self._batch)) and (
            not self._acked[worker] or self._wire.acked(data, self._batch)
        )


class Client:
    """The actions of a job."""

    def __init__(self) -> None:
        self._first = 0  # no two jobs have the same number

    def do(self, job: Job) -> Job:
        """Do one job and return its answer."""
        wire = _SIDES[str(job["side"])]
        match job["do"]:
            case "setup":
                connection = Connection(int(job["port"]), 0, wire)
                for request in wire.setup():
                    connection.call(request, wire.is_set_up)
                connection.sock.close()
                return {}
            case "round":
                return self._round(job, wire)
            case "turns":
                assert isinstance(wire, Ours)
                return self._turns(job, wire)
            case "idle":
                return self._idle(job, wire)
            case other:
                raise Failed(f"no such job: {other}")

    def _round(self, job: Job, wire: Wire) -> Job:
        workers, batch, count = int(job["workers"]), int(job["batch"]), int(job["jobs"])
        with opened(job, wire) as (connections, poll):
            reports: Job = {}
            phase = self._enqueues(job, wire, connections)
            reports["enqueue"] = self._timed(job, phase, poll, count)
            claims = [wire.claim(n, batch, now_ms()) for n in range(workers)]
            phase = Phase(
                connections,
                [[claim] * calls for claim, calls in zip(claims, calls_of(job), strict=True)],
                lambda data: wire.claimed(data, batch),
            )
            reports["claim"] = self._timed(job, phase, poll, count)
            answers = phase.answers
            self._check(count, answers)
            acks: list[list[bytes]] = [[] for _ in range(workers)]
            for number, data in answers:
                acks[number].append(wire.ack(number, data))
            phase = Phase(connections, acks, lambda data: wire.acked(data, batch))
            looker = Connection(int(job["port"]), 0, wire)
            reports["ack"] = self._timed(job, phase, poll, count, lambda: look(looker, wire))
            looker.sock.close()
            return reports

    def _turns(self, job: Job, wire: Ours) -> Job:
        """Enqueue all jobs; then each worker claims and completes some, until none is left."""
        batch, count = int(job["batch"]), int(job["jobs"])
        with opened(job, wire) as (connections, poll):
            self._enqueues(job, wire, connections).run(poll, Tally())
            phase = Turns(connections, calls_of(job), wire, batch, joined=bool(job["joined"]))
            looker = Connection(int(job["port"]), 0, wire)
            report = self._timed(job, phase, poll, count, lambda: look(looker, wire))
            looker.sock.close()
            self._check(count, phase.answers)
            return report

    def _enqueues(self, job: Job, wire: Wire, connections: Sequence[Connection]) -> Phase:
        """The phase that enqueues the jobs of a round."""
        workers, batch, count = int(job["workers"]), int(job["batch"]), int(job["jobs"])
        first, self._first = self._first, self._first + count
        enqueues = [
            wire.enqueue(index % workers, [payload(n) for n in range(start, start + batch)])
            for index, start in enumerate(range(first, first + count, batch))
        ]
        return Phase(
            connections,
            [enqueues[number::workers] for number in range(workers)],
            lambda data: wire.enqueued(data, batch),
        )

    def _check(self, count: int, answers: Sequence[tuple[int, bytes]]) -> None:
        """Check that the answers have the jobs that were enqueued last, each once."""
        got = [number for _, data in answers for number in numbers(data)]
        if sorted(got) != list(range(self._first - count, self._first)):
            raise Failed(f"{count} jobs enqueued, {len(got)} claimed, {len(set(got))} distinct")

    @staticmethod
    def _timed(
        job: Job,
        phase: Phase,
        poll: select.epoll,
        count: int,
        last: Callable[[], None] | None = None,
    ) -> Job:
        """Run a phase, then `last`. Return the time of both per job."""
        used = cpu_seconds(int(job["pid"]))
        tally = Tally()
        phase.run(poll, tally)
        if last is not None:
            last()
            tally.ended_ns = time.perf_counter_ns()
        report = tally.report()
        calls = int(report["count"])
        report["count"] = count
        report["rate"] = count / report["seconds"]
        report["generator_cpu_us"] *= calls / count
        report["server_cpu_us"] = (cpu_seconds(int(job["pid"])) - used) / count * 1e6
        return report

    def _idle(self, job: Job, wire: Wire) -> Job:
        """Add one job at a time to an idle queue with one waiting worker."""
        port = int(job["port"])
        writer, worker, acker = (Connection(port, number, wire) for number in (1, 0, 2))
        used = cpu_seconds(int(job["pid"]))
        tally = Tally()
        answers_ns = array("Q")
        end_ns = tally.started_ns + int(float(job["seconds"]) * 1e9)
        is_waiting = False
        while time.perf_counter_ns() < end_ns:
            number, self._first = self._first, self._first + 1
            request = wire.enqueue(writer.number, [payload(number)])
            if not is_waiting:
                worker.sock.sendall(wire.wait(worker.number))
                is_waiting = wire.is_stream
            time.sleep(REST_SECONDS if len(answers_ns) else 100 * REST_SECONDS)
            sent_ns = time.perf_counter_ns()
            writer.sock.sendall(request)
            answer = worker.receive(wire.waited)
            if fetch := wire.fetch(worker.number):
                answer = worker.call(fetch, lambda data: wire.claimed(data, 1))
            tally.ended_ns = time.perf_counter_ns()
            tally.latencies_ns.append(tally.ended_ns - sent_ns)
            writer.receive(lambda data: wire.enqueued(data, 1))
            answers_ns.append(time.perf_counter_ns() - sent_ns)
            if numbers(answer) != [number]:
                raise Failed(f"job {number} was enqueued, {numbers(answer)} delivered")
            hold = wire.hold(answer, now_ms())
            if hold:
                answer = acker.call(hold, lambda data: wire.claimed(data, 1))
            acker.call(wire.ack(worker.number, answer), lambda data: wire.acked(data, 1))
        look(acker, wire)
        for connection in (writer, worker, acker):
            connection.sock.close()
        report = tally.report()
        report["answer_p50_ms"] = rank(sorted(answers_ns), 0.5) / 1e6
        count = max(1, int(report["count"]))
        report["server_cpu_us"] = (cpu_seconds(int(job["pid"])) - used) / count * 1e6
        return report


def calls_of(job: Job) -> list[int]:
    """The number of claims of each worker in a round."""
    workers, batch, count = int(job["workers"]), int(job["batch"]), int(job["jobs"])
    calls = count // batch
    assert calls * batch == count
    return [calls // workers + (number < calls % workers) for number in range(workers)]


@contextlib.contextmanager
def opened(job: Job, wire: Wire) -> Iterator[tuple[Sequence[Connection], select.epoll]]:
    """A connection for each worker, and the poll of all."""
    connections = [
        Connection(int(job["port"]), number, wire) for number in range(int(job["workers"]))
    ]
    poll = select.epoll()
    try:
        for connection in connections:
            connection.sock.setblocking(False)
            poll.register(connection.sock, select.EPOLLIN)
        yield connections, poll
    finally:
        poll.close()
        for connection in connections:
            connection.sock.close()


def look(connection: Connection, wire: Wire) -> None:
    """Wait until the queue reports that it is empty."""
    left: int | None = None
    request = wire.left(connection.number)
    for _ in range(LOOK_TURNS):
        data = connection.call(request, lambda data: wire.left_count(data) is not None)
        left = wire.left_count(data)
        if not left:
            return
        time.sleep(LOOK_SECONDS)
    raise Failed(f"{left} jobs are left behind")


def main() -> None:
    """Answer jobs until standard input ends."""
    gc.disable()  # this process makes no cycles, and a collection would count as latency
    client = Client()
    for line in sys.stdin:
        job = json.loads(line)
        try:
            answer = client.do(job)
        except (OSError, AssertionError, Failed, WireError) as error:
            answer = {"failed": f"{job['do']}, {job['side']}: {str(error) or repr(error)}"}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
