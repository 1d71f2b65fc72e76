"""The cost of many jobs: a claim with a million ready jobs, and other calls while 100,000 leases
expire.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

from benchmarks.bench import Bench, series, settle
from benchmarks.clients.loader import BenchmarkError, Sample
from benchmarks.clients.requests import append_request, diff_request, http_request
from benchmarks.report.figures import Bar, Figure, Series, ratios
from benchmarks.servers.process import ServerProcess

FEW = 1_000
MANY, MANY_QUICK = 1_000_000, 20_000
CLAIMS = 500  # claims of a round: at most half of the smaller queue
FLAT_ROUNDS = 3  # rounds for each requested one
FLAT_LIMIT = 1.1
NODE = b"w"
CALL_JOBS = 1_000  # the most jobs of one call, and of one append here

LEASES, LEASES_QUICK = 100_000, 10_000
LEASES_A_CLAIM = 250
EXPIRY_MS = 1_000  # all leases end within this time, the jobs of one claim at a time
# The time from the first claim to the first end of a lease; doubled if it was too short.
LEAD_SECONDS, LEAD_SECONDS_QUICK, LEAD_SECONDS_MAX = 8.0, 3.0, 60.0
PROBES_PER_SECOND = 1_000
PROBE_SECONDS = 1.0
PROBE_LEASE_MS = 500
STREAMS, STREAM_JOBS = 16, 8
EXPIRY_LIMIT = 3.0


def counts(server: ServerProcess, queue: str) -> tuple[int, int]:
    """The numbers of ready and in-flight jobs."""
    state = json.loads(server.expect("GET", f"/v0/topics/{queue}"))["queue"]
    return int(state["ready"]), int(state["in_flight"])


def make_queue(bench: Bench, server: ServerProcess, queue: str, jobs: int) -> None:
    """Create a queue with this number of jobs."""
    server.expect("PUT", f"/v0/topics/{queue}", b'{"type":"queue","durability":"disk"}')
    lots = [append_request(queue, first, CALL_JOBS) for first in range(0, 10 * CALL_JOBS, 1000)]
    bench.fill(server, bench.requests(f"lots-{queue}", lots), jobs // CALL_JOBS, connections=4)
    if counts(server, queue) != (jobs, 0):
        raise BenchmarkError(f"{jobs} jobs expected in {queue}: {counts(server, queue)}")


def claim_request(queue: str, count: int, lease_ms: int) -> bytes:
    """The bytes of a claim."""
    body = b'{"node":"%b","max":%d,"lease_ms":%d}' % (NODE, count, lease_ms)
    return http_request("POST", f"/v0/topics/{queue}/claim", body)


def held(server: ServerProcess, queue: str, what: str, seqs: Iterable[int]) -> None:
    """Ack or nack these jobs; the server must accept all of them."""
    asked = list(seqs)
    body = b'{"node":"%b","seqs":%b}' % (NODE, json.dumps(asked).encode())
    answer = json.loads(server.expect("POST", f"/v0/topics/{queue}/{what}", body))
    if answer["skipped"]:
        raise BenchmarkError(f"{what} of {queue}: {len(answer['skipped'])} skipped")


# -- a claim with many ready jobs -------------------------------------------------------------


class Level:
    """A queue whose jobs are claimed one at a time, with the same number of jobs in every round.

    The generator does not read answers, so the case must know the claimed jobs: the server delivers
    jobs by seq, and `returned` ones in the order of their return.
    """

    def __init__(self, bench: Bench, server: ServerProcess, jobs: int, *, returned: bool) -> None:
        self._bench = bench
        self._server = server
        self._jobs = jobs
        self._returned = returned
        self._name = f"{'returned' if returned else 'fresh'}-{jobs}"
        self._next_seq = 1
        make_queue(bench, server, self._name, jobs)
        if returned:
            lots = bench.requests(f"all-{jobs}", [claim_request(self._name, CALL_JOBS, 86_400_000)])
            bench.fill(server, lots, jobs // CALL_JOBS, connections=1)
            for first in range(1, jobs + 1, CALL_JOBS):
                held(server, self._name, "nack", range(first, first + CALL_JOBS))
        self._claims = bench.requests(
            f"claims-{self._name}", [claim_request(self._name, 1, 86_400_000)]
        )
        self._again = bench.requests(f"again-{self._name}", [append_request(self._name, 0, CLAIMS)])
        settle(server)

    def side(self) -> Sample:
        """Claim jobs one after the other, then restore the queue."""
        sample = self._bench.load(self._server, self._claims, seconds=600, count=CLAIMS)
        seqs = range(self._next_seq, self._next_seq + CLAIMS)
        self._next_seq += CLAIMS
        if self._returned:
            if self._next_seq > self._jobs:
                self._next_seq = 1
            held(self._server, self._name, "nack", seqs)
        else:
            held(self._server, self._name, "ack", seqs)
            self._bench.fill(self._server, self._again, 1, connections=1)
        if counts(self._server, self._name) != (self._jobs, 0):
            raise BenchmarkError(f"{self._name}: {counts(self._server, self._name)}")
        settle(self._server)
        return sample


def claim_flat(bench: Bench) -> list[Figure]:
    """A claim of one job among 1,000 ready jobs, and among 1,000,000."""
    server = bench.start()
    many = bench.options.scaled(MANY, MANY_QUICK)
    figures = []
    for returned, what in ((False, "never handed out"), (True, "handed out before")):
        few_side, many_side = (
            Level(bench, server, jobs, returned=returned) for jobs in (FEW, many)
        )
        # A side takes only a tenth of a second, so run more rounds.
        rounds = FLAT_ROUNDS * bench.options.rounds
        taken = bench.interleave({"many": many_side.side, "few": few_side.side}, rounds=rounds)
        over = series(taken["many"], "p50_ms", f"{many:,} wait, p50")
        under = series(taken["few"], "p50_ms", f"{FEW:,} wait, p50")
        figures.append(
            Figure(
                "claim-flat",
                f"claim of one job, {many:,} waiting over {FEW:,}, jobs {what}",
                ratios(over.values, under.values, "p50"),
                Bar("<=", FLAT_LIMIT),
                (
                    over,
                    under,
                    series(taken["many"], "p99_ms", f"{many:,} wait, p99"),
                    series(taken["few"], "p99_ms", f"{FEW:,} wait, p99"),
                    series(taken["many"], "server_cpu_us", f"{many:,} wait, CPU a claim"),
                    series(taken["few"], "server_cpu_us", f"{FEW:,} wait, CPU a claim"),
                ),
                (f"{CLAIMS} claims a round, one connection, class disk",),
            )
        )
    return figures


# -- many leases that expire --------------------------------------------------------------------


@contextmanager
def streams(server: ServerProcess, count: int) -> Iterator[None]:
    """Open push streams of the expiring queue, which the first jobs that come back fill."""
    query = f"node=p&max={STREAM_JOBS}&lease_ms=600000"
    head = f"GET /v0/topics/expiring/work?{query} HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n"
    with ExitStack() as stack:
        for _ in range(count):
            link = stack.enter_context(socket.create_connection(("127.0.0.1", server.port), 5))
            link.sendall(head.encode())
            if b" 200 " not in link.recv(4096):
                raise BenchmarkError("a push stream was refused")
        yield


class ExpiryRun:
    """Rounds in which all jobs of a queue are leased and all leases end within a second."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._server = bench.start()
        self._leases = bench.options.scaled(LEASES, LEASES_QUICK)
        self._lead = LEAD_SECONDS_QUICK if bench.options.quick else LEAD_SECONDS
        make_queue(bench, self._server, "expiring", self._leases)
        make_queue(bench, self._server, "other-queue", FEW)
        pages = append_request("other", 0, FEW)
        bench.fill(self._server, bench.requests("pages", [pages]), 1, connections=1)
        probes = []
        for number in range(100):
            probes += [
                append_request("other", number, 1),
                diff_request("other", 0, 100),
                claim_request("other-queue", 1, PROBE_LEASE_MS),
                http_request("GET", "/v0/topics/expiring"),
                claim_request("expiring", 1, PROBE_LEASE_MS),
            ]
        self._probes = bench.requests("probes", probes)
        self.calm: dict[int, list[Sample]] = {}
        settle(self._server)

    def round(self, waiting: int) -> Sample:
        """Return the probes of the second in which the leases end; store the probes before it in
        `calm`.
        """
        while (sample := self._tried(waiting)) is None:
            self._lead *= 2
            if self._lead > LEAD_SECONDS_MAX:
                raise BenchmarkError(f"{self._leases} leases take more than {self._lead / 2} s")
        return sample

    def _tried(self, waiting: int) -> Sample | None:
        """Try one round; None if the leases began to end before all jobs were leased."""
        server = self._server
        claims = self._leases // LEASES_A_CLAIM
        began = time.time()
        first_ms = int((began + self._lead) * 1000)
        for index in range(claims):
            lease_ms = first_ms + index * EXPIRY_MS // claims - int(time.time() * 1000)
            if lease_ms < 2 * PROBE_SECONDS * 1000:
                self._wait_back(began)
                return None
            body = b'{"node":"%b","max":%d,"lease_ms":%d}' % (NODE, LEASES_A_CLAIM, lease_ms)
            server.expect("POST", "/v0/topics/expiring/claim", body)
        if counts(server, "expiring") != (0, self._leases):
            raise BenchmarkError(f"not all are leased: {counts(server, 'expiring')}")
        with streams(server, waiting):
            quiet_at = first_ms / 1000 - PROBE_SECONDS - 0.3
            time.sleep(max(0.0, quiet_at - time.time()))
            self.calm.setdefault(waiting, []).append(self._probed())
            time.sleep(max(0.0, first_ms / 1000 - time.time()))
            sample = self._probed()
            ready, in_flight = counts(server, "expiring")
            if ready < self._leases * 0.95:
                raise BenchmarkError(f"{ready} have expired, {in_flight} are leased")
        self._wait_back(began)
        return sample

    def _wait_back(self, began: float) -> None:
        """Wait until all jobs are ready again."""
        while counts(self._server, "expiring") != (self._leases, 0):
            if time.time() > began + 3 * self._lead:
                raise BenchmarkError(f"leases that stay: {counts(self._server, 'expiring')}")
            time.sleep(0.1)
        settle(self._server)

    def _probed(self) -> Sample:
        return self._bench.loader.run(
            self._server.port,
            self._probes,
            connections=1,
            rate=PROBES_PER_SECOND,
            seconds=PROBE_SECONDS,
        )


def expiry(bench: Bench) -> list[Figure]:
    """Other calls in the second in which 100,000 leases end, compared with the second before."""
    run = ExpiryRun(bench)
    taken = bench.interleave(
        {str(count): partial(run.round, count) for count in (0, STREAMS)}, warm=False
    )
    leases = bench.options.scaled(LEASES, LEASES_QUICK)
    figures = []
    for count, who in ((0, "nobody waits"), (STREAMS, f"{STREAMS} push streams wait")):
        busy, calm = taken[str(count)], run.calm[count]
        slow = series(busy, "p99_ms", "p99 meanwhile")
        quiet = series(calm, "p99_ms", "p99 in the second before")
        beside: tuple[Series, ...] = (
            slow,
            quiet,
            series(busy, "p50_ms", "p50 meanwhile"),
            series(calm, "p50_ms", "p50 before"),
            series(busy, "max_ms", "slowest meanwhile"),
            series(calm, "max_ms", "slowest before"),
        )
        figures.append(
            Figure(
                "expiry",
                f"{leases:,} leases end within one second, {who}: other calls",
                ratios(slow.values, quiet.values, "p99, meanwhile / before"),
                Bar("<=", EXPIRY_LIMIT),
                beside,
                (
                    f"{PROBES_PER_SECOND:,} probes/s: append and diff of another topic, claim of "
                    "another queue, state and claim of this one",
                ),
            )
        )
    return figures
