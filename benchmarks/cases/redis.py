"""Redis streams on the same machine, where `redis-server` is installed: XADD, single and piped.

Other promises than ours (no HTTP, no tags, no per-record answers checked), so no bar: context.
"""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path

from benchmarks.bench import Bench, series
from benchmarks.figures import Figure, ratios
from benchmarks.loader import BenchmarkError, Sample
from benchmarks.process import ServerProcess
from benchmarks.requests import append_request, data_text

MISSING = "redis-server not found: apt-get install redis-server"
CONNECTIONS = (1, 16)


class NotInstalled(Exception):
    """The case needs a program this machine does not have; the message says how to get it."""


def command(*words: bytes) -> bytes:
    """A command as redis reads it."""
    parts = b"".join(b"$%d\r\n%s\r\n" % (len(word), word) for word in words)
    return b"*%d\r\n" % len(words) + parts


def xadd(numbers: Iterable[int]) -> bytes:
    """One XADD a number, piped."""
    return b"".join(
        command(b"XADD", b"log", b"*", b"data", data_text(n, "t-000"), b"tag", b"t-000")
        for n in numbers
    )


class Redis:
    """A redis server of its own on a free port, ended by `close`."""

    def __init__(self, program: str, folder: Path, fsync: str) -> None:
        folder.mkdir()
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = int(free.getsockname()[1])
        arguments = f"--port {self.port} --bind 127.0.0.1 --save '' --appendonly yes".split()
        arguments[arguments.index("''")] = ""
        arguments += ["--appendfsync", fsync, "--dir", str(folder), "--daemonize", "no"]
        with (folder / "log").open("wb") as log:
            self._process = subprocess.Popen([program, *arguments], stdout=log, stderr=log)
        for _ in range(500):
            try:
                with socket.create_connection(("127.0.0.1", self.port), timeout=1) as probe:
                    probe.sendall(command(b"PING"))
                    if probe.recv(64).startswith(b"+PONG"):
                        return
            except OSError:
                pass
            time.sleep(0.01)
        self.close()
        raise BenchmarkError("redis-server did not come up")

    def close(self) -> None:
        """End the process."""
        self._process.terminate()
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(timeout=5)


def redis(bench: Bench) -> list[Figure]:
    """XADD beside our appends: everysec beside class disk, always beside class fsync."""
    program = shutil.which("redis-server")
    if program is None:
        raise NotInstalled(MISSING)
    server = bench.start()
    figures: list[Figure] = []
    for fsync, durability in (("everysec", "disk"), ("always", "fsync")):
        server.expect(
            "PUT", f"/v0/topics/{durability}", b'{"durability":"%s"}' % durability.encode()
        )
        other = Redis(program, bench.folder / f"redis-{fsync}", fsync)
        try:
            for count in (1, 100):
                figures += compare(bench, server, other, fsync, durability, count)
        finally:
            other.close()
    return figures


def compare(
    bench: Bench, server: ServerProcess, other: Redis, fsync: str, durability: str, count: int
) -> list[Figure]:
    """Interleaved rounds of one batch size, with 1 and with 16 connections."""
    firsts = range(0, 100 * count, count)
    mine = bench.requests(
        f"ours-{durability}-{count}", [append_request(durability, n, count) for n in firsts]
    )
    theirs = bench.requests(f"xadd-{fsync}-{count}", [xadd(range(n, n + count)) for n in firsts])
    figures = []
    for connections in CONNECTIONS:

        def redis_side(connections: int = connections) -> Sample:
            return bench.loader.run(
                other.port,
                theirs,
                connections=connections,
                seconds=bench.options.seconds,
                replies=count,
            )

        taken = bench.interleave(
            {
                "ours": partial(bench.load, server, mine, connections=connections),
                "redis": redis_side,
            }
        )
        ours = series(taken["ours"], "rate", f"ours, class {durability}")
        redis_rate = series(taken["redis"], "rate", f"redis, appendfsync {fsync}")
        what = "XADD" if count == 1 else f"{count} XADD piped"
        figures.append(
            Figure(
                "redis",
                f"class {durability} beside {what}, appendfsync {fsync}, {connections} connections",
                ratios(ours.values, redis_rate.values, "ours / redis, requests/s"),
                None,
                (ours, redis_rate),
            )
        )
    return figures
