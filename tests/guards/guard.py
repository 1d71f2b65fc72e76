"""One guard: a line that enforces a rule, and the tests that fail without it."""

from __future__ import annotations

from typing import NamedTuple


class Guard(NamedTuple):
    """`old` in `file` becomes `new`; then one of `tests` (below `tests/`) must fail."""

    rule: str
    file: str
    old: str
    new: str
    tests: str


def guards(file: str, tests: str, *rows: tuple[str, str, str]) -> list[Guard]:
    """The guards of one file that have the same tests."""
    return [Guard(rule, file, old, new, tests) for rule, old, new in rows]
