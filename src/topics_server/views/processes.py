"""The server's side of the helper processes of views.

`ViewProcess` keeps one child, which is started at first use and again after its death; it gets
requests one at a time, in the order of arrival. A child that does not answer in time is killed. The
loop moves bytes through pipes and decodes a small answer; rows of a query stay bytes. `QueryPool`
gives each query a free process. Loop thread only; called by `service` and `build`.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from typing import Final, Protocol

import msgspec

from topics_server.runtime.metrics import log
from topics_server.views.messages import (
    ANSWERS,
    FRAME_BYTES_MAX,
    LENGTH,
    Answer,
    Nothing,
    Request,
    ViewQuery,
    frame,
)

_END_WAIT_S: Final = 5.0


class Applying(Protocol):
    """Applies records to files; `ViewProcess` satisfies it."""

    async def ask(self, request: Request, *, seconds: float) -> Answer:
        """See `ViewProcess.ask`."""
        ...

    async def close(self) -> None:
        """End the process."""
        ...


class Querying(Protocol):
    """Answers queries; `QueryPool` satisfies it."""

    async def ask(self, query: ViewQuery, *, seconds: float) -> Answer:
        """See `QueryPool.ask`."""
        ...

    async def warm(self) -> None:
        """See `QueryPool.warm`."""
        ...

    async def close(self) -> None:
        """End the processes."""
        ...


class ProcessDied(Exception):
    """The child died or was killed before it answered; the effect of the request is unknown."""

    def __init__(self, *, was_late: bool) -> None:
        super().__init__("the process did not answer in time" if was_late else "the process died")
        self.was_late = was_late


class ViewProcess:
    """One child process that runs a module of `workers`."""

    def __init__(self, module: str, arguments: Sequence[str] = ()) -> None:
        self._command = [
            sys.executable,
            "-P",
            "-m",
            f"topics_server.views.workers.{module}",
            *arguments,
        ]
        self._child: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()
        self._is_closed = False
        self.started_count = 0

    @property
    def pid(self) -> int | None:
        """The process id of the child; None if there is none."""
        return None if self._child is None else self._child.pid

    async def ask(self, request: Request, *, seconds: float) -> Answer:
        """Send a request and return its answer. Raises `ProcessDied`.

        Cancelling the caller does not stop the request: the answer is read and discarded, so that
        it is not taken for the next answer.
        """
        under_way = asyncio.ensure_future(self._ask(request, seconds))
        under_way.add_done_callback(_look_away)
        try:
            return await asyncio.shield(under_way)
        finally:
            # An error refers to this frame, so the frame must not refer to the task.
            del under_way

    async def _ask(self, request: Request, seconds: float) -> Answer:
        async with self._turn:
            if self._is_closed:
                raise ProcessDied(was_late=False)
            child = await self._running()
            was_late = False
            try:
                async with asyncio.timeout(seconds):
                    return await _exchange(child, frame(request))
            except TimeoutError:
                was_late = True
            except (
                OSError,
                RuntimeError,
                asyncio.IncompleteReadError,
                msgspec.MsgspecError,
            ) as error:
                # uvloop refuses to write to a pipe that is closed with a RuntimeError.
                log.warning("a process of the views failed: %r", error)
            await self._end()
            raise ProcessDied(was_late=was_late)

    async def _running(self) -> asyncio.subprocess.Process:
        if self._child is None or self._child.returncode is not None:
            self._child = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                limit=1 << 20,
            )
            self.started_count += 1
        return self._child

    async def _end(self) -> None:
        child, self._child = self._child, None
        if child is None:
            return
        if child.returncode is None:
            try:
                child.kill()
            except ProcessLookupError:
                pass  # it ended by itself
        await child.wait()

    async def close(self) -> None:
        """Wait for the request under way, then end the child."""
        self._is_closed = True
        async with self._turn:
            child = self._child
            if child is None:
                return
            if child.stdin is not None:
                child.stdin.close()
            try:
                await asyncio.wait_for(child.wait(), _END_WAIT_S)
            except TimeoutError:
                pass
            await self._end()


async def _exchange(child: asyncio.subprocess.Process, request: bytes) -> Answer:
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdin.write(request)
    await child.stdin.drain()
    (length,) = LENGTH.unpack(await child.stdout.readexactly(LENGTH.size))
    if length > FRAME_BYTES_MAX:
        raise OSError("an answer is too long")
    return ANSWERS.decode(await child.stdout.readexactly(length))


def _look_away(under_way: asyncio.Future[Answer]) -> None:
    """Retrieve the error of a request that no caller awaits any more."""
    if not under_way.cancelled():
        under_way.exception()


class QueryPool:
    """A few processes that answer queries."""

    def __init__(self, size: int) -> None:
        self._processes = [ViewProcess("query_worker") for _ in range(size)]
        # The process that was freed last is used first, so that a mostly idle server keeps one
        # warm.
        self._free = list(self._processes)
        self._places = asyncio.Semaphore(size)
        self.waiting = 0

    async def ask(self, query: ViewQuery, *, seconds: float) -> Answer:
        """Run a query on a free process. Raises `ProcessDied`."""
        self.waiting += 1
        try:
            async with self._places:
                process = self._free.pop()
                try:
                    return await process.ask(query, seconds=seconds)
                finally:
                    self._free.append(process)
        finally:
            self.waiting -= 1

    async def warm(self) -> None:
        """Start one process before the first query comes."""
        try:
            await self._free[-1].ask(Nothing(), seconds=_END_WAIT_S)
        except (ProcessDied, IndexError):
            pass  # it is started when it is needed

    def pids(self) -> list[int]:
        """The ids of the running processes."""
        return [process.pid for process in self._processes if process.pid is not None]

    async def close(self) -> None:
        """End every process."""
        await asyncio.gather(*(process.close() for process in self._processes))
