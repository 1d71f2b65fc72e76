"""Limits how many requests of one key run at once (§11).

A request takes a place once its key is known, and frees the place when its answer is sent, also
after an error. A stream frees it before its first frame, because it then counts as a connection.
Without keys nothing is counted. Called by `api/front_door` and `api/direct`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

from topics_server.auth.api_keys import Key
from topics_server.values.errors import Code, TopicsError

T = TypeVar("T")


def check_inflight(key: Key, most: int) -> None:
    """Raise `throttled` if one more request would be too many; 0 is unlimited."""
    if most and key.in_flight >= most:
        raise TopicsError(
            Code.THROTTLED,
            f"this key has reached its limit of {most} concurrent requests",
            {"limit": "max_inflight_per_key", "max": most},
        )


class RequestPlace:
    """The place of one request. `free` may be called twice."""

    __slots__ = ("_key", "_release")

    def __init__(self) -> None:
        self._key: Key | None = None
        self._release: Callable[[], None] | None = None

    def take(self, key: Key | None, most: int) -> None:
        """Count the request for a key. Raises `throttled`."""
        if key is not None:
            check_inflight(key, most)
            key.in_flight += 1
            self._key = key

    async def hold(self, slots: asyncio.Semaphore) -> None:
        """Wait for one of these slots, and hold it until `free`."""
        if self._release is None:
            await slots.acquire()
            self._release = slots.release

    def free(self) -> None:
        """Free the place and the slot."""
        release, self._release = self._release, None
        if release is not None:
            release()
        key, self._key = self._key, None
        if key is not None:
            key.in_flight -= 1
            assert key.in_flight >= 0


class Counted(Generic[T]):
    """A pending answer; the request's place is freed when the answer is ready."""

    __slots__ = ("_answer", "_place")

    def __init__(self, place: RequestPlace, answer: Callable[[], T]) -> None:
        self._place = place
        self._answer = answer

    def __call__(self) -> T:
        """Free the place and return the answer."""
        self._place.free()
        return self._answer()
