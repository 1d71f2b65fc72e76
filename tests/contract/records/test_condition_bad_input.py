"""Malformed conditions: each is refused with its field, and nothing is stored.

`{t}` is a topic with three records, `{a}` one that does not exist. Unknown members of a condition
are refused, unlike those of a body: a condition that is not understood must not count as met.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import pytest

from tests.contract.driver import Api, refused
from tests.contract.malformed import MEDIA, Bad, Table, as_json, sent

_DEEP: Final[list[object]] = ["Or", "a"]
for _ in range(8):
    _DEEP[:] = ["Or", [*_DEEP]]

CONDITIONS: Final[tuple[tuple[str, object, str], ...]] = (
    ("no object", 7, "if"),
    ("a list", [], "if"),
    ("a string", "head_seq", "if"),
    ("nothing asked", {}, "if"),
    ("only nulls", {"head_seq": None, "none_match": None}, "if"),
    ("an unknown member", {"head_seq": 3, "head": 3}, "if"),
    ("a misspelt member", {"nonematch": "a"}, "if"),
    ("head_seq as text", {"head_seq": "3"}, "if.head_seq"),
    ("head_seq below 0", {"head_seq": -1}, "if.head_seq"),
    ("head_seq a fraction", {"head_seq": 1.5}, "if.head_seq"),
    ("head_seq over u64", {"head_seq": 2**64}, "if.head_seq"),
    ("epoch as text", {"epoch": "1"}, "if.epoch"),
    ("epoch over u64", {"epoch": 2**64}, "if.epoch"),
    ("exists as text", {"exists": "yes"}, "if.exists"),
    ("absence and a head", {"exists": False, "head_seq": 0}, "if.exists"),
    ("absence and an epoch", {"exists": False, "epoch": 1}, "if.exists"),
    ("after alone", {"after": 1}, "if.after"),
    ("after below 0", {"none_match": "a", "after": -1}, "if.after"),
    ("after as text", {"none_match": "a", "after": "1"}, "if.after"),
    ("Not", {"none_match": ["Not", "a"]}, "if.none_match"),
    ("Not inside", {"none_match": ["Or", "b", ["And", "c", ["Not", "a"]]]}, "if.none_match"),
    ("a filter of another form", {"none_match": {"tag": "a"}}, "if.none_match"),
    ("a filter that is a number", {"none_match": 1}, "if.none_match"),
    ("an unknown operator", {"none_match": ["tag", "Like", "a"]}, "if.none_match"),
    ("a Glob without a star", {"none_match": ["tag", "Glob", "a"]}, "if.none_match[2]"),
    ("too many leaves", {"none_match": ["Or", *["a"] * 257]}, "if.none_match"),
    ("too deep a filter", {"none_match": _DEEP}, "if.none_match"),
    ("a long tag", {"none_match": "x" * 70_000}, "if.none_match"),
    ("too many bytes", {"none_match": ["tag", "In", ["x" * 65_000] * 5]}, "if"),
)
RECORDS: Final = {"records": [{"data": 1}]}
CASES = Table()
for _what, _condition, _where in CONDITIONS:
    for _name, _method, _target, _body in (
        ("append", "POST", "/v0/topics/{t}", RECORDS),
        ("creating append", "POST", "/v0/topics/{a}", RECORDS),
        ("delete", "POST", "/v0/topics/{t}/delete", {"before_seq": 2}),
        ("PUT", "PUT", "/v0/topics/{a}", {}),
        ("PATCH", "PATCH", "/v0/topics/{t}", {"ttl_ms": 1}),
    ):
        _sent = as_json({**_body, "if": _condition})
        CASES.add(f"{_name}: {_what}", Bad(_method, _target, _sent, where=_where))
for _tag in ("", "3", "1-3", 'W/"1-3"', '"1-3", "1-4"', '"3"', '"01-3"', '"1-x"', '"a-b"'):
    _headers = (MEDIA, f"If-Match: {_tag}")
    CASES.add(
        f"If-Match {_tag}: append",
        Bad("POST", "/v0/topics/{t}", as_json(RECORDS), where="If-Match", headers=_headers),
    )
    CASES.add(
        f"If-Match {_tag}: DELETE",
        Bad("DELETE", "/v0/topics/{t}", where="If-Match", headers=_headers[1:]),
    )
for _tag in ('"1-18446744073709551616"', '"18446744073709551616-1"'):
    _headers = (MEDIA, f"If-Match: {_tag}")
    CASES.add(
        f"If-Match {_tag}",
        Bad("POST", "/v0/topics/{t}", as_json(RECORDS), where="If-Match", headers=_headers),
    )
CASES.add(
    "two headers If-Match",
    Bad(
        *("POST", "/v0/topics/{t}", as_json(RECORDS)),
        where="header",
        headers=(MEDIA, 'If-Match: "1-9"', "If-Match: *"),
    ),
)
CASES.add(
    "if and If-Match",
    Bad(
        *("POST", "/v0/topics/{t}", as_json({**RECORDS, "if": {"head_seq": 3}})),
        where="if",
        headers=(MEDIA, 'If-Match: "1-3"'),
    ),
)


@pytest.fixture(scope="module")
def standing(api: Api) -> str:
    """A topic with three records."""
    api.add("standing-condition", 1, 2, 3)
    return "standing-condition"


@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_a_malformed_condition_is_refused_and_nothing_is_stored(
    api: Api, standing: str, names: Callable[[str], str], case: Bad
) -> None:
    absent = names("absent")
    before = api.get_state(standing)
    sent(api, case, {"t": standing, "a": absent})
    after = api.get_state(standing)
    assert {k: v for k, v in after.items() if k != "performance"} == {
        k: v for k, v in before.items() if k != "performance"
    }
    refused(api.state(absent), 404, "topic_not_found")


def test_the_table_is_long_enough() -> None:
    CASES.check(150)
