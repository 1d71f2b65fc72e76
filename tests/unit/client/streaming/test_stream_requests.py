"""`client.streaming.stream_requests`: bodies, and a reader that goes from page to page."""

from __future__ import annotations

from typing import Any

import pytest

from topics_server.client.errors import BadAnswer, Refused
from topics_server.client.streaming import stream_requests
from topics_server.client.streaming.stream_requests import (
    StreamChunk,
    StreamEnd,
    StreamGap,
    StreamReader,
    stream_address,
)

JSON = stream_address("chat/a b", "application/json", "http://h/")
TEXT = stream_address("/v1/stream/notes", "text/plain", None)


def chunk(cursor: str, data: bytes = b"[1]", **more: Any) -> StreamChunk:
    facts = {"server_cursor": "", "is_up_to_date": True, "is_closed": False, **more}
    return StreamChunk(data=data, content_type="application/json", cursor=cursor, **facts)


def test_messages_are_a_list_and_bytes_are_joined() -> None:
    call = stream_requests.append(JSON, ({"n": 1}, [2]), "k", close=False)
    assert (call.path, call.body) == ("/v1/stream/chat/a%20b", b'[{"n":1},[2]]')
    assert call.headers == {"content-type": "application/json", "idempotency-key": "k"}
    assert stream_requests.append(TEXT, ("é", b"x"), "k", close=True).body == "éx".encode()
    closing = stream_requests.append(TEXT, (), "k", close=True)
    assert closing.body is None
    assert closing.headers == {
        "content-type": "text/plain",
        "idempotency-key": "k",
        "stream-closed": "true",
    }
    with pytest.raises(ValueError, match="nothing to append"):
        stream_requests.append(JSON, (), "k", close=False)
    with pytest.raises(TypeError):
        stream_requests.append(TEXT, (1,), "k", close=False)
    with pytest.raises(ValueError, match="must not be empty"):
        stream_address("/", "text/plain", None)
    with pytest.raises(ValueError, match="a content type must be"):
        stream_address("s", "text/plain\r\nX: 1", None)
    with pytest.raises(ValueError, match="an idempotency key must be"):
        stream_requests.append(JSON, (1,), "k\n", close=False)


def test_a_read_ends_at_the_end_and_a_live_one_when_the_stream_is_closed() -> None:
    reader = StreamReader(JSON, None, is_live=False)
    reader.starts_at(StreamEnd("0002_1", "application/json", is_closed=False))
    call = reader.call()
    assert call is not None
    assert call.path.endswith("?offset=-1&live=long-poll")
    assert len(reader.take(chunk("0001_1", is_up_to_date=False, server_cursor="5"))) == 1
    call = reader.call()
    assert call is not None
    assert call.path.endswith("?offset=0001_1&live=long-poll&cursor=5")
    reader.take(chunk("0002_1"))
    assert reader.call() is None

    overtaken = StreamReader(JSON, None, is_live=False)
    overtaken.starts_at(StreamEnd("0002_1", "application/json", is_closed=False))
    overtaken.take(chunk("0001_1", is_up_to_date=False))
    assert overtaken.call() is not None
    overtaken.take(chunk("0002_1", is_up_to_date=False))
    assert overtaken.call() is None, "what writers appended meanwhile belongs to the next read"

    follower = StreamReader(JSON, "0002_1", is_live=True)
    follower.starts_at(StreamEnd("0002_1", "application/json", is_closed=False))
    assert follower.take(chunk("0002_1", b"")) == []
    assert follower.call() is not None
    follower.take(chunk("0003_1", is_closed=True))
    assert follower.call() is None


@pytest.mark.parametrize(
    ("offset", "closed", "cursor", "is_live", "is_done"),
    [
        ("0000_1", False, None, False, True),
        ("0000_1", False, None, True, False),
        ("0000_1", True, None, True, True),
        ("0002_1", False, "0002_1", False, True),
        ("0002_1", False, None, False, False),
    ],
)
def test_a_reader_at_the_end_asks_for_nothing(
    offset: str, closed: bool, cursor: str | None, is_live: bool, is_done: bool
) -> None:
    reader = StreamReader(JSON, cursor, is_live=is_live)
    reader.starts_at(StreamEnd(offset, "application/json", is_closed=closed))
    assert (reader.call() is None) is is_done


def test_a_lost_offset_is_a_gap_once() -> None:
    reader = StreamReader(JSON, "0001_1", is_live=False)
    gone = Refused(410, "stream_gone", "gone", {"next_offset": "0004_1"})
    assert reader.lost(gone) == [StreamGap("0001_1", "0004_1")]
    for error in (gone, Refused(410, "stream_gone", "deleted"), Refused(404, "x", "y")):
        with pytest.raises(Refused):
            reader.lost(error)


def test_a_page_that_is_no_list_is_a_bad_answer() -> None:
    assert chunk("1", b"").messages == []
    for data in (b"{}", b"<html>"):
        with pytest.raises(BadAnswer):
            _ = chunk("1", data).messages
