"""`live_async`: when it gives up."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import pytest

from topics_server.client import live_async
from topics_server.client.effects import Effects
from topics_server.client.errors import Unreachable
from topics_server.client.following import async_live
from topics_server.client.following.live_events import LiveEvent

pytestmark = pytest.mark.anyio

ARRIVED = LiveEvent("record", "t", {}, "id")


class Unlucky(Effects):
    """Chooses the longest possible pauses, which take no real time."""

    async def sleep_ms(self, wait_ms: float) -> None:
        return

    def chance(self) -> float:
        return 1.0


async def broken(*frames: LiveEvent | None) -> AsyncGenerator[LiveEvent | None, None]:
    """A connection that gives these frames before it breaks."""
    for frame in frames:
        yield frame
    raise Unreachable("broken", sent=True)


async def test_a_server_that_has_nothing_to_tell_is_no_server_that_is_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    streams = [broken(None) for _ in range(4)] + [broken(None, ARRIVED)]
    monkeypatch.setattr(async_live, "_stream", lambda *_: streams.pop(0))
    # All pauses together exceed the limit, a single pause does not.
    events = live_async("t", patience_ms=150, effects=Unlucky())
    assert await anext(events) is ARRIVED
    await events.aclose()


async def test_a_server_that_is_away_too_long_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(async_live, "_stream", lambda *_: broken())
    with pytest.raises(Unreachable):
        await anext(live_async("t", patience_ms=150, effects=Unlucky()))
