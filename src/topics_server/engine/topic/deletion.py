"""Finds the live seqs that a delete matches.

A delete acts on one moment: it deletes the records that are live when it is decided, from the first
unexpired record up to the visible head. Damaged records are deleted as well, so that they do not
come back with an undamaged file. Tags of unsealed records are searched here. Those of sealed
records were searched off the loop, and the caller passes the rows by segment; it may also pass rows
of frozen blocks. Called by `writes/delete`.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Final

import numpy as np

from topics_server.engine.log.log import Log
from topics_server.engine.log.runs import OpenBlock, Rows, Run, SealedRun, TailBlock
from topics_server.values.model import TagMatch

# Up to this many seqs a delete uses a list, because making arrays would cost more than it saves.
# The bound is the number of jobs that a queue forgets in one turn of the loop.
FEW_SEQS_MAX: Final = 1_000


def runs_of_range(log: Log, first_seq: int, last_seq: int) -> tuple[bytes, bytes] | None:
    """One run over the live or damaged part of an inclusive range; None if that is empty."""
    first = log.next_live(first_seq)
    last = log.last_live_below(last_seq + 1)
    damaged = log.damaged_between(log.evict_floor, last_seq)
    if first > last_seq or last < first:
        if damaged is None:
            return None
        first, last = damaged
    elif damaged is not None:
        first, last = min(first, damaged[0]), max(last, damaged[1])
    return np.array([first], "<u8").tobytes(), np.array([last], "<u8").tobytes()


def segments_to_search(log: Log, first_seq: int, last_seq: int) -> list[int]:
    """Ids of the segments with a live or a damaged record that overlap an inclusive range."""
    return [
        run.segment_id
        for run in log.sealed()
        if (run.live_count or run.has_damage)
        and run.first_seq <= last_seq
        and run.last_seq >= first_seq
    ]


def blocks_to_search(log: Log, first_seq: int, last_seq: int) -> list[TailBlock]:
    """Frozen blocks with a live record that overlap an inclusive range; their tags never change."""
    return [
        run
        for run in log.tail()
        if run.live_count and run.first_seq <= last_seq and run.last_seq >= first_seq
    ]


def runs_of_match(
    log: Log,
    first_seq: int,
    last_seq: int,
    match: TagMatch,
    hits: Mapping[int, Sequence[int]],
    block_hits: Mapping[TailBlock, Rows],
) -> tuple[bytes, bytes] | None:
    """The live seqs of an inclusive range whose tag matches; None if there are none.

    `hits`: ascending rows by segment id. It must have every segment to search: the caller searches
    them first. `block_hits`: the same for frozen blocks; the other blocks are searched here.
    """
    found: list[Rows] = []
    index = log.run_at(first_seq)
    while index < len(log.runs) and log.runs[index].first_seq <= last_seq:
        run = log.runs[index]
        index += 1
        if run.live_count == 0 and not run.has_damage:
            continue
        rows = block_hits.get(run) if isinstance(run, TailBlock) else None
        if rows is None:
            rows = _rows_of(run, match, hits)
        if len(rows) == 0:
            continue
        seqs = run.deletable_rows_of(rows) + run.first_seq
        if run.first_seq < first_seq or run.last_seq > last_seq:
            seqs = seqs[(seqs >= first_seq) & (seqs <= last_seq)]
        if len(seqs):
            found.append(seqs)
    if not found:
        return None
    return seq_runs(np.concatenate(found))


def _rows_of(run: Run, match: TagMatch, hits: Mapping[int, Sequence[int]]) -> Rows:
    if isinstance(run, SealedRun):
        assert run.segment_id in hits, "a segment was sealed since the search: search it too"
        return np.asarray(hits[run.segment_id], np.int64)
    assert isinstance(run, TailBlock | OpenBlock)
    return np.asarray(run.rows_of(match), np.int64)


def seq_runs(seqs: Rows) -> tuple[bytes, bytes]:
    """The first and last seq of every unbroken run of ascending, distinct seqs, `<u8`."""
    assert len(seqs) > 0
    breaks = np.flatnonzero(np.diff(seqs) != 1)
    firsts = seqs[np.concatenate(([0], breaks + 1))]
    lasts = seqs[np.concatenate((breaks, [len(seqs) - 1]))]
    assert bool(np.all(firsts <= lasts))
    return firsts.astype("<u8").tobytes(), lasts.astype("<u8").tobytes()


def columns_of_seqs(seqs: Sequence[int]) -> tuple[bytes, bytes]:
    """`seq_runs` for a list; makes no array of a short list."""
    assert seqs
    first, last = seqs[0], seqs[-1]
    if last - first == len(seqs) - 1:
        return first.to_bytes(8, "little"), last.to_bytes(8, "little")
    if len(seqs) > FEW_SEQS_MAX:
        return seq_runs(np.asarray(seqs, np.int64))
    firsts, lasts = [first], []
    for before, seq in pairwise(seqs):
        if seq != before + 1:
            lasts.append(before)
            firsts.append(seq)
    lasts.append(last)
    columns = struct.Struct(f"<{len(firsts)}Q")
    return columns.pack(*firsts), columns.pack(*lasts)


def columns_of(firsts: bytes, lasts: bytes) -> tuple[Rows, Rows]:
    """The two columns of an entry as signed numbers (seqs stay below 2**63)."""
    assert len(firsts) == len(lasts)
    return np.frombuffer(firsts, "<u8").astype(np.int64), np.frombuffer(lasts, "<u8").astype(
        np.int64
    )
