"""Appends and reads compared with the floor: requests a second as a share of bare HTTP's rate."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from benchmarks.bench import Bench, series
from benchmarks.clients.loader import BenchmarkError, Sample
from benchmarks.clients.requests import append_body, append_request, diff_request
from benchmarks.report.figures import Bar, Figure, ratios
from benchmarks.servers.process import Reply, ServerProcess
from benchmarks.servers.server import STILL

TOPIC = "bench"
CONNECTIONS = (1, 16)
DIFF_RECORDS = 1000
SEVERAL = 10


def costs(label: str, samples: Sequence[Sample]) -> str:
    """CPU time per request of a server and of the generator, as a line of the report."""
    server = statistics.median(sample.server_cpu_us for sample in samples)
    generator = statistics.median(sample.generator_cpu_us for sample in samples)
    return f"CPU a request, {label}: server {server:.0f} us, load generator {generator:.0f} us"


def compare(
    bench: Bench,
    case: str,
    what: str,
    server: ServerProcess,
    requests: Path,
    reply: Reply,
    limit: float | None,
) -> list[Figure]:
    """Interleaved rounds of ours and the floor, with 1 and, unless steady, with 16 connections."""
    floor = bench.start_floor(case, reply)
    figures = []
    for connections in CONNECTIONS[:1] if bench.options.steady else CONNECTIONS:
        taken = bench.interleave(
            {
                "ours": partial(bench.load, server, requests, connections=connections),
                "floor": partial(bench.load, floor, requests, connections=connections),
            }
        )
        ours = series(taken["ours"], "rate", "ours")
        bare = series(taken["floor"], "rate", "floor")
        plural = "s" if connections > 1 else ""
        figures.append(
            Figure(
                case,
                f"{what}, {connections} connection{plural}",
                ratios(ours.values, bare.values, "ours / floor, requests/s"),
                None if limit is None else Bar(">=", limit),
                (
                    ours,
                    bare,
                    series(taken["ours"], "p50_ms", "ours, p50"),
                    series(taken["ours"], "p99_ms", "ours, p99"),
                    series(taken["floor"], "p99_ms", "floor, p99"),
                ),
                (costs("ours", taken["ours"]), costs("floor", taken["floor"])),
            )
        )
    floor.stop()
    return figures


def appends(bench: Bench, case: str, count: int, limit: float) -> list[Figure]:
    """Appends of `count` records each, class disk; other cases measure sealing and checkpoints."""
    server = bench.start(settings=STILL)
    # Batches fill the largest possible segment in three seconds: use several topics, so that none
    # is sealed.
    topics = [TOPIC] if count == 1 else [f"{TOPIC}-{number}" for number in range(SEVERAL)]
    for topic in topics:
        server.expect("PUT", f"/v0/topics/{topic}", b'{"durability":"disk"}')
    # A thousand different requests, so that no cache of the server profits from a repeated body.
    firsts = range(0, 1000 * count, count) if count == 1 else range(0, 100 * count, count)
    requests = bench.requests(
        case,
        [
            append_request(topics[number % len(topics)], first, count)
            for number, first in enumerate(firsts)
        ],
    )
    # The floor's seqs have as many digits as the server's seqs after a while.
    bench.load(server, requests, connections=16, seconds=min(1.0, bench.options.seconds))
    reply = server.call("POST", f"/v0/topics/{topics[0]}", append_body(0, count))
    what = "append of one record" if count == 1 else f"append of {count} records"
    return compare(bench, case, what, server, requests, reply, limit)


def append_1(bench: Bench) -> list[Figure]:
    """Single appends, class disk, 1 and 16 connections."""
    return appends(bench, "append-1", 1, 0.45)


def append_100(bench: Bench) -> list[Figure]:
    """Appends of 100 records of 200 B, class disk."""
    return appends(bench, "append-100", 100, 0.35)


def diff_1000(bench: Bench) -> list[Figure]:
    """Reads of 1,000 records: one page repeatedly, and walks through sealed pages."""
    pages = bench.options.scaled(200, 5)
    server = bench.start(settings={"TOPICS_SEGMENT_MAX_EVENTS": "20000"})
    filled = {TOPIC: DIFF_RECORDS}
    if not bench.options.steady:
        filled["walk"] = pages * DIFF_RECORDS
    for topic, total in filled.items():
        fill = [append_request(topic, first, 100) for first in range(0, total, 100)]
        bench.fill(server, bench.requests(f"fill-{topic}", fill), len(fill), connections=1)
    reply = server.call("POST", f"/v0/topics/{TOPIC}/diff", b'{"from_seq":0,"limit":1000}')
    if reply.body.count(b'"$seq"') != DIFF_RECORDS:
        raise BenchmarkError(f"a diff of 1,000 gave {reply.body.count(b'$seq')} records")
    once = bench.requests("diff", [diff_request(TOPIC, 0)])
    figures = compare(bench, "diff-1000", "diff of 1,000 records", server, once, reply, 0.5)
    if bench.options.steady:
        return figures
    walk = [diff_request("walk", page * DIFF_RECORDS) for page in range(pages)]
    middle = pages // 2 * DIFF_RECORDS
    reply = server.call("POST", "/v0/topics/walk/diff", b'{"from_seq":%d,"limit":1000}' % middle)
    what = f"diff of 1,000 records walking through {pages * DIFF_RECORDS:,}, most of them sealed"
    walked = bench.requests("walk", walk)
    figures += compare(bench, "diff-1000", what, server, walked, reply, None)
    return figures
