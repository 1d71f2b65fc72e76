"""A hundred thousand topics: the cost of an append, and how long a checkpoint blocks the loop."""

from __future__ import annotations

import random
import shutil
import time
from pathlib import Path

from benchmarks.bench import Bench, series
from benchmarks.clients.loader import BenchmarkError, Sample
from benchmarks.clients.requests import append_request, http_request
from benchmarks.report.figures import Bar, Figure, Series, ratios
from benchmarks.servers.process import ServerProcess
from benchmarks.servers.server import STILL, newest_snapshot_ns

TOPICS = 100_000
TOPICS_QUICK = 2_000
PROBES_PER_SECOND = 1000
PROBE_SECONDS_MIN, PROBE_SECONDS_MAX = 3.0, 90.0
SMALL_CHECKPOINT_MS = "1000"


def name_of(number: int) -> str:
    """The name of one of many topics."""
    return f"many:{number:06d}"


def create_topics(bench: Bench, server: ServerProcess, count: int, records: int) -> None:
    """Create topics by appending to them, 64 at a time."""
    requests = [append_request(name_of(number), 0, records) for number in range(count)]
    bench.fill(server, bench.requests(f"create-{count}", requests), count)


def spread_requests(bench: Bench, topics: int) -> tuple[Path, Path]:
    """Single appends: all to one topic, and to all topics in a random order, with equally many
    requests.

    Both files hold the same number of distinct requests, so that the generator's own cache misses
    are the same on both sides.
    """
    order = list(range(topics))
    random.Random(4).shuffle(order)
    one = [append_request(name_of(0), number, 1) for number in order]
    all_of_them = [append_request(name_of(number), number, 1) for number in order]
    return bench.requests("to-one", one), bench.requests("to-all", all_of_them)


def many_topics(bench: Bench) -> list[Figure]:
    """Append p50 with 100,000 topics, compared with one topic."""
    topics = bench.options.scaled(TOPICS, TOPICS_QUICK)
    lonely = bench.start("one", STILL)
    crowded = bench.start("many", STILL)
    create_topics(bench, lonely, 1, 1)
    create_topics(bench, crowded, topics, 1)
    to_one, to_all = spread_requests(bench, topics)
    taken = bench.interleave(
        {
            "one": lambda: bench.load(lonely, to_one),
            "same": lambda: bench.load(crowded, to_one),
            "all": lambda: bench.load(crowded, to_all),
        }
    )
    one = series(taken["one"], "p50_ms", "p50 with one topic")
    figures = []
    for side, what in (("same", "to one of them"), ("all", "to all of them in turn")):
        many = series(taken[side], "p50_ms", f"p50 with {topics:,} topics")
        figures.append(
            Figure(
                "many-topics",
                f"append with {topics:,} topics, {what}",
                ratios(many.values, one.values, "many / one, p50"),
                Bar("<=", 1.1),
                (many, one, series(taken[side], "p99_ms", f"p99 with {topics:,} topics")),
            )
        )
    return figures


def paused_side(
    bench: Bench,
    settings: dict[str, str],
    probes: Path,
    name: str,
    first_answers_ms: list[float],
) -> Sample:
    """One round: a new start over the same data, then probes once a millisecond.

    After a start the checkpointer captures every topic anew, so each round includes a first, full
    checkpoint: on the side with checkpoints, probing continues until the first one is published.
    """
    data, stop = bench.folder / name, bench.folder / f"{name}.stop"
    shutil.copytree(bench.folder / "many", data)
    server = bench.start(name, settings)
    # The server's remaining work after `ready` is no pause of a checkpoint: it is reported
    # separately.
    began = time.monotonic()
    server.expect("GET", "/v0/health")
    first_answers_ms.append((time.monotonic() - began) * 1e3)
    before_ns = newest_snapshot_ns(data)
    bench.loader.begin(
        port=server.port,
        requests=probes,
        rate=PROBES_PER_SECOND,
        seconds=PROBE_SECONDS_MAX,
        stop=stop,
    )
    quiet = settings is STILL
    began = time.monotonic()
    elapsed = 0.0
    while elapsed < PROBE_SECONDS_MAX:
        time.sleep(0.1)
        elapsed = time.monotonic() - began
        taken = newest_snapshot_ns(data) > before_ns
        if elapsed >= PROBE_SECONDS_MIN and (taken or quiet):
            break
    stop.touch()
    sample = bench.loader.finish()
    server.kill()
    if taken == quiet:
        raise BenchmarkError(f"{name}: a checkpoint was taken: {taken}")
    shutil.rmtree(data)
    stop.unlink()
    return sample


def pauses(bench: Bench) -> list[Figure]:
    """The longest time for which a checkpoint of 100,000 topics blocks the loop."""
    topics = bench.options.scaled(TOPICS, TOPICS_QUICK)
    server = bench.start("many", STILL)
    create_topics(bench, server, topics, 1)
    server.stop()
    health = http_request("GET", "/v0/health")
    # Every eighth probe is an append to another topic: a checkpoint needs a change.
    mixed = []
    for number in range(0, min(topics, 20_000), 3):
        mixed += [health] * 7 + [append_request(name_of(number), 1, 1)]
    probes = bench.requests("probes", mixed)
    busy = STILL | {"TOPICS_CHECKPOINT_INTERVAL_MS": SMALL_CHECKPOINT_MS}
    first_ms: list[float] = []
    taken = bench.interleave(
        {
            "quiet": lambda: paused_side(bench, STILL, probes, "round-quiet", first_ms),
            "checkpoints": lambda: paused_side(bench, busy, probes, "round-busy", first_ms),
        },
        warm=False,
    )
    every = f"a checkpoint of {topics:,} topics every {SMALL_CHECKPOINT_MS} ms"
    slowest = series(taken["checkpoints"], "max_ms", "slowest probe of a round")
    beside = (
        series(taken["quiet"], "max_ms", "slowest probe, quiet"),
        series(taken["checkpoints"], "p50_ms", "p50"),
        series(taken["quiet"], "p50_ms", "p50, quiet"),
    )
    calm = series(taken["quiet"], "p99_ms", "p99, quiet")
    rough = series(taken["checkpoints"], "p99_ms", "p99")
    return [
        Figure(
            "pauses",
            f"loop pause, seen by probes at 1 kHz, {every}",
            slowest,
            Bar("<=", 8.0, "highest"),
            beside,
            ("a probe waits for its own turn too, and for the machine: compare with quiet",),
        ),
        Figure(
            "pauses",
            f"p99 of probes, {every}",
            ratios(rough.values, calm.values, "checkpoints / quiet, p99"),
            Bar("<=", 3.0),
            (rough, calm),
        ),
        Figure(
            "pauses",
            f"first answer after ready, {topics:,} topics",
            Series("GET /v0/health right after /v0/ready said 200", "ms", tuple(first_ms)),
        ),
    ]
