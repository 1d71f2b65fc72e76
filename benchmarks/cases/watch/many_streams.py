"""Many streams: the cost of idle streams, the effect of unread streams on others, many sessions."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

from benchmarks.bench import Bench, series, settle
from benchmarks.cases.larger_than_memory import MemoryWatch
from benchmarks.cases.many_topics import name_of
from benchmarks.cases.watch.fanout import DISTINCT, MANY_STREAMS, payloads
from benchmarks.clients.loader import BenchmarkError, Loader, Sample
from benchmarks.clients.requests import append_request, http_request
from benchmarks.clients.watching import OURS, Watchers, open_sessions
from benchmarks.report.figures import Bar, Figure, Series, ratios
from benchmarks.servers.cpu_time import read_proc
from benchmarks.servers.process import ServerProcess
from benchmarks.servers.server import STILL

# -- idle -----------------------------------------------------------------------------------------
IDLE, IDLE_QUICK = 2000, 100
IDLE_KIB_LIMIT = 60.0
IDLE_CORE_LIMIT = 0.01
BEAT_MS, BEAT_MS_QUICK = 15_000, 1000
SILENT_MS = 60_000
IDLE_SECONDS = 10.0

# -- stuck ----------------------------------------------------------------------------------------
STUCK, STUCK_QUICK = 1000, 50
WELL_BEHAVED = 20
PROBES_PER_SECOND = 100  # writes to the well-behaved watchers
PHASE_SECONDS, PHASE_SECONDS_QUICK = 10.0, 2.0
LOAD_TOPICS = 4
LOAD_RECORDS, LOAD_RECORD_BYTES = 100, 5000
LOAD_MB_PER_SECOND = 50
# Without a cap the case would leave gigabytes of journal. With the cap, the case also tests
# watchers that never read while the floor moves.
LOAD_CONFIG = b'{"durability":"disk","cap_bytes":268435456}'
FULL_SECONDS_MAX = 5  # wait until the kernel's memory for the sockets stops growing
SLOW_MS, SLOW_MS_QUICK = 30_000, 10_000  # the server's default
CLOSE_SECONDS = 30.0  # the time in which the server must close stuck sockets
SOCKETS_LEFT = 8  # control connections and the listener

# -- sessions -------------------------------------------------------------------------------------
SESSIONS, SESSIONS_QUICK = 100, 5
TOPICS_EACH = 100
SESSIONS_LIMIT = 1.15


def busy_share(server: ServerProcess, seconds: float) -> float:
    """CPU of an undisturbed server over some time, as a share of one core."""
    before, began = server.cpu_seconds(), time.monotonic()
    time.sleep(seconds)
    return (server.cpu_seconds() - before) / (time.monotonic() - began)


def idle_watchers(bench: Bench) -> list[Figure]:
    """Memory per stream, and CPU of 2,000 streams that get only heartbeats."""
    count = bench.options.scaled(IDLE, IDLE_QUICK)
    beat_ms = bench.options.scaled(BEAT_MS, BEAT_MS_QUICK)
    silent_seconds = min(IDLE_SECONDS, bench.options.seconds * 10)
    taken: dict[str, list[float]] = {"kib": [], "alone": [], "silent": [], "beating": []}
    for turn in range(min(3, bench.options.rounds)):
        # A new process each round: a process reuses the memory of ended streams.
        server = bench.start(f"idle-{turn}", MANY_STREAMS)
        server.expect("POST", "/v0/topics/idle", b'{"records":[{"data":1}]}')
        with Watchers() as client:

            def hold(
                group: str,
                streams: int,
                heartbeat_ms: int,
                server: ServerProcess = server,
                client: Watchers = client,
            ) -> None:
                gets = open_sessions(server, [["idle"]] * streams, heartbeat_ms)
                client.open(group, server.port, bench.requests(group, gets), OURS)

            hold("first", 20, SILENT_MS)  # exclude the modules and data that the first streams load
            client.close_group("first")
            settle(server)
            taken["alone"].append(busy_share(server, silent_seconds) * 100)
            empty = server.rss_anon_bytes()
            hold("silent", count, SILENT_MS)
            settle(server)
            taken["kib"].append((server.rss_anon_bytes() - empty) / count / 1024)
            taken["silent"].append(busy_share(server, silent_seconds) * 100)
            client.close_group("silent")
            hold("beating", count, beat_ms)
            settle(server)
            client.look("beating")
            # Each stream gets one heartbeat between two of these times.
            taken["beating"].append(busy_share(server, beat_ms / 1e3) * 100)
            seen = client.look("beating")
            if seen.closed or seen.beats < count * 0.95:
                raise BenchmarkError(f"{count} idle streams: {seen}")
        server.kill()
    what = f"{count:,} idle streams"
    return [
        Figure(
            "idle-watchers",
            f"{what}: anonymous memory of the server, a stream with its session",
            Series("RssAnon", "KiB", tuple(taken["kib"])),
            Bar("<=", IDLE_KIB_LIMIT),
        ),
        Figure(
            "idle-watchers",
            f"{what}: CPU with a heartbeat every {beat_ms / 1e3:g} s",
            Series("of one core", "%", tuple(taken["beating"])),
            Bar("<=", IDLE_CORE_LIMIT * 100),
            (
                Series(f"no heartbeat due, {silent_seconds:g} s", "%", tuple(taken["silent"])),
                Series(
                    f"the server without a stream, {silent_seconds:g} s", "%", tuple(taken["alone"])
                ),
            ),
        ),
    ]


def load_requests(bench: Bench) -> Path:
    """Appends of about half a megabyte to several topics in turn."""
    requests = []
    for batch in range(4 * LOAD_TOPICS):
        records = []
        for number in range(LOAD_RECORDS):
            seed = b"%010d" % ((batch * LOAD_RECORDS + number) * 2_654_435_761 % 10**10)
            records.append(b'{"data":"%s"}' % (seed * (LOAD_RECORD_BYTES // 10)))
        body = b'{"records":[%s]}' % b",".join(records)
        requests.append(http_request("POST", f"/v0/topics/load-{batch % LOAD_TOPICS}", body))
    return bench.requests("load", requests)


def kernel_mb() -> float:
    """Memory of all TCP sockets of the machine: the bytes between the two ends."""
    for line in read_proc("net/sockstat").splitlines():
        if line.startswith("TCP:"):
            return int(line.split()[-1]) * 4096 / 1e6
    return 0.0


class StuckRun:
    """A server under a write load, with or without sockets that never read.

    Each round has its own server, so that memory of the round before does not count.
    """

    def __init__(self, bench: Bench, client: Watchers, second: Loader) -> None:
        self.bench = bench
        self.client = client
        self.second = second
        self.stuck = bench.options.scaled(STUCK, STUCK_QUICK)
        self.seconds = PHASE_SECONDS_QUICK if bench.options.quick else PHASE_SECONDS
        self.slow_ms = bench.options.scaled(SLOW_MS, SLOW_MS_QUICK)
        self.loads = [f"load-{number}" for number in range(LOAD_TOPICS)]
        self.appends = load_requests(bench)
        self.append_bytes = LOAD_RECORDS * LOAD_RECORD_BYTES
        probes = [append_request("quiet", number, 1) for number in range(DISTINCT)]
        self.probes = bench.requests("quiet-probes", probes)
        self.proofs = bench.requests("quiet-payloads", payloads())
        self.fill_seconds = self.seconds * 0.4
        self.filling: dict[str, list[Sample]] = {"with": [], "without": []}
        self.peak_mb: dict[str, list[float]] = {"with": [], "without": []}
        self.rate_mb: dict[str, list[float]] = {"with": [], "without": []}
        self.kernel_mb: list[float] = []
        self.closed_after_s: list[float] = []
        self.outcome = ""

    def phase(self, name: str) -> Sample:
        """Run a round: one process sends the load, another probes the well-behaved watchers."""
        data = f"stuck-{name}"
        settings = {"TOPICS_SLOW_CONSUMER_TIMEOUT_MS": str(self.slow_ms)}
        server = self.bench.start(data, MANY_STREAMS | settings)
        for topic in (*self.loads, "quiet"):
            server.expect("PUT", f"/v0/topics/{topic}", LOAD_CONFIG)
        self._open(server, "good", [["quiet"]] * WELL_BEHAVED)
        if name == "with":
            # Half of the sockets follow all topics of the load; the other half follow one of these
            # and the measured topic.
            sets = (
                self.loads if n % 2 else [self.loads[n % 4], "quiet"] for n in range(self.stuck)
            )
            self._open(server, "stuck", sets)
        memory = MemoryWatch(server)
        try:
            sample = self._measured(server, name)
        finally:
            memory.stop()
        self.peak_mb[name].append(memory.highest_bytes / 1e6)
        self.client.close_group("good")
        server.kill()
        shutil.rmtree(self.bench.folder / data)
        return sample

    def _open(self, server: ServerProcess, group: str, sets: Iterable[Sequence[str]]) -> None:
        gets = open_sessions(server, sets, SILENT_MS)
        self.client.open(group, server.port, self.bench.requests(group, gets), OURS)

    def _measured(self, server: ServerProcess, name: str) -> Sample:
        began = time.monotonic()
        stop = self.bench.folder / "stuck.stop"
        self.second.begin(
            port=server.port,
            requests=self.appends,
            rate=LOAD_MB_PER_SECOND * 1e6 / self.append_bytes,
            seconds=self.fill_seconds + self.seconds + FULL_SECONDS_MAX + 5.0,
            stop=stop,
        )
        # At first the kernel takes some megabytes for each socket, so exclude this burst.
        self.filling[name].append(self._probed(server, self.fill_seconds))
        full_mb, turns = 0.0, 0
        while (now_mb := kernel_mb()) > full_mb * 1.01 and turns < FULL_SECONDS_MAX:
            full_mb, turns = now_mb, turns + 1
            time.sleep(1)
        self.kernel_mb.append(full_mb)
        sample = self._probed(server, self.seconds)
        stop.touch()
        load = self.second.finish()
        stop.unlink()
        self.rate_mb[name].append(load.rate * self.append_bytes / 1e6)
        if name == "with":
            self._until_closed(server, began)
        return sample

    def _probed(self, server: ServerProcess, seconds: float) -> Sample:
        """Write to the well-behaved watchers at a fixed rate."""
        return self.client.measure(
            "good",
            server.port,
            self.probes,
            OURS,
            proofs=self.proofs,
            expect=WELL_BEHAVED,
            seconds=seconds,
            rate=PROBES_PER_SECOND,
        )

    def _until_closed(self, server: ServerProcess, began: float) -> None:
        """Wait until the server closes the stuck sockets, then examine the bytes that they
        received.

        A socket that never reads cannot show the reason; tests check that the server sends the
        frame.
        """
        deadline = began + self.slow_ms / 1e3 + CLOSE_SECONDS
        keep = WELL_BEHAVED + SOCKETS_LEFT
        while server.open_sockets() > keep and time.monotonic() < deadline:
            time.sleep(0.1)
        after = time.monotonic() - began
        left = max(0, server.open_sockets() - keep)
        seen = self.client.look("stuck")
        self.client.close_group("stuck")
        self.closed_after_s.append(after)
        self.outcome = (
            f"{seen.closed:,} were closed, about {left:,} still open, {after:.0f} s after the load "
            f"began; each got {seen.bytes / seen.sockets / 1e6:.1f} MB, as much as the kernel holds"
        )


def stuck_watchers(bench: Bench) -> list[Figure]:
    """1,000 sockets that never read, under a load of 50 MB/s: memory, and the latency of the
    others.
    """
    with Watchers() as client, Loader() as second:
        run = StuckRun(bench, client, second)
        taken = bench.interleave(
            {"without": partial(run.phase, "without"), "with": partial(run.phase, "with")},
            rounds=min(3, bench.options.rounds),
            warm=False,
        )
    what = f"{run.stuck:,} sockets that never read"
    beside = series(taken["with"], "p99_ms", "p99 beside them")
    quiet = series(taken["without"], "p99_ms", "p99 without them")
    rate = Series("load, with them", "MB/s", tuple(run.rate_mb["with"]))
    calm_rate = Series("load, without", "MB/s", tuple(run.rate_mb["without"]))
    return [
        Figure(
            "stuck-watchers",
            f"{what}: peak of the server's anonymous memory",
            Series("RssAnon", "MB", tuple(run.peak_mb["with"])),
            None,
            (
                Series("without them", "MB", tuple(run.peak_mb["without"])),
                Series("TCP buffers of the machine", "MB", (max(run.kernel_mb),)),
                rate,
                Series("until the last one was closed", "s", tuple(run.closed_after_s)),
            ),
            (run.outcome,),
        ),
        Figure(
            "stuck-watchers",
            f"{WELL_BEHAVED} watchers of another topic beside {what}: p99 of write to last byte",
            ratios(beside.values, quiet.values, "with / without, p99"),
            None,
            (
                beside,
                quiet,
                series(taken["with"], "p50_ms", "p50 beside them"),
                series(taken["without"], "p50_ms", "p50 without them"),
                series(run.filling["with"], "p99_ms", "p99 while their buffers filled"),
                series(run.filling["without"], "p99_ms", "p99 without them, as early"),
                rate,
                calm_rate,
            ),
        ),
    ]


def sessions(bench: Bench) -> list[Figure]:
    """10,000 topics: an append with 100 sessions of 100 topics each, compared with one session."""
    count = bench.options.scaled(SESSIONS, SESSIONS_QUICK)
    topics = [name_of(number) for number in range(count * TOPICS_EACH)]
    groups = [topics[first : first + TOPICS_EACH] for first in range(0, len(topics), TOPICS_EACH)]
    create = [append_request(name, 0, 1) for name in topics]
    requests = bench.requests("one", [append_request(topics[0], n, 1) for n in range(DISTINCT)])
    proofs = bench.requests("payloads", payloads())
    with Watchers() as client:

        def opened(name: str, sets: Sequence[Sequence[str]]) -> ServerProcess:
            server = bench.start(name, MANY_STREAMS | STILL)
            bench.fill(server, bench.requests("create", create), len(create))
            gets = open_sessions(server, sets, SILENT_MS)
            client.open(name, server.port, bench.requests("gets", gets), OURS)
            return server

        def side(server: ServerProcess, name: str) -> Callable[[], Sample]:
            return partial(
                bench.costed,
                server,
                partial(
                    client.measure,
                    name,
                    server.port,
                    requests,
                    OURS,
                    proofs=proofs,
                    expect=1,
                    seconds=bench.options.seconds,
                ),
            )

        one, many = opened("one", groups[:1]), opened("many", groups)
        taken = bench.interleave({"one": side(one, "one"), "many": side(many, "many")})
    figures = []
    what = f"{len(topics):,} topics, append to one: {count} sessions of {TOPICS_EACH} over one"
    for name, label in (
        ("answer_p50_ms", "append answered, p50"),
        ("server_cpu_us", "CPU an append"),
        ("p50_ms", "write to the watcher's last byte, p50"),
    ):
        crowd = series(taken["many"], name, f"{count} sessions, {label}")
        single = series(taken["one"], name, f"one session, {label}")
        figures.append(
            Figure(
                "sessions",
                f"{what}, {label}",
                ratios(crowd.values, single.values, f"{count} / 1 sessions"),
                None if name == "p50_ms" else Bar("<=", SESSIONS_LIMIT),
                (crowd, single),
            )
        )
    return figures
