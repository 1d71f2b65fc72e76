"""Single appends on 1 to 2,000 connections at once, over /v0 and as Durable Streams."""

from __future__ import annotations

from functools import partial

from benchmarks.bench import Bench, Side
from benchmarks.cases.scaling.tools import DISTINCT, drawn, loaded, sizes_of
from benchmarks.cases.watch.fanout import payloads
from benchmarks.cases.watch.streams import JSON, post
from benchmarks.clients.requests import append_request
from benchmarks.report.figures import Figure
from benchmarks.report.scaling import CONNECTIONS, V0, V1
from benchmarks.servers.server import STILL


def connections(bench: Bench) -> list[Figure]:
    """The curves of both APIs, measured in the same rounds, each to a topic of its own."""
    server = bench.start("connections", STILL)
    for topic in ("v0", "v1"):
        server.expect("PUT", f"/v0/topics/{topic}", b'{"durability":"disk"}')
    sent = {
        V0: [append_request("v0", number, 1) for number in range(DISTINCT)],
        V1: [post("/v1/stream/v1", JSON, data) for data in payloads()],
    }
    sizes = sizes_of(bench, CONNECTIONS)
    sides: dict[str, Side] = {}
    for curve, requests in sent.items():
        path = bench.requests(curve.name.partition(" ")[0].strip("/").replace("/", "-"), requests)
        for size in sizes:
            sides[f"{curve.name} {size}"] = partial(loaded, bench, server, path, connections=size)
    taken = bench.interleave(sides)
    return [
        drawn(CONNECTIONS, curve, {n: taken[f"{curve.name} {n}"] for n in sizes}) for curve in sent
    ]
