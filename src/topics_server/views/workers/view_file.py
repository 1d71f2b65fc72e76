"""One file of one view: its tables and its position.

The rows and `processed_seq` change in one transaction, so each record counts once, however often a
batch is sent. In addition to the tables of the definition the file has one table of the server,
`_topics_view`, with one row: the incarnation of the topic that was read, the position, the topic's
last entry at that time, the gaps that were passed, whether the build has ever caught up, and the
definition, so that an older file can be queried while its successor is built. Runs in helper
processes only: called by `apply_worker` and `query_worker`.
"""

from __future__ import annotations

import os
import re
import sqlite3
import sys
from collections.abc import Iterator
from operator import length_hint
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from topics_server.values.limits import MIB
from topics_server.values.model import ViewDefinition
from topics_server.views.messages import Batch, FileFacts
from topics_server.views.workers.records import RecordColumns
from topics_server.views.workers.sandbox import OWN_PREFIX, Mode, Sandbox, add_dates

_VIEW_DEFINITION: Final = msgspec.json.Decoder(ViewDefinition)

_VERSION: Final = 2
_TABLE: Final = f"{OWN_PREFIX}_view"
_HEAP_BYTES: Final = 256 * MIB
_SCHEMA_SECONDS: Final = 5.0
# A batch that takes longer is stopped, and the current record is reported.
BATCH_SECONDS: Final = 10.0
# Later versions of Python do not accept values by position for named parameters.
_BINDS_BY_NAME: Final = sys.version_info >= (3, 12)
_Gaps = list[tuple[int, int]]
_GAPS: Final = msgspec.json.Decoder(_Gaps)
_COLUMNS: Final = (
    "version, topic_id, epoch, processed_seq, known_from_seq, is_ready, gaps, definition, lsn, "
    "is_stale"
)


class RefusedSql(Exception):
    """A statement of a definition or query is wrong, not allowed, or exceeds a limit."""

    def __init__(self, message: str, statement: str, reason: str = "sql") -> None:
        super().__init__(message)
        self.message = message
        self.statement = statement
        self.reason = reason


class FailedRecord(Exception):
    """`apply` failed at a record; everything before it is committed."""

    def __init__(self, seq: int, statement: str, message: str) -> None:
        super().__init__(message)
        self.seq = seq
        self.statement = statement
        self.message = message


class MovedError(Exception):
    """The file's position is not where the batch begins: the sender must read it again."""


def connect(path: str, *, read_only: bool) -> sqlite3.Connection:
    """Open a connection in autocommit mode. Raises `sqlite3.Error`."""
    url = Path(path).absolute().as_uri() + ("?mode=ro" if read_only else "?mode=rw")
    connection = sqlite3.connect(url, uri=True, isolation_level=None, timeout=5.0)
    connection.text_factory = lambda raw: raw.decode("utf-8", "replace")
    return connection


def refused(error: Exception, sandbox: Sandbox, statement: str) -> RefusedSql:
    """The error that a user gets for a failed statement."""
    if sandbox.refusal is not None:
        return RefusedSql(sandbox.refusal, statement, "refused")
    if sandbox.is_late:
        return RefusedSql("the statement takes too long", statement, "time")
    if isinstance(error, MemoryError):
        return RefusedSql("the statement needs too much memory", statement, "memory")
    return RefusedSql(str(error), statement)


class ViewFile:
    """An open file that records are applied to. Raises `sqlite3.Error` when the disk fails."""

    def __init__(self, path: str, *, max_bytes: int) -> None:
        connection = connect(path, read_only=False)
        self.path = path
        self._sandbox = Sandbox(connection, heap_bytes=_HEAP_BYTES)
        self._connection = connection
        own = self._sandbox.own
        own("PRAGMA journal_mode = WAL")
        # Commits reach the disk only at checkpoints: after a power cut the file is intact, but
        # older.
        own("PRAGMA synchronous = NORMAL")
        page_bytes = int(own("PRAGMA page_size")[0][0])
        own(f"PRAGMA max_page_count = {max(64, max_bytes // page_bytes)}")
        self.at = 0
        self._apply: list[_Statement] = []

    @classmethod
    def create(
        cls, path: str, definition: ViewDefinition, topic_id: str, epoch: int, *, max_bytes: int
    ) -> ViewFile:
        """Create a file with empty tables. Raises `RefusedSql` for an invalid definition."""
        remove(path)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        found = cls(path, max_bytes=max_bytes)
        sandbox = found._sandbox
        try:
            sandbox.own("BEGIN IMMEDIATE")
            make_tables(sandbox, definition)
            sandbox.own(
                f"CREATE TABLE {_TABLE} (version, topic_id TEXT, epoch, processed_seq, "
                "known_from_seq, is_ready, gaps, definition, lsn, is_stale)"
            )
            sandbox.own(
                f"INSERT INTO {_TABLE} ({_COLUMNS}) VALUES (?, ?, ?, 0, 1, 0, '[]', ?, 0, 0)",
                (_VERSION, topic_id, epoch, msgspec.json.encode(definition).decode()),
            )
            sandbox.own("COMMIT")
        except BaseException:
            found.close()
            remove(path)
            raise
        found._begin(definition)
        return found

    @classmethod
    def open(cls, path: str, *, max_bytes: int) -> ViewFile:
        """Open an existing file. Raises `sqlite3.Error`, `ValueError` if it is no view's file."""
        found = cls(path, max_bytes=max_bytes)
        try:
            found._upgrade()
            facts = found.facts()
        except BaseException:
            found.close()
            raise
        found._begin(facts.definition)
        found.at = facts.processed_seq
        return found

    def _begin(self, definition: ViewDefinition) -> None:
        add_dates(self._sandbox)
        self._sandbox.learn_tables()
        self._apply = [_Statement(sql, self._parameters(sql)) for sql in definition.apply]

    def _parameters(self, sql: str) -> list[str]:
        """The parameters that a statement uses, in the order in which they are bound."""
        found = _Noted()
        try:
            with self._sandbox.mode(Mode.APPLY, _SCHEMA_SECONDS) as connection:
                connection.execute(f"EXPLAIN {sql}", found)
        except (sqlite3.Error, sqlite3.Warning, MemoryError):
            pass  # the first record reports the error
        return found.names

    def _upgrade(self) -> None:
        """Add the missing columns to a file of version 1."""
        own = self._sandbox.own
        if own(f"SELECT version FROM {_TABLE}") != [(1,)]:
            return
        own("BEGIN IMMEDIATE")
        own(f"ALTER TABLE {_TABLE} ADD COLUMN lsn DEFAULT 0")
        own(f"ALTER TABLE {_TABLE} ADD COLUMN is_stale DEFAULT 0")
        own(f"UPDATE {_TABLE} SET version = {_VERSION}")
        own("COMMIT")

    def facts(self) -> FileFacts:
        """The facts that are stored in the file."""
        used = {name for statement in self._apply for name in statement.names}
        return msgspec.structs.replace(
            facts_of(self._sandbox),
            bytes=bytes_of(self.path),
            needs_payloads=not used.isdisjoint(("data", "meta")),
        )

    def apply(self, batch: Batch, records: RecordColumns | None = None) -> None:
        """Apply a batch in one transaction. `records`: its records, if they are decoded already.

        Raises `MovedError`, and `FailedRecord` after everything before that record is applied.
        """
        records = RecordColumns(batch) if records is None else records
        try:
            self._apply_records(batch, records, records.count)
        except FailedRecord as failure:
            good = records.column("seq").index(failure.seq)
            self._apply_records(batch, records, good, upto_seq=failure.seq - 1)
            raise

    def _apply_records(
        self, batch: Batch, records: RecordColumns, count: int, *, upto_seq: int | None = None
    ) -> None:
        """Apply the first `count` records, and set the position to `upto_seq`."""
        own = self._sandbox.own
        upto_seq = batch.upto_seq if upto_seq is None else upto_seq
        own("BEGIN IMMEDIATE")
        try:
            ((at, known_gaps),) = own(f"SELECT processed_seq, gaps FROM {_TABLE}")
            if at != batch.from_seq:
                raise MovedError
            if count:
                self._run(records, count)
            gaps = [gap for gap in batch.gaps if gap[0] <= upto_seq]
            if gaps:
                gaps = [*_GAPS.decode(known_gaps), *gaps]
                known_gaps = msgspec.json.encode(gaps).decode()
            own(
                f"UPDATE {_TABLE} SET processed_seq = ?, known_from_seq = max(known_from_seq, ?), "
                "gaps = ?, lsn = max(lsn, ?)",
                (upto_seq, min(batch.known_from_seq, upto_seq + 1), known_gaps, batch.lsn),
            )
            own("COMMIT")
        except BaseException:
            # A statement may have ended the transaction itself (OR ROLLBACK).
            if self._connection.in_transaction:
                own("ROLLBACK")
            raise
        self.at = upto_seq

    def _run(self, records: RecordColumns, count: int) -> None:
        statements = self._apply
        statement = statements[0]
        parameters = [each.rows(records, count) for each in statements]
        place = parameters[0].place
        with self._sandbox.mode(Mode.APPLY, BATCH_SECONDS) as connection:
            cursor = connection.cursor()
            try:
                if len(statements) == 1 and statement.is_write:
                    cursor.executemany(statement.sql, parameters[0].rows)
                else:
                    for of_record in zip(*(each.rows for each in parameters), strict=True):
                        for statement, row in zip(statements, of_record, strict=True):
                            cursor.execute(statement.sql, row).fetchmany(0)
            except (sqlite3.Error, sqlite3.Warning, MemoryError, ValueError) as error:
                if is_of_disk(error):
                    raise
                failure = refused(error, self._sandbox, statement.sql).message
            else:
                if connection.in_transaction:
                    return
                failure = "apply must not end the transaction"
        index = max(0, count - length_hint(place) - 1)
        raise FailedRecord(records.column("seq")[index], statement.sql, failure)

    def skip(self, seq: int) -> None:
        """Skip one record, which must be the next one."""
        if self.at != seq - 1:
            raise MovedError
        self._sandbox.own(f"UPDATE {_TABLE} SET processed_seq = ?", (seq,))
        self.at = seq

    def mark_ready(self) -> None:
        """Mark that the build has caught up: from now on this file answers queries."""
        self._sandbox.own(f"UPDATE {_TABLE} SET is_ready = 1")

    def mark_stale(self) -> None:
        """Mark that records that the file applied were deleted."""
        self._sandbox.own(f"UPDATE {_TABLE} SET is_stale = 1")

    def close(self) -> None:
        """Close the file."""
        self._connection.close()


class _Statement:
    """A statement of `apply`, and the names of its parameters in the order of their binding."""

    def __init__(self, sql: str, names: list[str]) -> None:
        self.sql = sql
        self.names = names
        self.is_write = _is_write(sql)

    def rows(self, records: RecordColumns, count: int) -> _Parameters:
        """The parameters of the first `count` records."""
        columns = [records.column(name) for name in self.names]
        place: Iterator[Any] = iter(columns[0][:count] if columns else [()] * count)
        if not columns:
            return _Parameters(place, place)
        rows: Iterator[Any] = zip(place, *columns[1:], strict=False)
        if _BINDS_BY_NAME:
            rows = (dict(zip(self.names, row, strict=True)) for row in rows)
        return _Parameters(rows, place)


class _Parameters(NamedTuple):
    """The parameters of records; `place` has one item left for each record that follows."""

    rows: Iterator[Any]
    place: Iterator[Any]


class _Noted(dict[str, None]):
    """Returns None for every parameter, and notes its name."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __missing__(self, key: str) -> None:
        self.names.append(key)


def _is_write(statement: str) -> bool:
    """Whether `executemany` accepts a statement: it refuses statements that may return rows."""
    head = statement.lstrip()[:7].upper()
    return head.startswith(("INSERT", "UPDATE", "DELETE", "REPLACE")) and (
        "RETURNING" not in statement.upper()
    )


def is_of_disk(error: Exception) -> bool:
    """Whether the disk or another process caused an error, not the statement or the file."""
    if isinstance(error, OSError):
        return not isinstance(error, FileNotFoundError)
    if not isinstance(error, sqlite3.OperationalError):
        return False
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    return code in _DISK_CODES


_DISK_CODES: Final = frozenset(
    {
        sqlite3.SQLITE_FULL,
        sqlite3.SQLITE_IOERR,
        sqlite3.SQLITE_BUSY,
        sqlite3.SQLITE_PERM,
        sqlite3.SQLITE_CANTOPEN,
        sqlite3.SQLITE_READONLY,
    }
)


def make_tables(sandbox: Sandbox, definition: ViewDefinition) -> None:
    """Run the schema, then compile every other statement. Raises `RefusedSql`."""
    statement = ""
    try:
        with sandbox.mode(Mode.SCHEMA, _SCHEMA_SECONDS) as connection:
            for statement in definition.schema:
                connection.execute(statement)
        sandbox.learn_tables()
        _check_defaults(sandbox)
        add_dates(sandbox)
        row = dict.fromkeys(("seq", "ts", "node", "tag", "data", "meta"))
        with sandbox.mode(Mode.APPLY, _SCHEMA_SECONDS) as connection:
            for statement in definition.apply:
                connection.execute(f"EXPLAIN {statement}", row)
        with sandbox.mode(Mode.QUERY, _SCHEMA_SECONDS) as connection:
            for statement in definition.queries.values():
                connection.execute(f"EXPLAIN {statement}", _Anything())
    except (sqlite3.Error, sqlite3.Warning, MemoryError) as error:
        raise refused(error, sandbox, statement) from None


_LITERAL: Final = re.compile(
    r"\(*\s*([-+]?[0-9.]+([eE][-+]?[0-9]+)?|x?'([^']|'')*'|null|true|false)\s*\)*", re.IGNORECASE
)


def _check_defaults(sandbox: Sandbox) -> None:
    """Raise `RefusedSql` for a computed default, because the authorizer is not called for it."""
    rows = sandbox.own(
        "SELECT t.name, c.name, c.dflt_value FROM sqlite_schema t, pragma_table_info(t.name) c "
        "WHERE t.type = 'table' AND c.dflt_value IS NOT NULL"
    )
    for table, column, default in rows:
        if not _LITERAL.fullmatch(str(default)):
            message = f"the default of {table}.{column} must be a literal"
            raise RefusedSql(message, f"DEFAULT {default}", "refused")


class _Anything(dict[str, Any]):
    """Parameters of a named query whose values are not known yet: every name has the value NULL."""

    def __missing__(self, key: str) -> None:
        return None


def facts_of(sandbox: Sandbox) -> FileFacts:
    """The facts that are stored in a file. Raises `sqlite3.Error` and `ValueError`."""
    rows = sandbox.own(f"SELECT {_COLUMNS} FROM {_TABLE}")
    if len(rows) != 1 or rows[0][0] != _VERSION:
        raise ValueError("not a file of a view, or of a newer version")
    _, topic_id, epoch, processed_seq, known_from_seq, *rest = rows[0]
    is_ready, gaps, definition, lsn, is_stale = rest
    return FileFacts(
        topic_id=topic_id,
        epoch=epoch,
        processed_seq=processed_seq,
        known_from_seq=known_from_seq,
        is_ready=bool(is_ready),
        gaps=_GAPS.decode(gaps),
        definition=_VIEW_DEFINITION.decode(definition),
        lsn=lsn,
        is_stale=bool(is_stale),
    )


def processed_seq_of(sandbox: Sandbox) -> int:
    """The position of a file. Raises `sqlite3.Error` and `ValueError`."""
    rows = sandbox.own(f"SELECT version, processed_seq FROM {_TABLE}")
    if len(rows) != 1 or rows[0][0] != _VERSION:
        raise ValueError("not a file of a view, or of a newer version")
    return int(rows[0][1])


def check_definition(definition: ViewDefinition) -> None:
    """Try a definition in memory. Raises `RefusedSql`."""
    connection = sqlite3.connect(":memory:", isolation_level=None)
    try:
        make_tables(Sandbox(connection, heap_bytes=_HEAP_BYTES), definition)
    finally:
        connection.close()


def remove(path: str) -> None:
    """Remove a view's file and the database's files beside it, durably.

    Otherwise the file could come back after a power cut, with records that its topic lost long ago.
    """
    is_there = False
    for suffix in ("-wal", "-shm", "-journal", ""):
        try:
            os.unlink(path + suffix)
            is_there = True
        except FileNotFoundError:
            pass
    if is_there:
        directory = os.open(os.path.dirname(path) or ".", os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


def bytes_of(path: str) -> int:
    """The bytes of a view's file and of the database's files beside it; 0 if it does not exist."""
    total = 0
    for suffix in ("", "-wal", "-shm"):
        try:
            total += os.stat(path + suffix).st_size
        except OSError:
            pass
    return total
