"""WebSocket messages of the server: their members, their order, and payloads verbatim."""

from __future__ import annotations

import json
from array import array

import pytest

from topics_server.api.websocket.frames import (
    WS,
    Subscribed,
    ack,
    error,
    pong,
    subscribed,
    unsubscribed,
)
from topics_server.engine.answers import Appended, Page, Piece
from topics_server.engine.subscribe.subscription import CaughtUp, Records, Tombstone, TopicDeleted
from topics_server.values.blocks import make_block
from topics_server.values.errors import Code, TopicsError
from topics_server.values.json_cache import DATA, META, TAGS, JsonCache

TIME_MS = 1_780_420_000_000
CACHE = JsonCache()


def records(
    datas: list[bytes], *, shown: int = META | DATA, meta: bytes = b"", pieces: int = 1
) -> Records:
    count = len(datas)
    cut = [
        Piece(
            make_block(
                43 + count * index,
                array("q", [TIME_MS] * count),
                datas,
                [meta] * count,
                ["t"] * count,
                ["u018"] * count,
            ),
            range(count),
        )
        for index in range(pieces)
    ]
    last_seq = 42 + count * pieces
    page = Page(cut, last_seq, last_seq, 1)
    return Records("voice-room:green", page, shown, 42, last_seq, last_seq)


# --- events -------------------------------------------------------------------------------


def test_a_record_message_is_the_contract_s() -> None:
    assert WS.render(records([b'{ "packet": 1 }']), CACHE) == (
        b'{"op":"record","topic":"voice-room:green","from_seq":42,"to_seq":43,"head_seq":43,'
        b'"records":[{"$seq":43,"$ts":1780420000000,"$node":"u018","data":{ "packet": 1 }}]}'
    )


@pytest.mark.parametrize(
    "data", [b"1e400", b'{"a":1, "a":\n2}', b'"\\u00e9 \xc3\xa9\\ud83d\\ude00"', b"[ ]", b"-0"]
)
def test_data_and_meta_are_spliced_in_byte_for_byte(data: bytes) -> None:
    told = WS.render(records([data], meta=b'{"m" : 2}'), CACHE)
    assert told.endswith(b'"data":' + data + b',"meta":{"m" : 2}}]}')


def test_the_answer_has_the_requested_fields() -> None:
    told = json.loads(WS.render(records([b"1"], shown=TAGS, meta=b'{"m":2}'), CACHE))
    assert list(told["records"][0]) == ["$seq", "$ts", "$node", "$tag"]


def test_pieces_of_a_page_are_one_list() -> None:
    told = json.loads(WS.render(records([b"1", b"2"], pieces=3), CACHE))
    assert [record["$seq"] for record in told["records"]] == [43, 44, 45, 46, 47, 48]
    assert told["to_seq"] == 48


def test_the_other_events_are_the_contract_s() -> None:
    assert WS.render(CaughtUp("a", 43), CACHE) == b'{"op":"caught_up","topic":"a","head_seq":43}'
    assert WS.render(Tombstone("a", "cap", 1, 10, 11, 43), CACHE) == (
        b'{"op":"tombstone","topic":"a","reason":"cap","gap_from":1,"gap_to":10,'
        b'"earliest_seq":11,"head_seq":43}'
    )
    assert WS.render(TopicDeleted("a", 0), CACHE) == (
        b'{"op":"topic_deleted","topic":"a","head_seq":0,"reason":"deleted"}'
    )


def test_a_payload_is_a_text_message_and_the_end_a_close() -> None:
    assert WS.message('{"é":1}'.encode()) == {"type": "websocket.send", "text": '{"é":1}'}
    assert WS.last(1001) == {"type": "websocket.close", "code": 1001}
    assert WS.heartbeat(1) is None
    assert not WS.is_joined


def test_a_slow_client_is_told_by_name() -> None:
    told = json.loads(WS.too_slow())
    assert (told["op"], told["code"]) == ("error", "slow_consumer")
    assert json.loads(WS.failed(500, "no")) == {"op": "error", "code": "internal", "message": "no"}


# --- answers ------------------------------------------------------------------------------


def test_subscribed_lists_where_each_topic_starts() -> None:
    topics = [("voice-room:green", Subscribed(42, 42, 1)), ("b", Subscribed(0, 9, 10))]
    assert subscribed("s1", topics) == (
        b'{"op":"subscribed","request_id":"s1","topics":{"voice-room:green":{"from_seq":42,'
        b'"head_seq":42,"earliest_seq":1},"b":{"from_seq":0,"head_seq":9,"earliest_seq":10}}}'
    )
    assert "request_id" not in json.loads(subscribed(None, topics))


def test_unsubscribed_repeats_what_was_named() -> None:
    told = unsubscribed("u1", ["a"], is_list=False)
    assert told == b'{"op":"unsubscribed","request_id":"u1","topic":"a"}'
    told = unsubscribed(None, ["a"], is_list=True)
    assert told == b'{"op":"unsubscribed","topics":["a"]}'


def test_pong_repeats_the_request_id() -> None:
    assert pong("ping-1") == b'{"op":"pong","request_id":"ping-1"}'
    assert pong(None) == b'{"op":"pong"}'
    assert json.loads(pong('"\\\n\u0000é')) == {"op": "pong", "request_id": '"\\\n\u0000é'}


def test_an_ack_has_the_seqs_and_the_times_measured() -> None:
    done = Appended(41, 43, 44, write_ms=0.25, sync_ms=0.5, throttle_wait_ms=1.0)
    assert ack("p1", "a", done, with_seqs=True, total_ms=2.0) == (
        b'{"op":"ack","request_id":"p1","topic":"a","first_seq":41,"last_seq":43,'
        b'"seqs":[41,42,43],"head_seq":44,"count":3,"performance":{"server_total_ms":2.000,'
        b'"wal_append_ms":0.250,"fsync_ms":0.500,"throttle_wait_ms":1.000}}'
    )


def test_an_ack_leaves_out_what_is_absent_or_false() -> None:
    told = json.loads(ack(None, "a", Appended(1, 1, 1), with_seqs=False, total_ms=0.1))
    assert list(told) == [
        *("op", "topic", "first_seq", "last_seq", "head_seq", "count", "performance"),
    ]
    told = json.loads(ack("p", "a", Appended(7, 7, 7, created=True), with_seqs=True, total_ms=0.1))
    assert (told["created"], told["seqs"], "deduped" in told) == (True, [7], False)
    told = json.loads(ack("p", "a", Appended(7, 7, 9, deduped=True), with_seqs=False, total_ms=0.1))
    assert (told["deduped"], "created" in told) == (True, False)


def test_an_error_has_the_code_and_its_detail() -> None:
    refusal = TopicsError(Code.TOPIC_NOT_FOUND, 'topic "é" is not there', {"topic": "é"})
    assert json.loads(error("p2", refusal)) == {
        "op": "error",
        "request_id": "p2",
        "code": "topic_not_found",
        "message": 'topic "é" is not there',
        "detail": {"topic": "é"},
    }
    told = json.loads(error(None, TopicsError(Code.INTERNAL, "x")))
    assert told == {"op": "error", "code": "internal", "message": "x"}
