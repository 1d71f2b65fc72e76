"""The cost of operation: single appends to the shipped server, compared with a server without these
parts.

The shipped server has eight keys, its caps, request ids and metrics; `plain_server` has none of
them. The rounds are interleaved in one run.
"""

from __future__ import annotations

import sys
from functools import partial

from benchmarks.bench import Bench, series
from benchmarks.cases.against_floor import CONNECTIONS, costs
from benchmarks.clients.requests import append_request
from benchmarks.report.figures import Bar, Figure, ratios
from benchmarks.servers.process import ServerProcess
from benchmarks.servers.server import STILL, start_server

TOPIC = "bench"
# The bar: together these parts may cost a tenth of the requests a second.
SHARE_MIN = 0.9
_KEY = "operator-key-of-the-benchmark"
# The key of the client is one of several restricted keys, as in a real installation.
_KEYS = ",".join([f"other-key-{number}:rw:tenant{number}:" for number in range(7)] + [_KEY])
_PLAIN_COMMAND = (sys.executable, "-m", "benchmarks.servers.plain_server", "serve")


def _with_key(request: bytes) -> bytes:
    head, _, body = request.partition(b"\r\n\r\n")
    return b"%b\r\nauthorization: Bearer %b\r\n\r\n%b" % (head, _KEY.encode(), body)


def _started(bench: Bench, name: str, settings: dict[str, str], plain: bool) -> ServerProcess:
    command = _PLAIN_COMMAND if plain else bench.options.command
    server = bench.owned(start_server(bench.folder / name, STILL | settings, command))
    server.wait_ready("/v0/ready")
    return server


def operate_cost(bench: Bench) -> list[Figure]:
    """Single appends a second, with and without the parts of operation."""
    sent = [append_request(TOPIC, number, 1) for number in range(1000)]
    keyed = bench.requests("keyed", [_with_key(request) for request in sent])
    plain = bench.requests("plain", sent)
    shipped = _started(bench, "shipped", {"TOPICS_API_KEYS": _KEYS}, plain=False)
    bare = _started(bench, "bare", {"TOPICS_ALLOWED_HOSTS": "*"}, plain=True)
    figures = []
    for connections in CONNECTIONS:
        taken = bench.interleave(
            {
                "shipped": partial(bench.load, shipped, keyed, connections=connections),
                "bare": partial(bench.load, bare, plain, connections=connections),
            }
        )
        ours = series(taken["shipped"], "rate", "as shipped")
        without = series(taken["bare"], "rate", "without")
        plural = "s" if connections > 1 else ""
        figures.append(
            Figure(
                "operate-cost",
                f"append of 1 record with keys, limits, metrics and ids, "
                f"{connections} connection{plural}",
                ratios(ours.values, without.values, "as shipped / without, requests/s"),
                Bar(">=", SHARE_MIN),
                (ours, without),
                notes=(costs("as shipped", taken["shipped"]), costs("without", taken["bare"])),
            )
        )
    return figures
