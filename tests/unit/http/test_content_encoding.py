"""The decoded body, and gzip in both directions."""

from __future__ import annotations

import gzip
import random
import tracemalloc

import pytest

from topics_server.http.content_encoding import accepts_gzip, deflate, inflate, is_json_type
from topics_server.values.errors import Code, TopicsError


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
    assert inflate(
        gzip.compress(b"one ", mtime=0)
        + gzip.compress(b"", mtime=0)
        + gzip.compress(b"two", mtime=0),
        7,
    ) == (b"one two")


@pytest.mark.parametrize("size", [1000, 300_000, 5_000_000])
def test_a_body_that_inflates_past_the_limit_is_refused(size: int) -> None:
    packed = gzip.compress(b"a" * size, mtime=0)
    assert len(inflate(packed, size)) == size
    with pytest.raises(TopicsError) as refused:
        inflate(packed, size - 1)
    assert refused.value.code is Code.PAYLOAD_TOO_LARGE


@pytest.mark.parametrize(
    "packed",
    [
        b"not gzip",
        gzip.compress(b"hello" * 100, mtime=0)[:-1],
        gzip.compress(b"hello" * 100, mtime=0)[:10],
        b"\x1f",
        gzip.compress(b"hello", mtime=0) + b"tail",
        gzip.compress(b"hello", mtime=0)[:-8] + b"\0" * 8,
    ],
)
def test_bytes_that_are_no_whole_gzip_are_refused(packed: bytes) -> None:
    with pytest.raises(TopicsError) as refused:
        inflate(packed, 1_000_000)
    assert refused.value.code is Code.INVALID_REQUEST


MEMBERS = b"".join(gzip.compress(bytes([number]) * 1000, 1) for number in range(10))


@pytest.mark.parametrize(
    "packed",
    [
        gzip.compress(b"x" * 100_000, 9),
        gzip.compress(b"x" * 100_000, 0),
        gzip.compress(random.Random(1).randbytes(100_000)),
        gzip.compress(b"a" * 50_000, mtime=0)
        + gzip.compress(b"", mtime=0)
        + gzip.compress(b"b" * 50_000, mtime=0),
        *(
            gzip.compress(b"", mtime=0) * count + gzip.compress(b"x" * 100_000, mtime=0)
            for count in (1, 999)
        ),
    ],
)
def test_a_body_of_exactly_the_limit_is_taken_and_no_byte_more(packed: bytes) -> None:
    assert inflate(packed, 100_000) == gzip.decompress(packed)
    with pytest.raises(TopicsError) as caught:
        inflate(packed, 99_999)
    assert caught.value.code is Code.PAYLOAD_TOO_LARGE
    assert caught.value.detail == {"limit": "max_body_bytes", "max": 99_999}


def test_members_are_read_one_behind_the_other_and_bounded() -> None:
    assert inflate(MEMBERS, 10_000) == gzip.decompress(MEMBERS)
    with pytest.raises(TopicsError) as caught:
        inflate(gzip.compress(b"", mtime=0) * 1001, 10_000)
    assert caught.value.code is Code.INVALID_REQUEST


@pytest.mark.parametrize("cut", [1, 5, 10, 18, 25, 100, len(MEMBERS) - 1])
def test_a_body_that_is_cut_is_refused(cut: int) -> None:
    with pytest.raises(TopicsError) as caught:
        inflate(MEMBERS[:cut], 10_000)
    assert caught.value.code is Code.INVALID_REQUEST


def test_a_bomb_is_never_built() -> None:
    bomb = gzip.compress(b"\0" * 200_000_000, 9)
    tracemalloc.start()
    try:
        with pytest.raises(TopicsError) as caught:
            inflate(bomb, 1_000_000)
        assert tracemalloc.get_traced_memory()[1] < 5_000_000
    finally:
        tracemalloc.stop()
    assert caught.value.code is Code.PAYLOAD_TOO_LARGE


def test_bytes_behind_the_last_member_are_refused() -> None:
    with pytest.raises(TopicsError) as caught:
        inflate(MEMBERS + b"more", 1_000_000)
    assert caught.value.code is Code.INVALID_REQUEST
