"""`api/watch/requests`: every field of `POST /v0/watch`, its default, its clamp, its refusal."""

from __future__ import annotations

import json
from typing import Any

import pytest

from topics_server.api.watch.cursor_ids import CursorPosition
from topics_server.api.watch.requests import Start, WatchRequest, decode_watch
from topics_server.values.entries import SessionOptions
from topics_server.values.errors import Code, TopicsError
from topics_server.values.json_cache import DATA, META, TAGS
from topics_server.values.limits import MIB, U64_MAX

ONE: dict[str, object] = {"jobs": {}}


def decoded(body: object = None, *, max_topics: int = 256, **fields: Any) -> WatchRequest:
    raw = (
        body if isinstance(body, bytes) else json.dumps(body or {"topics": ONE, **fields}).encode()
    )
    return decode_watch(raw, max_topics=max_topics, max_limit=1000, max_node_bytes=128)


def refused(body: object = None, **fields: Any) -> TopicsError:
    with pytest.raises(TopicsError) as caught:
        decoded(body, **fields)
    assert caught.value.code is Code.INVALID_REQUEST
    return caught.value


def test_only_topics_is_required() -> None:
    assert decoded() == WatchRequest(
        topics={"jobs": Start(0, False)},
        options=SessionOptions(
            nodes=[],
            limit=256,
            max_batch_bytes=262_144,
            heartbeat_ms=15_000,
            shown=META | DATA,
            strong=False,
        ),
        positions=None,
    )


def test_every_field_is_taken() -> None:
    found = decoded(
        topics={"jobs": {"from_seq": 4096}, "events": {"tail": True, "from_seq": 3}, "a:b.c": {}},
        node="worker-eu-1",
        limit=7,
        max_batch_bytes=9,
        heartbeat_ms=2_000,
        include_meta=False,
        include_tags=True,
        include_data=False,
        consistency="strong",
        cursor="eyJqb2JzIjo1fQ",
        later="ignored",
    )
    assert list(found.topics.items()) == [
        ("jobs", Start(4096, False)),
        ("events", Start(3, True)),
        ("a:b.c", Start(0, False)),
    ]
    assert found.options == SessionOptions(["worker-eu-1"], 7, 9, 2_000, TAGS, True)
    assert found.positions == {"jobs": 5}


@pytest.mark.parametrize(
    ("field", "sent", "kept"),
    [
        ("limit", 0, 256),
        ("limit", 1, 1),
        ("limit", 1001, 1000),
        ("limit", U64_MAX, 1000),
        ("max_batch_bytes", 0, MIB),
        ("max_batch_bytes", 1, 1),
        ("max_batch_bytes", 8 * MIB + 1, 8 * MIB),
        ("max_batch_bytes", U64_MAX, 8 * MIB),
        ("heartbeat_ms", 0, 1_000),
        ("heartbeat_ms", 999, 1_000),
        ("heartbeat_ms", 60_001, 60_000),
        ("heartbeat_ms", U64_MAX, 60_000),
    ],
)
def test_clamped_fields_are_clamped(field: str, sent: int, kept: int) -> None:
    assert getattr(decoded(**{field: sent}).options, field) == kept


@pytest.mark.parametrize(
    ("node", "nodes"),
    [(None, []), ("a", ["a"]), ("", [""]), (["b", "a", "b"], ["a", "b"]), ([], [])],
)
def test_node_is_one_or_several(node: object, nodes: list[str]) -> None:
    assert decoded(node=node).options.nodes == nodes


@pytest.mark.parametrize(
    ("tags", "meta", "data", "shown"),
    [(False, False, False, 0), (True, True, True, TAGS | META | DATA), (False, False, True, DATA)],
)
def test_the_shown_fields(tags: bool, meta: bool, data: bool, shown: int) -> None:
    found = decoded(include_tags=tags, include_meta=meta, include_data=data)
    assert found.options.shown == shown


def test_a_cursor_may_be_a_token() -> None:
    assert decoded(cursor="c1.kZMHAgM").positions == (CursorPosition(7, 2, 3),)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"topics": {}}, "topics"),
        ({"topics": None}, "topics"),
        ({"topics": []}, "topics"),
        ({"topics": "jobs"}, "topics"),
        ({"topics": {"jobs": None}}, "topics.jobs"),
        ({"topics": {"jobs": []}}, "topics.jobs"),
        ({"topics": {"jobs": 5}}, "topics.jobs"),
        ({"topics": {"jobs": {"from_seq": -1}}}, "topics.jobs.from_seq"),
        ({"topics": {"jobs": {"from_seq": 1.0}}}, "topics.jobs.from_seq"),
        ({"topics": {"jobs": {"from_seq": "1"}}}, "topics.jobs.from_seq"),
        ({"topics": {"jobs": {"from_seq": None}}}, "topics.jobs.from_seq"),
        ({"topics": {"jobs": {"from_seq": U64_MAX + 1}}}, "topics.jobs.from_seq"),
        ({"topics": {"a": {}, "b.c": {"tail": 1}}}, "topics.b.c.tail"),
        ({"topics": {"a": {}, "-b": {}}}, "topics.-b"),
        ({"topics": {"": {}}}, "topics."),
        ({"topics": {"a/b": {}}}, "topics.a/b"),
        ({"topics": {"x" * 256: {}}}, "topics." + "x" * 256),
        ({"limit": -1}, "limit"),
        ({"limit": "5"}, "limit"),
        ({"limit": U64_MAX + 1}, "limit"),
        ({"max_batch_bytes": 1.5}, "max_batch_bytes"),
        ({"heartbeat_ms": None}, "heartbeat_ms"),
        ({"heartbeat_ms": U64_MAX + 1}, "heartbeat_ms"),
        ({"include_meta": 1}, "include_meta"),
        ({"include_tags": "yes"}, "include_tags"),
        ({"include_data": None}, "include_data"),
        ({"consistency": "linearizable"}, "consistency"),
        ({"consistency": None}, "consistency"),
        ({"node": 5}, "node"),
        ({"node": [5]}, "node[0]"),
        ({"node": ["n"] * 257}, "node"),
        ({"cursor": 5}, "cursor"),
        ({"cursor": ""}, "cursor"),
        ({"cursor": "garbage"}, "cursor"),
        ({"cursor": "é"}, "cursor"),
        ({"cursor": "eyJhIjotMX0"}, "cursor"),
    ],
)
def test_a_wrong_value_is_refused_with_its_path(fields: dict[str, Any], field: str) -> None:
    assert refused(**fields).detail["field"] == field


def test_topics_left_out_is_named() -> None:
    assert refused(b"{}").detail["field"] == "topics"


@pytest.mark.parametrize("body", [b"", b"[]", b"null", b"{", b'{"topics":{"\xff":{}}}', b"5"])
def test_a_body_that_is_no_object_is_refused(body: bytes) -> None:
    refused(body)


@pytest.mark.parametrize("place", ['"later":%s', '"topics":{"jobs":{"later":%s}}'])
def test_deep_json_is_refused(place: str) -> None:
    deep = "[" * 600 + "]" * 600
    body = "{" + place % deep + ("" if "topics" in place else ',"topics":{"jobs":{}}') + "}"
    assert "deeper" in refused(body.encode()).message
    very = "[" * 100_000 + "]" * 100_000
    refused(("{" + place % very + "}").encode())


def test_topics_are_counted() -> None:
    names: dict[str, object] = {f"t{number}": {} for number in range(5)}
    assert len(decoded(topics=names, max_topics=5).topics) == 5
    assert refused(topics=names, max_topics=4).detail["field"] == "topics"
