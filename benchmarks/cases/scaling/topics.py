"""Appends to random topics, with 1 to 100,000 of them: one server for each number."""

from __future__ import annotations

import random
from functools import partial

from benchmarks.bench import Bench, Side
from benchmarks.cases.many_topics import name_of
from benchmarks.cases.scaling.tools import (
    GROW_SECONDS_MAX,
    LOAD_CONNECTIONS,
    loaded,
    measured,
    settled,
    sizes_of,
)
from benchmarks.clients.loader import BenchmarkError
from benchmarks.clients.requests import append_request
from benchmarks.report.figures import Figure
from benchmarks.report.scaling import APPEND, TOPICS
from benchmarks.servers.process import ServerProcess
from benchmarks.servers.server import STILL

CREATE_TRIES = 5


def created(bench: Bench, server: ServerProcess, size: int) -> None:
    """Create topics by appending to them; again, if the server was overloaded and refused some."""
    path = bench.requests(
        f"create-{size}", [append_request(name_of(number), 0, 1) for number in range(size)]
    )
    for _ in range(CREATE_TRIES):
        sample = bench.loader.run(
            server.port,
            path,
            connections=LOAD_CONNECTIONS,
            seconds=GROW_SECONDS_MAX,
            count=size,
            from_start=True,
            refusals=True,
        )
        if not sample.refused:
            return
    raise BenchmarkError(f"{size} topics: some were refused in each of {CREATE_TRIES} tries")


def topics(bench: Bench) -> list[Figure]:
    """The curve of appends."""
    sizes = sizes_of(bench, TOPICS)
    sides: dict[int, Side] = {}
    for size in sizes:
        server = bench.start(f"topics-{size}", STILL)
        created(bench, server, size)
        # As many distinct requests for each size, so that the generator has the same cache misses.
        order = [number % size for number in range(max(sizes))]
        random.Random(size).shuffle(order)
        requests = bench.requests(
            f"topics-{size}",
            [append_request(name_of(topic), turn, 1) for turn, topic in enumerate(order)],
        )
        settled(server)
        sides[size] = partial(loaded, bench, server, requests)
    return [measured(bench, TOPICS, APPEND, sides, ("no segment is sealed meanwhile",))]
