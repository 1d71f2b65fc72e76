"""Durable Streams beside two other servers: appends, catch-up reads, SSE; and producer headers.

All servers speak one protocol, so all get the same bytes in the same rounds. The official one
(`@durable-streams/server` under Node, streams in files) syncs every append before it answers. The
one of the crate `durable-streams` is written in Rust and syncs appends in groups; it is measured if
it is installed. Ours is measured with the default class (disk), and with class fsync, which
promises the same as the other two and is judged. Every append here names its producer, as the
official clients do, unless stated otherwise.
"""

from __future__ import annotations

import contextlib
import http.client
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.bench import Bench, Side, series
from benchmarks.cases.against_floor import CONNECTIONS, costs
from benchmarks.clients.loader import BenchmarkError, Sample
from benchmarks.clients.requests import append_request
from benchmarks.clients.watching import Watchers, Wire
from benchmarks.report.figures import Bar, Figure, Series, ratios
from benchmarks.servers.peers import NotInstalled, durable_streams, rust_streams
from benchmarks.servers.process import ServerProcess
from benchmarks.servers.server import STILL

JSON, BYTES = "application/json", "application/octet-stream"
SIZES = (100, 10_240)
DISTINCT = 1000
READ_BYTES, READ_BYTES_QUICK = 16 << 20, 1 << 20
# Bytes are appended one message at a time, and the official server syncs each message.
SINGLES_MAX, SINGLES_MAX_QUICK = 4000, 1000
# Reads are counted in whole walks through the stream; no walk has so many pages.
PAGES_MAX = 100_000
WATCHERS = 100
# The bar is a share of the server's CPU time per request: other load on the machine changes
# requests/s far more.
HEADERS_COST_MAX = 1.05
STAMP = b"producer-id: {producer}\r\nproducer-epoch: 0\r\nproducer-seq: {turn}\r\n"
DURABILITY = {"ours": "disk", "ours, class fsync": "fsync"}
# The end of a message is that of its control event. Ours has an `id` line behind its data; an event
# of ours is one chunk, so the end of the record's event is none of a chunk.
EVENTS = Wire(ready="upToDate", end="}\n\n")
OUR_EVENTS = Wire(ready="upToDate", end="\n\n")
RUST = "crate durable-streams"


@dataclass(frozen=True, slots=True)
class Contender:
    """A server as a side; `path` is the prefix of its streams on this side."""

    label: str
    server: ServerProcess
    path: str


def message(kind: str, number: int, size: int) -> bytes:
    """A message of exactly `size` bytes, without bytes that end a chunk or an event."""
    head = b'{"id":%d,"pad":"' % number
    filler = (b"%010d" % (number * 2_654_435_761 % 10**10)) * (size // 10 + 1)
    text = head + filler[: size - len(head) - 2] + b'"}'
    assert len(text) == size
    return text if kind == JSON else bytes(64 + byte % 64 for byte in text)


def post(path: str, kind: str, body: bytes, headers: bytes = b"") -> bytes:
    """The bytes of one append."""
    head = f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: {kind}\r\n".encode()
    return head + headers + b"content-length: %d\r\n\r\n" % len(body) + body


def called(
    server: ServerProcess, method: str, path: str, body: bytes = b"", kind: str | None = None
) -> tuple[http.client.HTTPResponse, bytes]:
    """Send one unmeasured request; its answer must be 2xx."""
    link = http.client.HTTPConnection("127.0.0.1", server.port, timeout=120)
    try:
        link.request(method, path, body or None, {} if kind is None else {"content-type": kind})
        answer = link.getresponse()
        received = answer.read()
    finally:
        link.close()
    if not 200 <= answer.status < 300:
        raise BenchmarkError(f"{method} {path}: {answer.status} {received[:300]!r}")
    return answer, received


def contenders(bench: Bench) -> list[Contender]:
    """The other servers, and ours in both classes."""
    official = bench.owned(durable_streams(bench.folder / "official"))
    ours = bench.start(settings=STILL)
    found = [Contender(label, ours, f"/v1/stream/{cls}") for label, cls in DURABILITY.items()]
    found.append(Contender("official", official, "/v1/stream/bench"))
    with contextlib.suppress(NotInstalled):
        rust = bench.owned(rust_streams(bench.folder / "rust"))
        found.append(Contender(RUST, rust, "/v1/stream/bench"))
    return found


def create(contender: Contender, name: str, kind: str) -> str:
    """Create a new stream of the contender's class; return its path."""
    path = f"{contender.path}-{name}"
    called(contender.server, "PUT", path, kind=kind)
    if contender.label in DURABILITY:
        topic = path.removeprefix("/v1/stream/")
        config = json.dumps({"durability": DURABILITY[contender.label]}).encode()
        contender.server.expect("PUT", f"/v0/topics/{topic}", config)
    return path


def described(kind: str, size: int) -> str:
    """The messages in words."""
    return f"{'JSON' if kind == JSON else 'bytes'}, {size:,} B"


# -- appends ------------------------------------------------------------------------------------


def appends(bench: Bench) -> list[Figure]:
    """Appends by 1 and by 16 producers at once, and two measurements without producer headers."""
    sides = contenders(bench)
    wanted = [(kind, size, True) for kind in (JSON, BYTES) for size in SIZES]
    return [
        _appends(bench, sides, kind, size, connections, stamp=stamp)
        for kind, size, stamp in [*wanted, (JSON, SIZES[0], False)]
        for connections in CONNECTIONS
    ]


def _appends(
    bench: Bench, sides: Sequence[Contender], kind: str, size: int, connections: int, *, stamp: bool
) -> Figure:
    by = f"{connections} producer" if stamp else f"no producer headers, {connections} connection"
    plural = "s" if connections > 1 else ""
    name = f"{kind[-4:]}-{size}-{connections}-{stamp}"
    runs: dict[str, Side] = {}
    for number, side in enumerate(sides):
        path = create(side, name, kind)
        bodies = (message(kind, turn, size) for turn in range(DISTINCT))
        sent = [post(path, kind, body, STAMP if stamp else b"") for body in bodies]
        runs[side.label] = partial(
            bench.load,
            side.server,
            bench.requests(f"{name}-{number}", sent),
            connections=connections,
            stamp=stamp,
        )
    taken = bench.interleave(runs)
    return compared("streams-append", f"append, {described(kind, size)}, {by}{plural}", taken)


def compared(case: str, name: str, taken: dict[str, list[Sample]]) -> Figure:
    """Compare our server, with the same promise, and the official server: rate and latency of every
    side.
    """
    rates = {label: series(samples, "rate", label) for label, samples in taken.items()}
    latencies = [
        series(samples, f"{rank}_ms", f"{label}, {rank}")
        for label, samples in taken.items()
        for rank in ("p50", "p99")
    ]
    judged = ratios(
        rates["ours, class fsync"].values,
        rates["official"].values,
        "ours, class fsync / official, requests/s",
    )
    notes = [costs(label, samples) for label, samples in taken.items()]
    if RUST in taken:
        beside = ratios(rates["ours, class fsync"].values, rates[RUST].values, "")
        notes.append(f"ours, class fsync / {RUST}, requests/s: {beside.median:.2f}x")
    return Figure(case, name, judged, None, (*rates.values(), *latencies), tuple(notes))


# -- reads --------------------------------------------------------------------------------------


def reads(bench: Bench) -> list[Figure]:
    """Catch-up: whole walks from the beginning to the end of a stream, one reader."""
    sides = [side for side in contenders(bench) if side.label != "ours, class fsync"]
    figures = []
    for kind in (JSON, BYTES):
        for size in SIZES:
            walks: dict[str, tuple[Path, int, int]] = {}
            for side in sides:
                walks[side.label] = _filled(bench, side, kind, size)
            taken = bench.interleave(
                {side.label: partial(_walk, bench, side, *walks[side.label]) for side in sides}
            )
            rates = {
                label: Series(
                    label,
                    "MB/s",
                    tuple(s.rate * walks[label][2] / walks[label][1] / 1e6 for s in samples),
                )
                for label, samples in taken.items()
            }
            notes = [costs(label, samples) for label, samples in taken.items()]
            notes += [f"{label}: {walks[label][1]} pages a walk" for label in taken]
            figures.append(
                Figure(
                    "streams-read",
                    f"catch-up, {described(kind, size)}",
                    ratios(rates["ours"].values, rates["official"].values, "ours / official, MB/s"),
                    None,
                    tuple(rates.values()),
                    tuple(notes),
                )
            )
    return figures


def _filled(bench: Bench, side: Contender, kind: str, size: int) -> tuple[Path, int, int]:
    """Make a stream to read: the requests of one walk, their number, and its bytes."""
    path = create(side, f"read-{kind[-4:]}-{size}", kind)
    count = bench.options.scaled(READ_BYTES, READ_BYTES_QUICK) // size
    if kind == BYTES:
        count = min(count, bench.options.scaled(SINGLES_MAX, SINGLES_MAX_QUICK))
    bodies = [message(kind, number, size) for number in range(count)]
    if kind == JSON:  # read as single messages
        batches = (bodies[first : first + 100] for first in range(0, count, 100))
        for batch in batches:
            called(side.server, "POST", path, b"[%s]" % b",".join(batch), kind)
    else:
        sent = bench.requests(f"{side.label}-fill-{size}", [post(path, kind, b) for b in bodies])
        bench.fill(side.server, sent, count, connections=16)
    requests, received, offset = [], 0, "-1"
    for _ in range(PAGES_MAX):
        target = f"{path}?offset={offset}"
        answer, page = called(side.server, "GET", target)
        requests.append(f"GET {target} HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n".encode())
        received += len(page)
        offset = answer.headers["stream-next-offset"]
        if answer.headers.get("stream-up-to-date") == "true":
            break
    if received < count * size:
        raise BenchmarkError(f"{side.label}: read {received} bytes of {count * size}")
    return (
        bench.requests(f"{side.label}-walk-{kind[-4:]}-{size}", requests),
        len(requests),
        received,
    )


def _walk(bench: Bench, side: Contender, requests: Path, pages: int, received: int) -> Sample:
    """Run whole walks for about the length of a round. The first walk gives the number of walks."""
    del received
    once = bench.load(side.server, requests, count=pages, seconds=600)
    walks = max(1, round(bench.options.seconds / once.seconds))
    return bench.load(side.server, requests, count=pages * walks, seconds=600)


# -- fan-out ------------------------------------------------------------------------------------


def fan_out(bench: Bench) -> list[Figure]:
    """The time from one JSON append until the last of 100 SSE readers has its last byte."""
    sides = contenders(bench)
    proofs = bench.requests("payloads", [message(JSON, n, SIZES[0]) for n in range(DISTINCT)])
    with Watchers() as client:
        runs: dict[str, Side] = {}
        for number, side in enumerate(sides):
            path = create(side, "fanout", JSON)
            target = f"{path}?offset=now&live=sse"
            watch = f"GET {target} HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n".encode()
            watching = bench.requests(f"watch-{number}", [watch] * WATCHERS)
            events = OUR_EVENTS if side.label in DURABILITY else EVENTS
            client.open(side.label, side.server.port, watching, events)
            writes = [post(path, JSON, message(JSON, n, SIZES[0])) for n in range(DISTINCT)]
            runs[side.label] = partial(
                bench.costed,
                side.server,
                partial(
                    client.measure,
                    side.label,
                    side.server.port,
                    bench.requests(f"writes-{number}", writes),
                    events,
                    proofs=proofs,
                    expect=WATCHERS,
                    seconds=bench.options.seconds,
                ),
            )
        taken = bench.interleave(runs)
    figures = []
    for rank in ("p50", "p99"):
        times = {label: series(s, f"{rank}_ms", f"{label}, {rank}") for label, s in taken.items()}
        figures.append(
            Figure(
                "streams-fanout",
                f"append to last byte of {WATCHERS} SSE readers, {rank}",
                ratios(
                    times["ours, class fsync"].values,
                    times["official"].values,
                    f"ours, class fsync / official, {rank}",
                ),
                None,
                tuple(times.values()),
                tuple(costs(label, samples) for label, samples in taken.items()),
            )
        )
    return figures


# -- the cost of producer headers ----------------------------------------------------------------


def producer_headers(bench: Bench) -> list[Figure]:
    """CPU time of single `/v0` appends with producer headers, compared with the same appends
    without them.
    """
    server = bench.start(settings=STILL)
    figures = []
    for connections in CONNECTIONS:
        taken = _with_and_without(bench, server, "disk", connections)
        cpu = {label: series(taken[label], "server_cpu_us", f"CPU, {label}") for label in taken}
        figures.append(
            Figure(
                "streams-headers",
                f"/v0 append of 1 record with producer headers, {_counted(connections)}",
                ratios(
                    cpu["with"].values, cpu["without"].values, "with / without, CPU of the server"
                ),
                Bar("<=", HEADERS_COST_MAX),
                (*cpu.values(), *(series(taken[label], "rate", label) for label in taken)),
            )
        )
    return figures


def producer_rates(bench: Bench) -> list[Figure]:
    """The same appends of both classes: requests/s and p50."""
    server = bench.start(settings=STILL)
    figures = []
    for durability in DURABILITY.values():
        for connections in CONNECTIONS:
            taken = _with_and_without(bench, server, durability, connections)
            rates = {label: series(taken[label], "rate", label) for label in taken}
            figures.append(
                Figure(
                    "streams-headers-rate",
                    f"/v0 append of 1 record with producer headers, class {durability}, "
                    f"{_counted(connections)}",
                    ratios(
                        rates["with"].values, rates["without"].values, "with / without, requests/s"
                    ),
                    None,
                    (
                        *rates.values(),
                        *(series(taken[label], "p50_ms", f"{label}, p50") for label in taken),
                    ),
                    tuple(costs(label, taken[label]) for label in taken),
                )
            )
    return figures


def _with_and_without(
    bench: Bench, server: ServerProcess, durability: str, connections: int
) -> dict[str, list[Sample]]:
    runs: dict[str, Side] = {}
    for label, change in (("with", _stamped), ("without", bytes)):
        topic = f"{durability}-{label}-{connections}"
        server.expect("PUT", f"/v0/topics/{topic}", b'{"durability":"%b"}' % durability.encode())
        sent = [change(append_request(topic, number, 1)) for number in range(DISTINCT)]
        runs[label] = partial(
            bench.load,
            server,
            bench.requests(topic, sent),
            connections=connections,
            stamp=True,
        )
    return bench.interleave(runs)


def _counted(connections: int) -> str:
    return f"{connections} connection{'s' if connections > 1 else ''}"


def _stamped(request: bytes) -> bytes:
    head, _, body = request.partition(b"\r\n\r\n")
    return head + b"\r\n" + STAMP + b"\r\n" + body
