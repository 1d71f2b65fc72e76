"""`api/messages/path_names`: each path has one reading."""

from __future__ import annotations

import pytest

from topics_server.api.messages.path_names import (
    name_of,
    router_name_of,
    stream_path_of,
    stream_source_of,
    stream_url_path,
)
from topics_server.values.errors import Code, TopicsError


@pytest.mark.parametrize(
    ("escaped", "path"),
    [
        (b"a", "a"),
        (b"a/b/c", "a/b/c"),
        (b"a%20b", "a b"),
        (b"%c3%a4", "\N{LATIN SMALL LETTER A WITH DIAERESIS}"),
        (b"%41", "A"),
        (b"...", "..."),
        (b"a/.b", "a/.b"),
        (b"%25", "%"),
        (b"%252F", "%2F"),
        (b"a+b", "a+b"),
        (b"x" * 1024, "x" * 1024),
        (b"%f0%9f%98%80", "\N{GRINNING FACE}"),
    ],
)
def test_a_path_is_decoded_once(escaped: bytes, path: str) -> None:
    assert stream_path_of(escaped) == path
    assert stream_path_of(stream_url_path("", path).removeprefix("/").encode()) == path


@pytest.mark.parametrize(
    "escaped",
    [
        *(b"", b"/", b"a/", b"/a", b"a//b", b".", b"..", b"a/./b", b"%2e", b"a/%2E%2e"),
        *(b"a%2fb", b"%2F", b"%", b"a%4", b"%g0", b"%ff", b"%c0%af", b"%00", b"a%0d", b"%7f"),
        *(b"%c2%80", b"x" * 1025, b"%c3%a4" * 513, b"%ed%a0%80"),
    ],
)
def test_ambiguous_requests_are_refused(escaped: bytes) -> None:
    with pytest.raises(TopicsError) as raised:
        stream_path_of(escaped)
    assert raised.value.code is Code.INVALID_REQUEST
    assert raised.value.detail == {"field": "path"}


def test_a_source_is_below_the_mount() -> None:
    assert stream_source_of(b"/v1/stream/a%20b/c", "/v1/stream", "F") == "a b/c"
    for sent in (b"", b"a", b"/v1/streams/a", b"/v1/stream", b"/v1/stream/", b"/v1/stream/a?b"):
        with pytest.raises(TopicsError) as raised:
            stream_source_of(sent, "/v1/stream", "F")
        assert raised.value.detail == {"field": "F"}


def test_names_of_topics_and_routers() -> None:
    assert name_of(b"a.b") == "a.b"
    assert router_name_of(b"a>b") == "a>b"
    for call in (name_of, router_name_of):
        with pytest.raises(TopicsError):
            call(b"a/b")
