"""Appends to random topics, with 1 to 100,000 of them: one server for each number."""

from __future__ import annotations

import random
from functools import partial

from benchmarks.bench import Bench, Side
from benchmarks.cases.many_topics import create_topics, name_of
from benchmarks.cases.scaling.tools import LOAD_CONNECTIONS, loaded, measured, settled, sizes_of
from benchmarks.clients.requests import append_request
from benchmarks.report.figures import Figure
from benchmarks.report.scaling import APPEND, TOPICS
from benchmarks.servers.server import STILL


def topics(bench: Bench) -> list[Figure]:
    """The curve of appends."""
    sizes = sizes_of(bench, TOPICS)
    sides: dict[int, Side] = {}
    for size in sizes:
        server = bench.start(f"topics-{size}", STILL)
        create_topics(bench, server, size, 1, LOAD_CONNECTIONS)
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
