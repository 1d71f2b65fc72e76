"""§6, §0.5: malformed requests to routers: each gets its status, code and field, and changes
nothing.

`{s}` is a topic of three records, `{d}` the destination of the router `{s}->{d}`, `{e}` another
topic, `{a}` and `{b}` are topics that do not exist. After each request the list of routers, the
router's state, the topics and their number are unchanged.
"""

from __future__ import annotations

import gzip
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import pytest

from tests.contract.conftest import new_name
from tests.contract.driver import Api, Json, good, refused
from tests.contract.malformed import MEDIA, Bad, Table, as_json, sent
from tests.contract.routers.routing import DEFAULTS, Routing

NEW: Final = "/v0/routers/{a}"
THERE: Final = "/v0/routers/{s}-%3E{d}"


CASES = Table()
_add = CASES.add


def _body(**fields: object) -> bytes:
    """A valid body except for these fields; `...` leaves one out."""
    whole: dict[str, Any] = {"source": "{a}", "dest": "{b}"}
    return as_json({k: v for k, v in (whole | fields).items() if v is not ...})


# --- text that is no definition -------------------------------------------------------------------
for _what, _text, _where in (
    ("nothing", b"", "source"),
    ("an empty object", b"{}", "source"),
    ("half an object", _body()[:-1], None),
    ("two values", _body() + b"{}", None),
    ("a trailing comma", _body()[:-1] + b",}", None),
    ("single quotes", b"{'source':'{a}','dest':'{b}'}", None),
    ("NaN", b'{"source":"{a}","dest":"{b}","preserve_node":NaN}', None),
    ("invalid UTF-8", b'{"source":"\xff","dest":"{b}"}', None),
    ("a lone surrogate", rb'{"source":"{a}","dest":"{b}","filter":["tag","Eq","\ud800"]}', None),
    ("a byte order mark", b"\xef\xbb\xbf" + _body(), None),
    ("a million brackets", b"[" * 1_000_000, None),
    ("a deep unknown field", _body()[:-1] + b',"x":' + b"[" * 600 + b"]" * 600 + b"}", None),
    ("an array", b"[]", None),
    ("a number", b"7", None),
    ("null", b"null", None),
    ("a string", b'"{}"', None),
):
    for _kind, _path in (("new", NEW), ("there", THERE)):
        _add(f"{_kind}: {_what}", Bad("PUT", _path, _text, where=_where))

# --- fields ---------------------------------------------------------------------------------------
NAMES: Final[dict[str, object]] = {
    "missing": ...,
    "null": None,
    "a number": 1,
    "true": True,
    "a list": ["{a}"],
    "an object": {},
    "empty": "",
    "with a space": "a b",
    "with a slash": "a/b",
    "with a >": "a>b",
    "beginning with a dot": ".a",
    "with an umlaut": "\u00e4",
    "of 256 letters": "n" * 256,
}
FLAGS: Final[dict[str, object]] = {
    "null": None,
    "0": 0,
    "a string": "true",
    "a list": [],
    "an object": {},
}
FILTERS: Final[dict[str, tuple[object, str]]] = {
    "a number": (1, "filter"),
    "true": (True, "filter"),
    "an object": ({"tag": "a"}, "filter"),
    "empty": ([], "filter"),
    "of one part": (["tag"], "filter"),
    "of two parts": (["Eq", "a"], "filter"),
    "of four parts": (["tag", "Eq", "a", "b"], "filter"),
    "of another field": (["node", "Eq", "a"], "filter"),
    "of no field": ([None, "Eq", "a"], "filter"),
    "of another operator": (["tag", "In", "a"], "filter"),
    "of a small operator": (["tag", "eq", "a"], "filter"),
    "of a list of operators": (["tag", ["Eq"], "a"], "filter"),
    "of a number": (["tag", "Eq", 1], "filter"),
    "of null": (["tag", "Glob", None], "filter"),
    "without a star": (["tag", "Glob", "a"], "filter"),
    "of an empty pattern": (["tag", "Glob", ""], "filter"),
    "with a star before": (["tag", "Glob", "*a"], "filter"),
    "with a star inside": (["tag", "Glob", "a*b*"], "filter"),
    "with two stars": (["tag", "Glob", "a**"], "filter"),
    "nested": ([["tag", "Eq", "a"]], "filter"),
}
for _name in ("source", "dest"):
    for _what, _value in NAMES.items():
        _add(f"{_name} {_what}", Bad("PUT", NEW, _body(**{_name: _value}), where=_name))
for _name in ("preserve_node", "preserve_tag", "create_dest", "allow_cycle"):
    for _what, _value in FLAGS.items():
        _add(f"{_name} {_what}", Bad("PUT", NEW, _body(**{_name: _value}), where=_name))
for _what, (_value, _where) in FILTERS.items():
    _add(f"filter {_what}", Bad("PUT", NEW, _body(filter=_value), where=_where))
for _what, _value in (
    *(("null", None), ("a number", 1), ("true", True), ("a list", [])),
    *(("empty", ""), ("at_most_once", "at_most_once"), ("in capitals", "EXACTLY_ONCE")),
):
    _add(f"guarantee {_what}", Bad("PUT", NEW, _body(guarantee=_value), where="guarantee"))
for _what, _value in (
    *(("null", None), ("a number", 0), ("a list", [])),
    *(("empty", ""), ("latest", "latest"), ("in capitals", "Head")),
):
    _add(f"from {_what}", Bad("PUT", NEW, _body(**{"from": _value}), where="from"))
# A change follows the rules of a creation.
CHANGES: Final[dict[str, tuple[Json, str]]] = {
    "filter": ({"filter": ["tag"]}, "filter"),
    "guarantee": ({"guarantee": "twice"}, "guarantee"),
    "flag": ({"preserve_tag": 1}, "preserve_tag"),
    "no source": ({"source": ...}, "source"),
    "no dest": ({"dest": ...}, "dest"),
}
for _what, (_fields, _where) in CHANGES.items():
    _add(f"there: {_what}", Bad("PUT", THERE, _body(**_fields), where=_where))

# --- rules ----------------------------------------------------------------------------------------
for _path in (NEW, THERE):
    _add(
        f"PUT {_path}: source is dest",
        Bad("PUT", _path, _body(source="{e}", dest="{e}"), where="dest"),
    )
    _add(
        f"PUT {_path}: an absent destination that is not to be made",
        Bad("PUT", _path, _body(create_dest=False), 404, "topic_not_found"),
    )
_add(
    "a source of its own and an absent destination that is not to be made",
    Bad("PUT", NEW, _body(source="{e}", create_dest=False), 404, "topic_not_found"),
)
_add(
    "a circle of two",
    Bad("PUT", NEW, _body(source="{d}", dest="{s}"), 409, "router_cycle"),
)
FAN_INS: Final[dict[str, Json]] = {
    "another source": {"source": "{e}", "dest": "{d}"},
    "an absent source": {"source": "{a}", "dest": "{d}"},
    "another source, with leave for circles": {
        **{"source": "{e}", "dest": "{d}"},
        "allow_cycle": True,
    },
}
for _what, _fields in FAN_INS.items():
    _add(
        f"into a destination from {_what}",
        Bad(
            *("PUT", NEW, _body(**_fields)),
            *(409, "topic_exists_incompatible"),
            detail={"reason": "router_dest_fan_in"},
        ),
    )

# --- names, methods, paths, media -----------------------------------------------------------------
for _name in (
    *("%2F", "a%2Fb", "a%20b", "%3Ea", ".a", "-a", "a%253Eb", "%C3%A4", "a%00b", "a%3Cb", "%ff"),
    "n" * 256,
):
    for _method in ("PUT", "GET", "DELETE"):
        _text = _body() if _method == "PUT" else b""
        _add(f"{_method} {_name[:9]}", Bad(_method, f"/v0/routers/{_name}", _text, where="router"))
_add("GET an absent one", Bad("GET", NEW, b"", 404, "router_not_found"))
_add("HEAD is not POST", Bad("POST", THERE, b"{}", 405, "method_not_allowed"))
_add("PATCH", Bad("PATCH", THERE, b"{}", 405, "method_not_allowed"))
for _method in ("POST", "PUT", "DELETE", "PATCH"):
    _add(f"{_method} the list", Bad(_method, "/v0/routers", b"{}", 405, "method_not_allowed"))
for _path in (
    "/v0/routers/",
    "/v0/router/{a}",
    "/v0/routers/{a}/b",
    "/v0/routers/{a}/",
    "/v1/routers",
):
    _add(f"GET {_path}", Bad("GET", _path, b"", 404, "not_found"))
    _add(f"PUT {_path}", Bad("PUT", _path, _body(), 404, "not_found"))
for _media in ("text/json", "application/x-www-form-urlencoded", ""):
    _add(
        f"media type {_media!r}",
        Bad(
            *("PUT", NEW, _body(), 415, "unsupported_media_type"),
            headers=(f"Content-Type: {_media}",),
        ),
    )
_add("no media type", Bad("PUT", NEW, _body(), 415, "unsupported_media_type", headers=()))
_add(
    "gzip cut short",
    Bad("PUT", NEW, gzip.compress(_body())[:-9], headers=(MEDIA, "Content-Encoding: gzip")),
)
_add(
    "another encoding",
    Bad(
        *("PUT", NEW, _body(), 415, "unsupported_media_type"),
        headers=(MEDIA, "Content-Encoding: br"),
    ),
)

# --- queries --------------------------------------------------------------------------------------
for _query, _where in (
    *((f"page_size={value}", "page_size") for value in ("x", "-1", "1.5", "", "9" * 30)),
    *((f"cursor={value}", "cursor") for value in ("nonsense", "%25", "e30%3D", "", "bnVsbA==")),
    *((f"source={value}", "source") for value in ("a%20b", "", "a%3Eb")),
    *((f"dest={value}", "dest") for value in ("a%2Fb", ".a", "n" * 256)),
    ("prefix=%ff", None),
):
    _add(f"GET {_query[:40]}", Bad("GET", f"/v0/routers?{_query}", where=_where))


@dataclass(frozen=True, slots=True)
class Standing:
    """The state that no case may change."""

    names: dict[str, str]
    facts: Json


@pytest.fixture(scope="module")
def standing(api: Api) -> Standing:
    """A router whose three records are forwarded, and another topic."""
    names = {mark: new_name(f"standing-{mark}") for mark in "sde"}
    source, dest, beside = names.values()
    routing = Routing(api)
    router = routing.made(source, dest, filter=["tag", "Glob", "*"])
    api.add(source, 1, 2, 3, tag="t")
    good(api.put(beside))
    routing.settled(router)
    assert len(api.read_all(dest)) == 3
    return Standing(names, _facts(api, names))


def _facts(api: Api, names: dict[str, str]) -> Json:
    moving = ("performance", "last_read_ts", "effective_priority", "disk_bytes")
    routing = Routing(api)
    states = [api.get_state(name) for name in names.values()]
    states.append(routing.get(f"{names['s']}->{names['d']}"))
    return {"states": [{k: v for k, v in state.items() if k not in moving} for state in states]}


def _counts(api: Api) -> tuple[object, object]:
    """All routers and the number of topics; other tests of this file add some of their own."""
    return Routing(api).rows(), api.http.get("/v0/ready").json()["topics"]


@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_a_malformed_request_is_refused_and_changes_nothing(
    api: Api, standing: Standing, case: Bad
) -> None:
    """Contract §6, §0.5 [6-03, 6-11, 6-12, 6-13, 6-16, 6-18, 6-19, 6-21, 6-28, 9-02]"""
    absent = {"a": new_name("absent"), "b": new_name("absent")}
    before = _counts(api)
    sent(api, case, standing.names | absent)
    assert _facts(api, standing.names) == standing.facts
    assert _counts(api) == before
    for name in absent.values():
        refused(api.state(name), 404, "topic_not_found")
        refused(Routing(api).read(name), 404, "router_not_found")


def test_the_table_is_long_enough() -> None:
    """There are at least 40 malformed requests, each of another kind. [6-12]"""
    CASES.check(40)


def test_unknown_fields_are_no_error(api: Api, names: Callable[[str], str]) -> None:
    """Contract §6: additive versions."""
    a, b = names("a"), names("b")
    routing = Routing(api)
    router = routing.made(a, b, later={"x": [1]}, cursor_seq="?", router=7)
    told = routing.get(router)
    assert {name: told[name] for name in DEFAULTS} == DEFAULTS


def test_limits_themselves_are_good(api: Api, names: Callable[[str], str]) -> None:
    """Contract §6 [6-03]: the longest names and the largest page are accepted."""
    a, b = names("a").ljust(255, "x"), names("b").ljust(255, "x")
    name = names("r").ljust(254, ".") + ">"
    routing = Routing(api)
    assert routing.made(a, b, name) in routing.names(prefix=name, source=a, dest=b)
    assert "next_cursor" not in routing.page(page_size=10**19, source=a)
