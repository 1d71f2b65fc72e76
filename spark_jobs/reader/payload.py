"""Turns payloads into a typed column: many at once by Arrow's JSON reader, or one by one into
VARIANT.

`typed` returns a struct of the user's fields. Each payload becomes a line `{"d":PAYLOAD}`, and all
lines are read together. A line makes at least one row, because it opens an object; a newline inside
a string, or the next line's brace inside an open value, is an error. So if there are as many rows
as lines, each line is one row, and no record can get another's values. If a line does not fit, the
lines are divided until each such line is alone. So the result for a record never depends on its
neighbours.

A payload fits if it is a JSON object whose named fields are of the requested kinds, null or absent;
other fields are ignored. JSON `null` is null. Pure; called by `columns`.
"""

from __future__ import annotations

import json
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pj

from topics_server.wal.format.segment import Array

VARIANT: Final = pa.struct(
    [
        pa.field("value", pa.binary(), nullable=False),
        pa.field("metadata", pa.binary(), nullable=False, metadata={b"variant": b"true"}),
    ]
)
_FIELD: Final = "d"
_OPEN, _CLOSE = (pa.scalar(text, pa.binary()) for text in (b'{"d":', b"}\n"))
_NOTHING: Final = pa.scalar(b"", pa.binary())
# Number of parts into which lines are divided when one of them does not fit.
_PARTS: Final = 4


class PayloadMismatch(ValueError):
    """A payload does not fit, in a read with `failfast`."""


def typed(payloads: Any, is_json: Array, kind: Any) -> tuple[Any, Array]:
    """Payloads (binary, or null) as an array of the struct `kind`.

    Also returns the positions of payloads that do not fit; these are null in the array, like
    payloads that are not JSON.
    """
    asked = is_json & np.asarray(payloads.is_valid())
    positions = np.flatnonzero(asked)
    lines = pc.binary_join_element_wise(_OPEN, payloads, _CLOSE, _NOTHING)
    is_all = len(positions) == len(payloads)
    whole = _read(lines if is_all else lines.take(pa.array(positions)), kind)
    if whole is not None and is_all:
        return whole, positions[:0]
    found: list[tuple[Array, Any]] = []
    if whole is not None:
        found.append((positions, whole))
    else:
        asked_for = payloads.take(pa.array(positions)).to_pylist()
        unlikely = np.fromiter((_cannot_fit(each, kind) for each in asked_for), "?", len(positions))
        _divide(lines, positions[~unlikely], kind, found)
    fitting = np.concatenate([positions[:0], *(part for part, _ in found)])
    parsed = pa.chunked_array([array for _, array in found], kind).combine_chunks()
    source = np.zeros(len(payloads), "<i4")
    source[fitting] = np.arange(len(fitting), dtype="<i4")
    is_missing = np.ones(len(payloads), "?")
    is_missing[fitting] = False
    unfit = np.flatnonzero(np.asarray(payloads.is_valid()) & is_missing)
    return parsed.take(pa.array(source, mask=is_missing)), unfit


def _divide(lines: Any, positions: Array, kind: Any, found: list[tuple[Array, Any]]) -> None:
    """Read the lines at `places` in parts as large as possible; leave out those that do not fit."""
    if not len(positions):
        return
    rows = _read(lines.take(pa.array(positions)), kind)
    if rows is not None:
        found.append((positions, rows))
    elif len(positions) > 1:
        for part in np.array_split(positions, min(_PARTS, len(positions))):
            _divide(lines, part, kind, found)


def _read(lines: Any, kind: Any) -> Any | None:
    """The lines' payloads as one struct array; None unless every line is one fitting row."""
    first, last = np.frombuffer(lines.buffers()[1], "<i4")[
        [lines.offset, lines.offset + len(lines)]
    ].tolist()
    text = lines.buffers()[2].slice(first, last - first)
    try:
        rows = _rows_of(text, kind)
    except pa.ArrowInvalid:
        return None
    return rows if len(rows) == len(lines) else None


def _rows_of(text: Any, kind: Any) -> Any:
    """The values of the field in all objects of a text, read as one block."""
    table = pj.read_json(
        pa.BufferReader(text),
        read_options=pj.ReadOptions(use_threads=False, block_size=len(text) + 1),
        parse_options=pj.ParseOptions(
            explicit_schema=pa.schema([(_FIELD, kind)]),
            newlines_in_values=True,
            unexpected_field_behavior="ignore",
        ),
    )
    return table.column(_FIELD).combine_chunks()


def why_unfit(payload: bytes, kind: Any) -> str:
    """The reader's message for a payload that does not fit."""
    if payload.lstrip()[:1] != b"{":
        return "it is not a JSON object"
    try:
        _rows_of(_OPEN.as_py() + payload + _CLOSE.as_py(), kind)
    except pa.ArrowInvalid as error:
        said = str(error).removeprefix("JSON parse error: ").removesuffix(" in row 0")
        return said.replace("Column(/d", "Column(")
    return "it is more than one value"


# -- payloads that cannot fit
# --------------------------------------------------------------------------


def _cannot_fit(payload: bytes, kind: Any) -> bool:
    """Whether Arrow's reader certainly refuses a payload, alone or among others.

    This avoids dividing lines where many do not fit; False proves nothing.
    """
    try:
        return _is_other(json.loads(payload), kind)
    except (ValueError, RecursionError):
        return False


def _is_other(value: Any, kind: Any) -> bool:
    """Whether a JSON value, or a value within it, has another kind than requested."""
    if value is None:
        return False
    if pa.types.is_struct(kind):
        return type(value) is not dict or any(
            _is_other(value.get(kind.field(number).name), kind.field(number).type)
            for number in range(kind.num_fields)
        )
    if pa.types.is_list(kind):
        return type(value) is not list or any(_is_other(item, kind.value_type) for item in value)
    if pa.types.is_string(kind):
        return type(value) is not str
    if pa.types.is_boolean(kind):
        return type(value) is not bool
    if pa.types.is_integer(kind):
        return type(value) is not int
    return type(value) not in (int, float)


# -- VARIANT -----------------------------------------------------------------------------------


def variants(payloads: Any, is_json: Array) -> tuple[Any, Array]:
    """Payloads as VARIANT, by one Python call each to PySpark's encoder, and the positions of
    payloads that are not JSON.
    """
    from pyspark.sql.variant_utils import VariantUtils

    unfit: list[int] = []
    values: list[dict[str, bytes] | None] = []
    for place, payload in enumerate(payloads.to_pylist()):
        made: dict[str, bytes] | None = None
        if payload is not None:
            try:
                if not is_json[place]:
                    raise ValueError("not JSON")
                value, metadata = VariantUtils.parse_json(payload.decode())
                made = {"value": value, "metadata": metadata}
            except (ValueError, RecursionError):
                unfit.append(place)
        values.append(made)
    return pa.array(values, VARIANT), np.array(unfit, "<i8")
