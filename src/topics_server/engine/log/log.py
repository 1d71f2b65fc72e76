"""The records of one topic: runs in seq order, head, floor, holes.

Sealed runs come first (`sealed_count` of them), then frozen tail blocks, then the open block. The
head is stored, never derived from records. A seq without a slot was deleted, unless a hole covers
it or it is below `evict_floor`. Invariants: runs are disjoint and ascend; `evict_floor <=
earliest_seq <= head_seq + 1`; counters equal the sums over the runs. Changed by `topic.apply`, by
recovery and by the sealer through `mark_sealed`; any module in `engine/` may read it.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterator, Sequence
from operator import attrgetter
from typing import Final

import numpy as np

from topics_server.engine.log.losses import Losses, with_hole
from topics_server.engine.log.runs import (
    DAMAGED,
    OpenBlock,
    Rows,
    Run,
    SealedRun,
    TailBlock,
    frozen_blocks,
)
from topics_server.engine.log.seq_rows import covers, end_of_walk, rows_within
from topics_server.engine.ports import SealedIndex
from topics_server.values.appends import DecodedAppend
from topics_server.values.entries import Floor
from topics_server.values.limits import BLOCK_BYTES_MAX, BLOCK_RECORDS_MAX
from topics_server.values.model import Hole, LossReason
from topics_server.values.storage_types import SegmentPlan

_FIRST: Final = attrgetter("first_seq")
_LAST_TIME: Final = attrgetter("last_time")
# `advance_live` examines this many rows of a run one by one, which is fast for a few.
_WALK_ROWS: Final = 16


class Log:
    """One topic's slots. `last_ts`: commit time of the newest record ever, ms.

    `replayed_seq`, in recovery only: segments may contain more than the snapshot's part; the part
    and the entries applied so far describe the log up to this seq. `None`: they describe it up to
    the head.

    `expired_seq`: records below this seq were once found past their TTL. It only rises, so that
    they stay expired when the wall clock is set back; the floor follows it
    (`retention.standing_floor`).
    """

    __slots__ = (
        "damaged_records",
        "earliest_seq",
        "evict_floor",
        "expired_seq",
        "head_seq",
        "holes",
        "is_crowded",
        "last_ts",
        "live_bytes",
        "live_count",
        "losses",
        "next_segment_id",
        "open",
        "replayed_seq",
        "runs",
        "sealed_count",
        "tail_bytes",
        "tail_count",
    )

    def __init__(self) -> None:
        self.runs: list[Run] = []
        self.sealed_count = 0
        self.open: OpenBlock | None = None
        self.head_seq = 0
        self.evict_floor = 1
        self.expired_seq = 1
        self.earliest_seq = 1
        self.live_count = 0
        self.live_bytes = 0
        # The number of unsealed slots, and their live bytes.
        self.tail_count = 0
        self.tail_bytes = 0
        # Whether the open block is too full for another append like the last one; see `tidy`.
        self.is_crowded = False
        self.last_ts = 0
        self.holes: list[Hole] = []
        self.losses = Losses()
        self.next_segment_id = 1
        self.damaged_records = 0
        self.replayed_seq: int | None = None

    # -- looking ---------------------------------------------------------------------------

    @property
    def base_seq(self) -> int:
        """The seq of the first slot; `head_seq + 1` if there is none."""
        return self.runs[0].first_seq if self.runs else self.head_seq + 1

    @property
    def sealed_seq(self) -> int:
        """Last seq of the newest segment in the list; 0 without one."""
        return self.runs[self.sealed_count - 1].last_seq if self.sealed_count else 0

    def sealed(self) -> Iterator[SealedRun]:
        """The sealed runs in seq order."""
        for run in self.runs[: self.sealed_count]:
            assert isinstance(run, SealedRun)
            yield run

    def tail(self) -> Iterator[TailBlock]:
        """The unsealed frozen blocks in seq order."""
        for run in self.runs[self.sealed_count :]:
            if isinstance(run, TailBlock):
                yield run

    def segment_ids(self) -> tuple[int, ...]:
        """Ids of the sealed segments in seq order; a search off the loop compares them."""
        return tuple(run.segment_id for run in self.sealed())

    def run_at(self, seq: int) -> int:
        """The index of the first run that ends at `seq` or later; else the number of runs."""
        runs = self.runs
        if not runs:
            return 0
        # Queues mostly need the front of a topic, followers its end.
        front = runs[0]
        if seq < front.first_seq + len(front.dead):
            return 0
        index = len(runs) if runs[-1].first_seq <= seq else bisect_right(runs, seq, key=_FIRST)
        run = runs[index - 1]
        return index - 1 if seq < run.first_seq + len(run.dead) else index

    def next_live(self, seq: int) -> int:
        """The first live seq at or above `seq`; `head_seq + 1` if there is none."""
        if self.live_count:
            for index in range(self.run_at(seq), len(self.runs)):
                run = self.runs[index]
                if run.live_count:
                    row = run.dead.find(0, max(0, seq - run.first_seq))
                    if row >= 0:
                        return run.first_seq + row
        return self.head_seq + 1

    def live_from(self, seq: int, limit: int) -> list[int]:
        """The first live seqs at or above `seq`, ascending, up to `limit`."""
        assert limit > 0
        found: list[int] = []
        for index in range(self.run_at(seq), len(self.runs)):
            run = self.runs[index]
            first, dead = run.first_seq, run.dead
            row = dead.find(0, max(0, seq - first)) if run.live_count else -1
            while row >= 0:
                if limit == 1:
                    return [first + row]
                end = min(row + limit - len(found), len(dead))
                if end - row == dead.count(0, row, end):
                    found += range(first + row, first + end)
                else:
                    found += [first + each for each in range(row, end) if not dead[each]]
                if len(found) == limit:
                    return found
                row = dead.find(0, end)
        return found

    def last_live_below(self, seq: int) -> int:
        """The last live seq below `seq`; 0 if there is none."""
        if seq <= self.earliest_seq:
            return 0
        for index in range(min(self.run_at(seq), len(self.runs) - 1), -1, -1):
            run = self.runs[index]
            if run.live_count and run.first_seq < seq:
                row = run.dead.rfind(0, 0, min(seq - run.first_seq, run.count))
                if row >= 0:
                    return run.first_seq + row
        return 0

    def first_seq_since(self, ts: int) -> int:
        """The first slot committed at `ts` or later; `head_seq + 1` if there is none."""
        index = bisect_left(self.runs, ts, key=_LAST_TIME)
        if index == len(self.runs):
            return self.head_seq + 1
        run = self.runs[index]
        return run.first_seq + run.first_row_since(ts)

    def time_of(self, seq: int) -> int:
        """Commit time of a seq that has a slot, ms."""
        run = self.runs[self.run_at(seq)]
        assert run.first_seq <= seq
        return run.time(seq - run.first_seq)

    def live_between(self, first_seq: int, last_seq: int) -> tuple[int, int]:
        """The number of live records in the inclusive range, and their bytes."""
        count = weight = 0
        index = self.run_at(first_seq)
        while index < len(self.runs) and self.runs[index].first_seq <= last_seq:
            run = self.runs[index]
            index += 1
            if run.live_count == 0:
                continue
            if first_seq <= run.first_seq and run.last_seq <= last_seq:
                count += run.live_count
                weight += run.live_bytes
                continue
            start = max(0, first_seq - run.first_seq)
            end = min(run.count, last_seq - run.first_seq + 1)
            count += run.dead.count(0, start, end)
            weight += run.live_bytes_between(start, end)
        return count, weight

    def damaged_between(self, first_seq: int, last_seq: int) -> tuple[int, int] | None:
        """The first and last sealed seq of an inclusive range that is damaged and not deleted."""
        found: list[int] = []
        for run in self.sealed() if self.damaged_records else ():
            last_row = min(run.count, last_seq + 1 - run.first_seq) - 1
            if run.has_damage:
                found += self._damaged_of(run, max(run.first_seq, first_seq), last_row) or ()
        return (found[0], found[-1]) if found else None

    def advance_live(self, seq: int, count: int, weight: int) -> tuple[int, int, int]:
        """Walk from `seq` over at least `count` live records that weigh at least `weight`.

        Returns the seq after the last walked record, and the number and weight of these records:
        less than requested only at the end of the log. Bytes are not summed if `weight` is 0.
        """
        walked = walked_bytes = 0
        for index in range(self.run_at(seq), len(self.runs)):
            run = self.runs[index]
            start = max(0, seq - run.first_seq)
            if run.live_count == 0:
                continue
            within = run.live_count <= count - walked or run.live_bytes <= weight - walked_bytes
            if start == 0 and within:
                walked += run.live_count
                walked_bytes += run.live_bytes
                continue
            row = run.dead.find(0, start)
            steps = 0
            while row >= 0:
                if walked >= count and walked_bytes >= weight:
                    # Do not jump to the next live seq: records deleted before it are not lost.
                    behind = self.last_live_below(run.first_seq + row) + 1
                    return max(seq, behind), walked, walked_bytes
                if steps == _WALK_ROWS:
                    # The row is far away: halve the run, by calls over many rows.
                    left = count - walked, weight - walked_bytes
                    end, passed, passed_bytes = end_of_walk(run, row, *left, weighs=weight > 0)
                    walked += passed
                    walked_bytes += passed_bytes
                    row = run.dead.find(0, end)
                    continue
                steps += 1
                walked += 1
                if weight > 0:
                    walked_bytes += run.row_bytes(row)
                row = run.dead.find(0, row + 1)
        behind = self.last_live_below(self.head_seq + 1) + 1
        return max(seq, behind), walked, walked_bytes

    def hole_at_or_after(self, seq: int) -> Hole | None:
        """The first hole that ends at `seq` or later."""
        for hole in self.holes:
            if hole.last_seq >= seq:
                return hole
        return None

    # -- appending -------------------------------------------------------------------------

    def append(self, ts: int, decoded: DecodedAppend, lsn: int) -> None:
        """Append live records after the head, all with one commit time."""
        count, weight = decoded.count, decoded.weight
        block = self.open
        if block is not None and len(block.dead) + count > BLOCK_RECORDS_MAX:
            # Freeze the whole block, so that its payload is copied only once.
            self.freeze_open()
            block = None
        if decoded.payloads:
            self.freeze_open()
            self.runs += frozen_blocks(self.head_seq + 1, ts, decoded, lsn)
            block = None
        else:
            if block is None:
                block = self.open = OpenBlock(self.head_seq + 1)
                self.runs.append(block)
            block.extend(ts, decoded, weight, lsn)
        if self.live_count == 0:
            self.earliest_seq = self.head_seq + 1
        self.live_count += count
        self.live_bytes += weight
        self.tail_count += count
        self.tail_bytes += weight
        self.head_seq += count
        self.last_ts = ts
        if block is None:
            return
        assert block.first_seq + len(block.dead) == self.head_seq + 1, "the open block is unbroken"
        if len(block.dead) >= BLOCK_RECORDS_MAX:
            self._freeze_full(block)
        elif block.live_bytes >= BLOCK_BYTES_MAX:
            self.freeze_open()
        block = self.open
        self.is_crowded = block is not None and len(block.dead) + count > BLOCK_RECORDS_MAX

    def tidy(self) -> None:
        """Freeze a crowded open block now, so that the next append need not."""
        self.is_crowded = False
        self.freeze_open()

    def _freeze_full(self, block: OpenBlock) -> None:
        """Freeze the open block up to its last full block; the rest stays open."""
        rest = block.split_rest()
        self.freeze_open()
        if rest is not None:
            self.open = rest
            self.runs.append(rest)

    def freeze_open(self) -> None:
        """Turn the open block, if any, into frozen ones. Nothing visible changes."""
        block = self.open
        if block is not None:
            assert self.runs[-1] is block
            self.runs[-1:] = block.frozen()
            self.open = None

    def jump_head(self, seq: int, reason: LossReason) -> None:
        """Move the head up to `seq`; the skipped seqs become a hole."""
        if self.replayed_seq is not None and seq > self.replayed_seq:
            self._note_skipped(self.replayed_seq + 1, min(seq, self.head_seq), reason)
            self.note_replayed(seq)
        if seq <= self.head_seq:
            return
        self.freeze_open()
        self.holes = with_hole(self.holes, Hole(self.head_seq + 1, seq, reason))
        self.head_seq = seq
        if self.live_count == 0:
            self.earliest_seq = seq + 1

    def note_replayed(self, seq: int) -> None:
        """Recovery: note that entries up to this seq are applied; segments may contain more."""
        if self.replayed_seq is not None:
            seq = max(seq, self.replayed_seq)
            self.replayed_seq = seq if seq < self.head_seq else None

    def _note_skipped(self, first_seq: int, last_seq: int, reason: LossReason) -> None:
        """Note seqs over which the head jumped; segments after the jump may be known already.

        The seqs that have no slot become a hole.
        """
        at = max(first_seq, self.evict_floor)
        for run in self.runs[self.run_at(at) :]:
            if run.first_seq > last_seq:
                break
            if at < run.first_seq:
                self.holes = with_hole(self.holes, Hole(at, run.first_seq - 1, reason))
            at = max(at, run.last_seq + 1)
        if at <= last_seq:
            self.holes = with_hole(self.holes, Hole(at, last_seq, reason))

    def lose_slot(self, seq: int, missed: int) -> None:
        """Make this seq a dead slot for records that a router could not copy.

        The seq is the next one, or in replay one that was passed already.
        """
        if seq > self.head_seq:
            self.freeze_open()
            self.head_seq = seq
            if self.live_count == 0:
                self.earliest_seq = seq + 1
        if seq >= self.evict_floor:
            self.holes = with_hole(self.holes, Hole(seq, seq, LossReason.SOURCE_TRIM, missed))

    # -- dying -----------------------------------------------------------------------------

    def raise_floor(self, floor: Floor) -> None:
        """Lose everything below `floor.seq` involuntarily; a lower floor changes nothing."""
        seq = floor.seq
        if seq <= self.evict_floor:
            return
        if seq > self.head_seq + 1:
            # Seqs below a floor were assigned, even if their records have no frame.
            self.freeze_open()
            self.head_seq = seq - 1
        self.losses.add(self.evict_floor, seq - 1, floor.reason)
        end = bisect_right(self.runs, seq - 1, key=_FIRST)
        for run in self.runs[:end]:
            # Rows below the earliest live record are dead already.
            first = min(run.count, max(0, self.earliest_seq - run.first_seq))
            last = min(run.count, seq - run.first_seq)
            if first < last:
                self._count(run, run.kill_range(first, last))
        self.evict_floor = seq
        self.holes = [hole for hole in self.holes if hole.last_seq >= seq]
        self._trim_dead(0, end)
        assert self.evict_floor <= self.earliest_seq

    def delete(self, firsts: Rows, lasts: Rows) -> tuple[int, dict[int, array[int]]]:
        """Delete the live seqs of sorted, disjoint, inclusive runs.

        Deletes damaged records as well: they do not come back with an undamaged file. Returns how
        many records died, and by segment the sealed rows that were deleted.
        """
        assert len(firsts) == len(lasts)
        before = self.live_count
        flips: dict[int, array[int]] = {}
        if len(firsts) == 0:
            return 0, flips
        start = self.run_at(int(firsts[0]))
        end = bisect_right(self.runs, int(lasts[-1]), key=_FIRST)
        runs = self.runs[start:end]
        are_single = bool(np.array_equal(firsts, lasts))
        for run, low, high in zip(runs, *covers(firsts, lasts, runs), strict=True):
            if low == high or (run.live_count == 0 and not run.has_damage):
                continue
            if high - low == 1 and not isinstance(run, SealedRun):
                # The most frequent case: each block loses one seq, or all its seqs.
                first_row = max(0, int(firsts[low]) - run.first_seq)
                end_row = min(run.count, int(lasts[low]) + 1 - run.first_seq)
                self._count(run, run.kill_range(first_row, end_row))
            else:
                rows = rows_within(firsts[low:high], lasts[low:high], run, are_single)
                self._delete_rows(run, rows, flips)
        self._trim_dead(start, end)
        return before - self.live_count, flips

    def delete_seqs(self, seqs: Sequence[int]) -> tuple[int, dict[int, array[int]]]:
        """`delete` of a few ascending, distinct seqs, without numpy for the rows of the tail."""
        before = self.live_count
        flips: dict[int, array[int]] = {}
        runs, count, position = self.runs, len(seqs), 0
        start = end = self.run_at(seqs[0])
        while position < count and end < len(runs):
            run, end = runs[end], end + 1
            first, above = run.first_seq, run.first_seq + len(run.dead)
            behind = count if seqs[-1] < above else bisect_left(seqs, above, position)
            if seqs[position] < first:
                position = bisect_left(seqs, first, position, behind)
            part, position = seqs[position:behind], behind
            if isinstance(run, SealedRun):
                self._delete_rows(run, np.asarray([seq - first for seq in part], np.int64), flips)
            elif len(part) > 1 and part[-1] - part[0] < len(part):
                self._count(run, run.kill_range(part[0] - first, part[-1] - first + 1))
            elif part:
                rows = [seq - first for seq in part if not run.dead[seq - first]]
                self._count(run, run.kill_few(rows))
            if position < count:
                end = self.run_at(seqs[position])
        self._trim_dead(start, end)
        return before - self.live_count, flips

    def _delete_rows(self, run: Run, within: Rows, flips: dict[int, array[int]]) -> None:
        """Mark those of these rows that are live or damaged as deleted."""
        hit = run.deletable_rows_of(within)
        if len(hit) == 0:
            return
        rows = run.live_rows_of(hit) if run.has_damage else hit
        self._count(run, run.kill_rows(rows))
        if isinstance(run, SealedRun):
            if len(rows) < len(hit):
                run.kill_damaged(hit)
            flips[run.segment_id] = array("I", hit.astype(np.uint32).tobytes())

    def note_damage(self, segment_id: int, first_row: int, last_row: int) -> int:
        """Note an unreadable sealed range: it becomes a hole.

        Returns the number of lost live records.
        """
        run = next(run for run in self.sealed() if run.segment_id == segment_id)
        killed, weight = run.damage_range(first_row, last_row + 1)
        self._count(run, (killed, weight))
        lost = self._damaged_of(run, max(run.first_seq + first_row, self.evict_floor), last_row)
        if lost is not None:
            # The hole must not cover evicted or deleted seqs: the damage does not lose them. A
            # segment of only such rows is dropped, and then no file could remove the hole.
            self.holes = with_hole(self.holes, Hole(*lost, LossReason.DAMAGED))
        self.damaged_records += killed
        self._trim_dead(0, 0)
        return killed

    def _damaged_of(self, run: SealedRun, first_seq: int, last_row: int) -> tuple[int, int] | None:
        """The first and last seq of a run's range whose row is damaged but not deleted."""
        low, end = first_seq - run.first_seq, last_row + 1
        if low >= end:
            return None
        rows = run.dead.find(DAMAGED, low, end), run.dead.rfind(DAMAGED, low, end)
        return None if rows[0] < 0 else (run.first_seq + rows[0], run.first_seq + rows[1])

    def lose_all(self, reason: LossReason) -> None:
        """Lose every record: one hole covers all seqs assigned so far; the head stays."""
        for run in self.runs:
            self._count(run, run.kill_range(0, run.count))
        self._trim_dead(0, len(self.runs))
        assert self.live_count == 0
        if self.head_seq:
            self.holes = [Hole(1, self.head_seq, reason)]

    def _count(self, run: Run, killed: tuple[int, int]) -> None:
        self.live_count -= killed[0]
        self.live_bytes -= killed[1]
        if not isinstance(run, SealedRun):
            self.tail_bytes -= killed[1]

    def _trim_dead(self, start: int, end: int) -> None:
        """After deletes in runs `start..end - 1`: free payloads, remove the tail's dead front."""
        runs = self.runs
        front = behind = self.sealed_count
        while behind < len(runs) and runs[behind].live_count == 0:
            behind += 1
        # The code below removes dead runs at the front; other dead blocks drop their payload.
        for run in runs[start if start > behind else behind : end]:
            if run.live_count == 0 and isinstance(run, TailBlock) and run.block.body:
                run.drop_payload()
        if behind > front:
            if runs[behind - 1] is self.open:
                self.open = None
            self.tail_count -= sum(run.count for run in runs[front:behind])
            del runs[front:behind]
        self.earliest_seq = self.next_live(self.earliest_seq)
        assert (self.live_count == 0) == (self.earliest_seq == self.head_seq + 1)

    # -- sealing ---------------------------------------------------------------------------

    def adopt_sealed(self, index: SealedIndex, dead: bytearray) -> None:
        """Recovery: add a segment after all others; its slots below the floor are dead."""
        assert self.sealed_count == len(self.runs), "segments come before the tail"
        assert index.first_seq > self.sealed_seq
        below = min(len(dead), max(0, self.evict_floor - index.first_seq))
        dead[:below] = b"\x01" * below
        run = SealedRun(index, dead)
        self.runs.append(run)
        self.sealed_count += 1
        self.live_count += run.live_count
        self.live_bytes += run.live_bytes
        self.head_seq = max(self.head_seq, run.last_seq)
        self.last_ts = max(self.last_ts, run.last_time)
        self.next_segment_id = max(self.next_segment_id, index.segment_id + 1)
        self.earliest_seq = self.next_live(self.evict_floor)

    def adopt_tail(self, block: TailBlock) -> None:
        """Recovery: add an unsealed block after everything else."""
        assert self.open is None
        assert block.first_seq > (self.runs[-1].last_seq if self.runs else 0)
        self.runs.append(block)
        self.live_count += block.live_count
        self.live_bytes += block.live_bytes
        self.tail_count += block.count
        self.tail_bytes += block.live_bytes
        self.head_seq = max(self.head_seq, block.last_seq)
        self.last_ts = max(self.last_ts, block.last_time)
        if self.live_count == block.live_count:
            self.earliest_seq = self.next_live(self.evict_floor)

    def mark_sealed(self, plan: SegmentPlan, index: SealedIndex) -> array[int]:
        """Replace a plan's blocks by their new segment, and free the payload.

        Returns the rows that were deleted since the plan was made, to be flipped on disk.
        """
        assert plan.segment_id == index.segment_id
        count = index.last_seq - index.first_seq + 1
        assert len(plan.dead) == count
        # A block that is no longer in the tail was completely dead.
        dead = bytearray(b"\x01" * count)
        start = self.sealed_count
        end = start
        live = weight = 0
        while end < len(self.runs) and self.runs[end].last_seq <= index.last_seq:
            run = self.runs[end]
            assert run is not self.open
            assert run.first_seq >= index.first_seq
            offset = run.first_seq - index.first_seq
            dead[offset : offset + run.count] = run.dead
            live += run.live_count
            weight += run.live_bytes
            self.tail_count -= run.count
            end += 1
        self.tail_bytes -= weight
        assert end == len(self.runs) or self.runs[end].first_seq > index.last_seq
        self.runs[start:end] = [SealedRun(index, dead, live, weight)]
        self.sealed_count += 1
        self.next_segment_id = max(self.next_segment_id, index.segment_id + 1)
        died = np.flatnonzero(np.frombuffer(dead, np.uint8) > np.frombuffer(plan.dead, np.uint8))
        died = died[died >= self.evict_floor - index.first_seq]
        return array("I", died.astype(np.uint32).tobytes())

    def dead_segments(self) -> list[int]:
        """Segments without a record that is live or may become live again."""
        return [run.segment_id for run in self.sealed() if run.is_spent(self.evict_floor)]

    def forget_segments(self, segment_ids: Collection[int]) -> None:
        """Forget segments whose files are removed; all their records are dead."""
        gone = [run for run in self.sealed() if run.segment_id in segment_ids]
        assert all(run.is_spent(self.evict_floor) for run in gone)
        for run in gone:
            self.runs.remove(run)
        self.sealed_count -= len(gone)
