"""Where the time of a single append goes: servers that do more of its work, one after the other.

Every side gets the same request and sends an answer of the same bytes, except for the peers, which
speak their own protocol:

1. a bare socket: reads so many bytes, sends the answer (`servers/fanout_floor` without watchers);
2. our server, class `ephemeral`: HTTP, checks, decoding, the record in memory;
3. class `disk`: also writes the journal;
4. class `fsync`: also syncs it.

The difference between two neighbours is the cost of one layer, so the microseconds of an append add
up. Bare HTTP (uvicorn, `servers/floor`), Redis and PostgreSQL run beside them: the peers' lightest
commands (`ECHO`, `SELECT 1`), which show their protocol and socket alone, and their appends. With
one connection the figures are the client's p50, with 16 the server's processor time for a request.
There is no bar: the figures explain others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from benchmarks.bench import Bench, Side
from benchmarks.cases.compared.postgres import TABLE, greeting, insert, peer_side
from benchmarks.cases.compared.redis import xadd
from benchmarks.cases.syncs import raw_side
from benchmarks.cases.watch.fanout import raw_answer
from benchmarks.clients import postgres as wire
from benchmarks.clients.loader import Sample
from benchmarks.clients.requests import append_body, append_request
from benchmarks.report.figures import Figure, Series
from benchmarks.servers.fanout_floor import start_fanout_floor
from benchmarks.servers.peers import NotInstalled, Postgres, Redis, command
from benchmarks.servers.process import ServerProcess
from benchmarks.servers.server import STILL

# Makes a side of this many connections.
MakeSide = Callable[[int], Side]
CASE = "layers"
CONNECTIONS = (1, 16)
# Each layer: its name, and the sides with it and without it.
LAYERS = (
    ("the client, the kernel, a bare socket", "bare socket", ""),
    ("HTTP and the store: parsing, checks, the record in memory", "class ephemeral", "bare socket"),
    ("the journal: entry, checksum, write", "class disk", "class ephemeral"),
    ("the sync, by the journal's thread", "class fsync", "class disk"),
    ("bare HTTP, uvicorn", "bare HTTP", ""),
    ("PostgreSQL, SELECT 1", "SELECT 1", ""),
    ("PostgreSQL, INSERT, synchronous_commit off", "INSERT off", ""),
    ("PostgreSQL, INSERT, synchronous_commit on", "INSERT on", ""),
    ("Redis, ECHO", "ECHO", ""),
    ("Redis, XADD, appendfsync everysec", "XADD everysec", ""),
    ("Redis, XADD, appendfsync always", "XADD always", ""),
    ("the disk: write + fdatasync of one request's bytes", "raw disk", ""),
)


def layers(bench: Bench) -> list[Figure]:
    """The layers of a single append, with 1 connection and with 16."""
    with ExitStack() as stack:
        sides = ours(bench) | redis_sides(bench, stack) | postgres_sides(bench, stack)
        figures: list[Figure] = []
        for connections in CONNECTIONS:
            made = {name: side(connections) for name, side in sides.items()}
            if connections == 1:
                made["raw disk"] = partial(raw_side, bench, len(append_request("t", 0, 1)))
            figures += figures_of(bench.interleave(made), connections)
        return figures


def figures_of(taken: Mapping[str, Sequence[Sample]], connections: int) -> list[Figure]:
    """One figure for each layer whose sides were measured: its cost, and the side's total."""
    figures = []
    for what, side, without in LAYERS:
        if side not in taken or (without and without not in taken):
            continue
        totals = values(taken[side], connections)
        before = values(taken[without], connections) if without else (0.0,) * len(totals)
        cost = tuple(a - b for a, b in zip(totals, before, strict=True))
        unit = "p50" if connections == 1 else "processor time of the server"
        figures.append(
            Figure(
                CASE,
                f"{what}, {connections} connection{'' if connections == 1 else 's'}",
                Series(f"added to {without}, {unit}" if without else unit, "us", cost),
                None,
                (Series(f"{side}, {unit}", "us", totals),),
            )
        )
    return figures


def values(samples: Sequence[Sample], connections: int) -> tuple[float, ...]:
    """Microseconds a request: of the client with one connection, of the server with more."""
    if connections == 1:
        return tuple(sample.p50_ms * 1000 for sample in samples)
    return tuple(sample.server_cpu_us for sample in samples)


def on(bench: Bench, server: ServerProcess, requests: Path) -> MakeSide:
    """Load on a server that speaks HTTP, or on the bare socket."""
    return lambda connections: partial(bench.load, server, requests, connections=connections)


def on_redis(bench: Bench, peer: Redis, requests: Path) -> MakeSide:
    """Load on Redis: one reply a request."""

    def side(connections: int) -> Sample:
        seconds = bench.options.seconds
        return bench.loader.run(
            peer.port, requests, connections=connections, seconds=seconds, replies=1
        )

    return lambda connections: partial(bench.costed, peer, partial(side, connections))


def on_postgres(
    bench: Bench, peer: Postgres, requests: Path, first: bytes, ending: bytes
) -> MakeSide:
    """Load on PostgreSQL."""
    return lambda connections: peer_side(bench, peer, requests, connections, first, ending)


def ours(bench: Bench) -> dict[str, MakeSide]:
    """The bare servers and our server's classes."""
    server = bench.start(settings=STILL)
    sides: dict[str, MakeSide] = {}
    for durability in ("ephemeral", "disk", "fsync"):
        server.expect(
            "PUT", f"/v0/topics/{durability}", b'{"durability":"%s"}' % durability.encode()
        )
        requests = bench.requests(
            durability, [append_request(durability, n, 1) for n in range(1000)]
        )
        sides[f"class {durability}"] = on(bench, server, requests)
    # The floors' seqs have as many digits as the server's seqs after a while.
    bench.load(server, bench.folder / "disk.requests", connections=16, seconds=0.3)
    reply = server.call("POST", "/v0/topics/disk", append_body(0, 1))
    # A bare socket counts bytes, so all its requests have one length.
    requests = bench.requests("bare", [append_request("disk", 0, 1)])
    size = len(append_request("disk", 0, 1))
    socket = bench.owned(start_fanout_floor(bench.folder, "socket", b"", raw_answer(reply), size))
    floor = bench.start_floor(CASE, reply)
    return {
        "bare socket": on(bench, socket, requests),
        "bare HTTP": on(bench, floor, requests),
        **sides,
    }


def redis_sides(bench: Bench, stack: ExitStack) -> dict[str, MakeSide]:
    """`ECHO` and `XADD`; nothing if Redis is not installed."""
    sides: dict[str, MakeSide] = {}
    echo = bench.requests("echo", [command(b"ECHO", b"x")])
    added = bench.requests("xadd", [xadd([n]) for n in range(1000)])
    for fsync in ("everysec", "always"):
        try:
            peer = Redis(bench.folder / f"redis-{fsync}", fsync)
        except NotInstalled:
            return {}
        stack.callback(peer.close)
        sides[f"XADD {fsync}"] = on_redis(bench, peer, added)
        sides.setdefault("ECHO", on_redis(bench, peer, echo))
    return sides


def postgres_sides(bench: Bench, stack: ExitStack) -> dict[str, MakeSide]:
    """`SELECT 1` and `INSERT`; nothing if PostgreSQL is not installed."""
    try:
        peer = Postgres(bench.folder / "postgres")
    except NotInstalled:
        return {}
    stack.callback(peer.close)
    peer.run(TABLE)
    one = bench.requests("select", [wire.call(b"one")])
    ready = wire.greeting({}, wire.parse(b"one", "SELECT 1"))
    rows = bench.requests("insert", [insert(n, 1) for n in range(1000)])
    sides = {"SELECT 1": on_postgres(bench, peer, one, ready, wire.ending(b"SELECT 1"))}
    for commit in ("off", "on"):
        first, ending = greeting(commit, 1), wire.ending(b"INSERT 0 1")
        sides[f"INSERT {commit}"] = on_postgres(bench, peer, rows, first, ending)
    return sides
