"""The jobs of a shard's writer thread, and their counters.

Blocking calls on the shard's `tail`, in that order, each only if asked; every refusal of the disk
becomes a value. Called by `shard`.
"""

from __future__ import annotations

from typing import Final

import msgspec

from topics_server.runtime.clock import monotonic_ms
from topics_server.runtime.metrics import StepHistogram
from topics_server.values.errors import StorageError, SyncFailed
from topics_server.wal.journal.group_commit import NextGroup
from topics_server.wal.journal.wal_file import WalFile

DISK_FULL: Final = "disk_full"
READ_ONLY: Final = "read_only"


class WriteCounters(msgspec.Struct):
    """What the shard did since the process started; the loop writes them, anybody may read."""

    frames: int = 0
    groups: int = 0
    syncs: int = 0
    bytes: int = 0
    loop_groups: int = 0
    queue_depth_peak: int = 0
    submit_full: int = 0
    group_frames: StepHistogram = msgspec.field(default_factory=StepHistogram)
    write_us: StepHistogram = msgspec.field(default_factory=StepHistogram)


class WriteJob(msgspec.Struct, frozen=True, gc=False):
    """What the worker does in one go: cut, write, sync, make room; each only if asked."""

    group: NextGroup | None = None
    cut: bool = False
    sync: bool = False
    prepare: bool = False
    # Make the end mark durable.
    hold: bool = False
    # The last one: nothing is written any more.
    finish: bool = False

    @property
    def only_syncs(self) -> bool:
        """Whether all it does is sync: the loop may write meanwhile."""
        return self.sync and self.group is None and not (self.cut or self.prepare)

    @property
    def only_prepares(self) -> bool:
        """Whether all it does is make room: the loop may write into what there is meanwhile."""
        return self.group is None and not (self.cut or self.sync or self.hold)


class Outcome(msgspec.Struct, gc=False):
    """What came of a job. `error` is `DISK_FULL`, `READ_ONLY` (outcome unknown) or nothing."""

    job: WriteJob
    written: bool = False
    synced: bool = False
    error: str | None = None
    reason: str = ""
    write_ms: float = 0.0
    sync_ms: float = 0.0


def do_job(tail: WalFile, job: WriteJob) -> Outcome:
    """*Blocking.* Never raises a `StorageError`.

    The end mark of a job that only syncs is the loop's, which may write groups meanwhile.
    """
    outcome = Outcome(job)
    try:
        if job.cut:
            _cut_back(tail, outcome)
        if job.group is not None:
            began_ms = monotonic_ms()
            tail.make_room(job.group.frames_bytes, urgent=job.group.urgent)
            tail.write(job.group, sync_follows=job.sync)
            outcome.written = True
            outcome.write_ms = monotonic_ms() - began_ms
        if job.sync:
            began_ms = monotonic_ms()
            if not job.only_syncs and job.group is None:
                tail.note_syncing()
            tail.sync()
            if not job.only_syncs:
                tail.note_synced()
            outcome.sync_ms = monotonic_ms() - began_ms
            outcome.synced = True
        if job.prepare:
            tail.prepare()
        if job.hold:
            tail.hold()
        if job.finish:
            tail.finish()
    except SyncFailed as error:
        outcome.error, outcome.reason = READ_ONLY, str(error)
    except StorageError as error:
        # Whatever the refusal (no room, no descriptor, no right): no sync was tried in vain.
        outcome.error, outcome.reason = DISK_FULL, str(error)
        # Without a group a write that is under way, or has failed, is the loop's.
        if job.group is not None and tail.is_broken:
            _cut_back(tail, outcome)
    return outcome


def _cut_back(tail: WalFile, outcome: Outcome) -> None:
    """Zero what a failed write left; if that fails too, the outcome is unknown."""
    try:
        tail.cut()
        outcome.synced = True
    except StorageError as error:
        outcome.error, outcome.reason = READ_ONLY, f"cannot cut back: {error}"
