"""What operating costs: single appends as shipped, beside the same with all of it taken out.

The server with eight keys, its caps, ids and figures, against `plain_server`, which
has none of it: interleaved in one run, round by round.
"""

from __future__ import annotations

import sys
from functools import partial

from benchmarks.bench import Bench, series
from benchmarks.cases.against_floor import CONNECTIONS, costs
from benchmarks.figures import Bar, Figure, ratios
from benchmarks.process import ServerProcess
from benchmarks.requests import append_request
from benchmarks.server import STILL, start_server

TOPIC = "bench"
# A tenth of the requests a second may go into all of it.
SHARE_MIN = 0.9
_KEY = "operator-key-of-the-benchmark"
# The key that calls is one of several, each restricted, as an installation has them.
_KEYS = ",".join([f"other-key-{number}:rw:tenant{number}:" for number in range(7)] + [_KEY])
_PLAIN_COMMAND = (sys.executable, "-m", "benchmarks.plain_server", "serve")


def _with_key(request: bytes) -> bytes:
    head, _, body = request.partition(b"\r\n\r\n")
    return b"%b\r\nauthorization: Bearer %b\r\n\r\n%b" % (head, _KEY.encode(), body)


def _started(bench: Bench, name: str, settings: dict[str, str], plain: bool) -> ServerProcess:
    command = _PLAIN_COMMAND if plain else bench.options.command
    server = bench.owned(start_server(bench.folder / name, STILL | settings, command))
    server.wait_ready("/v0/ready")
    return server


def operate_cost(bench: Bench) -> list[Figure]:
    """Single appends a second, as shipped and without."""
    sent = [append_request(TOPIC, number, 1) for number in range(1000)]
    keyed = bench.requests("keyed", [_with_key(request) for request in sent])
    plain = bench.requests("plain", sent)
    shipped = _started(bench, "shipped", {"TOPICS_API_KEYS": _KEYS}, plain=False)
    bare = _started(bench, "bare", {}, plain=True)
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
