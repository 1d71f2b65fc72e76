"""Unread sockets and streams without news cost almost nothing.

A real server with short timeouts. Loud topic: written at a steady rate, watched by sockets that are
never read and by one that is. Quiet topic: small appends, timed on their way to ten watchers
without load, with the load alone, and with the unread sockets; the figures are printed (`-rP`).
"""

from __future__ import annotations

import asyncio
import os
import resource
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import pytest

from tests.contract.driver import Server, eventually, good
from tests.crash.kills.ledger import Json
from tests.crash.watch.watch_wire import Broken, Frame, Http, Sse, request_bytes

pytestmark = pytest.mark.crash

KIB: Final = 1024
MIB: Final = 1024 * KIB
GRACE_MS: Final = 500
TIMEOUT_MS: Final = 3000
LOUD: Final = "loud"
QUIET: Final = "quiet"
CAP_BYTES: Final = 32 * MIB
APPENDS_PER_S: Final = 100
QUIET_WATCHERS: Final = 10
# The number of sockets that begin to read after the server gave them up.
LATE_READERS: Final = 3
# The server's growth under load without regard to watchers: the log up to its cap, and copies that
# are being written, sealed and rendered.
LOAD_BYTES_MAX: Final = 6 * CAP_BYTES
# The growth for each unread socket: one page on its way, and the stream itself.
SOCKET_BYTES_MAX: Final = 256 * KIB
IDLE_STREAM_BYTES_MAX: Final = 60 * KIB
IDLE_SECONDS: Final = 5.0
IDLE_CORE_MAX: Final = 0.02
# On a machine on which each wake-up costs more, the server without streams costs more, too: 0.4 %
# of a core where 200 streams cost 1.5.
IDLE_TIMES_MAX: Final = 5.0
IDLE_WINDOWS: Final = 3


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """A server that soon gives up on a slow consumer; client and server may open enough sockets."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 10_000 if hard == resource.RLIM_INFINITY else min(10_000, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
    made = Server(
        tmp_path / "server",
        {
            "TOPICS_BUFFER_GRACE_MS": f"{GRACE_MS}",
            "TOPICS_SLOW_CONSUMER_TIMEOUT_MS": f"{TIMEOUT_MS}",
        },
    )
    made.start()
    try:
        yield made
        made.stop()
    finally:
        if made.process is not None:
            made.process.kill()
            made.process.wait()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def pid_of(server: Server) -> int:
    """The server's process id."""
    assert server.process is not None
    return server.process.pid


def anonymous_bytes(server: Server) -> int:
    """RssAnon: the process's own memory, without mapped files."""
    for line in Path(f"/proc/{pid_of(server)}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * KIB
    raise AssertionError("no RssAnon")


def cpu_seconds(server: Server) -> float:
    """User and system time of the process so far."""
    fields = Path(f"/proc/{pid_of(server)}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def open_sockets(server: Server) -> int:
    """The sockets the process has open."""
    count = 0
    for link in Path(f"/proc/{pid_of(server)}/fd").iterdir():
        try:
            count += os.readlink(link).startswith("socket:")
        except FileNotFoundError:
            continue
    return count


def gauge(server: Server, name: str) -> int:
    """One of the server's metrics."""
    answer = server.api.http.get("/v0/metrics", headers={"Accept": "application/json"})
    return int(good(answer)[name])


def p99_ms(samples: list[float]) -> float:
    """The 99th percentile, in milliseconds."""
    assert len(samples) >= 100, "too few samples"
    return sorted(samples)[len(samples) * 99 // 100] * 1000


@dataclass(slots=True)
class Reader:
    """Reads one stream to the last frame and checks that nothing is missing."""

    stream: Sse
    position: int = 0
    last_id: str = ""
    gaps: list[Json] = field(default_factory=list)
    errors: list[Json] = field(default_factory=list)
    latencies: list[float] = field(default_factory=list)
    records: int = 0

    async def run(self) -> None:
        """Read until the stream ends."""
        try:
            while True:
                for frame in await self.stream.read():
                    self.take(frame)
        except Broken:
            return
        finally:
            self.stream.abort()

    def take(self, frame: Frame) -> None:
        """Check that frames follow each other without an unreported gap; this test deletes
        nothing.
        """
        data = frame.data
        if frame.event == "error":
            self.errors.append(data)
            return
        assert not self.errors, "a frame after the last one"
        assert frame.id is not None
        self.last_id = frame.id
        if frame.event == "record":
            assert data["from_seq"] == self.position, f"{data['from_seq']} after {self.position}"
            seqs = [record["$seq"] for record in data["records"]]
            assert seqs == list(range(self.position + 1, data["to_seq"] + 1))
            self.position = data["to_seq"]
            self.records += len(seqs)
            now = time.perf_counter()
            for record in data["records"]:
                if "sent" in record["data"]:
                    self.latencies.append(now - record["data"]["sent"])
        elif frame.event == "tombstone":
            assert data["gap_from"] == self.position + 1, data
            self.gaps.append(data)
            self.position = data["gap_to"]
        else:
            assert frame.event == "caught-up", frame
            assert data["head_seq"] == self.position


class Scene:
    """The topics, the writers and the watchers of one test."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.port = int((server.directory / "port").read_text())
        self.http = Http(self.port)
        self.peak_bytes = 0
        self.written = 0

    async def session(self, topic: str) -> str:
        """Open a watch session of one topic, from its head on; return the path of its stream."""
        body = {"topics": {topic: {"tail": True}}}
        status, answer = await self.http.ask("POST", "/v0/watch", body)
        assert status == 200, answer
        return str(answer["stream_url"])

    async def reader(self, topic: str, path: str = "", last_id: str | None = None) -> Reader:
        """A reader of a session, with its stream open."""
        path = path or await self.session(topic)
        stream = await Sse.dial(self.port)
        await stream.ask(path, last_id)
        assert stream.status == 200, stream.refusal
        reader = Reader(stream)
        status, state = await self.http.ask("GET", f"/v0/topics/{topic}")
        assert status == 200
        reader.position = int(state["head_seq"]) if last_id is None else 0
        return reader

    async def write(self, topic: str, data: Json) -> None:
        """Send one append and wait for the acknowledgement."""
        body = {"records": [{"data": data}]}
        status, answer = await self.http.ask("POST", f"/v0/topics/{topic}", body)
        assert status in (200, 201), answer

    async def talk(self, seconds: float) -> None:
        """Append to the quiet topic, each record with its send time."""
        http = Http(self.port)
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            body = {"records": [{"data": {"sent": time.perf_counter()}}]}
            status, answer = await http.ask("POST", f"/v0/topics/{QUIET}", body)
            assert status == 200, answer
            await asyncio.sleep(0.02)
        http.close()

    async def shout(self, seconds: float, bytes_per_s: int) -> None:
        """Append to the loud topic at a steady rate; note the highest RssAnon."""
        body = {"records": [{"data": {"pad": "x" * (bytes_per_s // APPENDS_PER_S)}}]}
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        raw = request_bytes("POST", f"/v0/topics/{LOUD}", body)
        began = time.monotonic()
        for number in range(int(seconds * APPENDS_PER_S)):
            writer.write(raw)
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200"), head
            length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0])
            await reader.readexactly(length)
            self.written += len(raw)
            if number % 10 == 0:
                self.peak_bytes = max(self.peak_bytes, anonymous_bytes(self.server))
            await asyncio.sleep(began + (number + 1) / APPENDS_PER_S - time.monotonic())
        writer.close()


def unread_socket(port: int, path: str) -> socket.socket:
    """Request a stream and never read it."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.connect(("127.0.0.1", port))
    sock.sendall(request_bytes("GET", path))
    return sock


async def soon(check: Callable[[], bool], what: str, within_s: float = 20.0) -> None:
    """`eventually`, while our own event loop continues."""
    await asyncio.to_thread(eventually, check, what, within_s)


async def read_late(sock: socket.socket, reader: Reader) -> None:
    """Read an unread socket to its end."""
    sock.setblocking(False)
    streams = await asyncio.open_connection(sock=sock)
    head = await streams[0].readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200"), head
    reader.stream = Sse(*streams)
    await reader.run()


async def slow_scene(server: Server, slow_sockets: int, load_mb: int) -> None:
    """Measure three phases (quiet, loud, loud with unread sockets), then the end of these
    sockets.
    """
    scene = Scene(server)
    good(server.api.put(LOUD, {"cap_bytes": CAP_BYTES}))
    good(server.api.put(QUIET, {}))
    quiet = [await scene.reader(QUIET) for _ in range(QUIET_WATCHERS)]
    loud = await scene.reader(LOUD)
    reading = [asyncio.create_task(reader.run()) for reader in (*quiet, loud)]

    async def measure(seconds: float, *others: asyncio.Task[None]) -> float:
        for reader in quiet:
            reader.latencies.clear()
        await asyncio.gather(scene.talk(seconds), *others)
        return p99_ms([latency for reader in quiet for latency in reader.latencies])

    def shouting(seconds: float) -> asyncio.Task[None]:
        return asyncio.create_task(scene.shout(seconds, load_mb * 1_000_000))

    calm_ms = await measure(2)
    calm_bytes = anonymous_bytes(server)
    loud_ms = await measure(4, shouting(4))
    loud_bytes = scene.peak_bytes
    sockets_before = open_sockets(server)

    paths = [await scene.session(LOUD) for _ in range(slow_sockets)]
    start = loud.position
    unread = [unread_socket(scene.port, path) for path in paths]
    await soon(lambda: gauge(server, "topics_sse_connections") > slow_sockets, "all are open")
    slow_ms = await measure(2, shouting(2))  # their buffers fill up and they get nothing more
    late = [Reader(loud.stream, start) for _ in range(LATE_READERS)]
    after_ms = await measure(TIMEOUT_MS / 1000 + 1, shouting(TIMEOUT_MS / 1000 + 1))
    peak_bytes = scene.peak_bytes
    bound = calm_bytes + LOAD_BYTES_MAX + slow_sockets * SOCKET_BYTES_MAX
    print(
        f"\n{slow_sockets} unread sockets at {load_mb} MB/s: RssAnon {calm_bytes / MIB:.0f} MiB "
        f"calm, {loud_bytes / MIB:.0f} MiB with the load, {peak_bytes / MIB:.0f} MiB with the "
        f"sockets, bound {bound / MIB:.0f} MiB; p99 of {QUIET_WATCHERS} others {calm_ms:.1f} ms "
        f"calm, {loud_ms:.1f} ms with the load, {slow_ms:.1f} ms while the sockets fill, "
        f"{after_ms:.1f} ms from then on"
    )
    assert peak_bytes <= bound
    # While the system's own buffers fill, the kernel copies every byte once a socket: that phase is
    # only printed. After it the others must notice nothing.
    assert after_ms <= max(5 * loud_ms, loud_ms + 50)

    # Sockets that begin to read now find the last frame; the server closes the others too.
    await asyncio.gather(*(read_late(s, r) for s, r in zip(unread, late, strict=False)))
    for reader in late:
        assert [error["code"] for error in reader.errors] == [408], reader
        assert start <= reader.position < loud.position
    everybody = len(quiet) + 1
    await soon(lambda: gauge(server, "topics_sse_connections") == everybody, "they are closed")
    await soon(lambda: open_sockets(server) <= sockets_before + 5, "their sockets are closed")
    for sock in unread[LATE_READERS:]:
        sock.close()

    await resume_all(scene, list(zip(paths, late, strict=False)), loud)
    for task, reader in zip(reading, (*quiet, loud), strict=True):
        assert not task.done(), "a watcher that reads was cut"
        task.cancel()
        assert not reader.errors
        assert not reader.gaps
    await asyncio.gather(*reading, return_exceptions=True)
    scene.http.close()


async def resume_all(scene: Scene, late: list[tuple[str, Reader]], loud: Reader) -> None:
    """A given-up session continues from its id: only the cap's evictions are lost."""
    for path, before in late:
        last_id = before.last_id or None
        stream = await Sse.dial(scene.port)
        await stream.ask(path, last_id)
        assert stream.status == 200, stream.refusal
        after = Reader(stream, before.position)
        while after.position < loud.position:
            for frame in await stream.read():
                after.take(frame)
        stream.abort()
        assert [gap["reason"] for gap in after.gaps] in ([], ["from_seq_too_old"]), after.gaps
        told = sum(gap["gap_to"] - gap["gap_from"] + 1 for gap in after.gaps)
        assert after.records + told == loud.position - before.position


@pytest.mark.timeout(0)
def test_unread_sockets_cost_the_others_nothing(
    server: Server, slow_sockets: int, load_mb: int
) -> None:
    """`--slow-sockets`, `--load-mb`."""
    asyncio.run(slow_scene(server, slow_sockets, load_mb))


async def idle_core(server: Server) -> float:
    """The share of a core that the server takes without requests.

    Other work on the machine only adds to it, so the least of some windows counts.
    """
    found = []
    for _ in range(IDLE_WINDOWS):
        began = cpu_seconds(server)
        await asyncio.sleep(IDLE_SECONDS)
        found.append((cpu_seconds(server) - began) / IDLE_SECONDS)
    return min(found)


async def idle_scene(server: Server, idle_streams: int) -> None:
    """Streams without news: the cost of each, and of all of them."""
    scene = Scene(server)
    good(server.api.put(QUIET, {}))

    async def open_some(count: int) -> list[Sse]:
        made: list[Sse] = []
        for _ in range(count):
            path = await scene.session(QUIET)
            stream = await Sse.dial(scene.port)
            await stream.ask(path)
            assert stream.status == 200, stream.refusal
            made.append(stream)
            while not any(frame.event == "caught-up" for frame in await stream.read()):
                pass
        return made

    alone = await idle_core(server)
    streams = await open_some(20)  # the first streams also pay for shared objects
    before = anonymous_bytes(server)
    streams += await open_some(idle_streams)
    each = (anonymous_bytes(server) - before) / idle_streams
    core = await idle_core(server)
    print(
        f"\n{idle_streams} idle streams: {each / KIB:.1f} KiB each (RssAnon), "
        f"{core * 100:.2f} % of a core over {IDLE_SECONDS:.0f} s at a heartbeat of 15 s "
        f"({alone * 100:.2f} % without streams)"
    )
    assert gauge(server, "topics_sse_connections") == len(streams)
    for stream in streams:
        stream.abort()
    await soon(lambda: gauge(server, "topics_sse_connections") == 0, "all are closed")
    assert each <= IDLE_STREAM_BYTES_MAX
    assert core < max(IDLE_CORE_MAX, IDLE_TIMES_MAX * alone)
    scene.http.close()


@pytest.mark.timeout(0)
def test_streams_without_news_cost_next_to_nothing(server: Server, idle_streams: int) -> None:
    """`--idle-streams`."""
    asyncio.run(idle_scene(server, idle_streams))
