"""`Client` and `AsyncClient` behind the same plain calls, so that one test holds for both.

`OnLoop` runs the coroutines of an object of the asynchronous kind on a loop of its own, and turns
asynchronous iterators into plain ones.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncGenerator, Generator
from typing import Any

from topics_server.client import AsyncClient


class OnLoop:
    """An asynchronous object as a blocking one."""

    def __init__(self, inner: Any, loop: asyncio.AbstractEventLoop) -> None:
        self._inner = inner
        self._loop = loop

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if not callable(found):
            return found

        def call(*args: Any, **kwargs: Any) -> Any:
            result = found(*args, **kwargs)
            if inspect.iscoroutine(result):
                result = self._loop.run_until_complete(result)
            if isinstance(result, AsyncGenerator):
                return self._iterate(result)
            is_ours = type(result).__name__.startswith("Async")
            return OnLoop(result, self._loop) if is_ours else result

        return call

    def __enter__(self) -> OnLoop:
        self._loop.run_until_complete(self._inner.__aenter__())
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.run_until_complete(self._inner.__aexit__(None, None, None))

    def _iterate(self, items: AsyncGenerator[Any, None]) -> Generator[Any, None, None]:
        try:
            while True:
                try:
                    item = self._loop.run_until_complete(anext(items))
                except StopAsyncIteration:
                    return
                yield item
        finally:
            self._loop.run_until_complete(items.aclose())


def on_loop(loop: asyncio.AbstractEventLoop, url: str, **options: Any) -> OnLoop:
    """An `AsyncClient` with plain calls. It is created on its loop, as in a program."""

    async def make() -> AsyncClient:
        return AsyncClient(url, **options)

    return OnLoop(loop.run_until_complete(make()), loop)
