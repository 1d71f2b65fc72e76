"""Request shapes of the routes of views.

Decoded once, defaults filled in; wrong types are `invalid_request` with the field's path. Called by
`api/views/handlers`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from topics_server.api.messages.requests import decode_body
from topics_server.values.errors import invalid
from topics_server.values.limits import SEQ_MAX, VIEW_PARAMS_MAX
from topics_server.values.model import OnDelete, ViewDefinition
from topics_server.views.definition import is_view_name, make_definition, one_query

_I64_MAX: Final = 2**63 - 1


class _Put(msgspec.Struct):
    schema: str | list[str] | None = None
    apply: str | list[str] | None = None
    queries: dict[str, str] = {}
    shortcut: dict[str, Any] | None = None
    on_delete: OnDelete = OnDelete.KEEP


class _Query(msgspec.Struct):
    sql: str | None = None
    query: str | None = None
    params: dict[str, Any] | list[Any] = {}


class _Rebuild(msgspec.Struct):
    skip: int | None = None


_PUT: Final = msgspec.json.Decoder(_Put)
_QUERY: Final = msgspec.json.Decoder(_Query)
_REBUILD: Final = msgspec.json.Decoder(_Rebuild)
VIEW_MEMBERS: Final = _Put.__struct_encode_fields__


class QueryRequest(msgspec.Struct, frozen=True):
    """A query: an SQL statement, or the name of one of the view's queries."""

    sql: str | None
    query: str | None
    params: dict[str, Any] | list[Any]


def decode_view(body: bytes) -> ViewDefinition:
    """The body of a `PUT`."""
    sent = decode_body(_PUT, body)
    return make_definition(
        schema=sent.schema,
        apply=sent.apply,
        queries=sent.queries,
        shortcut=sent.shortcut,
        on_delete=sent.on_delete,
    )


def decode_query(body: bytes) -> QueryRequest:
    """The body of a query; exactly one of `sql` and `query` is given."""
    sent = decode_body(_QUERY, body)
    if (sent.sql is None) == (sent.query is None):
        raise invalid("give either sql or query", "sql")
    _check_params(sent.params)
    sql = None if sent.sql is None else one_query(sent.sql, "sql")
    return QueryRequest(sql, sent.query, sent.params)


def decode_rebuild(body: bytes) -> int | None:
    """The record to skip; None: build the view anew."""
    skip = decode_body(_REBUILD, body or b"{}").skip
    if skip is not None and not 0 < skip <= SEQ_MAX:
        raise invalid("skip must be a seq", "skip")
    return skip


def params_of(query: Mapping[str, str]) -> dict[str, Any]:
    """The parameters of a named query in a URL: `p.key=value`; every value is a text."""
    params = {name[2:]: value for name, value in query.items() if name.startswith("p.")}
    _check_params(params)
    return params


def after_of(query: Mapping[str, str]) -> int | None:
    """`after` of a URL: the record that the answer must reflect."""
    text = query.get("after")
    if text is None:
        return None
    if not text.isascii() or not text.isdigit() or len(text) > 20:
        raise invalid("after must be a seq", "after")
    return min(int(text), SEQ_MAX)


def view_name(name: str, field: str) -> str:
    """A view's or a query's name in a path. Raises `invalid_request`."""
    if not is_view_name(name):
        raise invalid(
            f"the name of a {field} is 1 to 64 letters, digits, _ . - and begins with a letter "
            "or digit",
            field,
        )
    return name


def _check_params(params: dict[str, Any] | list[Any]) -> None:
    if len(params) > VIEW_PARAMS_MAX:
        raise invalid(f"at most {VIEW_PARAMS_MAX} parameters", "params")
    values = params.items() if isinstance(params, dict) else enumerate(params)
    for name, value in values:
        is_number = isinstance(value, int) and not isinstance(value, bool)
        if is_number and not -_I64_MAX - 1 <= value <= _I64_MAX:
            raise invalid("a number is beyond 64 bits", f"params.{str(name)[:64]}")
        if not isinstance(value, str | int | float | bool | None):
            raise invalid(
                "a parameter is a string, a number, a boolean or null", f"params.{str(name)[:64]}"
            )
