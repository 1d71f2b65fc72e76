"""Runs: unbroken ranges of records, sealed or not, with their dead slots.

Three kinds share one interface. A `SealedRun` is a segment: its payload is on disk, its columns are
mapped; in memory it costs one byte a record. A `TailBlock` is a frozen, unsealed block. The
`OpenBlock` takes appends until it is frozen. Row r is seq `first_seq + r`; `dead[r]` is 1 for a
deleted or lost record, 2 for an unreadable sealed one, whose file may be put back. `live_count` and
`live_bytes` always agree with `dead`. Used by `engine/log/log.py` only, and read by `page`,
`seal_plan` and `capture`.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Sequence
from functools import lru_cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from topics_server.engine.log.block_slices import slice_block
from topics_server.engine.log.tags import TagRows
from topics_server.engine.ports import SealedIndex
from topics_server.values.appends import DecodedAppend, chars_of
from topics_server.values.blocks import Block, block_of, make_block, record_bytes
from topics_server.values.errors import StorageError
from topics_server.values.limits import BLOCK_BYTES_MAX, BLOCK_RECORDS_MAX, RECORD_FRAMING_BYTES
from topics_server.values.model import TagMatch

Rows = NDArray[np.int64]

_DEAD: Final = b"\x01"
# Up to this many rows are weighed faster one by one than by numpy.
_FEW_ROWS: Final = 8
# Values of `dead`: live is 0.
DELETED: Final = 1
DAMAGED: Final = 2


def weigh(
    datas: list[bytes], metas: list[bytes], tags: list[str | None], nodes: list[str | None]
) -> int:
    """The records' share of `bytes`; agrees with `blocks.record_bytes`."""
    count = len(datas)
    if count == 1:
        return record_bytes(datas[0], metas[0], tags[0], nodes[0])
    total = RECORD_FRAMING_BYTES * count + sum(map(len, datas)) + sum(map(len, metas))
    return total + chars_of(tags) + chars_of(nodes)


class Run:
    """Slots `first_seq .. last_seq` with their dead flags.

    Each kind stores the records in its own way.
    """

    __slots__ = ("dead", "first_seq", "live_bytes", "live_count")

    def __init__(self, first_seq: int, dead: bytearray, live_count: int, live_bytes: int) -> None:
        self.first_seq = first_seq
        self.dead = dead
        self.live_count = live_count
        self.live_bytes = live_bytes

    @property
    def count(self) -> int:
        """The number of slots."""
        return len(self.dead)

    @property
    def last_seq(self) -> int:
        """The seq of the last slot."""
        return self.first_seq + len(self.dead) - 1

    @property
    def last_time(self) -> int:
        """Commit time of the last slot, ms."""
        return self.time(len(self.dead) - 1)

    def time(self, row: int) -> int:
        """Commit time of a row, ms."""
        raise NotImplementedError

    def first_row_since(self, ts: int) -> int:
        """The first row committed at `ts` or later; the row count if there is none."""
        raise NotImplementedError

    def row_bytes(self, row: int) -> int:
        """The bytes of one row, dead or not."""
        raise NotImplementedError

    def live_bytes_between(self, first_row: int, end_row: int) -> int:
        """The bytes of the live rows of a range."""
        return sum(self.row_bytes(row) for row in range(first_row, end_row) if not self.dead[row])

    def weigh_rows(self, rows: Rows) -> int:
        """The bytes of these rows."""
        return sum(map(self.row_bytes, rows.tolist()))

    def kill_range(self, first_row: int, end_row: int) -> tuple[int, int]:
        """Mark a range dead; returns the number and bytes of its live rows."""
        assert 0 <= first_row <= end_row <= len(self.dead)
        if self.live_count == 0:
            return 0, 0
        if first_row == 0 and end_row == len(self.dead):
            killed, weight = self.live_count, self.live_bytes
        else:
            killed = self.dead.count(0, first_row, end_row)
            if killed == 0:
                return 0, 0
            is_rest = killed == self.live_count
            weight = self.live_bytes
            if not is_rest:
                weight = min(weight, self.live_bytes_between(first_row, end_row))
        self.dead[first_row:end_row] = _DEAD * (end_row - first_row)
        self._killed(killed, weight)
        return killed, weight

    def live_rows_of(self, rows: Rows) -> Rows:
        """The rows that are live."""
        live: Rows = rows[np.frombuffer(self.dead, np.uint8)[rows] == 0]
        return live

    def kill_rows(self, rows: Rows) -> tuple[int, int]:
        """Mark live rows dead; returns their number and bytes."""
        killed = len(rows)
        if killed:
            weight = self.live_bytes
            if killed < self.live_count:
                weight = min(weight, self.weigh_rows(rows))
            np.frombuffer(self.dead, np.uint8)[rows] = 1
            self._killed(killed, weight)
            return killed, weight
        return 0, 0

    def kill_few(self, rows: Sequence[int]) -> tuple[int, int]:
        """`kill_rows` for a list of a few live rows; returns their number and bytes."""
        killed, dead = len(rows), self.dead
        weight = self.live_bytes
        if killed < self.live_count:
            weight = min(weight, self.weigh_few(rows))
        for row in rows:
            dead[row] = DELETED
        self.live_count -= killed
        self.live_bytes -= weight
        assert self.live_count >= 0
        assert self.live_bytes >= 0
        return killed, weight

    def weigh_few(self, rows: Sequence[int]) -> int:
        """`weigh_rows` for a list."""
        return self.weigh_rows(np.array(rows, np.int64))

    @property
    def has_damage(self) -> bool:
        """Whether an unreadable row is not deleted."""
        return False

    def deletable_rows_of(self, rows: Rows) -> Rows:
        """The rows that a delete takes: live ones, and damaged ones."""
        if not self.has_damage:
            return self.live_rows_of(rows)
        deletable: Rows = rows[np.frombuffer(self.dead, np.uint8)[rows] != DELETED]
        return deletable

    def _killed(self, count: int, weight: int) -> None:
        self.live_count -= count
        self.live_bytes -= weight
        assert self.live_count >= 0
        assert self.live_bytes >= 0


class SealedRun(Run):
    """A sealed segment: payload on disk, columns mapped. `has_damage`: see `Run`."""

    __slots__ = ("_has_damage", "index")

    def __init__(
        self, index: SealedIndex, dead: bytearray, live_count: int = -1, live_bytes: int = -1
    ) -> None:
        if live_count < 0:
            live_count = dead.count(0)
            live_bytes = index.record_bytes_between(0, len(dead), dead) if live_count else 0
        super().__init__(index.first_seq, dead, live_count, live_bytes)
        assert len(dead) == index.last_seq - index.first_seq + 1
        self.index = index
        self._has_damage = dead.find(DAMAGED) >= 0

    @property
    def has_damage(self) -> bool:
        """Whether an unreadable row is not deleted."""
        return self._has_damage

    def damage_range(self, first_row: int, end_row: int) -> tuple[int, int]:
        """Mark the live rows of a range as unreadable; returns their number and bytes."""
        lost = self.dead.count(0, first_row, end_row)
        if lost == 0:
            return 0, 0
        is_rest = lost == self.live_count
        weight = self.live_bytes if is_rest else self.live_bytes_between(first_row, end_row)
        self.dead[first_row:end_row] = self.dead[first_row:end_row].replace(b"\0", b"\2")
        self._has_damage = True
        self._killed(lost, weight)
        return lost, weight

    def kill_damaged(self, rows: Rows) -> None:
        """Mark unreadable rows as deleted: they do not come back with an undamaged file."""
        np.frombuffer(self.dead, np.uint8)[rows] = DELETED
        self._has_damage = self.dead.find(DAMAGED) >= 0

    def is_spent(self, evict_floor: int) -> bool:
        """Whether no row is live, and none would be if damaged rows became readable again."""
        if self.live_count:
            return False
        first = max(0, evict_floor - self.first_seq)
        return not self._has_damage or self.dead.find(DAMAGED, first) < 0

    @property
    def segment_id(self) -> int:
        """Number of the segment within its topic."""
        return self.index.segment_id

    def time(self, row: int) -> int:
        """Commit time of a row, ms."""
        return self.index.time(row)

    def first_row_since(self, ts: int) -> int:
        """The first row committed at `ts` or later; the row count if there is none."""
        return self.index.first_row_since(ts)

    def row_bytes(self, row: int) -> int:
        """The bytes of one row, dead or not."""
        return self.index.record_bytes(row)

    def live_bytes_between(self, first_row: int, end_row: int) -> int:
        """The bytes of the live rows of a range; estimated while the index is unreadable."""
        dead = self.dead[first_row:end_row]
        try:
            return self.index.record_bytes_between(first_row, end_row, dead)
        except StorageError:
            return self._share_of(dead.count(0))

    def weigh_rows(self, rows: Rows) -> int:
        """The bytes of these rows: one vectorised call."""
        try:
            return self.index.record_bytes_of(rows)
        except StorageError:
            return self._share_of(len(rows))

    def _share_of(self, count: int) -> int:
        """The average bytes of a live row, times `count`.

        A committed entry must apply, even while a failing disk or the limit of open files prevents
        mapping the index. Only the byte count is inexact, until the segment is empty.
        """
        return self.live_bytes * count // self.live_count if self.live_count else 0


class TailBlock(Run):
    """A frozen block of the tail, in memory. `last_lsn`: the highest lsn of a frame in it.

    `text_bytes`: bytes of the tags and nodes of the whole block. `drop_payload` frees the payload
    of a block whose records are all dead; its slots stay, so that a run to be sealed is unbroken.
    """

    __slots__ = ("block", "last_lsn", "tag_rows", "text_bytes")

    def __init__(
        self,
        block: Block,
        dead: bytearray,
        live_count: int,
        live_bytes: int,
        last_lsn: int,
        text_bytes: int = -1,
    ) -> None:
        super().__init__(block.first_seq, dead, live_count, live_bytes)
        assert block.count == len(dead) > 0
        self.block = block
        self.last_lsn = last_lsn
        self.tag_rows: TagRows | None = None
        texts = chars_of(block.tags) + chars_of(block.nodes) if text_bytes < 0 else text_bytes
        self.text_bytes = texts

    def time(self, row: int) -> int:
        """Commit time of a row, ms."""
        return self.block.times[row]

    def first_row_since(self, ts: int) -> int:
        """The first row committed at `ts` or later; the row count if there is none."""
        return bisect_left(self.block.times, ts)

    def row_bytes(self, row: int) -> int:
        """The bytes of one row, dead or not."""
        block = self.block
        text = len(block.tags[row] or "") + len(block.nodes[row] or "") if self.text_bytes else 0
        return block.payload_bytes(row) + RECORD_FRAMING_BYTES + text

    def live_bytes_between(self, first_row: int, end_row: int) -> int:
        """The bytes of the live rows of a range, by slices if none is dead."""
        if self.dead.find(1, first_row, end_row) >= 0:
            return Run.live_bytes_between(self, first_row, end_row)
        if first_row >= end_row:
            return 0
        ends = self.block.ends
        total = ends[2 * end_row - 1] - (ends[2 * first_row - 1] if first_row else 0)
        total += RECORD_FRAMING_BYTES * (end_row - first_row)
        if not self.text_bytes or end_row - first_row == len(self.dead):
            return total + self.text_bytes
        return total + _text_bytes(self.block, first_row, end_row)

    def weigh_rows(self, rows: Rows) -> int:
        """The bytes of these rows, vectorised except for tags and nodes."""
        if len(rows) <= _FEW_ROWS:
            return Run.weigh_rows(self, rows)
        block = self.block
        ends = np.frombuffer(block.ends, np.uint32)[1::2].astype(np.int64)
        total = int(ends[rows].sum() - ends[rows - 1][rows > 0].sum())
        if self.text_bytes:
            for row in rows.tolist():
                total += len(block.tags[row] or "") + len(block.nodes[row] or "")
        return total + RECORD_FRAMING_BYTES * len(rows)

    def weigh_few(self, rows: Sequence[int]) -> int:
        """`weigh_rows` for a list."""
        block, ends = self.block, self.block.ends
        total = RECORD_FRAMING_BYTES * len(rows)
        for row in rows:
            total += ends[2 * row + 1] - (ends[2 * row - 1] if row else 0)
        if self.text_bytes:
            for row in rows:
                total += len(block.tags[row] or "") + len(block.nodes[row] or "")
        return total

    def rows_of(self, match: TagMatch) -> list[int]:
        """Ascending rows whose tag matches, dead ones included; the index is built on first use."""
        if self.tag_rows is None:
            self.tag_rows = TagRows(self.block.tags)
        return self.tag_rows.rows_of(match)

    def drop_payload(self) -> None:
        """Free the payload of a block whose records are all dead."""
        assert self.live_count == 0
        assert self.live_bytes == 0
        count = len(self.dead)
        absent = _absent(count)
        old = self.block
        self.block = Block(
            first_seq=old.first_seq,
            times=old.times,
            ends=array("I", bytes(8 * count)),
            body=b"",
            tags=absent,
            nodes=absent,
            kinds=bytes(count),
            hops=bytes(count),
        )
        self.tag_rows = None
        self.text_bytes = 0

    def split(self, row: int) -> tuple[TailBlock, TailBlock]:
        """Split into two blocks; the second one begins at `row`."""
        assert 0 < row < len(self.dead)
        return self._part(0, row), self._part(row, len(self.dead))

    def _part(self, first_row: int, end_row: int) -> TailBlock:
        block = slice_block(self.block, first_row, end_row)
        dead = self.dead[first_row:end_row]
        weight = self.live_bytes_between(first_row, end_row)
        return TailBlock(block, dead, dead.count(0), weight, self.last_lsn)


class OpenBlock(Run):
    """The block that takes appends: growing columns. Frozen when full.

    `text_chars`: the characters of all tags and nodes. If `has_metas` is false, every meta is
    absent. `hops` stays empty until a record comes through a router.
    """

    __slots__ = (
        "_view",
        "datas",
        "has_metas",
        "hops",
        "last_lsn",
        "metas",
        "nodes",
        "tags",
        "text_chars",
        "times",
    )

    def __init__(self, first_seq: int) -> None:
        super().__init__(first_seq, bytearray(), 0, 0)
        self.datas: list[bytes] = []
        self.metas: list[bytes] = []
        self.tags: list[str | None] = []
        self.nodes: list[str | None] = []
        self.times: array[int] = array("q")
        self.last_lsn = 0
        self.text_chars = 0
        self.has_metas = False
        self.hops = bytearray()
        self._view: Block | None = None

    def extend(self, ts: int, decoded: DecodedAppend, weight: int, lsn: int) -> None:
        """Append the records of one call as live records."""
        count = decoded.count
        if decoded.hops or self.hops:
            if not self.hops:
                self.hops = bytearray(len(self.dead))
            self.hops += decoded.hops or bytes(count)
        if count == 1:
            self.times.append(ts)
            self.dead.append(0)
            self.datas.append(decoded.datas[0])
            self.metas.append(decoded.metas[0])
            self.tags.append(decoded.tags[0])
            self.nodes.append(decoded.nodes[0])
        else:
            self.times.extend(array("q", (ts,)) * count)
            self.dead.extend(bytes(count))
            self.datas.extend(decoded.datas)
            self.metas.extend(decoded.metas)
            self.tags.extend(decoded.tags)
            self.nodes.extend(decoded.nodes)
        if decoded.has_metas:
            self.has_metas = True
        self.live_count += count
        self.live_bytes += weight
        self.text_chars += decoded.text_chars
        self.last_lsn = lsn

    def time(self, row: int) -> int:
        """Commit time of a row, ms."""
        return self.times[row]

    def first_row_since(self, ts: int) -> int:
        """The first row committed at `ts` or later; the row count if there is none."""
        return bisect_left(self.times, ts)

    def row_bytes(self, row: int) -> int:
        """The bytes of one row, dead or not."""
        return record_bytes(self.datas[row], self.metas[row], self.tags[row], self.nodes[row])

    def live_bytes_between(self, first_row: int, end_row: int) -> int:
        """The bytes of the live rows of a range, by slices if none is dead."""
        if end_row - first_row == 1:
            return 0 if self.dead[first_row] else self.row_bytes(first_row)
        if self.dead.find(1, first_row, end_row) >= 0:
            return Run.live_bytes_between(self, first_row, end_row)
        part = slice(first_row, end_row)
        return weigh(self.datas[part], self.metas[part], self.tags[part], self.nodes[part])

    def weigh_few(self, rows: Sequence[int]) -> int:
        """`weigh_rows` for a list."""
        datas, metas = self.datas, self.metas
        total = RECORD_FRAMING_BYTES * len(rows)
        for row in rows:
            total += len(datas[row]) + len(metas[row])
        if self.text_chars:
            tags, nodes = self.tags, self.nodes
            for row in rows:
                total += len(tags[row] or "") + len(nodes[row] or "")
        return total

    def rows_of(self, match: TagMatch) -> list[int]:
        """Ascending rows whose tag matches, dead ones included."""
        if match.is_prefix:
            return [row for row, tag in enumerate(self.tags) if match.matches(tag)]
        return [row for row, tag in enumerate(self.tags) if tag == match.text]

    def block_of(self, first_row: int, end_row: int) -> Block:
        """Make a block of these rows; the last block is cached, as watchers read the same rows."""
        assert first_row < end_row <= len(self.dead)
        view, count = self._view, end_row - first_row
        first_seq = self.first_seq + first_row
        if view is None or view.first_seq != first_seq or len(view.times) != count:
            view = self._view = self._block(first_row, end_row)
        return view

    def _block(self, first_row: int, end_row: int) -> Block:
        part = slice(first_row, end_row)
        return make_block(
            self.first_seq + first_row,
            self.times[part],
            self.datas[part],
            self.metas[part] if self.has_metas else None,
            self.tags[part],
            self.nodes[part],
            bytes(self.hops[part]),
        )

    def split_rest(self) -> OpenBlock | None:
        """Remove the rows after the last full block and return them as a new open block."""
        full = len(self.dead) - len(self.dead) % BLOCK_RECORDS_MAX
        if full == len(self.dead):
            return None
        rest = OpenBlock(self.first_seq + full)
        rest.datas, self.datas = self.datas[full:], self.datas[:full]
        rest.metas, self.metas = self.metas[full:], self.metas[:full]
        rest.tags, self.tags = self.tags[full:], self.tags[:full]
        rest.nodes, self.nodes = self.nodes[full:], self.nodes[:full]
        rest.times, self.times = self.times[full:], self.times[:full]
        rest.dead, self.dead = self.dead[full:], self.dead[:full]
        rest.hops, self.hops = self.hops[full:], self.hops[:full]
        rest.last_lsn = self.last_lsn
        rest.has_metas = self.has_metas
        rest.text_chars = chars_of(rest.tags) + chars_of(rest.nodes)
        rest.live_count = rest.dead.count(0)
        rest.live_bytes = rest.live_bytes_between(0, len(rest.dead))
        self.live_count -= rest.live_count
        self.live_bytes -= rest.live_bytes
        self.text_chars -= rest.text_chars
        self._view = None
        return rest

    def frozen(self) -> list[TailBlock]:
        """All rows as frozen blocks, each within both bounds of a block (or of one record)."""
        is_light = self.live_bytes <= BLOCK_BYTES_MAX
        if is_light and self.live_count == len(self.dead) <= BLOCK_RECORDS_MAX:
            return [self._whole()]
        blocks: list[TailBlock] = []
        row, count = 0, len(self.dead)
        while row < count:
            end = min(count, row + BLOCK_RECORDS_MAX)
            if (
                not (is_light and self.live_count == count)
                and sum(map(len, self.datas[row:end])) > BLOCK_BYTES_MAX
            ):
                end = self._end_within_bytes(row, end)
            dead = self.dead[row:end]
            whole = row == 0 and end == count
            weight = self.live_bytes if whole else self.live_bytes_between(row, end)
            tail = TailBlock(self._block(row, end), dead, dead.count(0), weight, self.last_lsn)
            if tail.live_count == 0:
                tail.drop_payload()
            blocks.append(tail)
            row = end
        return blocks

    def _whole(self) -> TailBlock:
        """All rows (none is dead) as one block that reuses the columns."""
        metas = self.metas if self.has_metas else None
        tags, nodes = _at_rest(self.tags), _at_rest(self.nodes)
        hops = bytes(self.hops)
        block = make_block(self.first_seq, self.times, self.datas, metas, tags, nodes, hops)
        count, weight = self.live_count, self.live_bytes
        return TailBlock(block, self.dead, count, weight, self.last_lsn, self.text_chars)

    def _end_within_bytes(self, first_row: int, end_row: int) -> int:
        total = 0
        for row in range(first_row, end_row):
            total += len(self.datas[row]) + len(self.metas[row])
            if total > BLOCK_BYTES_MAX and row > first_row:
                return row
        return end_row


@lru_cache(maxsize=BLOCK_RECORDS_MAX)
def _absent(count: int) -> Sequence[str | None]:
    return (None,) * count


def _at_rest(texts: list[str | None]) -> Sequence[str | None]:
    """A column that never changes again; all blocks share one column without texts.

    A shared column costs no memory. The garbage collector examines a tuple of texts only once.
    """
    count = len(texts)
    return _absent(count) if texts.count(None) == count else tuple(texts)


def _text_bytes(block: Block, first_row: int, end_row: int) -> int:
    return chars_of(block.tags[first_row:end_row]) + chars_of(block.nodes[first_row:end_row])


def frozen_blocks(first_seq: int, ts: int, decoded: DecodedAppend, lsn: int) -> list[TailBlock]:
    """The blocks of an append whose payload columns were made in advance; none is copied."""
    blocks: list[TailBlock] = []
    row = 0
    for payloads in decoded.payloads:
        part = slice(row, row + payloads.count)
        row += payloads.count
        tags, nodes = _at_rest(decoded.tags[part]), _at_rest(decoded.nodes[part])
        text_chars = chars_of(tags) + chars_of(nodes)
        block = block_of(
            first_seq + part.start,
            array("q", (ts,)) * payloads.count,
            payloads,
            tags,
            nodes,
            decoded.hops[part],
        )
        weight = len(payloads.body) + RECORD_FRAMING_BYTES * payloads.count + text_chars
        dead = bytearray(payloads.count)
        blocks.append(TailBlock(block, dead, payloads.count, weight, lsn, text_chars))
    assert row == decoded.count
    return blocks
