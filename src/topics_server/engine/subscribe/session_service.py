"""Opens, finds, follows, expires and journals watch sessions.

A watch session only reads: if the journal refuses an entry, the session continues in memory, and
only a restart would lose its position. Only the opening of a session waits for its entry. Called by
`api/watch/handlers`; loop thread only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final

from topics_server.engine.commit.gates import gate_of_service
from topics_server.engine.commit.pipeline import CommitPipeline, Ticket
from topics_server.engine.commit.ticket_waits import resolved
from topics_server.engine.ports import Clock
from topics_server.engine.subscribe.cursors import Cursor
from topics_server.engine.subscribe.sessions import SessionTable, WatchSession
from topics_server.runtime.clock import random_id
from topics_server.runtime.metrics import log
from topics_server.values.entries import (
    CursorAt,
    Entry,
    SessionEntry,
    SessionMoved,
    SessionOpened,
    SessionOptions,
    SessionsClosed,
)
from topics_server.values.errors import Code, TopicsError

_WID_BYTES: Final = 16


class WatchSessions:
    """The sessions of a server that has recovered. `max_sessions`: 0 is unlimited.

    `ttl_ms`: the lifetime of a session without a stream.
    """

    def __init__(
        self,
        table: SessionTable,
        commits: CommitPipeline,
        clock: Clock,
        *,
        ttl_ms: int,
        max_sessions: int,
        max_per_prefix: int = 0,
    ) -> None:
        assert ttl_ms > 0
        assert max_sessions >= 0
        self._table = table
        self._commits = commits
        self._clock = clock
        self._max_sessions = max_sessions
        # The maximum of sessions of all keys with a prefix; 0 is unlimited.
        self.max_per_prefix = max_per_prefix
        # The number of sessions that each owner is opening now.
        self._opening: Counter[str] = Counter()
        self.ttl_ms = ttl_ms
        self._is_draining = False
        self._is_closed = False
        # Whether a refusal was logged; reset when the journal accepts an entry again.
        self._is_refused = False
        table.finish_recovery(clock.now_ms())

    def __len__(self) -> int:
        return len(self._table)

    async def open(
        self,
        options: SessionOptions,
        cursors: Sequence[Cursor],
        owner: str | None = None,
        sharing: Mapping[str, Sequence[str]] = MappingProxyType({}),
        wanted: str | None = None,
        prefixes: tuple[str, ...] = (),
        acks: Mapping[str, str] = MappingProxyType({}),
    ) -> WatchSession:
        """Open a session that starts at copies of these cursors; it survives a kill.

        `owner`, `wanted` as its filter, `prefixes` and `acks` are stored: see
        `entries.SessionOpened`. `sharing`: for each prefix of the session's key, the owners that
        also have this prefix. Raises `throttled` when a limit of sessions is reached.
        """
        now_ms = self._clock.now_ms()
        self._reclaim(now_ms)
        if self._max_sessions:
            count = len(self._table) + self._table.opening_count
            if count >= self._max_sessions:
                raise TopicsError(
                    Code.THROTTLED,
                    "the server has reached its limit of watch sessions",
                    {"limit": "max_watch_sessions", "max": self._max_sessions},
                )
        self._check_sharing(sharing)
        positions = [CursorAt(at.name, at.topic_id, at.epoch, at.seq) for at in cursors]
        wid = f"wid_{random_id(_WID_BYTES)}"
        entry = SessionOpened(wid, now_ms, options, positions, owner, wanted, prefixes, dict(acks))
        ticket = self._submit(entry)
        if ticket is not None:
            await self._opened(ticket, owner)
        session = self._table.open(entry)
        if ticket is None or ticket.error is not None:
            session.noted = None
        return session

    def _check_sharing(self, sharing: Mapping[str, Sequence[str]]) -> None:
        if not self.max_per_prefix:
            return
        for prefix, owners in sharing.items():
            count = sum(self._table.owners[owner] + self._opening[owner] for owner in owners)
            if count >= self.max_per_prefix:
                raise TopicsError(
                    Code.THROTTLED,
                    f'the keys for "{prefix}" have reached their limit of watch sessions',
                    {
                        "limit": "max_watch_sessions_per_prefix",
                        "max": self.max_per_prefix,
                        "prefix": prefix,
                    },
                )

    async def _opened(self, ticket: Ticket, owner: str | None) -> None:
        """Return when the opening is applied or has failed; it counts for its owner."""
        if owner is None:
            await resolved(ticket)
            return
        self._opening[owner] += 1
        try:
            await resolved(ticket)
        finally:
            self._opening[owner] -= 1
            if not self._opening[owner]:
                del self._opening[owner]

    def find(self, wid: str) -> WatchSession | None:
        """The session of an id, unless it has expired. Finding it does not count as use."""
        self._reclaim(self._clock.now_ms())
        return self._table.find(wid)

    def begin(self, session: WatchSession) -> None:
        """Note an opened stream of the session. Each needs one `end`, even after a takeover.

        If the client went back, the position is journaled, so that a restart does not skip the
        records that the client reads again.
        """
        if not self._table.begin(session):
            # The older stream has moved the session since; only a snapshot may have the new
            # position.
            session.noted = None
        now_ms = self._clock.now_ms()
        self._submit(SessionMoved(session.wid, now_ms, True, session.take_note()))

    def end(self, session: WatchSession) -> None:
        """Note an ended stream of the session; its cursors keep their positions."""
        now_ms = self._clock.now_ms()
        if self._table.end(session, now_ms, is_cut=self._is_draining):
            self._submit(
                SessionMoved(session.wid, now_ms, session.is_streaming, session.take_note())
            )

    def drain(self) -> None:
        """From now on the server ends the streams; the next start counts them as open."""
        self._is_draining = True

    def close(self) -> None:
        """Write nothing any more: the journal is about to close."""
        self._is_closed = True

    def _reclaim(self, now_ms: int) -> None:
        expired = self._table.expire(now_ms, self.ttl_ms)
        if expired:
            self._submit(SessionsClosed(expired, now_ms))

    def _submit(self, entry: SessionEntry) -> Ticket | None:
        """Journal an entry; None if the journal refuses it."""
        if self._is_closed:
            return None
        try:
            ticket = self._commits.submit(entry, gate_of_service(entry), self._table, urgent=True)
        except TopicsError as error:
            self._refused(entry, error)
            return None
        ticket.waiters.append(lambda: self._on_resolved(ticket))
        return ticket

    def _on_resolved(self, ticket: Ticket) -> None:
        if ticket.error is not None:
            self._refused(ticket.entry, ticket.error)
        else:
            self._is_refused = False

    def _refused(self, entry: Entry, error: TopicsError) -> None:
        if isinstance(entry, SessionMoved):
            session = self._table.find(entry.wid)
            if session is not None:
                session.noted = None
        if not self._is_refused:
            self._is_refused = True
            log.warning("watch sessions continue in memory only: %s", error.message)
