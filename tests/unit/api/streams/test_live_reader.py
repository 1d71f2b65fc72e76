"""One reader of a stream's events: comments while no message comes. The tests do not wait."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import MutableMapping
from typing import Any

import msgspec
import pytest

from tests.api.conftest import FakeSettings
from tests.garbage import nothing_for_the_collector
from tests.unit.api.streams.test_pages import page
from topics_server.api.context import ServerState
from topics_server.api.streams import live_reader, whole_reader
from topics_server.api.streams.frames import control_frame, data_frame
from topics_server.api.streams.live_reader import Follower, events_of
from topics_server.api.streams.whole_reader import WholeReader
from topics_server.auth.api_keys import EVERYBODY
from topics_server.streams.values import Position, StreamPage

pytestmark = pytest.mark.anyio

BEAT = re.compile(rb": hb [0-9]+\n\n")


class Quiet:
    """A stream of which each wait returns the next of these pages at once; after the last one it
    stops.
    """

    def __init__(self, *pages: StreamPage) -> None:
        self.pages = list(pages)
        self.waited_ms: list[float] = []
        self.is_draining = False

    async def wait(self, path: str, at: Position, max_bytes: int, wait_ms: float) -> StreamPage:
        self.waited_ms.append(wait_ms)
        found = self.pages.pop(0)
        self.is_draining = not self.pages
        return found


async def told_of(streams: Quiet, *, cursor: int | None = None, **changes: Any) -> list[bytes]:
    """The frames that a reader gets, beginning with an empty page."""
    settings: Any = FakeSettings(**{"streams_sse_ms": 60_000, **changes})
    state = ServerState(settings=settings, progress=lambda: 0.5, phase="ready")
    sent: list[bytes] = []

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message["body"])

    async def receive() -> MutableMapping[str, Any]:
        await asyncio.Event().wait()
        raise AssertionError

    some: Any = streams
    follower = Follower(state, some, "s", page(), cursor, EVERYBODY, heartbeat_ms=7_000)
    await follower.run(receive, send)
    assert sent[0].startswith(b"event: control\n")
    assert sent[-1] == b"", "the response is whole"
    return sent[1:-1]


async def test_a_comment_comes_each_time_nothing_came_for_as_long() -> None:
    streams = Quiet(page(), page(), page())
    told = await told_of(streams)
    assert streams.waited_ms == [7_000] * 3
    assert len(told) == 3
    assert all(BEAT.fullmatch(comment) for comment in told)


async def test_new_messages_come_without_a_comment() -> None:
    told = await told_of(Quiet(page(b"x"), page(first=2)))
    assert told[0].startswith(b"event: data\ndata:x\nid:")
    assert b"\n\nevent: control\ndata:{" in told[0]
    assert [bool(BEAT.fullmatch(piece)) for piece in told] == [False, True]


async def test_the_position_is_sent_without_a_message() -> None:
    """For example the messages were deleted: the reader's next request continues after them."""
    moved = msgspec.structs.replace(page(), next=Position(0, 9))
    told, comment = await told_of(Quiet(moved, moved))
    assert told.startswith(b"event: control\n")
    assert BEAT.fullmatch(comment)


async def test_no_comment_comes_where_the_end_comes_first() -> None:
    streams = Quiet(page())
    assert await told_of(streams, streams_sse_ms=3_000) == []
    assert streams.waited_ms[0] <= 3_000


async def test_readers_of_one_page_with_other_cursors_share_the_text_of_its_messages() -> None:
    """A page may be kept for other readers: its memory does not grow with their cursors."""
    shared = page(b"x" * 10_000)
    # Each reader gets a random cursor of the 180 behind its own.
    cursors = [2**40 + 1_000 * each for each in range(20)]
    told = [(await told_of(Quiet(shared, page(first=2)), cursor=each))[0] for each in cursors]
    assert len(set(told)) == 20
    assert all(events.startswith(data_frame(shared) + b"event: control\n") for events in told)
    assert sum(len(events) for _, events in shared.encoded) < 2 * 10_000


def test_the_events_of_a_cursor_do_not_depend_on_who_came_before() -> None:
    shared = page(b"1", b"2", kind="application/json")
    for cursor in (7, 1_000, 7, 12):
        alone = page(b"1", b"2", kind="application/json")
        assert events_of(shared, cursor) == events_of(alone, cursor)
        assert events_of(alone, cursor) == data_frame(alone) + control_frame(alone, cursor)
    assert events_of(shared, 7) is events_of(shared, 7)


class FullSocket:
    """A socket of which nothing is read: a send waits for ever."""

    is_full = True

    def buffered_bytes(self) -> int:
        return 1

    def let_through(self) -> None:
        """See `Socket`."""

    def abort(self) -> None:
        """See `Socket`."""


@pytest.mark.parametrize("kind", [Follower, WholeReader])
@pytest.mark.parametrize("breaks", [False, True], ids=["stalls", "breaks"])
async def test_a_reader_that_does_not_read_leaves_nothing_for_the_collector(
    kind: type[Follower], breaks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_reader, "Socket", lambda send: FullSocket())
    monkeypatch.setattr(whole_reader, "Socket", lambda send: FullSocket())
    settings: Any = FakeSettings()
    state = ServerState(settings=settings, progress=lambda: 0.5, phase="ready")
    state.timeouts.limits = msgspec.structs.replace(state.timeouts.limits, write_s=0.001)
    some: Any = Quiet()

    async def wait(*_: object) -> Any:
        await asyncio.Event().wait()
        raise AssertionError

    async def fail(_: MutableMapping[str, Any]) -> None:
        await asyncio.sleep(0)
        raise ConnectionError

    with nothing_for_the_collector():
        follower = kind(state, some, "s", page(b"x"), None, EVERYBODY)
        if isinstance(follower, WholeReader):
            follower.upto_seq = 9
        with contextlib.suppress(ConnectionError):
            await follower.run(wait, fail if breaks else wait)
        del follower
        await asyncio.sleep(0)
