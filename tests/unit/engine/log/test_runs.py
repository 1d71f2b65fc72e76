"""Runs: dead flags, weights, splitting and slicing."""

from __future__ import annotations

from array import array

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.engine.drive import FakeIndex
from topics_server.engine.log.block_slices import slice_block
from topics_server.engine.log.log import Log
from topics_server.engine.log.runs import OpenBlock, Rows, Run, SealedRun, TailBlock, weigh
from topics_server.values.appends import of_columns
from topics_server.values.blocks import Block, make_block, record_bytes
from topics_server.values.errors import StorageError
from topics_server.values.model import TagMatch
from topics_server.values.storage_types import SegmentPlan

TEXTS = st.sampled_from([None, "", "a", "ünï"])
RECORDS = st.lists(
    st.tuples(st.binary(max_size=9), st.sampled_from([b"", b"{}"]), TEXTS, TEXTS),
    min_size=1,
    max_size=40,
)
Records = list[tuple[bytes, bytes, str | None, str | None]]


def block_of(records: Records) -> Block:
    datas, metas, tags, nodes = (list(column) for column in zip(*records, strict=True))
    return make_block(5, array("q", range(len(records))), datas, metas, tags, nodes)


def runs_of(records: Records, dead: list[int]) -> list[Run]:
    """The same records as every kind of run."""
    flags = bytearray(len(records))
    for row in dead:
        flags[row] = 1
    sizes = [record_bytes(*record) for record in records]
    live = [size for size, flag in zip(sizes, flags, strict=True) if not flag]
    block = block_of(records)
    tail = TailBlock(block, bytearray(flags), len(live), sum(live), 1)
    sealed = SealedRun(FakeIndex(SegmentPlan(1, 1, [block], bytes(flags))), bytearray(flags))
    log = Log()
    log.head_seq = 4
    for number, record in enumerate(records):
        data, meta, tag, node = record
        log.append(number, of_columns([data], [meta], [tag], [node]), 1)
    opened = log.open
    assert opened is not None
    for row in dead:
        opened.kill_range(row, row + 1)
    return [tail, sealed, opened]


@given(RECORDS, st.data())
def test_every_kind_of_run_weighs_and_dies_alike(records: Records, data: st.DataObject) -> None:
    count = len(records)
    rows = st.integers(0, count - 1)
    dead = sorted(data.draw(st.sets(rows, max_size=count)))
    first = data.draw(st.integers(0, count))
    end = data.draw(st.integers(first, count))
    picked = sorted(data.draw(st.sets(rows)))
    sizes = [record_bytes(*record) for record in records]
    for run in runs_of(records, dead):
        live = [row for row in range(count) if row not in dead]
        assert (run.count, run.first_seq, run.last_seq) == (count, 5, 4 + count)
        assert (run.live_count, run.live_bytes) == (len(live), sum(sizes[row] for row in live))
        assert [run.row_bytes(row) for row in range(count)] == sizes
        within = [row for row in live if first <= row < end]
        assert run.live_bytes_between(first, end) == sum(sizes[row] for row in within)
        assert [run.time(row) for row in range(count)] == list(range(count))
        assert run.first_row_since(first) == first
        assert run.last_time == count - 1
        if picked:
            assert run.weigh_rows(np.array(picked)) == sum(sizes[row] for row in picked)
        alive = run.live_rows_of(np.array(picked, np.int64))
        assert alive.tolist() == [row for row in picked if row in live]
        killed = run.kill_rows(alive)
        assert killed == (len(alive), sum(sizes[row] for row in alive.tolist()))
        rest = [row for row in within if row not in picked]
        assert run.kill_range(first, end) == (len(rest), sum(sizes[row] for row in rest))
        assert run.kill_range(first, end) == (0, 0)
        left = [row for row in live if row not in picked and row not in within]
        assert (run.live_count, run.live_bytes) == (len(left), sum(sizes[row] for row in left))
        assert run.live_count == run.dead.count(0)


@given(RECORDS, st.data())
def test_a_slice_holds_the_same_records(records: Records, data: st.DataObject) -> None:
    block = block_of(records)
    first = data.draw(st.integers(0, len(records) - 1))
    end = data.draw(st.integers(first + 1, len(records)))
    part = slice_block(block, first, end)
    assert part.first_seq == 5 + first
    found = [(part.data(r), part.meta(r), part.tags[r], part.nodes[r]) for r in range(part.count)]
    assert found == records[first:end]
    assert part.times.tolist() == list(range(first, end))
    assert (len(part.kinds), len(part.hops)) == (part.count, part.count)


@given(RECORDS)
def test_weighing_columns_is_weighing_records(records: Records) -> None:
    datas, metas, tags, nodes = (list(column) for column in zip(*records, strict=True))
    assert weigh(datas, metas, tags, nodes) == sum(record_bytes(*record) for record in records)


def test_a_split_block_is_the_same_records_and_flags() -> None:
    records: Records = [(b"%d" % n, b"", "t", None) for n in range(10)]
    tail = runs_of(records, [1, 7])[0]
    assert isinstance(tail, TailBlock)
    one, two = tail.split(4)
    assert (one.count, two.count, one.live_count, two.live_count) == (4, 6, 3, 5)
    assert one.live_bytes + two.live_bytes == tail.live_bytes
    assert (two.first_seq, two.block.data(0), list(two.dead)) == (9, b"4", [0, 0, 0, 1, 0, 0])
    with pytest.raises(AssertionError):
        tail.split(0)


def test_a_husk_has_slots_and_times_but_no_payload() -> None:
    records: Records = [(b"%d" % n, b"{}", "t", "n") for n in range(10)]
    tail = runs_of(records, list(range(10)))[0]
    assert isinstance(tail, TailBlock)
    assert tail.rows_of(TagMatch("t")) == list(range(10))
    tail.drop_payload()
    assert (tail.count, tail.block.body, tail.block.count) == (10, b"", 10)
    assert [tail.block.data(row) for row in range(10)] == [b""] * 10
    assert tail.time(9) == 9
    assert tail.rows_of(TagMatch("t")) == []


def test_a_kind_of_run_must_say_where_its_records_are() -> None:
    run = Run(1, bytearray(1), 1, 1)
    with pytest.raises(NotImplementedError):
        run.time(0)
    with pytest.raises(NotImplementedError):
        run.row_bytes(0)
    with pytest.raises(NotImplementedError):
        run.first_row_since(0)


def test_the_open_block_finds_its_tags() -> None:
    opened = runs_of([(b"0", b"", tag, None) for tag in ("a", None, "ab", "a")], [])[2]
    assert isinstance(opened, OpenBlock)
    assert opened.rows_of(TagMatch("a")) == [0, 3]
    assert opened.rows_of(TagMatch("a", is_prefix=True)) == [0, 2, 3]


class UnreadableIndex(FakeIndex):
    """An index that cannot be mapped again: a read error, or no file descriptor left."""

    is_gone = False

    def record_bytes(self, row: int) -> int:
        if self.is_gone:
            raise StorageError("EIO", "data/segments/1/0000000001.idx")
        return super().record_bytes(row)

    def record_bytes_between(self, first_row: int, end_row: int, dead: bytes | bytearray) -> int:
        if self.is_gone:
            raise StorageError("EIO", "data/segments/1/0000000001.idx")
        return super().record_bytes_between(first_row, end_row, dead)

    def record_bytes_of(self, rows: Rows) -> int:
        if self.is_gone:
            raise StorageError("EIO", "data/segments/1/0000000001.idx")
        return super().record_bytes_of(rows)


@given(st.lists(st.binary(max_size=99), min_size=1, max_size=20), st.data())
def test_rows_die_also_while_their_index_cannot_be_read(
    datas: list[bytes], data: st.DataObject
) -> None:
    """A committed delete must apply; only its byte count is an estimate, which ends at zero."""
    count = len(datas)
    block = block_of([(text, b"", None, None) for text in datas])
    index = UnreadableIndex(SegmentPlan(1, 1, [block], bytes(count)))
    run = SealedRun(index, bytearray(count))
    index.is_gone = True
    order = data.draw(st.permutations(range(count)))
    for row in order:
        before = run.live_count, run.live_bytes
        way = data.draw(st.sampled_from(("rows", "few", "range")))
        if way == "rows":
            killed, weight = run.kill_rows(np.array([row]))
        elif way == "few":
            killed, weight = run.kill_few([row])
        else:
            killed, weight = run.kill_range(row, row + 1)
        assert killed == 1
        assert (run.live_count, run.live_bytes) == (before[0] - 1, before[1] - weight)
        assert run.live_bytes >= 0
    assert (run.live_count, run.live_bytes) == (0, 0)
