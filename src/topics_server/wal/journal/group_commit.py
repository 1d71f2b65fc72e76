"""Chooses the frames of the next group and whether it needs a sync. Pure.

One write takes one group. A group holds at most `GROUP_BYTES_MAX` of frames, unless a single frame
is larger. Called by `wal_writer` on the loop.
"""

from __future__ import annotations

from collections import deque

import msgspec

from topics_server.values.limits import GROUP_BYTES_MAX


class QueuedFrame(msgspec.Struct, frozen=True, gc=False):
    """One encoded entry waiting to be written; `frame_bytes` is the length of its buffers."""

    lsn: int
    buffers: list[bytes]
    frame_bytes: int
    sync: bool
    urgent: bool


class NextGroup(msgspec.Struct, frozen=True, gc=False):
    """Frames for one write.

    `sync_from_lsn`: the first entry whose ticket waits for a sync. `urgent`: whether all entries
    may use the reserve of a full disk.
    """

    buffers: list[bytes]
    frames_bytes: int
    frame_count: int
    first_lsn: int
    last_lsn: int
    sync_from_lsn: int | None
    urgent: bool


def take_group(queue: deque[QueuedFrame], max_bytes: int = GROUP_BYTES_MAX) -> NextGroup:
    """Remove the next group's frames from the front of a non-empty queue."""
    first = queue.popleft()
    buffers = list(first.buffers)
    total, count, last_lsn = first.frame_bytes, 1, first.lsn
    sync_from = first.lsn if first.sync else None
    urgent = first.urgent
    while queue and total + queue[0].frame_bytes <= max_bytes:
        frame = queue.popleft()
        assert frame.lsn > last_lsn, "entries of a shard are submitted in lsn order"
        buffers += frame.buffers
        total += frame.frame_bytes
        count += 1
        last_lsn = frame.lsn
        urgent = urgent and frame.urgent
        if frame.sync and sync_from is None:
            sync_from = frame.lsn
    return NextGroup(buffers, total, count, first.lsn, last_lsn, sync_from, urgent)
