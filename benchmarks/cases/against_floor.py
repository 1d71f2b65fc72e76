"""Appends and reads compared with the floor: requests a second as a share of bare HTTP's rate."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from benchmarks.bench import Bench, series
from benchmarks.clients.loader import BenchmarkError, Sample
from benchmarks.clients.requests import append_body, append_request, diff_request, http_request
from benchmarks.report.figures import Bar, Figure, Series, ratios
from benchmarks.servers.process import Reply, ServerProcess
from benchmarks.servers.server import STILL

TOPIC = "bench"
CONNECTIONS = (1, 16)
DIFF_RECORDS = 1000
TAIL_RECORDS = 2000
SEVERAL = 10
# The least share of the floor's rate, by the number of connections.
Limits = Mapping[int, float]
NO_LIMITS: Limits = {}
STORING = "storing floor"


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
    limits: Limits,
    *,
    with_storing_floor: bool = False,
) -> list[Figure]:
    """Interleaved rounds of ours and the floor, with 1 and, unless steady, with 16 connections.

    `with_storing_floor`: also of a storing floor. Its rate shows which part of the distance to the
    floor no store can avoid on this machine.
    """
    servers = {"ours": server, "floor": bench.start_floor(case, reply)}
    if with_storing_floor:
        servers[STORING] = bench.start_floor(f"{case}-storing", reply, stores=True)
    figures = []
    for connections in CONNECTIONS[:1] if bench.options.steady else CONNECTIONS:
        taken = bench.interleave(
            {
                name: partial(bench.load, each, requests, connections=connections)
                for name, each in servers.items()
            }
        )
        beside: tuple[Series, ...] = ()
        notes: tuple[str, ...] = ()
        ours = series(taken["ours"], "rate", "ours")
        bare = series(taken["floor"], "rate", "floor")
        if with_storing_floor:
            storing = series(taken[STORING], "rate", STORING)
            beside = (storing, ratios(storing.values, bare.values, f"{STORING} / floor"))
            notes = (costs(STORING, taken[STORING]),)
        plural = "s" if connections > 1 else ""
        limit = limits.get(connections)
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
                    *beside,
                ),
                (costs("ours", taken["ours"]), costs("floor", taken["floor"]), *notes),
            )
        )
    for name, each in servers.items():
        if name != "ours":
            each.stop()
    return figures


def appends(bench: Bench, case: str, count: int, limits: Limits) -> list[Figure]:
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
    seqs = json.loads(reply.body).get("seqs", ()) if reply.status == 200 else ()
    if len(seqs) != count:
        raise BenchmarkError(f"an append of {count} has {len(seqs)} seqs: {reply.body[:300]!r}")
    what = "append of one record" if count == 1 else f"append of {count} records"
    # Most of a large append is work of the memory and of files: state how much.
    is_large = count > 1
    return compare(bench, case, what, server, requests, reply, limits, with_storing_floor=is_large)


def append_1(bench: Bench) -> list[Figure]:
    """Single appends, class disk, 1 and 16 connections."""
    return appends(bench, "append-1", 1, {1: 0.75, 16: 0.6})


def append_100(bench: Bench) -> list[Figure]:
    """Appends of 100 records of 200 B, class disk."""
    return appends(bench, "append-100", 100, {1: 0.45, 16: 0.25})


def diff_1000(bench: Bench) -> list[Figure]:
    """Reads of 1,000 unsealed records: one page repeatedly."""
    server = bench.start(settings=STILL)
    fill_topic(bench, server, TOPIC, DIFF_RECORDS)
    once = bench.requests("diff", [diff_request(TOPIC, 0)])
    reply = page_of(server, TOPIC, 0, DIFF_RECORDS)
    limits = dict.fromkeys(CONNECTIONS, 0.8)
    return compare(bench, "diff-1000", "diff of 1,000 records", server, once, reply, limits)


def diff_sealed(bench: Bench) -> list[Figure]:
    """Pages of sealed records only: a walk through all of them, and one page repeatedly."""
    server = bench.start(settings={"TOPICS_SEGMENT_MAX_EVENTS": "20000"})
    # More than the cache of blocks holds, so that a walk reads each page from the files.
    pages = bench.options.scaled(400, 5)
    records = pages * DIFF_RECORDS
    fill_topic(bench, server, "walk", records)
    seal(server, "walk")
    figures: list[Figure] = []
    limits = dict.fromkeys(CONNECTIONS, 0.25)
    middle = pages // 2
    for what, walked in (
        (f"diff of 1,000 sealed records walking through {records:,}", range(pages)),
        ("diff of 1,000 sealed records, one page again and again", range(middle, middle + 1)),
    ):
        requests = bench.requests(
            f"walk-{len(walked)}", [diff_request("walk", page * DIFF_RECORDS) for page in walked]
        )
        reply = page_of(server, "walk", middle * DIFF_RECORDS, DIFF_RECORDS)
        figures += compare(bench, "diff-sealed", what, server, requests, reply, limits)
    return figures


def tail_read(bench: Bench) -> list[Figure]:
    """Reads of the newest record: a diff from the seq before it. Stated: one that would wait."""
    server = bench.start(settings=STILL)
    fill_topic(bench, server, TOPIC, TAIL_RECORDS)
    last = TAIL_RECORDS - 1
    limits = dict.fromkeys(CONNECTIONS, 0.8)
    plain = bench.requests("tail", [diff_request(TOPIC, last, 100)])
    reply = page_of(server, TOPIC, last, 1)
    figures = compare(bench, "tail-read", "tail read", server, plain, reply, limits)
    body = b'{"from_seq":%d,"limit":100,"wait_ms":30000}' % last
    waiting = bench.requests("waiting", [http_request("POST", f"/v0/topics/{TOPIC}/diff", body)])
    what = "tail read with wait_ms, the record is there"
    return figures + compare(bench, "tail-read", what, server, waiting, reply, NO_LIMITS)


def fill_topic(bench: Bench, server: ServerProcess, topic: str, records: int) -> None:
    """Append records in batches of 100, in order."""
    fill = [append_request(topic, first, 100) for first in range(0, records, 100)]
    bench.fill(server, bench.requests(f"fill-{topic}", fill), len(fill), connections=1)


def seal(server: ServerProcess, topic: str) -> None:
    """Seal all records of a topic, so that none of them is in its tail in memory."""
    answer = server.expect("POST", "/v0/admin/seal", b'{"topics":["%s"]}' % topic.encode())
    left = json.loads(answer)["unsealed_records"]
    if left:
        raise BenchmarkError(f"{left} records of {topic} are not sealed")


def page_of(server: ServerProcess, topic: str, from_seq: int, records: int) -> Reply:
    """The answer to a diff, which must have this many records."""
    reply = server.call(
        "POST", f"/v0/topics/{topic}/diff", b'{"from_seq":%d,"limit":1000}' % from_seq
    )
    found = reply.body.count(b'"$seq"')
    if found != records:
        raise BenchmarkError(f"a diff from {from_seq} gave {found} records instead of {records}")
    return reply
