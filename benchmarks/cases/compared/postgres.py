"""PostgreSQL on the same machine, if it is installed: INSERT … RETURNING, and a page by SELECT.

Both sides answer with the position of each stored record, and check that it is JSON. The load
generator uses PostgreSQL's protocol (`clients/postgres`): each connection prepares its statement
once, then sends Bind, Execute and Sync. There is no bar: the figures give context.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from benchmarks.bench import Bench, Side, series
from benchmarks.cases.against_floor import DIFF_RECORDS, costs
from benchmarks.clients import postgres as wire
from benchmarks.clients.requests import append_request, data_text, diff_request
from benchmarks.report.figures import Figure, ratios
from benchmarks.servers.peers import Postgres, postgres_program
from benchmarks.servers.process import ServerProcess

CONNECTIONS = (1, 16, 64)
# The durability of each connection, and our class with the same promise.
CLASSES = {"off": "disk", "on": "fsync"}
TABLE = (
    "CREATE TABLE log (seq bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, "
    "at timestamptz NOT NULL DEFAULT now(), tag text, data json NOT NULL)"
)
INSERT_ONE = "INSERT INTO log (tag, data) VALUES ($1, $2) RETURNING seq"
INSERT = (
    "INSERT INTO log (tag, data) SELECT tag, data FROM unnest($1, $2) AS one (tag, data) "
    "RETURNING seq"
)
PAGE = "SELECT seq, at, tag, data FROM log WHERE seq > $1 ORDER BY seq LIMIT 1000"
_TEXTS, _JSONS = 1009, 199  # the numbers of the array types


def plural(connections: int) -> str:
    """The number of connections in words."""
    return f"{connections} connection{'' if connections == 1 else 's'}"


def append_name(commit: str, count: int, connections: int) -> str:
    """The name of a figure about appends; the overview finds it by this name."""
    what = "INSERT" if count == 1 else f"INSERT of {count}"
    return (
        f"class {CLASSES[commit]} beside {what}, synchronous_commit {commit}, {plural(connections)}"
    )


def page_name(pages: int) -> str:
    """The name of a figure about reads: of one page, or of many pages in sequence."""
    walking = "" if pages == 1 else f", walking through {pages * DIFF_RECORDS:,}"
    return f"diff of {DIFF_RECORDS:,} records beside SELECT{walking}, 1 connection"


def insert(first: int, count: int) -> bytes:
    """The request that stores records from `first` on."""
    tags = [f"t-{number % 1000:03d}" for number in range(first, first + count)]
    data = [data_text(first + index, tag) for index, tag in enumerate(tags)]
    if count == 1:
        return wire.call(b"insert", tags[0].encode(), data[0], binary=True)
    return wire.call(
        b"insert",
        wire.array(wire.TEXT, [tag.encode() for tag in tags]),
        wire.array(wire.JSON, data),
        binary=True,
    )


def greeting(commit: str, count: int) -> bytes:
    """The first bytes of an inserting connection."""
    statement = (
        wire.parse(b"insert", INSERT_ONE, wire.TEXT, wire.JSON)
        if count == 1
        else wire.parse(b"insert", INSERT, _TEXTS, _JSONS)
    )
    return wire.greeting({"synchronous_commit": commit}, statement)


def postgres(bench: Bench) -> list[Figure]:
    """Appends of single records and of batches at equal durability, and reads of pages of 1,000
    records.
    """
    postgres_program()
    server = bench.start()
    peer = Postgres(bench.folder / "postgres")
    try:
        figures: list[Figure] = []
        for commit, durability in CLASSES.items():
            config = b'{"durability":"%s"}' % durability.encode()
            server.expect("PUT", f"/v0/topics/{durability}", config)
            for count in (1, 100):
                peer.run(f"DROP TABLE IF EXISTS log; {TABLE}")
                figures += appends(bench, server, peer, commit, count)
        return figures + reads(bench, server, peer)
    finally:
        peer.close()


def appends(
    bench: Bench, server: ServerProcess, peer: Postgres, commit: str, count: int
) -> list[Figure]:
    """Interleaved rounds of one batch size, with 1, 16 and 64 connections."""
    durability = CLASSES[commit]
    firsts = range(0, 100 * count, count)
    mine = bench.requests(
        f"ours-{commit}-{count}", [append_request(durability, n, count) for n in firsts]
    )
    theirs = bench.requests(f"insert-{commit}-{count}", [insert(n, count) for n in firsts])
    return [
        compared(
            bench,
            append_name(commit, count, connections),
            partial(bench.load, server, mine, connections=connections),
            peer_side(
                bench,
                peer,
                theirs,
                connections,
                greeting(commit, count),
                wire.ending(b"INSERT 0 %d" % count),
            ),
            f"PostgreSQL, synchronous_commit {commit}",
        )
        for connections in CONNECTIONS
    ]


def reads(bench: Bench, server: ServerProcess, peer: Postgres) -> list[Figure]:
    """Pages of 1,000 records: one page repeatedly, and all pages in sequence, like a reader that
    catches up.
    """
    pages = bench.options.scaled(100, 5)
    firsts = range(0, pages * DIFF_RECORDS, 100)
    fill = bench.requests("fill", [append_request("pages", first, 100) for first in firsts])
    bench.fill(server, fill, len(firsts), connections=1)
    peer.run(f"DROP TABLE log; {TABLE}")
    load(bench, peer, [insert(first, 100) for first in firsts])
    peer.run("VACUUM ANALYZE log")
    prepared = wire.greeting({}, wire.parse(b"page", PAGE, wire.INT8))
    figures = []
    for count in (1, pages):
        starts = range(0, count * DIFF_RECORDS, DIFF_RECORDS)
        mine = bench.requests(f"diff-{count}", [diff_request("pages", start) for start in starts])
        theirs = bench.requests(
            f"select-{count}", [wire.call(b"page", b"%d" % start) for start in starts]
        )
        whole = wire.ending(b"SELECT %d" % DIFF_RECORDS)
        figures.append(
            compared(
                bench,
                page_name(count),
                partial(bench.load, server, mine),
                peer_side(bench, peer, theirs, 1, prepared, whole),
                "PostgreSQL",
            )
        )
    return figures


def load(bench: Bench, peer: Postgres, sent: Sequence[bytes]) -> None:
    """Send every request once, in order."""
    bench.loader.run(
        peer.port,
        bench.requests("fill-postgres", sent),
        connections=1,
        seconds=600,
        count=len(sent),
        from_start=True,
        greeting=greeting("on", 100).decode("latin-1"),
        ending=wire.ending(b"INSERT 0 100").decode("latin-1"),
    )


def peer_side(
    bench: Bench, peer: Postgres, requests: Path, connections: int, first: bytes, ending: bytes
) -> Side:
    """One round of load on PostgreSQL."""
    return partial(
        bench.costed,
        peer,
        partial(
            bench.loader.run,
            peer.port,
            requests,
            connections=connections,
            seconds=bench.options.seconds,
            greeting=first.decode("latin-1"),
            ending=ending.decode("latin-1"),
        ),
    )


def compared(bench: Bench, name: str, mine: Side, theirs: Side, label: str) -> Figure:
    """Interleaved rounds of both sides as one figure."""
    taken = bench.interleave({"ours": mine, "PostgreSQL": theirs})
    ours = series(taken["ours"], "rate", "ours")
    other = series(taken["PostgreSQL"], "rate", label)
    return Figure(
        "postgres",
        name,
        ratios(ours.values, other.values, "ours / PostgreSQL, requests/s"),
        None,
        (
            ours,
            other,
            series(taken["ours"], "p50_ms", "ours, p50"),
            series(taken["PostgreSQL"], "p50_ms", f"{label}, p50"),
            series(taken["ours"], "p99_ms", "ours, p99"),
            series(taken["PostgreSQL"], "p99_ms", f"{label}, p99"),
        ),
        tuple(costs(side, samples) for side, samples in taken.items()),
    )
