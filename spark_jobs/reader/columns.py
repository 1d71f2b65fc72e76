"""Turns rows of a segment into Arrow columns, with numpy and Arrow kernels: no Python code runs per
record.

`data` and `meta` of a record are slices of the bytes that were read. One interleaved offsets
buffer over these bytes makes an array of [payload, gap, payload, gap, ...], and `take` selects
every second element. Names are dictionaries already. Called by `segments`.
"""

from __future__ import annotations

import base64
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from spark_jobs.reader.payload import VARIANT, PayloadMismatch, typed, variants, why_unfit
from topics_server.wal.format.segment import (
    ABSENT,
    TRACE_BYTES,
    TRACED_KIND,
    Array,
    Dictionary,
    SegmentColumns,
)

KINDS: Final = ("json", "text", "bytes")
JSON: Final = 0
BYTES: Final = 2

ARROW_TYPES: Final[dict[str, Any]] = {
    "string": pa.string(),
    "binary": pa.binary(),
    "bigint": pa.int64(),
    "int": pa.int32(),
    "boolean": pa.bool_(),
    "timestamp": pa.timestamp("us", tz="UTC"),
    "variant": VARIANT,
}


def schema_of(columns: tuple[tuple[str, str], ...], struct: Any = None) -> Any:
    """The Arrow schema of (name, Spark type) pairs; `struct` is the type of parsed data."""
    types = {**ARROW_TYPES, "struct": struct}
    return pa.schema([pa.field(name, types[kind]) for name, kind in columns])


def picked(rows: Array, chosen: Array) -> Array:
    """The chosen rows, ascending; a view if they are consecutive, because copying rows is
    expensive.
    """
    first, last = int(chosen[0]), int(chosen[-1])
    if last - first + 1 == len(chosen):
        return rows[first : last + 1]
    return rows[chosen]


class Rows:
    """Chosen rows of one segment, and the bytes of their records.

    `starts`, `ends`: where each chosen record begins and ends in `content` (None if no payload is
    wanted).
    `is_dead`: chosen rows that are deleted; their payload is never returned. `struct`: the type of
    parsed data, if requested; `is_failfast`: a payload that does not fit raises an error instead of
    becoming null.
    """

    def __init__(
        self,
        columns: SegmentColumns,
        chosen: Array,
        is_dead: Array | None,
        content: bytes | None = None,
        starts: Array | None = None,
        ends: Array | None = None,
        *,
        struct: Any = None,
        is_failfast: bool = False,
    ) -> None:
        self.columns = columns
        self.chosen = chosen
        self.is_dead = is_dead
        self.content = content
        self.starts = starts
        self.ends = ends
        self.struct = struct
        self.is_failfast = is_failfast
        self.rows = picked(columns.rows, chosen)
        self.kinds = self.rows["kind"] & ~np.uint8(TRACED_KIND)

    def column(self, name: str, kind: str, topic: str, epoch: int) -> Any:
        """One column as an Arrow array of the type `kind`."""
        count = len(self.rows)
        if name == "topic":
            return pa.repeat(pa.scalar(topic, pa.string()), count)
        if name == "epoch":
            return pa.repeat(pa.scalar(epoch, pa.int64()), count)
        if name == "seq":
            return pa.array(self.columns.first_seq + self.chosen, pa.int64())
        if name == "ts":
            return self._times(kind)
        if name == "tag":
            return _names(self.columns.tags, self.rows["tag_id"])
        if name == "node":
            return _names(self.columns.nodes, self.rows["node_id"])
        if name == "deleted":
            dead = np.zeros(count, "?") if self.is_dead is None else self.is_dead
            return pa.array(dead)
        if name == "kind":
            return pa.array(KINDS, pa.string()).take(pa.array(self.kinds.astype("i4")))
        if name == "hop":
            return pa.array(self.rows["hop"].astype("i4"))
        if name == "bytes":
            return pa.array(self.rows["counted_bytes"].astype("i8"))
        if kind in ("struct", "variant"):
            return self._parsed(kind, topic)
        return self._payload(name, kind)

    def _times(self, kind: str) -> Any:
        times = self.rows["ts"].astype("i8")
        if kind == "timestamp":
            return pa.array(times * 1000).cast(ARROW_TYPES["timestamp"])
        return pa.array(times)

    def _payload(self, name: str, kind: str) -> Any:
        assert self.content is not None
        assert self.starts is not None
        assert self.ends is not None
        rows = self.rows
        begins, metas = self.columns.payloads(rows, self.starts, self.ends)
        lengths = rows["data_bytes"].astype("i8")
        absent = self.is_dead
        if name == "meta":
            # The trace is not part of `meta`; a deleted record has neither.
            traced = ((rows["kind"] & TRACED_KIND) != 0) & (rows["meta_bytes"] >= TRACE_BYTES)
            begins = metas + TRACE_BYTES * traced
            lengths = rows["meta_bytes"].astype("i8") - TRACE_BYTES * traced
            absent = lengths == 0 if absent is None else absent | (lengths == 0)
        if kind == "string" and name == "data" and (self.kinds == BYTES).any():
            raw = _slices(self.content, begins, lengths, absent, pa.binary())
            return _as_text(raw, self.kinds)
        return _slices(self.content, begins, lengths, absent, ARROW_TYPES[kind])

    def _parsed(self, kind: str, topic: str) -> Any:
        """Data as a struct or a VARIANT.

        With `is_failfast`, raises `PayloadMismatch` with the seq.
        """
        payloads = self._payload("data", "binary")
        is_json = self.kinds == JSON
        if kind == "variant":
            made, unfit = variants(payloads, is_json)
        else:
            made, unfit = typed(payloads, is_json, self.struct)
        if len(unfit) and self.is_failfast:
            place = int(unfit[0])
            seq = self.columns.first_seq + int(self.chosen[place])
            why = "it is not JSON"
            if is_json[place] and kind == "struct":
                why = why_unfit(payloads[place].as_py(), self.struct)
            raise PayloadMismatch(f"the payload of seq {seq} of topic {topic} does not fit: {why}")
        return made


def _slices(content: bytes, begins: Array, lengths: Array, absent: Array | None, kind: Any) -> Any:
    """Ascending slices of `content` that do not overlap, as one array; null where `absent`."""
    count = len(begins)
    offsets = np.empty(2 * count, "<i4")
    offsets[::2] = begins
    offsets[1::2] = begins + lengths
    mixed = pa.Array.from_buffers(
        kind, max(2 * count - 1, 0), [None, pa.py_buffer(offsets), pa.py_buffer(content)]
    )
    wanted = pa.array(np.arange(0, 2 * count, 2, dtype="<i4"), mask=absent)
    return mixed.take(wanted)


def _names(names: Dictionary, ids: Array) -> Any:
    """A column of names; null where absent."""
    if not len(names):
        return pa.nulls(len(ids), pa.string())
    offsets = np.ascontiguousarray(names.offsets, "<i4")
    texts = pa.Array.from_buffers(
        pa.string(), len(names), [None, pa.py_buffer(offsets), pa.py_buffer(names.text)]
    )
    absent = ids == ABSENT
    wanted = np.where(absent, 0, ids).astype("<i4")
    return texts.take(pa.array(wanted, mask=absent if absent.any() else None))


def _as_text(raw: Any, kinds: Array) -> Any:
    """Payloads in the form of a diff: bytes as Base64, others unchanged."""
    is_bytes = pa.array(kinds == BYTES)
    coded = [
        None if each is None else base64.b64encode(each).decode("ascii")
        for each in raw.filter(is_bytes).to_pylist()
    ]
    others = pc.if_else(is_bytes, pa.scalar(b"", pa.binary()), raw).cast(pa.string())
    return pc.replace_with_mask(others, is_bytes, pa.array(coded, pa.string()))
