"""The table of limits is current, and every string, list or map of a request has a row."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from topics_server.api.messages import conditions
from topics_server.api.messages import requests as bodies
from topics_server.api.operate import admin
from topics_server.api.queues import requests as queue_bodies
from topics_server.api.routers import requests as router_bodies
from topics_server.api.watch import requests as watch_bodies
from topics_server.api.websocket import commands as ws_commands
from topics_server.cli.server import limit_table
from topics_server.cli.server.limit_table import SECTIONS, SHAPES, document, value_of
from topics_server.settings import Settings
from topics_server.values import appends, limits

PAGE = Path(__file__).resolve().parents[4] / "docs" / "LIMITS.md"
MODULES = (
    *(appends, admin, bodies, conditions, queue_bodies, router_bodies),
    *(watch_bodies, ws_commands),
)
# These values are measured before a body is decoded; their fields are not built.
OUTSIDE = ("Lists", "_Uncounted", "_Head")
# These values are in queries and headers, whose total size is bounded.
QUERIES = ("_Cursor",)
# Passed unchanged to the decoder of another struct, which checks a number, a switch
# or a word.
PASSED_ON = {
    *("from_seq", "tail", "limit", "max_batch_bytes", "include_meta", "include_tags"),
    *("include_data", "consistency", "create", "disable_backpressure", "wait", "last", "ack"),
    "idempotency",
}
UNBOUNDED = (
    *(msgspec.inspect.StrType, msgspec.inspect.ListType, msgspec.inspect.DictType),
    msgspec.inspect.RawType,
    msgspec.inspect.AnyType,
    msgspec.inspect.BytesType,
)


def request_structs() -> Iterator[tuple[str, type[msgspec.Struct]]]:
    """The structs that requests are decoded into, by their names in the table."""
    for module in MODULES:
        short = module.__name__.removeprefix("topics_server.")
        for name, kind in inspect.getmembers(module, inspect.isclass):
            if (
                issubclass(kind, msgspec.Struct)
                and kind.__module__ == module.__name__
                and name.startswith("_")
                and not name.endswith(OUTSIDE)
                and name not in QUERIES
            ):
                yield f"{short}.{name}", kind


def may_be_long(kind: msgspec.inspect.Type) -> bool:
    """Whether a value of this type may have any length."""
    if isinstance(kind, msgspec.inspect.UnionType):
        return any(map(may_be_long, kind.types))
    return isinstance(kind, UNBOUNDED)


def test_no_field_of_a_request_is_without_a_limit() -> None:
    found = dict(request_structs())
    assert found.keys() == SHAPES.keys()
    missing: list[str] = []
    for name, struct in found.items():
        rows = [row.value for section in SHAPES[name] for row in section.rows]
        told = msgspec.inspect.type_info(struct)
        assert isinstance(told, msgspec.inspect.StructType)
        missing += [
            f"{name}.{field.encode_name}"
            for field in told.fields
            if may_be_long(field.type)
            and field.encode_name not in PASSED_ON
            and not any(f"`{field.encode_name}`" in value for value in rows)
        ]
    assert missing == []


def test_the_page_is_current() -> None:
    """To renew it, write the result of `limit_table.document()` to docs/LIMITS.md."""
    assert PAGE.read_text(encoding="utf-8") == document()


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.title)
def test_every_name_is_one(section: limit_table.Section) -> None:
    assert section.rows
    for row in section.rows:
        assert value_of(row.limit) > 0
        is_constant = row.limit.name.isupper()
        assert hasattr(limits, row.limit.name) == is_constant
        assert (row.limit.name in Settings.model_fields) == (not is_constant)


def test_the_number_shown_is_the_one_that_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "NODE_FILTER_IDS_MAX", 77)
    assert "| 77 nodes | `NODE_FILTER_IDS_MAX` |" in document()
