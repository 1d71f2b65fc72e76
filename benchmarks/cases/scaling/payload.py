"""Appends of one record of 100 B to 1 MiB, and reading one such record back."""

from __future__ import annotations

from functools import partial

from benchmarks.bench import Bench, Side
from benchmarks.cases.scaling.tools import DISTINCT, loaded, measured, sizes_of
from benchmarks.cases.watch.streams import JSON, message
from benchmarks.clients.requests import diff_request, http_request
from benchmarks.report.figures import Figure
from benchmarks.report.scaling import PAYLOAD, PAYLOAD_APPEND, PAYLOAD_READ
from benchmarks.servers.server import STILL

# Of the distinct payloads of one size, and of one slice of appends: the records stay in memory.
SLICE_BYTES = 32 << 20


def payload(bench: Bench) -> list[Figure]:
    """The curves of appends and reads."""
    appends: dict[int, Side] = {}
    reads: dict[int, Side] = {}
    for size in sizes_of(bench, PAYLOAD):
        # A server for each size: large appends put it under pressure for a second.
        server = bench.start(f"payload-{size}", STILL)
        topic = "payload"
        server.expect("PUT", f"/v0/topics/{topic}", b'{"durability":"disk"}')
        several = min(DISTINCT, SLICE_BYTES // size)
        writes = bench.requests(
            f"write-{size}",
            [
                http_request(
                    "POST",
                    f"/v0/topics/{topic}",
                    b'{"records":[{"data":%b}]}' % message(JSON, number, size),
                )
                for number in range(several)
            ],
        )
        bench.fill(server, writes, several, connections=1)
        pages = bench.requests(
            f"read-{size}", [diff_request(topic, seq, 1) for seq in range(several)]
        )
        appends[size] = partial(loaded, bench, server, writes, count=SLICE_BYTES // size)
        reads[size] = partial(loaded, bench, server, pages)
    return [
        measured(bench, PAYLOAD, PAYLOAD_APPEND, appends),
        measured(bench, PAYLOAD, PAYLOAD_READ, reads),
    ]
