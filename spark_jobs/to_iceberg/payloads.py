"""Types of payloads: the notation of `--schema`, and the allowed changes of a table's column. Pure.

Iceberg has no integers of 8 and 16 bits, so `tinyint` and `smallint` are `int`. Names must not
contain a dot, and must differ in more than their case: engines write paths with dots, and many
ignore case. Names must also differ in data files, where pyiceberg writes `y z` as `y_x20z`. Arrays
must not hold structs: pyiceberg 0.12 writes a missing array of structs as an empty array.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import count
from typing import Any, Final

import pyarrow as pa
from pyiceberg.schema import Schema, make_compatible_name
from pyiceberg.types import (
    BooleanType,
    DoubleType,
    FloatType,
    IntegerType,
    ListType,
    LongType,
    NestedField,
    StringType,
    StructType,
)

from spark_jobs.reader.query import BadOption
from spark_jobs.to_iceberg.catalogs import LakeRefused

DEPTH_MAX: Final = 32
_SCALARS: Final[dict[str, Any]] = {
    "string": pa.string(),
    "bigint": pa.int64(),
    "int": pa.int32(),
    "smallint": pa.int32(),
    "tinyint": pa.int32(),
    "double": pa.float64(),
    "float": pa.float32(),
    "boolean": pa.bool_(),
}
_ALIASES: Final = {
    "long": "bigint",
    "integer": "int",
    "short": "smallint",
    "byte": "tinyint",
    "real": "float",
}
_STORED: Final = (
    ("string", pa.string(), StringType),
    ("bigint", pa.int64(), LongType),
    ("int", pa.int32(), IntegerType),
    ("double", pa.float64(), DoubleType),
    ("float", pa.float32(), FloatType),
    ("boolean", pa.bool_(), BooleanType),
)
_ICEBERG: Final[dict[Any, Any]] = {arrow: kind for _, arrow, kind in _STORED}
_ARROW: Final[dict[Any, Any]] = {kind: arrow for _, arrow, kind in _STORED}
_NAMES: Final[dict[Any, str]] = {kind: name for name, _, kind in _STORED}
# Types to which Iceberg can change a column without rewriting its files.
_PROMOTIONS: Final = ((IntegerType, LongType), (FloatType, DoubleType))
# A name in backticks, a word, or a sign.
_TOKEN: Final = re.compile(r"`(?:[^`]|``)+`|\w+|[^\s\w]")


# -- the notation --------------------------------------------------------------------------------


def parse_schema(text: str) -> Any:
    """The Arrow struct of fields in Spark's notation. Raises `BadOption`."""
    tokens = _Tokens(text)
    kind = _struct(tokens, 1)
    if not tokens.is_end:
        raise tokens.unexpected("a comma")
    return kind


class _Tokens:
    """The tokens of a schema that are not taken yet."""

    def __init__(self, text: str) -> None:
        self._left: Final[list[str]] = _TOKEN.findall(text)[::-1]

    @property
    def is_end(self) -> bool:
        """Whether all tokens are taken."""
        return not self._left

    def took(self, token: str) -> bool:
        """Take this token if it is the next one. Returns whether it was."""
        if self._left and self._left[-1].lower() == token:
            self._left.pop()
            return True
        return False

    def word(self, wanted: str) -> str:
        """Take a word, or a name in backticks."""
        if not self._left or not re.match(r"\w|`.", self._left[-1]):
            raise self.unexpected(wanted)
        return self._left.pop()

    def unexpected(self, wanted: str) -> BadOption:
        """The error for an unexpected token."""
        found = repr(self._left[-1]) if self._left else "the end"
        return BadOption(
            f"--schema: {wanted} is missing before {found}; fields are such as "
            "'a int, b struct<c: string>'"
        )


def _struct(tokens: _Tokens, depth: int) -> Any:
    fields: list[Any] = []
    while not fields or tokens.took(","):
        word = tokens.word("a field")
        name = word[1:-1].replace("``", "`") if word[0] == "`" else word
        if "." in name:
            raise BadOption(f"--schema: a field of a table has no dot in its name: {name!r}")
        tokens.took(":")
        fields.append(pa.field(name, _type(tokens, depth)))
        if tokens.took("not"):
            raise BadOption("--schema: no field can be NOT NULL, any may be missing")
    twin = _twin(field.name for field in fields)
    if twin is not None:
        raise BadOption(
            "--schema: a field is named twice (case does not count, and data files have signs as "
            f"their codes, a blank as _x20): {twin!r}"
        )
    return pa.struct(fields)


def _type(tokens: _Tokens, depth: int) -> Any:
    if depth > DEPTH_MAX:
        raise BadOption(f"--schema: types are nested at most {DEPTH_MAX} deep")
    name = tokens.word("a type").lower()
    name = _ALIASES.get(name, name)
    if name in _SCALARS:
        return _SCALARS[name]
    if name not in ("array", "struct"):
        known = ", ".join((*_SCALARS, "array<...>", "struct<...>"))
        raise BadOption(f"--schema: {name} is not offered; there are {known}")
    if not tokens.took("<"):
        raise tokens.unexpected("<")
    kind = _struct(tokens, depth + 1) if name == "struct" else _array(tokens, depth + 1)
    if not tokens.took(">"):
        raise tokens.unexpected(">")
    return kind


def _array(tokens: _Tokens, depth: int) -> Any:
    item = _type(tokens, depth)
    if pa.types.is_struct(item):
        raise BadOption("--schema: an array of structs is not offered; leave it out, data has it")
    return pa.list_(pa.field("element", item))


def _twin(names: Iterable[str]) -> str | None:
    """The first name whose form in data files equals that of an earlier name, ignoring case."""
    seen: set[str] = set()
    for name in names:
        stored = make_compatible_name(name).lower()
        if stored in seen:
            return name
        seen.add(stored)
    return None


# -- tables --------------------------------------------------------------------------------------


def column_of(name: str, kind: Any) -> Schema:
    """The Iceberg schema of one optional column, with its own ids."""
    ids = count(1)
    return Schema(NestedField(next(ids), name, _iceberg(kind, ids), required=False))


def _iceberg(kind: Any, ids: Iterator[int]) -> Any:
    if pa.types.is_struct(kind):
        fields = [kind.field(number) for number in range(kind.num_fields)]
        return StructType(
            *(
                NestedField(next(ids), field.name, _iceberg(field.type, ids), required=False)
                for field in fields
            )
        )
    if pa.types.is_list(kind):
        return ListType(next(ids), _iceberg(kind.value_type, ids), element_required=False)
    return _ICEBERG[kind]()


def struct_of(schema: Schema, name: str) -> Any:
    """The Arrow struct of a table's column, without the fields that `--schema` cannot express.

    None if no field is left or the column is no struct.
    """
    kinds = [column.field_type for column in schema.fields if column.name == name]
    return _arrow(kinds[0]) if kinds and isinstance(kinds[0], StructType) else None


def _arrow(kind: Any) -> Any:
    if isinstance(kind, StructType):
        known = [(field.name, _arrow(field.field_type)) for field in kind.fields]
        fields = [pa.field(name, arrow) for name, arrow in known if arrow is not None]
        return pa.struct(fields) if fields else None
    if isinstance(kind, ListType):
        item = _arrow(kind.element_type)
        is_offered = item is not None and not pa.types.is_struct(item)
        return pa.list_(pa.field("element", item)) if is_offered else None
    return _ARROW.get(type(kind))


def as_struct(array: Any, kind: Any) -> Any:
    """An array of structs as structs of another type.

    Fields are matched by name; missing fields are null.

    Arrow's own cast does this from pyarrow 19 on.
    """
    if not pa.types.is_struct(kind):
        return array.cast(kind)
    fields = [kind.field(number) for number in range(kind.num_fields)]
    found = [
        as_struct(array.field(field.name), field.type)
        if array.type.get_field_index(field.name) >= 0
        else pa.nulls(len(array), field.type)
        for field in fields
    ]
    return pa.StructArray.from_arrays(found, fields=fields, mask=array.is_null())


def check_evolution(known: Schema, asked: Schema, table: str) -> None:
    """Refuse a schema to which a table's columns cannot change. Raises `LakeRefused`."""
    _check_struct(known.as_struct(), asked.as_struct(), "", table)


def _check_struct(known: Any, asked: Any, path: str, table: str) -> None:
    fields = {field.name: field.field_type for field in known.fields}
    for field in asked.fields:
        if field.name in fields:
            _check(fields[field.name], field.field_type, f"{path}{field.name}", table)
    new = [field.name for field in asked.fields if field.name not in fields]
    twin = _twin((*fields, *new))
    if twin is not None:
        raise LakeRefused(
            f"{table}: field {path}{twin} differs from one of the table only in its case, or is "
            "the same in data files; many engines take them for one"
        )


def _check(known: Any, asked: Any, path: str, table: str) -> None:
    if isinstance(known, StructType) and isinstance(asked, StructType):
        _check_struct(known, asked, f"{path}.", table)
    elif isinstance(known, ListType) and isinstance(asked, ListType):
        _check(known.element_type, asked.element_type, f"{path}.element", table)
    elif known != asked and (type(known), type(asked)) not in _PROMOTIONS:
        raise LakeRefused(
            f"{table}: field {path} is {_named(known)} in the table, and the schema asks for "
            f"{_named(asked)}; Iceberg changes int to bigint and float to double, nothing else"
        )


def _named(kind: Any) -> str:
    if isinstance(kind, StructType):
        return "a struct"
    return "an array" if isinstance(kind, ListType) else _NAMES.get(type(kind), str(kind))
