"""The cost of `fsync`: compared with the raw disk for one writer, and with class disk for many
writers that share a sync.
"""

from __future__ import annotations

import statistics

from benchmarks.bench import Bench, series
from benchmarks.clients.loader import Sample
from benchmarks.clients.requests import append_request
from benchmarks.report.figures import Bar, Figure, Series, ratios
from benchmarks.report.machine import raw_sync_ms

RAW_OVERHEAD_MS = 0.6
SHARED_RATIO = 1.5
FAST_DISK_MS = 1.0  # the bar for shared syncs applies if a raw sync takes at most this long


def raw_side(bench: Bench, size: int) -> Sample:
    """One round of the raw disk, in the form of a load sample."""
    times = sorted(raw_sync_ms(bench.folder, size, bench.options.seconds))
    count = len(times)
    seconds = sum(times) / 1e3
    return Sample(
        count=count,
        seconds=seconds,
        rate=count / seconds,
        p50_ms=times[count // 2],
        p90_ms=times[int(count * 0.9)],
        p99_ms=times[int(count * 0.99)],
        max_ms=times[-1],
        generator_cpu_us=0.0,
    )


def fsync_lone(bench: Bench) -> list[Figure]:
    """One writer, one record, class fsync: the server's cost in addition to write + fdatasync."""
    server = bench.start()
    server.expect("PUT", "/v0/topics/sure", b'{"durability":"fsync"}')
    request = append_request("sure", 0, 1)
    requests = bench.requests("lone", [append_request("sure", n, 1) for n in range(1000)])
    taken = bench.interleave(
        {
            "ours": lambda: bench.load(server, requests),
            "raw": lambda: raw_side(bench, len(request)),
        }
    )
    ours = series(taken["ours"], "p50_ms", "ours, p50")
    raw = series(taken["raw"], "p50_ms", "raw write+fdatasync, p50")
    added = tuple(a - b for a, b in zip(ours.values, raw.values, strict=True))
    return [
        Figure(
            "fsync-lone",
            "fsync append of one record, alone: p50 above raw write+fdatasync",
            Series("ours - raw, p50", "ms", added),
            Bar("<=", RAW_OVERHEAD_MS),
            (
                ours,
                raw,
                series(taken["ours"], "p99_ms", "ours, p99"),
                series(taken["raw"], "p99_ms", "raw, p99"),
            ),
        )
    ]


def fsync_16(bench: Bench) -> list[Figure]:
    """Sixteen writers of 100 records each: class fsync compared with class disk."""
    server = bench.start()
    files = {}
    for name, topic in (("fsync", "sure"), ("disk", "fast")):
        body = b'{"durability":"%s"}' % name.encode()
        server.expect("PUT", f"/v0/topics/{topic}", body)
        requests = [append_request(topic, n * 100, 100) for n in range(100)]
        files[name] = bench.requests(name, requests)
    taken = bench.interleave(
        {
            "disk": lambda: bench.load(server, files["disk"], connections=16),
            "fsync": lambda: bench.load(server, files["fsync"], connections=16),
            "raw": lambda: raw_side(bench, 32_768),
        }
    )
    disk = series(taken["disk"], "rate", "class disk")
    sure = series(taken["fsync"], "rate", "class fsync")
    small = statistics.median(raw_sync_ms(bench.folder, 512, bench.options.seconds))
    fast = small <= FAST_DISK_MS
    note = f"raw write+fdatasync of 512 B: p50 {small:.3f} ms; the bar holds up to 1 ms"
    return [
        Figure(
            "fsync-16",
            "16 writers of 100 records: class disk over class fsync",
            ratios(disk.values, sure.values, "disk / fsync, requests/s"),
            Bar("<=", SHARED_RATIO) if fast else None,
            (
                disk,
                sure,
                series(taken["disk"], "p50_ms", "class disk, p50"),
                series(taken["fsync"], "p50_ms", "class fsync, p50"),
                series(taken["raw"], "p50_ms", "raw write+fdatasync of 32 KiB, p50"),
            ),
            (note,),
        )
    ]
