"""`api/streams/frames`: no payload can break out of its event."""

from __future__ import annotations

import base64
import json

import pytest

from tests.unit.api.streams.test_pages import page
from topics_server.api.streams.frames import control_frame, data_frame, headers_of


def with_id(frame: bytes, seq: int = 1) -> bytes:
    """The frame with the offset after its messages as its id."""
    return frame.removesuffix(b"\n") + b"id:%016d_%016d\n\n" % (seq, 7)


@pytest.mark.parametrize(
    ("body", "frame"),
    [
        (b"a", b"event: data\ndata:a\n\n"),
        (b"a\nb\r\nc\rd", b"event: data\ndata:a\ndata:b\ndata:c\ndata:d\n\n"),
        (b"a\n", b"event: data\ndata:a\ndata:\n\n"),
        (b" a\n  b", b"event: data\ndata:  a\ndata:   b\n\n"),
        (b"a\n\nevent: x", b"event: data\ndata:a\ndata:\ndata:event: x\n\n"),
        (b"\xff", b"event: data\ndata:\xef\xbf\xbd\n\n"),
    ],
)
def test_lines_of_text(body: bytes, frame: bytes) -> None:
    assert data_frame(page(body)) == with_id(frame)


def test_messages_of_a_page_are_one_event() -> None:
    assert data_frame(page(b"\xc3", b"\xa4")) == with_id(b"event: data\ndata:\xc3\xa4\n\n", 2)
    array = data_frame(page(b'{\n"a":1}', b"2", kind="application/json"))
    assert array == with_id(b'event: data\ndata:[{\ndata:"a":1},2]\n\n', seq=2)
    encoded = data_frame(page(b"\0", b"\n", kind="image/png"))
    assert base64.b64decode(encoded.partition(b"\ndata:")[2].partition(b"\n")[0]) == b"\0\n"
    assert data_frame(page()) == b""


def test_only_bytes_are_encoded() -> None:
    for kind, is_encoded in (
        ("text/plain", False),
        ("TEXT/html; charset=utf-8", False),
        ("application/json", False),
        ("application/octet-stream", True),
        ("application/xml", True),
    ):
        told = dict(headers_of(page(kind=kind).view))
        assert (b"stream-sse-data-encoding" in told) is is_encoded
        assert told[b"content-type"] == b"text/event-stream"


def told(frame: bytes) -> object:
    assert frame.startswith(b"event: control\ndata:{")
    value, _, last = frame.partition(b"data:")[2].partition(b"\nid:")
    found: dict[str, object] = json.loads(value)
    assert last == b"%b\n\n" % str(found["streamNextOffset"]).encode()
    return found


def test_control_says_where_it_goes_on() -> None:
    offset = "0000000000000001_0000000000000007"
    assert told(control_frame(page(b"a"), 5)) == {
        "streamNextOffset": offset,
        "streamCursor": "5",
        "upToDate": True,
    }
    assert told(control_frame(page(b"a", is_up_to_date=False), 5)) == {
        "streamNextOffset": offset,
        "streamCursor": "5",
    }
    assert told(control_frame(page(b"a", is_closed=True), 5)) == {
        "streamNextOffset": offset,
        "streamClosed": True,
    }
