"""Finding records, and deciding by records: reads by position, time and tag, watchers of many tags,
conditions.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path

from benchmarks.bench import Bench, series
from benchmarks.cases.against_floor import costs
from benchmarks.cases.watch.fanout import DISTINCT, HEARTBEAT_MS, MANY_STREAMS, payloads
from benchmarks.clients.loader import BenchmarkError, Sample
from benchmarks.clients.requests import append_body, data_text, http_request
from benchmarks.clients.watching import OURS, Watchers, stream_request
from benchmarks.report.figures import Bar, Figure, Series, ratios
from benchmarks.servers.process import ServerProcess
from benchmarks.servers.server import STILL

TOPIC = "find"
PAGE = 10
RARE = 5000  # one record in this number has the tag
BATCH = 1000
PLACES = 100  # different requests of a kind
READ_LIMIT = 3.0
# -- watchers -------------------------------------------------------------------------------------
WATCHERS, WATCHERS_QUICK = 1000, 50
WATCHERS_LIMIT = 1.5
# -- conditions -----------------------------------------------------------------------------------
CONDITION_TOPICS = 20
CONDITION_APPENDS = 200
BEHIND = 10  # the number of records that a decision reads
CONDITION_LIMIT_US = 10.0


def tag_of(number: int) -> str:
    """One of 5,000 tags."""
    return f"t-{number % RARE:04d}"


def fill_requests(records: int) -> Iterator[bytes]:
    """Appends of all records, each with its tag."""
    for first in range(0, records, BATCH):
        made = [
            b'{"data":%s,"tag":"%s"}' % (data_text(number, tag_of(number)), tag_of(number).encode())
            for number in range(first, min(records, first + BATCH))
        ]
        yield http_request("POST", f"/v0/topics/{TOPIC}", b'{"records":[%s]}' % b",".join(made))


def read_request(query: str) -> bytes:
    """A page of ten records."""
    return http_request("GET", f"/v0/topics/{TOPIC}/records?limit={PAGE}&{query}")


def read_queries(server: ServerProcess, records: int) -> dict[str, list[str]]:
    """The queries of each kind, spread over the topic. The other kinds are compared with `tail`."""
    step = records // PLACES
    queries: dict[str, list[str]] = {
        "tail": [f"from_seq={records - PAGE}"],
        "last": [f"last={PAGE}"],
        "order=desc": ["order=desc"],
        "since": [],
        "rare tag": [],
    }
    for place in range(PLACES):
        seq = place * step + 1
        record = json.loads(server.expect("GET", f"/v0/topics/{TOPIC}/records/{seq}"))
        queries["since"].append(f"since={record['record']['$ts']}")
        # Start where ten matches follow in sealed records: a page examines only a bounded part of
        # the other records.
        from_seq = place * (records - BATCH - (PAGE + 1) * RARE) // PLACES
        queries["rare tag"].append(f"tag={tag_of(place * 37)}&from_seq={from_seq}")
    return queries


def check_page(server: ServerProcess, kind: str, query: str) -> None:
    """Check that each kind finds ten records; otherwise the compared work would differ."""
    path = f"/v0/topics/{TOPIC}/records?limit={PAGE}&{query}"
    found = json.loads(server.expect("GET", path))["records"]
    if len(found) != PAGE:
        raise BenchmarkError(f"{kind}: {len(found)} records instead of {PAGE}")


def reads(bench: Bench) -> list[Figure]:
    """Reads of ten records by position, time, order and tag, compared with the last ten by seq."""
    # At least ten records of a tag follow every place.
    records = max(bench.options.records, 2 * PAGE * RARE)
    server = bench.start("reads")
    made = fill_requests(records)
    for name, count in (("most", records // BATCH - 1), ("tail", 1)):
        fill = bench.requests(f"fill-{name}", islice(made, count))
        bench.fill(server, fill, count, connections=1)
        fill.unlink()
        if name == "most":
            server.expect("POST", "/v0/admin/seal")
    queries = read_queries(server, records)
    sides = {}
    for kind, asked in queries.items():
        check_page(server, kind, asked[-1])
        requests = bench.requests(kind.replace(" ", "-"), [read_request(query) for query in asked])
        sides[kind] = partial(bench.load, server, requests)
    taken = bench.interleave(sides)
    tail = series(taken.pop("tail"), "p50_ms", "the last ten by seq, p50")
    figures = []
    for kind, samples in taken.items():
        found = series(samples, "p50_ms", f"{kind}, p50")
        figures.append(
            Figure(
                "find",
                f"{kind}: ten of {records:,} records",
                ratios(found.values, tail.values, "p50 / that of the last ten by seq"),
                Bar("<=", READ_LIMIT),
                (found, tail, series(samples, "p99_ms", f"{kind}, p99")),
                (costs(kind, samples),),
            )
        )
    server.stop()
    return figures


def live_requests(topic: str, tags: list[str]) -> list[bytes]:
    """A live stream for each tag, from the head on."""
    query = f"tail=true&heartbeat_ms={HEARTBEAT_MS}"
    return [stream_request(f"/v0/topics/{topic}/live?{query}&tag={tag}") for tag in tags]


def watchers(bench: Bench) -> list[Figure]:
    """An append that one of 1,000 watchers waits for, compared with one that the only watcher waits
    for.
    """
    count = bench.options.scaled(WATCHERS, WATCHERS_QUICK)
    server = bench.start("watchers", MANY_STREAMS | STILL)
    proofs = bench.requests("proofs", payloads())
    tags = [f"t-{number:03d}" for number in range(DISTINCT)]
    appends: dict[str, list[bytes]] = {"one": [], "many": []}
    for number, data in enumerate(payloads()):
        # The tags of the watchers are used in turn, also with fewer watchers in a quick run.
        for side, tag in (("one", tags[0]), ("many", tags[number % count])):
            body = b'{"records":[{"data":%s,"tag":"%s"}]}' % (data, tag.encode())
            appends[side].append(http_request("POST", f"/v0/topics/{side}", body))
    with Watchers() as client:
        sides = {}
        for side, followed in (("one", tags[:1]), ("many", tags[:count])):
            server.expect("PUT", f"/v0/topics/{side}", b'{"durability":"disk"}')
            streams = bench.requests(f"streams-{side}", live_requests(side, followed))
            client.open(side, server.port, streams, OURS)
            written = bench.requests(f"appends-{side}", appends[side])
            sides[side] = partial(
                bench.costed,
                server,
                partial(_delivered, bench, client, server, side, written, proofs),
            )
        taken = bench.interleave(sides)
    many = series(taken["many"], "server_cpu_us", f"{count:,} watchers of as many tags")
    one = series(taken["one"], "server_cpu_us", "one watcher")
    return [
        Figure(
            "find",
            f"append that one of {count:,} watchers of {count:,} tags gets",
            ratios(many.values, one.values, "server CPU / that with one watcher"),
            Bar("<=", WATCHERS_LIMIT),
            (many, one, series(taken["many"], "p50_ms", "until the watcher has it, p50")),
        )
    ]


def _delivered(
    bench: Bench,
    client: Watchers,
    server: ServerProcess,
    side: str,
    written: Path,
    proofs: Path,
) -> Sample:
    """Append records one after the other, each after its watcher has received the last."""
    return client.measure(
        side,
        server.port,
        written,
        OURS,
        proofs=proofs,
        expect=1,
        seconds=bench.options.seconds,
    )


def decisions(bench: Bench) -> list[Figure]:
    """Appends with a condition on the last few records, compared with appends without a
    condition.
    """
    appends = bench.options.scaled(CONDITION_APPENDS, 20)
    server = bench.start("decisions", STILL)
    turn = 0

    def run(*, decided: bool) -> Sample:
        """Run one round on new topics, because each condition names the seq at which it was
        read.
        """
        nonlocal turn
        turn += 1
        sent = []
        for topic in range(CONDITION_TOPICS):
            name = f"d-{turn}-{topic}"
            for number in range(appends):
                body = append_body(number, 1)
                if decided and number:
                    after = max(0, number - BEHIND)
                    asked = b',"if":{"none_match":"seat-%d","after":%d}}' % (number, after)
                    body = body[:-1] + asked
                sent.append(http_request("POST", f"/v0/topics/{name}", body))
        requests = bench.requests(f"decisions-{turn}", sent)
        run_all = partial(
            bench.loader.run,
            server.port,
            requests,
            connections=1,
            seconds=600,
            count=len(sent),
            from_start=True,
        )
        sample = bench.costed(server, run_all)
        requests.unlink()
        return sample

    taken = bench.interleave(
        {"if": partial(run, decided=True), "plain": partial(run, decided=False)}
    )
    decided = series(taken["if"], "server_cpu_us", "with a condition")
    plain = series(taken["plain"], "server_cpu_us", "without")
    more = tuple(a - b for a, b in zip(decided.values, plain.values, strict=True))
    return [
        Figure(
            "find",
            f"condition on what came after the last {BEHIND} records",
            Series("server CPU more than without", "us", more),
            Bar("<=", CONDITION_LIMIT_US),
            (decided, plain),
        )
    ]


def find(bench: Bench) -> list[Figure]:
    """The cost of finding records, and of conditions on records."""
    return [*reads(bench), *watchers(bench), *decisions(bench)]
