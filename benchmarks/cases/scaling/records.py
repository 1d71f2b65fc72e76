"""Appends to, and diffs of, a topic of 1,000 to 10,000,000 records: one server for each number.

The server runs with its defaults: it seals by itself, so that most records of a large topic are on
the disk.
"""

from __future__ import annotations

import random
from functools import partial

from benchmarks.bench import Bench, Side
from benchmarks.cases.scaling.tools import DISTINCT, grown, loaded, measured, settled, sizes_of
from benchmarks.clients.requests import append_request, diff_request
from benchmarks.report.figures import Figure
from benchmarks.report.scaling import ANYWHERE, APPEND, LAST, RECORDS
from benchmarks.servers.process import ServerProcess

TOPIC = "records"
BATCH = 1000
PAGE = 100
PLACES = 10_000  # more pages than the server's cache of blocks holds


def filled(bench: Bench, size: int) -> ServerProcess:
    """A server whose topic has this number of records."""
    server = bench.start(f"records-{size}")
    server.expect("PUT", f"/v0/topics/{TOPIC}", b'{"durability":"disk"}')
    grown(bench, server, TOPIC, "lots", size, BATCH)
    settled(server)
    return server


def records(bench: Bench) -> list[Figure]:
    """The three curves."""
    servers = {size: filled(bench, size) for size in sizes_of(bench, RECORDS)}
    singles = bench.requests("singles", [append_request(TOPIC, n, 1) for n in range(DISTINCT)])
    appends: dict[int, Side] = {}
    last: dict[int, Side] = {}
    anywhere: dict[int, Side] = {}
    for size, server in servers.items():
        chance = random.Random(size)
        places = [chance.randrange(size - PAGE + 1) for _ in range(PLACES)]
        pages = bench.requests(f"any-{size}", [diff_request(TOPIC, at, PAGE) for at in places])
        end = bench.requests(f"last-{size}", [diff_request(TOPIC, size - PAGE, PAGE)])
        appends[size] = partial(loaded, bench, server, singles)
        last[size] = partial(loaded, bench, server, end)
        anywhere[size] = partial(loaded, bench, server, pages)
    # The reads first: appends move the end.
    reads = [measured(bench, RECORDS, LAST, last), measured(bench, RECORDS, ANYWHERE, anywhere)]
    return [measured(bench, RECORDS, APPEND, appends), *reads]
