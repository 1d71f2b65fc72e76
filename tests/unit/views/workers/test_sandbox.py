"""`sandbox`: what definitions and queries may not do, tried on a real file."""

from __future__ import annotations

import tracemalloc
from array import array
from collections.abc import Iterator
from pathlib import Path

import pytest

from topics_server.values.blocks import encode_block, make_block
from topics_server.values.errors import TopicsError
from topics_server.values.model import OnDelete, ViewDefinition
from topics_server.views.definition import make_definition, one_query
from topics_server.views.messages import Batch, BlockRows, QueryRows, SqlRefused, ViewQuery
from topics_server.views.workers.query_worker import Querier
from topics_server.views.workers.view_file import (
    FailedRecord,
    RefusedSql,
    ViewFile,
    check_definition,
)

_TABLE = "CREATE TABLE t (a, b UNIQUE)"
_MIB = 1024 * 1024


def _defined(apply: str, schema: str = _TABLE) -> ViewDefinition:
    return make_definition(
        schema=schema, apply=apply, queries={}, shortcut=None, on_delete=OnDelete.KEEP
    )


def batch(*datas: bytes, from_seq: int = 0, lsn: int = 0) -> Batch:
    """Records of JSON after `from_seq`."""
    count = len(datas)
    nothing: list[str | None] = [None] * count
    times = array("q", [1_700_000_000_000] * count)
    block = make_block(from_seq + 1, times, list(datas), None, nothing, nothing)
    return Batch(
        from_seq=from_seq,
        upto_seq=from_seq + count,
        lsn=lsn,
        known_from_seq=1,
        gaps=[],
        count=count,
        pieces=[BlockRows(encode_block(block), None)],
    )


def _created(path: Path, definition: ViewDefinition) -> ViewFile:
    return ViewFile.create(str(path), definition, "7", 1, max_bytes=64 * _MIB)


# --- apply ----------------------------------------------------------------------------------------

_APPLIES = [
    "SELECT random()",
    "INSERT INTO t VALUES (random(), 1)",
    "INSERT INTO t VALUES (randomblob(8), 1)",
    "INSERT INTO t VALUES (current_timestamp, 1)",
    "INSERT INTO t VALUES (CURRENT_DATE, 1)",
    "INSERT INTO t VALUES (current_time, 1)",
    "INSERT INTO t VALUES (datetime('now'), 1)",
    "INSERT INTO t VALUES (datetime('NOW '), 1)",
    "INSERT INTO t VALUES (date(), 1)",
    "INSERT INTO t VALUES (julianday('n' || 'ow'), 1)",
    "INSERT INTO t VALUES (unixepoch(x'6e6f77'), 1)",
    "INSERT INTO t VALUES (strftime('%s'), 1)",
    "INSERT INTO t VALUES (strftime('%s', 'now'), 1)",
    "INSERT INTO t VALUES (datetime(0, 'unixepoch', 'localtime'), 1)",
    "INSERT INTO t VALUES (time(json_extract(:data, '$.when')), 1)",
    "INSERT INTO t VALUES (last_insert_rowid(), 1)",
    "INSERT INTO t VALUES (changes(), 1)",
    "INSERT INTO t VALUES (total_changes(), 1)",
    "INSERT INTO t VALUES (sqlite_version(), 1)",
    "INSERT INTO t VALUES (sqlite_source_id(), 1)",
    "INSERT INTO t VALUES (load_extension('x'), 1)",
    "INSERT INTO t VALUES (fts3_tokenizer('simple'), 1)",
    "INSERT INTO t VALUES (readfile('/etc/passwd'), 1)",
    "INSERT INTO t VALUES (writefile('/tmp/x', 'x'), 1)",
    "INSERT INTO t VALUES (edit('x'), 1)",
    "INSERT INTO nowhere VALUES (1)",
    "INSERT INTO sqlite_master VALUES (1, 2, 3, 4, 5)",
    "UPDATE sqlite_master SET sql = ''",
    "UPDATE sqlite_schema SET sql = ''",
    "DELETE FROM sqlite_master",
    "UPDATE _topics_view SET processed_seq = 0",
    "INSERT INTO main._topics_view VALUES (1)",
    "DELETE FROM _TOPICS_VIEW",
    "INSERT INTO t SELECT * FROM _topics_view",
    "INSERT INTO t SELECT sql, 1 FROM sqlite_master",
    "INSERT INTO t SELECT name, 1 FROM sqlite_temp_master",
    "INSERT INTO t SELECT count(*), 1 FROM dbstat",
    "INSERT INTO t SELECT count(*), 1 FROM sqlite_stmt",
    "INSERT INTO t SELECT count(*), 1 FROM pragma_database_list",
    "INSERT INTO t SELECT * FROM pragma_table_info('t')",
    "INSERT INTO t SELECT count(*), 1 FROM pragma_function_list()",
    "INSERT INTO t SELECT * FROM bytecode('SELECT 1')",
    "PRAGMA writable_schema = ON",
    "PRAGMA journal_mode = DELETE",
    "ATTACH '/tmp/other.db' AS other",
    "DETACH main",
    "VACUUM",
    "VACUUM INTO '/tmp/stolen.db'",
    "BEGIN",
    "COMMIT",
    "ROLLBACK",
    "SAVEPOINT s",
    "RELEASE s",
    "ANALYZE",
    "REINDEX",
    "DROP TABLE t",
    "ALTER TABLE t RENAME TO u",
    "ALTER TABLE t ADD COLUMN c",
    "CREATE TABLE u (a)",
    "CREATE TEMP TABLE u (a)",
    "CREATE TRIGGER r AFTER INSERT ON t BEGIN SELECT 1; END",
    "CREATE VIRTUAL TABLE v USING fts5(a)",
    "EXPLAIN SELECT 1",
    "/* c */ PRAGMA user_version = 1",
    "-- c\nATTACH 'x' AS y",
]


@pytest.mark.parametrize("sql", _APPLIES)
def test_apply_cannot(tmp_path: Path, sql: str) -> None:
    """The definition or the first record raises SqlRefused; the file stays unchanged."""
    with pytest.raises((TopicsError, RefusedSql, FailedRecord)):
        _defined_and_applied(tmp_path / "1.db", sql)


def _defined_and_applied(path: Path, sql: str) -> None:
    definition = _defined(sql)
    check_definition(definition)
    file = _created(path, definition)
    try:
        file.apply(batch(b'{"when": "now"}'))
    except FailedRecord:
        assert file.facts().processed_seq == 0
        raise
    finally:
        file.close()


_SCHEMAS = [
    "CREATE TABLE _topics_view (a)",
    "CREATE TABLE _Topics_other (a)",
    "CREATE TABLE sqlite_x (a)",
    "CREATE TABLE pragma_x (a)",
    "CREATE TABLE dbstat (a)",
    "CREATE TEMP TABLE x (a)",
    "CREATE TEMPORARY VIEW x AS SELECT 1",
    "CREATE VIRTUAL TABLE x USING fts5(a)",
    "CREATE VIRTUAL TABLE x USING dbstat",
    "CREATE TRIGGER r AFTER INSERT ON t BEGIN SELECT 1; END",
    "CREATE TABLE x AS SELECT random() AS a",
    "CREATE TABLE x (a DEFAULT (random()))",
    "CREATE TABLE x (a DEFAULT CURRENT_TIMESTAMP)",
    "CREATE TABLE x (a DEFAULT (datetime('now')))",
    "CREATE TABLE other.x (a)",
    "INSERT INTO sqlite_master VALUES (1, 2, 3, 4, 5)",
    "DROP TABLE t",
    "PRAGMA journal_mode = OFF",
    "ATTACH 'x' AS y",
]


@pytest.mark.parametrize("sql", _SCHEMAS)
def test_schema_cannot(sql: str) -> None:
    """The definition raises SqlRefused."""
    with pytest.raises((TopicsError, RefusedSql)):
        check_definition(_defined("SELECT 1", schema=f"{_TABLE}; {sql}"))


_ALLOWED = [
    "INSERT INTO t VALUES (json_extract(:data, '$.a'), :seq)",
    "INSERT OR REPLACE INTO t VALUES (1, 1)",
    "INSERT INTO t SELECT key, :seq || key FROM json_each(:data)",
    "INSERT INTO t SELECT path, :seq || fullkey FROM json_tree(:data)",
    "WITH c AS (SELECT :seq AS x) INSERT INTO t SELECT count(*), max(x) FROM c",
    "INSERT INTO t VALUES (datetime(:ts / 1000, 'unixepoch'), :seq)",
    "INSERT INTO t VALUES (strftime('%H', :ts / 1000, 'unixepoch'), :seq)",
    "UPDATE t SET a = a + 1 WHERE b = 1",
    "DELETE FROM t WHERE b < :seq - 10",
    "INSERT INTO t SELECT rank() OVER (ORDER BY a), :seq FROM (SELECT 1 AS a)",
    "SELECT 1 WHERE :tag GLOB 'a*'",
]


@pytest.mark.parametrize("sql", _ALLOWED)
def test_apply_can(tmp_path: Path, sql: str) -> None:
    """The statements that definitions of views use."""
    definition = _defined(sql)
    check_definition(definition)
    file = _created(tmp_path / "1.db", definition)
    file.apply(batch(b'{"a": 1}', b'{"a": 2}'))
    assert file.facts().processed_seq == 2
    file.close()


# --- queries --------------------------------------------------------------------------------------


@pytest.fixture
def view(tmp_path: Path) -> Iterator[str]:
    """The path of a file with a few rows, open beside the reader as in the server."""
    schema = f"{_TABLE}; CREATE VIEW w AS SELECT a FROM t"
    file = _created(tmp_path / "1.db", _defined("INSERT INTO t VALUES (:data, :seq)", schema))
    file.apply(batch(b"1", b"2", b"3"))
    yield str(tmp_path / "1.db")
    file.close()


def _asked(path: str, sql: str, **params: object) -> object:
    text = one_query(sql, "sql")
    return Querier().answer(ViewQuery(path, text, params, 500, 100, 100_000))


_QUERIES = [
    "SELECT * FROM _topics_view",
    "SELECT processed_seq FROM main._topics_view",
    "SELECT count(*) FROM _topics_view",
    "SELECT (SELECT max(processed_seq) FROM _topics_view)",
    "SELECT * FROM sqlite_master",
    "SELECT count(*) FROM sqlite_schema",
    "SELECT * FROM temp.sqlite_master",
    "SELECT * FROM dbstat",
    "SELECT count(*) FROM dbstat",
    "SELECT * FROM sqlite_stmt",
    "SELECT * FROM pragma_database_list",
    "SELECT file FROM pragma_database_list()",
    "SELECT count(*) FROM pragma_compile_options",
    "SELECT * FROM t JOIN pragma_table_info('t')",
    "SELECT load_extension('x')",
    "SELECT fts3_tokenizer('x', 'y')",
    "SELECT sqlite_version()",
    "SELECT last_insert_rowid()",
    "WITH x AS (SELECT * FROM sqlite_master) SELECT * FROM x",
    "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT count(*) FROM c",
    "SELECT hex(zeroblob(1000000000))",
    "SELECT replace(hex(zeroblob(30000000)), '0', 'xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx')",
    "SELECT 1 WHERE 'a' LIKE '" + "%a" * 100 + "'",
    "SELECT " + "(" * 300 + "1" + ")" * 300,
    "SELECT 1" + " UNION SELECT 1" * 60,
]


@pytest.mark.parametrize("sql", _QUERIES)
def test_a_query_cannot(view: str, sql: str) -> None:
    """The query raises SqlRefused, or ends at its limit."""
    assert isinstance(_asked(view, sql), SqlRefused)


@pytest.mark.parametrize(
    "sql",
    [
        "INSERT INTO t VALUES (1, 9) RETURNING a",
        "UPDATE t SET a = 1 RETURNING a",
        "DELETE FROM t RETURNING a",
        "PRAGMA table_info(t)",
        "ATTACH 'x' AS y",
        "VACUUM INTO 'x'",
        "EXPLAIN SELECT 1",
        "CREATE TABLE x (a)",
        "BEGIN",
        "SELECT 1; DROP TABLE t",
        "",
        "-- nothing",
    ],
)
def test_a_query_that_does_not_select_is_refused_at_once(sql: str) -> None:
    """The answer is 400 before any process gets the query."""
    with pytest.raises(TopicsError):
        one_query(sql, "sql")


@pytest.mark.parametrize(
    ("sql", "rows"),
    [
        ("SELECT count(*) FROM t", b"[[3]]"),
        ("SELECT a FROM w ORDER BY a LIMIT 1", b'[["1"]]'),
        ("SELECT value FROM json_each('[1,2]')", b"[[1],[2]]"),
        ("WITH c AS (SELECT a FROM t) SELECT count(*) FROM c", b"[[3]]"),
        ("SELECT typeof(datetime('now'))", b'[["text"]]'),
        ("SELECT 9223372036854775807, 1.5, NULL, 'a'", b'[[9223372036854775807,1.5,null,"a"]]'),
        ("SELECT 1e999", b"[[null]]"),
        ("SELECT x'00ff'", b'[[{"base64":"AP8="}]]'),
        ("SELECT CAST(x'ff' AS TEXT)", '[["\ufffd"]]'.encode()),
        ("VALUES (1), (2)", b"[[1],[2]]"),
    ],
)
def test_a_query_can(view: str, sql: str, rows: bytes) -> None:
    """Rows as JSON, with the position that belongs to them."""
    answer = _asked(view, sql)
    assert isinstance(answer, QueryRows)
    assert answer.rows == rows
    assert answer.processed_seq == 3


@pytest.mark.parametrize("value", ["zeroblob(2000000)", "hex(zeroblob(1000000))"])
def test_an_answer_holds_no_more_rows_than_it_shows(view: str, value: str) -> None:
    """The database holds the large values of one row at a time, however large the answer may be."""
    numbers = "WITH n (i) AS (VALUES (1) UNION ALL SELECT i + 1 FROM n WHERE i < 60)"
    sql = f"{numbers} SELECT {value} FROM n"
    for max_bytes in (1_000, 3_000_000):
        querier = Querier()
        tracemalloc.start()
        try:
            answer = querier.answer(ViewQuery(view, sql, [], 20_000, 1_000, max_bytes))
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        # 60 rows are 120 MB. The encoder takes eight times what it encodes, for a moment.
        assert peak < 80_000_000
        if max_bytes > 1_000:
            assert isinstance(answer, QueryRows)
            assert (answer.row_count, answer.is_cut) == (1, True)
        else:
            assert isinstance(answer, SqlRefused)
            assert answer.reason == "size"


def test_a_query_behind_a_refused_one_is_answered(view: str) -> None:
    """A user's text never reuses a statement compiled for the server, nor the other way round."""
    querier = Querier()
    for sql in ("SELECT * FROM _topics_view", "ROLLBACK", "SELECT a FROM t"):
        answer = querier.answer(ViewQuery(view, sql, {}, 500, 100, 100_000))
        assert isinstance(answer, QueryRows) is (sql == "SELECT a FROM t")
