"""`view_file` and `judge.is_ahead`: positions, failures, and the position recorded in a file."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from tests.unit.views.workers.test_sandbox import batch
from topics_server.values.model import Hole, LossReason, OnDelete
from topics_server.views.definition import make_definition, split_statements
from topics_server.views.judge import LogFacts, is_ahead
from topics_server.views.messages import FileFacts
from topics_server.views.workers.view_file import FailedRecord, MovedError, ViewFile

_DEFINITION = make_definition(
    schema="CREATE TABLE t (a INTEGER CHECK (a < 100))",
    apply="INSERT INTO t VALUES (json_extract(:data, '$'))",
    queries={},
    shortcut=None,
    on_delete=OnDelete.KEEP,
)
_BYTES = 64 * 1024 * 1024


@pytest.fixture
def path(tmp_path: Path) -> str:
    """Where the file is made."""
    return str(tmp_path / "views" / "1" / "1.db")


def test_a_batch_that_is_sent_twice_counts_once(path: str) -> None:
    """Rows and position change in one transaction, so the second batch finds another position."""
    file = ViewFile.create(path, _DEFINITION, "18446744073709551615", 3, max_bytes=_BYTES)
    file.apply(batch(b"1", b"2"))
    with pytest.raises(MovedError):
        file.apply(batch(b"1", b"2"))
    file.close()
    file = ViewFile.open(path, max_bytes=_BYTES)
    facts = file.facts()
    assert (facts.processed_seq, facts.topic_id, facts.epoch) == (2, "18446744073709551615", 3)
    assert facts.definition == _DEFINITION
    assert not facts.is_ready
    file.mark_ready()
    assert file.facts().is_ready
    file.close()


def test_what_precedes_a_failing_record_is_kept(path: str) -> None:
    """The record at fault is named; the next batch begins there; it can be skipped."""
    file = ViewFile.create(path, _DEFINITION, "1", 1, max_bytes=_BYTES)
    with pytest.raises(FailedRecord) as failed:
        file.apply(batch(b"1", b"2", b"100", b"4"))
    assert failed.value.seq == 3
    assert "CHECK" in failed.value.message
    assert file.at == file.facts().processed_seq == 2
    with pytest.raises(MovedError):
        file.skip(4)
    file.skip(3)
    file.apply(batch(b"4", from_seq=3))
    assert file.facts().processed_seq == 4
    file.close()


@pytest.mark.parametrize("verb", ["INSERT OR ROLLBACK", "INSERT OR FAIL", "INSERT OR ABORT"])
def test_a_statement_cannot_end_the_transaction(path: str, verb: str) -> None:
    """OR ROLLBACK undoes the batch, but never the position of earlier batches."""
    definition = make_definition(
        schema="CREATE TABLE t (a UNIQUE)",
        apply=f"{verb} INTO t VALUES (:data)",
        queries={},
        shortcut=None,
        on_delete=OnDelete.KEEP,
    )
    file = ViewFile.create(path, definition, "1", 1, max_bytes=_BYTES)
    with pytest.raises(FailedRecord) as failed:
        file.apply(batch(b"1", b"2", b"1"))
    assert failed.value.seq == 3
    assert file.facts().processed_seq == 2
    file.close()


def test_a_file_of_version_1_gets_the_columns_it_lacks(path: str) -> None:
    """Files of the first version have no `lsn` and no `is_stale`; their rows stay."""
    file = ViewFile.create(path, _DEFINITION, "1", 1, max_bytes=_BYTES)
    file.apply(batch(b"1", b"2"))
    file.close()
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("ALTER TABLE _topics_view DROP COLUMN lsn")
        connection.execute("ALTER TABLE _topics_view DROP COLUMN is_stale")
        connection.execute("UPDATE _topics_view SET version = 1")
    file = ViewFile.open(path, max_bytes=_BYTES)
    file.apply(batch(b"3", from_seq=2, lsn=7))
    facts = file.facts()
    assert (facts.processed_seq, facts.lsn, facts.is_stale) == (3, 7, False)
    file.mark_stale()
    assert file.facts().is_stale
    file.close()


def _facts(processed_seq: int, *gaps: tuple[int, int], lsn: int = 0) -> FileFacts:
    return FileFacts("1", 1, processed_seq, 1, True, list(gaps), _DEFINITION, lsn)


@pytest.mark.parametrize(
    ("facts", "head", "holes", "expected"),
    [
        (_facts(10), 10, [], False),
        (_facts(10), 9, [], True),
        # The head jumped after the records that the file processed, and no earlier record was lost.
        (_facts(10), 1000, [(11, 1000)], False),
        # The jump began below the file's position: records that it processed are gone.
        (_facts(10), 1000, [(10, 1000)], True),
        (_facts(10), 20, [(3, 4)], True),
        # The file already passed the hole when it read there.
        (_facts(10, (3, 4)), 20, [(3, 4)], False),
        (_facts(10, (3, 8)), 20, [(5, 6)], False),
        (_facts(10, (3, 5)), 20, [(3, 6)], True),
        # The file's position is inside a hole that grew at its end since then.
        (_facts(10, (3, 10)), 20, [(3, 15)], False),
        (_facts(10, (6, 10), (3, 5)), 20, [(3, 15)], False),
        (_facts(0), 1000, [(1, 1000)], False),
        # One file reflects the log's last entry, the other an entry that the log no longer has.
        (_facts(10, lsn=5), 10, [], False),
        (_facts(10, lsn=6), 10, [], True),
    ],
)
def test_a_file_is_ahead_when_its_log_lost_what_it_processed(
    facts: FileFacts, head: int, holes: list[tuple[int, int]], expected: bool
) -> None:
    """`kill -9` never needs this rule: only after a power cut the log may hold fewer records."""
    lost = tuple(Hole(first, last, LossReason.RESTART) for first, last in holes)
    assert is_ahead(facts, LogFacts(head, 5, lost)) is expected


@pytest.mark.parametrize(
    ("text", "statements"),
    [
        ("SELECT 1", ["SELECT 1"]),
        ("SELECT 1;", ["SELECT 1"]),
        ("SELECT ';'; SELECT 2;;", ["SELECT ';'", "SELECT 2"]),
        ("-- a; b\nSELECT 1; /* ; */", ["-- a; b\nSELECT 1"]),
        ("", []),
    ],
)
def test_statements_are_split_where_they_end(text: str, statements: list[str]) -> None:
    """A semicolon inside a string or a comment ends nothing."""
    assert split_statements(text) == statements
