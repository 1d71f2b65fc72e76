"""The process that applies records to the files of all views.

One child a server (`python -m topics_server.views.workers.apply_worker DIRECTORY`). It holds a lock
on the directory, so that the child of a killed server has ended before another one writes. It ends
when its standard input ends. `view_file` stops SQL that never ends; `processes` kills a child that
hangs inside a function of the database.
"""

from __future__ import annotations

import fcntl
import os
import signal
import sqlite3
import sys
from typing import BinaryIO, Final

import msgspec

from topics_server.runtime.clock import monotonic_ms
from topics_server.views.messages import (
    LENGTH,
    REQUESTS,
    AllApplied,
    Answer,
    Apply,
    ApplyAll,
    Batch,
    BatchPart,
    BlockRows,
    Check,
    Create,
    DiskTrouble,
    Done,
    FailedAt,
    MarkReady,
    MarkStale,
    Moved,
    Nothing,
    Open,
    PartAnswer,
    Remove,
    Request,
    Skip,
    SqlRefused,
    Unreadable,
    ViewQuery,
    frame,
)
from topics_server.views.workers.records import RecordColumns
from topics_server.views.workers.view_file import (
    FailedRecord,
    MovedError,
    RefusedSql,
    ViewFile,
    bytes_of,
    check_definition,
    is_of_disk,
    remove,
)

_NICENESS: Final = 5
# Expected errors of a request; the last ones come from the database, from the disk, and from a
# malformed batch.
_EXPECTED: Final = (
    RefusedSql,
    FailedRecord,
    MovedError,
    sqlite3.DatabaseError,
    OSError,
    ValueError,
    msgspec.MsgspecError,
)


class Applier:
    """The open files of views, by path."""

    def __init__(self) -> None:
        self._files: dict[str, ViewFile] = {}
        # The records that were applied last: the next part of a message often has the same pieces.
        self._records: tuple[list[BlockRows], RecordColumns] | None = None

    def answer(self, request: Request) -> Answer:
        """Serve a request; an expected error becomes an answer too."""
        try:
            if isinstance(request, ApplyAll):
                return AllApplied([self._part(part, request.pieces) for part in request.parts])
            return self._answer(request)
        except _EXPECTED as error:
            return self._trouble(request, error)
        finally:
            self._records = None

    def _part(self, part: BatchPart, pieces: list[list[BlockRows]]) -> PartAnswer:
        request = Apply(part.path, msgspec.structs.replace(part.batch, pieces=pieces[part.pieces]))
        try:
            return self._changed(request)
        except _EXPECTED as error:
            return self._trouble(request, error)

    def _trouble(self, request: Request, error: Exception) -> PartAnswer:
        """The answer that reports an error to the server."""
        if isinstance(error, RefusedSql):
            return SqlRefused(error.message, error.statement, error.reason)
        if isinstance(error, FailedRecord):
            return FailedAt(error.seq, error.statement, error.message)
        if isinstance(error, MovedError):
            return Moved()
        path = getattr(request, "path", "")
        # Close the file, even if another request opened it: it will be opened again.
        self._forget(path)
        if is_of_disk(error) and (isinstance(request, Create) or os.path.exists(path)):
            return DiskTrouble(str(error))
        return Unreadable(str(error))

    def _answer(self, request: Request) -> Answer:
        match request:
            case Check():
                check_definition(request.definition)
                return Done()
            case Create():
                self._forget(request.path)
                self._files[request.path] = file = ViewFile.create(
                    request.path,
                    request.definition,
                    request.topic_id,
                    request.epoch,
                    max_bytes=request.max_bytes,
                )
                return file.facts()
            case Open():
                self._forget(request.path)
                self._files[request.path] = file = ViewFile.open(
                    request.path, max_bytes=request.max_bytes
                )
                return file.facts()
            case Remove():
                self._forget(request.path)
                remove(request.path)
                return Done()
            case Nothing():
                return Done()
            case _:
                return self._changed(request)

    def _changed(
        self, request: Apply | Skip | MarkReady | MarkStale | ViewQuery | ApplyAll
    ) -> PartAnswer:
        if isinstance(request, ViewQuery | ApplyAll):
            return Moved()
        found = self._files.get(request.path)
        if found is None:
            return Moved()
        began_ms = monotonic_ms()
        if isinstance(request, Apply):
            found.apply(request.batch, self._records_of(request.batch))
        elif isinstance(request, Skip):
            found.skip(request.seq)
        elif isinstance(request, MarkStale):
            found.mark_stale()
        else:
            found.mark_ready()
        return Done(found.at, bytes_of(request.path), monotonic_ms() - began_ms)

    def _records_of(self, batch: Batch) -> RecordColumns:
        """The records of a batch; reuses those of the batch before if the pieces are the same."""
        if self._records is None or self._records[0] is not batch.pieces:
            self._records = batch.pieces, RecordColumns(batch)
        return self._records[1]

    def close(self) -> None:
        """Close every file and leave no journal of the database beside it."""
        for path in list(self._files):
            self._forget(path)

    def _forget(self, path: str) -> None:
        file = self._files.pop(path, None)
        if file is not None:
            file.close()


def serve(requests: BinaryIO, responses: BinaryIO) -> None:
    """The child's loop: one answer a request, until the requests end."""
    applier = Applier()
    while header := requests.read(LENGTH.size):
        if len(header) < LENGTH.size:
            return
        (length,) = LENGTH.unpack(header)
        body = requests.read(length)
        if len(body) != length:
            return  # the server is gone
        responses.write(frame(applier.answer(REQUESTS.decode(body))))
        responses.flush()
    applier.close()


def main() -> None:
    """Run as the child: with lower priority than the server, ignoring the terminal's interrupt."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(_NICENESS)
    # The first view creates the folder.
    os.makedirs(sys.argv[1], mode=0o700, exist_ok=True)
    directory = os.open(sys.argv[1], os.O_RDONLY | os.O_DIRECTORY)
    fcntl.flock(directory, fcntl.LOCK_EX)
    try:
        serve(sys.stdin.buffer, sys.stdout.buffer)
    except BrokenPipeError:
        # The server is gone; exit without flushing into its closed pipe.
        os._exit(0)


if __name__ == "__main__":
    main()
