"""Finds and deletes exact seqs of a topic. Pure.

Queues need this in addition to pages: jobs are leased, read and deleted one by one. A seq with a
pending delete counts as deleted, so that two deletes never count it twice. Changes nothing; the
given seqs are ascending and distinct. Called by the store and by `transfers`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Final

from topics_server.engine.answers import Piece
from topics_server.engine.log.log import Log
from topics_server.engine.log.runs import OpenBlock, Run, SealedRun, TailBlock
from topics_server.engine.read.page import Fetch, PagePlan, SealedPiece, pieces_of_group
from topics_server.engine.read.row_columns import RowColumns
from topics_server.engine.topic.deletion import FEW_SEQS_MAX, columns_of_seqs
from topics_server.engine.topic.topic import Topic
from topics_server.values.blocks import MARKS, Block
from topics_server.values.entries import RecordsDeleted
from topics_server.values.limits import BLOCK_RECORDS_MAX
from topics_server.values.model import PayloadKind

# Access to an enum member costs a lookup.
_JSON: Final = PayloadKind.JSON
# From this number on, the records of a claim are read as columns.
MANY_ROWS: Final = 16
# The commit time, node, tag, data and meta of a record, and whether its meta begins with a mark.
Row = tuple[int, str | None, str | None, bytes, bytes, bool]


def is_live(log: Log, seq: int) -> bool:
    """Whether a record with this seq exists, expired or not."""
    index = log.run_at(seq)
    if index == len(log.runs):
        return False
    run = log.runs[index]
    return run.first_seq <= seq and not run.dead[seq - run.first_seq]


def deletable(topic: Topic, seqs: Sequence[int]) -> list[int]:
    """The seqs that are live and have no pending delete."""
    log = topic.log
    if len(seqs) == 1:
        found = [seqs[0]] if is_live(log, seqs[0]) else []
    else:
        found = _live_ones(log, seqs)
    return topic.staging.without_dying(found)


def _live_ones(log: Log, seqs: Sequence[int]) -> list[int]:
    runs, count = log.runs, len(seqs)
    found: list[int] = []
    position = 0
    while position < count:
        index = log.run_at(seqs[position])
        if index == len(runs):
            break
        run = runs[index]
        first, dead = run.first_seq, run.dead
        end = end_of_run(run, seqs, position)
        part = seqs[position:end]
        low, high = part[0] - first, part[-1] - first + 1
        if high - low == end - position and low >= 0 and dead.count(0, low, high) == high - low:
            found += part
        else:
            found += [seq for seq in part if seq >= first and not dead[seq - first]]
        position = end
    return found


def end_of_run(run: Run, seqs: Sequence[int], position: int) -> int:
    """The position behind the last of these seqs that is not above the run."""
    above = run.first_seq + len(run.dead)
    return len(seqs) if seqs[-1] < above else bisect_left(seqs, above, position)


def decide_delete_seqs(topic: Topic, seqs: Sequence[int], now_ms: int) -> RecordsDeleted:
    """The delete of seqs that are `deletable`."""
    firsts, lasts = columns_of_seqs(seqs)
    few = seqs if len(seqs) <= FEW_SEQS_MAX else None
    return RecordsDeleted(topic.topic_id, now_ms, firsts, lasts, few)


def tail_rows(log: Log, seqs: Sequence[int]) -> list[Row] | None:
    """The records of these live seqs, from the tail; None if one of them is sealed."""
    rows: list[Row] = []
    run: Run | None = None
    first, last = 0, -1
    for seq in seqs:
        if seq > last:
            run = log.runs[log.run_at(seq)]
            first = run.first_seq
            last = first + len(run.dead) - 1
        row = seq - first
        if isinstance(run, OpenBlock):
            meta = run.metas[row]
            is_marked = meta[:1] in MARKS
            record = run.times[row], run.nodes[row], run.tags[row], run.datas[row], meta, is_marked
            rows.append(record)
        elif isinstance(run, TailBlock):
            rows.append(row_of(run.block, row))
        else:
            return None
    return rows


def row_of(block: Block, row: int) -> Row:
    """One record of a block."""
    return (
        block.times[row],
        block.nodes[row],
        block.tags[row],
        block.data(row),
        block.meta(row),
        block.kinds[row] != _JSON,
    )


def tail_columns(log: Log, seqs: Sequence[int]) -> RowColumns | None:
    """`tail_rows` as columns, which is faster for many seqs."""
    columns = RowColumns()
    position, count = 0, len(seqs)
    while position < count:
        run = log.runs[log.run_at(seqs[position])]
        end = end_of_run(run, seqs, position)
        low, high = seqs[position] - run.first_seq, seqs[end - 1] - run.first_seq + 1
        rows: Sequence[int] = range(low, high)
        if len(rows) != end - position:
            rows = [seq - run.first_seq for seq in seqs[position:end]]
        if isinstance(run, TailBlock):
            columns.add_block(run.block, rows)
        elif isinstance(run, OpenBlock):
            columns.add_open_block(run, rows)
        else:
            return None
        position = end
    return columns


def plan_rows(topic: Topic, seqs: Sequence[int], *, alone: bool = False) -> PagePlan:
    """The live ones of these seqs as a page: pieces in order, each from one block.

    `alone`: read only a few rows of a sealed group, because no later read needs the others.
    """
    log = topic.log
    pieces: list[Piece | SealedPiece] = []
    position = 0
    while position < len(seqs):
        index = log.run_at(seqs[position])
        if index == len(log.runs):
            break
        run = log.runs[index]
        rows: list[int] = []
        while position < len(seqs) and seqs[position] <= run.last_seq:
            row = seqs[position] - run.first_seq
            position += 1
            if row >= 0 and not run.dead[row]:
                rows.append(row)
        if rows:
            pieces += _pieces_of(log, run, rows, alone=alone)
    head_seq = log.head_seq
    return PagePlan(pieces, head_seq, head_seq, log.earliest_seq, None, 0, topic.epoch)


def _pieces_of(log: Log, run: Run, rows: list[int], *, alone: bool) -> list[Piece | SealedPiece]:
    if isinstance(run, SealedRun):
        return _sealed_pieces(log, run, rows, alone=alone)
    if isinstance(run, TailBlock):
        return [Piece(run.block, rows)]
    assert isinstance(run, OpenBlock)
    first = rows[0]
    return [Piece(run.block_of(first, rows[-1] + 1), [row - first for row in rows])]


def _sealed_pieces(
    log: Log, run: SealedRun, rows: list[int], *, alone: bool
) -> list[Piece | SealedPiece]:
    """One piece for each group of rows that are fetched together; damaged rows are not fetched."""
    pieces: list[Piece | SealedPiece] = []
    groups: dict[tuple[int, int], list[int]] = {}
    for row in rows:
        first = row - row % BLOCK_RECORDS_MAX
        end = min(run.count, first + BLOCK_RECORDS_MAX)
        for hole in log.holes:
            if hole.last_seq < run.first_seq + row:
                first = max(first, hole.last_seq + 1 - run.first_seq)
            elif hole.first_seq > run.first_seq + row:
                end = min(end, hole.first_seq - run.first_seq)
        groups.setdefault((first, end), []).append(row)
    for (first, end), picked in groups.items():
        if alone:
            pieces += pieces_of_group(run.segment_id, first, end, picked)
            continue
        fetch = Fetch(run.segment_id, first, end)
        pieces.append(SealedPiece(fetch, [row - first for row in picked]))
    return pieces
