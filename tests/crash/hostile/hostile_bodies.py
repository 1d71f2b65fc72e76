"""Large bodies of every hostile kind, sent to every route, and their cost for other clients.

`Body` makes 60 MB of one kind, plain or as gzip. `Bench` runs a real server, sends one body at a
time and reports the answer, the longest turn of the server's loop, the latency of another client's
requests meanwhile, and the memory growth of the server and its helpers. A timer in the server
measures the loop's turns: it wakes every millisecond and notes how late it is, minus the time for
which the kernel had no processor for the loop's thread (`serve_measured`). The long form is a
table:

    python -m tests.crash.hostile.hostile_bodies --megabytes 60

Used by `test_hostile_bodies`, in a short form.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import gzip
import json
import mmap
import os
import signal
import socket
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import IO, Final

from tests.contract.driver import Server

MIB: Final = 2**20
READER, WRITER = "reader-secret", "writer-secret"
KEYS: Final = {
    "TOPICS_API_KEYS": f"{READER}:read,{WRITER}:read+write+delete+admin",
    "TOPICS_MAX_TOPICS": "0",
}
MEASURED: Final = "TOPICS_TEST_TURNS"
_TICK_S: Final = 0.001
_TURN: Final = struct.Struct("<d")
_ANSWER_WITHIN_S: Final = 180.0

Filled = Callable[[int], bytes]


def _append(data: Filled) -> Filled:
    return lambda size: b'{"records":[{"data":' + data(size) + b"}]}"


def _honest(size: int) -> bytes:
    record = b'{"data":{"text":"%b","list":[1,2,{"a":"b"}]},"tag":"t","meta":{"m":1}}' % (
        b"x" * 6400
    )
    return b'{"records":[' + b",".join([record] * min(9_000, size // len(record))) + b"]}"


KINDS: Final[dict[str, Filled]] = {
    "string": _append(lambda size: b'"' + b"a" * size + b'"'),
    "brackets": _append(lambda size: b"[" + b"[]," * (size // 3) + b"[]]"),
    "keys": _append(
        lambda size: b"{" + b",".join([b'"key%d":0' % n for n in range(size // 15)]) + b"}"
    ),
    "numbers": _append(lambda size: b"[" + b"1," * (size // 2) + b"1]"),
    "escapes": _append(lambda size: b'"' + b"\\\\" * (size // 2) + b'"'),
    "tiny records": lambda size: b'{"records":[' + b'{"data":1},' * (size // 11) + b'{"data":1}]}',
    "seqs": lambda size: b'{"node":"n","match":"t","seqs":[' + b"1," * (size // 2) + b"1]}",
    "wide text": _append(lambda size: b'"' + "a\u20ac\U0001f600".encode() * (size // 8) + b'"'),
    "honest": _honest,
}
ROUTES: Final[dict[str, tuple[str, str]]] = {
    "append": ("POST", "/v0/topics/t"),
    "stream append": ("POST", "/v1/stream/s"),
    "stream bytes": ("POST", "/v1/stream/b"),
    "stream create": ("PUT", "/v1/stream/n%d"),
    "put topic": ("PUT", "/v0/topics/t"),
    "diff": ("POST", "/v0/topics/t/diff"),
    "delete": ("POST", "/v0/topics/t/delete"),
    "claim": ("POST", "/v0/topics/q/claim"),
    "ack": ("POST", "/v0/topics/q/ack"),
    "nack": ("POST", "/v0/topics/q/nack"),
    "extend": ("POST", "/v0/topics/q/extend"),
    "redrive": ("POST", "/v0/topics/q/redrive"),
    "patch topic": ("PATCH", "/v0/topics/t"),
    "drop topic": ("DELETE", "/v0/topics/gone"),
    "list": ("GET", "/v0/topics"),
    "put router": ("PUT", "/v0/routers/r"),
    "drop router": ("DELETE", "/v0/routers/r"),
    "watch": ("POST", "/v0/watch"),
    "seal": ("POST", "/v0/admin/seal"),
    "read stream": ("GET", "/v1/stream/s"),
    "drop stream": ("DELETE", "/v1/stream/gone"),
    "probe": ("GET", "/v0/health"),
    "metrics": ("GET", "/v0/metrics"),
    "nowhere": ("POST", "/v0/nowhere"),
    # One message; one in fragments; 60 publishes of almost a MiB, of which the server keeps few.
    "websocket": ("GET", "/v0/ws"),
    "websocket fragments": ("GET", "/v0/ws"),
    "websocket publishes": ("GET", "/v0/ws"),
}
SOCKETS: Final = ("websocket", "websocket fragments", "websocket publishes")
# For publishes: the size of each body, and the number of bodies.
PUBLISH_BYTES: Final = MIB - 1024
PUBLISHES: Final = 60
APPENDING: Final = ("append", "stream append", "stream bytes", "stream create")


@dataclass(frozen=True, slots=True)
class Figures:
    """The cost of one body. Times in ms, memory in bytes; `told`: a status, or how a socket
    ended.
    """

    told: str
    took_ms: float
    turn_ms: float
    p99_ms: float
    longest_ms: float
    requests: int
    grown_bytes: int


@dataclass(slots=True)
class Beside:
    """Another client: appends to a topic of its own, one after the other, from a thread."""

    port: int
    _taken: list[tuple[float, float]] = field(default_factory=list)
    _stop: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def start(self) -> None:
        """Start appending."""
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop appending."""
        self._stop.set()
        assert self._thread is not None
        self._thread.join()

    def _run(self) -> None:
        with socket.create_connection(("127.0.0.1", self.port), 30) as sock:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            request = head_of("POST", "/v0/topics/beside", WRITER, 24) + b'{"records":[{"data":1}]}'
            while not self._stop.is_set():
                began = time.perf_counter()
                sock.sendall(request)
                answer = sock.recv(65_536)
                # Under pressure the server may tell a topic of low priority to retry.
                assert answer.startswith((b"HTTP/1.1 20", b"HTTP/1.1 429 ")), answer[:300]
                self._taken.append((began, time.perf_counter() - began))
                time.sleep(0.001)

    def latencies(self, since: float) -> list[float]:
        """Latencies in seconds of the requests since then, ascending."""
        return sorted(took for began, took in tuple(self._taken) if began >= since)

    def forget(self) -> None:
        """Discard the noted latencies."""
        self._taken.clear()


def head_of(method: str, path: str, key: str, length: int, *more: str) -> bytes:
    """The head of a request with a body."""
    lines = [
        f"{method} {path} HTTP/1.1",
        "Host: localhost",
        f"Authorization: Bearer {key}",
        f"Content-Length: {length}",
        *(more or ("Content-Type: application/json",)),
    ]
    return "\r\n".join([*lines, "", ""]).encode()


_IDLE_WITHIN_S: Final = 10.0
_IDLE_STEP_S: Final = 0.1


def _cpu_seconds(pids: Iterable[int]) -> float:
    """The processor time of these processes so far; those that ended count as 0."""
    ticks = 0
    for pid in pids:
        with suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


class Bench:
    """A measured server; it is also measured for `settle_s` after each answer."""

    def __init__(
        self, folder: Path, settle_s: float = 0.05, env: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        """`env`: settings of the server, beside its keys."""
        self._settle_s = settle_s
        self._turns = folder / "turns"
        self.forget_turns()
        env = {
            **KEYS,
            **env,
            MEASURED: str(self._turns),
            "PYTHONPATH": str(Path(__file__).parents[3]),
        }
        command = (sys.executable, "-m", "tests.crash.hostile.hostile_bodies", "--serve")
        self.server = Server(folder / "server", env, command=command)
        self._number = 0

    @contextmanager
    def running(self, how: signal.Signals = signal.SIGTERM) -> Iterator[Bench]:
        """Start the server with the topics of all routes, and end it by this signal."""
        self.spawn()
        self.until_ready()
        for method, path, body in (
            ("PUT", "/v0/topics/q", b'{"type":"queue"}'),
            ("PUT", "/v0/topics/t", b"{}"),
            ("PUT", "/v0/topics/few", b'{"cap_records":4}'),
            ("PUT", "/v1/stream/s", b"[]"),
        ):
            assert self.send(method, path, WRITER, body).startswith("20")
        octets = ("Content-Type: application/octet-stream",)
        assert self.send("PUT", "/v1/stream/b", WRITER, b"", octets).startswith("20")
        # The first large append starts the helper process.
        honest = _honest(3 * MIB)
        assert self.send("POST", "/v0/topics/t", WRITER, honest).startswith("20")
        self._beside = Beside(self.port)
        self._beside.start()
        try:
            yield self
        finally:
            self._beside.stop()
            self.stop(how)

    def spawn(self) -> None:
        """Start the server; returns when it listens, which is before it is ready."""
        self.server.process = process = self.server.spawn()
        bound = time.monotonic() + 60
        while time.monotonic() < bound:
            assert process.poll() is None, self.server.log.read_text()
            try:
                self.port = int((self.server.directory / "port").read_text())
            except (OSError, ValueError):
                time.sleep(0.005)
            else:
                return
        raise AssertionError("the server does not listen")

    def until_ready(self) -> list[float]:
        """Poll until the server is ready; return the seconds of each poll."""
        waits: list[float] = []
        ready = time.monotonic() + 120
        while time.monotonic() < ready:
            began = time.perf_counter()
            try:
                told = self.send("GET", "/v0/ready", WRITER, b"")
            except OSError:
                time.sleep(0.005)
                continue
            waits.append(time.perf_counter() - began)
            if told.startswith("200"):
                return waits
            assert told.startswith("503"), told
            time.sleep(0.002)
        raise AssertionError("the server is not ready")

    def stop(self, how: signal.Signals = signal.SIGTERM) -> None:
        """End the server by a signal, if it runs."""
        process, self.server.process = self.server.process, None
        if process is not None:
            process.send_signal(how)
            process.wait(60)

    def forget_turns(self) -> None:
        """Reset the longest turn."""
        if not self._turns.exists():
            self._turns.write_bytes(_TURN.pack(0.0))
        with self._turns.open("r+b") as shared:
            shared.write(_TURN.pack(0.0))

    def turn_ms(self) -> float:
        """The longest turn since `forget_turns`."""
        (turn_s,) = _TURN.unpack(self._turns.read_bytes())
        return float(turn_s) * 1000

    # --- one body ---------------------------------------------------------------------------

    def measured(self, route: str, body: bytes, key: str, *, is_gzip: bool) -> Figures:
        """Send a body to a route and measure its cost."""
        method, path = ROUTES[route]
        if "%d" in path:
            self._number += 1
            path %= self._number
        kind = "application/octet-stream" if route == "stream bytes" else "application/json"
        more = [f"Content-Type: {kind}", *(["Content-Encoding: gzip"] if is_gzip else [])]
        self._until_idle()
        self._beside.forget()
        memory = Memory(self.pids)
        self.forget_turns()
        memory.start()
        began = time.perf_counter()
        if route in SOCKETS:
            told = self.send_messages(key, messages_of(route, body))
        else:
            told = self.send(method, path, key, body, more)
        took = time.perf_counter() - began
        # The cost includes memory that is still held after the answer.
        time.sleep(self._settle_s)
        turn_ms = self.turn_ms()
        grown = memory.stop()
        taken = self._beside.latencies(began) or [0.0]
        return Figures(
            told,
            took * 1000,
            turn_ms,
            taken[len(taken) * 99 // 100] * 1000,
            taken[-1] * 1000,
            len(taken),
            grown,
        )

    def _until_idle(self) -> None:
        """Wait until the server does nothing but serve the other client: it may still seal the
        records of the body before, whose memory is not of this one.
        """
        bound = time.monotonic() + _IDLE_WITHIN_S
        while time.monotonic() < bound:
            before = _cpu_seconds(self.pids())
            time.sleep(_IDLE_STEP_S)
            if _cpu_seconds(self.pids()) - before < _IDLE_STEP_S / 2:
                return

    def quiet(self, seconds: float) -> list[float]:
        """Latencies of the other client without any hostile body, ascending."""
        self._beside.forget()
        began = time.perf_counter()
        time.sleep(seconds)
        return self._beside.latencies(began)

    def send(self, method: str, path: str, key: str, body: bytes, more: Sequence[str] = ()) -> str:
        """The status and the code of the answer; `reset` for a connection without an answer."""
        with socket.create_connection(("127.0.0.1", self.port), _ANSWER_WITHIN_S) as sock:
            sending = threading.Thread(
                target=_send_all, args=(sock, head_of(method, path, key, len(body), *more), body)
            )
            sending.start()
            answer = _receive(sock)
            sock.close() if answer else None
            sending.join()
        if not answer:
            return "reset"
        status = answer.split(b" ", 2)[1].decode()
        _, _, told = answer.partition(b"\r\n\r\n")
        return f"{status} {_code_of(told)}".strip()

    def send_messages(self, key: str, messages: Sequence[tuple[bytes, bytes]]) -> str:
        """The ops of a WebSocket's answers to text messages, or its close code."""
        with socket.create_connection(("127.0.0.1", self.port), _ANSWER_WITHIN_S) as sock:
            _open_socket(sock, key)
            sending = threading.Thread(target=_send_frames, args=(sock, messages))
            sending.start()
            answers = sock.makefile("rb")
            ended = sum(head[0] >> 7 for head, _ in messages)
            ops: list[str] = []
            while len(ops) < ended and (op := _answer_of(answers)):
                ops.append(op)
                if op.startswith("closed"):
                    break
            answers.close()
            sock.close()
            sending.join()
        return " ".join(sorted(set(ops))) or "reset"

    def flooded(self, frame: bytes, first: bytes, size: int, seconds: float) -> Figures:
        """The cost of this many bytes of one small frame, sent to a WebSocket without reading."""
        with socket.create_connection(("127.0.0.1", self.port), _ANSWER_WITHIN_S) as sock:
            _open_socket(sock, WRITER)
            self._beside.forget()
            self.forget_turns()
            began = time.perf_counter()
            sending = threading.Thread(
                target=_send_all, args=(sock, first, frame * (size // len(frame)))
            )
            reading = threading.Thread(target=_read_all, args=(sock,), daemon=True)
            sending.start()
            reading.start()
            time.sleep(seconds)
            turn_ms, taken = self.turn_ms(), self._beside.latencies(began) or [seconds]
            sock.shutdown(socket.SHUT_RDWR)
            sending.join()
        longest_ms = taken[-1] * 1000
        p99_ms = taken[len(taken) * 99 // 100] * 1000
        return Figures("", seconds * 1000, turn_ms, p99_ms, longest_ms, len(taken), 0)

    def together(self, begins: Sequence[bytes], ends: Sequence[bytes], *, ws: bool) -> Figures:
        """The cost of requests that become complete at the same time, each on a connection of its
        own.

        `begins` are sent first, one for each connection, `ends` all together a while later. `ws`:
        the connections are WebSockets.
        """
        with ExitStack() as stack:
            socks: list[socket.socket] = []
            for begin in begins:
                sock = socket.create_connection(("127.0.0.1", self.port), _ANSWER_WITHIN_S)
                socks.append(stack.enter_context(sock))
                if ws:
                    _open_socket(sock, WRITER)
                sock.sendall(begin)
            time.sleep(0.5)
            self._beside.forget()
            self.forget_turns()
            began = time.perf_counter()
            for sock, end in zip(socks, ends, strict=True):
                sock.sendall(end)
            told = {sock.recv(65_536)[: 2 if ws else 12] for sock in socks}
            took = time.perf_counter() - began
            time.sleep(self._settle_s)
            turn_ms = self.turn_ms()
        taken = self._beside.latencies(began) or [took]
        p99_ms = taken[len(taken) * 99 // 100] * 1000
        answers = " ".join(sorted(map(repr, told)))
        return Figures(answers, took * 1000, turn_ms, p99_ms, taken[-1] * 1000, len(taken), 0)

    def pids(self) -> list[int]:
        """The process ids of the server and its helpers."""
        process = self.server.process
        assert process is not None
        return [process.pid, *_children_of(process.pid)]


def _send_all(sock: socket.socket, head: bytes, body: bytes) -> None:
    try:
        sock.sendall(head + body if len(body) < MIB else head)
        if len(body) >= MIB:
            sock.sendall(body)
    except OSError:
        pass  # refused before all bytes were sent


def messages_of(route: str, body: bytes) -> list[tuple[bytes, bytes]]:
    """Frames of a client, head and payload, masked with zeros, which changes no byte.

    In the form of publishes the body, which fits one message, is sent `PUBLISHES` times.
    """
    if route == "websocket":
        return [(b"\x81\xff" + len(body).to_bytes(8) + bytes(4), body)]
    if route == "websocket fragments":
        step = 64 * 1024
        parts = [body[at : at + step] for at in range(0, len(body), step)]
        last = len(parts) - 1
        return [
            (
                bytes([(n == last) << 7 | (n == 0), 0xFF]) + len(part).to_bytes(8) + bytes(4),
                part,
            )
            for n, part in enumerate(parts)
        ]
    # For publishes the caller passes a body that fits one message.
    message = b'{"op":"publish","topic":"few",' + body[1:]
    return [(b"\x81\xff" + len(message).to_bytes(8) + bytes(4), message)] * PUBLISHES


def _open_socket(sock: socket.socket, key: str) -> None:
    """Upgrade a connection to a WebSocket."""
    opening = head_of("GET", "/v0/ws", key, 0).replace(b"Content-Length: 0\r\n", b"")
    nonce = base64.b64encode(os.urandom(16))
    sock.sendall(
        opening[:-2] + b"Connection: Upgrade\r\nUpgrade: websocket\r\n"
        b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: " + nonce + b"\r\n\r\n"
    )
    opened = sock.recv(4096)
    assert opened.startswith(b"HTTP/1.1 101"), opened


def _read_all(sock: socket.socket) -> None:
    try:
        while sock.recv(MIB):
            pass
    except OSError:
        pass


def _send_frames(sock: socket.socket, frames: Sequence[tuple[bytes, bytes]]) -> None:
    try:
        for head, payload in frames:
            sock.sendall(head)
            sock.sendall(payload)
    except OSError:
        pass  # closed before all bytes were sent


def _answer_of(answers: IO[bytes]) -> str:
    """The next frame of the server: its `op`, with an error's code, or `closed` and its code."""
    try:
        head = answers.read(2)
        if len(head) < 2:
            return ""
        length = head[1] & 127
        if length > 125:
            length = int.from_bytes(answers.read(2 if length == 126 else 8))
        payload = answers.read(length)
    except OSError:
        return ""
    if head[0] == 0x88:
        return f"closed {int.from_bytes(payload[:2])}"
    told = json.loads(payload)
    return f"{told['op']} {told.get('code', '')}".strip()


def _receive(sock: socket.socket) -> bytes:
    try:
        return sock.recv(65_536)
    except OSError:
        return b""


def _code_of(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["code"])
    except (ValueError, KeyError, TypeError):
        return ""


def _children_of(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(OSError):  # a thread that has ended meanwhile
            found += map(int, (task / "children").read_text().split())
    return found


class Memory:
    """The peak growth of the memory of some processes since it was made; sampled by a thread.

    It calls `pids` each time, so a helper that starts meanwhile counts with its whole memory.
    """

    def __init__(self, pids: Callable[[], Sequence[int]]) -> None:
        self._pids = pids
        self._before = self._held()
        self._most = self._before
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        """Start sampling."""
        self._thread.start()

    def stop(self) -> int:
        """Stop, and return the growth at its peak in bytes."""
        self._stop.set()
        self._thread.join()
        return max(0, self._most - self._before)

    def _run(self) -> None:
        while not self._stop.wait(0.003):
            self._most = max(self._most, self._held())

    def _held(self) -> int:
        return sum(map(anonymous_bytes_of, self._pids()))


def anonymous_bytes_of(pid: int) -> int:
    """RssAnon: a process's own memory, without mapped files."""
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    return next(
        (int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("RssAnon")),
        0,
    )


# --- in the server ----------------------------------------------------------------------------


def waited_for_processor_s() -> float:
    """How long the calling thread was ready without a processor (`schedstat` of Linux)."""
    return int(Path("/proc/thread-self/schedstat").read_bytes().split()[1]) / 1e9


def serve_measured() -> None:
    """Run the server like `topics serve`, with a timer that notes the longest turn."""
    from topics_server.cli import main
    from topics_server.node.boot import Boot
    from topics_server.node.node import Node

    path = os.environ.pop(MEASURED)
    start = Boot.start

    with Path(path).open("r+b") as file:
        shared = mmap.mmap(file.fileno(), _TURN.size)

    async def measured_start(self: Boot) -> Node:
        loop = asyncio.get_running_loop()

        def tick(due: float, waited: float) -> None:
            waited_by_now = waited_for_processor_s()
            late = loop.time() - due - (waited_by_now - waited)
            if late > _TURN.unpack(shared[:])[0]:
                shared[:] = _TURN.pack(late)
            due = loop.time() + _TICK_S
            loop.call_at(due, tick, due, waited_by_now)

        # Start the timer before the server, so that it also measures recovery.
        tick(loop.time(), waited_for_processor_s())
        return await start(self)

    Boot.start = measured_start  # type: ignore[method-assign]
    sys.argv = ["topics", "serve"]
    main()


# --- judging ----------------------------------------------------------------------------------

TURN_MS_MAX: Final = 50.0
P99_MS_MAX: Final = 50.0
GROWN_BYTES_MAX: Final = 128 * MIB
# For a write: a multiple of its body.
GROWN_TIMES_MAX: Final = 3


def faults(found: Figures, route: str, key: str, body_bytes: int) -> list[str]:
    """The bounds that one body broke; empty if none."""
    is_write = key == WRITER and route in APPENDING
    bound = GROWN_BYTES_MAX
    if is_write:
        bound = max(bound, GROWN_TIMES_MAX * body_bytes)
    return [
        name
        for name, is_broken in (
            ("answer", found.told in ("", "reset")),
            ("turn", found.turn_ms > TURN_MS_MAX),
            ("p99", found.p99_ms > P99_MS_MAX),
            ("memory", found.grown_bytes > bound),
        )
        if is_broken
    ]


# --- the table --------------------------------------------------------------------------------


def main(arguments: Sequence[str]) -> None:
    """Print the table of the long form."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--serve", action="store_true")
    parser.add_argument("--megabytes", type=int, default=60)
    parser.add_argument("--routes", default=",".join(ROUTES))
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--tries", type=int, default=3, help="of a cell that is over a bound")
    parser.add_argument("--plain-only", action="store_true")
    parser.add_argument("--writer-only", action="store_true")
    asked = parser.parse_args(arguments)
    if asked.serve:
        serve_measured()
        return
    with tempfile.TemporaryDirectory() as folder, Bench(Path(folder)).running() as bench:
        quiet = bench.quiet(3.0)
        print(
            f"quiet: p99 {quiet[len(quiet) * 99 // 100] * 1000:.1f} ms, longest "
            f"{quiet[-1] * 1000:.1f} ms of {len(quiet)} requests"
        )
        print(
            "| kind | coding | route | key | answer | took ms | turn ms | p99 ms | max ms "
            "| requests | grown MiB | over |\n|---|---|---|---|---|---|---|---|---|---|---|---|"
        )
        broken = 0
        for kind, coding, route, key, sent, size in _cells(asked):
            for _ in range(asked.tries):
                found = bench.measured(route, sent, key, is_gzip=coding == "gzip")
                told = faults(found, route, key, size)
                print(
                    f"| {kind} | {coding} | {route} | {key[:6]} | {found.told} "
                    f"| {found.took_ms:.0f} | {found.turn_ms:.1f} | {found.p99_ms:.1f} "
                    f"| {found.longest_ms:.1f} | {found.requests} "
                    f"| {found.grown_bytes / MIB:.0f} | {', '.join(told) or 'ok'} |",
                    flush=True,
                )
                if not told:
                    break
            broken += bool(told)
        print(f"{broken} cells over a bound in each of {asked.tries} tries")
        sys.exit(1 if broken else 0)


def _cells(asked: argparse.Namespace) -> Iterator[tuple[str, str, str, str, bytes, int]]:
    """The cells of the table: kind, coding, route, key, the sent bytes, and the inflated length."""
    for kind in asked.kinds.split(","):
        body = KINDS[kind](asked.megabytes * 1_000_000)
        codings = {"plain": body}
        if not asked.plain_only:
            codings["gzip"] = gzip.compress(body, 6 if kind != "keys" else 1)
        for coding, sent in codings.items():
            for route in asked.routes.split(","):
                if route in SOCKETS and coding == "gzip":
                    continue
                whole = sent
                if route == "websocket publishes":
                    whole = KINDS[kind](PUBLISH_BYTES)
                for key in (WRITER,) if asked.writer_only else (READER, WRITER):
                    yield kind, coding, route, key, whole, len(body)


if __name__ == "__main__":
    main(sys.argv[1:])
