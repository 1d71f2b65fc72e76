"""Writes to a topic with 1 to 10,000 live streams, all held by one client process.

Every number of watchers has its own topic on one server, and all streams stay open: a stream of
another topic has no part in a write.
"""

from __future__ import annotations

import dataclasses
import resource
from functools import partial

from benchmarks.bench import Bench, Side
from benchmarks.cases.scaling.tools import DISTINCT, measured, sizes_of, slice_seconds
from benchmarks.cases.watch.fanout import HEARTBEAT_MS, MANY_STREAMS, payloads
from benchmarks.clients.loader import Sample
from benchmarks.clients.requests import append_request
from benchmarks.clients.watching import OURS, Watchers, open_sessions
from benchmarks.report.figures import Figure
from benchmarks.report.scaling import DELIVERED, WATCHERS
from benchmarks.report.terminal import say
from benchmarks.servers.process import ServerProcess
from benchmarks.servers.server import STILL

# Open files of the server, or of the client, beside the streams.
SPARE_FILES = 500
# A round writes twice without counting it, to prove that every watcher gets the payload.
PROVEN = 2
SETTINGS = STILL | MANY_STREAMS | {"TOPICS_MAX_SSE_CONNECTIONS_PER_KEY": "0"}


def allowed(sizes: tuple[int, ...], open_files: int) -> tuple[int, ...]:
    """The sizes, smallest first, whose streams fit into the limit of open files together."""
    kept: list[int] = []
    for size in sorted(sizes):
        if sum(kept) + size + SPARE_FILES <= open_files:
            kept.append(size)
    return tuple(kept)


def a_delivery(sample: Sample, watchers: int) -> Sample:
    """The sample of a round with the cost of one message to one watcher."""
    written = sample.count + PROVEN
    each_us = sample.server_cpu_us * sample.count / written / watchers
    return dataclasses.replace(sample, server_cpu_us=each_us)


def watchers(bench: Bench) -> list[Figure]:
    """The curve of deliveries."""
    wanted = sizes_of(bench, WATCHERS)
    _, open_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    sizes = allowed(wanted, open_files)
    notes = [
        f"{size:,} watchers: not measured, a process may open {open_files:,} files (ulimit -Hn)"
        for size in wanted
        if size not in sizes
    ]
    for note in notes:
        say(f"  {note}")
    server = bench.start("watchers", SETTINGS)
    proofs = bench.requests("payloads", payloads())
    sides: dict[int, Side] = {}
    with Watchers() as client:
        for size in sizes:
            topic = f"watched-{size}"
            server.expect("PUT", f"/v0/topics/{topic}", b'{"durability":"disk"}')
            streams = open_sessions(server, [[topic]] * size, HEARTBEAT_MS)
            client.open(topic, server.port, bench.requests(f"streams-{size}", streams), OURS)
            writes = [append_request(topic, number, 1) for number in range(DISTINCT)]
            measure = partial(
                client.measure,
                topic,
                server.port,
                bench.requests(f"writes-{size}", writes),
                OURS,
                proofs=proofs,
                expect=size,
                seconds=slice_seconds(bench),
            )
            sides[size] = partial(_side, bench, server, measure, size)
        return [measured(bench, WATCHERS, DELIVERED, sides, notes)]


def _side(bench: Bench, server: ServerProcess, measure: Side, size: int) -> Sample:
    return a_delivery(bench.costed(server, measure), size)
