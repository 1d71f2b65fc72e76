"""The case `scaling`: every axis, one after the other."""

from __future__ import annotations

from benchmarks.bench import Bench
from benchmarks.cases.scaling.connections import connections
from benchmarks.cases.scaling.depth import depth
from benchmarks.cases.scaling.payload import payload
from benchmarks.cases.scaling.records import records
from benchmarks.cases.scaling.topics import topics
from benchmarks.cases.scaling.watchers import watchers
from benchmarks.report.figures import Figure

AXES = (topics, records, watchers, connections, payload, depth)


def scaling(bench: Bench) -> list[Figure]:
    """The figures of all axes. The servers of an axis end with it."""
    figures: list[Figure] = []
    for axis in AXES:
        figures += axis(bench)
        bench.end_servers()
    return figures
