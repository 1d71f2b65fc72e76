"""Checks a view definition before anything runs it.

The body of a `PUT` becomes a `ViewDefinition`: statements are split, a shortcut is expanded, and
sizes are limited. The database (`sandbox`), in a separate process, decides whether the SQL is valid
and allowed. Called by `api/views/requests`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from topics_server.values.errors import clipped, invalid
from topics_server.values.limits import (
    VIEW_QUERIES_MAX,
    VIEW_SQL_BYTES_MAX,
    VIEW_STATEMENTS_MAX,
)
from topics_server.values.model import OnDelete, ViewDefinition
from topics_server.views.shortcuts import Expansion, expand

NAME_CHARS_MAX: Final = 64
_SCHEMA_WORDS: Final = ("CREATE", "INSERT")
_APPLY_WORDS: Final = ("INSERT", "UPDATE", "DELETE", "REPLACE", "WITH", "SELECT")
_QUERY_WORDS: Final = ("SELECT", "WITH", "VALUES")
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


def is_view_name(name: str) -> bool:
    """Whether `name` may be a view's or a named query's."""
    return len(name) <= NAME_CHARS_MAX and _NAME.fullmatch(name) is not None


def make_definition(
    *,
    schema: str | list[str] | None,
    apply: str | list[str] | None,
    queries: Mapping[str, str],
    shortcut: Mapping[str, Any] | None,
    on_delete: OnDelete,
) -> ViewDefinition:
    """The definition of a view, every text split into statements. Raises `invalid_request`."""
    expansion = Expansion([], [], {})
    if shortcut is not None:
        if schema is not None or apply is not None:
            raise invalid("give a shortcut, or schema and apply; not both", "shortcut")
        expansion = expand(shortcut)
    elif apply is None:
        raise invalid("apply is missing: the statements that run for each record", "apply")
    if len(queries) > VIEW_QUERIES_MAX:
        raise invalid(f"at most {VIEW_QUERIES_MAX} named queries", "queries")
    named = dict(expansion.queries)
    for name, sql in queries.items():
        if not is_view_name(name):
            raise invalid("a query's name is letters, digits, _ . -", "queries")
        named[name] = one_query(sql, f"queries.{name}")
    definition = ViewDefinition(
        schema=expansion.schema or _statements(schema or [], "schema"),
        apply=expansion.apply or _statements(apply or [], "apply"),
        queries=named,
        shortcut=dict(shortcut) if shortcut is not None else None,
        on_delete=on_delete,
    )
    if not definition.apply:
        raise invalid("apply has no statement", "apply")
    _check_words(definition.schema, _SCHEMA_WORDS, "schema")
    _check_words(definition.apply, _APPLY_WORDS, "apply")
    total = sum(map(len, (*definition.schema, *definition.apply, *named.values())))
    if total > VIEW_SQL_BYTES_MAX:
        raise invalid(f"a definition has at most {VIEW_SQL_BYTES_MAX} characters of SQL", "apply")
    return definition


def one_query(sql: str, field: str) -> str:
    """The one statement of a query. Raises `invalid_request`."""
    found = _statements(sql, field)
    if len(found) != 1:
        raise invalid(f"{field} must be one statement", field)
    _check_words(found, _QUERY_WORDS, field)
    return found[0]


def _check_words(statements: list[str], allowed: tuple[str, ...], field: str) -> None:
    """Check that statements begin with one of these words; the sandbox decides what they may do."""
    for statement in statements:
        code = _COMMENT.sub(" ", statement).lstrip(" \t\r\n\f(")
        word = code[:16].split(None, 1)[0].upper() if code else ""
        if not word.startswith(allowed):
            raise invalid(
                f"{field} must begin with {' or '.join(allowed)}, not with {clipped(word)}", field
            )


def _statements(sql: str | list[str], field: str) -> list[str]:
    texts = [sql] if isinstance(sql, str) else sql
    found: list[str] = []
    for text in texts:
        found += split_statements(text)
        if len(found) > VIEW_STATEMENTS_MAX:
            raise invalid(f"at most {VIEW_STATEMENTS_MAX} statements", field)
    return found


def split_statements(text: str) -> list[str]:
    """The statements of a text, without their semicolons.

    A semicolon ends a statement if the database's own scanner accepts the text up to there as
    complete: not inside a string, a comment or a trigger. Raises `invalid_request`.
    """
    if "\0" in text:
        raise invalid("SQL must not contain a NUL character")
    if len(text) > VIEW_SQL_BYTES_MAX:
        raise invalid(f"a text has at most {VIEW_SQL_BYTES_MAX} characters of SQL")
    if text.count(";") > VIEW_STATEMENTS_MAX * 8:
        raise invalid(f"at most {VIEW_STATEMENTS_MAX} statements")
    # The server needs SQLite only for this, and imports it after its start (docs/decisions/0319).
    import sqlite3

    found: list[str] = []
    start = end = 0
    while True:
        end = text.find(";", end)
        if end < 0:
            break
        end += 1
        if sqlite3.complete_statement(text[start:end]):
            found.append(text[start : end - 1].strip())
            start = end
    found.append(text[start:].strip())
    return [statement for statement in found if _has_code(statement)]


_COMMENT: Final = re.compile(r"--[^\n]*|/\*.*?(\*/|$)", re.DOTALL)


def _has_code(statement: str) -> bool:
    """Whether the text has more than comments."""
    return bool(_COMMENT.sub("", statement).strip())
