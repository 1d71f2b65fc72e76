"""Views: how fast records are applied, how soon a query shows an append, what ten views cost.

The records are those of all cases (200 bytes); their tags repeat after 1,000, so that both views
have 1,000 rows. Called through `registry`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.bench import Bench, series
from benchmarks.cases.views.by_hand import by_hand
from benchmarks.clients.loader import BenchmarkError, Sample
from benchmarks.clients.requests import RECORD_BYTES, append_body, append_request
from benchmarks.report.figures import Bar, Figure, Series, ratios
from benchmarks.servers.cpu_time import cpu_seconds, family, read_proc
from benchmarks.servers.peers import NotInstalled
from benchmarks.servers.process import ServerProcess
from benchmarks.servers.server import STILL

TOPIC = "bench"
RECORDS, RECORDS_QUICK = 400_000, 5_000
BATCH = 100
EVENTS_A_SECOND = 100_000
AFTER_P50_MS, AFTER_P99_MS = 5.0, 20.0
BESIDE_RATIO = 1.1
VIEWS, PACE = 10, 1_000
BUILD_SECONDS = 3_600.0
COUNT = {"shortcut": {"count_by_tag": True}}
LATEST = {"shortcut": {"latest_by_key": "/tag"}}


def filled(bench: Bench, name: str, records: int) -> ServerProcess:
    """A server whose topic has `records` records."""
    server = bench.start(name, STILL)
    batches = [append_request(TOPIC, first, BATCH) for first in range(0, 100_000, BATCH)]
    bench.fill(server, bench.requests(f"fill-{name}", batches), records // BATCH)
    return server


def put_view(server: ServerProcess, name: str, definition: object) -> None:
    """Define a view."""
    body = json.dumps(definition).encode()
    server.expect("PUT", f"/v0/topics/{TOPIC}/views/{name}", body)


def until_ready(server: ServerProcess, name: str, seq: int) -> None:
    """Wait until the view has processed this record."""
    deadline = time.monotonic() + BUILD_SECONDS
    while time.monotonic() < deadline:
        stats = json.loads(server.expect("GET", f"/v0/topics/{TOPIC}/views/{name}/stats"))
        if stats["status"] == "ready" and stats["processed_sequence"] >= seq:
            return
        if stats["last_error"] is not None:
            raise BenchmarkError(f"the view stands still: {stats['last_error']}")
        time.sleep(0.005)
    raise BenchmarkError(f"the view is not ready after {BUILD_SECONDS:.0f} s")


def built_side(server: ServerProcess, definition: object, records: int) -> Sample:
    """One round: define the view, wait until it has every record, delete it."""
    began = time.perf_counter()
    before = applying_seconds(server)
    put_view(server, "v", definition)
    until_ready(server, "v", records)
    seconds = time.perf_counter() - began
    applied_us = (applying_seconds(server) - before) / records * 1e6
    server.expect("DELETE", f"/v0/topics/{TOPIC}/views/v")
    return Sample(records, seconds, records / seconds, 0, 0, 0, 0, 0.0, server_cpu_us=applied_us)


def applying_seconds(server: ServerProcess) -> float:
    """CPU time of the process that applies records; 0 before it is started."""
    return sum(
        cpu_seconds(pid)
        for pid in family(server.pid)
        if "apply_worker" in read_proc(f"{pid}/cmdline")
    )


def latencies_side(seconds: float, call: Callable[[int], float]) -> Sample:
    """One round of calls, one after the other. `call` returns the ms of the judged part."""
    began = time.perf_counter()
    times: list[float] = []
    while time.perf_counter() - began < seconds:
        times.append(call(len(times)))
    took = time.perf_counter() - began
    times.sort()
    count = len(times)
    at = [times[int(count * share)] for share in (0.5, 0.9, 0.99)]
    return Sample(count, took, count / took, at[0], at[1], at[2], times[-1], 0.0)


def views(bench: Bench) -> list[Figure]:
    """All three measurements, and the same projection written by hand over a redis stream."""
    records = bench.options.scaled(RECORDS, RECORDS_QUICK)
    return [*rates(bench, records), *after(bench), *beside(bench)]


def rates(bench: Bench, records: int) -> list[Figure]:
    """Records a second through two views, from a filled topic to a view that is ready."""
    server = filled(bench, "filled", records)
    sides = {
        "count by tag": lambda: built_side(server, COUNT, records),
        "latest by key": lambda: built_side(server, LATEST, records),
    }
    notes: tuple[str, ...] = ()
    try:
        peer = by_hand(bench, records)
    except NotInstalled as missing:
        notes = (f"no peer: {missing}",)
    else:
        sides |= peer.sides()
    try:
        taken = bench.interleave(sides)
    finally:
        if not notes:
            peer.close()
    figures = []
    for name in ("count by tag", "latest by key"):
        cpu = series(taken[name], "server_cpu_us", "CPU of the apply process a record")
        hand = taken.get(f"by hand, {name}")
        others = (cpu,) if hand is None else (cpu, _rate(hand, "redis stream to SQLite by hand"))
        figures.append(
            Figure(
                "views",
                f"records of {RECORD_BYTES} B through a view, {name}, {records:,} records",
                _rate(taken[name], "records a second"),
                Bar(">=", EVENTS_A_SECOND),
                others,
                notes,
            )
        )
    return figures


def _rate(samples: Sequence[Sample], label: str) -> Series:
    return Series(label, "records/s", tuple(sample.rate for sample in samples))


def after(bench: Bench) -> list[Figure]:
    """Append a record, then query with its seq: the time from the append's first byte to the
    rows.
    """
    server = bench.start("after", STILL)
    server.expect("PUT", f"/v0/topics/{TOPIC}", b"{}")
    put_view(server, "v", COUNT)

    def call(number: int) -> float:
        began = time.perf_counter()
        body = append_body(number, 1)
        seq = json.loads(server.expect("POST", f"/v0/topics/{TOPIC}", body))["last_seq"]
        query = b'{"query":"get","params":{"tag":"t-%03d"}}' % (number % 1000)
        rows = server.expect("POST", f"/v0/topics/{TOPIC}/views/v/query?after={seq}", query)
        took_ms = (time.perf_counter() - began) * 1e3
        if json.loads(rows)["rows"][0][2] != seq:
            raise BenchmarkError(f"the rows do not reflect record {seq}: {rows!r}")
        return took_ms

    taken = bench.interleave({"after": lambda: latencies_side(bench.options.seconds, call)})
    middle = series(taken["after"], "p50_ms", "append and query, p50")
    slow = series(taken["after"], "p99_ms", "append and query, p99")
    what = "append, then query with after, one client"
    return [
        Figure("views", f"{what}: p50", middle, Bar("<=", AFTER_P50_MS)),
        Figure("views", f"{what}: p99", slow, Bar("<=", AFTER_P99_MS)),
    ]


def beside(bench: Bench) -> list[Figure]:
    """Paced appends to a topic with ten views, compared with a topic without views."""
    requests = bench.requests("paced", [append_request(TOPIC, n, 1) for n in range(1_000)])
    servers = {name: bench.start(name, STILL) for name in ("without", "with")}
    for server in servers.values():
        server.expect("PUT", f"/v0/topics/{TOPIC}", b"{}")
    for number in range(VIEWS):
        put_view(servers["with"], f"v{number}", LATEST if number % 2 else COUNT)

    def side(server: ServerProcess, sent: Path = requests) -> Sample:
        seconds = bench.options.seconds
        return bench.costed(
            server, lambda: bench.loader.run(server.port, sent, rate=PACE, seconds=seconds)
        )

    taken = bench.interleave(
        {
            "without": lambda: side(servers["without"]),
            "with": lambda: side(servers["with"]),
        }
    )
    ours = series(taken["with"], "p50_ms", f"append p50 with {VIEWS} views")
    bare = series(taken["without"], "p50_ms", "append p50 without views")
    return [
        Figure(
            "views",
            f"{PACE:,} paced appends a second beside {VIEWS} views",
            ratios(ours.values, bare.values, "with / without, append p50"),
            Bar("<=", BESIDE_RATIO),
            (
                ours,
                bare,
                series(taken["with"], "p99_ms", f"append p99 with {VIEWS} views"),
                series(taken["without"], "p99_ms", "append p99 without views"),
                series(taken["with"], "server_cpu_us", "CPU an append, with all view processes"),
            ),
        )
    ]


def views_rebuild(bench: Bench) -> list[Figure]:
    """A view of many records (`--records`) is built anew while the old view answers."""
    records = bench.options.records
    server = filled(bench, "many", records)
    figures = []
    for name, definition in (("count by tag", COUNT), ("latest by key", LATEST)):
        put_view(server, "v", definition)
        until_ready(server, "v", records)
        began = time.perf_counter()
        server.expect("POST", f"/v0/topics/{TOPIC}/views/v/rebuild", b"{}")
        building = f"/v0/topics/{TOPIC}/views/v/stats"
        while json.loads(server.expect("GET", building))["building_sequence"] is not None:
            time.sleep(0.02)
        rate = records / (time.perf_counter() - began)
        server.expect("DELETE", f"/v0/topics/{TOPIC}/views/v")
        figures.append(
            Figure(
                "views-rebuild",
                f"rebuild of {records:,} records, {name}",
                Series("records a second", "records/s", (rate,)),
                Bar(">=", EVENTS_A_SECOND),
            )
        )
    return figures
