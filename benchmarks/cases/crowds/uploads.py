"""200 uploads of 60 MiB by one key that stall, while a client of another key appends.

Quiet and loaded rounds take turns on one server. A loaded round is measured only after the uploads
have begun and the first of them were refused.
"""

from __future__ import annotations

from benchmarks.bench import Bench, series, settle
from benchmarks.clients.loader import BenchmarkError, Loader, Sample
from benchmarks.clients.requests import append_request
from benchmarks.report.figures import Bar, Figure, Series, ratios
from benchmarks.servers.server import STILL

MIB = 2**20
P99_TIMES_MAX = 3.0
HONEST = "honest-key-of-the-benchmark"
GREEDY = "greedy-key-of-the-benchmark"
RATE = 400  # appends of one record a second
COUNT, COUNT_QUICK = 200, 40
SIZE, SIZE_QUICK = 60 * MIB, 4 * MIB
# The budget of bodies being received: room for as many bodies as by default.
BUDGET_BODIES = 4
# How long the uploads run before a round is measured, s.
BEGINNING_S = 2.0


def keyed(request: bytes) -> bytes:
    """The request with the honest client's key."""
    head, _, body = request.partition(b"\r\n\r\n")
    return b"%b\r\nauthorization: Bearer %b\r\n\r\n%b" % (head, HONEST.encode(), body)


def uploads(bench: Bench) -> list[Figure]:
    """The append's p99 during the uploads as a ratio of its quiet p99, and the memory of the
    uploads.
    """
    count = bench.options.scaled(COUNT, COUNT_QUICK)
    size = bench.options.scaled(SIZE, SIZE_QUICK)
    budget = BUDGET_BODIES * size
    server = bench.start(
        "uploads",
        STILL
        | {
            "TOPICS_API_KEYS": f"{HONEST},{GREEDY}",
            "TOPICS_MAX_BODY_BYTES": str(size),
            "TOPICS_MAX_WS_MESSAGE_BYTES": str(size),
            "TOPICS_MAX_RECEIVING_BYTES": str(budget),
        },
    )
    requests = bench.requests("honest", [keyed(append_request("t", n, 1)) for n in range(1000)])
    seconds = bench.options.seconds
    refused: list[float] = []
    grown: list[float] = []

    def quiet() -> Sample:
        return bench.loader.run(server.port, requests, rate=RATE, seconds=seconds)

    def loaded() -> Sample:
        resting = server.rss_anon_bytes()
        with Loader("benchmarks.clients.stalled") as stalled:
            stalled.begin(
                port=server.port,
                key=GREEDY,
                count=count,
                size=size,
                # The client of uploads ends after the round.
                seconds=BEGINNING_S + seconds + 0.5,
            )
            bench.loader.run(server.port, requests, rate=RATE, seconds=BEGINNING_S)
            sample = bench.loader.run(server.port, requests, rate=RATE, seconds=seconds)
            grown.append((server.rss_anon_bytes() - resting) / MIB)
            seen = stalled.answer()
        if seen["errors"]:
            raise BenchmarkError(f"{seen['errors']} uploads failed, first: {seen['first_error']}")
        refused.append(seen["refused"] / seen["seconds"])
        settle(server)
        return sample

    taken = bench.interleave({"quiet": quiet, "loaded": loaded})
    loud = series(taken["loaded"], "p99_ms", "p99 beside uploads")
    alone = series(taken["quiet"], "p99_ms", "p99 alone")
    rounds = len(loud.values)
    return [
        Figure(
            "uploads",
            f"append of one record beside {count} stalled uploads of {size // MIB} MiB: p99",
            ratios(loud.values, alone.values, "beside uploads / alone, p99"),
            Bar("<=", P99_TIMES_MAX),
            (
                loud,
                alone,
                series(taken["loaded"], "p50_ms", "p50 beside uploads"),
                series(taken["quiet"], "p50_ms", "p50 alone"),
                Series("refused", "1/s", tuple(refused[-rounds:])),
            ),
        ),
        Figure(
            "uploads",
            f"RssAnon grown, with a budget of {budget // MIB} MiB",
            Series("grown / budget", "x", tuple(m * MIB / budget for m in grown[-rounds:])),
            None,
            (Series("grown", "MiB", tuple(grown[-rounds:])),),
        ),
    ]
