"""Watch sessions over a journal that the test drives: waits, refusals, and what continues
anyway.
"""

from __future__ import annotations

import asyncio
import logging

import pytest

from tests.unit.engine.rig import HandClock, ListJournal, throttled
from topics_server.engine.commit.notifier import Notifier
from topics_server.engine.commit.pipeline import DISK_FULL, READ_ONLY, CommitPipeline
from topics_server.engine.subscribe.cursors import Cursor
from topics_server.engine.subscribe.session_service import WatchSessions
from topics_server.engine.subscribe.sessions import SessionTable, WatchSession
from topics_server.engine.topic.registry import Registry
from topics_server.values.entries import (
    SESSIONS_ID,
    CursorAt,
    SessionMoved,
    SessionOpened,
    SessionOptions,
    SessionsClosed,
)
from topics_server.values.errors import Code, TopicsError

pytestmark = pytest.mark.anyio

OPTIONS = SessionOptions([], 256, 262_144, 15_000, 6, False)
TTL_MS = 1_000


class Desk:
    """The sessions of a server; its journal has one shard and waits for the test."""

    def __init__(self, *, max_sessions: int = 0, is_prompt: bool = True) -> None:
        self.journal = ListJournal(1)
        self.clock = HandClock()
        self.table = SessionTable()
        self.notifier = Notifier()
        self.commits = CommitPipeline(
            Registry(), self.journal, self.notifier, 1, projections={SESSIONS_ID: self.table}
        )
        self.sessions = WatchSessions(
            self.table, self.commits, self.clock, ttl_ms=TTL_MS, max_sessions=max_sessions
        )
        self.is_prompt = is_prompt

    async def open(self, seq: int = 5) -> WatchSession:
        opening = asyncio.create_task(self.sessions.open(OPTIONS, [Cursor("t", 1, 1, seq)]))
        await asyncio.sleep(0)
        if self.is_prompt:
            self.journal.write(0)
        return await opening


async def test_an_opening_waits_for_its_write_and_may_use_the_reserve() -> None:
    desk = Desk()
    opening = asyncio.create_task(desk.sessions.open(OPTIONS, [Cursor("t", 1, 1, 5)]))
    await asyncio.sleep(0)
    (submitted,) = desk.journal.submitted
    assert (submitted.shard, submitted.urgent, submitted.sync) == (0, True, False)
    assert not opening.done()
    assert len(desk.sessions) == 0, "what is not written is nowhere"
    desk.journal.write(0)
    session = await opening
    assert isinstance(submitted.entry, SessionOpened)
    assert submitted.entry.cursors == [CursorAt("t", 1, 1, 5)]
    assert desk.sessions.find(session.wid) is session
    assert session.positions() == [CursorAt("t", 1, 1, 5)]


async def test_ids_are_unguessable_and_never_the_same() -> None:
    desk = Desk()
    wids = {(await desk.open()).wid for _ in range(20)}
    assert len(wids) == 20
    assert {len(wid) for wid in wids} == {26}
    assert all(wid.startswith("wid_") for wid in wids)


async def test_a_stream_is_journaled_when_it_begins_and_with_its_positions_when_it_ends() -> None:
    desk = Desk()
    session = await desk.open()
    desk.sessions.begin(session)
    session.cursors["t"].seq = 9
    desk.clock.move(7)
    desk.sessions.end(session)
    began, ended = desk.journal.entries[1:]
    now_ms = desk.clock.now_ms()
    assert began == SessionMoved(session.wid, now_ms - 7, True, [])
    assert ended == SessionMoved(session.wid, now_ms, False, [CursorAt("t", 1, 1, 9)])
    assert all(item.urgent and not item.sync for item in desk.journal.submitted)
    desk.journal.write(0)
    assert (session.is_streaming, session.cursors["t"].seq) == (False, 9)


async def test_a_takeover_says_where_it_starts_and_its_forerunner_says_nothing() -> None:
    """A checkpoint may have the older stream's position, which may be ahead of the newer stream's
    start.
    """
    desk = Desk()
    session = await desk.open(5)
    desk.sessions.begin(session)
    session.cursors["t"].seq = 50
    session.cursors["t"].seq = 5
    desk.sessions.begin(session)
    desk.sessions.end(session)
    now_ms = desk.clock.now_ms()
    assert desk.journal.entries[1:] == [
        SessionMoved(session.wid, now_ms, True, []),
        SessionMoved(session.wid, now_ms, True, [CursorAt("t", 1, 1, 5)]),
    ]
    assert session.is_streaming


async def test_a_client_that_went_back_is_found_there_after_a_kill() -> None:
    desk = Desk()
    session = await desk.open(5)
    desk.sessions.begin(session)
    session.cursors["t"].seq = 50
    desk.sessions.end(session)
    session.cursors["t"].seq = 20
    desk.sessions.begin(session)
    again = SessionTable()
    for item in desk.journal.submitted:
        again.apply(item.lsn, item.entry)
    found = again.find(session.wid)
    assert found is not None
    assert found.cursors["t"].seq == 20


async def test_positions_are_journaled_only_when_they_changed() -> None:
    desk = Desk()
    session = await desk.open(5)
    for _ in range(2):
        desk.sessions.begin(session)
        desk.sessions.end(session)
    moved = [entry for entry in desk.journal.entries if isinstance(entry, SessionMoved)]
    assert [entry.cursors for entry in moved] == [[], [], [], []]


@pytest.mark.parametrize("is_late", [False, True])
async def test_positions_that_the_journal_refused_are_told_again(is_late: bool) -> None:
    desk = Desk()
    session = await desk.open(5)
    desk.sessions.begin(session)
    desk.journal.write(0)
    session.cursors["t"].seq = 50
    if is_late:
        desk.sessions.end(session)
        ended = desk.commits.newest(SESSIONS_ID)
        assert ended is not None
        desk.journal.fail(0, ended.lsn, DISK_FULL)
    else:
        desk.journal.refusal = throttled("disk")
        desk.sessions.end(session)
        desk.journal.refusal = None
    desk.sessions.begin(session)
    assert desk.journal.entries[-1] == SessionMoved(
        session.wid, desk.clock.now_ms(), True, [CursorAt("t", 1, 1, 50)]
    )


async def test_the_cap_counts_openings_under_way() -> None:
    desk = Desk(max_sessions=2)
    opening = [
        asyncio.create_task(desk.sessions.open(OPTIONS, [Cursor("t", 1, 1, 5)])) for _ in range(2)
    ]
    await asyncio.sleep(0)
    with pytest.raises(TopicsError) as refusal:
        await asyncio.wait_for(desk.sessions.open(OPTIONS, []), 5)
    assert refusal.value.code is Code.THROTTLED
    assert refusal.value.detail == {"limit": "max_watch_sessions", "max": 2}
    desk.journal.write(0)
    await asyncio.gather(*opening)
    with pytest.raises(TopicsError):
        await desk.sessions.open(OPTIONS, [])
    desk.clock.move(TTL_MS)
    await desk.open()
    assert len(desk.sessions) == 1, "expired ones make room"


async def test_expired_sessions_are_closed_in_one_entry_by_whoever_comes_next() -> None:
    desk = Desk()
    wids = [(await desk.open()).wid for _ in range(3)]
    kept = await desk.open()
    desk.sessions.begin(kept)
    desk.clock.move(TTL_MS - 1)
    assert desk.sessions.find(wids[0]) is not None
    desk.clock.move(1)
    assert desk.sessions.find(wids[1]) is None
    assert desk.journal.entries[-1] == SessionsClosed(wids, desk.clock.now_ms())
    assert desk.sessions.find(kept.wid) is kept, "never one with a stream"
    assert len(desk.sessions) == 1


async def test_finding_a_session_does_not_count_as_use() -> None:
    desk = Desk()
    session = await desk.open()
    desk.clock.move(TTL_MS - 1)
    assert desk.sessions.find(session.wid) is session
    desk.clock.move(1)
    assert desk.sessions.find(session.wid) is None


@pytest.mark.parametrize("wid", ["", "wid_", "wid_AAAAAAAAAAAAAAAAAAAAAA", "\x00"])
async def test_an_unknown_id_is_no_session(wid: str) -> None:
    assert Desk().sessions.find(wid) is None


# -- a journal that refuses -------------------------------------------------------------------


async def test_watching_goes_on_when_the_journal_refuses_and_says_so_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    desk = Desk()
    desk.journal.refusal = throttled("disk")
    with caplog.at_level(logging.WARNING):
        session = await desk.sessions.open(OPTIONS, [Cursor("t", 1, 1, 5)])
        desk.sessions.begin(session)
        desk.sessions.end(session)
        await desk.sessions.open(OPTIONS, [])
    assert desk.sessions.find(session.wid) is session
    assert [record.getMessage() for record in caplog.records] == [
        "watch sessions continue in memory only: full"
    ]
    caplog.clear()
    desk.journal.refusal = None
    await desk.open()
    desk.journal.refusal = throttled("disk")
    with caplog.at_level(logging.WARNING):
        await desk.sessions.open(OPTIONS, [])
    assert len(caplog.records) == 1, "it is said again after it was well"


@pytest.mark.parametrize("error", [DISK_FULL, READ_ONLY])
async def test_a_session_whose_write_fails_lives_in_memory(error: str) -> None:
    desk = Desk(max_sessions=2)
    opening = asyncio.create_task(desk.sessions.open(OPTIONS, [Cursor("t", 1, 1, 5)]))
    await asyncio.sleep(0)
    desk.journal.fail(0, 1, error)
    session = await opening
    assert desk.sessions.find(session.wid) is session
    assert desk.table.opening_count == 0
    desk.sessions.begin(session)
    desk.sessions.end(session)
    await desk.open()
    with pytest.raises(TopicsError):
        await desk.sessions.open(OPTIONS, [])


async def test_a_stream_whose_entry_fails_is_what_it_is() -> None:
    desk = Desk()
    session = await desk.open()
    desk.sessions.begin(session)
    began = desk.commits.newest(SESSIONS_ID)
    assert began is not None
    desk.journal.fail(0, began.lsn, DISK_FULL)
    assert session.is_streaming
    desk.clock.move(10 * TTL_MS)
    assert desk.sessions.find(session.wid) is session
    desk.sessions.end(session)
    desk.journal.write(0)
    assert not session.is_streaming


async def test_a_caller_that_goes_away_leaves_a_session_that_expires() -> None:
    desk = Desk()
    opening = asyncio.create_task(desk.sessions.open(OPTIONS, []))
    await asyncio.sleep(0)
    opening.cancel()
    await asyncio.gather(opening, return_exceptions=True)
    desk.journal.write(0)
    assert len(desk.sessions) == 1
    desk.clock.move(TTL_MS)
    desk.sessions.find("")
    assert len(desk.sessions) == 0


# -- stopping -----------------------------------------------------------------------------------


async def test_streams_that_end_by_a_drain_count_as_open_for_the_next_start() -> None:
    desk = Desk()
    session = await desk.open()
    desk.sessions.begin(session)
    desk.sessions.drain()
    desk.sessions.end(session)
    ended = desk.journal.entries[-1]
    assert isinstance(ended, SessionMoved)
    assert ended.is_streaming


async def test_nothing_is_written_once_the_journal_closes() -> None:
    desk = Desk()
    session = await desk.open()
    desk.sessions.begin(session)
    count = len(desk.journal.submitted)
    desk.sessions.close()
    desk.sessions.end(session)
    desk.clock.move(TTL_MS)
    assert desk.sessions.find(session.wid) is None
    assert len(desk.journal.submitted) == count


async def test_no_listener_is_notified() -> None:
    desk = Desk()
    heard: list[int] = []
    desk.notifier.add(SESSIONS_ID, lambda: heard.append(1))
    session = await desk.open()
    desk.sessions.begin(session)
    desk.journal.write(0)
    assert heard == []
