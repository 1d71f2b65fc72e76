"""The fields of a response head about its body, and their order."""

from __future__ import annotations

import pytest

from topics_server.http.responses import (
    Response,
    last_lines,
    lines_of,
    tell_of_body,
    tell_of_kind,
    wants_gzip,
)


def told_of(response: Response, *, is_packed: bool = False) -> list[tuple[bytes, bytes]]:
    told = [(b"first", b"1")]
    tell_of_body(told, response, 7, b"id", is_packed=is_packed)
    return told


def test_what_differs_from_answer_to_answer_comes_last() -> None:
    varying = lines_of((b"etag", b'"a: b"'), (b"location", b"http://x/y"))
    assert told_of(Response(200, b"", varying=varying), is_packed=True) == [
        (b"first", b"1"),
        (b"content-type", b"application/json"),
        (b"content-encoding", b"gzip"),
        (b"vary", b"accept-encoding"),
        (b"etag", b'"a: b"'),
        (b"location", b"http://x/y"),
        (b"x-request-id", b"id"),
        (b"content-length", b"7"),
    ]


@pytest.mark.parametrize("status", [204, 304])
def test_without_a_body_there_is_no_type_and_no_length(status: int) -> None:
    assert told_of(Response(status, b"")) == [(b"first", b"1"), (b"x-request-id", b"id")]


@pytest.mark.parametrize("status", [200, 204])
@pytest.mark.parametrize("varying", [b"", b"etag: 1\r\n"])
def test_both_forms_of_a_head_say_the_same(status: int, varying: bytes) -> None:
    response = Response(status, b"", varying=varying)
    told = [(b"first", b"1")]
    tell_of_kind(told, response, is_packed=False)
    assert lines_of(*told) + last_lines(response, 7, b"id") + b"\r\n" == lines_of(
        *told_of(response)
    )


def test_a_type_that_is_empty_is_not_told() -> None:
    told = told_of(Response(200, b"", content_type=b""))
    assert b"content-type" not in dict(told)


def test_only_what_is_large_enough_is_packed_and_only_for_who_asked() -> None:
    asks = {b"accept-encoding": b"gzip"}
    assert wants_gzip(256, asks)
    assert not wants_gzip(255, asks)
    assert not wants_gzip(256, {})
