"""Server processes: start, wait until ready, read the kernel's counters, end.

Base of `server` and `floor`. Invariant: the code that starts a process also ends it, by its handle,
even if the benchmark fails. Linux only where `/proc` is read.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from benchmarks.clients.loader import BenchmarkError
from benchmarks.servers.cpu_time import cpu_seconds, family, read_proc

IDLE_SECONDS = 2.0


def end_by_sigterm() -> None:
    """Make SIGTERM an exception, so that the servers and folders of this process end with it."""

    def end(number: int, _: object) -> None:
        signal.signal(number, signal.SIG_IGN)  # a second one must not end the cleaning up
        sys.exit(128 + number)

    signal.signal(signal.SIGTERM, end)


@dataclass(frozen=True, slots=True)
class Reply:
    """One HTTP answer."""

    status: int
    headers: tuple[tuple[str, str], ...]
    body: bytes


def rss_anon_bytes(pid: int) -> int:
    """Anonymous resident memory of one process."""
    for line in read_proc(f"{pid}/status").splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return 0


class ServerProcess:
    """A server as a child process, on a port that it chooses itself."""

    def __init__(
        self, command: Sequence[str], environment: dict[str, str], port_file: Path, log: Path
    ) -> None:
        port_file.unlink(missing_ok=True)
        self._log_path = log
        self._log = log.open("ab")
        self.started_at = time.perf_counter()
        try:
            self._process = subprocess.Popen(
                command,
                cwd=Path(__file__).parents[2],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
            )
        except OSError:
            self._log.close()
            raise
        self._port_file = port_file
        self._connection: http.client.HTTPConnection | None = None
        self._called_at = 0.0
        self.port = 0

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @contextlib.contextmanager
    def starting(self) -> Iterator[None]:
        """Kill the process if the block fails: no caller has it yet."""
        try:
            yield
        except BaseException:
            self.kill()
            raise

    def wait_ready(self, path: str, timeout_s: float = 120.0) -> float:
        """Wait until `GET path` answers 200; return the seconds since the process was started."""
        deadline = self.started_at + timeout_s
        while time.perf_counter() < deadline:
            if self._look_for_port():
                try:
                    if self.call("GET", path, timeout_s=10).status == 200:
                        return time.perf_counter() - self.started_at
                except (OSError, http.client.HTTPException):
                    self._hang_up()
            time.sleep(0.005)
        raise BenchmarkError(f"server not ready after {timeout_s:.0f} s: {self.tail()}")

    def wait_port(self, timeout_s: float = 30.0) -> None:
        """Wait until the process listens; for servers without HTTP."""
        deadline = self.started_at + timeout_s
        while not self._look_for_port():
            if time.perf_counter() > deadline:
                raise BenchmarkError(f"no port after {timeout_s:.0f} s: {self.tail()}")
            time.sleep(0.005)

    def _look_for_port(self) -> int:
        if self._process.poll() is not None:
            raise BenchmarkError(f"server ended with {self._process.returncode}: {self.tail()}")
        if not self.port and self._port_file.exists():
            text = self._port_file.read_text().strip() or "0"
            if not text.isdecimal():
                raise BenchmarkError(f"no port number in {self._port_file}: {text[:100]!r}")
            self.port = int(text)
        return self.port

    def open_sockets(self) -> int:
        """The number of open sockets of the process."""
        count = 0
        for link in Path(f"/proc/{self.pid}/fd").iterdir():
            with contextlib.suppress(OSError):  # closed after it was listed
                count += os.readlink(link).startswith("socket:")
        return count

    def tail(self) -> str:
        """The end of the process's output, for error messages."""
        self._log.flush()
        return self._log_path.read_bytes()[-1500:].decode("utf-8", "replace")

    def call(
        self, method: str, path: str, body: bytes | None = None, *, timeout_s: float = 120.0
    ) -> Reply:
        """Send one control request over a kept connection; it is not part of the measurement."""
        if time.monotonic() - self._called_at > IDLE_SECONDS:
            self._hang_up()  # the server may just have closed it
        if self._connection is None:
            self._connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)
        headers = {} if body is None else {"content-type": "application/json"}
        self._connection.request(method, path, body, headers)
        answer = self._connection.getresponse()
        reply = Reply(answer.status, tuple(answer.getheaders()), answer.read())
        self._called_at = time.monotonic()
        return reply

    def expect(self, method: str, path: str, body: bytes | None = None) -> bytes:
        """Like `call`, but raise BenchmarkError for any answer other than 2xx."""
        reply = self.call(method, path, body)
        if not 200 <= reply.status < 300:
            raise BenchmarkError(f"{method} {path}: {reply.status} {reply.body[:300]!r}")
        return reply.body

    def rss_anon_bytes(self) -> int:
        """Anonymous resident memory now, with child processes; 0 if the process has ended."""
        return sum(rss_anon_bytes(pid) for pid in family(self.pid))

    def cpu_seconds(self) -> float:
        """CPU time so far of all threads and child processes, user and system."""
        return cpu_seconds(self.pid)

    def stop(self, timeout_s: float = 120.0) -> float:
        """Stop the process by SIGTERM, like an operator. Returns the seconds.

        The exit code must be 0.
        """
        self._hang_up()
        began = time.perf_counter()
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        try:
            code = self._process.wait(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            raise BenchmarkError(f"server did not stop in {timeout_s:.0f} s") from None
        if code not in (0, -signal.SIGTERM):
            raise BenchmarkError(f"server stopped with exit code {code}: {self.tail()}")
        self._log.close()
        return time.perf_counter() - began

    def kill(self) -> None:
        """Kill the process by SIGKILL; harmless if it has ended."""
        self._hang_up()
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait(timeout=30)
        self._log.close()

    def _hang_up(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.kill()
