"""The form of a record in `topics export`, for both sources, and its encoders.

Both sources make the same values: rows from a diff (`ExportRow`), Arrow tables from segments
(`TABLE_COLUMNS`). A record of bytes has its Base64 as `data`, and a content type. Lines have the
members of a diff (`$encoding`, `$content_type`). Tables keep the type as the first member of
`meta`, like segments. Pure. Called by `sources` and `exporting`.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple

import msgspec

from spark_jobs.reader.query import Query

DAY_MS: Final = 86_400_000
CONTENT_TYPE: Final = "$content_type"
# The columns of a table from segments: those of an export without the two about the topic.
TABLE_COLUMNS: Final = (
    ("seq", "bigint"),
    ("ts", "timestamp"),
    ("node", "string"),
    ("tag", "string"),
    ("data", "binary"),
    ("meta", "binary"),
    ("kind", "string"),
)
_MEMBERS: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_encode: Final = msgspec.json.Encoder().encode


class ExportRow(NamedTuple):
    """One record. `data` and `meta` are the bytes that the client sent.

    For a record of bytes, `data` is Base64 without quotes.
    """

    seq: int
    ts: int
    node: str | None
    tag: str | None
    data: bytes
    meta: bytes | None
    content_type: str | None = None


Rows = Any  # list[Row], or an Arrow table of TABLE_COLUMNS


# -- rows --------------------------------------------------------------------------------------


def rows_of(rows: Rows) -> Iterator[ExportRow]:
    """The rows of either form."""
    if isinstance(rows, list):
        yield from rows
        return
    for batch in rows.to_batches(max_chunksize=4_096):
        times = batch["ts"].cast("int64").to_pylist()
        names = ("seq", "node", "tag", "data", "meta", "kind")
        columns = [batch[name].to_pylist() for name in names]
        for ts, seq, node, tag, data, meta, kind in zip(times, *columns, strict=True):
            if kind == "bytes":
                content_type, meta = split_type(meta)
                data = base64.b64encode(data)
                yield ExportRow(seq, ts // 1000, node, tag, data, meta, content_type)
            else:
                yield ExportRow(seq, ts // 1000, node, tag, data, meta)


def split_type(meta: bytes | None) -> tuple[str, bytes | None]:
    """Split the stored `meta` of bytes into the content type and the user's `meta`."""
    members = _MEMBERS.decode(meta or b"{}")
    content_type: str = msgspec.json.decode(members.pop(CONTENT_TYPE, msgspec.Raw(b'""')), type=str)
    return content_type, _encode(members) if members else None


def joined_meta(row: ExportRow) -> bytes | None:
    """The `meta` of a table's row; its first member is the content type, if there is one."""
    if row.content_type is None:
        return row.meta
    members = {CONTENT_TYPE: msgspec.Raw(_encode(row.content_type))}
    return _encode(members | (_MEMBERS.decode(row.meta) if row.meta else {}))


def line_of(row: ExportRow) -> bytes:
    """A record in the form of a diff, as one line. JSON has line breaks only between its tokens."""
    line = b'{"$seq":%d,"$ts":%d' % (row.seq, row.ts)
    for name, value in (("$node", row.node), ("$tag", row.tag)):
        if value is not None:
            line += b',"%b":%b' % (name.encode(), _encode(value))
    if row.content_type is None:
        line += b',"data":' + row.data
    else:
        line += b',"$encoding":"base64","$content_type":%b' % _encode(row.content_type)
        line += b',"data":"%b"' % row.data
    if row.meta is not None:
        line += b',"meta":' + row.meta
    return line.replace(b"\r", b" ").replace(b"\n", b" ") + b"}\n"


# -- tables ------------------------------------------------------------------------------------


def table_of(rows: Rows, topic: str, epoch: int | None, *, folded: bool) -> Any:
    """The columns of an export as an Arrow table.

    `folded`: store the topic as a dictionary. Readers give this type to the name of a folder, so
    they merge the column in the file with the column from the folder.
    """
    import pyarrow as pa

    from spark_jobs.reader.columns import schema_of

    schema = schema_of(Query().columns)
    if not isinstance(rows, list):
        found = _columns_of(rows)
    else:
        columns = list(zip(*rows, strict=True))
        metas = [joined_meta(row) for row in rows]
        found = {
            "seq": pa.array(columns[0], pa.int64()),
            "ts": pa.array([ts * 1000 for ts in columns[1]]).cast(schema.field("ts").type),
            "node": pa.array(columns[2], pa.string()),
            "tag": pa.array(columns[3], pa.string()),
            "data": pa.array(columns[4], pa.binary()).cast(pa.string()),
            "meta": pa.array(metas, pa.binary()).cast(pa.string()),
        }
    found["topic"] = pa.repeat(pa.scalar(topic), len(rows))
    found["epoch"] = pa.repeat(pa.scalar(epoch, pa.int64()), len(rows))
    table = pa.table([found[name] for name in schema.names], schema=schema)
    if folded:
        place = schema.get_field_index("topic")
        table = table.set_column(place, "topic", table["topic"].dictionary_encode())
    return table


def _columns_of(table: Any) -> dict[str, Any]:
    """The columns of a table from segments. The rare rows of bytes are converted one by one."""
    import pyarrow as pa
    import pyarrow.compute as pc

    is_bytes = pc.equal(table["kind"], "bytes")
    if not pc.any(is_bytes).as_py():
        found = {name: table[name] for name in ("seq", "ts", "node", "tag")}
        return found | {name: table[name].cast(pa.string()) for name in ("data", "meta")}
    rows = list(rows_of(table))
    found = {name: table[name] for name in ("seq", "ts", "node", "tag")}
    for name, values in (
        ("data", [row.data for row in rows]),
        ("meta", [joined_meta(row) for row in rows]),
    ):
        found[name] = pa.array(values, pa.binary()).cast(pa.string())
    return found


# -- days and sizes ----------------------------------------------------------------------------


def split_by_day(rows: Rows) -> Iterator[tuple[str, Rows]]:
    """Split parts by the UTC day of their times, which never decrease."""
    import itertools

    if isinstance(rows, list):
        for day, part in itertools.groupby(rows, key=lambda row: row.ts // DAY_MS):
            yield day_text(day), list(part)
        return
    import numpy as np

    days = rows["ts"].cast("int64").to_numpy() // (DAY_MS * 1000)
    edges = [0, *(np.flatnonzero(np.diff(days)) + 1).tolist(), len(days)]
    for first, end in itertools.pairwise(edges):
        if first < end:
            yield day_text(int(days[first])), rows.slice(first, end - first)


def day_text(day: int) -> str:
    """A day since the epoch as `2026-01-31`; years outside the calendar have the form of ISO
    8601.
    """
    try:
        return datetime.fromtimestamp(day * 86_400, UTC).strftime("%Y-%m-%d").rjust(10, "0")
    except (ValueError, OverflowError, OSError):
        import numpy as np

        return str(np.datetime64(day, "D"))


def size_of(rows: Rows) -> int:
    """The approximate memory of rows in bytes."""
    if isinstance(rows, list):
        return sum(len(row.data) + len(row.meta or b"") + 200 for row in rows)
    return int(rows.nbytes)


def span_of(parts: list[Rows]) -> tuple[int, int, int]:
    """(first seq, last seq, rows) of parts of one file."""

    def seq(rows: Rows, at: int) -> int:
        return rows[at].seq if isinstance(rows, list) else int(rows["seq"][at].as_py())

    return seq(parts[0], 0), seq(parts[-1], len(parts[-1]) - 1), sum(map(len, parts))


def schema_json() -> dict[str, Any]:
    """The schema of a Parquet export as Spark's JSON, with the columns of the folders."""
    kinds = {"bigint": "long"}
    fields = [
        {"name": name, "type": kinds.get(kind, kind), "nullable": True, "metadata": {}}
        for name, kind in (*Query().columns, ("day", "date"))
    ]
    found: dict[str, Any] = json.loads(json.dumps({"type": "struct", "fields": fields}))
    return found
