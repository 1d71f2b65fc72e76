"""Malformed requests: one row each, and how a row is sent and judged.

Each API has its table of `Bad` in a `test_*_bad_input.py`, with what no row may change there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import pytest

from tests.contract.driver import Api, Json, RawResponse, refused

MEDIA: Final = "Content-Type: application/json"


@dataclass(frozen=True, slots=True)
class Bad:
    """One malformed request and its refusal; `where` is `detail.field`."""

    method: str
    target: str
    body: bytes = b""
    status: int = 400
    code: str = "invalid_request"
    where: str | None = None
    headers: tuple[str, ...] = (MEDIA,)
    # A second acceptable status and code, where the contract leaves the choice.
    other: tuple[int, str] | None = None
    # Members that `detail` must hold.
    detail: Json | None = None


class Table(dict[str, Bad]):
    """Rows by name; `marked`: the pytest marks of rows that have any."""

    def __init__(self) -> None:
        super().__init__()
        self.marked: dict[str, pytest.MarkDecorator] = {}

    def params(self) -> list[Any]:
        """The names, with their marks, as parameters of a test."""
        return [pytest.param(name, marks=self.marked.get(name, ()), id=name) for name in self]

    def add(self, name: str, case: Bad) -> None:
        """Add a row under a name of its own."""
        assert name not in self, f"two cases are named {name!r}"
        self[name] = case

    def check(self, least: int) -> None:
        """Check that no two rows are the same request, and that there are at least this many."""
        rows = {(row.method, row.target, row.body, row.headers) for row in self.values()}
        assert len(rows) == len(self) >= least


def as_json(value: object) -> bytes:
    """The value as the table writes it: characters outside ASCII stay as they are."""
    return json.dumps(value, ensure_ascii=False).encode()


def filled(text: str, names: Mapping[str, str]) -> str:
    """The text with each `{mark}` replaced by the name it stands for."""
    for mark, name in names.items():
        text = text.replace(f"{{{mark}}}", name)
    return text


def sent(api: Api, case: Bad, names: Mapping[str, str]) -> RawResponse:
    """Send the row with these names for its marks; returns the answer, which must be the row's
    refusal.
    """
    body = case.body
    for mark, name in names.items():
        body = body.replace(f"{{{mark}}}".encode(), name.encode())
    headers = [filled(header, names) for header in case.headers]
    answer = api.raw(case.method, filled(case.target, names), body, headers)
    status, code = case.status, case.code
    if case.other is not None and answer.status == case.other[0]:
        status, code = case.other
    detail = refused(answer, status, code)
    if case.where is not None:
        where = detail["field"]
        assert where == case.where or where.startswith((f"{case.where}[", f"{case.where}."))
    wanted = json.loads(filled(json.dumps(case.detail or {}), names))
    assert detail | wanted == detail
    assert ("allow" in answer.headers) == (status == 405)
    return answer
