"""`api/queues/requests`: every field of §10's requests, its default, its clamp, its refusal."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from topics_server.api.queues.requests import (
    ClaimRequest,
    HeldRequest,
    QueueLimits,
    RedriveRequest,
    decode_ack,
    decode_claim,
    decode_extend,
    decode_nack,
    decode_redrive,
    encode_leases_cursor,
    query_leases_cursor,
    query_work,
)
from topics_server.settings import Settings
from topics_server.values.errors import Code, TopicsError
from topics_server.values.limits import U32_MAX, U64_MAX
from topics_server.values.model import TagMatch

LIMITS = Settings(max_claim=1000, max_node_bytes=8)
DAY_MS = 86_400_000


def redrive(body: bytes, limits: QueueLimits) -> RedriveRequest:
    return decode_redrive(body, "jobs", limits)


DECODERS: dict[str, Callable[[bytes, QueueLimits], Any]] = {
    "claim": decode_claim,
    "ack": decode_ack,
    "nack": decode_nack,
    "extend": decode_extend,
    "redrive": redrive,
}
LEAST: dict[str, dict[str, Any]] = {
    "claim": {"node": "w"},
    "ack": {"node": "w", "seqs": [1]},
    "nack": {"node": "w", "seqs": [1]},
    "extend": {"node": "w", "seqs": [1], "lease_ms": 1_000},
    "redrive": {"all": True},
}


def decoded(verb: str, **changed: object) -> Any:
    return DECODERS[verb](json.dumps({**LEAST[verb], **changed}).encode(), LIMITS)


def refused(verb: str, raw: bytes | None = None, **changed: Any) -> TopicsError:
    body = json.dumps({**LEAST[verb], **changed}).encode() if raw is None else raw
    with pytest.raises(TopicsError) as caught:
        DECODERS[verb](body, LIMITS)
    return caught.value


def test_defaults() -> None:
    assert decoded("claim") == ClaimRequest("w", 1, None, 0)
    assert decoded("ack") == HeldRequest("w", [1], None)
    assert decoded("nack") == HeldRequest("w", [1], None, delay_ms=0)
    assert decoded("extend") == HeldRequest("w", [1], None, lease_ms=1_000)
    assert decoded("redrive") == RedriveRequest(None, None, None, 0, 1000)


def test_every_field_is_taken_and_unknown_ones_are_ignored() -> None:
    assert decoded("claim", max=7, lease_ms=500, wait_ms=9, later=[1]) == (
        ClaimRequest("w", 7, 500, 9)
    )
    tokens = ["lease_ff", "lease_1"]
    held = decoded("ack", seqs=[5, 3], lease_ids=tokens, later=1)
    assert held == HeldRequest("w", [5, 3], [255, 1])
    assert decoded("nack", delay_ms=5, lease_ids=["x"]) == HeldRequest("w", [1], [0], delay_ms=5)
    assert decoded("redrive", **{"from": "dead", "after_seq": 4, "max": 2}) == (
        RedriveRequest("dead", None, None, 4, 2)
    )


@pytest.mark.parametrize(
    ("verb", "field", "sent", "kept"),
    [
        ("claim", "max", 1001, 1000),
        ("claim", "max", U32_MAX, 1000),
        ("claim", "lease_ms", 0, 100),
        ("claim", "lease_ms", U64_MAX, DAY_MS),
        ("claim", "wait_ms", 30_001, 30_000),
        ("claim", "wait_ms", U64_MAX, 30_000),
        ("nack", "delay_ms", U64_MAX, DAY_MS),
        ("extend", "lease_ms", 0, 100),
        ("extend", "lease_ms", DAY_MS + 1, DAY_MS),
        ("redrive", "max", 5000, 1000),
        ("claim", "node", "é" * 4, "é" * 4),
    ],
)
def test_clamped_fields_are_clamped(verb: str, field: str, sent: int, kept: int) -> None:
    name = "max_jobs" if field == "max" else field
    assert getattr(decoded(verb, **{field: sent}), name) == kept


HELD = ("ack", "nack", "extend")
WRONG: list[tuple[tuple[str, ...], str, list[Any]]] = [
    (("claim", *HELD), "node", [None, 5, "", "x" * 9, "é" * 5, ["w"]]),
    (HELD, "seqs", [None, 5, "1", [], {}]),
    (("claim",), "max", [None, -1, 0, 1.5, "1", True, U32_MAX + 1]),
    (("claim",), "lease_ms", [-1, "1", 1.0, U64_MAX + 1]),
    (("claim",), "wait_ms", [None, -1, "1", U64_MAX + 1]),
    (("nack",), "delay_ms", [None, -1, "1", 0.5, U64_MAX + 1]),
    (("extend",), "lease_ms", [None, -1, "1", U64_MAX + 1]),
    (("ack",), "lease_ids", [5, [], ["a", "b"], "lease_1"]),
    (("redrive",), "from", [5, "", "a b", "jobs"]),
    (("redrive",), "after_seq", [None, -1, U64_MAX + 1]),
]


@pytest.mark.parametrize(
    ("verb", "field", "value"),
    [(verb, field, value) for verbs, field, values in WRONG for verb in verbs for value in values],
)
def test_a_wrong_value_is_refused_by_its_field(verb: str, field: str, value: Any) -> None:
    error = refused(verb, **{field: value})
    assert (error.code, error.detail) == (Code.INVALID_REQUEST, {"field": field})


@pytest.mark.parametrize(
    ("value", "field"),
    [([1, -1], "seqs[1]"), ([1, U64_MAX + 1], "seqs[1]"), (["1"], "seqs[0]"), ([1, 2.5], "seqs[1]"),
     ([True], "seqs[0]"), ([None], "seqs[0]")],
)  # fmt: skip
@pytest.mark.parametrize("verb", ["ack", "nack", "extend", "redrive"])
def test_a_wrong_seq_is_named(verb: str, value: object, field: str) -> None:
    changed: dict[str, Any] = {"seqs": value, "all": False}
    error = refused(verb, **changed)
    assert error.code is Code.INVALID_REQUEST
    assert error.detail["field"] in (field, "seqs[...]")


@pytest.mark.parametrize("verb", ["ack", "nack", "extend", "redrive"])
def test_too_many_seqs_are_a_batch_too_large(verb: str) -> None:
    changed: dict[str, Any] = {"seqs": list(range(1001)), "all": False}
    error = refused(verb, **changed)
    assert (error.code, error.detail["field"]) == (Code.BATCH_TOO_LARGE, "seqs")
    assert decoded("ack", seqs=list(range(1000))).seqs == list(range(1000))


@pytest.mark.parametrize("verb", LEAST)
@pytest.mark.parametrize(
    "raw", [b"", b"[]", b"null", b"{", b"\xff", b"\xef\xbb\xbf{}", b'"x"', b"{}"]
)
def test_a_body_of_another_form_is_refused(verb: str, raw: bytes) -> None:
    assert refused(verb, raw).code is Code.INVALID_REQUEST


@pytest.mark.parametrize("verb", LEAST)
def test_deep_nesting_is_refused(verb: str) -> None:
    least = json.dumps(LEAST[verb])[:-1]
    deep = f'{least},"later":{"[" * 600}{"]" * 600}}}'.encode()
    assert refused(verb, deep).code is Code.INVALID_REQUEST


@pytest.mark.parametrize(
    ("sent", "match"),
    [
        ({"tag": "a*"}, TagMatch("a*")),
        ({"match": "a"}, TagMatch("a")),
        ({"match": ["tag", "Glob", "a*"]}, TagMatch("a", is_prefix=True)),
    ],
)
def test_dead_letters_by_tag(sent: dict[str, Any], match: TagMatch) -> None:
    changed = {"all": False, **sent}
    found = decoded("redrive", **changed)
    assert (found.match, found.seqs) == (match, None)


def test_dead_letters_by_seqs_are_sorted_and_distinct() -> None:
    assert decoded("redrive", all=False, seqs=[3, 1, 3]).seqs == [1, 3]


@pytest.mark.parametrize(
    "sent",
    [{"all": False}, {"seqs": [1]}, {"tag": "a"}, {"all": False, "tag": "a", "seqs": [1]}],
)
def test_one_way_of_choosing_is_required(sent: dict[str, Any]) -> None:
    assert "exactly one" in refused("redrive", **sent).message


def test_the_query_of_a_push_stream() -> None:
    assert query_work({"node": "w"}, LIMITS) == ClaimRequest("w", 1, None)
    sent = {"node": "w", "max": "99999", "lease_ms": "7", "token": "x"}
    assert query_work(sent, LIMITS) == ClaimRequest("w", 1000, 100)
    for wrong in ({}, {"node": ""}, {"node": "w" * 9}):
        with pytest.raises(TopicsError) as caught:
            query_work(wrong, LIMITS)
        assert caught.value.detail == {"field": "node"}
    for field, value in (
        ("max", "-1"),
        ("max", "0"),
        ("max", "²"),
        ("lease_ms", "1e3"),
        ("max", "9" * 21),
    ):
        with pytest.raises(TopicsError) as caught:
            query_work({"node": "w", field: value}, LIMITS)
        assert caught.value.detail == {"field": field}


@pytest.mark.parametrize("seq", [0, 1, 480_101, U64_MAX])
def test_a_cursor_comes_back(seq: int) -> None:
    assert query_leases_cursor({"cursor": encode_leases_cursor(seq)}) == seq


@pytest.mark.parametrize("cursor", ["", "x", "e30", "bnVsbA==", "eyJhZnRlcl9zZXEiOi0xfQ=="])
def test_a_foreign_cursor_is_refused(cursor: str) -> None:
    with pytest.raises(TopicsError) as caught:
        query_leases_cursor({"cursor": cursor})
    assert caught.value.detail == {"field": "cursor"}
