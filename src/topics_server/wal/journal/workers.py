"""Runs a shard's blocking calls: on a thread, or inline in tests.

A worker runs one call after the other in the given order and posts each result to the loop. It
holds no state of the journal. A call must not raise: its owner turns failures into values. Called
by `wal_writer` and `journal`.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from typing import Any, Final, Protocol, TypeVar

T = TypeVar("T")

_Job = tuple[Callable[[], Any], Callable[[Any], None]]


class BlockingWorker(Protocol):
    """Runs calls off the loop, one at a time."""

    def run(self, call: Callable[[], T], done: Callable[[T], None]) -> None:
        """Run `call` later; `done` receives its result on the loop's thread."""
        ...

    def close(self) -> None:
        """Refuse further calls; return when the last one has ended."""
        ...


class ThreadWorker:
    """A thread, started with the first call; each result wakes the loop once."""

    def __init__(self, loop: asyncio.AbstractEventLoop, name: str) -> None:
        self._loop: Final = loop
        self._name: Final = name
        self._jobs: Final[queue.SimpleQueue[_Job | None]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def run(self, call: Callable[[], T], done: Callable[[T], None]) -> None:
        """See `BlockingWorker.run`."""
        if self._thread is None:
            # A daemon: a disk that hangs for ever does not keep the process from ending.
            self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            self._thread.start()
        self._jobs.put((call, done))

    def close(self) -> None:
        """See `BlockingWorker.close`."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()
            self._thread = None

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            call, done = job
            result = call()
            try:
                self._loop.call_soon_threadsafe(done, result)
            except RuntimeError:
                # The loop was closed: the result has no receiver.
                return


class InlineWorker:
    """For tests: runs each call on the loop, some turns later; `turns` says how many."""

    def __init__(self, loop: asyncio.AbstractEventLoop, turns: Callable[[], int]) -> None:
        self._loop: Final = loop
        self._turns: Final = turns
        self._jobs: Final[list[_Job]] = []

    def run(self, call: Callable[[], T], done: Callable[[T], None]) -> None:
        """See `BlockingWorker.run`."""
        self._jobs.append((call, done))
        if len(self._jobs) == 1:
            self._wait(self._turns())

    def close(self) -> None:
        """See `BlockingWorker.close`."""
        assert not self._jobs, "the owner closes a worker when it is idle"

    def _wait(self, turns: int) -> None:
        if turns > 0:
            self._loop.call_soon(self._wait, turns - 1)
            return
        call, done = self._jobs[0]
        result = call()
        self._loop.call_soon(self._finish, done, result)

    def _finish(self, done: Callable[[Any], None], result: object) -> None:
        self._jobs.pop(0)
        if self._jobs:
            self._loop.call_soon(self._wait, self._turns())
        done(result)
