"""The elastic throttle under three times the sustainable load, from clients that honour 429 or
ignore it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.bench import Bench
from benchmarks.clients.loader import BenchmarkError, Loader, Sample
from benchmarks.clients.requests import append_request
from benchmarks.report.figures import Bar, Figure, Series
from benchmarks.servers.process import ServerProcess

# Priorities of the topics that are written in turn, and of the measured topic.
BULK = {"bulk-a": -200, "bulk-b": -100, "bulk-c": 0, "bulk-d": 100}
URGENT = "urgent"
URGENT_PRIORITY = 900
URGENT_RATE = 50  # appends of 100 records a second
CONNECTIONS = 600
RECORDS = 100
TIMES = 3.0
P99_TIMES_MAX = 3.0
PLATEAU_SHARE_MIN = 0.8


def prepared(bench: Bench, name: str) -> ServerProcess:
    """A server with the topics."""
    server = bench.start(name)
    for topic, priority in (BULK | {URGENT: URGENT_PRIORITY}).items():
        config = {"priority": priority, "cap_records": 50_000}
        server.expect("PUT", f"/v0/topics/{topic}", json.dumps(config).encode())
    return server


def heads(server: ServerProcess) -> dict[str, int]:
    """The head of each topic that the crowd writes."""
    return {
        topic: int(json.loads(server.expect("GET", f"/v0/topics/{topic}?touch=false"))["head_seq"])
        for topic in BULK
    }


def crowded(
    bench: Bench, server: ServerProcess, bulk: Path, urgent: Path, rate: float, *, honours: bool
) -> tuple[dict[str, Any], Sample]:
    """The samples of the crowd and the urgent writer; raises if an acknowledged record is
    missing.
    """
    before = heads(server)
    seconds = bench.options.seconds
    # A real crowd runs on other machines, so here the crowd gets a lower priority than the server.
    with Loader("benchmarks.clients.crowd", niceness=10) as crowd:
        crowd.begin(
            port=server.port,
            requests=bulk,
            connections=CONNECTIONS,
            rate=rate,
            seconds=seconds + 1.5,
            honours=honours,
        )
        sample = Loader.sample(_delayed(bench.loader, server, urgent, seconds))
        seen = crowd.answer()
    if seen["errors"]:
        raise BenchmarkError(f"{seen['errors']} answers were wrong, first: {seen['first_error']}")
    after = heads(server)
    for index, topic in enumerate(BULK):
        acked = RECORDS * sum(seen["acked"][index :: len(BULK)])
        if after[topic] - before[topic] < acked:
            raise BenchmarkError(f"{topic}: {acked} were acknowledged, {after[topic]} are there")
    return seen, sample


def _delayed(loader: Loader, server: ServerProcess, urgent: Path, seconds: float) -> dict[str, Any]:
    """The urgent writer's answer. Its measurement starts a second after the crowd."""
    loader.begin(port=server.port, requests=urgent, rate=URGENT_RATE, seconds=1.0)
    loader.answer()
    loader.begin(port=server.port, requests=urgent, rate=URGENT_RATE, seconds=seconds)
    return loader.answer()


def throttle(bench: Bench) -> list[Figure]:
    """High-priority p99 and throughput under three times the load."""
    server = prepared(bench, "throttle")
    topics = list(BULK)
    bulk = bench.requests(
        "bulk", [append_request(topics[n % 4], n * RECORDS, RECORDS) for n in range(400)]
    )
    urgent = bench.requests(
        "urgent", [append_request(URGENT, n * RECORDS, RECORDS) for n in range(100)]
    )
    plateaus, quiets, figures = [], [], []
    sides: dict[bool, list[tuple[dict[str, Any], Sample]]] = {True: [], False: []}
    grown: list[float] = []
    for _ in range(bench.options.rounds):
        plateau = bench.load(server, bulk, connections=16)
        plateaus.append(plateau.rate)
        quiets.append(
            bench.loader.run(
                server.port, urgent, rate=URGENT_RATE, seconds=bench.options.seconds
            ).p99_ms
        )
        rate = TIMES * plateau.rate
        for honours in (True, False):
            resting = server.rss_anon_bytes()
            sides[honours].append(crowded(bench, server, bulk, urgent, rate, honours=honours))
            grown.append((server.rss_anon_bytes() - resting) / 2**20)
    quiet = Series("p99 unloaded", "ms", tuple(quiets))
    for honours, name in ((True, "clients honour Retry-After"), (False, "clients ignore it")):
        seen = sides[honours]
        loud = Series("p99 under load", "ms", tuple(sample.p99_ms for _, sample in seen))
        rates = tuple(crowd["rate"] + URGENT_RATE for crowd, _ in seen)
        beside = (
            loud,
            quiet,
            Series("p50 under load", "ms", tuple(sample.p50_ms for _, sample in seen)),
            Series("throttled", "1/s", tuple(c["throttled"] / c["seconds"] for c, _ in seen)),
            Series("p99 of what was taken", "ms", tuple(c["p99_ms"] for c, _ in seen)),
        )
        times = zip(loud.values, quiet.values, strict=True)
        figures += [
            Figure(
                "throttle",
                f"urgent append at 3 times the load, {name}: p99",
                Series("loaded / unloaded", "x", tuple(a / b for a, b in times)),
                Bar("<=", P99_TIMES_MAX) if honours else None,
                beside,
            ),
            Figure(
                "throttle",
                f"throughput at 3 times the load, {name}",
                Series(
                    "share of the plateau",
                    "x",
                    tuple(a / b for a, b in zip(rates, plateaus, strict=True)),
                ),
                Bar(">=", PLATEAU_SHARE_MIN) if honours else None,
                (
                    Series("taken", "1/s", rates),
                    Series("plateau", "1/s", tuple(plateaus)),
                ),
            ),
        ]
    figures.append(
        Figure("throttle", "RssAnon grown by a crowd", Series("grown", "MiB", tuple(grown)))
    )
    return figures
