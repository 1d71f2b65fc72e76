"""Millions of records through `topics load`: memory, reading back, a restart, a delete by tag."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import orjson

from benchmarks.bench import Bench
from benchmarks.clients.loader import BenchmarkError
from benchmarks.clients.requests import RECORD_BYTES, data_text
from benchmarks.report.figures import Bar, Figure, Series
from benchmarks.report.terminal import say
from benchmarks.servers.process import ServerProcess

TOPIC = "events"
PAGE = 1000
DELETED_SHARE = 100  # a delete by tag removes one record in this number
MEGABYTE = 1e6
SAMPLE_SECONDS = 0.05
RESTARTS = 3

TagOf = Callable[[int], str]


def few_tags(number: int) -> str:
    """One of 1,000 tags; the tags of one record in a hundred begin with `t-07`."""
    return f"t-{number % 100:02d}{number // 100 % 10}"


def own_tag(number: int) -> str:
    """A different tag for each record; the tags of one record in a hundred begin with `t-07`."""
    return f"t-{number % 100:02d}-{number}"


class MemoryWatch:
    """A thread that samples a server's RssAnon until stopped; it follows the server over
    restarts.
    """

    def __init__(self, server: ServerProcess) -> None:
        self.server = server
        self.highest_bytes = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._ended.wait(SAMPLE_SECONDS):
            self.highest_bytes = max(self.highest_bytes, self.server.rss_anon_bytes())

    def stop(self) -> None:
        """End the thread."""
        self._ended.set()
        self._thread.join()


def write_lines(path: Path, records: int, tag_of: TagOf) -> None:
    """The NDJSON file: line n is record n+1's data."""
    with path.open("wb", buffering=1 << 20) as file:
        for first in range(0, records, 10_000):
            numbers = range(first, min(records, first + 10_000))
            file.write(b"".join(data_text(n, tag_of(n)) + b"\n" for n in numbers))
    assert path.stat().st_size == records * (RECORD_BYTES + 1)


def load_file(server: ServerProcess, path: Path) -> float:
    """Load the file with the command line, as a user would; return the seconds."""
    environment = dict(os.environ) | {"TOPICS_URL": f"http://127.0.0.1:{server.port}"}
    command = [
        sys.executable,
        "-m",
        "topics_server",
        "load",
        TOPIC,
        str(path),
        "--tag-field",
        "tag",
    ]
    began = time.perf_counter()
    done = subprocess.run(
        command, env=environment, capture_output=True, check=False, stdin=subprocess.DEVNULL
    )
    if done.returncode:
        raise BenchmarkError(f"topics load: {done.returncode} {done.stderr[-600:]!r}")
    return time.perf_counter() - began


def read_back(
    server: ServerProcess, records: int, tag_of: TagOf, kept: Callable[[int], bool]
) -> tuple[int, float]:
    """Read all records in order and compare seqs and data with the sent ones; return count and
    seconds.
    """
    expected = 0
    seen = 0
    seconds = 0.0
    from_seq = 0
    while True:
        body = b'{"from_seq":%d,"limit":%d}' % (from_seq, PAGE)
        began = time.perf_counter()
        text = server.expect("POST", f"/v0/topics/{TOPIC}/diff", body)
        seconds += time.perf_counter() - began
        page = orjson.loads(text)
        if page["tombstone"] is not None:
            raise BenchmarkError(f"a tombstone: {page['tombstone']}")
        at = 0
        for record in page["records"]:
            while not kept(expected):
                expected += 1
            data = data_text(expected, tag_of(expected))
            at = text.find(data, at)
            if record["$seq"] != expected + 1 or at < 0:
                raise BenchmarkError(f"seq {record['$seq']} instead of {expected + 1}, or its data")
            expected += 1
            seen += 1
        from_seq = page["next_from_seq"]
        if page["caught_up"]:
            break
    if from_seq != records:
        raise BenchmarkError(f"the log ends at {from_seq} instead of {records}")
    return seen, seconds


def run_variant(
    bench: Bench, what: str, tag_of: TagOf, records: int, limit_mb: float
) -> list[Figure]:
    """Load, read, restart, delete by tag, kill and read again, with one kind of tags."""
    name = f"memory-{tag_of.__name__}"
    path = bench.folder / f"{name}.ndjson"
    say(f"    {what}: writing {records:,} lines")
    write_lines(path, records, tag_of)
    server = bench.start(name)
    watch = MemoryWatch(server)
    try:
        say("    loading, reading back")
        loaded_s = load_file(server, path)
        path.unlink()
        after_load = watch.highest_bytes
        seen, read_s = read_back(server, records, tag_of, lambda number: True)
        if seen != records:
            raise BenchmarkError(f"{seen:,} records read instead of {records:,}")
        say("    restart, tag delete, kill -9, reading again")
        ready_s = []
        for _ in range(RESTARTS):
            stopped_s = server.stop()
            server = watch.server = bench.start(name, wait=False)
            ready_s.append(server.wait_ready("/v0/ready"))
        rested = server.rss_anon_bytes()
        began = time.perf_counter()
        match = b'{"match":["tag","Glob","t-07*"]}'
        answer = orjson.loads(server.expect("POST", f"/v0/topics/{TOPIC}/delete", match))
        deleted_s = time.perf_counter() - began
        server.kill()
        server = watch.server = bench.start(name, wait=False)
        crashed_s = server.wait_ready("/v0/ready")
        kept, _ = read_back(server, records, tag_of, lambda number: number % DELETED_SHARE != 7)
        gone = records // DELETED_SHARE
        if answer["deleted"] != gone or kept != records - gone:
            raise BenchmarkError(f"deleted {answer['deleted']:,} of {gone:,}, read {kept:,} after")
        server.stop()
    finally:
        watch.stop()
    highest = watch.highest_bytes / MEGABYTE
    title = f"{records:,} records of {RECORD_BYTES} B, {what}"
    notes = (
        f"load {records / loaded_s:,.0f} records/s, RssAnon up to {after_load / MEGABYTE:,.0f} MB",
        f"full read back in order, data compared: {records / read_s:,.0f} records/s",
        f"clean stop {stopped_s:.2f} s; RssAnon after the restart {rested / MEGABYTE:,.0f} MB",
        f"tag delete of {gone:,} records: {deleted_s * 1e3:,.0f} ms; kill -9; still deleted, "
        f"ready after {crashed_s:.2f} s",
    )
    memory_mb = Series("highest RssAnon throughout", "MB", (highest,))
    ready = Series("process start to ready", "s", tuple(ready_s))
    return [
        Figure("memory", title, memory_mb, Bar("<=", limit_mb, "highest"), (), notes),
        Figure("memory", f"restart over {title}", ready, Bar("<=", 3.0)),
    ]


def memory(bench: Bench) -> list[Figure]:
    """Data larger than memory: with 1,000 distinct tags, and with a different tag for every
    record.
    """
    records = bench.options.records
    assert records % 1000 == 0, "every tag as often as the others"
    figures = run_variant(bench, "1,000 distinct tags", few_tags, records, 400.0)
    figures += run_variant(bench, "every tag its own", own_tag, records, 1200.0)
    return figures
