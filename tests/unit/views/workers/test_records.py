"""`pieces` and `records`: what leaves the log as blocks arrives at `apply` as it was appended."""

from __future__ import annotations

from array import array
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from topics_server.engine.answers import Page, Piece
from topics_server.values.blocks import Block, make_block
from topics_server.values.model import OnDelete
from topics_server.values.record_codecs import bytes_meta
from topics_server.views.definition import make_definition
from topics_server.views.messages import Batch
from topics_server.views.pieces import pieces_of
from topics_server.views.workers.records import RecordColumns
from topics_server.views.workers.view_file import FailedRecord, ViewFile

Row = tuple[bytes, bytes, str | None, str | None]
_TEXT = st.text(max_size=4).map(lambda text: f'"{text}"'.encode())
_JSON = st.tuples(_TEXT, st.sampled_from([b"", b'{"m":1}', '{"ä":1}'.encode()]))
_BYTES = st.tuples(st.binary(max_size=5), st.just(bytes_meta("image/png")))
_NAMES = st.none() | st.text(min_size=1, max_size=3)
_TRACE = b"\t00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
_TRACED = st.tuples(_JSON | _BYTES).map(lambda row: (row[0][0], _TRACE + row[0][1]))
_ROWS = st.tuples(_JSON | _BYTES | _TRACED, _NAMES, _NAMES).map(
    lambda row: (*row[0], row[1], row[2])
)


def _block(first_seq: int, rows: list[Row]) -> Block:
    datas, metas, tags, nodes = (list(column) for column in zip(*rows, strict=True))
    times = array("q", [1_000 + first_seq + row for row in range(len(rows))])
    return make_block(first_seq, times, datas, metas, tags, nodes)


def _batch(page: Page, *, with_payloads: bool = True) -> Batch:
    pieces = pieces_of(page, with_payloads=with_payloads)
    count = sum(len(piece.rows) for piece in page.pieces)
    return Batch(0, page.next_from_seq, 0, 1, [], count, pieces)


def _page(*pieces: Piece) -> Page:
    last = pieces[-1].block.last_seq
    return Page(list(pieces), last, last, 1)


@given(st.lists(_ROWS, min_size=1, max_size=6), st.data())
def test_records_arrive_as_they_were_appended(rows: list[Row], data: st.DataObject) -> None:
    """Whole blocks, parts of blocks, and rows with deleted ones between them."""
    chosen = data.draw(st.sets(st.integers(0, len(rows) - 1), min_size=1).map(sorted))
    unbroken = range(chosen[0], chosen[-1] + 1)
    page = _page(Piece(_block(5, rows), chosen), Piece(_block(50, rows), unbroken))
    records = RecordColumns(_batch(page))
    expected = [(5 + row, rows[row]) for row in chosen]
    expected += [(50 + row, rows[row]) for row in unbroken]
    assert records.column("seq") == [seq for seq, _ in expected]
    assert records.column("ts") == [1_000 + seq for seq, _ in expected]
    assert records.column("tag") == [tag for _, (_, _, tag, _) in expected]
    assert records.column("node") == [node for _, (_, _, _, node) in expected]
    metas = [meta.removeprefix(_TRACE).decode() for _, (_, meta, _, _) in expected]
    assert records.column("meta") == [meta or None for meta in metas]
    datas = [
        sent if meta[:1] == " " else sent.decode()
        for (_, (sent, _, _, _)), meta in zip(expected, metas, strict=True)
    ]
    assert records.column("data") == datas


def test_payloads_stay_behind_where_no_statement_needs_them() -> None:
    """The other fields of the records arrive."""
    page = _page(Piece(_block(5, [(b'"x"', b"{}", "t", None)] * 4), [1, 3]))
    batch = _batch(page, with_payloads=False)
    assert sum(len(piece.block) for piece in batch.pieces) < 120
    records = RecordColumns(batch)
    assert records.column("seq") == [6, 8]
    assert records.column("tag") == ["t", "t"]
    assert records.column("data") == ["", ""]
    assert records.column("meta") == [None, None]


def test_a_batch_that_lacks_records_is_no_batch() -> None:
    """The process must not take a part for the whole."""
    batch = _batch(_page(Piece(_block(5, [(b"1", b"", None, None)] * 2), [0, 1])))
    with pytest.raises(ValueError, match="another number of records"):
        RecordColumns(Batch(0, 6, 0, 1, [], 3, batch.pieces))
    with pytest.raises(ValueError, match="not an encoded block"):
        RecordColumns(Batch(0, 6, 0, 1, [], 2, [batch.pieces[0].__class__(b"x", None)]))


@pytest.mark.parametrize(
    ("apply", "needs_payloads", "rows"),
    [
        ("INSERT INTO t VALUES (:seq, :tag)", False, [(1, "a"), (2, "b"), (3, None)]),
        ("INSERT INTO t VALUES (:tag, $seq)", False, [("a", 1), ("b", 2), (None, 3)]),
        ("INSERT INTO t VALUES (@seq, :seq)", False, [(1, 1), (2, 2), (3, 3)]),
        ("INSERT INTO t VALUES (':data', 1)", False, [(":data", 1)] * 3),
        ("INSERT INTO t VALUES (:meta, :data)", True, [(None, "1"), (None, "2"), (None, "3")]),
        ("WITH x AS (SELECT :seq AS s) SELECT s FROM x", False, []),
        (
            "INSERT INTO t VALUES (:seq, 1); UPDATE t SET b = :ts - 1000 WHERE a = :seq;"
            "SELECT :node; DELETE FROM t WHERE a = :seq - 2",
            False,
            [(2, 2), (3, 3)],
        ),
    ],
)
def test_a_statement_gets_the_parameters_that_it_names(
    tmp_path: Path, apply: str, needs_payloads: bool, rows: list[tuple[object, ...]]
) -> None:
    """That holds for any order and spelling and for several statements; a string is no
    parameter.
    """
    definition = make_definition(
        schema="CREATE TABLE t (a, b)",
        apply=apply,
        queries={},
        shortcut=None,
        on_delete=OnDelete.KEEP,
    )
    file = ViewFile.create(str(tmp_path / "1.db"), definition, "7", 1, max_bytes=2**26)
    assert file.facts().needs_payloads is needs_payloads
    sent: list[Row] = [(b"1", b"", "a", None), (b"2", b"", "b", None), (b"3", b"", None, None)]
    page = _page(Piece(_block(1, sent), range(3)))
    file.apply(_batch(page, with_payloads=needs_payloads))
    assert file._sandbox.own("SELECT a, b FROM t ORDER BY rowid") == rows
    file.close()


@pytest.mark.parametrize(
    "apply",
    [
        "INSERT INTO t VALUES (:tag)",
        "INSERT INTO t SELECT 'b' WHERE EXISTS (SELECT 1 FROM t WHERE a = 'a' AND :seq > 2)",
        "SELECT 1; INSERT INTO t VALUES (:tag)",
    ],
)
def test_the_record_at_fault_is_found_whatever_the_statement_uses(
    tmp_path: Path, apply: str
) -> None:
    """The third record fails; those before it stay."""
    definition = make_definition(
        schema="CREATE TABLE t (a CHECK (a <> 'b')); INSERT INTO t VALUES ('a')",
        apply=apply,
        queries={},
        shortcut=None,
        on_delete=OnDelete.KEEP,
    )
    file = ViewFile.create(str(tmp_path / "1.db"), definition, "7", 1, max_bytes=2**26)
    sent: list[Row] = [(b"1", b"", tag, None) for tag in ("a", "c", "b", "a")]
    with pytest.raises(FailedRecord) as failed:
        file.apply(_batch(_page(Piece(_block(1, sent), range(4)))))
    assert failed.value.seq == 3
    assert "CHECK" in failed.value.message
    assert file.at == 2
    file.close()
