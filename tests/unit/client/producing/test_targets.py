"""The bytes of requests and answers of a producer's two targets."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from topics_server.client.errors import (
    BadAnswer,
    NotFound,
    Refused,
    StreamClosed,
    Throttled,
    Unauthorized,
)
from topics_server.client.producing.targets import (
    NUMBER_MAX,
    Accepted,
    Beaten,
    Repeated,
    StampGap,
    Target,
    target,
)

STREAM = "http://h:1/v1/stream/a/b"
TOPIC = target("t", "http://h:1", None)
JSONS = target(STREAM, None, None)
BYTES = target(STREAM, None, "text/plain; charset=utf-8")


def test_places() -> None:
    assert (TOPIC.url, TOPIC.path) == ("http://h:1", "/v0/topics/t?return_seqs=false")
    assert target("http://h:1/v0/topics/t", None, None) == TOPIC
    assert (JSONS.url, JSONS.path, JSONS.takes_json) == ("http://h:1", "/v1/stream/a/b", True)
    assert not BYTES.takes_json
    assert target(STREAM, None, "Application/JSON ;x=y").takes_json


@pytest.mark.parametrize(
    ("place", "url", "content_type"),
    [
        ("t", None, "text/plain"),
        (STREAM, "http://h:1", None),
        ("http://h:1/", None, None),
        ("http://h:1/a?b=c", None, None),
        ("ftp://h:1/a", None, None),
        ("http:///a", None, None),
    ],
)
def test_what_is_no_place(place: str, url: str | None, content_type: str | None) -> None:
    with pytest.raises(ValueError):
        target(place, url, content_type)


def test_bodies() -> None:
    records = [
        TOPIC.encode({"a": 1}, "x", {"m": 1}),
        TOPIC.encode(msgspec.Raw(b"1e400"), None, None),
    ]
    assert TOPIC.body(records, None) == (
        b'{"records":[{"data":{"a":1},"tag":"x","meta":{"m":1}},{"data":1e400}]}'
    )
    assert TOPIC.body(records[1:], "k") == b'{"records":[{"data":1e400}],"idempotency_key":"k"}'
    assert JSONS.body([JSONS.encode([1], None, None), b"2"], "k") == b"[[1],2]"
    assert BYTES.body([BYTES.encode(bytearray(b"ab"), None, None), b"c"], "k") == b"abc"


@pytest.mark.parametrize(
    ("where", "record", "tag"),
    [
        (TOPIC, b"x", None),
        (JSONS, b"x", None),
        (JSONS, 1, "t"),
        (BYTES, "x", None),
        (BYTES, b"", None),
    ],
)
def test_what_is_no_record(where: Target, record: Any, tag: str | None) -> None:
    with pytest.raises(TypeError):
        where.encode(record, tag, None)


def test_headers() -> None:
    assert JSONS.headers("pé", 1, 2) == [
        (b"Content-Type", b"application/json"),
        (b"Producer-Id", "pé".encode()),
        (b"Producer-Epoch", b"1"),
        (b"Producer-Seq", b"2"),
    ]


def test_verdicts_on_success() -> None:
    assert TOPIC.verdict(200, {}, b'{"first_seq":4,"x":1}') == Accepted(4)
    assert isinstance(TOPIC.verdict(200, {}, b"<html>"), BadAnswer)
    assert JSONS.verdict(200, {"stream-next-offset": "o"}, b"") == Accepted(offset="o")
    told = {"producer-seq": "7", "topic-first-seq": "3", "stream-next-offset": "o"}
    assert TOPIC.verdict(204, told, b"") == Repeated(7, 3, "o")
    assert JSONS.verdict(204, {}, b"") == Repeated(0)


@pytest.mark.parametrize("number", ["", "x", "-1", "1.0", "²", str(NUMBER_MAX + 1)])
def test_numbers_that_are_none(number: str) -> None:
    found = TOPIC.verdict(409, {"producer-expected-seq": number}, b"")
    assert isinstance(found, Refused)


def test_verdicts_on_refusals() -> None:
    assert JSONS.verdict(409, {"producer-expected-seq": "3"}, b"") == StampGap(3)
    assert JSONS.verdict(403, {"producer-epoch": "3"}, b"") == Beaten(3)
    assert isinstance(JSONS.verdict(403, {}, b""), Unauthorized)
    assert isinstance(JSONS.verdict(409, {"stream-closed": "TRUE"}, b""), StreamClosed)
    assert isinstance(JSONS.verdict(404, {}, b""), NotFound)
    late = JSONS.verdict(429, {"retry-after": "2"}, b"")
    assert isinstance(late, Throttled)
    assert late.retry_after_ms == 2000
