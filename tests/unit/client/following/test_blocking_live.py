"""`live`: when it gives up."""

from __future__ import annotations

from collections.abc import Generator

import pytest

from topics_server.client import live
from topics_server.client.effects import Effects
from topics_server.client.errors import Unreachable
from topics_server.client.following import blocking_live
from topics_server.client.following.live_events import LiveEvent

ARRIVED = LiveEvent("record", "t", {}, "id")


class Unlucky(Effects):
    """Chooses the longest possible pauses."""

    def chance(self) -> float:
        return 1.0


def broken(*frames: LiveEvent | None) -> Generator[LiveEvent | None, None, None]:
    """A connection that gives these frames before it breaks."""
    yield from frames
    raise Unreachable("broken", sent=True)


def test_a_server_that_has_nothing_to_tell_is_no_server_that_is_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    streams = [broken(None) for _ in range(4)] + [broken(None, ARRIVED)]
    monkeypatch.setattr(blocking_live, "_stream", lambda *_: streams.pop(0))
    # All pauses together exceed the limit, a single pause does not.
    events = live("t", patience_ms=150, effects=Unlucky())
    assert next(events) is ARRIVED
    events.close()


def test_a_server_that_is_away_too_long_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocking_live, "_stream", lambda *_: broken())
    with pytest.raises(Unreachable):
        next(live("t", patience_ms=150, effects=Unlucky()))
