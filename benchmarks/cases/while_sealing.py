"""Every measured request on a quiet server, and during sealing and checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.bench import Bench, series, settle
from benchmarks.clients.loader import BenchmarkError, Loader, Sample
from benchmarks.clients.requests import append_request, diff_request
from benchmarks.report.figures import Bar, Figure, ratios
from benchmarks.servers.process import ServerProcess
from benchmarks.servers.server import STILL, newest_snapshot_ns

LIMIT = 3.0
# A light load that causes a segment at least twice a second and a checkpoint four times a second.
# So the case measures sealing and checkpoints, and not a second writer.
SIDE_RATE = 20  # appends of 100 records a second
CHECKPOINTS = {"TOPICS_CHECKPOINT_INTERVAL_MS": "250"}
SMALL_SEGMENTS = CHECKPOINTS | {"TOPICS_SEGMENT_MAX_EVENTS": "1000"}
# Appends of 100 records would otherwise seal hundreds of segments a second.
LARGER_SEGMENTS = CHECKPOINTS | {"TOPICS_SEGMENT_MAX_EVENTS": "20000"}
OTHER_TOPICS = 1000


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of request: its name, its file, its connections, and which server is busy."""

    name: str
    requests: Path
    connections: int = 1
    batches: bool = False


def prepared(bench: Bench, name: str, settings: dict[str, str]) -> ServerProcess:
    """A server with the topics of all kinds of requests, and more topics for checkpoints."""
    server = bench.start(name, settings)
    server.expect("PUT", "/v0/topics/fast", b'{"durability":"disk"}')
    server.expect("PUT", "/v0/topics/sure", b'{"durability":"fsync"}')
    pages = [append_request("page", first, 100) for first in range(0, 1000, 100)]
    bench.fill(server, bench.requests("pages", pages), len(pages), connections=1)
    others = [append_request(f"other-{n}", 0, 1) for n in range(OTHER_TOPICS)]
    bench.fill(server, bench.requests("others", others), len(others))
    return server


def kinds(bench: Bench) -> list[Kind]:
    """The measured kinds of requests."""
    single = bench.requests("single", [append_request("fast", n, 1) for n in range(1000)])
    hundred = bench.requests("hundred", [append_request("fast", n, 100) for n in range(100)])
    lone = bench.requests("lone", [append_request("sure", n, 1) for n in range(1000)])
    shared = bench.requests("shared", [append_request("sure", n, 100) for n in range(100)])
    page = bench.requests("page", [diff_request("page", 0)])
    return [
        Kind("append of one record", single),
        Kind("append of one record, 16 connections", single, 16),
        Kind("append of 100 records", hundred, batches=True),
        Kind("diff of 1,000 records", page),
        Kind("fsync append of one record", lone),
        Kind("fsync append of 100 records, 16 connections", shared, 16, batches=True),
    ]


def empty_topics(server: ServerProcess) -> None:
    """Recreate the written topics, so that rounds do not depend on the number of earlier ones."""
    for topic, durability in (("fast", b"disk"), ("sure", b"fsync")):
        server.expect("DELETE", f"/v0/topics/{topic}")
        server.expect("PUT", f"/v0/topics/{topic}", b'{"durability":"%s"}' % durability)
    settle(server)


def while_sealing(bench: Bench) -> list[Figure]:
    """p99 during sealing and checkpoints, as a ratio of the quiet p99."""
    quiet = prepared(bench, "quiet", STILL)
    small = prepared(bench, "small-segments", SMALL_SEGMENTS)
    larger = prepared(bench, "larger-segments", LARGER_SEGMENTS)
    side = bench.requests("side", [append_request("side", n * 100, 100) for n in range(100)])
    with Loader() as second:

        def calm(kind: Kind) -> Sample:
            sample = bench.load(quiet, kind.requests, connections=kind.connections)
            empty_topics(quiet)
            return sample

        def rough(kind: Kind) -> Sample:
            server = larger if kind.batches else small
            seconds = bench.options.seconds + 0.2
            second.begin(port=server.port, requests=side, rate=SIDE_RATE, seconds=seconds)
            sample = bench.load(server, kind.requests, connections=kind.connections)
            second.finish()
            empty_topics(server)
            return sample

        figures = [measure(bench, kind, calm, rough) for kind in kinds(bench)]
    for name in ("small-segments", "larger-segments"):
        if not list((bench.folder / name).glob("segments/*/*.data")):
            raise BenchmarkError(f"{name}: nothing was sealed while sealing was to be measured")
        if not newest_snapshot_ns(bench.folder / name):
            raise BenchmarkError(f"{name}: no checkpoint was taken")
    return figures


def measure(
    bench: Bench, kind: Kind, calm: Callable[[Kind], Sample], rough: Callable[[Kind], Sample]
) -> Figure:
    """Interleaved rounds of one kind."""
    taken = bench.interleave({"quiet": lambda: calm(kind), "busy": lambda: rough(kind)})
    slow = series(taken["busy"], "p99_ms", "p99 while sealing")
    still = series(taken["quiet"], "p99_ms", "p99 quiet")
    return Figure(
        "while-sealing",
        f"{kind.name}: p99 while sealing and checkpoints",
        ratios(slow.values, still.values, "sealing / quiet, p99"),
        Bar("<=", LIMIT),
        (
            slow,
            still,
            series(taken["busy"], "p50_ms", "p50 while sealing"),
            series(taken["quiet"], "p50_ms", "p50 quiet"),
            series(taken["busy"], "max_ms", "slowest while sealing"),
        ),
    )
