"""§7, WebSocket: every command, its answer, their order, and how the socket ends.

`test_subscriptions.py` tests the frames of a subscription, `test_watch_bad_input.py` refused
commands and broken frames, `test_cors.py` origins.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable

import pytest

from tests.contract.conftest import NewServer
from tests.contract.driver import Api, Json, eventually, good, refused
from tests.contract.streams.streams import (
    BINARY,
    CLOSE,
    PING,
    PONG,
    TEXT,
    NothingCame,
    StreamEnded,
    WsClient,
    gauges,
    more_than,
    nothing_left,
)
from tests.contract.watch.subscriptions import Clients

Names = Callable[[str], str]


def _quiet(ws: WsClient, for_s: float = 0.4) -> None:
    with pytest.raises(NothingCame):
        ws.frame(for_s)


# --- subscribe, unsubscribe -----------------------------------------------------------------------


def test_subscribe_to_one_topic(api: Api, topic: str, clients: Clients) -> None:
    """§7-ws: the exact frames. [7-ws-01, 7-ws-04, 7-ws-05, 7-ws-10, 7-ws-11, 9-03]"""
    api.append(topic, [{"data": {"packet": 1}, "node": "u018", "tag": "t", "meta": {"m": 1}}])
    stamp = api.read_all(topic)[0]["$ts"]
    ws = clients.ws(api)
    ws.send(
        op="subscribe",
        request_id="s1",
        topic=topic,
        from_seq=0,
        node="u017",
        limit=1000,
        max_batch_bytes=8_388_608,
        include_data=True,
        include_tags=False,
        include_meta=False,
    )
    assert ws.frame() == {
        "op": "subscribed",
        "request_id": "s1",
        "topics": {topic: {"from_seq": 0, "head_seq": 1, "earliest_seq": 1}},
    }
    assert ws.frame() == {
        "op": "record",
        "topic": topic,
        "from_seq": 0,
        "to_seq": 1,
        "head_seq": 1,
        "records": [{"$seq": 1, "$ts": stamp, "$node": "u018", "data": {"packet": 1}}],
    }
    assert ws.frame() == {"op": "caught_up", "topic": topic, "head_seq": 1}
    api.drop(topic)
    assert ws.frame() == {"op": "topic_deleted", "topic": topic, "head_seq": 1, "reason": "deleted"}
    _quiet(ws)


def test_a_tombstone_has_exactly_these_fields(api: Api, topic: str, clients: Clients) -> None:
    """Contract §7-ws [7-ws-11]"""
    api.put(topic, {"cap_records": 1})
    for number in range(3):
        api.add(topic, number)
    eventually(lambda: bool(api.get_state(topic)["earliest_seq"] == 3), "two are evicted")
    ws = clients.ws(api)
    ws.send(op="subscribe", topic=topic)
    assert "request_id" not in ws.frame(), "absent values are absent"
    assert ws.frame() == {
        "op": "tombstone",
        "topic": topic,
        "reason": "from_seq_too_old",
        "gap_from": 1,
        "gap_to": 2,
        "earliest_seq": 3,
        "head_seq": 3,
    }


@pytest.mark.parametrize(
    ("place", "first"), [({}, 1), ({"from_seq": 3}, 4), ({"tail": True}, 6), ({"from_seq": 5}, 6)]
)
def test_where_a_single_topic_starts(
    api: Api, topic: str, clients: Clients, place: Json, first: int
) -> None:
    """§7-ws: `from_seq` and `tail` of the command set the start. [7-ws-04, 7-ws-05]"""
    api.add(topic, *range(5))
    ws = clients.ws(api)
    answer = ws.ask(op="subscribe", topic=topic, **place)
    assert answer["topics"][topic]["from_seq"] == first - 1
    api.add(topic, "live")
    seqs: list[int] = []
    while not seqs or seqs[-1] < 6:
        seqs += [record["$seq"] for record in ws.frame_of("record")["records"]]
    assert seqs == list(range(first, 7))


def test_several_subscriptions_share_a_socket(api: Api, names: Names, clients: Clients) -> None:
    """§7-ws: each subscription has its own options. [7-ws-01, 7-ws-04]"""
    plain, tagged, mapped = names("a"), names("b"), names("c")
    for name in (plain, tagged, mapped):
        api.append(name, [{"data": 1, "tag": "t", "node": "n"}])
    ws = clients.ws(api)
    ws.send(op="subscribe", request_id="1", topic=plain)
    ws.send(op="subscribe", request_id="2", topic=tagged, include_tags=True, include_data=False)
    ws.send(op="subscribe", request_id="3", topics={mapped: {"from_seq": 0}}, node="n")
    shown: dict[str, Json] = {}
    caught_up: set[str] = set()
    while len(caught_up) < 3:
        frame = ws.frame()
        if frame["op"] == "record":
            shown[frame["topic"]] = frame["records"][0]
        elif frame["op"] == "caught_up":
            caught_up.add(frame["topic"])
    assert set(shown[plain]) == {"$seq", "$ts", "$node", "data"}
    assert set(shown[tagged]) == {"$seq", "$ts", "$node", "$tag"}
    assert mapped not in shown
    for name in (mapped, tagged, plain):
        api.add(name, 2)
        assert ws.frame_of("record")["topic"] == name


def test_unsubscribe_ends_delivery_of_its_topic(api: Api, names: Names, clients: Clients) -> None:
    """§7-ws: the other subscriptions continue; the topic can be subscribed again. [7-ws-06]"""
    ends, stays = names("ends"), names("stays")
    for name in (ends, stays):
        api.add(name, 1)
    ws = clients.ws(api)
    ws.send(op="subscribe", topics={ends: {}, stays: {}})
    for _ in range(2):
        ws.frame_of("caught_up")
    ws.send(op="unsubscribe", request_id="u", topic=ends)
    assert ws.ask(op="ping")["op"] == "pong"
    api.add(ends, 2)
    api.add(stays, 2)
    frame = ws.frame_of("record")
    assert frame["topic"] == stays
    _quiet(ws)
    answer = ws.ask(op="subscribe", topic=ends, from_seq=1)
    assert answer["op"] == "subscribed"
    frame = ws.frame_of("record")
    assert (frame["topic"], [record["$seq"] for record in frame["records"]]) == (ends, [2])


def test_a_second_subscription_of_a_topic_replaces_the_first(
    api: Api, topic: str, clients: Clients
) -> None:
    """§7-ws: a topic has one position and one set of options; no record comes twice. [7-ws-16]"""
    api.add(topic, *range(5))
    ws = clients.ws(api)
    ws.ask(op="subscribe", topic=topic, tail=True)
    ws.frame_of("caught_up")
    ws.ask(op="subscribe", topic=topic, from_seq=3, include_data=False)
    frame = ws.frame_of("record")
    assert [record["$seq"] for record in frame["records"]] == [4, 5]
    assert "data" not in frame["records"][0]
    ws.frame_of("caught_up")
    api.add(topic, "once")
    assert len(ws.frame_of("record")["records"]) == 1
    _quiet(ws)


def test_a_topic_that_came_back_can_be_followed_again(
    api: Api, topic: str, clients: Clients
) -> None:
    """Contract §7.5, §7-ws [7-ws-11, 7.5-08]"""
    api.add(topic, "old")
    ws = clients.ws(api)
    ws.ask(op="subscribe", topic=topic)
    ws.frame_of("caught_up")
    api.drop(topic)
    ws.frame_of("topic_deleted")
    api.add(topic, "new")
    assert ws.ask(op="subscribe", topic=topic)["op"] == "subscribed"
    assert [r["data"] for r in ws.frame_of("record")["records"]] == ["new"]


# --- publish --------------------------------------------------------------------------------------


def test_publish_appends_and_is_acknowledged(api: Api, topic: str, clients: Clients) -> None:
    """§7-ws: a publish takes all fields of a record and writes to the same log as HTTP. [7-ws-01,
    7-ws-07]
    """
    # An append that creates its topic is synced; one to an existing topic follows its class.
    good(api.put(topic))
    ws = clients.ws(api)
    record = {"data": {"packet": 1}, "node": "u017", "tag": "t", "meta": {"m": [1]}}
    ack = ws.ask(op="publish", request_id="p1", topic=topic, records=[record, {"data": None}])
    assert ack["op"] == "ack"
    assert {"op", "request_id", "topic", "last_seq", "head_seq", "performance"} <= set(ack)
    assert (ack["request_id"], ack["topic"]) == ("p1", topic)
    assert (ack["last_seq"], ack["head_seq"]) == (2, 2)
    assert ack["performance"]["fsync_ms"] == 0
    assert None not in ack.values(), "absent values are absent"
    first, second = api.read_all(topic, include_tags=True)
    assert (first["data"], first["$node"], first["$tag"]) == ({"packet": 1}, "u017", "t")
    assert first["meta"] == {"m": [1]}
    assert second["data"] is None


def test_seqs_are_listed_on_request(api: Api, topic: str, clients: Clients) -> None:
    """Contract §7-ws [7-ws-08]"""
    ws = clients.ws(api)
    records = [{"data": n} for n in range(3)]
    assert ws.ask(op="publish", topic=topic, records=records, return_seqs=True)["seqs"] == [1, 2, 3]
    assert "seqs" not in ws.ask(op="publish", topic=topic, records=records, return_seqs=False)


def test_the_nodes_of_a_publish(api: Api, topic: str, clients: Clients) -> None:
    """§2, §7-ws: the command's `node` applies to records without one. [7-ws-07]"""
    ws = clients.ws(api)
    ws.ask(op="publish", topic=topic, node="batch", records=[{"data": 1}, {"data": 2, "node": "r"}])
    assert [record["$node"] for record in api.read_all(topic)] == ["batch", "r"]


def test_create_and_config(api: Api, names: Names, clients: Clients) -> None:
    """§2, §7-ws: `create` and `config` of a publish work as in an append. [7-ws-07]"""
    ws = clients.ws(api)
    absent, capped = names("absent"), names("capped")
    refusal = ws.ask(op="publish", topic=absent, create=False, records=[{"data": 1}])
    assert (refusal["op"], refusal["code"]) == ("error", "topic_not_found")
    refused(api.state(absent), 404, "topic_not_found")
    config = {"cap_records": 7, "durability": "fsync"}
    ack = ws.ask(op="publish", topic=capped, create=True, config=config, records=[{"data": 1}])
    assert ack["op"] == "ack"
    assert ack["performance"]["fsync_ms"] > 0
    state = api.get_state(capped)
    assert (state["config"]["cap_records"], state["config"]["durability"]) == (7, "fsync")
    refusal = ws.ask(op="publish", topic=capped, config={"type": "queue"}, records=[{"data": 1}])
    assert refusal["op"] in ("ack", "error")
    assert api.get_state(capped)["config"]["type"] == "log"


def test_a_repeated_idempotency_key_appends_nothing(api: Api, topic: str, clients: Clients) -> None:
    """§0.8, §7-ws: HTTP and WebSocket share the keys of a topic. [7-ws-07, 7-ws-01]"""
    ws = clients.ws(api)
    command: Json = {"op": "publish", "topic": topic, "records": [{"data": 1}, {"data": 2}]}
    first = ws.ask(**command, idempotency_key="k", return_seqs=True)
    again = ws.ask(**command, idempotency_key="k", return_seqs=True)
    assert first["seqs"] == again["seqs"] == [1, 2]
    over_http = good(api.append(topic, [{"data": 3}], idempotency_key="k"))
    assert over_http["deduped"] is True
    assert api.get_state(topic)["head_seq"] == 2


def test_a_full_topic_refuses_a_publish(api: Api, topic: str, clients: Clients) -> None:
    """Contract §0.10, §7-ws [7-ws-12, 7-ws-01]"""
    api.put(topic, {"cap_records": 2, "discard": "reject"})
    ws = clients.ws(api)
    refusal = ws.ask(op="publish", request_id="p", topic=topic, records=[{"data": 1}] * 3)
    assert (refusal["op"], refusal["request_id"], refusal["code"]) == ("error", "p", "topic_full")
    assert ws.ask(op="publish", topic=topic, records=[{"data": 1}])["last_seq"] == 1


def test_payloads_are_stored_byte_for_byte(api: Api, topic: str, clients: Clients) -> None:
    """Contract §7-ws, settled rules [S-01, S-02, 7-ws-01]"""
    value = '{ "a" :\t[ 1e400 ,\r\n 9007199254740993 ] , "a": "ä\\u0041" }'
    ws = clients.ws(api)
    ws.send_text(
        f'{{ "op" : "publish","topic":"{topic}", "records":[ {{"data": {value} }} ],'
        '"request_id":"p" }'
    )
    assert ws.answer("p")["op"] == "ack"
    answer = api.raw("POST", f"/v0/topics/{topic}/diff", b"{}", ["Content-Type: application/json"])
    assert value.encode() in answer.body
    ws.send(op="subscribe", topic=topic)
    while b'"record"' not in (text := ws.text()):
        continue
    assert f'"data":{value}}}'.encode() in text


def test_answers_come_in_the_order_of_the_commands(
    api: Api, names: Names, clients: Clients
) -> None:
    """§7-ws: the order holds whatever each command had to wait for. [7-ws-15, 7-ws-07]"""
    fast, slow = names("fast"), names("slow")
    api.put(fast, {"durability": "ephemeral"})
    api.put(slow, {"durability": "fsync"})
    ws = clients.ws(api)
    for number in range(40):
        name = (slow, fast)[number % 2]
        ws.send(op="publish", request_id=f"{number}", topic=name, records=[{"data": number}])
    acks = [ws.frame() for _ in range(40)]
    assert [ack["request_id"] for ack in acks] == [str(n) for n in range(40)]
    for name in (fast, slow):
        seqs = [ack["last_seq"] for ack in acks if ack["topic"] == name]
        assert seqs == list(range(1, 21))


@pytest.mark.parametrize("durability", ["ephemeral", "memory", "disk", "fsync"])
def test_a_publisher_that_listens_gets_its_ack_and_its_record_once_each(
    api: Api, topic: str, clients: Clients, durability: str
) -> None:
    """§7-ws: records come in the order of the log; with `node` the publisher does not get its own.
    [7-ws-15, 7.2-02]
    """
    api.put(topic, {"durability": durability})
    ws = clients.ws(api)
    ws.ask(op="subscribe", topic=topic, tail=True)
    ws.frame_of("caught_up")
    for number in range(20):
        ws.send(op="publish", request_id=f"{number}", topic=topic, records=[{"data": number}])
    acks: list[int] = []
    seqs: list[int] = []
    while len(acks) < 20 or len(seqs) < 20:
        frame = ws.frame()
        if frame["op"] == "ack":
            acks.append(frame["last_seq"])
        else:
            assert frame["op"] in ("record", "caught_up"), frame
            seqs += [record["$seq"] for record in frame.get("records", ())]
            assert len(seqs) <= len(acks), "an own record comes behind its acknowledgement"
    assert acks == seqs == list(range(1, 21))
    ws.ask(op="subscribe", topic=topic, tail=True, node="me")
    ws.frame_of("caught_up")
    assert ws.ask(op="publish", topic=topic, node="me", records=[{"data": 0}])["last_seq"] == 21
    _quiet(ws)


# --- ping, frames, limits -------------------------------------------------------------------------


def test_ping_is_answered(api: Api, clients: Clients) -> None:
    """Contract §7-ws, settled rules [7-ws-09, S-53, S-55]"""
    ws = clients.ws(api)
    ws.send(op="ping", request_id="ping-1")
    assert ws.frame() == {"op": "pong", "request_id": "ping-1"}
    ws.send(op="ping")
    assert ws.frame() == {"op": "pong"}


def test_the_protocols_own_ping_is_answered(api: Api, clients: Clients) -> None:
    """RFC 6455: the server answers ping frames of the protocol itself. [7-ws-01]"""
    raw = clients.raw_ws(api)
    raw.send(PING, b"are you there")
    assert raw.frame() == (PONG, b"are you there")


def test_a_message_may_come_in_fragments(api: Api, clients: Clients) -> None:
    """RFC 6455: a message may be cut anywhere, even inside a character. [7-ws-01]"""
    raw = clients.raw_ws(api)
    text = '{"op":"ping","request_id":"ä水"}'.encode()
    raw.send(TEXT, text[:25], first_bits=0)
    raw.send(PING, b"")
    for byte in text[25:-1]:
        raw.send(0, bytes([byte]), first_bits=0)
    raw.send(0, text[-1:])
    assert raw.frame() == (PONG, b"")
    opcode, answer = raw.frame()
    assert (opcode, json.loads(answer)["request_id"]) == (TEXT, "ä水")


def test_many_commands_at_once_are_all_answered(api: Api, clients: Clients) -> None:
    """§7-ws: there are more commands than may wait on one socket; the server reads the socket no
    faster than it answers. [7-ws-14]
    """
    ws = clients.ws(api)

    def send() -> None:
        for number in range(1000):
            ws.send(op="ping", request_id=f"{number}")

    sender = threading.Thread(target=send)
    sender.start()
    answers = [ws.frame()["request_id"] for _ in range(1000)]
    sender.join()
    assert answers == [str(n) for n in range(1000)]


def test_one_command_may_wait_at_a_time(own: NewServer, topic: str, clients: Clients) -> None:
    """§7-ws, settled rules: a setting limits the waiting commands; none is lost. [S-13, 7-ws-14]"""
    api = own(TOPICS_MAX_WS_COMMANDS="1").start()
    api.put(topic, {"durability": "fsync"})
    ws = clients.ws(api)
    for number in range(50):
        ws.send(op="publish", request_id=f"{number}", topic=topic, records=[{"data": number}])
    assert [ws.frame()["last_seq"] for _ in range(50)] == list(range(1, 51))


def test_a_message_over_the_limit_closes_with_1009(
    own: NewServer, topic: str, clients: Clients
) -> None:
    """Contract §7-ws: a message of exactly the limit passes, a larger one stores nothing.

    [7-ws-13, S-56, S-13]
    """
    api = own(TOPICS_MAX_WS_MESSAGE_BYTES="5000").start()
    ws = clients.ws(api)
    head, tail = (
        f'{{"op":"publish","topic":"{topic}","records":[{{"data":"',
        '"}],"request_id":"p"}',
    )
    fits = head + "x" * (5000 - len(head) - len(tail)) + tail
    ws.send_text(fits)
    assert ws.answer("p")["op"] == "ack"
    ws.send_text(head + "x" * (5001 - len(head) - len(tail)) + tail)
    assert ws.closed_with() == 1009
    raw = clients.raw_ws(api)
    for number in range(6):
        # If a message comes in fragments, its whole size counts.
        raw.send(0 if number else TEXT, b" " * 1000, first_bits=0)
    assert raw.closed_with() == 1009
    assert api.get_state(topic)["head_seq"] == 1
    eventually(lambda: gauges(api)[0] == 0, "both are gone")


def test_a_large_message_passes(api: Api, topic: str, clients: Clients) -> None:
    """§2, §7-ws: the largest record can be published and received. [7-ws-01]"""
    ws = clients.ws(api)
    data = "x" * 1_000_000
    assert ws.ask(op="publish", topic=topic, records=[{"data": data}])["op"] == "ack"
    ws.ask(op="subscribe", topic=topic)
    assert ws.frame_of("record")["records"][0]["data"] == data


# --- ends -----------------------------------------------------------------------------------------


def test_a_client_that_closes_is_answered_and_forgotten(api: Api, clients: Clients) -> None:
    """Settled rules of the contract, RFC 6455 [S-56, 11-15, 8.3-06]"""
    before = gauges(api)[0]
    raw = clients.raw_ws(api)
    assert gauges(api)[0] == before + 1
    raw.send(CLOSE, b"\x03\xe8bye")
    assert raw.closed_with(5) == 1000
    with pytest.raises(StreamEnded):
        raw.frame(5)
    eventually(lambda: gauges(api)[0] == before, "it is not counted")


def test_a_socket_that_is_closed_with_subscriptions_leaves_nothing(
    api: Api, topic: str, clients: Clients
) -> None:
    """§11: the slot is freed, however the socket ends. [11-15, 8.3-06]"""
    api.put(topic)
    before = gauges(api)
    sockets = [clients.ws(api) for _ in range(10)]
    for ws in sockets:
        assert ws.ask(op="subscribe", topic=topic)["op"] == "subscribed"
    assert more_than(api, before, streams=10), "a WebSocket is no session"
    for ws in sockets:
        ws.close()
    eventually(lambda: more_than(api, before), "all are gone")
    api.add(topic, 1)


def test_a_binary_frame_is_an_error_and_the_socket_stays(api: Api, clients: Clients) -> None:
    """Settled rules of the contract [S-54]"""
    raw = clients.raw_ws(api)
    raw.send(BINARY, b'{"op":"ping"}')
    opcode, text = raw.frame()
    error = json.loads(text)
    assert (opcode, error["op"], error["code"]) == (TEXT, "error", "invalid_request")
    raw.send(TEXT, b'{"op":"ping"}')
    assert raw.frame() == (TEXT, b'{"op":"pong"}')


def test_a_get_that_asks_for_no_upgrade_is_refused(api: Api) -> None:
    """§7-ws, §0.5: the refusal uses the error envelope. [9-03, 0.6-05]"""
    before = gauges(api)
    answer = api.raw("GET", "/v0/ws")
    assert answer.status in (400, 426)
    refused(answer, answer.status, "invalid_request")
    for method in ("POST", "PUT", "DELETE"):
        wrong = api.raw(method, "/v0/ws", b"{}" if method != "DELETE" else b"")
        refused(wrong, 405, "method_not_allowed")
    nothing_left(api, before)
