"""The watching client: many sockets read published messages, and one socket publishes; it handles
only bytes.

Reads jobs from standard input like `load`, one JSON object a line, and answers each with one line.
Writer and watchers are one process, so `request sent → last byte of the last watcher` is two
readings of one clock. It implements no protocol: a job names the bytes that open a stream, the
bytes that show that it is live, and the bytes that end a message. So the same loop can measure our
streams, the floor, long polls and the peers. Started by `watching`; standard library only.

Invariants: a turn ends when the writer has its answer and every expected watcher has one complete
message. The first and the last turn of a measurement prove that each watcher has the payload that
was just written, once, so that no message was counted twice or early. Every wait is bounded.
"""

from __future__ import annotations

import gc
import json
import os
import re
import resource
import select
import socket
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.clients import postgres
from benchmarks.clients.load import STALL_SECONDS, Connection, Requests, Tally, rank

READ_BYTES = 4096
LOOK_BYTES = 1 << 20
CHUNKED = b"transfer-encoding: chunked"
# The form of the writer's answer. Any other number is the answer's number of CRLFs.
HTTP, POSTGRES = -1, -2
NOTIFIED = postgres.ending(b"SELECT 1")  # of a statement that stores and notifies

Job = dict[str, Any]


class Failed(Exception):
    """A job that cannot continue; the message is its answer."""


def wire(job: Job, name: str) -> bytes:
    """The bytes of a text."""
    return str(job.get(name, "")).encode("latin-1")


class Group:
    """The watching sockets of one job, and how a message ends on them."""

    def __init__(self, job: Job, requests: Requests) -> None:
        self.end = wire(job, "end")
        self.noise = wire(job, "noise")  # bytes between messages that are no message
        # the request for the next message, if the protocol needs one
        self.again = wire(job, "again")
        self.position = re.compile(wire(job, "position") or rb"(?!)")
        self.width = int(job.get("width", 0))
        self.frame = b""  # the last proven message of one watcher, which the floor sends
        self.socks: dict[int, socket.socket] = {}
        self.poll = select.epoll()
        self._pieces: dict[int, bytes] = {}
        self._proof: bytes | None = None
        self._proven: set[int] = set()  # which watchers have the examined message
        waiting: dict[int, bytes] = {}
        for request in requests.items:
            sock = socket.create_connection(("127.0.0.1", int(job["port"])), timeout=STALL_SECONDS)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.sendall(request)
            sock.setblocking(False)
            self.socks[sock.fileno()] = sock
            self.poll.register(sock, select.EPOLLIN)
            waiting[sock.fileno()] = b""
        if ready := wire(job, "ready"):
            self._wait_live(waiting, ready)

    def _wait_live(self, waiting: dict[int, bytes], ready: bytes) -> None:
        while waiting:
            for fd in self._readable(f"{len(waiting)} of {len(self.socks)} streams are not live"):
                text = waiting.get(fd, b"") + self._read(fd)
                if fd in waiting:
                    waiting[fd] = text
                if ready in text:
                    waiting.pop(fd, None)
                    if CHUNKED in text.lower() and not self.end.endswith(b"\r\n"):
                        self.end += b"\r\n"

    def _readable(self, otherwise: str) -> list[int]:
        events = self.poll.poll(STALL_SECONDS)
        if not events:
            raise Failed(f"{otherwise} after {STALL_SECONDS:.0f} s")
        return [fd for fd, _ in events]

    def _read(self, fd: int) -> bytes:
        data = os.read(fd, READ_BYTES)
        if not data:
            raise Failed("the server closed a stream")
        return data

    def drain(self) -> None:
        """Discard the received bytes: heartbeats that arrived while nothing was read."""
        while events := self.poll.poll(0):
            for fd, _ in events:
                self._read(fd)
        self._pieces.clear()

    def prove(self, payload: bytes | None) -> None:
        """The next message of each watcher must contain `payload`; None: only count messages."""
        self._proof = payload
        self._proven.clear()
        self._pieces.clear()

    def turn(self, writer: Connection, request: bytes, expect: int, answer: int) -> tuple[int, int]:
        """Do one write.

        Return the ns until the last watcher's last byte, and until the writer's answer.
        """
        left, answered = expect, answer == 0
        read, end, poll, pieces = os.read, self.end, self.poll.poll, self._pieces
        by_hand = self._proof is not None
        writer_fd = writer.sock.fileno()
        last_ns = answer_ns = 0
        if not writer.send(request):
            raise Failed("the writer's socket is full")
        while left > 0 or not answered:
            events = poll(STALL_SECONDS)
            if not events:
                pieces_of = [piece[:200] for piece in pieces.values()][:3]
                raise Failed(
                    f"{left} of {expect} watchers got no whole message, answered: {answered}, "
                    f"{len(pieces)} have a piece, as {pieces_of}"
                )
            for fd, _ in events:
                if fd == writer_fd:
                    answered = take_answer(writer, answer)
                    answer_ns = time.perf_counter_ns() - writer.sent_ns
                    continue
                data = read(fd, READ_BYTES)
                if by_hand or pieces or not data.endswith(end):
                    left -= self._piece(fd, data)
                else:
                    left -= 1
                if not left:
                    last_ns = time.perf_counter_ns() - writer.sent_ns
        if left:
            raise Failed(f"{-left} messages more than {expect}")
        return last_ns, answer_ns

    def _piece(self, fd: int, data: bytes) -> int:
        """Handle a part of a message, or a message to examine.

        Returns 1 if the message is complete.
        """
        if not data:
            raise Failed("the server closed a stream")
        data = self._pieces.pop(fd, b"") + data
        if self.noise:
            data = data.replace(self.noise, b"")
        if not data.endswith(self.end):
            if data:
                self._pieces[fd] = data
            return 0
        if self._proof is not None:
            if data.count(self._proof) != 1:
                raise Failed(f"not one message with what was written: {data[:400]!r}")
            if fd in self._proven:
                raise Failed("a watcher got a message twice")
            self._proven.add(fd)
            self.frame = data
        return 1

    def ask_again(self) -> None:
        """If the protocol requires it, request the next message, behind the last one."""
        found = self.position.search(self.frame)
        if found is None:
            raise Failed(f"no position in {self.frame[:400]!r}")
        position = found[1].rjust(self.width)
        request = self.again.replace(b"{position}", position)
        request = request.replace(b"{size}", b"%d" % len(position))
        for sock in self.socks.values():
            sock.send(request)

    def look(self) -> Job:
        """Read and count all bytes on the sockets; closed sockets are listed separately."""
        closed: set[int] = set()
        beats = size = 0
        while events := self.poll.poll(0):
            for fd, _ in events:
                try:
                    data = os.read(fd, LOOK_BYTES)
                except ConnectionError:
                    data = b""
                if not data:
                    closed.add(fd)
                    self.poll.unregister(fd)
                size += len(data)
                beats += data.count(b": hb ")
        return {"sockets": len(self.socks), "closed": len(closed), "beats": beats, "bytes": size}

    def close(self) -> None:
        """Close all sockets."""
        self.poll.close()
        for sock in self.socks.values():
            sock.close()


def wait_readable(sock: socket.socket, otherwise: str) -> None:
    """Wait for bytes on one socket."""
    one = select.poll()
    one.register(sock, select.POLLIN)
    if not one.poll(STALL_SECONDS * 1e3):
        raise Failed(f"{otherwise} after {STALL_SECONDS:.0f} s")


def take_answer(writer: Connection, answer: int) -> bool:
    """Take more of the writer's answer. Returns True when it is complete.

    An answer other than success is an error.
    """
    buffer = bytearray(READ_BYTES)
    try:
        size = writer.sock.recv_into(buffer)
    except BlockingIOError:
        return False
    if not size:
        raise Failed("the server closed the writer's connection")
    if answer == HTTP:
        whole = writer.receive_http(buffer, size)
    elif answer == POSTGRES:
        whole = writer.receive_postgres(buffer, size, NOTIFIED)
    else:
        writer.head += bytes(buffer[:size])
        whole = writer.head.count(b"\r\n") >= answer
        if writer.head.startswith(b"-"):
            writer.wrong = writer.head
        if whole:
            writer.head = b""
    if writer.wrong:
        raise Failed(f"the writer was answered {writer.wrong!r}")
    return whole


def connect_writer(job: Job) -> Connection:
    """Open the writing connection, with a greeting if the protocol needs one."""
    writer = Connection(int(job["port"]))
    if greeting := wire(job, "greeting"):
        writer.send(greeting)
        text, ready = b"", wire(job, "ready")
        while ready not in text:
            wait_readable(writer.sock, f"no {ready!r} in {text!r}")
            text += writer.sock.recv(READ_BYTES)
    return writer


def settled(writer: Connection, request: bytes, answer: int) -> None:
    """Wait for an answer that follows all earlier requests.

    A server handles requests in the order of their arrival: when it answers this request, all
    earlier requests of readers are waiting.
    """
    if not writer.send(request):
        raise Failed("the writer's socket is full")
    while True:
        wait_readable(writer.sock, "nothing settles")
        if take_answer(writer, answer):
            return


def measure(job: Job, group: Group, requests: Requests, proofs: Requests | None) -> Job:
    """Write messages one by one, each when all watchers have the message before.

    `proofs` holds the payload of each request; without it (the floor always sends the same) the end
    of a message is the proof.
    """
    answer, expect = int(job["answer"]), int(job["expect"])
    settle, settle_answer = wire(job, "settle"), min(answer, 1)
    step_ns = int(1e9 / job["rate"]) if job.get("rate") else 0
    group.drain()
    writer = connect_writer(job)
    group.poll.register(writer.sock, select.EPOLLIN)
    answers_ns: list[int] = []

    def turn(proven: bool) -> int:
        proof = group.end if proofs is None else proofs.items[requests.cursor]
        request = requests.take()
        group.prove(proof if proven else None)
        last_ns, answer_ns = group.turn(writer, request, expect, answer)
        answers_ns.append(answer_ns)
        if settle:
            group.ask_again()
            settled(writer, settle, settle_answer)
        return last_ns

    try:
        if settle:
            settled(writer, settle, settle_answer)
        turn(proven=True)
        tally = Tally()
        due_ns = tally.started_ns
        end_ns = due_ns + int(float(job["seconds"]) * 1e9)
        answers_ns.clear()
        while True:
            now_ns = time.perf_counter_ns()
            if now_ns < due_ns:
                time.sleep((due_ns - now_ns) / 1e9)
            # If readers must request each message, a message contains the position of the next.
            tally.latencies_ns.append(turn(proven=bool(settle)))
            tally.ended_ns = time.perf_counter_ns()
            due_ns = max(due_ns + step_ns, tally.ended_ns)
            if tally.ended_ns >= end_ns:
                break
        report = tally.report()
        report["answer_p50_ms"] = rank(sorted(answers_ns), 0.5) / 1e6
        turn(proven=True)
    finally:
        group.poll.unregister(writer.sock)
        writer.sock.close()
    return report | {"frame": group.frame.decode("latin-1"), "end": group.end.decode("latin-1")}


class Client:
    """The groups and request files of this process, and the actions of a job."""

    def __init__(self) -> None:
        self._groups: dict[str, Group] = {}
        self._files: dict[str, Requests] = {}

    def do(self, job: Job) -> Job:
        """Do one job and return its answer."""
        name = str(job["group"])
        match job["do"]:
            case "open":
                self._groups[name] = Group(job, Requests(str(job["requests"])))
                return {"opened": len(self._groups[name].socks)}
            case "measure":
                proofs = self._file(job, "proofs") if job.get("proofs") else None
                return measure(job, self._groups[name], self._file(job, "requests"), proofs)
            case "look":
                return self._groups[name].look()
            case "close":
                self._groups.pop(name).close()
                return {}
            case other:
                raise Failed(f"no such job: {other}")

    def _file(self, job: Job, key: str) -> Requests:
        path = str(job[key])
        if path not in self._files:
            assert Path(path).exists(), path
            self._files[path] = Requests(path)
        return self._files[path]


def main() -> None:
    """Answer jobs until standard input ends."""
    gc.disable()  # this process makes no cycles, and a collection would count as latency
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    client = Client()
    for line in sys.stdin:
        job = json.loads(line)
        try:
            answer = client.do(job)
        except (OSError, AssertionError, Failed) as error:
            answer = {"failed": f"{job['do']} {job['group']}: {str(error) or repr(error)}"}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
