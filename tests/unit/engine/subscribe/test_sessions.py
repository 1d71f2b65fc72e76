"""Watch sessions as a projection: the effect of entries, and the content of a capture."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from msgspec.structs import replace

from topics_server.engine.subscribe import sessions as module
from topics_server.engine.subscribe.sessions import SessionTable, WatchSession
from topics_server.values.entries import (
    CursorAt,
    SessionEntry,
    SessionMoved,
    SessionOpened,
    SessionOptions,
    SessionsClosed,
)
from topics_server.values.storage_types import SessionImage, SessionsPart

VECTOR: Final = Path(__file__).parents[3] / "vectors" / "snapshots" / "sessions.part"
OWNED_VECTOR: Final = VECTOR.with_name("sessions_owned.part")
FILTERED_VECTOR: Final = VECTOR.with_name("sessions_filtered.part")
GROWING_VECTOR: Final = VECTOR.with_name("sessions_growing.part")
TS: Final = 1_700_000_000_000
TTL_MS: Final = 1_000
OPTIONS: Final = SessionOptions(["u1"], 100, 65_536, 15_000, 6, True)
AT: Final = [CursorAt("b", 7, 2, 41), CursorAt("a", 9, 1, 0)]


class Desk:
    """A table with an lsn counter; entries are applied as soon as they are staged."""

    def __init__(self, table: SessionTable | None = None, lsn: int = 0) -> None:
        self.table = table or SessionTable()
        self.lsn = lsn
        self.entries: list[tuple[int, SessionEntry]] = []

    def stage(self, entry: SessionEntry) -> int:
        self.lsn += 1
        self.table.stage(self.lsn, entry)
        self.entries.append((self.lsn, entry))
        return self.lsn

    def commit(self, entry: SessionEntry) -> None:
        lsn = self.stage(entry)
        self.table.commit_staged(lsn)
        self.table.apply(lsn, entry)

    def open(self, wid: str, ts: int = TS, cursors: list[CursorAt] | None = None) -> WatchSession:
        self.commit(SessionOpened(wid, ts, OPTIONS, AT if cursors is None else cursors))
        session = self.table.find(wid)
        assert session is not None
        return session

    def begin(self, session: WatchSession, ts: int = TS) -> None:
        if self.table.begin(session):
            self.commit(SessionMoved(session.wid, ts, True, []))

    def end(self, session: WatchSession, ts: int = TS, *, is_cut: bool = False) -> None:
        if self.table.end(session, ts, is_cut=is_cut):
            is_streaming = session.is_streaming
            self.commit(SessionMoved(session.wid, ts, is_streaming, session.positions()))


def restarted(
    parts: list[bytes], entries: list[tuple[int, SessionEntry]], now_ms: int = TS
) -> Desk:
    """The table of the next run, from a capture and the journal."""
    table = SessionTable()
    for part in parts:
        table.restore(part)
    for lsn, entry in entries:
        table.apply(lsn, entry)
    table.finish_recovery(now_ms)
    return Desk(table, max([lsn for lsn, _ in entries], default=0))


@pytest.fixture
def desk() -> Desk:
    return Desk()


# -- life -----------------------------------------------------------------------------------


def test_a_session_starts_where_its_entry_says_in_the_order_of_its_topics(desk: Desk) -> None:
    session = desk.open("w")
    assert (session.options, session.positions()) == (OPTIONS, AT)
    assert list(session.cursors) == ["b", "a"]
    assert (session.opened_ts, session.last_used_ts) == (TS, TS)
    assert not session.is_streaming
    assert not session.is_restored


def test_opening_the_same_entry_again_changes_nothing(desk: Desk) -> None:
    session = desk.open("w")
    session.cursors["b"].seq = 50
    assert desk.table.open(SessionOpened("w", TS, OPTIONS, AT)) is session
    assert session.cursors["b"].seq == 50


def test_openings_under_way_are_counted(desk: Desk) -> None:
    first = desk.stage(SessionOpened("w", TS, OPTIONS, AT))
    second = desk.stage(SessionOpened("x", TS, OPTIONS, AT))
    assert (desk.table.opening_count, len(desk.table)) == (2, 0)
    desk.table.undo_from(second)
    assert desk.table.opening_count == 1
    desk.table.commit_staged(first)
    assert desk.table.opening_count == 0


def test_an_older_entry_moves_nothing_live_that_its_stream_has_moved_since(desk: Desk) -> None:
    session = desk.open("w")
    desk.table.begin(session)
    began = SessionMoved("w", TS, True, [])
    lsn = desk.stage(began)
    session.cursors["b"].seq = 60
    desk.table.end(session, TS + 5, is_cut=False)
    ended = SessionMoved("w", TS + 5, False, session.positions())
    desk.stage(ended)
    desk.table.commit_staged(lsn)
    desk.table.apply(lsn, began)
    assert not session.is_streaming, "the stream has ended, whatever is applied late"
    assert (session.last_used_ts, session.cursors["b"].seq) == (TS + 5, 60)


def test_a_takeover_leaves_one_stream_whichever_says_so_first(desk: Desk) -> None:
    session = desk.open("w")
    assert desk.table.begin(session)
    assert not desk.table.begin(session), "a second stream"
    assert not desk.table.end(session, TS + 1, is_cut=False), "the one that was taken over"
    assert session.is_streaming
    assert desk.table.expire(TS + 10 * TTL_MS, TTL_MS) == []
    assert desk.table.end(session, TS + 2, is_cut=False)
    assert not session.is_streaming


# -- expiry ---------------------------------------------------------------------------------


def test_a_session_expires_when_it_was_not_used_for_its_time(desk: Desk) -> None:
    desk.open("w", TS)
    desk.open("x", TS + 1)
    assert desk.table.expire(TS + TTL_MS - 1, TTL_MS) == []
    assert desk.table.expire(TS + TTL_MS, TTL_MS) == ["w"]
    assert (desk.table.find("w"), len(desk.table)) == (None, 1)


def test_a_session_with_a_stream_never_expires_and_counts_from_its_end(desk: Desk) -> None:
    session = desk.open("w", TS)
    desk.begin(session)
    assert desk.table.expire(TS + 100 * TTL_MS, TTL_MS) == []
    desk.end(session, TS + 100 * TTL_MS)
    assert desk.table.expire(TS + 101 * TTL_MS - 1, TTL_MS) == []
    assert desk.table.expire(TS + 101 * TTL_MS, TTL_MS) == ["w"]


def test_a_clock_that_was_set_back_keeps_nobody_alive_for_long(desk: Desk) -> None:
    desk.open("future", TS + 3_600_000)
    desk.open("now", TS)
    assert desk.table.expire(TS + TTL_MS, TTL_MS) == ["now"], "nobody is in its way"
    assert desk.table.expire(TS + 2 * TTL_MS - 1, TTL_MS) == []
    assert desk.table.expire(TS + 2 * TTL_MS, TTL_MS) == ["future"]


def test_looking_for_expired_ones_looks_at_no_others(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(1_000):
        desk.open(f"w{number}", TS + number)
    looked: list[str] = []
    found = desk.table._sessions

    class Counting(dict[str, WatchSession]):
        def __getitem__(self, wid: str) -> WatchSession:
            looked.append(wid)
            return found[wid]

    monkeypatch.setattr(desk.table, "_sessions", Counting(found))
    assert desk.table.expire(TS + TTL_MS, TTL_MS) == ["w0"]
    assert looked == ["w0", "w1"]


# -- replay ---------------------------------------------------------------------------------


def test_what_was_journaled_comes_back(desk: Desk) -> None:
    session = desk.open("w")
    desk.begin(session, TS + 1)
    session.cursors["b"].seq = 60
    desk.end(session, TS + 2)
    found = restarted([], desk.entries).table.find("w")
    assert found is not None
    assert (found.options, found.positions()) == (OPTIONS, session.positions())
    assert (found.opened_ts, found.last_used_ts) == (TS, TS + 2)
    assert found.is_restored


def test_a_restored_session_is_no_longer_one_after_its_first_stream(desk: Desk) -> None:
    desk.open("w")
    again = restarted([], desk.entries)
    session = again.table.find("w")
    assert session is not None
    assert session.is_restored
    again.begin(session)
    assert not session.is_restored


def test_an_entry_for_a_session_that_is_gone_changes_nothing(desk: Desk) -> None:
    desk.table.apply(1, SessionMoved("gone", TS, True, AT))
    desk.table.apply(2, SessionsClosed(["gone"], TS))
    assert len(desk.table) == 0


def test_whoever_was_connected_when_the_server_died_was_here_until_now(desk: Desk) -> None:
    connected, away = desk.open("connected"), desk.open("away")
    desk.begin(connected)
    desk.begin(away)
    desk.end(away, TS + 10)
    later = TS + 50 * TTL_MS
    again = restarted([], desk.entries, later)
    assert again.table.expire(later, TTL_MS) == ["away"], "it expires across downtime too"
    assert again.table.expire(later + TTL_MS - 1, TTL_MS) == []
    assert again.table.expire(later + TTL_MS, TTL_MS) == ["connected"]


def test_a_stream_that_was_cut_to_stop_counts_as_connected(desk: Desk) -> None:
    session = desk.open("w")
    desk.begin(session)
    desk.end(session, TS + 10, is_cut=True)
    later = TS + 50 * TTL_MS
    for again in (
        restarted([], desk.entries, later),
        restarted(list(desk.table.capture()), [], later),
    ):
        assert again.table.expire(later, TTL_MS) == []
        assert again.table.expire(later + TTL_MS, TTL_MS) == ["w"]


def test_idle_sessions_expire_in_order_after_a_restart_too(desk: Desk) -> None:
    for wid, ts in (("late", TS + 2), ("early", TS), ("middle", TS + 1)):
        desk.open(wid, ts)
    again = restarted([], desk.entries)
    assert again.table.expire(TS + TTL_MS, TTL_MS) == ["early"]
    assert again.table.expire(TS + TTL_MS + 2, TTL_MS) == ["middle", "late"]


# -- capture --------------------------------------------------------------------------------


def test_a_capture_shows_where_a_stream_is_now_without_any_entry(desk: Desk) -> None:
    session = desk.open("w")
    desk.begin(session)
    session.cursors["b"].seq = 99
    session.cursors["a"].epoch, session.cursors["a"].topic_id = 5, 77
    found = restarted(list(desk.table.capture()), []).table.find("w")
    assert found is not None
    assert found.positions() == [CursorAt("b", 7, 2, 99), CursorAt("a", 77, 5, 0)]


def test_replay_never_goes_back_behind_the_capture(desk: Desk) -> None:
    """The entry in flight during the capture has an older position than the capture."""
    session = desk.open("w")
    desk.begin(session)
    session.cursors["b"].seq = 50
    desk.table.end(session, TS + 1, is_cut=False)
    ended = SessionMoved("w", TS + 1, False, session.positions())
    lsn = desk.stage(ended)
    desk.table.begin(session)
    desk.stage(SessionMoved("w", TS + 2, True, []))
    session.cursors["b"].seq = 99
    parts = list(desk.table.capture())
    assert lsn == desk.lsn - 1, "neither is applied"
    found = restarted(parts, desk.entries).table.find("w")
    assert found is not None
    assert found.cursors["b"].seq == 99


def test_entries_that_are_in_the_capture_are_not_applied_again(desk: Desk) -> None:
    session = desk.open("w")
    desk.begin(session)
    session.cursors["b"].seq = 99
    desk.end(session, TS + 3)
    parts = list(desk.table.capture())
    again = restarted(parts, desk.entries)
    found = again.table.find("w")
    assert found is not None
    assert (found.cursors["b"].seq, found.last_used_ts) == (99, TS + 3)


def test_a_session_that_expired_unjournaled_stays_gone_once_that_is_captured(desk: Desk) -> None:
    desk.open("gone", TS)
    desk.open("kept", TS + 1)
    assert desk.table.expire(TS + TTL_MS, TTL_MS) == ["gone"]
    again = restarted(list(desk.table.capture()), desk.entries)
    assert [session.wid for session in again.table] == ["kept"]


def test_a_session_in_memory_only_is_in_the_next_capture(desk: Desk) -> None:
    desk.table.open(SessionOpened("w", TS, OPTIONS, AT))
    again = restarted(list(desk.table.capture()), [])
    assert again.table.find("w") is not None
    assert again.table.expire(TS + TTL_MS, TTL_MS) == ["w"]


def test_without_sessions_a_snapshot_is_as_it_always_was(desk: Desk) -> None:
    assert list(desk.table.capture()) == []
    desk.open("w")
    desk.table.expire(TS + TTL_MS, TTL_MS)
    assert list(desk.table.capture()) == []


def test_many_sessions_are_captured_in_pieces_with_life_in_between(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_PART_CURSORS", 6)
    for number in range(10):
        desk.open(f"w{number}")
    capturing = desk.table.capture()
    parts = [next(capturing)]
    at = len(desk.entries)
    desk.commit(SessionsClosed(["w0", "w9"], TS))
    desk.table._forget("w9")
    desk.open("new")
    parts += capturing
    assert len(parts) == 5
    again = restarted(parts, desk.entries[at:])
    assert {session.wid for session in again.table} == {
        *(f"w{number}" for number in range(1, 9)),
        "new",
    }


GOLDEN: Final = SessionsPart(
    1,
    300,
    [
        SessionImage("wid_AAECAwQFBgcICQoLDA0ODw", OPTIONS, AT, TS, TS + 5, True, 299),
        SessionImage("wid_other", OPTIONS, [], TS, TS, False, 0),
    ],
)


OWNER: Final = "3c0a9f9d0c5e4c1f8a2b7d6e5f403122"


def golden_part() -> SessionsPart:
    """A part with every field that a session may have."""
    first, second = GOLDEN.sessions
    first = replace(first, owner=OWNER, prefixes=("orders.", ""))
    second = replace(second, filter='["Not", "sent"]', acks={"jobs": "billing"})
    return replace(GOLDEN, sessions=[first, second])


def test_golden_part() -> None:
    part = GROWING_VECTOR.read_bytes()
    assert msgspec.msgpack.encode(golden_part()) == part
    table = SessionTable()
    table.restore(part)
    assert list(table.capture()) == [part]
    assert [session.filter for session in table] == [None, '["Not", "sent"]']
    assert [session.prefixes for session in table] == [("orders.", ""), ()]
    assert [dict(session.acks) for session in table] == [{}, {"jobs": "billing"}]


def test_a_part_from_before_there_were_prefixes_has_none() -> None:
    first, second = GOLDEN.sessions
    filtered = replace(
        GOLDEN, sessions=[replace(first, owner=OWNER), replace(second, filter='["Not", "sent"]')]
    )
    table = SessionTable()
    table.restore(FILTERED_VECTOR.read_bytes())
    assert list(table.capture()) == [msgspec.msgpack.encode(filtered)]
    assert [session.filter for session in table] == [None, '["Not", "sent"]']
    assert [session.prefixes for session in table] == [(), ()]


def test_a_part_from_before_there_were_filters_has_none() -> None:
    first, second = GOLDEN.sessions
    owned = replace(GOLDEN, sessions=[replace(first, owner=OWNER), second])
    table = SessionTable()
    table.restore(OWNED_VECTOR.read_bytes())
    assert list(table.capture()) == [msgspec.msgpack.encode(owned)]
    assert [session.owner for session in table] == [OWNER, None]
    assert [session.filter for session in table] == [None, None]


def test_a_filter_survives_a_restart(desk: Desk) -> None:
    desk.commit(SessionOpened("w", TS, OPTIONS, AT, OWNER, '"paid"'))
    for again in (restarted([], desk.entries), restarted(list(desk.table.capture()), [])):
        assert [session.filter for session in again.table] == ['"paid"']


def test_prefixes_and_consumers_survive_a_restart(desk: Desk) -> None:
    made = SessionOpened("w", TS, OPTIONS, AT, prefixes=("a.", "b."), acks={"t": "c"})
    desk.commit(made)
    for again in (restarted([], desk.entries), restarted(list(desk.table.capture()), [])):
        (session,) = again.table
        assert (session.prefixes, session.acks) == (("a.", "b."), {"t": "c"})


def test_large_filters_are_captured_in_several_parts(desk: Desk) -> None:
    for number in range(6):
        desk.commit(SessionOpened(f"w{number}", TS, OPTIONS, [], None, f'"{number:>40000}"'))
    parts = list(desk.table.capture())
    assert len(parts) == 3
    again = restarted(parts, [])
    assert [session.filter for session in again.table] == [
        f'"{number:>40000}"' for number in range(6)
    ]


def test_a_part_from_before_there_were_keys_is_nobodys() -> None:
    table = SessionTable()
    table.restore(VECTOR.read_bytes())
    assert list(table.capture()) == [msgspec.msgpack.encode(GOLDEN)]
    assert [session.owner for session in table] == [None, None]


def test_whose_a_session_is_survives_a_restart(desk: Desk) -> None:
    desk.commit(SessionOpened("w", TS, OPTIONS, AT, OWNER))
    replayed = restarted([], desk.entries)
    assert [session.owner for session in replayed.table] == [OWNER]
    captured = restarted(list(desk.table.capture()), [])
    assert [session.owner for session in captured.table] == [OWNER]


@pytest.mark.parametrize(
    ("part", "words"),
    [
        (b"", "not a part of the watch sessions"),
        (b"\xc1", "not a part of the watch sessions"),
        (msgspec.msgpack.encode((2, 0, [])), "version 2"),
        (msgspec.msgpack.encode((1, 0, [("w",)])), "not a part of the watch sessions"),
    ],
)
def test_bytes_that_are_no_sessions_are_refused(part: bytes, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        SessionTable().restore(part)


# -- against a dict ---------------------------------------------------------------------------


class Plain:
    """The plain state of a session. `is_noted`: storage has noted that the session has a stream."""

    def __init__(self, ts: int) -> None:
        self.seq = 0
        self.used_ts = ts
        self.streams = 0
        self.is_noted = False


class SessionsAgainstADict(RuleBasedStateMachine):
    """Open, move, close, expire and restart; a dict has the expected state.

    The journal keeps staged entries. A capture is taken at any moment, with or without entries in
    flight, and a restart replays from the oldest entry that was not applied when the capture began.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now_ms = TS
        self.desk = Desk()
        self.plain: dict[str, Plain] = {}
        self.pending: list[tuple[int, SessionEntry]] = []
        self.parts: list[bytes] = []
        self.start_lsn = 1
        self.made = 0
        self.kept: dict[str, int] = {}

    def submit(self, entry: SessionEntry) -> None:
        lsn = self.desk.stage(entry)
        self.pending.append((lsn, entry))

    def pick(self, number: int, *, streaming: bool) -> tuple[WatchSession, Plain] | None:
        wids = [wid for wid, plain in self.plain.items() if not streaming or plain.streams]
        if not wids:
            return None
        wid = wids[number % len(wids)]
        session = self.desk.table.find(wid)
        assert session is not None
        return session, self.plain[wid]

    @rule(count=st.integers(1, 9))
    def applied(self, count: int) -> None:
        for lsn, entry in self.pending[:count]:
            self.desk.table.commit_staged(lsn)
            self.desk.table.apply(lsn, entry)
        del self.pending[:count]

    @rule()
    def opened(self) -> None:
        self.made += 1
        entry = SessionOpened(f"w{self.made}", self.now_ms, OPTIONS, [CursorAt("t", 1, 1, 0)])
        self.submit(entry)
        self.applied(len(self.pending))
        self.plain[entry.wid] = Plain(self.now_ms)

    @rule(number=st.integers(0, 99))
    def began(self, number: int) -> None:
        if (found := self.pick(number, streaming=False)) is not None:
            session, plain = found
            if self.desk.table.begin(session):
                self.submit(SessionMoved(session.wid, self.now_ms, True, []))
            plain.streams += 1
            plain.is_noted = True

    @rule(number=st.integers(0, 99), seq=st.integers(0, 1_000))
    def streamed(self, number: int, seq: int) -> None:
        if (found := self.pick(number, streaming=True)) is not None:
            session, plain = found
            session.cursors["t"].seq = plain.seq = seq

    @rule(number=st.integers(0, 99))
    def ended(self, number: int) -> None:
        if (found := self.pick(number, streaming=True)) is not None:
            session, plain = found
            plain.streams -= 1
            if self.desk.table.end(session, self.now_ms, is_cut=False):
                positions = session.positions()
                self.submit(SessionMoved(session.wid, self.now_ms, False, positions))
            if not plain.streams:
                plain.used_ts = self.now_ms
                plain.is_noted = False

    @rule(by_ms=st.integers(1, 2 * TTL_MS))
    def waited(self, by_ms: int) -> None:
        self.now_ms += by_ms

    @rule()
    def expired(self) -> None:
        expected = {
            wid
            for wid, plain in self.plain.items()
            if not plain.streams and self.now_ms - plain.used_ts >= TTL_MS
        }
        found = self.desk.table.expire(self.now_ms, TTL_MS)
        assert set(found) == expected
        for wid in found:
            del self.plain[wid]
        if found:
            self.submit(SessionsClosed(found, self.now_ms))

    @rule()
    def captured(self) -> None:
        self.start_lsn = self.pending[0][0] if self.pending else self.desk.lsn + 1
        self.parts = list(self.desk.table.capture())
        for wid, plain in self.plain.items():
            self.kept[wid] = plain.seq
            plain.is_noted = plain.streams > 0

    @precondition(lambda self: self.desk.entries)
    @rule(is_clean=st.booleans())
    def restarted(self, is_clean: bool) -> None:
        if is_clean:
            self.captured()
        entries = [(lsn, entry) for lsn, entry in self.desk.entries if lsn >= self.start_lsn]
        last_lsn = self.desk.lsn
        self.desk = restarted(self.parts, entries, self.now_ms)
        self.desk.lsn = last_lsn
        self.desk.entries = entries
        self.pending = []
        for wid, plain in self.plain.items():
            session = self.desk.table.find(wid)
            assert session is not None
            seq = session.cursors["t"].seq
            if plain.streams and not is_clean:
                # The position is that of the capture, or of the end of a later stream.
                journaled = [
                    entry.cursors[0].seq
                    for _, entry in entries
                    if isinstance(entry, SessionMoved) and entry.wid == wid and entry.cursors
                ]
                assert seq in [self.kept.get(wid, 0), *journaled]
                plain.seq = seq
            plain.streams = 0
            if plain.is_noted:
                plain.used_ts = self.now_ms

    @invariant()
    def agrees(self) -> None:
        table = self.desk.table
        assert {session.wid for session in table} == set(self.plain)
        for session in table:
            plain = self.plain[session.wid]
            assert session.is_streaming == bool(plain.streams)
            assert session.cursors["t"].seq == plain.seq
            if not plain.streams:
                assert session.last_used_ts == plain.used_ts
            assert (session.wid in table._idle) == (not plain.streams)


TestSessionsAgainstADict = SessionsAgainstADict.TestCase
TestSessionsAgainstADict.settings = settings(max_examples=100, stateful_step_count=40)
