"""Which web pages may open a socket: their origin is this server's, or listed."""

from __future__ import annotations

import pytest

from topics_server.api.ws import check_origin
from topics_server.errors import Code, TopicsError

LISTED = frozenset({b"https://app.example", b"null"})


@pytest.mark.parametrize(
    ("origin", "host"),
    [
        (None, b"topics:4000"),
        (b"http://topics:4000", b"topics:4000"),
        (b"http://topics:4000", b"TOPICS:4000"),
        (b"https://topics", b"topics"),
        (b"https://topics", b"topics:443"),
        (b"http://topics", b"topics:80"),
        (b"http://[::1]:4000", b"[::1]:4000"),
        (b"https://app.example", b"topics"),
        (b"null", b"topics"),
    ],
)
def test_these_may(origin: bytes | None, host: bytes) -> None:
    headers = {b"host": host}
    if origin is not None:
        headers[b"origin"] = origin
    check_origin(headers, LISTED)


@pytest.mark.parametrize(
    ("origin", "host"),
    [
        (b"http://topics", b"topics:443"),
        (b"https://topics", b"topics:80"),
        (b"https://topics", b"topics:4000"),
        (b"http://other:4000", b"topics:4000"),
        (b"http://topics:40001", b"topics:4000"),
        (b"https://app.example.evil", b"topics"),
        (b"HTTPS://app.example", b"topics"),
        (b"http://", b""),
        (b"://topics", b"topics"),
        (b"topics", b"topics"),
        (b"file://topics", b"topics"),
        (b"http://topics", None),
        (b"\xff" * 1000, b"topics"),
    ],
)
def test_others_are_refused_with_what_they_said(origin: bytes, host: bytes | None) -> None:
    headers = {b"origin": origin} if host is None else {b"origin": origin, b"host": host}
    with pytest.raises(TopicsError) as refused:
        check_origin(headers, LISTED)
    assert refused.value.code is Code.FORBIDDEN
    assert refused.value.detail == {"origin": origin[:256].decode("latin-1")}
