"""A process that answers queries of views, one at a time.

The server keeps a few (`python -m topics_server.views.workers.query_worker`). Connections are
read-only and confined; each query has bounds on time, memory, rows and bytes. The rows and
`processed_seq` are read in one transaction, so the number belongs to these rows. A process ends
when its standard input ends; `processes` kills one that does not answer in time.
"""

from __future__ import annotations

import base64
import os
import signal
import sqlite3
import sys
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, BinaryIO, Final

import orjson

from topics_server.values.limits import MIB
from topics_server.views.messages import (
    LENGTH,
    REQUESTS,
    Answer,
    Moved,
    QueryRows,
    SqlRefused,
    Unreadable,
    ViewQuery,
    frame,
)
from topics_server.views.workers.sandbox import Mode, Sandbox
from topics_server.views.workers.view_file import (
    RefusedSql,
    connect,
    processed_seq_of,
    refused,
)

_NICENESS: Final = 5
_HEAP_BYTES: Final = 96 * MIB
# The maximum of open files; connections of removed files are closed as others replace them.
_FILES_MAX: Final = 16


class Querier:
    """Read-only connections by path; closes the least recently used one first."""

    def __init__(self) -> None:
        self._files: OrderedDict[str, Sandbox] = OrderedDict()

    def answer(self, query: ViewQuery) -> Answer:
        """The rows of a query, or the reason why there are none."""
        try:
            sandbox = self._file(query.path)
            return self._rows(sandbox, query)
        except RefusedSql as error:
            return SqlRefused(error.message, error.statement, error.reason)
        except (sqlite3.Error, ValueError) as error:
            self._forget(query.path)
            return Unreadable(str(error))

    def _file(self, path: str) -> Sandbox:
        found = self._files.get(path)
        if found is None:
            found = Sandbox(connect(path, read_only=True), heap_bytes=_HEAP_BYTES)
            self._files[path] = found
            found.learn_tables()
            if len(self._files) > _FILES_MAX:
                self._forget(next(iter(self._files)))
        self._files.move_to_end(path)
        return found

    def _forget(self, path: str) -> None:
        found = self._files.pop(path, None)
        if found is not None:
            found.connection.close()

    def _rows(self, sandbox: Sandbox, query: ViewQuery) -> Answer:
        own = sandbox.own
        own("BEGIN")
        try:
            return self._selected(sandbox, query, processed_seq_of(sandbox))
        finally:
            if sandbox.connection.in_transaction:
                own("ROLLBACK")

    def _selected(self, sandbox: Sandbox, query: ViewQuery, processed_seq: int) -> QueryRows:
        encoded: list[bytes] = []
        size = 2
        is_cut = False
        with sandbox.mode(Mode.QUERY, query.max_ms / 1000) as connection:
            cursor = connection.cursor()
            try:
                cursor.execute(query.sql, query.params)
                if cursor.description is None:
                    raise RefusedSql("the statement gives no rows", query.sql)
                columns = [column[0] for column in cursor.description]
                # Fetch one row at a time: one row may be as large as the database's memory.
                for row in cursor:
                    if len(encoded) >= query.max_rows or _bytes_of(row) > query.max_bytes - size:
                        is_cut = True
                        break
                    shown = orjson.dumps(row, default=_shown, option=_OPTIONS)
                    size += len(shown) + 1
                    if size > query.max_bytes:
                        is_cut = True
                        break
                    encoded.append(shown)
            except (sqlite3.Error, sqlite3.Warning, MemoryError, OverflowError) as error:
                raise refused(error, sandbox, query.sql) from None
            except (orjson.JSONEncodeError, TypeError) as error:
                raise RefusedSql(f"a value cannot be shown: {error}", query.sql) from None
            finally:
                cursor.close()
        if is_cut and not encoded:
            message = f"one row is larger than the {query.max_bytes} bytes of an answer"
            raise RefusedSql(message, query.sql, "size")
        return QueryRows(
            columns, b"[" + b",".join(encoded) + b"]", len(encoded), processed_seq, is_cut
        )


_OPTIONS: Final = orjson.OPT_NON_STR_KEYS


def _bytes_of(row: Sequence[Any]) -> int:
    """A lower bound of a row's size in JSON, without making the JSON."""
    return sum(len(value) for value in row if isinstance(value, str | bytes))


def _shown(value: Any) -> Any:
    """Convert a value that JSON cannot represent: bytes become base64."""
    if isinstance(value, bytes):
        return {"base64": base64.b64encode(value).decode("ascii")}
    raise TypeError(type(value).__name__)


def serve(requests: BinaryIO, responses: BinaryIO) -> None:
    """The child's loop: one answer a request, until the requests end."""
    querier = Querier()
    while header := requests.read(LENGTH.size):
        if len(header) < LENGTH.size:
            return
        (length,) = LENGTH.unpack(header)
        body = requests.read(length)
        if len(body) != length:
            return  # the server is gone
        request = REQUESTS.decode(body)
        answer = querier.answer(request) if isinstance(request, ViewQuery) else Moved()
        responses.write(frame(answer))
        responses.flush()


def main() -> None:
    """Run as the child: with lower priority than the server, ignoring the terminal's interrupt."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(_NICENESS)
    try:
        serve(sys.stdin.buffer, sys.stdout.buffer)
    except BrokenPipeError:
        os._exit(0)


if __name__ == "__main__":
    main()
