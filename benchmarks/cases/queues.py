"""Queues compared with redis, JetStream and PostgreSQL: throughput of each step, and idle delivery.

Peers promise other things over other protocols: they give context and are no contest. `queue_wires`
defines what each side does for one step. One client process drives all sides with the same number
of connections.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

from benchmarks.bench import Bench, series, settle
from benchmarks.clients.loader import Sample
from benchmarks.clients.postgres_queue import INDEX, TABLE
from benchmarks.clients.working import PHASES, QueueSide, Workers
from benchmarks.report.figures import Bar, Figure, Series, ratios
from benchmarks.servers.peers import Nats, NotInstalled, Postgres, Redis
from benchmarks.servers.process import ServerProcess

WORKERS = (1, 16, 64)
# Jobs of a round for each requested second, by batch; on our server the rounds then take about
# equally long.
JOBS_A_SECOND = {1: 1_600, 8: 6_400, 64: 12_800}
CALLED = (16, 64)  # workers, and jobs a call, of the row of the overview
ROUND_WORKERS, ROUND_BATCH = (1, 16), 8
BARRED_WORKERS = 16
JOINED = "claim with the ack of the jobs before, one request a round"
# The least jobs a second, by the requests of a round.
ROUND_LIMITS = {"claim, then ack, two requests a round": 30_000, JOINED: 45_000}
NOTIFIED = "PostgreSQL, notified"
TOGETHER = "claim and ack together, 16 workers, 64 a call"

Taken = dict[str, list[dict[str, Sample]]]


def start_peers(bench: Bench, stack: ExitStack) -> tuple[list[QueueSide], list[str]]:
    """Start the installed peers; return a line about each missing one."""
    sides: list[QueueSide] = []
    missing: list[str] = []
    start: Callable[[], Redis | Nats | Postgres]
    for name, start, labels in (
        (
            "redis",
            partial(Redis, bench.folder / "redis", "everysec"),
            ("redis list", "redis stream"),
        ),
        ("JetStream", partial(Nats, bench.folder / "nats", jetstream=True), ("JetStream",)),
        ("PostgreSQL", partial(with_table, bench), ("PostgreSQL",)),
    ):
        try:
            peer = start()
        except NotInstalled as absent:
            missing.append(f"{name}: not measured, {absent}")
            continue
        stack.callback(peer.close)
        sides += [QueueSide(label, peer.port, peer.pid) for label in labels]
    return sides, missing


def with_table(bench: Bench) -> Postgres:
    """A PostgreSQL server with the table of jobs."""
    peer = Postgres(bench.folder / "postgres")
    try:
        peer.run(f"{TABLE}; {INDEX}")
    except BaseException:
        peer.close()
        raise
    return peer


def started(
    bench: Bench, client: Workers, stack: ExitStack
) -> tuple[ServerProcess, list[QueueSide], list[str]]:
    """Our server and the peers, each with its queue. Our server is the first side."""
    server = bench.start()
    peers, missing = start_peers(bench, stack)
    sides = [QueueSide("ours", server.port, server.pid), *peers]
    for side in sides:
        client.setup(side)
    return server, sides, missing


def queues(bench: Bench) -> list[Figure]:
    """Enqueue, claim and ack with 1, 16 and 64 workers and 1, 8 and 64 jobs a call."""
    figures: list[Figure] = []
    with Workers() as client, ExitStack() as stack:
        server, sides, missing = started(bench, client, stack)
        for batch in JOBS_A_SECOND:
            for workers in WORKERS:
                taken, jobs = rounds(bench, client, server, sides, workers, batch)
                figures += [
                    throughput(taken, phase, workers, batch, jobs, missing) for phase in PHASES
                ]
    return figures


def queue_calls(bench: Bench) -> list[Figure]:
    """Claim and ack together with 16 workers and 64 jobs a call: the overview's row."""
    workers, batch = CALLED
    with Workers() as client, ExitStack() as stack:
        server, sides, missing = started(bench, client, stack)
        taken, jobs = rounds(bench, client, server, sides, workers, batch)
    rates = {label: Series(label, "jobs/s", together(found)) for label, found in taken.items()}
    ours = rates.pop("ours")
    return [
        Figure(
            "queue-calls",
            TOGETHER,
            ours,
            None,
            tuple(
                series
                for label, theirs in rates.items()
                for series in (theirs, ratios(ours.values, theirs.values, f"ours / {label}"))
            ),
            (f"{jobs:,} jobs a round", *missing),
        )
    ]


def queue_rounds(bench: Bench) -> list[Figure]:
    """Workers of our queue claim and ack 8 jobs at a time, in two requests a round and in one."""
    figures = []
    with Workers() as client:
        server = bench.start()
        side = QueueSide("ours", server.port, server.pid)
        client.setup(side)
        for workers in ROUND_WORKERS:
            jobs = jobs_of(bench, workers, ROUND_BATCH)
            taken = bench.interleave(
                {
                    how: partial(
                        settled,
                        partial(
                            client.turns,
                            side,
                            workers=workers,
                            batch=ROUND_BATCH,
                            jobs=jobs,
                            joined=how == JOINED,
                        ),
                        server,
                    )
                    for how in ROUND_LIMITS
                }
            )
            figures += [rounds_figure(how, workers, jobs, taken[how]) for how in taken]
    return figures


def rounds_figure(how: str, workers: int, jobs: int, taken: Sequence[Sample]) -> Figure:
    """Jobs that are claimed and acked a second. The bar is for 16 workers."""
    server = statistics.median(sample.server_cpu_us for sample in taken)
    client = statistics.median(sample.generator_cpu_us for sample in taken)
    who = "1 worker" if workers == 1 else f"{workers} workers"
    return Figure(
        "queue-rounds",
        f"{how}, {who}, {ROUND_BATCH} a call",
        Series("ours", "jobs/s", tuple(sample.rate for sample in taken)),
        Bar(">=", ROUND_LIMITS[how]) if workers == BARRED_WORKERS else None,
        (
            series(taken, "p50_ms", "p50 of a request"),
            series(taken, "p99_ms", "p99 of a request"),
        ),
        (f"CPU a job: server {server:.1f} us, client {client:.1f} us", f"{jobs:,} jobs a round"),
    )


def settled(run: Callable[[], Sample], server: ServerProcess) -> Sample:
    """Run one round. Returns when our server is idle, so that the next side is not slowed."""
    sample = run()
    settle(server)
    return sample


def together(taken: Sequence[dict[str, Sample]]) -> tuple[float, ...]:
    """Jobs a second that are claimed and then acked, in each round."""
    return tuple(1 / (1 / each["claim"].rate + 1 / each["ack"].rate) for each in taken)


def rounds(
    bench: Bench,
    client: Workers,
    server: ServerProcess,
    sides: Sequence[QueueSide],
    workers: int,
    batch: int,
) -> tuple[Taken, int]:
    """Interleaved rounds of all sides: their times, and the number of jobs of one round."""
    jobs = jobs_of(bench, workers, batch)
    taken: Taken = {side.label: [] for side in sides}
    bench.interleave(
        {
            side.label: partial(
                one_round,
                partial(client.round, side, workers=workers, batch=batch, jobs=jobs),
                server,
                taken[side.label],
            )
            for side in sides
        }
    )
    for found in taken.values():
        del found[0]  # the discarded round
    return taken, jobs


def jobs_of(bench: Bench, workers: int, batch: int) -> int:
    """The jobs of a round: every worker has at least one call of each kind."""
    return max(workers, int(bench.options.seconds * JOBS_A_SECOND[batch] / batch)) * batch


def one_round(
    run: Callable[[], dict[str, Sample]],
    server: ServerProcess,
    taken: list[dict[str, Sample]],
) -> Sample:
    """Run one side's three phases.

    Returns when our server is idle, so that the next side is not slowed.
    """
    samples = run()
    taken.append(samples)
    settle(server)
    return samples["enqueue"]


def throughput(
    taken: Taken, phase: str, workers: int, batch: int, jobs: int, missing: Sequence[str]
) -> Figure:
    """Jobs a second of one phase on every side, and the ratio of ours to each peer."""

    def values(label: str, attribute: str) -> tuple[float, ...]:
        return tuple(float(getattr(samples[phase], attribute)) for samples in taken[label])

    ours = values("ours", "rate")
    beside: list[Series] = []
    for label in taken:
        if label != "ours":
            theirs = values(label, "rate")
            beside += [
                Series(label, "jobs/s", theirs),
                ratios(ours, theirs, f"ours / {label}"),
            ]
    beside.append(Series("ours, p50 of a call", "ms", values("ours", "p50_ms")))
    beside.append(Series("ours, p99 of a call", "ms", values("ours", "p99_ms")))
    cpu = [
        f"{label} {statistics.median(values(label, 'server_cpu_us')):.0f} + "
        f"{statistics.median(values(label, 'generator_cpu_us')):.0f} us"
        for label in taken
    ]
    who = "1 worker" if workers == 1 else f"{workers} workers"
    return Figure(
        "queues",
        f"{phase}, {who}, {batch} a call",
        Series("ours", "jobs/s", ours),
        None,
        tuple(beside),
        (
            f"CPU a job, server + client: {', '.join(cpu)}",
            f"{jobs:,} jobs a round",
            *missing,
        ),
    )


def queue_delivery(bench: Bench) -> list[Figure]:
    """From the first byte of an enqueue to the last byte of the job at a waiting worker."""
    with Workers() as client, ExitStack() as stack:
        server, sides, missing = started(bench, client, stack)
        sides.insert(1, QueueSide("ours, pushed", server.port, server.pid))
        sides = [
            replace(side, label=NOTIFIED) if side.label == "PostgreSQL" else side for side in sides
        ]
        taken = bench.interleave(
            {side.label: partial(client.idle, side, bench.options.seconds) for side in sides}
        )
    notes = {
        "ours": "ours: a claim with wait_ms; pushed: GET work",
        "redis list": "redis list: BLMOVE; the lease is written after it and not counted",
        "redis stream": "redis stream: XREADGROUP BLOCK",
        "JetStream": "JetStream: a fetch that waits",
        NOTIFIED: "PostgreSQL: LISTEN, then a claim",
    }
    figures = []
    for attribute, name in (("p50_ms", "p50"), ("p99_ms", "p99")):
        series = [
            Series(label, "ms", tuple(float(getattr(sample, attribute)) for sample in samples))
            for label, samples in taken.items()
        ]
        figures.append(
            Figure(
                "queue-delivery",
                f"enqueue to delivered on an idle queue, {name}",
                series[0],
                None,
                tuple(
                    found
                    for one in series[1:]
                    for found in (one, ratios(series[0].values, one.values, f"ours / {one.label}"))
                    if found is one or not one.label.startswith("ours")
                ),
                (*(notes[label] for label in taken if label in notes), *missing),
            )
        )
    return figures
