"""From process start to ready, over three kinds of data directory."""

from __future__ import annotations

import os
import shutil
import time

from benchmarks.bench import Bench
from benchmarks.cases.many_topics import TOPICS, TOPICS_QUICK, create_topics
from benchmarks.clients.loader import BenchmarkError
from benchmarks.clients.requests import append_request
from benchmarks.report.figures import Bar, Figure, Series
from benchmarks.servers.process import ServerProcess
from benchmarks.servers.server import STILL

RECORDS = 1_000_000
RECORDS_QUICK = 50_000
TOPIC = "log"
SEALED_QUIET_SECONDS = 2.0


def fill_records(bench: Bench, server: ServerProcess, records: int) -> None:
    """Append `records` records to one topic, a hundred at a time."""
    batch = [append_request(TOPIC, first, 100) for first in range(0, 100_000, 100)]
    bench.fill(server, bench.requests("batch", batch), records // 100, connections=16)
    check_records(server, records)


def check_records(server: ServerProcess, records: int) -> None:
    """Check that the topic holds all records; otherwise the recovery time means nothing."""
    state = server.expect("GET", f"/v0/topics/{TOPIC}")
    if b'"head_seq":%d,' % records not in state.replace(b" ", b""):
        raise BenchmarkError(f"{records:,} records expected: {state[:200]!r}")


def wait_sealed(bench: Bench, name: str) -> int:
    """Wait until no segment was added for a while; return the number of segments."""
    count, quiet_s = -1, 0.0
    for _ in range(600):
        found = len(list((bench.folder / name).glob("segments/*/*.data")))
        quiet_s = quiet_s + 0.1 if found == count else 0.0
        count = found
        if quiet_s >= SEALED_QUIET_SECONDS:
            break
        time.sleep(0.1)
    if not count:
        raise BenchmarkError("nothing was sealed")
    return count


def idle_floor(bench: Bench) -> Series:
    """The same start over an empty directory: the time of the imports alone."""
    times = []
    for turn in range(min(3, bench.options.rounds)):
        server = bench.start(f"empty-{turn}", wait=False)
        times.append(server.wait_ready("/v0/ready"))
        server.stop()
    return Series("empty directory", "s", tuple(times))


def restarts(bench: Bench, name: str, settings: dict[str, str], records: int) -> tuple[float, ...]:
    """The times to ready over new copies of a directory, one copy for each round.

    Each copy is synced first. A start syncs the journal that it finds; otherwise it would wait for
    the disk to write the copy, which took as long again as the start.
    """
    times = []
    for turn in range(bench.options.rounds):
        copy = f"{name}-{turn}"
        shutil.copytree(bench.folder / name, bench.folder / copy)
        os.sync()
        server = bench.start(copy, settings, wait=False)
        times.append(server.wait_ready("/v0/ready"))
        if records:
            check_records(server, records)
        server.kill()
        shutil.rmtree(bench.folder / copy)
    return tuple(times)


def recovery(bench: Bench) -> list[Figure]:
    """A million sealed records, a million in the journal, 100,000 topics."""
    records = bench.options.scaled(RECORDS, RECORDS_QUICK)
    topics = bench.options.scaled(TOPICS, TOPICS_QUICK)
    empty = idle_floor(bench)

    sealing = {"TOPICS_SEGMENT_MAX_EVENTS": str(records // 20)}
    server = bench.start("sealed", sealing)
    fill_records(bench, server, records)
    segments = wait_sealed(bench, "sealed")
    stopped_s = server.stop()
    sealed = restarts(bench, "sealed", sealing, records)
    shutil.rmtree(bench.folder / "sealed")

    server = bench.start("journal", STILL)
    fill_records(bench, server, records)
    server.kill()
    replayed = restarts(bench, "journal", STILL, records)
    shutil.rmtree(bench.folder / "journal")

    server = bench.start("topics")
    create_topics(bench, server, topics, 10)
    server.stop()
    many = restarts(bench, "topics", {}, 0)

    def figure(what: str, times: tuple[float, ...], limit: float, *notes: str) -> Figure:
        judged = Series("process start to ready", "s", times)
        return Figure("recovery", what, judged, Bar("<=", limit), (empty,), notes)

    return [
        figure(
            f"{records:,} sealed and checkpointed records",
            sealed,
            1.5,
            f"{segments} segments; the stop before took {stopped_s:.2f} s",
        ),
        figure(f"{records:,} records in an un-checkpointed journal, after kill -9", replayed, 5.0),
        figure(f"{topics:,} topics of 10 records, checkpointed", many, 5.0),
    ]
