"""Where exported rows come from (sealed segments, or a server's diff) and the files they go to.

Both sources give chunks in order of seq: an Arrow table from segments, a list of rows from a diff,
whose payloads are the bytes as they were sent. Files are written beside, synced and renamed; what
is not in the manifest does not count. Called by `export`.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import os
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import quote, urlsplit

import msgspec

from spark_jobs.query import ANY, Names, Query

PAGE_ROWS: Final = 1000
DAY_MS: Final = 86_400_000
# What a diff says of a topic that ends before the cursor: it was dropped and made again.
RECREATED: Final = "recreated"
FORMATS: Final = {"parquet": "parquet", "ndjson": "ndjson", "arrow": "arrow"}


class ExportError(RuntimeError):
    """The export cannot go on; the message is one line."""


class Row(NamedTuple):
    """One record; `data` and `meta` as they were sent."""

    seq: int
    ts: int
    node: str | None
    tag: str | None
    data: bytes
    meta: bytes | None


Chunk = Any  # list[Row], or an Arrow table with Row's columns


# -- from a server -------------------------------------------------------------------------------


class _Record(msgspec.Struct):
    seq: int = msgspec.field(name="$seq")
    ts: int = msgspec.field(name="$ts")
    data: msgspec.Raw
    node: str | None = msgspec.field(name="$node", default=None)
    tag: str | None = msgspec.field(name="$tag", default=None)
    meta: msgspec.Raw = msgspec.Raw()


class _Gap(msgspec.Struct):
    gap_from: int
    gap_to: int
    reason: str


class _Page(msgspec.Struct):
    records: list[_Record]
    next_from_seq: int
    caught_up: bool
    tombstone: _Gap | None = None


class Server:
    """Reads topics of a running server, sealed or not, with `diff`."""

    def __init__(self, url: str, token: str | None, page_rows: int = PAGE_ROWS) -> None:
        self._page_rows = min(page_rows, PAGE_ROWS)
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ExportError(f"{url!r} is no URL of a server")
        kind = (
            http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        )
        self._connection = kind(parts.hostname, parts.port, timeout=60)
        self._base = parts.path.rstrip("/")
        self._headers = {"Content-Type": "application/json"}
        if token:
            self._headers["Authorization"] = f"Bearer {token}"
        self._url = url

    def close(self) -> None:
        """Hang up."""
        self._connection.close()

    def _ask(self, method: str, path: str, body: object = None) -> bytes:
        encoded = None if body is None else json.dumps(body).encode()
        try:
            self._connection.request(method, self._base + path, encoded, self._headers)
            answer = self._connection.getresponse()
            content = answer.read()
        except (OSError, http.client.HTTPException) as error:
            self._connection.close()
            raise ExportError(f"{self._url} does not answer: {error}") from None
        if answer.status != 200:
            try:
                problem = json.loads(content)["error"]
                raise ExportError(f"{problem['code']}: {problem['message']}")
            except (ValueError, KeyError, TypeError):
                raise ExportError(f"{self._url} answered {answer.status}") from None
        return content

    def topics(self, names: Names) -> dict[str, tuple[int | None, int]]:
        """Epoch (a server does not tell it) and head of each topic in `names`."""
        found: dict[str, tuple[int | None, int]] = {}
        cursor = ""
        for _ in range(1_000_000):
            page = json.loads(self._ask("GET", f"/v0/topics?page_size=1000{cursor}"))
            for topic in page["topics"]:
                if names.has(topic["topic"]):
                    found[topic["topic"]] = (None, int(topic["head_seq"]))
            if "next_cursor" not in page:
                break
            cursor = f"&cursor={quote(page['next_cursor'], safe='')}"
        return found

    def chunks(self, topic: str, next_seq: int) -> Iterator[tuple[Chunk, int, list[str]]]:
        """Pages from a seq on until caught up: rows, the next seq, and what was lost before."""
        path, cursor = f"/v0/topics/{quote(topic, safe='')}/diff", next_seq - 1
        while True:
            asked = {
                "from_seq": cursor,
                "limit": self._page_rows,
                "include_tags": True,
                "max_batch_bytes": 8 * 2**20,
            }
            page = msgspec.json.decode(self._ask("POST", path, asked), type=_Page)
            lost = page.tombstone
            if lost is not None and lost.reason == RECREATED:
                yield [], 1, [RECREATED]
                cursor = 0
                continue
            told = [] if lost is None else [f"{lost.gap_from}..{lost.gap_to} ({lost.reason})"]
            rows = [
                Row(r.seq, r.ts, r.node, r.tag, bytes(r.data), bytes(r.meta) or None)
                for r in page.records
            ]
            yield rows, page.next_from_seq + 1, told
            if page.caught_up:
                return
            if page.next_from_seq <= cursor:
                raise ExportError(f"a diff of {topic} does not move from {cursor}")
            cursor = page.next_from_seq


# -- from segments -------------------------------------------------------------------------------


class Segments:
    """Reads topics of a data directory, what is sealed of them."""

    def __init__(self, data_dir: str, cold_dir: str | None) -> None:
        from spark_jobs.listing import list_segments

        columns = tuple((n, k) for n, k in Query().columns if n not in ("topic", "epoch"))
        self._query = Query(columns=columns)
        listing = list_segments(data_dir, self._query, cold_dir=cold_dir)
        self._topics = {topic.manifest.name: topic for topic in listing.topics}

    def topics(self, names: Names = ANY) -> dict[str, tuple[int | None, int]]:
        """Epoch and last sealed seq of each topic in `names`."""
        return {
            name: (topic.manifest.epoch, topic.segments[-1].entry.last_seq)
            for name, topic in self._topics.items()
            if names.has(name) and topic.segments
        }

    def chunks(self, topic: str, next_seq: int) -> Iterator[tuple[Chunk, int, list[str]]]:
        """A table a segment, from a seq on."""
        import pyarrow as pa

        from spark_jobs.segments import read_segments

        query = self._query.narrow_seqs(next_seq, None)
        listed = self._topics[topic]
        floor = listed.manifest.evict_floor
        told = [f"{next_seq}..{floor - 1} (evicted)"] if next_seq < floor else []
        for segment in listed.segments:
            if segment.entry.last_seq < next_seq:
                continue
            batches = list(read_segments([segment], query))
            rows = pa.Table.from_batches(batches) if batches else []
            yield rows, segment.entry.last_seq + 1, told
            told = []


# -- to files ------------------------------------------------------------------------------------


def split_by_day(chunk: Chunk) -> Iterator[tuple[str, Chunk]]:
    """Parts of a chunk by the UTC day of their time, which never goes back."""
    import itertools

    if isinstance(chunk, list):
        for day, rows in itertools.groupby(chunk, key=lambda row: row.ts // DAY_MS):
            yield day_text(day), list(rows)
        return
    import numpy as np

    days = chunk["ts"].cast("int64").to_numpy() // (DAY_MS * 1000)
    edges = [0, *(np.flatnonzero(np.diff(days)) + 1).tolist(), len(days)]
    for first, end in itertools.pairwise(edges):
        if first < end:
            yield day_text(int(days[first])), chunk.slice(first, end - first)


def day_text(day: int) -> str:
    """A day since the epoch as `2026-01-31`."""
    return datetime.fromtimestamp(day * 86_400, UTC).strftime("%Y-%m-%d")


def span_of(chunks: list[Chunk]) -> tuple[int, int, int]:
    """(first seq, last seq, rows) of chunks of one file."""

    def seq(chunk: Chunk, at: int) -> int:
        return chunk[at].seq if isinstance(chunk, list) else int(chunk["seq"][at].as_py())

    return seq(chunks[0], 0), seq(chunks[-1], len(chunks[-1]) - 1), sum(map(len, chunks))


def write_file(path: Path, kind: str, topic: str, epoch: int | None, chunks: list[Chunk]) -> str:
    """Write a file beside, sync it and give it its name; its SHA-256."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temp = path.with_name(path.name + ".tmp")
    if kind == "ndjson":
        with temp.open("wb") as file:
            for chunk in chunks:
                file.writelines(map(_line, _rows(chunk)))
    else:
        _write_table(temp, kind, [_table(chunk, topic, epoch) for chunk in chunks])
    with temp.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        os.fsync(file.fileno())
    temp.rename(path)
    sync_folder(path.parent)
    return digest


def sync_folder(folder: Path) -> None:
    """Make the names of a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _rows(chunk: Chunk) -> Iterator[Row]:
    if isinstance(chunk, list):
        yield from chunk
        return
    times = chunk["ts"].cast("int64").to_pylist()
    columns = [chunk[name].to_pylist() for name in ("seq", "node", "tag", "data", "meta")]
    for ts, seq, node, tag, data, meta in zip(times, *columns, strict=True):
        yield Row(
            seq, ts // 1000, node, tag, data.encode(), None if meta is None else meta.encode()
        )


def _line(row: Row) -> bytes:
    """A record as a diff shows it, in one line; line breaks are only between JSON's tokens."""
    line = b'{"$seq":%d,"$ts":%d' % (row.seq, row.ts)
    for name, value in (("$node", row.node), ("$tag", row.tag)):
        if value is not None:
            line += b',"%b":%b' % (name.encode(), msgspec.json.encode(value))
    line += b',"data":' + row.data
    if row.meta is not None:
        line += b',"meta":' + row.meta
    return line.replace(b"\r", b" ").replace(b"\n", b" ") + b"}\n"


def _table(chunk: Chunk, topic: str, epoch: int | None) -> Any:
    import pyarrow as pa

    from spark_jobs.columns import schema_of

    schema = schema_of(Query().columns)
    if isinstance(chunk, list):
        columns = list(zip(*chunk, strict=True))
        times = pa.array([ts * 1000 for ts in columns[1]]).cast(schema.field("ts").type)
        texts = [pa.array(columns[n], pa.binary()).cast(pa.string()) for n in (4, 5)]
        found = {
            "seq": pa.array(columns[0], pa.int64()),
            "ts": times,
            "node": pa.array(columns[2], pa.string()),
            "tag": pa.array(columns[3], pa.string()),
            "data": texts[0],
            "meta": texts[1],
        }
    else:
        found = {name: chunk[name] for name in chunk.column_names}
    found["topic"] = pa.repeat(pa.scalar(topic), len(chunk))
    found["epoch"] = pa.repeat(pa.scalar(epoch, pa.int64()), len(chunk))
    return pa.table([found[name] for name in schema.names], schema=schema)


def _write_table(path: Path, kind: str, tables: list[Any]) -> None:
    import pyarrow as pa

    table = pa.concat_tables(tables)
    if kind == "parquet":
        import pyarrow.parquet as pq

        pq.write_table(table, path, compression="zstd")
        return
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
