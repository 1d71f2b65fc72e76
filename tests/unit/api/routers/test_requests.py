"""`api/routers/requests`: every field of a router's definition, its default, its refusal;
queries.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from topics_server.api.messages.requests import encode_cursor
from topics_server.api.routers.requests import RouterQuery, decode_router, query_routers
from topics_server.values.errors import Code, TopicsError
from topics_server.values.model import Guarantee, RouterDefinition, TagMatch
from topics_server.values.router_answers import RouterSpec

LEAST: dict[str, Any] = {"source": "orders", "dest": "audit"}


def decoded(**changed: Any) -> RouterSpec:
    return decode_router(json.dumps({**LEAST, **changed}).encode())


def refused(body: bytes) -> TopicsError:
    with pytest.raises(TopicsError) as caught:
        decode_router(body)
    assert caught.value.code is Code.INVALID_REQUEST
    return caught.value


def test_defaults() -> None:
    definition = RouterDefinition("orders", "audit", True, True, None, False)
    assert definition.guarantee is Guarantee.AT_LEAST_ONCE
    assert decoded() == RouterSpec(definition, create_dest=True, from_earliest=False)
    assert decoded(filter=None, **{"from": "head"}) == decoded()


def test_every_field_is_taken_and_unknown_ones_are_ignored() -> None:
    asked = {
        "preserve_node": False,
        "preserve_tag": False,
        "create_dest": False,
        "filter": ["tag", "Glob", "public:*"],
        "allow_cycle": True,
        "guarantee": "exactly_once",
        "from": "earliest",
        "start": "nowhere",
        "later": [1],
    }
    match = TagMatch("public:", is_prefix=True)
    definition = RouterDefinition(
        "orders", "audit", False, False, match, True, Guarantee.EXACTLY_ONCE
    )
    assert decoded(**asked) == RouterSpec(definition, create_dest=False, from_earliest=True)


@pytest.mark.parametrize(
    ("sent", "match"),
    [
        ("a", TagMatch("a")),
        ("a*", TagMatch("a*")),
        (["tag", "Eq", "a"], TagMatch("a")),
        (["tag", "Eq", "a*"], TagMatch("a*")),
        (["tag", "Eq", ""], TagMatch("")),
        (["tag", "Glob", "*"], TagMatch("", is_prefix=True)),
        (["tag", "Glob", "a:*"], TagMatch("a:", is_prefix=True)),
    ],
)
def test_filters(sent: str | list[str], match: TagMatch) -> None:
    assert decoded(filter=sent).definition.filter == match


BAD_NAMES = ["", " ", "a b", "a/b", ".a", "a>b", "a->b", "ä", "n" * 256]
FLAGS = ("preserve_node", "preserve_tag", "create_dest", "allow_cycle")
WRONG: list[tuple[tuple[str, ...], list[Any]]] = [
    (("source", "dest"), [None, 5, True, ["a"], {}, *BAD_NAMES]),
    (FLAGS, [None, 0, 1, "true", [], {}]),
    (("filter",), [5, True, {}, [], ["tag"], ["tag", "Eq", "a", "b"]]),
    (("guarantee",), [None, "", "At_Least_Once", "at_most_once", 1, True, []]),
    (("from",), [None, "", "Head", "latest", 0, 5, {}]),
]


@pytest.mark.parametrize(
    ("field", "value"),
    [(field, value) for fields, values in WRONG for field in fields for value in values],
)
def test_a_wrong_value_is_refused_by_its_field(field: str, value: object) -> None:
    error = refused(json.dumps({**LEAST, field: value}).encode())
    assert error.detail["field"] == field


@pytest.mark.parametrize(
    ("sent", "field"),
    [
        (["seq", "Eq", "a"], "filter[0]"),
        ([None, "Eq", "a"], "filter[0]"),
        (["tag", "eq", "a"], "filter[1]"),
        (["tag", "In", ["a"]], "filter[1]"),
        (["tag", ["Eq"], "a"], "filter[1]"),
        (["tag", "Eq", 5], "filter[2]"),
        (["tag", "Eq", None], "filter[2]"),
        (["tag", "Glob", "a"], "filter[2]"),
        (["tag", "Glob", ""], "filter[2]"),
        (["tag", "Glob", "*a*"], "filter[2]"),
        (["tag", "Glob", "a**"], "filter[2]"),
    ],
)
def test_a_bad_filter_names_its_part(sent: list[Any], field: str) -> None:
    assert refused(json.dumps({**LEAST, "filter": sent}).encode()).detail["field"] == field


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (b"{}", "source"),
        (b'{"source":"a"}', "dest"),
        (b'{"dest":"a"}', "source"),
        (b'{"source":"a","dest":"a"}', "dest"),
        (b"", None),
        (b"[]", None),
        (b"null", None),
        (b'{"source":"a","dest":"b"', None),
        (b'{"source":"a","dest":"b","x":' + b"[" * 600 + b"]" * 600 + b"}", None),
        (b'{"source":"\xff","dest":"b"}', None),
        (rb'{"source":"\ud800","dest":"b"}', None),
        (b'\xef\xbb\xbf{"source":"a","dest":"b"}', None),
    ],
)
def test_a_body_that_is_no_definition_is_refused(body: bytes, field: str | None) -> None:
    assert refused(body).detail.get("field") == field


# -- queries -----------------------------------------------------------------------------------


def test_a_list_takes_a_prefix_both_ends_a_size_and_a_cursor() -> None:
    assert query_routers({}) == RouterQuery("", None, None, None, 100)
    cursor = encode_cursor("orders->audit")
    asked = {"prefix": "o->", "source": "a", "dest": "b", "cursor": cursor, "page_size": "7"}
    assert query_routers(asked) == RouterQuery("o->", "a", "b", "orders->audit", 7)
    assert query_routers({"page_size": "5000"}).page_size == 1000
    assert query_routers({"page_size": "0"}).page_size == 100


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[(name, value) for name in ("source", "dest") for value in BAD_NAMES],
        *[("page_size", value) for value in ("", "x", "-1", "1.5")],
        *[("cursor", value) for value in ("", "x", "%", encode_cursor("a b"), encode_cursor(""))],
    ],
)
def test_a_malformed_query_is_refused(field: str, value: str) -> None:
    with pytest.raises(TopicsError) as caught:
        query_routers({field: value})
    assert caught.value.code is Code.INVALID_REQUEST
    assert caught.value.detail["field"] == field
