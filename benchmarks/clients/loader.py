"""Controls one load generator process: sends jobs, gets samples.

Owned by `Bench`; a case that needs two loads at once makes a second `Loader`. `watching` controls
the watching client in the same way.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self


class BenchmarkError(Exception):
    """A benchmark could not be measured: an answer was not 2xx, or a process did not start."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One round of one side; times in milliseconds, CPU in microseconds per request."""

    count: int
    seconds: float
    rate: float
    p50_ms: float
    p90_ms: float
    p99_ms: float
    max_ms: float
    generator_cpu_us: float
    server_cpu_us: float = 0.0
    answer_p50_ms: float = 0.0  # latency of the writer's own answers, in cases with watchers
    refused: int = 0  # answers 429, which are not in `count`


class Loader:
    """A load generator process; end it with `close` or a `with` block."""

    def __init__(self, module: str = "benchmarks.clients.load", *, niceness: int = 0) -> None:
        self._process = subprocess.Popen(
            ["nice", "-n", str(niceness), sys.executable, "-m", module],
            cwd=Path(__file__).parents[2],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def begin(self, **job: Any) -> None:
        """Send a job without waiting for it; `finish` gets the answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(job, default=str) + "\n")
        self._process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        """The raw answer to the oldest job; raises BenchmarkError if the job failed."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise BenchmarkError("the load generator ended")
        answer: dict[str, Any] = json.loads(line)
        if "failed" in answer:
            raise BenchmarkError(f"load generator: {answer['failed']}")
        return answer

    def finish(self) -> Sample:
        """The sample of the oldest job; raises BenchmarkError if a request failed."""
        return self.sample(self.answer())

    @staticmethod
    def sample(answer: dict[str, Any]) -> Sample:
        """The sample in an answer; raises BenchmarkError if it reports errors."""
        errors, first = answer.pop("errors"), answer.pop("first_error")
        if errors:
            raise BenchmarkError(f"{errors} of {answer['count']} requests failed, first: {first}")
        if not answer["count"]:
            raise BenchmarkError("no request was answered")
        return Sample(**answer)

    def run(self, port: int, requests: Path, **job: Any) -> Sample:
        """Run one job to its end."""
        self.begin(port=port, requests=requests, **job)
        return self.finish()

    def close(self) -> None:
        """End the process by closing its input."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(timeout=5)
        self._process.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
