"""Single appends on 1 to 2,000 connections at once, over /v0 and as Durable Streams.

Two floors get the same requests under /v0 in the same rounds: what they pay more for many
connections is not of our making.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from benchmarks.bench import Bench, Side
from benchmarks.cases.scaling.tools import DISTINCT, drawn, loaded, sizes_of
from benchmarks.cases.watch.fanout import payloads
from benchmarks.cases.watch.streams import JSON, post
from benchmarks.clients.requests import append_body, append_request
from benchmarks.report.figures import Figure
from benchmarks.report.scaling import BARE, CONNECTIONS, SOCKETS, V0, V1, Curve
from benchmarks.servers.fanout_floor import start_fanout_floor
from benchmarks.servers.process import Reply, ServerProcess
from benchmarks.servers.server import STILL

WARM_CONNECTIONS = 16


def connections(bench: Bench) -> list[Figure]:
    """The curves of both APIs and both floors, measured in the same rounds.

    Each API appends to a topic of its own.
    """
    server = bench.start("connections", STILL)
    for topic in ("v0", "v1"):
        server.expect("PUT", f"/v0/topics/{topic}", b'{"durability":"disk"}')
    appends = [append_request("v0", number, 1) for number in range(DISTINCT)]
    to_v0 = bench.requests("v0", appends)
    to_v1 = bench.requests("v1-stream", [post("/v1/stream/v1", JSON, data) for data in payloads()])
    # The floors' seqs have as many digits as the server's seqs after a while.
    loaded(bench, server, to_v0, connections=WARM_CONNECTIONS)
    reply = server.call("POST", "/v0/topics/v0", append_body(0, 1))
    (size_of_one,) = {len(request) for request in appends}
    sockets = start_fanout_floor(bench.folder, "sockets", b"", wire_bytes(reply), size_of_one)
    served: dict[Curve, tuple[ServerProcess, Path]] = {
        V0: (server, to_v0),
        V1: (server, to_v1),
        BARE: (bench.start_floor("connections", reply), to_v0),
        SOCKETS: (bench.owned(sockets), to_v0),
    }
    sizes = sizes_of(bench, CONNECTIONS)
    sides: dict[str, Side] = {
        f"{curve.name} {size}": partial(loaded, bench, process, path, connections=size)
        for curve, (process, path) in served.items()
        for size in sizes
    }
    taken = bench.interleave(sides)
    return [
        drawn(CONNECTIONS, curve, {n: taken[f"{curve.name} {n}"] for n in sizes})
        for curve in served
    ]


def wire_bytes(reply: Reply) -> bytes:
    """The bytes of an answer, as a server sends them."""
    lines = [f"HTTP/1.1 {reply.status} OK", *(f"{name}: {text}" for name, text in reply.headers)]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + reply.body
