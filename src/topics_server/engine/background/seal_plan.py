"""Plans which runs to seal, move to the cold folder or drop. Pure.

A run is unbroken, holds only records whose frames are synced, and is cut at the bounds of a
segment. A run is sealed by age only above a minimum size: a smaller run stays in the snapshot, so
that many small topics do not make many files. Planning may freeze or split blocks; this is
invisible to readers. Called by `engine/background/sealer.py`.
"""

from __future__ import annotations

import operator
from bisect import bisect_left
from collections.abc import Callable, Sequence

from topics_server.engine.log.log import Log
from topics_server.engine.log.runs import OpenBlock, SealedRun, TailBlock
from topics_server.engine.topic.topic import Topic
from topics_server.values.blocks import Block
from topics_server.values.limits import SEAL_BY_AGE_BYTES_MIN
from topics_server.values.storage_types import SegmentPlan


def is_old(topic: Topic, now_ms: int, max_age_ms: int) -> bool:
    """Whether the tail is old and large enough to be sealed by age."""
    log = topic.log
    if log.tail_count == 0 or log.tail_bytes < SEAL_BY_AGE_BYTES_MIN or topic.is_ephemeral:
        return False
    return now_ms - log.runs[log.sealed_count].time(0) >= max_age_ms


def plan_seal(
    topic: Topic,
    synced_lsn: int,
    now_ms: int,
    max_records: int,
    max_bytes: int,
    max_age_ms: int,
    force: bool = False,
) -> SegmentPlan | None:
    """The next run to seal; None if no run is due. `force`: every synced record is due."""
    assert max_records > 0
    assert max_bytes > 0
    log = topic.log
    if topic.is_ephemeral or log.tail_count == 0:
        return None
    is_full = log.tail_count >= max_records or log.tail_bytes >= max_bytes
    is_due = force or is_old(topic, now_ms, max_age_ms)
    if not is_due and (not is_full or _must_wait(log, synced_lsn, max_records, max_bytes)):
        return None
    if log.open is not None and log.open.last_lsn <= synced_lsn:
        log.freeze_open()
    run, is_cut = _first_run(log, synced_lsn, max_records, max_bytes, log.sealed_count)
    if not run or (is_full and not (is_cut or is_due)):
        return None
    dead = b"".join(bytes(block.dead) for block in run)
    return SegmentPlan(
        topic_id=topic.topic_id,
        segment_id=max(log.next_segment_id, topic.files.first_free_id),
        blocks=[block.block for block in run],
        dead=dead,
    )


def _must_wait(log: Log, synced_lsn: int, max_records: int, max_bytes: int) -> bool:
    """Whether the record with which a segment is full is not synced yet.

    Each append to a long tail asks, so no run is walked: false if the tail has gaps, or if its live
    bytes are half of those that fill a segment.
    """
    first_seq = log.runs[log.sealed_count].first_seq
    has_gaps = log.head_seq - first_seq + 1 != log.tail_count
    if has_gaps or 2 * log.tail_bytes >= max_bytes:
        return False
    end_seq = first_seq + max_records - 1
    at = bisect_left(log.runs, end_seq, log.sealed_count, key=lambda run: run.last_seq)
    run = log.runs[at] if at < len(log.runs) else None
    return isinstance(run, TailBlock | OpenBlock) and run.last_lsn > synced_lsn


def plan_next(
    topic: Topic, plan: SegmentPlan, synced_lsn: int, max_records: int, max_bytes: int
) -> SegmentPlan | None:
    """The plan that follows a plan when that one is carried out, if all its records are live.

    None if no whole segment follows, or if the tail is not as it was when the plan was made.
    """
    log = topic.log
    if not is_front(log, plan.blocks):
        return None
    end = log.sealed_count + len(plan.blocks)
    run, is_cut = _first_run(log, synced_lsn, max_records, max_bytes, end)
    dead = b"".join(bytes(block.dead) for block in run)
    if not is_cut or any(dead):
        return None
    blocks = [block.block for block in run]
    return SegmentPlan(plan.topic_id, plan.segment_id + 1, blocks, dead)


def is_front(log: Log, blocks: Sequence[Block]) -> bool:
    """Whether the tail begins with these blocks."""
    runs = log.runs[log.sealed_count : log.sealed_count + len(blocks)]
    return is_same([run.block for run in runs if isinstance(run, TailBlock)], blocks)


def is_same(some: Sequence[Block], others: Sequence[Block]) -> bool:
    """Whether the blocks of two runs are the same objects."""
    return len(some) == len(others) and all(map(operator.is_, some, others))


def _first_run(
    log: Log, synced_lsn: int, max_records: int, max_bytes: int, index: int
) -> tuple[list[TailBlock], bool]:
    """The blocks of a run of the tail from an index on, and whether a bound or a gap ends it."""
    run: list[TailBlock] = []
    records = size = 0
    while index < len(log.runs):
        block = log.runs[index]
        if not isinstance(block, TailBlock) or block.last_lsn > synced_lsn:
            return run, False
        if run and block.first_seq != run[-1].last_seq + 1:
            return run, True
        if records + block.count > max_records:
            log.runs[index : index + 1] = block.split(max_records - records)
            continue
        if run and size + len(block.block.body) > max_bytes:
            return run, True
        run.append(block)
        records += block.count
        size += len(block.block.body)
        if records == max_records or size >= max_bytes:
            return run, True
        index += 1
    return run, False


def plan_relocation(
    topic: Topic,
    is_cold: Callable[[int, int], bool],
    retain_segments: int,
    retain_bytes: int,
) -> list[int]:
    """Hot segments to move, oldest first: not the newest `retain_segments`, nor `retain_bytes`.

    A bound of 0 keeps nothing hot. `is_cold` takes a topic id and a segment id.
    """
    moving: list[int] = []
    newer_bytes = 0
    for newer, run in enumerate(reversed(list(topic.log.sealed()))):
        newer_bytes += _stored_bytes(run)
        is_kept = newer < retain_segments or (retain_bytes > 0 and newer_bytes <= retain_bytes)
        if is_kept or run.live_count == 0 or run.has_damage:
            continue  # a damaged file stays so that a good copy can replace it
        if run.segment_id in topic.files.untrusted:
            continue
        if not is_cold(topic.topic_id, run.segment_id):
            moving.append(run.segment_id)
    moving.reverse()
    return moving


def _stored_bytes(run: SealedRun) -> int:
    if run.live_count == run.count:
        return run.live_bytes
    return run.index.record_bytes_between(0, run.count, bytes(run.count))


def plan_drops(topic: Topic) -> list[int]:
    """Segments without a record that is live or may become live again.

    A segment with a pending flip stays: a snapshot taken between forgetting the segment and
    unlinking its file would not have the flip, and neither would the disk. A segment with a damage
    hole in a kept snapshot also stays: a start from that snapshot needs the segment to remove the
    hole. Below the floor neither reason applies.
    """
    floor, files = topic.log.evict_floor, topic.files
    return [
        run.segment_id
        for run in topic.log.sealed()
        if run.is_spent(floor)
        and (
            run.last_seq < floor
            or not (run.segment_id in files.pending or run.segment_id in files.healed)
        )
    ]
