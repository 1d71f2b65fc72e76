"""What a body is, and gzip in both directions."""

from __future__ import annotations

import gzip

import pytest

from topics_server.api.coding import accepts_gzip, deflate, inflate, is_json_type
from topics_server.errors import Code, TopicsError


@pytest.mark.parametrize(
    "value",
    [
        b"application/json",
        b"Application/JSON",
        b"application/json; charset=utf-8",
        b"APPLICATION/JSON ;charset=UTF-8",
        b'application/json;profile="a;b"',
    ],
)
def test_json_is_json_in_any_case_with_any_parameters(value: bytes) -> None:
    assert is_json_type(value)


@pytest.mark.parametrize(
    "value", [None, b"", b"text/plain", b"application/jsonp", b"application/x-ndjson", b"json"]
)
def test_nothing_else_is_json(value: bytes | None) -> None:
    assert not is_json_type(value)


@pytest.mark.parametrize(
    ("value", "asked"),
    [
        (None, False),
        (b"", False),
        (b"gzip", True),
        (b"GZIP", True),
        (b"deflate, gzip, br", True),
        (b"br;q=1.0, gzip;q=0.8", True),
        (b"gzip; q=0.001", True),
        (b"x-gzip", True),
        (b"gzip;q=0", False),
        (b"gzip;Q=0", False),
        (b"gzip ; q=0.000", False),
        (b"identity", False),
        (b"*", False),
        (b"notgzip", False),
    ],
)
def test_gzip_is_sent_only_when_asked_for(value: bytes | None, asked: bool) -> None:
    assert accepts_gzip(value) is asked


def test_deflated_bytes_inflate_again() -> None:
    body = b'{"a": 1}' * 1000
    assert gzip.decompress(deflate(body)) == body
    assert inflate(deflate(body), len(body)) == body


def test_members_join() -> None:
    assert inflate(gzip.compress(b"one ") + gzip.compress(b"") + gzip.compress(b"two"), 7) == (
        b"one two"
    )


@pytest.mark.parametrize("size", [1000, 300_000, 5_000_000])
def test_a_body_that_inflates_past_the_limit_is_refused(size: int) -> None:
    packed = gzip.compress(b"a" * size)
    assert len(inflate(packed, size)) == size
    with pytest.raises(TopicsError) as refused:
        inflate(packed, size - 1)
    assert refused.value.code is Code.PAYLOAD_TOO_LARGE


@pytest.mark.parametrize(
    "packed",
    [
        b"not gzip",
        gzip.compress(b"hello" * 100)[:-1],
        gzip.compress(b"hello" * 100)[:10],
        b"\x1f",
        gzip.compress(b"hello") + b"tail",
        gzip.compress(b"hello")[:-8] + b"\0" * 8,
    ],
)
def test_bytes_that_are_no_whole_gzip_are_refused(packed: bytes) -> None:
    with pytest.raises(TopicsError) as refused:
        inflate(packed, 1_000_000)
    assert refused.value.code is Code.INVALID_REQUEST
