"""A claim of one job and its ack, in queues of 10 to 1,000,000 jobs.

A slice claims a few jobs, acks them and appends as many, again and again, so that the queue keeps
its depth. The generator does not read the seq of a claimed job: the server hands jobs out by seq,
and the case checks the queue's counts after each slice.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import time

from benchmarks.bench import Bench, settle
from benchmarks.cases.leases import claim_request, counts
from benchmarks.cases.scaling.tools import grown, measured, settled, sizes_of, slice_seconds
from benchmarks.clients.loader import BenchmarkError, Sample
from benchmarks.clients.requests import append_request, http_request
from benchmarks.report.figures import Figure
from benchmarks.report.scaling import CLAIM, QUEUE
from benchmarks.servers.process import ServerProcess

BATCH = 1000
LEASE_MS = 600_000
# Jobs that are claimed and then acked: half of the smallest queue. The first one of them is not
# counted, like the first request of every connection.
JOBS = 5
ACKS = 100_000  # more than a run needs


class Depth:
    """One queue, on one server for all of them."""

    def __init__(self, bench: Bench, server: ServerProcess, jobs: int) -> None:
        self._bench, self._server, self._jobs = bench, server, jobs
        self._name = f"depth-{jobs}"
        server.expect("PUT", f"/v0/topics/{self._name}", b'{"type":"queue","durability":"disk"}')
        lot = min(jobs, BATCH)
        grown(bench, server, self._name, f"lots-{jobs}", jobs, lot)
        self._claims = bench.requests(f"claims-{jobs}", [claim_request(self._name, 1, LEASE_MS)])
        self._acks = bench.requests(
            f"acks-{jobs}", (self._ack_request(seq) for seq in range(1, ACKS + 1))
        )
        self._refill = bench.requests(f"refill-{jobs}", [append_request(self._name, 0, JOBS)])
        self._check()

    def _ack_request(self, seq: int) -> bytes:
        body = json.dumps({"node": "w", "seqs": [seq]}).encode()
        return http_request("POST", f"/v0/topics/{self._name}/ack", body)

    def _check(self) -> None:
        found = counts(self._server, self._name)
        if found != (self._jobs, 0):
            raise BenchmarkError(f"{self._name}: ready and in flight are {found}")

    def side(self) -> Sample:
        """One slice: the cost of a claim with its ack."""
        claims: list[Sample] = []
        acks: list[Sample] = []
        ends = time.monotonic() + slice_seconds(self._bench)
        while time.monotonic() < ends:
            for path, taken in ((self._claims, claims), (self._acks, acks)):
                taken.append(
                    self._bench.loader.run(
                        self._server.port,
                        path,
                        connections=1,
                        seconds=600,
                        count=JOBS - 1,
                        pid=self._server.pid,
                    )
                )
            self._bench.fill(self._server, self._refill, 1, connections=1)
        self._check()
        settle(self._server)
        return together(claims, acks)


def together(claims: list[Sample], acks: list[Sample]) -> Sample:
    """The sample of a slice: CPU time and p50 of a claim and an ack together."""

    def mean(samples: list[Sample]) -> float:
        return statistics.fmean(sample.server_cpu_us for sample in samples)

    def middle(samples: list[Sample]) -> float:
        return statistics.median(sample.p50_ms for sample in samples)

    return dataclasses.replace(
        claims[0],
        count=sum(sample.count for sample in claims),
        server_cpu_us=mean(claims) + mean(acks),
        p50_ms=middle(claims) + middle(acks),
    )


def depth(bench: Bench) -> list[Figure]:
    """The curve of claims and acks."""
    server = bench.start("queue")
    queues = {size: Depth(bench, server, size) for size in sizes_of(bench, QUEUE)}
    settled(server)
    sides = {size: queue.side for size, queue in queues.items()}
    return [measured(bench, QUEUE, CLAIM, sides)]
