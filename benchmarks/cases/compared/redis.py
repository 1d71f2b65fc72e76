"""Redis streams on the same machine, if `redis-server` is installed: XADD, single and pipelined.

Redis promises other things (no HTTP, no tags, no answers checked per record), so there is no bar:
the figures give context.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from benchmarks.bench import Bench, series
from benchmarks.clients.loader import Sample
from benchmarks.clients.requests import append_request, data_text
from benchmarks.report.figures import Figure, ratios
from benchmarks.servers.peers import Redis, command, program
from benchmarks.servers.process import ServerProcess

CONNECTIONS = (1, 16)


def xadd(numbers: Iterable[int]) -> bytes:
    """The bytes of pipelined XADDs, one for each number."""
    return b"".join(
        command(b"XADD", b"log", b"*", b"data", data_text(n, "t-000"), b"tag", b"t-000")
        for n in numbers
    )


def redis(bench: Bench) -> list[Figure]:
    """XADD compared with our appends: everysec with class disk, always with class fsync."""
    program("redis-server")
    server = bench.start()
    figures: list[Figure] = []
    for fsync, durability in (("everysec", "disk"), ("always", "fsync")):
        server.expect(
            "PUT", f"/v0/topics/{durability}", b'{"durability":"%s"}' % durability.encode()
        )
        other = Redis(bench.folder / f"redis-{fsync}", fsync)
        try:
            for count in (1, 100):
                figures += compare(bench, server, other, fsync, durability, count)
        finally:
            other.close()
    return figures


def compare(
    bench: Bench, server: ServerProcess, other: Redis, fsync: str, durability: str, count: int
) -> list[Figure]:
    """Interleaved rounds of one batch size, with 1 and with 16 connections."""
    firsts = range(0, 100 * count, count)
    mine = bench.requests(
        f"ours-{durability}-{count}", [append_request(durability, n, count) for n in firsts]
    )
    theirs = bench.requests(f"xadd-{fsync}-{count}", [xadd(range(n, n + count)) for n in firsts])
    figures = []
    for connections in CONNECTIONS:

        def redis_side(connections: int = connections) -> Sample:
            return bench.loader.run(
                other.port,
                theirs,
                connections=connections,
                seconds=bench.options.seconds,
                replies=count,
            )

        taken = bench.interleave(
            {
                "ours": partial(bench.load, server, mine, connections=connections),
                "redis": redis_side,
            }
        )
        ours = series(taken["ours"], "rate", f"ours, class {durability}")
        redis_rate = series(taken["redis"], "rate", f"redis, appendfsync {fsync}")
        what = "XADD" if count == 1 else f"{count} XADD piped"
        figures.append(
            Figure(
                "redis",
                f"class {durability} beside {what}, appendfsync {fsync}, {connections} connections",
                ratios(ours.values, redis_rate.values, "ours / redis, requests/s"),
                None,
                (ours, redis_rate),
            )
        )
    return figures
