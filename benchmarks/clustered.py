"""`python -m benchmarks.analytics cluster`: Spark on two workers, from an archive and from a disk.

A server ships sealed segments to a real S3 server (versitygw, which `./run test-s3` builds). A
cluster of two worker processes then reads the same rows in turns from the archive, by ranges of
objects and with credentials only in its environment, and from the server's data directory. Each
full scan sums a hash of every column of every row, so the two sides must agree on every byte.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Final

import httpx

from benchmarks.clients.loader import BenchmarkError
from benchmarks.sealed_data import TAGS, payload
from benchmarks.servers.process import ServerProcess
from benchmarks.servers.server import start_server
from tests.cloud.gateway import gateway
from tests.cloud.signing import KEY, REGION, SECRET, signed

ROOT: Final = Path(__file__).resolve().parents[1]
BUCKET: Final = "benchmark"
ARCHIVED_WITHIN_S: Final = 600.0
# Records of one append.
APPENDED: Final = 1_000
# A new interpreter runs this, because the executors inherit its environment.
SCRIPT: Final = """
import json, os, sys, time
from spark_jobs.session import spark_session
rounds, places = int(sys.argv[1]), json.loads(sys.argv[2])
spark = spark_session("cluster", master="local-cluster[2,1,1024]", config={
    "spark.driver.memory": "1g", "spark.executor.memory": "1g"})
spark.sparkContext.setLogLevel("ERROR")
sums = "count(*) records", "sum(cast(xxhash64(*) as decimal(38, 0))) digest"
times = {name: [] for name in places}
found = {}
for number in range(rounds + 1):
    for name, place in places.items():
        began = time.perf_counter()
        reader = spark.read.format("topics").options(warn="false", topics="events")
        frame = reader.load(place)
        columns = [each for each, kind in frame.dtypes if not kind.startswith("map")]
        row = frame.select(*columns).selectExpr(*sums).collect()[0]
        if number:  # the first round starts the workers
            times[name].append(time.perf_counter() - began)
        found[name] = row.records, str(row.digest), columns
parts = spark.sparkContext.parallelize(range(8), 8).mapPartitions(lambda _: [os.getppid()])
print("FOUND " + json.dumps([times, found, len(set(parts.collect()))]))
spark.stop()
"""


def cluster(_spark: Any, given: argparse.Namespace) -> dict[str, Any]:
    """Full scans of both places in turns: seconds, rows a second, and their ratio."""
    records = min(given.records, 1_000_000)
    data_dir = given.dir / f"clustered-{records}"
    shutil.rmtree(data_dir, ignore_errors=True)
    with gateway() as endpoint:
        keys = {
            "AWS_ENDPOINT_URL": endpoint,
            "AWS_ALLOW_HTTP": "true",
            "AWS_REGION": REGION,
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
        }
        made = f"{endpoint}/{BUCKET}"
        httpx.put(made, headers=signed("PUT", made)).raise_for_status()
        url = f"s3://{BUCKET}/{records}"
        _archive(data_dir, records, url, keys)
        times, found, workers = _scanned({"archive": url, "disk": str(data_dir)}, given, keys)
    if found["archive"] != found["disk"] or found["disk"][0] != records:
        raise BenchmarkError(f"the rows differ: {found}")
    if workers != 2:
        raise BenchmarkError(f"{workers} workers read, not 2")
    ratios = [far / near for far, near in zip(times["archive"], times["disk"], strict=True)]
    seconds = {name: round(statistics.median(each), 2) for name, each in times.items()}
    ratio = round(statistics.median(ratios), 2)
    for name, took in seconds.items():
        low, high = min(times[name]), max(times[name])
        print(
            f"{name:8} {took:6.2f} s ({low:.2f} to {high:.2f}), {records / took:,.0f} rows/s",
            file=sys.stderr,
        )
    print(
        f"archive / disk {ratio:.2f} ({min(ratios):.2f} to {max(ratios):.2f}); "
        f"{records:,} rows equal by hash on two workers",
        file=sys.stderr,
    )
    return {"records": records, "seconds": seconds, "rounds": times, "ratio": ratio}


def _archive(data_dir: Path, records: int, url: str, keys: dict[str, str]) -> None:
    """Let a server take these records, seal and ship all of them, then stop it."""
    settings = {
        "TOPICS_ARCHIVE_URL": url,
        "TOPICS_ARCHIVE_RATE_BYTES": "0",
        "TOPICS_ARCHIVE_BASE_INTERVAL_MS": "1000",
        **keys,
    }
    with start_server(data_dir, settings) as server:
        server.wait_ready("/v0/ready")
        server.expect("PUT", "/v0/topics/events", b"{}")
        for first in range(1, records + 1, APPENDED):
            last = min(first + APPENDED - 1, records)
            server.expect("POST", "/v0/topics/events", _appended(range(first, last + 1)))
        server.expect("POST", "/v0/admin/seal")
        # A running base may have begun before the seal, so wait for two bases.
        for _ in range(2):
            _wait_for_base(server)


def _appended(numbers: range) -> bytes:
    """An append of records like those of `sealed_data`."""
    records = b",".join(
        b'{"data":%b,"tag":"user-%d","node":"node-%d"}'
        % (payload(number), number * 7919 % TAGS, number % 50)
        for number in numbers
    )
    return b'{"records":[%b]}' % records


def _wait_for_base(server: ServerProcess) -> None:
    """Wait until the archive has a base that is newer than its newest base now."""
    before, deadline = _base_ts(server), time.monotonic() + ARCHIVED_WITHIN_S
    while _base_ts(server) <= before:
        if time.monotonic() > deadline:
            raise BenchmarkError(f"no base in time: {server.tail()}")
        server.expect("POST", "/v0/topics/ticks", b'{"records":[{"data":0}],"create":true}')
        time.sleep(0.1)


def _base_ts(server: ServerProcess) -> float:
    lines = server.expect("GET", "/v0/metrics").decode().splitlines()
    shown = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return float(shown["topics_archive_base_timestamp_ms"])


def _scanned(places: dict[str, str], given: argparse.Namespace, keys: dict[str, str]) -> Any:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(given.rounds), json.dumps(places)],
        cwd=given.dir,
        env={**os.environ, **keys, "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "src")))},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    (line,) = [each for each in done.stdout.splitlines() if each.startswith("FOUND ")]
    return json.loads(line.removeprefix("FOUND "))
