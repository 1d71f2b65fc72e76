"""Two builds side by side: the same requests to both servers in turns, round by round.

`--base ROOT` names a checkout of the other build with a `.venv`. Each figure is the ratio of the
two sides of one round, so that a machine which becomes slower meanwhile does not change it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from benchmarks.bench import Bench, series
from benchmarks.cases.recovery import fill_records
from benchmarks.clients.loader import Sample
from benchmarks.clients.requests import append_request, diff_request, http_request
from benchmarks.clients.working import QueueSide, Workers
from benchmarks.report.figures import Bar, Figure, Series, ratios
from benchmarks.servers.peers import NotInstalled
from benchmarks.servers.process import ServerProcess
from benchmarks.servers.server import STILL

TOPIC = "log"
RECORDS, RECORDS_QUICK = 300_000, 20_000
CONNECTIONS = (1, 16)
JOBS_A_SECOND = 1_600
# The bar if nothing was made faster: a lower median exceeds the noise of two equal builds.
NOISE = 0.95

Runs = dict[str, list[Sample]]


def builds(bench: Bench) -> list[Figure]:
    """Appends, reads, states, claims with acks and a replay, ours / base."""
    if bench.options.base is None:
        raise NotInstalled("--base names the checkout of the other build")
    ours = bench.start("ours", STILL)
    base = bench.start("base", STILL, command=bench.options.base)
    servers = {"ours": ours, "base": base}
    figures: list[Figure] = []
    for what, requests in wires().items():
        path = bench.requests(what.replace(" ", "-"), requests)
        for connections in CONNECTIONS:
            taken = bench.interleave(
                {
                    label: partial(bench.load, server, path, connections=connections)
                    for label, server in servers.items()
                }
            )
            figures.append(beside(what, connections, taken))
        if what == "append of 100":
            for server in servers.values():
                server.expect("PUT", "/v0/topics/read", b"{}")
                full = [append_request("read", first, 100) for first in range(0, 2000, 100)]
                bench.fill(server, bench.requests("full", full), len(full), connections=1)
    figures += jobs(bench, servers)
    for server in servers.values():
        server.kill()
    return [*figures, replay(bench)]


def wires() -> dict[str, list[bytes]]:
    """The requests of each row; the topic `read` has 2,000 records."""
    return {
        "append of 1": [append_request("one", first, 1) for first in range(1000)],
        "append of 100": [
            append_request(f"many-{turn % 10}", turn * 100, 100) for turn in range(100)
        ],
        "tail read": [diff_request("read", 1999, 100)],
        "diff of 100": [diff_request("read", 1000, 100)],
        "diff of 1000": [diff_request("read", 0, 1000)],
        "state": [http_request("GET", "/v0/topics/read")],
    }


def beside(what: str, connections: int, taken: Runs) -> Figure:
    """The figure of one row."""
    ours, base = (series(taken[label], "rate", label) for label in ("ours", "base"))
    plural = "s" if connections > 1 else ""
    return Figure(
        "builds",
        f"{what}, {connections} connection{plural}",
        ratios(ours.values, base.values, "ours / base, requests/s"),
        Bar(">=", NOISE),
        (
            ours,
            base,
            *(series(taken[label], "p50_ms", f"{label}, p50") for label in taken),
            *(series(taken[label], "p99_ms", f"{label}, p99") for label in taken),
            *(series(taken[label], "server_cpu_us", f"{label}, CPU") for label in taken),
        ),
    )


def jobs(bench: Bench, servers: dict[str, ServerProcess]) -> list[Figure]:
    """Jobs that are claimed and acked, one a call: jobs/s of the two phases together."""
    figures = []
    with Workers() as client:
        sides = {
            label: QueueSide("ours", server.port, server.pid) for label, server in servers.items()
        }
        for side in sides.values():
            client.setup(side)
        count = max(16, int(bench.options.seconds * JOBS_A_SECOND))
        for workers in (1, 16):
            rates: dict[str, list[float]] = {label: [] for label in sides}
            work: dict[str, Callable[[], Sample]] = {
                label: partial(_worked, client, side, workers, count, rates[label])
                for label, side in sides.items()
            }
            bench.interleave(work)
            ours, base = (tuple(rates[label][1:]) for label in ("ours", "base"))
            figures.append(
                Figure(
                    "builds",
                    f"claim and ack, {workers} worker{'s' if workers > 1 else ''}",
                    ratios(ours, base, "ours / base, jobs/s"),
                    Bar(">=", NOISE),
                    (Series("ours", "jobs/s", ours), Series("base", "jobs/s", base)),
                )
            )
    return figures


def _worked(
    client: Workers, side: QueueSide, workers: int, count: int, rates: list[float]
) -> Sample:
    """Run one round, and add its jobs/s to `rates`."""
    phases = client.round(side, workers=workers, batch=1, jobs=count)
    rates.append(1 / (1 / phases["claim"].rate + 1 / phases["ack"].rate))
    return phases["claim"]


def replay(bench: Bench) -> Figure:
    """From process start to ready over a journal without a checkpoint, after kill -9."""
    records = bench.options.scaled(RECORDS, RECORDS_QUICK)
    commands = {"ours": None, "base": bench.options.base}
    times: dict[str, list[float]] = {label: [] for label in commands}
    for label, command in commands.items():
        server = bench.start(f"journal-{label}", STILL, command=command)
        fill_records(bench, server, records)
        server.kill()
    for turn in range(bench.options.rounds + 1):
        for label in sorted(commands, reverse=bool(turn % 2)):
            server = bench.start(f"journal-{label}", STILL, wait=False, command=commands[label])
            seconds = server.wait_ready("/v0/ready")
            server.kill()
            if turn:
                times[label].append(seconds)
    ours, base = tuple(times["ours"]), tuple(times["base"])
    return Figure(
        "builds",
        f"process start to ready, {records:,} records in the journal",
        ratios(base, ours, "base / ours, seconds"),
        Bar(">=", NOISE),
        (Series("ours", "s", ours), Series("base", "s", base)),
    )
