"""Server-sent events: frames as a browser parses them."""

from __future__ import annotations

import json
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from topics_server.api.watch.sse import SSE, error_frame, frame, render
from topics_server.engine.answers import Page, Piece
from topics_server.engine.subscribe.subscription import (
    CaughtUp,
    Event,
    Records,
    Tombstone,
    TopicDeleted,
)
from topics_server.values.blocks import make_block
from topics_server.values.json_cache import DATA, META, TAGS, JsonCache


def parse(stream: bytes) -> list[tuple[str, str]]:
    """(event, data) of each event, by the rules of an EventSource."""
    events = []
    for chunk in stream.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n\n"):
        name, data = "", []
        for line in chunk.decode().split("\n"):
            field, _, value = line.partition(":")
            value = value.removeprefix(" ")
            if field == "event":
                name = value
            elif field == "data":
                data.append(value)
        if data:
            events.append((name, "\n".join(data)))
    return events


def records(*datas: bytes, shown: int = META | DATA) -> Records:
    count = len(datas)
    block = make_block(
        41, array("q", [7] * count), list(datas), [b""] * count, ["t"] * count, ["n"] * count
    )
    page = Page([Piece(block, range(count))], 40 + count, 99, 1)
    return Records("jobs", page, shown, 40, 40 + count, 99)


def test_a_record_frame_is_as_the_contract_shows_it() -> None:
    assert render(records(b'{"a":1}', b"2", shown=TAGS | META | DATA), JsonCache()) == (
        b'event: record\ndata: {"topic":"jobs","records":['
        b'{"$seq":41,"$ts":7,"$node":"n","$tag":"t","data":{"a":1}},'
        b'{"$seq":42,"$ts":7,"$node":"n","$tag":"t","data":2}'
        b'],"from_seq":40,"to_seq":42,"head_seq":99}\n\n'
    )


def test_data_can_be_left_out() -> None:
    (event,) = parse(render(records(b"1", shown=META), JsonCache()))
    assert json.loads(event[1])["records"] == [{"$seq": 41, "$ts": 7, "$node": "n"}]


@pytest.mark.parametrize(
    ("event", "expected"),
    [
        (
            Tombstone("e", "cap", 8, 10, 11, 20),
            b"event: tombstone\ndata: "
            b'{"topic":"e","reason":"cap","gap_from":8,"gap_to":10,"earliest_seq":11,"head_seq":20}',
        ),
        (CaughtUp("j", 5), b'event: caught-up\ndata: {"topic":"j","head_seq":5}'),
        (
            TopicDeleted("j", 12),
            b'event: topic-deleted\ndata: {"topic":"j","head_seq":12,"reason":"deleted"}',
        ),
    ],
)
def test_other_frames_are_as_the_contract_shows_them(event: Event, expected: bytes) -> None:
    assert render(event, JsonCache()) == expected + b"\n\n"


@given(st.lists(st.sampled_from(["{", '"a": 1', "\n", "\r", "\r\n", "}", " "]), max_size=12))
def test_line_breaks_between_tokens_come_through(parts: list[str]) -> None:
    """A break of any kind is a break to the reader; nothing else changes."""
    data = "".join(["[", *parts, "]"])
    assert parse(frame(b"record", data.encode())) == [
        ("record", data.replace("\r\n", "\n").replace("\r", "\n"))
    ]


def test_errors_have_a_code_like_http_s() -> None:
    assert parse(error_frame(409, "taken over")) == [("error", '{"code":409,"error":"taken over"}')]
    assert json.loads(parse(SSE.too_slow())[0][1])["code"] == 408


def test_a_heartbeat_is_a_comment() -> None:
    assert SSE.heartbeat(1748467205000) == b": hb 1748467205000\n\n"
    assert parse(b": hb 1748467205000\n\n") == []
