"""Reads a view definition from an SQL file with front matter.

The file has SQL sections, each after a line `-- schema`, `-- apply` or `-- query NAME`. Before the
first section, lines like `-- on_delete: rebuild` set members of the definition. Everything else is
SQL and is sent unchanged. Used by `topics view put`.
"""

from __future__ import annotations

import re
from typing import Any, Final

import click

_SECTION: Final = re.compile(r"--\s*(schema|apply|query\s+([A-Za-z0-9][A-Za-z0-9_.-]*))\s*")
_MEMBER: Final = re.compile(r"--\s*(on_delete)\s*:\s*(\w+)\s*")


def parse(text: str, where: str) -> dict[str, Any]:
    """The body of a `PUT` from the text of a file; `where` names the file in messages.

    Raises `click.UsageError` for SQL before the first section and for a section that comes twice.
    """
    body: dict[str, Any] = {}
    sections: dict[str, list[str]] = {}
    lines: list[str] | None = None
    for number, line in enumerate(text.splitlines(), 1):
        section = _SECTION.fullmatch(line.strip())
        if section is not None:
            name = f"query {section[2]}" if section[2] else section[1]
            if name in sections:
                raise click.UsageError(f"{where}:{number}: section {name} comes twice")
            lines = sections[name] = []
            continue
        member = _MEMBER.fullmatch(line.strip()) if lines is None else None
        if member is not None:
            body[member[1]] = member[2]
        elif lines is not None:
            lines.append(line)
        elif line.strip() and not line.strip().startswith("--"):
            raise click.UsageError(
                f"{where}:{number}: begin a section first: -- schema, -- apply or -- query NAME"
            )
    queries: dict[str, str] = {}
    for name, content in sections.items():
        sql = "\n".join(content).strip()
        if name.startswith("query "):
            queries[name.removeprefix("query ")] = sql
        else:
            body[name] = sql
    if "apply" not in body:
        raise click.UsageError(f"{where}: section apply is missing")
    if queries:
        body["queries"] = queries
    return body
