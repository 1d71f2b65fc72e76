"""Routers: the delay of a copy, copies a second, the cost for other appends and for replay.

The floor is our own append in the same run: a router's work is another append without a request.
The source of every figure has class disk, and so have the destinations that its routers create.
"""

from __future__ import annotations

import dataclasses
import json
import time
from functools import partial
from pathlib import Path

from benchmarks.bench import Bench, Side, series
from benchmarks.cases.recovery import TOPIC as RECOVERED
from benchmarks.cases.recovery import check_records, fill_records
from benchmarks.cases.watch.fanout import DISTINCT, HEARTBEAT_MS
from benchmarks.clients.loader import BenchmarkError, Loader, Sample
from benchmarks.clients.requests import append_request
from benchmarks.clients.watching import OURS, Watchers, open_sessions
from benchmarks.report.figures import Bar, Figure, Series, ratios
from benchmarks.servers.process import ServerProcess
from benchmarks.servers.server import STILL

FANS = (1, 10, 100)
CHAIN = 5
# Destinations of one source in the case that measures other appends.
MANY = 1_000
MANY_QUICK = 50
BATCHES = 200
BATCHES_QUICK = 20
PACED_RATE = 200  # single appends a second: 200,000 copies
PACED_SECONDS = 3.0
BUSY_RATE = 50  # requests a second, of 100 records
BUSY_SECONDS = 600.0
RECORDS = 1_000_000
RECORDS_QUICK = 50_000
CAUGHT_UP_SECONDS = 300.0


def put_router(server: ServerProcess, source: str, dest: str) -> None:
    """Create a router from one topic to another, which it creates."""
    body = json.dumps({"source": source, "dest": dest}).encode()
    server.expect("PUT", f"/v0/routers/{source}-{dest}", body)


def head_seq(server: ServerProcess, topic: str) -> int:
    """The head of a topic."""
    head: int = json.loads(server.expect("GET", f"/v0/topics/{topic}"))["head_seq"]
    return head


def wait_for(server: ServerProcess, topics: list[str], head: int) -> None:
    """Wait until each of these topics has this head."""
    ends = time.monotonic() + CAUGHT_UP_SECONDS
    for topic in topics:
        while head_seq(server, topic) < head:
            if time.monotonic() > ends:
                raise BenchmarkError(f"{topic} does not catch up")
            time.sleep(0.002)


# --- the delay of a copy ------------------------------------------------------------------------


def visible(bench: Bench) -> list[Figure]:
    """The time from a write until a watcher of the destination has it, compared with a watcher of
    the source.
    """
    server = bench.start("visible")
    server.expect("PUT", "/v0/topics/direct", b"{}")
    put_router(server, "routed", "dest")
    put_router(server, "busy", "busy-dest")
    busy = bench.requests("busy", [append_request("busy", n, 100) for n in range(0, 10_000, 100)])
    figures = []
    for name in ("idle", "beside 5,000 records/s through another router"):
        with Watchers() as client, Loader() as other:
            stop = bench.folder / "busy.stop"
            if name != "idle":
                other.begin(
                    port=server.port,
                    requests=busy,
                    rate=BUSY_RATE,
                    seconds=BUSY_SECONDS,
                    stop=stop,
                )
            sides: dict[str, Side] = {}
            for written, topic in (("direct", "direct"), ("routed", "dest")):
                requests = [append_request(written, n, 1) for n in range(DISTINCT)]
                appends = bench.requests(f"appends-{written}", requests)
                streams = open_sessions(server, [[topic]], HEARTBEAT_MS)
                client.open(topic, server.port, bench.requests(topic, streams), OURS)
                sides[topic] = partial(
                    client.measure,
                    topic,
                    server.port,
                    appends,
                    OURS,
                    proofs=None,
                    expect=1,
                    seconds=bench.options.seconds,
                )
            taken = bench.interleave(sides)
            if name != "idle":
                stop.touch()
                other.answer()
        for part in ("p50", "p99"):
            copied = series(taken["dest"], f"{part}_ms", f"watcher of the destination, {part}")
            direct = series(taken["direct"], f"{part}_ms", f"watcher of the topic itself, {part}")
            figures.append(
                Figure(
                    "routers",
                    f"write to last byte behind a router, {name}, {part}",
                    ratios(copied.values, direct.values, f"routed / direct, {part}"),
                    None,
                    (copied, direct),
                )
            )
    return figures


# --- copies a second ----------------------------------------------------------------------------


def copying(
    bench: Bench, server: ServerProcess, requests: Path, source: str, last: list[str], copies: int
) -> Side:
    """One round: append batches to a source until the last copy is stored."""
    batches = bench.options.scaled(BATCHES, BATCHES_QUICK)

    def side() -> Sample:
        head = head_seq(server, source)
        began = time.perf_counter()
        sample = bench.loader.run(server.port, requests, connections=4, seconds=600, count=batches)
        wait_for(server, last, head + batches * 100)
        took_s = time.perf_counter() - began
        made = batches * 100 * copies
        return dataclasses.replace(sample, seconds=took_s, rate=made / took_s)

    return side


def throughput(bench: Bench) -> list[Figure]:
    """Copies a second for several fan-outs and a chain, compared with records a second of plain
    appends.
    """
    server = bench.start("throughput")
    sides: dict[str, Side] = {}

    def batch(topic: str) -> Path:
        requests = [append_request(topic, first, 100) for first in range(0, 10_000, 100)]
        return bench.requests(topic, requests)

    server.expect("PUT", "/v0/topics/plain", b"{}")
    sides["plain"] = copying(bench, server, batch("plain"), "plain", ["plain"], 1)
    for fan in FANS:
        dests = [f"fan{fan}-{number}" for number in range(fan)]
        for dest in dests:
            put_router(server, f"fan{fan}", dest)
        sides[f"fan-out {fan}"] = copying(
            bench, server, batch(f"fan{fan}"), f"fan{fan}", dests, fan
        )
    for number in range(CHAIN):
        put_router(server, f"chain{number}", f"chain{number + 1}")
    sides[f"chain of {CHAIN}"] = copying(
        bench, server, batch("chain0"), "chain0", [f"chain{CHAIN}"], CHAIN
    )
    taken = bench.interleave(sides)
    plain = [sample.rate for sample in taken["plain"]]
    figures = []
    for name, samples in taken.items():
        if name == "plain":
            continue
        made = Series("copies", "copies/s", tuple(sample.rate for sample in samples))
        figures.append(
            Figure(
                "routers",
                f"{name}: copies made while batches of 100 come, until the last is there",
                ratios(made.values, tuple(plain), "copies/s / records/s of plain appends"),
                None,
                (made, Series("plain appends", "records/s", tuple(plain))),
            )
        )
    return figures


# --- the cost for other appends -----------------------------------------------------------------


def many_dests(bench: Bench) -> list[Figure]:
    """Appends to a source with 1,000 destinations, compared with a source without destinations."""
    count = bench.options.scaled(MANY, MANY_QUICK)
    server = bench.start("many")
    server.expect("PUT", "/v0/topics/alone", b"{}")
    dests = [f"dest{number}" for number in range(count)]
    for dest in dests:
        put_router(server, "crowded", dest)
    figures = []
    for rate, pace in ((PACED_RATE, f"{PACED_RATE} a second"), (0, "one after the other")):
        sides: dict[str, Side] = {}
        for topic in ("alone", "crowded"):
            requests = [append_request(topic, n, 1) for n in range(DISTINCT)]
            sides[topic] = partial(
                paced, bench, server, bench.requests(f"{topic}-{rate}", requests), rate
            )
        taken = bench.interleave(sides)
        wait_for(server, dests, head_seq(server, "crowded"))
        for part in ("p99", "p50"):
            crowded = series(taken["crowded"], f"{part}_ms", f"{count:,} destinations, {part}")
            alone = series(taken["alone"], f"{part}_ms", f"no destination, {part}")
            figures.append(
                Figure(
                    "routers",
                    f"append to a source with {count:,} destinations, {pace}, {part}",
                    ratios(crowded.values, alone.values, f"crowded / alone, {part}"),
                    Bar("<=", 2.0) if rate and part == "p99" else None,
                    (crowded, alone),
                )
            )
    return figures


def paced(bench: Bench, server: ServerProcess, requests: Path, rate: int) -> Sample:
    """Appends of one connection; the copies may still be in progress at the end."""
    if not rate:
        return bench.load(server, requests)
    return bench.costed(
        server,
        lambda: bench.loader.run(
            server.port, requests, rate=rate, seconds=max(PACED_SECONDS, bench.options.seconds)
        ),
    )


# --- replay -------------------------------------------------------------------------------------


def routed_recovery(bench: Bench) -> list[Figure]:
    """The time from process start to ready over forwarded records that are in no checkpoint."""
    records = bench.options.scaled(RECORDS, RECORDS_QUICK)
    server = bench.start("routed", STILL)
    server.expect("PUT", f"/v0/topics/{RECOVERED}", b"{}")
    put_router(server, RECOVERED, "copy")
    fill_records(bench, server, records)
    wait_for(server, ["copy"], records)
    server.kill()
    times = []
    for _ in range(bench.options.rounds):
        server = bench.start("routed", STILL, wait=False)
        times.append(server.wait_ready("/v0/ready"))
        check_records(server, records)
        if head_seq(server, "copy") != records:
            raise BenchmarkError("copies are missing")
        server.kill()
    return [
        Figure(
            "routed-recovery",
            f"{records:,} forwarded records in an un-checkpointed journal, after kill -9",
            Series("process start to ready", "s", tuple(times)),
        )
    ]


def routers(bench: Bench) -> list[Figure]:
    """Run all router cases."""
    return [*visible(bench), *throughput(bench), *many_dests(bench)]
