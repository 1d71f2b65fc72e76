"""`api/streams/request_headers`: the parsed headers of requests to streams."""

from __future__ import annotations

import pytest

from topics_server.api.streams.request_headers import (
    append_asked,
    closes,
    create_asked,
    read_asked,
)
from topics_server.streams.values import BEGINNING, CreateAsked, ForkAsked, Position
from topics_server.values.errors import TopicsError

MOUNT = "/v1/stream"


def create(**headers: bytes) -> CreateAsked:
    sent = {name.replace("_", "-").encode(): value for name, value in headers.items()}
    return create_asked(sent, b"", MOUNT)


@pytest.mark.parametrize(
    ("sent", "kind"),
    [
        (b"text/plain", "text/plain"),
        (b" text/plain;charset=utf-8 ", "text/plain;charset=utf-8"),
        (b"application/vnd.api+json", "application/vnd.api+json"),
        (b"text", None),
        (b"", None),
        (b"text/plain, a/b", None),
        (b"text/pl\xe4in", None),
        (b"text/plain; \xff", None),
    ],
)
def test_an_invalid_media_type_counts_as_missing(sent: bytes, kind: str | None) -> None:
    assert create(content_type=sent).content_type == kind


@pytest.mark.parametrize(
    ("sent", "ms"),
    [
        (b"1970-01-01T00:00:01Z", 1000),
        (b"1970-01-01t00:00:00.5z", 500),
        (b"1970-01-01T01:00:00.001999+01:00", 1),
        (b"1969-12-31T23:00:00-01:00", 0),
        (b"2024-02-29T12:00:00Z", 1_709_208_000_000),
    ],
)
def test_an_end_is_kept_as_it_was_sent(sent: bytes, ms: int) -> None:
    asked = create(stream_expires_at=sent)
    assert (asked.expires_at, asked.expires_at_ms) == (sent.decode(), ms)


def test_a_life_of_no_seconds_is_one() -> None:
    assert create(stream_ttl=b"0").ttl_s == 0
    assert create(stream_ttl=b"9007199254740").ttl_s == 9_007_199_254_740
    assert create().ttl_s is None


def test_a_fork_has_a_source_and_perhaps_a_place() -> None:
    source = b"/v1/stream/a/b"
    assert create(stream_forked_from=source).fork == ForkAsked("a/b")
    placed = create(
        stream_forked_from=source, stream_fork_offset=b"3_7", stream_fork_sub_offset=b"2"
    )
    assert placed.fork == ForkAsked("a/b", Position(3, 7), 2)
    assert create(stream_forked_from=source, stream_fork_sub_offset=b"0").fork == ForkAsked("a/b")
    assert create().fork is None


@pytest.mark.parametrize(
    ("sent", "is_closing"),
    [(b"true", True), (b" TRUE", True), (b"false", False), (b"1", False), (b"", False)],
)
def test_only_true_closes(sent: bytes, is_closing: bool) -> None:
    assert closes({b"stream-closed": sent}) is is_closing


def test_a_sequence_is_compared_byte_by_byte() -> None:
    headers = {b"content-type": b"text/plain"}
    seqs = [b"\x21", b"~", b"\x80", b"\xff"]
    asked = [append_asked({**headers, b"stream-seq": seq}).seq or "" for seq in seqs]
    assert asked == sorted(asked)
    assert append_asked(headers).seq is None


@pytest.mark.parametrize(
    ("query", "at", "explicit"),
    [
        (b"", BEGINNING, False),
        (b"offset=-1", BEGINNING, False),
        (b"offset=0_0", BEGINNING, True),
        (b"offset=5_7&a=b&a=c", Position(5, 7), True),
        (b"offset=now", None, False),
    ],
)
def test_a_read_begins_somewhere(query: bytes, at: Position | None, explicit: bool) -> None:
    asked = read_asked(query)
    assert (asked.at, asked.explicit, asked.live, asked.cursor) == (at, explicit, "", None)


def test_live_reads_have_an_offset_and_perhaps_a_cursor() -> None:
    assert read_asked(b"offset=-1&live=sse&cursor=12").cursor == 12
    assert read_asked(b"offset=-1&live=long-poll&cursor=x").cursor is None
    for query in (b"live=sse", b"offset=1_1&live=", b"offset=now&offset=now", b"offset=\xe4"):
        with pytest.raises(TopicsError):
            read_asked(query)
