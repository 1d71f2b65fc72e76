"""Requests of views as values, and the values of their answers.

`async_view` and `blocking_view` perform a `Call`. Each of them may be sent twice without harm.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final
from urllib.parse import urlencode

import msgspec

from topics_server.client.addresses import checked_url, segment
from topics_server.client.calls import DEFAULT_URL, Call, reader

# The longest time that a server waits for `after` (the upper bound of TOPICS_VIEW_AFTER_MS), ms.
_AFTER_MS_MAX: Final = 60_000
Params = Mapping[str, Any] | Sequence[Any]


class QueryResult(msgspec.Struct, frozen=True):
    """Rows of a query. They reflect every record up to `processed_sequence`.

    `truncated`: the query had more rows than an answer may hold.
    """

    columns: list[str]
    rows: list[list[Any]]
    processed_sequence: int
    truncated: bool = False

    def dicts(self) -> list[dict[str, Any]]:
        """Each row as a dict by column names."""
        return [dict(zip(self.columns, row, strict=True)) for row in self.rows]


class RecordError(msgspec.Struct, frozen=True):
    """The record at which a view stopped; `seq` 0: no record is at fault."""

    seq: int
    statement: str
    message: str


class ViewProgress(msgspec.Struct, frozen=True):
    """The progress of a view. `status`: ready, building, failed or waiting."""

    view_name: str
    processed_sequence: int
    status: str
    lag: int
    bytes: int
    head_seq: int
    known_from_seq: int = 1
    leader_status: str | None = None
    building_sequence: int | None = None
    last_error: RecordError | None = None


class Defined(msgspec.Struct, frozen=True):
    """The outcome of a definition.

    `apply` and the other members have the SQL, also for a shortcut.
    """

    created: bool
    changed: bool
    schema: list[str]
    apply: list[str]
    queries: dict[str, str]


class _Dropped(msgspec.Struct):
    deleted: bool


read_rows: Final = reader(QueryResult)
_read_progress: Final = reader(ViewProgress)
_read_defined: Final = reader(Defined)
_read_dropped: Final = reader(_Dropped)


class ViewAddress(msgspec.Struct, frozen=True):
    """A view and its server."""

    url: str
    topic: str
    name: str

    def path(self, rest: str = "") -> str:
        """The path of the view; each name is quoted into one segment."""
        return f"/v0/topics/{segment(self.topic)}/views/{segment(self.name)}{rest}"


def view_address(topic: str, name: str, url: str | None) -> ViewAddress:
    """The address of a view. Raises `ValueError`."""
    base = url or DEFAULT_URL
    checked_url(base, DEFAULT_URL)
    if not topic or not name:
        raise ValueError("a topic's and a view's name must not be empty")
    found = ViewAddress(base.rstrip("/"), topic, name)
    found.path()  # raise for a wrong name now, not at its first use
    return found


def define(
    where: ViewAddress,
    *,
    schema: str | Sequence[str] | None,
    apply: str | Sequence[str] | None,
    queries: Mapping[str, str] | None,
    shortcut: Mapping[str, Any] | None,
    on_delete: str | None,
) -> Call[Defined]:
    """Define the view, or change its definition."""
    fields = {
        "schema": schema,
        "apply": apply,
        "queries": queries,
        "shortcut": shortcut,
        "on_delete": on_delete,
    }
    body = msgspec.json.encode({name: value for name, value in fields.items() if value is not None})
    return Call(method="PUT", path=where.path(), body=body, read=_read_defined, repeatable=True)


def query(
    where: ViewAddress, sql: str | None, name: str | None, params: Params, after: int | None
) -> Call[QueryResult]:
    """Run a statement, or a named query."""
    if (sql is None) == (name is None):
        raise ValueError("give either sql or the name of a query")
    asked: dict[str, Any] = {"sql": sql} if sql is not None else {"query": name}
    body = msgspec.json.encode({**asked, "params": params})
    rest = "/query" if after is None else f"/query?{urlencode({'after': after})}"
    return Call(
        method="POST",
        path=where.path(rest),
        body=body,
        read=read_rows,
        repeatable=True,
        wait_ms=0 if after is None else _AFTER_MS_MAX,
    )


def progress(where: ViewAddress) -> Call[ViewProgress]:
    """The progress of the view."""
    return Call(
        method="GET", path=where.path("/stats"), body=None, read=_read_progress, repeatable=True
    )


def rebuild(where: ViewAddress, skip: int | None) -> Call[ViewProgress]:
    """Build the view anew, or skip the record at which the view stopped."""
    body = b"{}" if skip is None else msgspec.json.encode({"skip": skip})
    path = where.path("/rebuild")
    return Call(method="POST", path=path, body=body, read=_read_progress, repeatable=False)


def drop(where: ViewAddress) -> Call[bool]:
    """Delete the view."""

    def read(answer: bytes) -> bool:
        return _read_dropped(answer).deleted

    return Call(method="DELETE", path=where.path(), body=None, read=read, repeatable=True)


def live_path(where: ViewAddress, name: str, params: Mapping[str, str | int | float]) -> str:
    """The path of an event stream of a named query."""
    asked = {"query": name, **{f"p.{key}": value for key, value in params.items()}}
    return where.path(f"/live?{urlencode(asked)}")
