"""Sizes, slices and rounds of an axis; used by every axis of the case `scaling`."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.bench import Bench, Side, settle
from benchmarks.clients.loader import BenchmarkError, Sample
from benchmarks.clients.requests import append_request
from benchmarks.report.figures import Figure
from benchmarks.report.scaling import Axis, Curve, Point, figure
from benchmarks.servers.process import ServerProcess

# A round has as many sides as an axis has sizes, so a side gets a share of the usual seconds.
SLICE_SHARE = 0.2
SETTLE_TURNS = 20
LOTS = 20  # different batches of a load
# So few that no request waits until it is refused, also on a busy machine.
LOAD_CONNECTIONS = 4
GROW_SECONDS_MAX = 900.0
PAUSE_SECONDS = 0.2
DISTINCT = 1000


def sizes_of(bench: Bench, axis: Axis) -> tuple[int, ...]:
    """The sizes of this run."""
    return axis.quick if bench.options.quick else axis.sizes


def slice_seconds(bench: Bench) -> float:
    """The seconds of one side in one round."""
    return bench.options.seconds * SLICE_SHARE


def loaded(
    bench: Bench,
    server: ServerProcess,
    requests: Path,
    *,
    connections: int = 1,
    seconds: float | None = None,
    count: int = 0,
) -> Sample:
    """Closed-loop load for one slice; returns when the server is idle.

    The generator reads the server's CPU time itself, when all its connections have been answered
    once: at 2,000 connections, opening them costs as much as many requests.
    """
    sample = bench.loader.run(
        server.port,
        requests,
        connections=connections,
        seconds=slice_seconds(bench) if seconds is None else seconds,
        count=count,
        pid=server.pid,
        refusals=True,
    )
    settle(server)
    return sample


def grown(
    bench: Bench, server: ServerProcess, topic: str, name: str, size: int, batch: int
) -> None:
    """Append until the topic's head is `size`; not measured.

    Records can come faster than they are sealed: the server then refuses some batches, which are
    sent again a little later.
    """
    lots = [append_request(topic, first, batch) for first in range(0, LOTS * batch, batch)]
    path = bench.requests(name, lots)
    ends = time.monotonic() + GROW_SECONDS_MAX
    while (head := head_of(server, topic)) < size:
        if time.monotonic() > ends:
            raise BenchmarkError(f"{topic}: {head} of {size} records in {GROW_SECONDS_MAX:.0f} s")
        bench.loader.run(
            server.port,
            path,
            connections=min(LOAD_CONNECTIONS, (size - head) // batch),
            seconds=GROW_SECONDS_MAX,
            count=(size - head) // batch,
            refusals=True,
        )
        time.sleep(PAUSE_SECONDS)


def head_of(server: ServerProcess, topic: str) -> int:
    """The last seq of a topic."""
    return int(json.loads(server.expect("GET", f"/v0/topics/{topic}"))["head_seq"])


def refusals(axis: Axis, curve: Curve, taken: Mapping[int, Sequence[Sample]]) -> list[str]:
    """A line for each size at which the server refused requests."""
    lines = []
    for size, samples in taken.items():
        refused = sum(sample.refused for sample in samples)
        if refused:
            share = refused / (refused + sum(sample.count for sample in samples))
            lines.append(
                f"{curve.name}, {axis.spelled(size)}: {share:.2%} of the requests refused (429)"
            )
    return lines


def settled(server: ServerProcess) -> None:
    """Wait until a server has done what follows a large load: sealing, a checkpoint."""
    for _ in range(SETTLE_TURNS):
        before = server.cpu_seconds()
        settle(server)
        if server.cpu_seconds() - before < 0.05:
            return


def measured(
    bench: Bench,
    axis: Axis,
    curve: Curve,
    sides: Mapping[int, Side],
    notes: Sequence[str] = (),
) -> Figure:
    """Interleaved rounds of a curve's sizes, as its figure."""
    found = bench.interleave({str(size): side for size, side in sides.items()})
    taken = {size: found[str(size)] for size in sides}
    return drawn(axis, curve, taken, notes)


def drawn(
    axis: Axis, curve: Curve, taken: Mapping[int, Sequence[Sample]], notes: Sequence[str] = ()
) -> Figure:
    """The figure of the samples of each size."""
    points = {size: point(samples) for size, samples in taken.items()}
    return figure(axis, curve, points, (*notes, *refusals(axis, curve, taken)))


def point(samples: Sequence[Sample]) -> Point:
    """The samples of one size."""
    return Point(
        tuple(sample.server_cpu_us for sample in samples),
        tuple(sample.p50_ms for sample in samples),
        tuple(sample.rate for sample in samples),
    )
