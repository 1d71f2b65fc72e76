"""Fan-out: the time from one write until the last of W watchers has its last byte, compared with a
bare loop and peers. One writer writes a record of 200 bytes, and the next record when every watcher
has it. The watchers and the writer are one client process (`watchers`); the sides take turns in it
with their sockets kept open. Peers promise other things over other protocols: they give context and
are no contest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.bench import Bench, Side, series
from benchmarks.cases.against_floor import costs
from benchmarks.clients import postgres
from benchmarks.clients.loader import Sample
from benchmarks.clients.requests import append_body, append_request, data_text, http_request
from benchmarks.clients.watching import (
    LONG_POLL_DIGITS,
    OURS,
    Watchers,
    Wire,
    long_poll_request,
    open_sessions,
)
from benchmarks.report.figures import Bar, Figure, Series, ratios
from benchmarks.servers.fanout_floor import GREETING, start_fanout_floor
from benchmarks.servers.peers import NATS_HELLO, Nats, NotInstalled, Postgres, Redis, command
from benchmarks.servers.process import Reply, ServerProcess

TOPIC = "bench"
WAITED = "waits"  # a name of the same length
WATCHERS = (1, 10, 100, 1000)
# Each connection of PostgreSQL is a process; a thousand processes would not measure the notifying.
LISTENERS_MAX = 100
LIMITS = {100: 1.5, 1000: 2.0}
# The number of different writes before they repeat, so that no cache profits from a repeated body.
DISTINCT = 1000
# Another case measures heartbeats; here they would disturb the rounds of other sides.
HEARTBEAT_MS = 60_000
MANY_STREAMS = {"TOPICS_MAX_WATCH_SESSIONS": "20000", "TOPICS_MAX_SSE_CONNECTIONS": "20000"}

NATS = Wire(
    ready="PONG\r\n",
    end='"}\r\n',
    answer=0,
    greeting=NATS_HELLO.decode(),
    noise="PING\r\n",  # sent once, two seconds after a client connected
)
POSTGRES = "PostgreSQL, INSERT and NOTIFY"
NOTIFY = "WITH one AS (INSERT INTO log (data) VALUES ($1::json)) SELECT pg_notify('bench', $1)"
LISTENING = postgres.query("LISTEN bench") + postgres.parse(b"", "SELECT 1") + postgres.SYNC
# A listener and a writer are ready when they have prepared a statement.
POSTGRES_WIRE = Wire(
    ready=(postgres.PARSED + postgres.READY).decode("latin-1"),
    end='"}\0',
    answer=-2,
    greeting=postgres.greeting(
        {"synchronous_commit": "off"}, postgres.parse(b"notify", NOTIFY, postgres.TEXT)
    ).decode("latin-1"),
)
REDIS_CHANNEL = Wire(ready=":1\r\n", end='"}\r\n', answer=1)


def redis_stream(key: str) -> Wire:
    """Readers of a redis stream: each requests the next message from its last position."""
    again = command(b"XREAD", b"BLOCK", b"0", b"STREAMS", key.encode(), b"{position}")
    text = again.replace(b"$10\r\n{position}", b"${size}\r\n{position}").decode()
    return Wire(
        ready="",
        end='"}\r\n',
        answer=2,
        again=text,
        position=r"\r\n(\d+-\d+)\r\n",
        settle=command(b"PING").decode(),
    )


@dataclass(frozen=True, slots=True)
class PeerSide:
    """A peer as a side: its protocol, and the messages of a watcher and of a writer."""

    label: str
    port: int
    wire: Wire
    watcher: bytes
    write: Callable[[bytes], bytes]
    most: int = max(WATCHERS)  # more watchers than these are not measured


def payloads() -> list[bytes]:
    """The written payloads: the `data` of the records, as `append_request` builds them."""
    return [data_text(number, f"t-{number % 1000:03d}") for number in range(DISTINCT)]


def raw_answer(reply: Reply) -> bytes:
    """An answer as its bytes on the wire."""
    head = "".join(f"{name}: {value}\r\n" for name, value in reply.headers)
    return f"HTTP/1.1 {reply.status} OK\r\n{head}\r\n".encode() + reply.body


def prepare(bench: Bench) -> tuple[ServerProcess, Path, Path]:
    """Our server with its topic, the file of appends, and the file of their payloads."""
    server = bench.start(settings=MANY_STREAMS)
    server.expect("PUT", f"/v0/topics/{TOPIC}", b'{"durability":"disk"}')
    requests = bench.requests("fanout", [append_request(TOPIC, n, 1) for n in range(DISTINCT)])
    return server, requests, bench.requests("payloads", payloads())


def open_streams(bench: Bench, client: Watchers, server: ServerProcess, count: int) -> None:
    """Open `count` live streams on our server, one session each, as group `ours`."""
    streams = open_sessions(server, [[TOPIC]] * count, HEARTBEAT_MS)
    client.open("ours", server.port, bench.requests("streams", streams), OURS)


def start_peers(bench: Bench, stack: ExitStack) -> tuple[list[PeerSide], list[str]]:
    """Start the installed peers; return a line about each missing one."""
    sides: list[PeerSide] = []
    missing: list[str] = []
    try:
        nats = Nats(bench.folder / "nats")
        stack.callback(nats.close)
        hello = b'CONNECT {"verbose":false}\r\nSUB bench 1\r\nPING\r\n'
        sides.append(
            PeerSide(
                "nats-server, core",
                nats.port,
                NATS,
                hello,
                lambda data: b"PUB bench %d\r\n%s\r\n" % (len(data), data),
            )
        )
    except NotInstalled as absent:
        missing.append(f"nats-server, core: not measured, {absent}")
    try:
        redis = Redis(bench.folder / "redis", "everysec")
        stack.callback(redis.close)
        sides.append(
            PeerSide(
                "redis pub/sub",
                redis.port,
                REDIS_CHANNEL,
                command(b"SUBSCRIBE", b"bench"),
                partial(command, b"PUBLISH", b"bench"),
            )
        )
        sides.append(
            PeerSide(
                "redis streams, blocked XREAD",
                redis.port,
                redis_stream("log"),
                command(b"XREAD", b"BLOCK", b"0", b"STREAMS", b"log", b"$"),
                partial(command, b"XADD", b"log", b"*", b"data"),
            )
        )
    except NotInstalled as absent:
        missing.append(f"redis pub/sub and streams: not measured, {absent}")
    try:
        server = Postgres(bench.folder / "postgres")
        stack.callback(server.close)
        server.run("CREATE TABLE log (seq bigint GENERATED ALWAYS AS IDENTITY, data json)")
        sides.append(
            PeerSide(
                POSTGRES,
                server.port,
                POSTGRES_WIRE,
                postgres.startup() + LISTENING,
                partial(postgres.call, b"notify"),
                LISTENERS_MAX,
            )
        )
    except NotInstalled as absent:
        missing.append(f"PostgreSQL: not measured, {absent}")
    return sides, missing


def fanout(bench: Bench) -> list[Figure]:
    """1, 10, 100 and 1,000 watchers, compared with the floor and the peers."""
    server, requests, proofs = prepare(bench)
    with Watchers() as client, ExitStack() as stack:
        # The floor sends the bytes that ours sent after a while, so that the seqs have as many
        # digits.
        open_streams(bench, client, server, 1)
        warm = min(1.0, bench.options.seconds)
        client.measure("ours", server.port, requests, OURS, proofs=proofs, expect=1, seconds=warm)
        client.close_group("ours")
        reply = server.call("POST", f"/v0/topics/{TOPIC}", append_body(0, 1))
        size = len(append_request(TOPIC, 0, 1))
        floor = bench.owned(
            start_fanout_floor(bench.folder, "floor", client.frame, raw_answer(reply), size)
        )
        greeted = Wire(ready=GREETING.decode(), end=client.end)
        peers, missing = start_peers(bench, stack)
        figures: list[Figure] = []
        for count in WATCHERS:
            sides: dict[str, Side] = {}
            open_streams(bench, client, server, count)
            sides["ours"] = partial(
                bench.costed,
                server,
                measured(bench, client, "ours", server.port, requests, OURS, proofs, count),
            )
            watch = bench.requests("floor-watchers", [b"GET / HTTP/1.1\r\n\r\n"] * count)
            client.open("floor", floor.port, watch, greeted)
            sides["floor"] = partial(
                bench.costed,
                floor,
                measured(bench, client, "floor", floor.port, requests, greeted, None, count),
            )
            able = [peer for peer in peers if count <= peer.most]
            for number, peer in enumerate(able):
                watch = bench.requests(f"peer-{number}", [peer.watcher] * count)
                client.open(peer.label, peer.port, watch, peer.wire)
                writes = bench.requests(
                    f"writes-{number}", [peer.write(data) for data in payloads()]
                )
                sides[peer.label] = measured(
                    bench, client, peer.label, peer.port, writes, peer.wire, proofs, count
                )
            taken = bench.interleave(sides)
            figures += compared(taken, count, [peer.label for peer in able], missing)
            for group in sides:
                client.close_group(group)
    return figures


def measured(
    bench: Bench,
    client: Watchers,
    group: str,
    port: int,
    requests: Path,
    wire: Wire,
    proofs: Path | None,
    count: int,
) -> Side:
    """Measure one side: a round of writes to `count` watchers."""
    return partial(
        client.measure,
        group,
        port,
        requests,
        wire,
        proofs=proofs,
        expect=count,
        seconds=bench.options.seconds,
    )


def compared(
    taken: dict[str, list[Sample]], count: int, peers: Sequence[str], missing: list[str]
) -> list[Figure]:
    """The two figures of one number of watchers: p50 (with its bar) and p99."""
    plural = f"{count:,} watchers" if count > 1 else "1 watcher"
    figures = []
    for name, limit in (("p50", LIMITS.get(count)), ("p99", None)):
        sides: list[Series] = [
            series(taken[side], f"{name}_ms", f"{side}, {name}")
            for side in ("ours", "floor", *peers)
        ]
        notes = [costs(side, taken[side]) for side in ("ours", "floor")] if name == "p50" else []
        figures.append(
            Figure(
                "fanout",
                f"write to last byte of {plural}, {name}",
                ratios(sides[0].values, sides[1].values, f"ours / floor, {name}"),
                None if limit is None else Bar("<=", limit),
                tuple(sides),
                (*notes, *missing),
            )
        )
    return figures


def wake_up(bench: Bench) -> list[Figure]:
    """A waiting diff: the time from the append that ends the wait to the diff's last byte."""
    server, requests, proofs = prepare(bench)
    server.expect("PUT", f"/v0/topics/{WAITED}", b'{"durability":"disk"}')
    appends = bench.requests("waited", [append_request(WAITED, n, 1) for n in range(DISTINCT)])
    wire = Wire(
        ready="",
        end="}}",
        again=long_poll_request(WAITED, "{position}").decode(),
        position=r'"next_from_seq":(\d+)',
        width=LONG_POLL_DIGITS,
        settle=http_request("GET", "/v0/health").decode(),
    )
    with Watchers() as client:
        first = bench.requests("long-poll", [long_poll_request(WAITED, "0")])
        client.open("wake", server.port, first, wire)
        open_streams(bench, client, server, 1)
        sides = {
            "wait_ms": measured(bench, client, "wake", server.port, appends, wire, proofs, 1),
            "stream": measured(bench, client, "ours", server.port, requests, OURS, proofs, 1),
        }
        taken = bench.interleave(
            {name: partial(bench.costed, server, side) for name, side in sides.items()}
        )
    waiting = taken["wait_ms"]
    return [
        Figure(
            "wake-up",
            "append to the whole answer of a diff that waited (wait_ms), p50",
            series(waiting, "p50_ms", "p50"),
            None,
            (
                series(waiting, "p99_ms", "p99"),
                series(waiting, "answer_p50_ms", "the append's own answer, p50"),
                series(taken["stream"], "p50_ms", "a stream beside it, p50"),
                series(taken["stream"], "p99_ms", "a stream beside it, p99"),
            ),
            ("the diff waits again, seen by an answer behind it, before the next append",),
        )
    ]
