"""Runs plain handlers on threads, outside the event loop.

The standard executor is not suitable: the interpreter waits for its threads at exit, so a handler
that hangs would keep a stopped worker alive. These threads are daemons. A new thread is started
when none is idle, up to `limit`; further calls wait in order.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from typing import Any, Final, TypeGuard

_END: Final = None


class HandlerExited(RuntimeError):
    """A handler raised an exception that ends threads, like `SystemExit`; the job failed."""


def _is_ordinary(error: BaseException) -> TypeGuard[Exception]:
    """Whether a future accepts the exception; `StopIteration` would end the waiting coroutine."""
    return isinstance(error, Exception) and not isinstance(error, StopIteration)


class Threads:
    """Runs functions of one argument."""

    def __init__(self, limit: int, name: str) -> None:
        assert limit > 0
        self._limit = limit
        self._name = name
        self._todo: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._started = 0
        self._busy = 0

    async def run(self, function: Callable[[Any], object], argument: object) -> object:
        """The function's value or exception, from a thread.

        Cancelling the caller leaves the function running; its result is discarded.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[object] = loop.create_future()
        self._busy += 1
        if self._started < min(self._busy, self._limit):
            self._started += 1
            name = f"{self._name}-{self._started}"
            threading.Thread(target=self._serve, name=name, daemon=True).start()
        self._todo.put((loop, future, function, argument))
        return await future

    def close(self) -> None:
        """Let idle threads end."""
        for _ in range(self._started):
            self._todo.put(_END)

    def _serve(self) -> None:
        while (item := self._todo.get()) is not _END:
            loop, future, function, argument = item
            value: object = None
            failure: Exception | None = None
            try:
                value = function(argument)
            except BaseException as error:
                failure = error if _is_ordinary(error) else HandlerExited(repr(error))
            try:
                loop.call_soon_threadsafe(self._resolve, future, value, failure)
            except RuntimeError:
                return  # the loop is closed: the worker ended before its handler
            del value, failure, item, argument

    def _resolve(
        self, future: asyncio.Future[object], value: object, failure: Exception | None
    ) -> None:
        self._busy -= 1
        if future.done():
            return
        if failure is None:
            future.set_result(value)
        else:
            future.set_exception(failure)
