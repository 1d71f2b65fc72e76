"""The tools of a case: options, a scratch folder, servers, the load generator, interleaved rounds.

One `Bench` serves one case: when the `with` block ends, also by an error, it ends the processes and
removes the folder. `__main__` makes it.
"""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from benchmarks.clients.loader import Loader, Sample
from benchmarks.clients.requests import write_requests
from benchmarks.report.figures import Series
from benchmarks.report.machine import calibration_ms
from benchmarks.servers.floor import start_floor
from benchmarks.servers.process import Reply, ServerProcess
from benchmarks.servers.server import start_server


@dataclass(frozen=True, slots=True)
class Options:
    """The options of the command line; the same for all cases."""

    rounds: int
    seconds: float
    quick: bool
    folder: Path  # where scratch folders are made; its file system is the measured one
    command: tuple[str, ...]  # the command that starts the server
    records: int  # records of the memory case
    base: tuple[str, ...] | None = None  # starts the server of another build
    steady: bool = False  # against the floor: only the rows that `check` compares

    def scaled(self, count: int, quick: int) -> int:
        """A size: `count`, or `quick` in a quick run."""
        return quick if self.quick else count


SETTLE_TURNS = 50
SETTLE_STEP_SECONDS = 0.1
RESTING_SHARE = 0.25

Side = Callable[[], Sample]


class HasCost(Protocol):
    """A server whose CPU time the kernel counts: ours, the floor, a peer."""

    def cpu_seconds(self) -> float:
        """CPU time so far, child processes included."""
        ...


class Bench:
    """The tools of one case."""

    def __init__(self, options: Options, noise_ms: list[float]) -> None:
        self.options = options
        self._noise_ms = noise_ms
        self.folder = Path(tempfile.mkdtemp(prefix="topics-bench-", dir=options.folder))
        self.folder.chmod(0o700)
        self.loader = Loader()
        self._servers: list[ServerProcess] = []

    # -- processes ------------------------------------------------------------------------------

    def start(
        self,
        name: str = "data",
        settings: Mapping[str, str] | None = None,
        *,
        wait: bool = True,
        command: Sequence[str] | None = None,
    ) -> ServerProcess:
        """Start our server on the scratch directory `name`, which is kept if it exists.

        `command`: the command of another build.
        """
        server = start_server(self.folder / name, settings, command or self.options.command)
        self._servers.append(server)
        if wait:
            server.wait_ready("/v0/ready")
        return server

    def start_floor(self, name: str, reply: Reply, *, stores: bool = False) -> ServerProcess:
        """Start a floor that sends this answer; `stores`: it also stores each body."""
        return self.owned(start_floor(self.folder, name, reply, stores=stores))

    def owned(self, process: ServerProcess) -> ServerProcess:
        """Add a process that the case started itself; it is ended with the others."""
        self._servers.append(process)
        return process

    def end_servers(self) -> None:
        """Kill all processes, so that the next part of a case has the machine for itself."""
        for server in self._servers:
            server.kill()
        self._servers.clear()

    # -- load -----------------------------------------------------------------------------------

    def requests(self, name: str, requests: Iterable[bytes]) -> Path:
        """The path of a request file in the scratch folder."""
        return write_requests(self.folder / f"{name}.requests", requests)

    def load(
        self,
        server: ServerProcess,
        requests: Path,
        *,
        connections: int = 1,
        seconds: float | None = None,
        count: int = 0,
        loader: Loader | None = None,
        stamp: bool = False,
    ) -> Sample:
        """Run closed-loop load for one round, then wait until the server is idle.

        The sample includes the server's CPU time per request. `stamp`: see `load`.
        """
        return self.costed(
            server,
            lambda: (loader or self.loader).run(
                server.port,
                requests,
                connections=connections,
                seconds=self.options.seconds if seconds is None else seconds,
                count=count,
                stamp=stamp,
            ),
        )

    def costed(self, server: HasCost, side: Side) -> Sample:
        """Run one round, and add the server's CPU time per request.

        Returns once the server is idle.
        """
        before = server.cpu_seconds()
        sample = side()
        used_us = (server.cpu_seconds() - before) / sample.count * 1e6
        settle(server)
        return dataclasses.replace(sample, server_cpu_us=used_us)

    def fill(
        self, server: ServerProcess, requests: Path, count: int, connections: int = 64
    ) -> None:
        """Send every request of a file once, as fast as possible; not measured."""
        self.loader.run(
            server.port,
            requests,
            connections=connections,
            seconds=1800,
            count=count,
            from_start=True,
        )

    def interleave(
        self, sides: Mapping[str, Side], *, rounds: int | None = None, warm: bool = True
    ) -> dict[str, list[Sample]]:
        """Run every side once in each round, with another side first each time.

        Measures the machine's noise in between.

        `warm`: run one round before, and discard it.
        """
        names = list(sides)
        taken: dict[str, list[Sample]] = {name: [] for name in names}
        if warm:
            for side in sides.values():
                side()
        for turn in range(rounds or self.options.rounds):
            self._noise_ms.append(calibration_ms())
            shift = turn % len(names)
            for name in names[shift:] + names[:shift]:
                taken[name].append(sides[name]())
        return taken

    # -- the end --------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.end_servers()
        self.loader.close()
        shutil.rmtree(self.folder, ignore_errors=True)


def settle(server: HasCost) -> None:
    """Wait until a server is idle.

    Otherwise the sealing of this round's records would slow the next side.
    """
    for _ in range(SETTLE_TURNS):
        before = server.cpu_seconds()
        time.sleep(SETTLE_STEP_SECONDS)
        if server.cpu_seconds() - before <= SETTLE_STEP_SECONDS * RESTING_SHARE:
            return


def series(samples: Sequence[Sample], name: str, label: str) -> Series:
    """One attribute of the samples of all rounds, with its unit."""
    unit = {"rate": "requests/s"}.get(name) or ("us" if name.endswith("_us") else "ms")
    return Series(label, unit, tuple(float(getattr(sample, name)) for sample in samples))
