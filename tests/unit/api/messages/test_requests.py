"""Request shapes: configuration, diff, delete, headers, queries, cursors."""

from __future__ import annotations

import base64
import json

import pytest

from topics_server.api.messages.requests import (
    decode_config,
    decode_delete,
    decode_diff,
    decode_inline_config,
    encode_cursor,
    header_key,
    query_bool,
    query_cursor,
    query_page_size,
)
from topics_server.engine.answers import ReadRequest
from topics_server.values.errors import Code, TopicsError
from topics_server.values.json_cache import DATA, META, TAGS
from topics_server.values.model import Durability, TagMatch, TopicConfig, TopicType
from topics_server.values.texts.query_string import parse_query

U64 = 2**64 - 1
NOT_U64 = ("-1", "1.0", "1e3", '"1"', "true", str(2**64), "[]", "{}")


def field_of(refused: pytest.ExceptionInfo[TopicsError]) -> object:
    assert refused.value.code is Code.INVALID_REQUEST
    return refused.value.detail.get("field")


# --- configuration ------------------------------------------------------------------------


def test_an_empty_configuration_is_every_default() -> None:
    decoded = decode_config(b"{}", "jobs")
    assert decoded.config == TopicConfig()
    assert decoded.keep_type


def test_every_field_is_taken() -> None:
    sent = {
        "type": "queue",
        "ttl_ms": 1,
        "cap_records": 2,
        "cap_bytes": 3,
        "discard": "reject",
        "durable": True,
        "durability": "memory",
        "priority": -7,
        "auto_priority": False,
        "auto_create": False,
        "idempotency_window_ms": 4,
        "dedupe_node": False,
        "lease_ms": 500,
        "claim_jitter_ms": 6,
        "max_deliveries": 7,
        "dead_letter": "jobs.dlq",
        "leases_durable": True,
        "lease_log": "leases",
        "later_version": {"ignored": [1]},
    }
    decoded = decode_config(json.dumps(sent).encode(), "jobs")
    assert not decoded.keep_type
    assert decoded.config.type is TopicType.QUEUE
    for field, value in sent.items():
        if field not in ("durable", "later_version"):
            found = getattr(decoded.config, field)
            assert getattr(found, "value", found) == value


@pytest.mark.parametrize(
    ("body", "durability"),
    [
        (b"{}", "disk"),
        (b'{"durable":true}', "fsync"),
        (b'{"durable":false}', "disk"),
        (b'{"durable":true,"durability":"ephemeral"}', "ephemeral"),
        (b'{"durable":false,"durability":"fsync"}', "fsync"),
    ],
)
def test_an_explicit_class_wins_over_the_shorthand(body: bytes, durability: str) -> None:
    assert decode_config(body, "t").config.durability is Durability(durability)


@pytest.mark.parametrize(
    ("field", "sent", "clamped"),
    [
        ("priority", 1001, 1000),
        ("priority", -(2**31), -1000),
        ("lease_ms", 0, 100),
        ("lease_ms", U64, 86_400_000),
        ("claim_jitter_ms", 5001, 5000),
        ("ttl_ms", U64, U64),
    ],
)
def test_clamped_fields_are_clamped_and_others_keep_any_u64(
    field: str, sent: int, clamped: int
) -> None:
    config = decode_config(b'{"%b":%d}' % (field.encode(), sent), "t").config
    assert getattr(config, field) == clamped


@pytest.mark.parametrize(
    "field",
    [
        *("ttl_ms", "cap_records", "cap_bytes", "idempotency_window_ms"),
        *("lease_ms", "claim_jitter_ms", "max_deliveries"),
    ],
)
@pytest.mark.parametrize("value", [*NOT_U64, "null"])
def test_what_is_no_u64_is_refused_by_its_field(field: str, value: str) -> None:
    with pytest.raises(TopicsError) as refused:
        decode_config(f'{{"{field}":{value}}}'.encode(), "t")
    assert field_of(refused) == field


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("type", '"Log"'),
        ("type", "null"),
        ("discard", '"new"'),
        ("durability", '"sync"'),
        ("durability", "null"),
        ("durable", "1"),
        ("auto_create", '"true"'),
        ("priority", str(2**31)),
        ("priority", "1.0"),
        ("dead_letter", '"a/b"'),
        ("dead_letter", '""'),
        ("dead_letter", '"self"'),
        ("dead_letter", "5"),
        ("lease_log", '"a/b"'),
        ("lease_log", '"self"'),
        ("lease_log", "true"),
    ],
)
def test_a_wrong_value_is_refused_by_its_field(field: str, value: str) -> None:
    body = f'{{"{field}":{value}}}'.encode()
    with pytest.raises(TopicsError) as refused:
        decode_config(body, "self")
    assert field_of(refused) == field
    with pytest.raises(TopicsError) as refused:
        decode_inline_config(body, "self")
    assert field_of(refused) == f"config.{field}"


def test_the_three_nullable_fields_take_null() -> None:
    sent = b'{"priority":null,"dead_letter":null,"lease_log":null}'
    assert decode_config(sent, "t").config == TopicConfig()


@pytest.mark.parametrize(
    "body",
    [
        b"[]",
        b"null",
        b"5",
        b"{",
        b"",
        b"\xff",
        b"\xef\xbb\xbf{}",
        b'{"a":' + b"[" * 600 + b"]" * 600,
    ],
)
def test_what_is_no_json_object_is_refused(body: bytes) -> None:
    with pytest.raises(TopicsError) as refused:
        decode_config(body, "t")
    assert refused.value.code is Code.INVALID_REQUEST


def test_an_inline_configuration_of_another_type_is_refused_as_config() -> None:
    with pytest.raises(TopicsError) as refused:
        decode_inline_config(b"[]", "t")
    assert field_of(refused) == "config"


def test_nesting_beyond_the_limit_is_refused_in_unknown_fields_too() -> None:
    decode_config(b'{"x":' + b"[" * 511 + b"]" * 511 + b"}", "t")
    with pytest.raises(TopicsError):
        decode_config(b'{"x":' + b"[" * 512 + b"]" * 512 + b"}", "t")


# --- diff ---------------------------------------------------------------------------------


def test_an_empty_diff_is_every_default() -> None:
    request, shown = decode_diff(b"{}", 1000, 128)
    assert request == ReadRequest(from_seq=0, limit=256, max_bytes=1024 * 1024)
    assert shown == META | DATA


@pytest.mark.parametrize(
    ("body", "field", "expected"),
    [
        (b'{"limit":0}', "limit", 256),
        (b'{"limit":1}', "limit", 1),
        (b'{"limit":1001}', "limit", 1000),
        (b'{"limit":18446744073709551615}', "limit", 1000),
        (b'{"wait_ms":30000}', "wait_ms", 30_000),
        (b'{"wait_ms":30001}', "wait_ms", 30_000),
        (b'{"from_seq":18446744073709551615}', "from_seq", U64),
        (b'{"max_batch_bytes":0}', "max_bytes", 1024 * 1024),
        (b'{"max_batch_bytes":1}', "max_bytes", 1),
        (b'{"max_batch_bytes":99999999999}', "max_bytes", 8 * 1024 * 1024),
        (b'{"node":"a"}', "nodes", frozenset("a")),
        (b'{"node":["a","b","a"]}', "nodes", frozenset("ab")),
        (b'{"node":[]}', "nodes", frozenset()),
        (b'{"node":null}', "nodes", frozenset()),
    ],
)
def test_a_diff_is_clamped_not_refused(body: bytes, field: str, expected: object) -> None:
    assert getattr(decode_diff(body, 1000, 128)[0], field) == expected


def test_a_lower_configured_limit_also_bounds_the_default() -> None:
    assert decode_diff(b"{}", 10, 128)[0].limit == 10


@pytest.mark.parametrize("tags", [True, False])
@pytest.mark.parametrize("meta", [True, False])
def test_what_is_shown_is_chosen(tags: bool, meta: bool) -> None:
    body = json.dumps({"include_tags": tags, "include_meta": meta}).encode()
    assert decode_diff(body, 1000, 128)[1] == tags * TAGS + meta * META + DATA


@pytest.mark.parametrize("field", ["from_seq", "limit", "wait_ms", "max_batch_bytes"])
@pytest.mark.parametrize("value", NOT_U64)
def test_a_wrong_number_in_a_diff_is_refused(field: str, value: str) -> None:
    with pytest.raises(TopicsError) as refused:
        decode_diff(f'{{"{field}":{value}}}'.encode(), 1000, 128)
    assert field_of(refused) == field


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (b'{"node":5}', "node"),
        (b'{"node":["a",5]}', "node[1]"),
        (b'{"include_tags":1}', "include_tags"),
        (b'{"include_meta":"false"}', "include_meta"),
        (json.dumps({"node": ["n"] * 257}).encode(), "node"),
    ],
)
def test_a_wrong_type_in_a_diff_is_refused(body: bytes, field: str) -> None:
    with pytest.raises(TopicsError) as refused:
        decode_diff(body, 1000, 128)
    assert field_of(refused) == field


# --- delete -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "before_seq", "match"),
    [
        (b'{"before_seq":0}', 0, None),
        (b'{"before_seq":18446744073709551615}', U64, None),
        (b'{"match":"a*"}', None, TagMatch("a*")),
        (b'{"match":""}', None, TagMatch("")),
        (b'{"match":["tag","Eq","a*"]}', None, TagMatch("a*")),
        (b'{"match":["tag","Glob","a*"]}', None, TagMatch("a", is_prefix=True)),
        (b'{"match":["tag","Glob","*"]}', None, TagMatch("", is_prefix=True)),
        (b'{"match":"x","before_seq":5}', 5, TagMatch("x")),
        (b'{"match":"x","before_seq":null}', None, TagMatch("x")),
    ],
)
def test_every_form_of_a_delete(
    body: bytes, before_seq: int | None, match: TagMatch | None
) -> None:
    asked = decode_delete(body)
    assert (asked.before_seq, asked.match) == (before_seq, match)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (b"{}", None),
        (b'{"before_seq":null,"match":null}', None),
        (b'{"before_seq":-1}', "before_seq"),
        (b'{"before_seq":18446744073709551616}', "before_seq"),
        (b'{"before_seq":1.0}', "before_seq"),
        (b'{"match":5}', "match"),
        (b'{"match":{}}', "match"),
        (b'{"match":[]}', "match"),
        (b'{"match":["tag","Eq"]}', "match"),
        (b'{"match":["tag","Eq","a","b"]}', "match"),
        (b'{"match":["node","Eq","a"]}', "match[0]"),
        (b'{"match":["tag","eq","a"]}', "match[1]"),
        (b'{"match":["tag",["Eq"],"a"]}', "match[1]"),
        (b'{"match":["tag","Eq",5]}', "match[2]"),
        (b'{"match":["tag","Eq",null]}', "match[2]"),
        (b'{"match":["tag","Glob","a"]}', "match[2]"),
        (b'{"match":["tag","Glob",""]}', "match[2]"),
        (b'{"match":["tag","Glob","a*b*"]}', "match[2]"),
        (b'{"match":["tag","Glob","**"]}', "match[2]"),
    ],
)
def test_a_malformed_delete_is_refused(body: bytes, field: str | None) -> None:
    with pytest.raises(TopicsError) as refused:
        decode_delete(body)
    assert field_of(refused) == field


# --- headers and queries ------------------------------------------------------------------


def test_the_idempotency_header_is_text_of_1_to_256_characters() -> None:
    assert header_key(None) is None
    assert header_key(b"k") == "k"
    assert header_key("ä".encode() * 256) == "ä" * 256
    for bad in (b"", b"\xff", b"x" * 257):
        with pytest.raises(TopicsError) as refused:
            header_key(bad)
        assert field_of(refused) == "Idempotency-Key"


def test_a_query_is_unescaped_and_the_first_of_a_pair_counts() -> None:
    assert parse_query(b"") == {}
    assert parse_query(b"prefix=a%3Ab+c&x=&prefix=z&y") == {"prefix": "a:b c", "x": "", "y": ""}


@pytest.mark.parametrize("query", [b"prefix=%ff", b"prefix=\xc3\xa4"])
def test_a_query_that_is_no_text_is_refused(query: bytes) -> None:
    with pytest.raises(TopicsError) as refused:
        parse_query(query)
    assert refused.value.code is Code.INVALID_REQUEST


def test_query_booleans_are_true_or_false_only() -> None:
    assert query_bool({}, "touch", True) is True
    assert query_bool({"touch": "true"}, "touch", False) is True
    assert query_bool({"touch": "false"}, "touch", True) is False
    for bad in ("", "1", "True", "yes", "true "):
        with pytest.raises(TopicsError) as refused:
            query_bool({"touch": bad}, "touch", True)
        assert field_of(refused) == "touch"


@pytest.mark.parametrize(
    ("sent", "size"), [(None, 100), ("0", 100), ("1", 1), ("1000", 1000), ("1001", 1000)]
)
def test_page_size_is_clamped(sent: str | None, size: int) -> None:
    assert query_page_size({} if sent is None else {"page_size": sent}) == size


@pytest.mark.parametrize("sent", ["", "-1", "1.0", "x", "１", "9" * 21])
def test_a_page_size_that_is_no_number_is_refused(sent: str) -> None:
    with pytest.raises(TopicsError) as refused:
        query_page_size({"page_size": sent})
    assert field_of(refused) == "page_size"


def test_a_cursor_is_base64_of_json_and_comes_back() -> None:
    assert encode_cursor("jobs") == "eyJhZnRlciI6ImpvYnMifQ=="
    assert query_cursor({"cursor": encode_cursor("jobs:a.b_c-d")}) == "jobs:a.b_c-d"
    assert query_cursor({}) is None


@pytest.mark.parametrize(
    "cursor",
    [
        *("", "x", "!!!", "e30=", "bnVsbA==", "W10=", "eyJhZnRlciI6MX0=", "a" * 5000, "ä"),
        "eyJhZnRlciI6ImpvYnMifQ",
        base64.b64encode(b'{"after":"a/b"}').decode(),
        base64.b64encode(b'{"after":"\xff"}').decode(),
    ],
)
def test_a_cursor_we_never_gave_out_is_refused(cursor: str) -> None:
    with pytest.raises(TopicsError) as refused:
        query_cursor({"cursor": cursor})
    assert field_of(refused) == "cursor"
