"""Expands the shortcuts of a view definition to SQL. Pure.

A shortcut is a short form of a frequent definition: the newest record of each tag, a counter for
each tag, the newest record of each key, sums per interval. The expansion is ordinary SQL. It is
stored with the definition and returned by `GET`, so that it can be copied and changed. Records
whose data is not JSON have no key and no value: such records are skipped. Called by `definition`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec

from topics_server.values.errors import invalid

POINTER_CHARS_MAX: Final = 256
SUMS_MAX: Final = 16
BUCKET_MS_MAX: Final = 366 * 86_400_000

_NUMBER: Final = re.compile(r"0|[1-9][0-9]{0,8}")
_WORD: Final = re.compile(r"[^a-z0-9]+")
_DURATION: Final = re.compile(r"([0-9]{1,12})(ms|s|m|h|d)")
_UNITS_MS: Final = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_ROWS: Final = "LIMIT 1000"


class Expansion(msgspec.Struct, frozen=True):
    """The SQL of a shortcut: `schema` and `apply` are statements, `queries` are named."""

    schema: list[str]
    apply: list[str]
    queries: dict[str, str]


def expand(shortcut: Mapping[str, Any]) -> Expansion:
    """The SQL of a shortcut such as `{"latest_by_tag": true}`. Raises `invalid_request`."""
    if len(shortcut) != 1:
        raise invalid(f"shortcut must have one member of {_names()}", "shortcut")
    name, argument = next(iter(shortcut.items()))
    maker = _MAKERS.get(name)
    if maker is None:
        raise invalid(f"shortcut must be one of {_names()}", "shortcut")
    return maker(argument)


def _names() -> str:
    return ", ".join(_MAKERS)


def _latest_by_tag(argument: object) -> Expansion:
    _only_true(argument, "latest_by_tag")
    return Expansion(
        schema=[
            "CREATE TABLE latest (tag TEXT PRIMARY KEY, seq INTEGER NOT NULL, ts INTEGER NOT NULL, "
            "node TEXT, data, meta TEXT) WITHOUT ROWID"
        ],
        apply=[
            "INSERT INTO latest (tag, seq, ts, node, data, meta) "
            "SELECT :tag, :seq, :ts, :node, :data, :meta WHERE :tag IS NOT NULL "
            f"{_REPLACE.format(key='tag')}"
        ],
        queries={
            "all": f"SELECT tag, seq, ts, node, data, meta FROM latest ORDER BY tag {_ROWS}",
            "get": "SELECT tag, seq, ts, node, data, meta FROM latest WHERE tag = :tag",
        },
    )


def _count_by_tag(argument: object) -> Expansion:
    _only_true(argument, "count_by_tag")
    return Expansion(
        schema=[
            "CREATE TABLE counts (tag TEXT PRIMARY KEY, count INTEGER NOT NULL, "
            "last_seq INTEGER NOT NULL, last_ts INTEGER NOT NULL) WITHOUT ROWID"
        ],
        apply=[
            "INSERT INTO counts (tag, count, last_seq, last_ts) "
            "SELECT :tag, 1, :seq, :ts WHERE :tag IS NOT NULL "
            "ON CONFLICT (tag) DO UPDATE SET count = count + 1, last_seq = excluded.last_seq, "
            "last_ts = excluded.last_ts"
        ],
        queries={
            "all": f"SELECT tag, count, last_seq, last_ts FROM counts ORDER BY tag {_ROWS}",
            "top": f"SELECT tag, count FROM counts ORDER BY count DESC, tag {_ROWS}",
            "get": "SELECT tag, count, last_seq, last_ts FROM counts WHERE tag = :tag",
        },
    )


_REPLACE: Final = (
    "ON CONFLICT ({key}) DO UPDATE SET seq = excluded.seq, ts = excluded.ts, "
    "node = excluded.node, data = excluded.data, meta = excluded.meta"
)


def _latest_by_key(argument: object) -> Expansion:
    value = _value_at(argument, "shortcut.latest_by_key")
    return Expansion(
        schema=[
            "CREATE TABLE latest (key PRIMARY KEY NOT NULL, seq INTEGER NOT NULL, "
            "ts INTEGER NOT NULL, tag TEXT, node TEXT, data, meta TEXT) WITHOUT ROWID"
        ],
        apply=[
            "INSERT INTO latest (key, seq, ts, tag, node, data, meta) "
            f"SELECT key, :seq, :ts, :tag, :node, :data, :meta FROM (SELECT {value} AS key) "
            f"WHERE key IS NOT NULL {_REPLACE.format(key='key')}, tag = excluded.tag"
        ],
        queries={
            "all": f"SELECT key, seq, ts, tag, node, data, meta FROM latest ORDER BY key {_ROWS}",
            "get": "SELECT key, seq, ts, tag, node, data, meta FROM latest WHERE key = :key",
        },
    )


class _Timeseries(msgspec.Struct, forbid_unknown_fields=True):
    bucket: int | str
    sum: list[str] = []
    by_tag: bool = False


def _timeseries(argument: object) -> Expansion:
    try:
        asked = msgspec.convert(argument, _Timeseries)
    except msgspec.ValidationError as error:
        raise invalid(f"timeseries: {error}", "shortcut.timeseries") from None
    bucket_ms = _bucket_ms(asked.bucket)
    if len(asked.sum) > SUMS_MAX:
        raise invalid(f"at most {SUMS_MAX} sums", "shortcut.timeseries.sum")
    sums: dict[str, str] = {}
    for index, pointer in enumerate(asked.sum):
        value = _value_at(pointer, f"shortcut.timeseries.sum[{index}]", only_numbers=True)
        sums[_column(pointer, sums)] = value
    key = ["bucket", "tag"] if asked.by_tag else ["bucket"]
    columns = [*key, "count", *sums]
    # Store an absent tag as an empty one, because NULL cannot be a key.
    values = [f":ts - :ts % {bucket_ms}"]
    values += ["coalesce(:tag, '')"] if asked.by_tag else []
    values += ["1", *(f"coalesce({value}, 0)" for value in sums.values())]
    added = ["count = count + 1", *(f"{name} = {name} + excluded.{name}" for name in sums)]
    shown = ", ".join(columns)
    return Expansion(
        schema=[
            "CREATE TABLE series (bucket INTEGER NOT NULL, "
            + ("tag TEXT NOT NULL, " if asked.by_tag else "")
            + "count INTEGER NOT NULL, "
            + "".join(f"{name} NOT NULL, " for name in sums)
            + f"PRIMARY KEY ({', '.join(key)})) WITHOUT ROWID"
        ],
        apply=[
            f"INSERT INTO series ({shown}) SELECT {', '.join(values)} WHERE true "
            f"ON CONFLICT ({', '.join(key)}) DO UPDATE SET {', '.join(added)}"
        ],
        queries={
            "all": f"SELECT {shown} FROM series ORDER BY bucket DESC {_ROWS}",
            "between": f"SELECT {shown} FROM series WHERE bucket >= :from AND bucket < :to "
            f"ORDER BY bucket {_ROWS}",
        },
    )


_MAKERS: Final[dict[str, Callable[[object], Expansion]]] = {
    "latest_by_tag": _latest_by_tag,
    "count_by_tag": _count_by_tag,
    "latest_by_key": _latest_by_key,
    "timeseries": _timeseries,
}


def _only_true(argument: object, name: str) -> None:
    if argument is not True:
        raise invalid(f"{name} must be true", f"shortcut.{name}")


def _bucket_ms(bucket: int | str) -> int:
    field = "shortcut.timeseries.bucket"
    found = bucket if isinstance(bucket, int) else 0
    if isinstance(bucket, str):
        match = _DURATION.fullmatch(bucket)
        if match is None:
            raise invalid("bucket must be milliseconds or a duration such as 1m or 1h", field)
        found = int(match[1]) * _UNITS_MS[match[2]]
    if not 0 < found <= BUCKET_MS_MAX:
        raise invalid(f"bucket must be between 1 and {BUCKET_MS_MAX} ms", field)
    return found


def _column(pointer: str, taken: Mapping[str, str]) -> str:
    """A column name from the last member of a pointer."""
    word = _WORD.sub("_", pointer.rsplit("/", 1)[-1].lower()).strip("_")
    name = f"sum_{word or 'value'}"
    while name in taken:
        name += "_"
    return name


def _value_at(pointer: object, field: str, *, only_numbers: bool = False) -> str:
    """An SQL expression for the value at a JSON pointer in `:data`; NULL where there is none."""
    if not isinstance(pointer, str):
        raise invalid(f"{field} must be a JSON pointer", field)
    if not pointer.startswith("/") or len(pointer) > POINTER_CHARS_MAX:
        raise invalid(
            f"{field} must be a JSON pointer such as /user/id, "
            f"at most {POINTER_CHARS_MAX} characters",
            field,
        )
    paths = [_quoted(path) for path in _json_paths(pointer, field)]
    if only_numbers:
        whens = [
            f"WHEN json_type(:data, {path}) IN ('integer', 'real') THEN json_extract(:data, {path})"
            for path in paths
        ]
        inner = f"CASE {' '.join(whens)} END"
    else:
        found = [f"json_extract(:data, {path})" for path in paths]
        inner = found[0] if len(found) == 1 else f"coalesce({', '.join(found)})"
    return f"CASE WHEN typeof(:data) = 'text' THEN {inner} END"


def _json_paths(pointer: str, field: str) -> list[str]:
    """The database's paths for a pointer: a number may be an index or a member's name."""
    paths = ["$"]
    for escaped in pointer[1:].split("/"):
        name = escaped.replace("~1", "/").replace("~0", "~")
        if '"' in name or "\0" in name:
            raise invalid("a member's name must not contain a quotation mark", field)
        members = [f'{path}."{name}"' for path in paths]
        if _NUMBER.fullmatch(name):
            members += [f"{path}[{name}]" for path in paths]
        if len(members) > 4:
            raise invalid("a pointer has at most two numbers", field)
        paths = members
    return paths


def _quoted(text: str) -> str:
    """An SQL string literal."""
    return "'" + text.replace("'", "''") + "'"
