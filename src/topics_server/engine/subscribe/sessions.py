"""Watch sessions: topics and positions, connected or not (§7.1). Pure.

A projection of the journal, but for positions: streams move the cursors of their session in place,
and a capture shows where they are. A session is what its stream made of it already when the entry
that says so is staged, so only replay moves anything; `WatchSession.lsn` tells them apart.

Invariants: a session with a stream is never expired; `_idle` holds the others, longest unused
first. Called by `watching` (live), by commits and by recovery (apply). Loop thread only.
"""

from __future__ import annotations

import sys
from collections import Counter, OrderedDict, deque
from collections.abc import Iterator, Sequence
from typing import Final

import msgspec

from topics_server.engine.subscribe.cursors import Cursor
from topics_server.engine.topic.topic import Applied
from topics_server.values.entries import (
    CursorAt,
    Entry,
    SessionMoved,
    SessionOpened,
    SessionOptions,
    SessionsClosed,
)
from topics_server.values.storage_types import SessionImage, SessionsPart

_VERSION: Final = 1
# Cursors in one captured part: about what is encoded in a slice.
_PART_CURSORS: Final = 1_000
_NOTHING: Final = Applied()
_DECODER: Final = msgspec.msgpack.Decoder(SessionsPart)


class WatchSession:
    """One session. Times in ms of the wall clock.

    `is_streaming`: a stream is open, or was when the server stopped. `is_restored`: came back with
    a restart and had no stream since. `lsn`: the newest entry that is in here already. `noted`:
    a hash of the positions that the journal was told last, None if that is not known. `stream`:
    the connection that serves it now, for whoever takes it over; never written. `owner`: see
    `entries.SessionOpened`.
    """

    __slots__ = (
        "cursors",
        "is_restored",
        "is_streaming",
        "last_used_ts",
        "lsn",
        "noted",
        "opened_ts",
        "options",
        "owner",
        "stream",
        "stream_count",
        "wid",
    )

    def __init__(
        self,
        wid: str,
        options: SessionOptions,
        cursors: Sequence[CursorAt],
        opened_ts: int,
        owner: str | None = None,
    ) -> None:
        self.wid = wid
        self.owner = owner
        self.options = options
        self.cursors: dict[str, Cursor] = {}
        self.move(cursors)
        self.opened_ts = opened_ts
        self.last_used_ts = opened_ts
        self.is_streaming = False
        self.is_restored = False
        self.lsn = 0
        self.noted: int | None = None
        self.stream: object | None = None
        # Two for a moment while one stream takes over from another.
        self.stream_count = 0

    def positions(self) -> list[CursorAt]:
        """Where it stands now."""
        return [
            CursorAt(cursor.name, cursor.topic_id, cursor.epoch, cursor.seq)
            for cursor in self.cursors.values()
        ]

    def take_note(self) -> list[CursorAt]:
        """The positions to be journaled now: none if the journal was told just these last."""
        noted = hash(tuple([(at.topic_id, at.epoch, at.seq) for at in self.cursors.values()]))
        if noted == self.noted:
            return []
        self.noted = noted
        return self.positions()

    def move(self, positions: Sequence[CursorAt]) -> None:
        """Go to these positions; topics that are not named stay."""
        for at in positions:
            # Thousands of sessions follow the same topics: one string of each name is enough.
            name = sys.intern(at.name)
            self.cursors[name] = Cursor(name, at.topic_id, at.epoch, at.seq)


class SessionTable:
    """All sessions. Satisfies `projections.Projection`."""

    def __init__(self) -> None:
        self._sessions: dict[str, WatchSession] = {}
        # How many sessions each owner has.
        self.owners: Counter[str] = Counter()
        self._idle: OrderedDict[str, None] = OrderedDict()
        self._staged: deque[tuple[int, bool]] = deque()
        self._applied_lsn = 0
        # Sessions whose opening is under way: they count against the cap.
        self.opening_count = 0

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[WatchSession]:
        return iter(list(self._sessions.values()))

    def find(self, wid: str) -> WatchSession | None:
        """The session of an id."""
        return self._sessions.get(wid)

    # -- live ------------------------------------------------------------------------------

    def open(self, entry: SessionOpened) -> WatchSession:
        """The session of this entry, from now on there, journaled or not."""
        session = self._sessions.get(entry.wid)
        if session is None:
            session = WatchSession(entry.wid, entry.options, entry.cursors, entry.ts, entry.owner)
            session.take_note()
            self._keep(session)
            self._idle[entry.wid] = None
        return session

    def begin(self, session: WatchSession) -> bool:
        """A stream of the session opened; whether it took over from no other."""
        assert self._sessions[session.wid] is session
        session.is_restored = False
        session.is_streaming = True
        session.stream_count += 1
        self._idle.pop(session.wid, None)
        return session.stream_count == 1

    def end(self, session: WatchSession, now_ms: int, *, is_cut: bool) -> bool:
        """A stream of the session ended; whether it was the last one.

        `is_cut`: the server ended it to stop. Then it counts as streaming still.
        """
        assert session.stream_count > 0
        session.stream_count -= 1
        if session.stream_count:
            return False
        session.last_used_ts = now_ms
        if not is_cut:
            session.is_streaming = False
            self._idle[session.wid] = None
        return True

    def expire(self, now_ms: int, ttl_ms: int) -> list[str]:
        """Forget the sessions that nobody used for so long; their ids. Looks at few others."""
        expired: list[str] = []
        while self._idle:
            wid = next(iter(self._idle))
            session = self._sessions[wid]
            assert session.stream_count == 0
            if session.last_used_ts > now_ms:
                # The clock was set back: its age counts from now.
                session.last_used_ts = now_ms
                self._idle.move_to_end(wid)
            elif now_ms - session.last_used_ts < ttl_ms:
                break
            else:
                self._forget(wid)
                expired.append(wid)
        return expired

    def _forget(self, wid: str) -> None:
        session = self._sessions.pop(wid, None)
        self._idle.pop(wid, None)
        if session is not None and session.owner is not None:
            self.owners[session.owner] -= 1
            if not self.owners[session.owner]:
                del self.owners[session.owner]

    def _keep(self, session: WatchSession) -> None:
        self._sessions[session.wid] = session
        if session.owner is not None:
            self.owners[session.owner] += 1

    # -- journal ---------------------------------------------------------------------------

    def stage(self, lsn: int, entry: Entry) -> None:
        """See `projections.Owner`. What a stream's entry says is in memory already."""
        is_opening = isinstance(entry, SessionOpened)
        self._staged.append((lsn, is_opening))
        self.opening_count += is_opening
        if isinstance(entry, SessionMoved):
            self._sessions[entry.wid].lsn = lsn

    def commit_staged(self, lsn: int) -> None:
        """See `projections.Owner`."""
        staged_lsn, is_opening = self._staged.popleft()
        assert staged_lsn == lsn, "entries leave in the order in which they came"
        self.opening_count -= is_opening

    def undo_from(self, lsn: int) -> None:
        """See `projections.Owner`."""
        while self._staged and self._staged[-1][0] >= lsn:
            self.opening_count -= self._staged.pop()[1]

    def apply(self, lsn: int, entry: Entry) -> Applied:
        """See `projections.Projection`. A session that is gone is not moved."""
        if lsn <= self._applied_lsn:
            return _NOTHING
        self._applied_lsn = lsn
        if isinstance(entry, SessionOpened):
            self.open(entry)
        elif isinstance(entry, SessionMoved):
            session = self._sessions.get(entry.wid)
            if session is not None and lsn > session.lsn:
                session.lsn = lsn
                session.is_streaming = entry.is_streaming
                session.last_used_ts = entry.ts
                session.move(entry.cursors)
        else:
            assert isinstance(entry, SessionsClosed), "not an entry of the sessions"
            for wid in entry.wids:
                self._forget(wid)
        return _NOTHING

    # -- snapshots and restarts ------------------------------------------------------------

    def capture(self) -> Iterator[bytes]:
        """See `projections.Projection`. Nothing at all while there is no session.

        A session may be newer than the lsn its part names: its own lsn says what it has.
        """
        applied_lsn = self._applied_lsn
        images: list[SessionImage] = []
        cursor_count = 0
        for wid in list(self._sessions):
            session = self._sessions.get(wid)
            if session is None:
                continue  # expired while others were captured
            images.append(_image_of(session))
            cursor_count += 1 + len(session.cursors)
            if cursor_count >= _PART_CURSORS:
                yield msgspec.msgpack.encode(SessionsPart(_VERSION, applied_lsn, images))
                images, cursor_count = [], 0
        if images:
            yield msgspec.msgpack.encode(SessionsPart(_VERSION, applied_lsn, images))

    def restore(self, part: bytes) -> None:
        """See `projections.Projection`."""
        try:
            captured = _DECODER.decode(part)
        except msgspec.DecodeError as error:
            raise ValueError(f"not captured watch sessions: {error}") from None
        if captured.version != _VERSION:
            raise ValueError(
                f"captured watch sessions have version {captured.version}, not {_VERSION}"
            )
        self._applied_lsn = captured.applied_lsn
        for image in captured.sessions:
            session = WatchSession(
                image.wid, image.options, image.cursors, image.opened_ts, image.owner
            )
            session.last_used_ts = image.last_used_ts
            session.is_streaming = image.is_streaming
            session.lsn = image.lsn
            self._keep(session)

    def finish_recovery(self, now_ms: int) -> None:
        """Nobody is connected: whoever was when the server stopped was here until now."""
        for session in self._sessions.values():
            session.is_restored = True
            if session.is_streaming:
                session.is_streaming = False
                session.last_used_ts = now_ms
        by_age = sorted(self._sessions.values(), key=lambda session: session.last_used_ts)
        self._idle = OrderedDict.fromkeys(session.wid for session in by_age)


def _image_of(session: WatchSession) -> SessionImage:
    return SessionImage(
        session.wid,
        session.options,
        session.positions(),
        session.opened_ts,
        session.last_used_ts,
        session.is_streaming,
        session.lsn,
        session.owner,
    )
