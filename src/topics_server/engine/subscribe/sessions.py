"""Watch sessions: topics and positions, connected or not (§7.1). Pure.

A projection of the journal, except for positions: streams move the cursors of their session in
place, and a capture stores them. When an entry about a session is staged, the session already has
that state, so applying it changes something only in replay; `WatchSession.lsn` distinguishes the
two cases.

Invariants: a session with a stream never expires; `_idle` has the other sessions, the longest
unused one first. Called by `session_service` (live), by commits and by recovery (apply). Loop
thread only.
"""

from __future__ import annotations

import sys
from collections import Counter, OrderedDict, deque
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Final

import msgspec

from topics_server.engine.subscribe.cursors import Cursor
from topics_server.engine.topic.applied import Applied
from topics_server.values.entries import (
    CursorAt,
    Entry,
    SessionMoved,
    SessionOpened,
    SessionOptions,
    SessionsClosed,
)
from topics_server.values.storage_types import SESSIONS_PARTS, SessionImage, SessionsPart

# Cursors in one captured part: about as many as one slice encodes.
_PART_CURSORS: Final = 1_000
# Characters of a filter and of prefixes that count as one cursor when parts are sized.
_CURSOR_CHARS: Final = 64
# Most sessions share this object.
_NO_ACKS: Final[Mapping[str, str]] = MappingProxyType({})
_NOTHING: Final = Applied()


class WatchSession:
    """One session. Times in ms of the wall clock.

    `is_streaming`: a stream is open, or was open when the server stopped. `is_restored`: a restart
    restored it, and no stream has opened since. `lsn`: the newest included entry. `noted`: a hash
    of the positions that were journaled last, None if unknown. `stream`: the connection that serves
    the session now; a new stream ends it; never journaled. `owner`, `filter`, `prefixes`, `acks`:
    see `entries.SessionOpened`.
    """

    __slots__ = (
        "acks",
        "cursors",
        "filter",
        "is_restored",
        "is_streaming",
        "last_used_ts",
        "lsn",
        "noted",
        "opened_ts",
        "options",
        "owner",
        "prefixes",
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
        wanted: str | None = None,
        prefixes: tuple[str, ...] = (),
        acks: Mapping[str, str] = _NO_ACKS,
    ) -> None:
        self.wid = wid
        self.owner = owner
        self.filter = wanted
        self.prefixes = prefixes
        self.acks = acks
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
        # The number of streams: two for a moment while one stream replaces another.
        self.stream_count = 0

    def positions(self) -> list[CursorAt]:
        """The session's current positions."""
        return [
            CursorAt(cursor.name, cursor.topic_id, cursor.epoch, cursor.seq)
            for cursor in self.cursors.values()
        ]

    def take_note(self) -> list[CursorAt]:
        """The positions to journal now; empty if the journal already has them."""
        noted = hash(tuple([(at.topic_id, at.epoch, at.seq) for at in self.cursors.values()]))
        if noted == self.noted:
            return []
        self.noted = noted
        return self.positions()

    def move(self, positions: Sequence[CursorAt]) -> None:
        """Move to these positions; topics without a new position keep theirs."""
        for at in positions:
            # Thousands of sessions follow the same topics: share one string per name.
            name = sys.intern(at.name)
            self.cursors[name] = Cursor(name, at.topic_id, at.epoch, at.seq)


class SessionTable:
    """All sessions. Satisfies `projections.Projection`."""

    def __init__(self) -> None:
        self._sessions: dict[str, WatchSession] = {}
        # The number of sessions of each owner.
        self.owners: Counter[str] = Counter()
        self._idle: OrderedDict[str, None] = OrderedDict()
        self._staged: deque[tuple[int, bool]] = deque()
        self._applied_lsn = 0
        # The sessions that are being opened; they count against the limit.
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
        """Add the session of this entry, journaled or not."""
        session = self._sessions.get(entry.wid)
        if session is None:
            session = WatchSession(
                entry.wid,
                entry.options,
                entry.cursors,
                entry.ts,
                entry.owner,
                entry.filter,
                entry.prefixes,
                entry.acks or _NO_ACKS,
            )
            session.take_note()
            self._keep(session)
            self._idle[entry.wid] = None
        return session

    def begin(self, session: WatchSession) -> bool:
        """Note an opened stream of the session; returns False if it took over from another one."""
        assert self._sessions[session.wid] is session
        session.is_restored = False
        session.is_streaming = True
        session.stream_count += 1
        self._idle.pop(session.wid, None)
        return session.stream_count == 1

    def end(self, session: WatchSession, now_ms: int, *, is_cut: bool) -> bool:
        """Note an ended stream of the session; returns whether it was the last one.

        `is_cut`: the server ended the stream because it is stopping; the session still counts as
        streaming.
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
        """Remove sessions that were unused for `ttl_ms`; returns their ids."""
        expired: list[str] = []
        while self._idle:
            wid = next(iter(self._idle))
            session = self._sessions[wid]
            assert session.stream_count == 0
            if session.last_used_ts > now_ms:
                # The clock was set back: count the session's age from now.
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
        """See `projections.Owner`.

        The session in memory already has the state of a stream's entry.
        """
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
        """See `projections.Projection`. Entries about a missing session change nothing."""
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
        """See `projections.Projection`. Yields nothing while there is no session.

        A session may be newer than the lsn of its part; the session's own lsn is exact.
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
            chars = len(session.filter or "") + sum(map(len, session.prefixes))
            cursor_count += chars // _CURSOR_CHARS + len(session.acks)
            if cursor_count >= _PART_CURSORS:
                yield msgspec.msgpack.encode(
                    SessionsPart(SESSIONS_PARTS.version, applied_lsn, images)
                )
                images, cursor_count = [], 0
        if images:
            yield _encode(applied_lsn, images)

    def restore(self, part: bytes) -> None:
        """See `projections.Projection`."""
        captured = SESSIONS_PARTS.decode(part)
        self._applied_lsn = captured.applied_lsn
        for image in captured.sessions:
            session = WatchSession(
                image.wid,
                image.options,
                image.cursors,
                image.opened_ts,
                image.owner,
                image.filter,
                image.prefixes,
                image.acks or _NO_ACKS,
            )
            session.last_used_ts = image.last_used_ts
            session.is_streaming = image.is_streaming
            session.lsn = image.lsn
            self._keep(session)

    def finish_recovery(self, now_ms: int) -> None:
        """Count streaming sessions as used until now: after a restart no client is connected."""
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
        session.filter,
        session.prefixes,
        dict(session.acks),
    )


def _encode(applied_lsn: int, images: list[SessionImage]) -> bytes:
    return msgspec.msgpack.encode(SessionsPart(SESSIONS_PARTS.version, applied_lsn, images))
