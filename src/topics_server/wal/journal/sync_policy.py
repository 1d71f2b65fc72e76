"""Stores how far a shard is written and synced, and decides when it syncs. Pure.

`Watermarks` holds three lsns that only grow, except in `take_back`. `SyncPolicy` decides whether a
sync is due and what the loop may write before or beside it
(`docs/decisions/0016-writes-beside-a-sync.md`). Both belong to the loop thread. Called by
`wal_writer`.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from topics_server.values.limits import LOOP_UNSYNCED_BYTES_MAX
from topics_server.wal.journal.group_commit import QueuedFrame

# A write during a sync that takes longer than `SLOW_WRITE_MS` may have waited for the sync (or for
# a busy machine). If `SLOW_SYNCS_MAX` syncs in a row have such a write, the file system serialises
# writes and syncs.
SLOW_WRITE_MS: Final = 5.0
# This many unsynced bytes are synced even before a sync is due, so that the loop may write further.
SYNC_AHEAD_BYTES: Final = LOOP_UNSYNCED_BYTES_MAX // 2
SLOW_SYNCS_MAX: Final = 3


class Watermarks:
    """The lsns of a shard: `synced_lsn <= written_lsn <= submitted_lsn`."""

    __slots__ = ("submitted_lsn", "synced_lsn", "written_lsn")

    def __init__(self, last_lsn: int) -> None:
        self.submitted_lsn = self.written_lsn = self.synced_lsn = last_lsn

    def submit(self, lsn: int) -> None:
        """Note one entry that is added to the queue."""
        assert lsn > self.submitted_lsn, "lsns of a shard ascend"
        self.submitted_lsn = lsn

    def write(self, first_lsn: int, last_lsn: int) -> None:
        """Note the entries of one group that `write(2)` has taken."""
        assert self.written_lsn < first_lsn <= last_lsn <= self.submitted_lsn
        self.written_lsn = last_lsn

    def sync(self, lsn: int) -> None:
        """Note how far a sync has reached."""
        assert self.synced_lsn <= lsn <= self.written_lsn
        self.synced_lsn = lsn

    def take_back(self) -> None:
        """Forget entries that were submitted but not written: the loop has undone them."""
        self.submitted_lsn = self.written_lsn


class SyncPolicy:
    """Decides whether a sync is due, for which tickets, and which writes go first.

    `is_due`: the interval has passed, or a caller of `sync_all` waits. `from_lsns`: for each
    written, unsynced group the first entry whose ticket waits for the sync.
    """

    __slots__ = ("from_lsns", "_had_slow_write", "_slow_syncs", "is_due", "writes_beside_syncs")

    def __init__(self) -> None:
        self.is_due = False
        self.writes_beside_syncs = True
        self.from_lsns: Final[deque[int]] = deque()
        self._had_slow_write = False
        self._slow_syncs = 0

    @property
    def wants_sync(self) -> bool:
        """Whether a sync is due, or a ticket of a written entry waits for one."""
        return self.is_due or bool(self.from_lsns)

    @property
    def waiting_lsns(self) -> list[int]:
        """For each written but unsynced group: the first entry whose ticket waits for the sync."""
        return list(self.from_lsns)

    # -- decisions -------------------------------------------------------------------------

    def allows_write(self, queue: deque[QueuedFrame]) -> bool:
        """Whether the queue may be written now; if a sync is due, only if writes do not wait.

        If all queued frames wait for a sync, one job writes and syncs them.
        """
        if not self.is_due and not self.from_lsns:
            return True
        return self.writes_beside_syncs and not all(frame.sync for frame in queue)

    def may_sync_first(self, queue: deque[QueuedFrame]) -> bool:
        """Whether to sync before the queue is written. No ticket waits for such a sync.

        The loop then writes the queue during the sync. If one job did both, the queue's tickets
        would wait for the sync too.
        """
        return (
            self.is_due
            and self.writes_beside_syncs
            and not self.from_lsns
            and not any(frame.sync for frame in queue)
        )

    def wants_sync_of(self, dirty_bytes: int) -> bool:
        """Whether to sync while no entry is queued.

        Many unsynced bytes are synced before a sync is due, so that the loop may keep writing.
        """
        return (
            self.is_due
            or bool(self.from_lsns)
            or (self.writes_beside_syncs and dirty_bytes > SYNC_AHEAD_BYTES)
        )

    def failed_from(self, written_lsn: int) -> int:
        """The first entry that a failed sync undoes: the first one whose ticket waits."""
        if self.from_lsns:
            return min(written_lsn + 1, self.from_lsns[0])
        return written_lsn + 1

    # -- events ----------------------------------------------------------------------------

    def ticket_waits(self, sync_from_lsn: int) -> None:
        """Note a written group whose sync the ticket of this entry waits for."""
        self.from_lsns.append(sync_from_lsn)

    def write_took(self, took_ms: float) -> None:
        """Note the duration of a write that returned while a sync was under way."""
        self._had_slow_write |= took_ms > SLOW_WRITE_MS

    def synced(self, synced_lsn: int) -> bool:
        """Note a successful sync; True if from now on nothing is written during a sync."""
        waiting = self.from_lsns
        while waiting and waiting[0] <= synced_lsn:
            waiting.popleft()
        self.is_due = False
        self._slow_syncs = self._slow_syncs + 1 if self._had_slow_write else 0
        self._had_slow_write = False
        if self._slow_syncs < SLOW_SYNCS_MAX:
            return False
        is_news, self.writes_beside_syncs = self.writes_beside_syncs, False
        return is_news
