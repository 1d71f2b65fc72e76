"""The projection of a view written by hand: a redis stream read in pages, applied to SQLite.

Rows and the stream's id change in one transaction, as in careful code; one process reads and
applies. Called by `applied`.
"""

from __future__ import annotations

import json
import socket
import sqlite3
import time
from pathlib import Path
from typing import Any, BinaryIO, Final

from benchmarks.bench import Bench, Side
from benchmarks.clients.loader import BenchmarkError, Sample
from benchmarks.clients.requests import data_text
from benchmarks.servers.peers import Redis, command, program

_PAGE: Final = 2_000
_SCHEMA: Final = {
    "count by tag": "CREATE TABLE rows (key PRIMARY KEY, count, last) WITHOUT ROWID",
    "latest by key": "CREATE TABLE rows (key PRIMARY KEY, id, data) WITHOUT ROWID",
}
_APPLY: Final = {
    "count by tag": "INSERT INTO rows VALUES (?, 1, ?) ON CONFLICT (key) DO UPDATE "
    "SET count = count + 1, last = excluded.last",
    "latest by key": "INSERT INTO rows VALUES (?, ?, ?) ON CONFLICT (key) DO UPDATE "
    "SET id = excluded.id, data = excluded.data",
}


def by_hand(bench: Bench, records: int) -> ByHand:
    """A redis with `records` records in a stream. Raises `NotInstalled`."""
    program("redis-server")
    return ByHand(bench.folder / "by-hand", records)


class ByHand:
    """A redis server, and a reader of its stream."""

    def __init__(self, folder: Path, records: int) -> None:
        self._folder = folder
        self._records = records
        self._redis = Redis(folder, "everysec")
        self._link = socket.create_connection(("127.0.0.1", self._redis.port))
        self._answers = self._link.makefile("rb")
        self._rounds = 0
        for first in range(0, records, _PAGE):
            numbers = range(first, min(first + _PAGE, records))
            texts = [(data_text(n, f"t-{n % 1000:03d}"), b"t-%03d" % (n % 1000)) for n in numbers]
            added = [
                command(b"XADD", b"log", b"*", b"data", data, b"tag", tag) for data, tag in texts
            ]
            self._link.sendall(b"".join(added))
            for _ in numbers:
                read_reply(self._answers)

    def sides(self) -> dict[str, Side]:
        """One side for each view."""
        return {
            "by hand, count by tag": lambda: self._side("count by tag"),
            "by hand, latest by key": lambda: self._side("latest by key"),
        }

    def _side(self, view: str) -> Sample:
        self._rounds += 1
        base = sqlite3.connect(self._folder / f"{self._rounds}.db", isolation_level=None)
        base.execute("PRAGMA journal_mode = WAL")
        base.execute("PRAGMA synchronous = NORMAL")
        base.execute(_SCHEMA[view])
        base.execute("CREATE TABLE place (id)")
        base.execute("INSERT INTO place VALUES ('0')")
        began = time.perf_counter()
        place, count = b"0", 0
        while page := self._page(place):
            place = page[-1][0]
            count += len(page)
            base.execute("BEGIN")
            base.executemany(_APPLY[view], [_row(view, entry) for entry in page])
            base.execute("UPDATE place SET id = ?", (place,))
            base.execute("COMMIT")
        seconds = time.perf_counter() - began
        base.close()
        if count != self._records:
            raise BenchmarkError(f"redis gave {count} records, not {self._records}")
        return Sample(count, seconds, count / seconds, 0, 0, 0, 0, 0.0)

    def _page(self, place: bytes) -> list[Any]:
        """The entries behind an id: `[id, [name, value, …]]`."""
        words = (b"XREAD", b"COUNT", b"%d" % _PAGE, b"STREAMS", b"log", place)
        self._link.sendall(command(*words))
        answer = read_reply(self._answers)
        return [] if answer is None else answer[0][1]

    def close(self) -> None:
        """End the redis."""
        self._answers.close()
        self._link.close()
        self._redis.close()


def _row(view: str, entry: Any) -> tuple[Any, ...]:
    at, (_, data, _, tag) = entry
    if view == "count by tag":
        return (tag.decode(), at.decode())
    return (json.loads(data)["tag"], at.decode(), data.decode())


def read_reply(answers: BinaryIO) -> Any:
    """One reply of redis's protocol: bytes, a number, a list, or None."""
    line = answers.readline()
    kind, rest = line[:1], line[1:-2]
    if kind == b"$":
        size = int(rest)
        return None if size < 0 else answers.read(size + 2)[:-2]
    if kind == b"*":
        size = int(rest)
        return None if size < 0 else [read_reply(answers) for _ in range(size)]
    if kind == b":":
        return int(rest)
    if kind == b"+":
        return rest
    raise BenchmarkError(f"redis: {line!r}")
