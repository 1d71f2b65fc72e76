"""The limits of one append, each tested at its edge."""

from __future__ import annotations

from typing import Any

import pytest

from topics_server.engine.topic.writes.keyed_records import check_key
from topics_server.values.appends import (
    AppendLimits,
    DecodedAppend,
    check_limits,
    of_columns,
)
from topics_server.values.errors import Code, TopicsError

LIMITS = AppendLimits(
    max_batch_records=3,
    max_record_bytes=1_000,
    max_meta_bytes=600,
    max_tag_bytes=8,
    max_node_bytes=6,
)


def batch(count: int = 1, **last: Any) -> DecodedAppend:
    """Records `0`, the last one with these columns."""
    plain = count - 1
    absent: list[str | None] = [None] * plain
    return of_columns(
        datas=[b"0"] * plain + [last.get("data", b"0")],
        metas=[b""] * plain + [last.get("meta", b"")],
        tags=[*absent, last.get("tag")],
        nodes=[*absent, last.get("node")],
    )


def meta_of(keys: int) -> bytes:
    return b"{" + b",".join(b'"%d":":"' % key for key in range(keys)) + b"}"


@pytest.mark.parametrize(
    "decoded",
    [
        batch(3),
        batch(data=b"x" * 1_000),
        batch(data=b"x" * 900, meta=b"m" * 100),
        batch(meta=b"{" + b" " * 598 + b"}"),
        batch(meta=meta_of(64)),
        batch(tag="12345678", node="123456"),
        batch(tag="äöü€"[:3] + "12", node="äöü"),
        batch(tag="", node=""),
    ],
)
def test_what_is_on_the_bound_is_let_in(decoded: DecodedAppend) -> None:
    check_limits(decoded, LIMITS)


@pytest.mark.parametrize(
    ("decoded", "code", "field"),
    [
        (batch(4), Code.BATCH_TOO_LARGE, "records"),
        (batch(2, data=b"x" * 1_001), Code.RECORD_TOO_LARGE, "records[1]"),
        (batch(3, data=b"x" * 901, meta=b"m" * 100), Code.RECORD_TOO_LARGE, "records[2]"),
        (batch(2, meta=b"m" * 601), Code.INVALID_REQUEST, "records[1].meta"),
        (batch(2, meta=meta_of(65)), Code.INVALID_REQUEST, "records[1].meta"),
        (batch(2, tag="123456789"), Code.INVALID_REQUEST, "records[1].tag"),
        (batch(2, tag="äöü€€"), Code.INVALID_REQUEST, "records[1].tag"),
        (batch(1, node="1234567"), Code.INVALID_REQUEST, "records[0].node"),
        (batch(3, node="äöüä"), Code.INVALID_REQUEST, "records[2].node"),
    ],
)
def test_what_is_over_a_bound_is_refused_with_its_path(
    decoded: DecodedAppend, code: Code, field: str
) -> None:
    with pytest.raises(TopicsError) as refusal:
        check_limits(decoded, LIMITS)
    assert refusal.value.code is code
    assert refusal.value.detail["field"] == field


def test_data_of_one_record_and_meta_of_another_do_not_add_up() -> None:
    decoded = of_columns(
        [b"x" * 900, b"0"], [b"", b"{" + b" " * 498 + b"}"], [None] * 2, [None] * 2
    )
    check_limits(decoded, LIMITS)


def test_the_key_in_the_body_wins_over_the_header() -> None:
    assert check_key("body", "header") == "body"
    assert check_key(None, "header") == "header"
    assert check_key(None, None) is None


@pytest.mark.parametrize("key", ["", "k" * 257])
def test_a_key_has_one_to_256_characters(key: str) -> None:
    assert check_key("k" * 256, None) == "k" * 256
    with pytest.raises(TopicsError) as body:
        check_key(key, "fine")
    assert body.value.detail == {"field": "idempotency_key"}
    with pytest.raises(TopicsError) as header:
        check_key(None, key)
    assert header.value.detail == {"field": "Idempotency-Key"}
