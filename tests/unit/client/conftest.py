"""The fake queue server and workers of it as fixtures."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.unit.client.fake import FakeQueue, serving
from topics_server.client import Backoff, ClientError, Job, Stats, Worker
from topics_server.client.effects import Effects
from topics_server.client.working import sources


@pytest.fixture
def served() -> Iterator[tuple[str, FakeQueue]]:
    """The fake server."""
    with serving() as found:
        yield found


@pytest.fixture
def fake(served: tuple[str, FakeQueue]) -> FakeQueue:
    """The state of the fake server."""
    return served[1]


@pytest.fixture
def url(served: tuple[str, FakeQueue]) -> str:
    """The server's URL."""
    return served[0]


class Chance(Effects):
    """Real time; the test decides the random numbers."""

    def __init__(self, chance: float) -> None:
        self.fixed = chance

    def chance(self) -> float:
        return self.fixed


class Run:
    """A worker that runs in a thread."""

    def __init__(self, worker: Worker[Any]) -> None:
        self.worker = worker
        self.outcome: Stats | BaseException | None = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.outcome = self.worker.run()
        except ClientError as error:
            self.outcome = error

    def end(self, within_s: float = 20.0) -> Stats | BaseException:
        """The result, once it ends by itself."""
        self._thread.join(within_s)
        assert not self._thread.is_alive(), "the worker does not end"
        assert self.outcome is not None
        return self.outcome

    def stop(self) -> Stats:
        """Stop it; return its statistics."""
        self.worker.stop()
        found = self.end()
        assert isinstance(found, Stats), found
        return found


Start = Callable[..., Run]
FAST = Backoff(base_ms=10, cap_ms=20)


@pytest.fixture
def start(url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Run a handler as a worker of the fake queue; a worker that still runs at the end is
    stopped.
    """
    monkeypatch.setattr(sources, "CLAIM_WAIT_MS", 100)
    runs: list[Run] = []

    def begin(handler: Callable[[Job], Any], **options: Any) -> Run:
        options = {"lease_ms": 5000, "backoff": FAST, "pauses": FAST, **options}
        effects = options.pop("effects", Chance(1.0))
        runs.append(Run(Worker(handler, "q", url=url, effects=effects, **options)))
        return runs[-1]

    yield begin
    for run in runs:
        run.worker.stop()
        run.worker.stop()
        run.end()
