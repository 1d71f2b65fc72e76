"""The jobs of a shard's writer thread, and their counters.

Each kind of job is a class; `do_job` makes its blocking calls on the shard's `WalFile`. Called by
`wal_writer`.
"""

from __future__ import annotations

from typing import Final, assert_never

import msgspec

from topics_server.runtime.clock import monotonic_ms
from topics_server.runtime.metrics import StepHistogram
from topics_server.values.errors import StorageError, SyncFailed
from topics_server.wal.journal.group_commit import NextGroup
from topics_server.wal.journal.wal_file import WalFile

DISK_FULL: Final = "disk_full"
READ_ONLY: Final = "read_only"


class WriteCounters(msgspec.Struct):
    """The shard's counters since the process started; the loop writes them, any thread may read."""

    frames: int = 0
    groups: int = 0
    syncs: int = 0
    bytes: int = 0
    loop_groups: int = 0
    queue_depth_peak: int = 0
    submit_full: int = 0
    group_frames: StepHistogram = msgspec.field(default_factory=StepHistogram)
    write_us: StepHistogram = msgspec.field(default_factory=StepHistogram)


class WriteGroup(msgspec.Struct, frozen=True, gc=False):
    """Make room for a group and write it; then sync it if requested."""

    group: NextGroup
    sync: bool


class SyncOnly(msgspec.Struct, frozen=True, gc=False):
    """Sync the written groups. The loop may write meanwhile, and writes the end mark."""


class CutBack(msgspec.Struct, frozen=True, gc=False):
    """Zero the remains of a failed write, and sync."""


class MakeRoom(msgspec.Struct, frozen=True, gc=False):
    """Fill ahead and make a spare file. The loop may write into the existing room meanwhile."""


class HoldEndMark(msgspec.Struct, frozen=True, gc=False):
    """Make the end mark durable. The loop may write meanwhile."""


class FinishFile(msgspec.Struct, frozen=True, gc=False):
    """The last job: sync the end mark. Nothing is written after it."""


WriteJob = WriteGroup | SyncOnly | CutBack | MakeRoom | HoldEndMark | FinishFile


class Outcome(msgspec.Struct, gc=False):
    """The result of a job. `error` is `DISK_FULL`, `READ_ONLY` (outcome unknown) or None."""

    job: WriteJob
    written: bool = False
    synced: bool = False
    error: str | None = None
    reason: str = ""
    write_ms: float = 0.0
    sync_ms: float = 0.0


def do_job(tail: WalFile, job: WriteJob) -> Outcome:
    """*Blocking.* Do the job; an error of the disk becomes a part of the outcome."""
    outcome = Outcome(job)
    try:
        match job:
            case WriteGroup():
                _write(tail, job, outcome)
            case SyncOnly():
                _sync(tail, outcome)
            case CutBack():
                _cut_back(tail, outcome)
            case MakeRoom():
                tail.prepare()
            case HoldEndMark():
                tail.hold()
            case FinishFile():
                tail.finish()
            case _:
                assert_never(job)
    except SyncFailed as error:
        outcome.error, outcome.reason = READ_ONLY, str(error)
    except StorageError as error:
        # Any other error (no room, no descriptor, no permission): no sync was tried.
        outcome.error, outcome.reason = DISK_FULL, str(error)
        # In jobs without a group, a failed write was made by the loop, which handles it.
        if isinstance(job, WriteGroup) and tail.is_broken:
            _cut_back(tail, outcome)
    return outcome


def _write(tail: WalFile, job: WriteGroup, outcome: Outcome) -> None:
    began_ms = monotonic_ms()
    tail.make_room(job.group.frames_bytes, urgent=job.group.urgent)
    tail.write(job.group, sync_follows=job.sync)
    tail.note_end()
    outcome.written = True
    outcome.write_ms = monotonic_ms() - began_ms
    if job.sync:
        _sync(tail, outcome)
        # The loop writes nothing during this job, so the worker writes the end mark.
        tail.note_synced()


def _sync(tail: WalFile, outcome: Outcome) -> None:
    began_ms = monotonic_ms()
    tail.sync()
    outcome.sync_ms = monotonic_ms() - began_ms
    outcome.synced = True


def _cut_back(tail: WalFile, outcome: Outcome) -> None:
    """Zero the remains of a failed write; if that fails too, the outcome is unknown."""
    try:
        tail.cut()
        outcome.synced = True
    except StorageError as error:
        outcome.error, outcome.reason = READ_ONLY, f"cannot cut back: {error}"
