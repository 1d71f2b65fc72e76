"""`cli.importing.stamping`: what a line becomes, byte for byte, and which lines are refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from topics_server.cli.data.cutting import BadLine, Shape
from topics_server.cli.importing.stamping import (
    GapLine,
    LineStamper,
    Origin,
    Stamped,
    stamped_meta,
)

ORIGIN = Origin("s", line=1, seq=2, ts=3)
STAMP = b'"$imported":{"from":"s","line":1,"seq":2,"ts":3}'


def stamped(line: bytes, shape: Shape | None = None, time_field: str | None = None) -> bytes:
    (found,) = LineStamper(shape, time_field).stamped([line], 7, "s")
    assert isinstance(found, Stamped), found
    return found.text


def bad(line: bytes, shape: Shape | None = None, time_field: str | None = None) -> str:
    (found,) = LineStamper(shape, time_field).stamped([line], 7, "s")
    assert isinstance(found, BadLine), found
    assert found.line == 7
    return found.reason


@pytest.mark.parametrize(
    ("meta", "stored"),
    [
        (None, b"{%s}" % STAMP),
        (b"{}", b"{%s}" % STAMP),
        (b" { } ", b"{%s}" % STAMP),
        (b'{ "a" : 1e400,"a":2 }', b'{%s,"a" : 1e400,"a":2}' % STAMP),
        (b'{"imported":1}', b'{%s,"imported":1}' % STAMP),
        (b'{"a":"\\u0041"}', b'{%s,"a":"\\u0041"}' % STAMP),
    ],
)
def test_the_stamp_is_the_first_member_and_the_others_keep_their_bytes(
    meta: bytes | None, stored: bytes
) -> None:
    assert stamped_meta(meta, ORIGIN) == stored


@pytest.mark.parametrize("name", [b"$imported", b"\\u0024imported", b"$im\\u0070orted"])
def test_an_earlier_stamp_becomes_part_of_the_new_one(name: bytes) -> None:
    found = json.loads(stamped_meta(b'{"a":1,"' + name + b'":{"ts":9}}', ORIGIN))
    assert found == {
        "$imported": {"from": "s", "line": 1, "seq": 2, "ts": 3, "before": {"ts": 9}},
        "a": 1,
    }


def test_a_line_of_an_export_keeps_the_bytes_of_its_parts() -> None:
    line = (
        b'{"$seq":5,"$ts":-8,"$node":"n\\u00e9","$tag":"t","data":{ "b":1e400, "b":[] },'
        b'"meta":{"k" : 1}}'
    )
    assert stamped(line) == (
        b'{"data":{ "b":1e400, "b":[] },"tag":"t","node":"n\\u00e9",'
        b'"meta":{"$imported":{"from":"s","line":7,"seq":5,"ts":-8},"k" : 1}}'
    )


def test_a_line_as_a_writer_sends_it_has_no_time() -> None:
    assert stamped(b'{"data":null,"tag":"t","node":null,"meta":null,"$new":1}') == (
        b'{"data":null,"tag":"t","meta":{"$imported":{"from":"s","line":7}}}'
    )


def test_a_trace_is_kept_in_the_stamp() -> None:
    """An import sends no request of its own for each record, so the trace goes into the record's
    stamp.
    """
    trace = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    line = b'{"$seq":5,"$ts":8,"$trace":"%s","data":1}' % trace.encode()
    assert stamped(line) == (
        b'{"data":1,"meta":{"$imported":{"from":"s","line":7,"seq":5,"ts":8,"trace":"%s"}}}'
        % trace.encode()
    )


def test_bytes_keep_their_content_type_in_the_stamp() -> None:
    found = json.loads(
        stamped(b'{"$seq":1,"$ts":2,"$encoding":"base64","$content_type":"a/b","data":"QQ=="}')
    )
    assert found["data"] == "QQ=="
    assert found["meta"]["$imported"] == {
        "from": "s", "line": 7, "seq": 1, "ts": 2, "encoding": "base64", "content_type": "a/b"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("time", "ts"),
    [
        (b"1748450001000", 1748450001000),
        (b'"2025-05-28T16:33:21Z"', 1748450001000),
        (b'"2025-05-28T18:33:21.000+02:00"', 1748450001000),
        (b'"2025-05-28T16:33:21"', 1748450001000),
        (b"-1", -1),
    ],
)
@pytest.mark.parametrize("shape", [None, Shape(data="data")])
def test_a_field_can_hold_the_time(time: bytes, ts: int, shape: Shape | None) -> None:
    found: Any = json.loads(stamped(b'{"at":%s,"data":1}' % time, shape, "at"))
    assert found["data"] == 1
    assert found["meta"]["$imported"]["ts"] == ts


def test_whole_lines_are_data() -> None:
    assert stamped(b'{"at":3,"x":1}', Shape(), "at") == (
        b'{"data":{"at":3,"x":1},"meta":{"$imported":{"from":"s","line":7,"ts":3}}}'
    )


def test_a_line_of_a_gap_is_a_gap() -> None:
    line = b'{"tombstone":{"gap_from":3,"gap_to":9,"reason":"cap","missed_estimate":7}}'
    (found,) = LineStamper(None, None).stamped([line], 1, "s")
    assert found == GapLine(3, 9, "cap")


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"{", "not JSON"),
        (b"[1]", "Expected `object`"),
        (b'{"data":"\xff"}', "not UTF-8"),
        (b'{"tag":"t"}', "a record has a member 'data'"),
        (b'{"data":1,"user":2}', "the member 'user' is not one of a record"),
        (b'{"data":1,"tag":5}', "the member 'tag' is not a JSON string"),
        (b'{"data":1,"$node":{}}', "the member '$node' is not a JSON string"),
        (b'{"data":1,"meta":[]}', "the member 'meta' is not a JSON object"),
        (b'{"data":1,"$ts":"x"}', "Expected `int | null`"),
        (b'{"data":1,"$seq":99999999999999999}', "the member '$seq' is too large"),
        (b'{"tombstone":{}}', "missing required field"),
        (b'{"data":' + b"[" * 3000 + b"]" * 3000 + b"}", "not JSON"),
    ],
)
def test_lines_that_are_no_records_say_why(line: bytes, reason: str) -> None:
    assert reason in bad(line)


@pytest.mark.parametrize("time", [b'"yesterday"', b"true", b"1.5", b"[]", b"99999999999999999"])
def test_a_time_that_is_none_is_a_bad_line(time: bytes) -> None:
    assert "the field 'at' is not a time" in bad(b'{"at":%s,"data":1}' % time, None, "at")


def test_one_bad_line_does_not_spoil_the_others() -> None:
    found = LineStamper(None, None).stamped([b'{"data":1}', b"x", b'{"data":2}'], 1, "s")
    assert [isinstance(each, Stamped) for each in found] == [True, False, True]
