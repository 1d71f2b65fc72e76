"""The cost of the continuous archive for appends, its lag, and the speed of a restore."""

from __future__ import annotations

import random
import subprocess
import time
from pathlib import Path

from benchmarks.bench import Bench, Side, series
from benchmarks.clients.loader import BenchmarkError, Loader
from benchmarks.clients.requests import append_request, http_request
from benchmarks.report.figures import Bar, Figure, Series, ratios
from benchmarks.servers.process import ServerProcess

# The least number of pairs for the medians of the bars.
PAIRS, PAIRS_QUICK = 15, 2
# A rate that takes half a core of the server: the case compares latencies, not throughput.
RATE = 1_000
P50_LIMIT, P99_LIMIT = 1.10, 1.30
# 20 MB a second: records of 1 kB, a hundred in an append.
LAG_APPENDS, RECORD_BYTES, BATCH = 200, 1_000, 100
# Bytes of a record, which are written as twice as many digits.
RANDOM_BYTES = 250
# If less of the rate was reached, the lag belongs to a lower rate and means nothing.
APPENDED_LIMIT = 19.0
LAG_LIMIT_S = 2.0
LAG_SECONDS, LAG_SECONDS_QUICK = 20.0, 2.0
STORE_BYTES, STORE_BYTES_QUICK = 1_000_000_000, 20_000_000
RESTORE_LIMIT = 100.0
MB = 1_000_000


def archived(bench: Bench, name: str) -> tuple[ServerProcess, str]:
    """A server with an archive in its own folder, which already has a base."""
    folder = bench.folder / f"{name}-archive"
    folder.mkdir()
    url = f"file://{folder}"
    server = bench.start(name, {"TOPICS_ARCHIVE_URL": url, "TOPICS_ARCHIVE_RATE_BYTES": "0"})
    server.expect("PUT", "/v0/topics/fast", b'{"durability":"disk"}')
    wait_archived(server)
    return server, url


def metric(server: ServerProcess, name: str) -> float:
    """The value of a metric without labels."""
    for line in server.expect("GET", "/v0/metrics").decode().splitlines():
        if line.startswith(f"{name} "):
            return float(line.split(" ")[1])
    raise BenchmarkError(f"there is no metric {name}")


def wait_archived(server: ServerProcess) -> None:
    """Wait until everything is in the archive."""
    for _ in range(6_000):
        is_based = metric(server, "topics_archive_base_timestamp_ms") > 0
        if is_based and metric(server, "topics_archive_lag_seconds") == 0:
            return
        time.sleep(0.1)
    raise BenchmarkError("the archive stays behind")


def batches() -> list[bytes]:
    """Appends of 100 kB that compress to a third, like typical JSON."""
    rng = random.Random(4)
    found = []
    for number in range(50):
        records = [
            b'{"data":"%s%s"}'
            % (
                rng.randbytes(RANDOM_BYTES).hex().encode(),
                b"%06x" % (number * BATCH + n) * ((RECORD_BYTES - 2 * RANDOM_BYTES) // 6),
            )
            for n in range(BATCH)
        ]
        body = b'{"records":[%s]}' % b",".join(records)
        found.append(http_request("POST", "/v0/topics/fast", body))
    return found


def appends(bench: Bench) -> list[Figure]:
    """p50 and p99 of appends with an archive, as ratios of those without, in alternating pairs."""
    plain = bench.start("plain")
    plain.expect("PUT", "/v0/topics/fast", b'{"durability":"disk"}')
    kept, _ = archived(bench, "kept")
    single = bench.requests("single", [append_request("fast", n, 1) for n in range(1000)])
    pairs = max(bench.options.rounds, bench.options.scaled(PAIRS, PAIRS_QUICK))

    def side(server: ServerProcess) -> Side:
        return lambda: bench.loader.run(
            server.port, single, connections=1, rate=RATE, seconds=bench.options.seconds
        )

    taken = bench.interleave({"plain": side(plain), "kept": side(kept)}, rounds=pairs)
    if metric(kept, "topics_archive_parts_total") < 1:
        raise BenchmarkError("no part was written while the archive was to be measured")
    found = []
    for name, limit in (("p50_ms", P50_LIMIT), ("p99_ms", P99_LIMIT)):
        shown = name.removesuffix("_ms")
        over = series(taken["kept"], name, f"{shown} with archive")
        under = series(taken["plain"], name, f"{shown} without")
        found.append(
            Figure(
                "archive",
                f"append of one record, {RATE:,} a second: {shown} with an archive",
                ratios(over.values, under.values, f"with / without, {shown}"),
                Bar("<=", limit),
                (over, under),
            )
        )
    plain.stop()
    kept.stop()
    return found


def behind(bench: Bench) -> list[Figure]:
    """The lag of the archive during appends of 20 MB a second, and the rate that was reached."""
    server, _ = archived(bench, "behind")
    requests = bench.requests("batches", batches())
    seconds = LAG_SECONDS_QUICK if bench.options.quick else LAG_SECONDS
    lags: list[float] = []
    rates: list[float] = []
    with Loader() as second:
        for _ in range(bench.options.rounds):
            second.begin(port=server.port, requests=requests, rate=LAG_APPENDS, seconds=seconds)
            highest, until = 0.0, time.monotonic() + seconds
            while time.monotonic() < until:
                highest = max(highest, metric(server, "topics_archive_lag_seconds"))
                time.sleep(0.1)
            sample = second.finish()
            lags.append(highest)
            rates.append(sample.rate * RECORD_BYTES * BATCH / MB)
            wait_archived(server)
    server.stop()
    return [
        Figure(
            "archive",
            "appends of 20 MB a second: how far the archive is behind, at most",
            Series("highest lag", "s", tuple(lags)),
            Bar("<=", LAG_LIMIT_S),
        ),
        Figure(
            "archive",
            "appends of 20 MB a second: how many of them the server took",
            Series("appended", "MB/s", tuple(rates)),
            Bar(">=", APPENDED_LIMIT),
        ),
    ]


def restored(bench: Bench) -> Figure:
    """How fast the newest moment of an archive in a folder is restored."""
    size = bench.options.scaled(STORE_BYTES, STORE_BYTES_QUICK)
    server, url = archived(bench, "filled")
    requests = bench.requests("fill", batches())
    bench.fill(server, requests, max(1, size // (RECORD_BYTES * BATCH)), connections=4)
    wait_archived(server)
    server.stop()
    words = [*bench.options.command[:-1], "restore", url]
    rates: list[float] = []
    for turn in range(bench.options.rounds):
        target = bench.folder / f"restored-{turn}"
        began = time.monotonic()
        subprocess.run([*words, str(target)], check=True, capture_output=True, timeout=1800)
        took = time.monotonic() - began
        rates.append(bytes_in(target) / took / MB)
    return Figure(
        "archive",
        f"restore of {size // MB:,} MB from a folder",
        Series("restored, imports included", "MB/s", tuple(rates)),
        Bar(">=", RESTORE_LIMIT),
    )


def bytes_in(folder: Path) -> int:
    """The bytes of all files. Of a journal file, only the written blocks count."""
    return sum(
        min(path.stat().st_size, path.stat().st_blocks * 512)
        for path in folder.rglob("*")
        if path.is_file()
    )


def archive(bench: Bench) -> list[Figure]:
    """The cost of an archive, its lag, and the speed of a restore."""
    return [*appends(bench), *behind(bench), restored(bench)]
