"""§7, §0.5: malformed sessions, streams, commands and frames: a clear refusal, and nothing leaks.

After each case the gauges of streams and
sessions are what they were before. Requests and frames are sent as bytes; `{t}` is a topic with
three records, `{a}` one that does not exist. Clients that vanish or stall are at the end.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest

from tests.contract.conftest import NewServer, new_name
from tests.contract.driver import Api, Json, Server, eventually, exchange, good, refused
from tests.contract.streams.streams import (
    CLOSE,
    PING,
    TEXT,
    RawWs,
    SseStream,
    WsClient,
    connected,
    gauges,
    more_than,
    nothing_left,
    reset,
)
from tests.contract.watch.subscriptions import Clients, id_of

MEDIA: Final = "Content-Type: application/json"
Names = Callable[[str], str]


@dataclass(frozen=True, slots=True)
class Bad:
    """A body for POST /v0/watch, or a command, and its refusal."""

    body: bytes
    status: int = 400
    code: str = "invalid_request"
    # `detail.field`, if a field causes the refusal.
    where: str | None = None
    query: str = ""
    headers: tuple[str, ...] = (MEDIA,)
    # Whether the whole text is JSON, so that the server can read a `request_id` in it.
    is_readable: bool = True


def _js(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode()


# --- values that no field takes -------------------------------------------------------------------
NOT_JSON: Final[dict[str, bytes]] = {
    "nothing": b"",
    "one space": b" ",
    "a word": b"topics",
    "half an object": b'{"topics":{"{t}":{}}',
    "half a string": b'{"topics":{"{t}',
    "two values": b'{"topics":{"{t}":{}}} {}',
    "a trailing comma": b'{"topics":{"{t}":{}},}',
    "single quotes": b"{'topics':{'{t}':{}}}",
    "NaN": b'{"topics":{"{t}":{}},"limit":NaN}',
    "a control character": b'{"topics":{"{t}":{}},"node":"a\nb"}',
    "invalid UTF-8": b'{"topics":{"{t}":{}},"node":"\xff"}',
    "UTF-16": '{"topics":{}}'.encode("utf-16"),
    "a byte order mark": b'\xef\xbb\xbf{"topics":{"{t}":{}}}',
    "a lone surrogate": rb'{"topics":{"{t}":{}},"node":"\ud800"}',
    "null characters": b"\0\0\0\0",
    "a million brackets": b"[" * 1_000_000,
    "a deep unknown field": b'{"topics":{"{t}":{}},"x":' + b"[" * 600 + b"]" * 600 + b"}",
    "an array": b"[]",
    "a number": b"7",
    "null": b"null",
    "a string": b'"{}"',
}
NUMBERS: Final[dict[str, bytes]] = {
    "-1": b"-1",
    "1.0": b"1.0",
    "1e3": b"1e3",
    "a string": b'"1"',
    "true": b"true",
    "2**64": b"18446744073709551616",
    "a list": b"[1]",
    "an object": b"{}",
    "1e400": b"1e400",
    "a huge number": b"9" * 5000,
}
# Refusals of these need not name the field: a JSON reader may give up before it knows the position.
UNREADABLE: Final = ("a huge number", "1e400")
# The prefixes of a session or a subscribe, which takes them as a map.
PREFIXES: Final[dict[str, bytes]] = {
    "a number": b"5",
    "a list": b'["orders."]',
    "a name": b'"orders."',
    "null options": b'{"orders.":null}',
    "options that are a number": b'{"orders.":1}',
    "no beginning of a name": b'{"-":{}}',
    "a space": b'{"a b":{}}',
    "256 characters": _js({"x" * 256: {}}),
    "a seq": b'{"orders.":{"from_seq":1}}',
    "a negative seq": b'{"orders.":{"from_seq":-1}}',
    "a consumer": b'{"orders.":{"consumer":"c"}}',
    "an ack": b'{"orders.":{"ack":"auto"}}',
    "a tail that is a number": b'{"orders.":{"tail":1}}',
    "none of the last": b'{"orders.":{"last":0}}',
    "no time": b'{"orders.":{"since":"soon"}}',
    "two starts": b'{"orders.":{"last":1,"tail":true}}',
    "17 of them": _js({f"p{n}": {} for n in range(17)}),
    "300 long ones": _js({f"{'p' * 200}{n}": {} for n in range(300)}),
}
STARTS: Final = (
    b'"last":0',
    b'"last":-1',
    b'"last":1.5',
    b'"last":"1"',
    b'"last":18446744073709551616',
    b'"since":-1',
    b'"since":1.5',
    b'"since":true',
    b'"since":[]',
    b'"since":""',
    b'"since":"soon"',
    b'"since":"2026-13-01T00:00:00Z"',
    b'"since":1,"last":1',
    b'"from_seq":1,"last":1',
    b'"tail":true,"since":1',
    b'"consumer":1',
    b'"consumer":""',
    b'"consumer":"a b"',
    b'"consumer":["c"]',
    b'"consumer":"c","from_seq":1',
    b'"consumer":"c","since":0',
    b'"consumer":"c","tail":true',
    b'"consumer":"c","last":1',
    b'"ack":"auto"',
    b'"consumer":"c","ack":"later"',
    b'"ack":"none"',
    b'"ack":1',
)
FILTERS: Final = (
    b"1",
    b"{}",
    b"[]",
    b'["Or"]',
    b'["tag","Eq"]',
    b'["tag","Glob","a"]',
    b'["data","Eq","a"]',
    b'["Not","a","b"]',
    b'["Not",' * 8 + b'"a"' + b"]" * 8,
    b'["tag","In",[' + b",".join([b'"a"'] * 257) + b"]]",
)
FLAGS: Final[dict[str, bytes]] = {"1": b"1", "yes": b'"yes"', "a list": b"[]", "true": b'"true"'}
NODES: Final[dict[str, bytes]] = {
    "a number": b"1",
    "an object": b"{}",
    "a list of numbers": b"[1]",
    "a list of lists": b'[["a"]]',
    "true": b"true",
}
NAMES: Final[dict[str, str]] = {
    "empty": "",
    "a space": "a b",
    "a slash": "a/b",
    "an arrow": "a->b",
    "a star": "a*",
    "UTF-8": "ä",
    "a newline": "a\n",
    "a null": "a\0",
    "a leading dot": ".a",
    "a leading underscore": "_a",
    "256 characters": "n" * 256,
    "a way out": "../etc/passwd",
}


def _sessions() -> dict[str, Bad]:
    """Bodies of POST /v0/watch."""
    cases = {f"{what}": Bad(body) for what, body in NOT_JSON.items()}
    for what, value in {
        "absent": None,
        "null": b"null",
        "a list": b'["{t}"]',
        "a name": b'"{t}"',
        "a number": b"5",
        "empty": b"{}",
        "true": b"true",
    }.items():
        body = b"{}" if value is None else b'{"topics":' + value + b"}"
        cases[f"topics {what}"] = Bad(body, where="topics")
    for what, name in NAMES.items():
        cases[f"a topic's name: {what}"] = Bad(_js({"topics": {name: {}}}))
    for what, value in {
        "null": b"null",
        "a number": b"5",
        "a list": b"[]",
        "a seq": b'"1"',
        "true": b"true",
    }.items():
        cases[f"a topic's options: {what}"] = Bad(b'{"topics":{"{t}":' + value + b"}}")
    for what, value in NUMBERS.items():
        where = None if what in UNREADABLE else "topics"
        body = b'{"topics":{"{t}":{"from_seq":' + value + b"}}}"
        cases[f"from_seq {what}"] = Bad(body, where=where)
        for name in ("limit", "max_batch_bytes", "heartbeat_ms"):
            body = b'{"topics":{"{t}":{}},"' + name.encode() + b'":' + value + b"}"
            cases[f"{name} {what}"] = Bad(body, where=None if what in UNREADABLE else name)
    for what, value in FLAGS.items():
        body = b'{"topics":{"{t}":{"tail":' + value + b"}}}"
        cases[f"tail {what}"] = Bad(body, where="topics")
        for name in ("include_meta", "include_tags", "include_data"):
            body = b'{"topics":{"{t}":{}},"' + name.encode() + b'":' + value + b"}"
            cases[f"{name} {what}"] = Bad(body, where=name)
    for start in STARTS:
        cases[f"start {start.decode()}"] = Bad(
            b'{"topics":{"{t}":{' + start + b"}}}", where="topics"
        )
    for what, value in PREFIXES.items():
        body = b'{"topics":{"{t}":{}},"prefixes":' + value + b"}"
        cases[f"prefixes {what}"] = Bad(body)
    for wanted in FILTERS:
        body = b'{"topics":{"{t}":{}},"filter":' + wanted + b"}"
        cases[f"filter {wanted[:40].decode()}"] = Bad(body, where="filter")
    for what, value in NODES.items():
        body = b'{"topics":{"{t}":{}},"node":' + value + b"}"
        cases[f"node {what}"] = Bad(body, where="node")
    for word in (b'"weak"', b'"Strong"', b'""', b"1", b"true", b'["strong"]'):
        body = b'{"topics":{"{t}":{}},"consistency":' + word + b"}"
        cases[f"consistency {word.decode()}"] = Bad(body, where="consistency")
    for what, cursor in {
        "a number": 5,
        "a map": {"{t}": 1},
        "a list": [],
        "a word": "word",
        "not base64": "!!!!",
        "half of one": id_of({"{t}": 1})[:-3],
        "of a list": id_of([1]),
        "of a negative": id_of({"{t}": -1}),
        "of a string": id_of({"{t}": "1"}),
        "of a fraction": id_of({"{t}": 1.5}),
        "of 2**64": id_of({"{t}": 2**64}),
        "an unknown token": "c9.AAAA",
        "a token of noise": "c1." + "A" * 100,
        "an empty token": "c1.",
        "a token of no text": "c1.%%%",
    }.items():
        cases[f"cursor {what}"] = Bad(
            _js({"topics": {"{t}": {}}, "cursor": cursor}), where="cursor"
        )
    cases["an unknown topic"] = Bad(_js({"topics": {"{a}": {}}}), 404, "topic_not_found")
    cases["one unknown topic"] = Bad(
        _js({"topics": {"{t}": {}, "{a}": {}}}), 404, "topic_not_found"
    )
    ok = b'{"topics":{"{t}":{}}}'
    cases["lenient maybe"] = Bad(ok, where="lenient", query="?lenient=maybe")
    cases["lenient empty"] = Bad(ok, where="lenient", query="?lenient=")
    for media in ("text/plain", "application/x-www-form-urlencoded", "text/json", ""):
        cases[f"media type {media!r}"] = Bad(
            ok, 415, "unsupported_media_type", headers=(f"Content-Type: {media}",)
        )
    cases["no media type"] = Bad(ok, 415, "unsupported_media_type", headers=())
    cases["a body of 2**62 bytes"] = Bad(
        b"", 413, "payload_too_large", headers=(MEDIA, f"Content-Length: {2**62}")
    )
    cases["gzip that is none"] = Bad(ok, headers=(MEDIA, "Content-Encoding: gzip"))
    cases["gzip cut short"] = Bad(gzip.compress(ok)[:-9], headers=(MEDIA, "Content-Encoding: gzip"))
    return cases


SESSIONS: Final = _sessions()


@pytest.fixture(scope="module")
def standing(api: Api) -> str:
    """A topic with three records that no case may change."""
    name = new_name("standing")
    api.append(name, [{"data": n} for n in range(3)])
    return name


def _filled(text: bytes, standing: str, absent: str) -> bytes:
    return text.replace(b"{t}", standing.encode()).replace(b"{a}", absent.encode())


@pytest.mark.parametrize("case", SESSIONS.values(), ids=list(SESSIONS))
def test_a_malformed_session_is_refused_and_takes_no_slot(
    api: Api, standing: str, names: Names, case: Bad
) -> None:
    """Contract §7.2, §0.5 [7.2-13, 7.2-01, 7.2-10, 7.2-14, 0.5-01, S-20, S-21, 8.3-06]"""
    absent = names("absent")
    body = _filled(case.body, standing, absent)
    before = gauges(api)
    answer = api.raw("POST", f"/v0/watch{case.query}", body, case.headers)
    detail = refused(answer, case.status, case.code)
    if case.where is not None:
        where = detail["field"]
        assert where == case.where or where.startswith((f"{case.where}[", f"{case.where}."))
    nothing_left(api, before)
    refused(api.state(absent), 404, "topic_not_found")
    assert api.get_state(standing)["head_seq"] == 3


# --- the stream's GET -----------------------------------------------------------------------------
WIDS: Final = (
    "wid_",
    "wid_A",
    "wid_" + "A" * 22,
    "wid_" + "A" * 21,
    "wid_" + "A" * 5000,
    "wid_" + "A" * 21 + "%20",
    "wid_" + "A" * 20 + "%2F",
    "wid_" + "A" * 20 + "%00",
    "wid_" + "A" * 20 + "%zz",
    "wid_" + "A" * 20 + "==",
    "wid_%FF%FE",
    "wid_%C3%A4" + "A" * 20,
    "WID_" + "A" * 22,
    "A" * 22,
    "%77id_",
    "..%2F..%2Fetc",
    "null",
    "0",
    "-",
    "*",
    "wid_'%20OR%201=1",
)


@pytest.mark.parametrize("wid", WIDS)
def test_a_malformed_wid_is_404(api: Api, wid: str) -> None:
    """Contract §7.7, settled rules [S-36, 7.7-03]"""
    before = gauges(api)
    answer = api.raw("GET", f"/v0/watch/{wid}", headers=["Accept: text/event-stream"])
    refused(answer, 404, "not_found")
    nothing_left(api, before)


@pytest.mark.parametrize(
    "target", ["/v0/watch/", "/v0/watch/a/b", "/v0/watches", "/v0/ws/", "/v0/ws/x"]
)
def test_paths_beside_them_are_404(api: Api, target: str) -> None:
    """Contract §0.6, settled rules [S-22]"""
    refused(api.raw("GET", target), 404, "not_found")


# --- commands of a WebSocket ----------------------------------------------------------------------


def _commands() -> dict[str, Bad]:
    """Texts sent over a WebSocket; the server echoes `"request_id":"r"` if it can read it."""
    cases: dict[str, Bad] = {}

    def add(name: str, body: bytes, code: str = "invalid_request") -> None:
        assert name not in cases
        cases[name] = Bad(body, code=code, is_readable=rb"\ud800" not in body)

    for what, text in NOT_JSON.items():
        # Invalid UTF-8 is no text frame at all: see below.
        if what not in ("invalid UTF-8", "UTF-16"):
            add(what, text)
    for what, op in {
        "absent": b"{}",
        "null": b'{"op":null}',
        "a number": b'{"op":5}',
        "empty": b'{"op":""}',
        "unknown": b'{"op":"fly","request_id":"r"}',
        "in capitals": b'{"op":"PING","request_id":"r"}',
        "a list": b'{"op":["ping"],"request_id":"r"}',
        "a server's": b'{"op":"record","request_id":"r"}',
    }.items():
        add(f"op {what}", op)
    for command in ("subscribe", "unsubscribe", "publish"):
        head = b'{"op":"' + command.encode() + b'","request_id":"r"'
        rest = b',"records":[{"data":1}]}' if command == "publish" else b"}"
        add(f"{command} without a topic", head + rest)
        for what, value in {"a number": b"5", "null": b"null", "a list": b'["{t}"]'}.items():
            add(f"{command} a topic that is {what}", head + b',"topic":' + value + rest)
        for what, name in NAMES.items():
            add(f"{command} a name: {what}", head + b',"topic":' + _js(name) + rest)
    subscribe = b'{"op":"subscribe","request_id":"r","topic":"{t}","'
    for what, value in NUMBERS.items():
        for name in ("from_seq", "limit", "max_batch_bytes"):
            add(f"subscribe {name} {what}", subscribe + name.encode() + b'":' + value + b"}")
    for what, value in FLAGS.items():
        for name in ("tail", "include_meta", "include_tags", "include_data"):
            add(f"subscribe {name} {what}", subscribe + name.encode() + b'":' + value + b"}")
    for what, value in NODES.items():
        add(f"subscribe node {what}", subscribe + b'node":' + value + b"}")
    for start in STARTS:
        add(f"subscribe {start.decode()}", subscribe[:-1] + start + b"}")
    for wanted in FILTERS:
        add(f"subscribe filter {wanted[:40].decode()}", subscribe + b'filter":' + wanted + b"}")
    add("subscribe consistency", subscribe + b'consistency":"weak"}')
    topics = b'{"op":"subscribe","request_id":"r","topics":'
    for what, value in {
        "a list": b"[]",
        "empty": b"{}",
        "a name": b'"{t}"',
        "null options": b'{"{t}":null}',
        "a negative seq": b'{"{t}":{"from_seq":-1}}',
        "a bad name": b'{"a b":{}}',
        "257 topics": _js({f"t{n}": {} for n in range(257)}),
    }.items():
        add(f"subscribe topics {what}", topics + value + b"}")
    for what, value in PREFIXES.items():
        head = b'{"op":"subscribe","request_id":"r","prefixes":'
        add(f"subscribe prefixes {what}", head + value + b"}")
        add(f"subscribe topics and prefixes {what}", head + value + b',"topics":{"{t}":{}}}')
    for what, value in {
        "absent": b"",
        "null": b',"prefixes":null',
        "empty": b',"prefixes":[]',
        "a map": b',"prefixes":{"orders.":{}}',
        "a name": b',"prefixes":"orders."',
        "a number": b',"prefixes":[5]',
        "no beginning of a name": b',"prefixes":["-"]',
        "not subscribed": b',"prefixes":["orders."]',
        "of many": b',"prefixes":' + _js([f"{'p' * 200}{n}" for n in range(300)]),
    }.items():
        head = b'{"op":"unsubscribe","request_id":"r","topics":[]'
        add(f"unsubscribe prefixes {what}", head + value + b"}")
    add(
        "subscribe to nothing",
        b'{"op":"subscribe","request_id":"r","topic":"{a}"}',
        "topic_not_found",
    )
    add("subscribe to one unknown", topics + b'{"{t}":{},"{a}":{}}}', "topic_not_found")
    publish = b'{"op":"publish","request_id":"r","topic":"{a}"'
    for what, value in {
        "absent": b"",
        "null": b',"records":null',
        "empty": b',"records":[]',
        "an object": b',"records":{}',
        "a word": b',"records":"x"',
        "of numbers": b',"records":[1]',
        "without data": b',"records":[{"tag":"t"}]',
        "one without data": b',"records":[{"data":1},{"tag":"t"}]',
        "with a tag that is a number": b',"records":[{"data":1,"tag":5}]',
        "with a node that is a list": b',"records":[{"data":1,"node":[]}]',
        "with meta that is a list": b',"records":[{"data":1,"meta":[]}]',
        "with a lone surrogate": rb',"records":[{"data":"\ud800"}]',
        "with data 513 deep": b',"records":[{"data":' + b"[" * 513 + b"]" * 513 + b"}]",
    }.items():
        add(f"publish records {what}", publish + value + b"}")
    records = publish + b',"records":[{"data":1}],"'
    for name, value in {
        "create": b'"no"',
        "config": b"5",
        "idempotency_key": b"5",
        "idempotency": b'"per_call"',
        "return_seqs": b"1",
        "disable_backpressure": b'"x"',
        "node": b"5",
    }.items():
        add(f"publish {name}", records + name.encode() + b'":' + value + b"}")
    add("publish config ttl_ms", records + b'config":{"ttl_ms":-1}}')
    add("publish a long key", records + b'idempotency_key":"' + b"k" * 257 + b'"}')
    add("publish keyed records without a key", records + b'idempotency":"per_record"}')
    add("publish without creation", records + b'create":false}', "topic_not_found")
    add(
        "publish 10,001 records",
        publish + b',"records":[' + b",".join([b'{"data":0}'] * 10_001) + b"]}",
        "batch_too_large",
    )
    add(
        "publish a record too large",
        publish + b',"records":[{"data":"' + b"x" * 1_048_576 + b'"}]}',
        "record_too_large",
    )
    return cases


COMMANDS: Final = _commands()


@pytest.fixture(scope="module")
def socket_of_all(api: Api) -> Iterator[WsClient]:
    """One WebSocket for all refused commands: after all of them it still works, and closes well."""
    ws = WsClient(api.url)
    yield ws
    assert ws.ask(op="ping")["op"] == "pong"
    ws.close()
    assert ws.connection.close_code == 1000


@pytest.mark.parametrize("case", COMMANDS.values(), ids=list(COMMANDS))
def test_a_refused_command_is_answered_and_the_socket_stays(
    api: Api, standing: str, names: Names, socket_of_all: WsClient, case: Bad
) -> None:
    """§7-ws, settled rules: the answer has the code, a message, and the id if it could be read.
    [7-ws-12, S-54, S-55, S-21]
    """
    absent = names("absent")
    text = _filled(case.body, standing, absent)
    before = gauges(api)
    socket_of_all.send_text(text.decode())
    error = socket_of_all.frame()
    assert error["op"] == "error", error
    assert error["code"] == case.code, error
    assert isinstance(error["message"], str)
    assert error["message"]
    assert set(error) <= {"op", "request_id", "code", "message", "detail"}, error
    assert None not in error.values()
    if b'"request_id":"r"' in text and case.is_readable:
        assert error["request_id"] == "r"
    elif b'"r"' not in text:
        assert "request_id" not in error
    assert socket_of_all.ask(op="ping")["op"] == "pong"
    nothing_left(api, before)
    refused(api.state(absent), 404, "topic_not_found")
    assert api.get_state(standing)["head_seq"] == 3


@pytest.mark.parametrize("request_id", [5, 1.5, True, None, [], {}, "x" * 10_000, "", "ä\u0000"])
def test_an_odd_request_id_is_harmless(api: Api, clients: Clients, request_id: object) -> None:
    """§7-ws: the id is echoed unchanged or refused; the socket never breaks. [S-55, 7-ws-12]"""
    ws = clients.ws(api)
    ws.send(op="ping", request_id=request_id)
    answer = ws.frame()
    if answer["op"] == "pong":
        assert answer.get("request_id") == request_id
    else:
        assert (answer["op"], answer["code"]) == ("error", "invalid_request")
    assert ws.ask(op="ping")["op"] == "pong"


def test_the_tables_are_long_enough() -> None:
    """There are at least 80 malformed requests and commands, all different. [7.2-13, 7-ws-12]"""
    for table in (SESSIONS, COMMANDS):
        kinds = {(case.body, case.query, case.headers) for case in table.values()}
        assert len(kinds) == len(table)
        assert len(table) >= 80


# --- frames that break the protocol ---------------------------------------------------------------
BROKEN: Final[dict[str, tuple[Callable[[RawWs], None], frozenset[int]]]] = {
    "invalid UTF-8": (lambda raw: raw.send(TEXT, b'{"op":"\xff"}'), frozenset((1007,))),
    "a cut character": (lambda raw: raw.send(TEXT, b'"\xe6\xb0'), frozenset((1007,))),
    "UTF-16": (lambda raw: raw.send(TEXT, '"x"'.encode("utf-16")), frozenset((1007,))),
    "no mask": (lambda raw: raw.send(TEXT, b"{}", is_masked=False), frozenset((1002,))),
    "a reserved bit": (lambda raw: raw.send(TEXT, b"{}", first_bits=0xC0), frozenset((1002,))),
    "an unknown opcode": (lambda raw: raw.send(3, b"x"), frozenset((1002,))),
    "an unknown control": (lambda raw: raw.send(11, b"x"), frozenset((1002,))),
    "a continuation of nothing": (lambda raw: raw.send(0, b"x"), frozenset((1002,))),
    "a long ping": (lambda raw: raw.send(PING, b"x" * 126), frozenset((1002,))),
    "a ping in parts": (lambda raw: raw.send(PING, b"x", first_bits=0), frozenset((1002,))),
    "a close of one byte": (lambda raw: raw.send(CLOSE, b"x"), frozenset((1002,))),
    "a close with a bad code": (
        lambda raw: raw.send(CLOSE, b"\x00\x05"),
        frozenset((1002,)),
    ),
    "a frame of 2**62 bytes": (
        lambda raw: raw.sock.sendall(b"\x81\xff" + (2**62).to_bytes(8, "big") + b"\0\0\0\0"),
        frozenset((1009, 1002)),
    ),
    "HTTP": (lambda raw: raw.sock.sendall(b"GET / HTTP/1.1\r\n\r\n"), frozenset((1002,))),
}


@pytest.mark.parametrize(("send", "codes"), BROKEN.values(), ids=list(BROKEN))
def test_a_broken_frame_closes_the_socket_with_its_code(
    api: Api, clients: Clients, send: Callable[[RawWs], None], codes: frozenset[int]
) -> None:
    """§7-ws, S, RFC 6455: the server sends a close frame; it never hangs or leaks. [7-ws-13, S-56,
    S-89]
    """
    before = gauges(api)
    raw = clients.raw_ws(api)
    send(raw)
    assert raw.closed_with(5) in codes
    raw.close()
    eventually(lambda: gauges(api)[0] == before[0], "the socket is forgotten")
    nothing_left(api, before)


HANDSHAKES: Final[dict[str, tuple[str, ...]]] = {
    "no key": ("Upgrade: websocket", "Connection: Upgrade", "Sec-WebSocket-Version: 13"),
    "a bad key": (
        "Upgrade: websocket",
        "Connection: Upgrade",
        "Sec-WebSocket-Version: 13",
        "Sec-WebSocket-Key: short",
    ),
    "an old version": (
        "Upgrade: websocket",
        "Connection: Upgrade",
        "Sec-WebSocket-Version: 8",
        "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==",
    ),
    "another protocol": ("Upgrade: h2c", "Connection: Upgrade"),
}


@pytest.mark.parametrize("headers", HANDSHAKES.values(), ids=list(HANDSHAKES))
@pytest.mark.connection(reason="other servers refuse handshakes in their own words")
def test_a_handshake_that_is_none_is_a_4xx(api: Api, headers: tuple[str, ...]) -> None:
    """RFC 6455: the server refuses it before it opens, and does not count it. [7-ws-12, 11-15]"""
    before = gauges(api)
    answer = api.raw("GET", "/v0/ws", headers=headers)
    refused(answer, 400, "invalid_request")
    nothing_left(api, before)


@pytest.mark.parametrize("start", ["POST /v0/ws HTTP/1.1", "GET /v0/ws HTTP/1.0"])
@pytest.mark.connection(reason="other servers refuse or take such handshakes in their own way")
def test_a_handshake_by_another_method_or_protocol_is_refused_in_the_envelope(
    api: Api, start: str
) -> None:
    """RFC 6455: a handshake is a GET of HTTP/1.1. [7-ws-12]"""
    head = [start, "Host: localhost", *HANDSHAKES["an old version"][:2]]
    head += ["Sec-WebSocket-Version: 13", "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA=="]
    answer = exchange(api.url, "\r\n".join([*head, "", ""]).encode())
    assert answer.status in (400, 405)
    assert answer.json()["error"]["code"] in ("invalid_request", "method_not_allowed")


@pytest.mark.parametrize("target", ["/v0/topics", "/v0/watch/wid_x", "/", "/v0/wss"])
def test_an_upgrade_elsewhere_is_no_socket(api: Api, target: str) -> None:
    """§7-ws: only one path accepts WebSockets. [9-03, S-22]"""
    headers = [
        "Upgrade: websocket",
        "Connection: Upgrade",
        "Sec-WebSocket-Version: 13",
        "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==",
    ]
    before = gauges(api)
    answer = api.raw("GET", target, headers=headers)
    assert answer.status != 101
    assert answer.status < 500
    nothing_left(api, before)


# --- clients that stall or vanish -----------------------------------------------------------------


def test_half_open_and_slow_heads_take_no_slot(api: Api, standing: str, clients: Clients) -> None:
    """§11: a connection without a request does not count; one that sends byte by byte is served.
    [11-15]
    """
    before = gauges(api)
    session = clients.session(api, {standing: {}})
    silent = [connected(api.url) for _ in range(20)]
    halves = [connected(api.url) for _ in range(20)]
    for sock in halves:
        sock.sendall(b"GET /v0/watch/wid_x HTTP/1.1\r\nHost: localhost\r\nAccept: text/ev")
    request = (
        f"GET {session.answer['stream_url']} HTTP/1.1\r\nHost: localhost\r\n"
        "Accept: text/event-stream\r\nLast-Event-ID: x\r\n\r\n"
    ).encode()
    slow = connected(api.url)
    for byte in request:
        slow.sendall(bytes([byte]))
    received = b""
    while b"caught-up" not in received:
        received += slow.recv(65536)
    assert received.startswith(b"HTTP/1.1 200 OK\r\n")
    assert more_than(api, before, streams=1, sessions=1)
    good(api.state(standing))
    for sock in [*silent, *halves, slow]:
        sock.close()
    eventually(lambda: gauges(api)[0] == before[0], "no stream is left")


def test_a_websocket_that_sends_byte_by_byte_is_served(api: Api, clients: Clients) -> None:
    """§7-ws: a message means the same however its bytes are cut. [7-ws-01]"""
    raw = clients.raw_ws(api)
    payload = b'{"op":"ping","request_id":"slow"}'
    frame = bytes([0x81, 0x80 | len(payload)]) + b"\0\0\0\0" + payload
    for byte in frame:
        raw.sock.sendall(bytes([byte]))
    assert json.loads(raw.frame()[1]) == {"op": "pong", "request_id": "slow"}


def _vanishing(api: Api, topic: str, number: int) -> None:
    """One client that opens a stream or a socket and vanishes; each client vanishes at another
    moment.
    """
    if number % 2:
        try:
            raw = RawWs.open(api.url)
        except (ConnectionResetError, BrokenPipeError):
            return
        if number % 3:
            raw.send(TEXT, _js({"op": "subscribe", "topic": topic, "limit": 2}))
        if number % 5 == 0:
            raw.sock.sendall(b"\x81\xfe")
        if number % 3 and number % 7 == 0:
            raw.frame()
        reset(raw.sock) if number % 4 == 1 else raw.close()
        return
    body = good(api.http.post("/v0/watch", json={"topics": {topic: {}}, "limit": 2}))
    if number % 10 == 0:
        with connected(api.url) as sock:
            head = f"GET {body['stream_url']} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()
            sock.sendall(head[: None if number % 20 else -2])
            reset(sock)
        return
    stream = SseStream(api.url, body["stream_url"])
    if number % 3:
        stream.event()
    stream.vanish() if number % 4 else stream.close()


def test_clients_that_vanish_free_their_slots(api: Api, topic: str) -> None:
    """§11: the clients vanish in the middle of a stream, a frame or a head, with FIN or RST. [S-89,
    11-15, 8.3-06]
    """
    api.append(topic, [{"data": "x" * 1000}] * 500)
    before = gauges(api)[0]
    for number in range(60):
        _vanishing(api, topic, number)
    eventually(lambda: gauges(api)[0] == before, "every stream is gone", within_s=5)
    api.add(topic, "goes on")


def _resident_kib(server: Server) -> int:
    assert server.process is not None
    text = Path(f"/proc/{server.process.pid}/status").read_text()
    found = re.search(r"VmRSS:\s+(\d+) kB", text)
    assert found
    return int(found[1])


def _counted(server: Server) -> tuple[int, int]:
    """The server's open descriptors and threads."""
    assert server.process is not None
    folder = f"/proc/{server.process.pid}"
    return len(os.listdir(f"{folder}/fd")), len(os.listdir(f"{folder}/task"))


def test_500_aborted_connections_leave_no_growth(own: NewServer, topic: str) -> None:
    """§11: no slot, descriptor, thread or memory is left over. [S-89, 11-14, 8.3-06]"""
    # Long enough for a busy machine to open the stream of a session before the session expires.
    server = own(TOPICS_SESSION_TTL_MS="2000")
    api = server.start()
    api.append(topic, [{"data": "x" * 1000}] * 200)

    def rounds(count: int) -> None:
        for number in range(count):
            _vanishing(api, topic, number)
        eventually(lambda: gauges(api)[0] == 0, "every stream is gone")

        def are_gone() -> bool:
            # The server reclaims an expired session when a client requests another.
            refused(api.http.get("/v0/watch/wid_none"), 404, "not_found")
            return gauges(api)[1] == 0

        eventually(are_gone, "every session is gone", within_s=30)

    rounds(100)
    resident_kib, (descriptors, threads) = _resident_kib(server), _counted(server)
    rounds(500)
    # The test's own pooled connection may have been closed or opened meanwhile.
    assert _counted(server)[0] <= descriptors + 1
    assert _counted(server)[1] <= threads
    assert _resident_kib(server) - resident_kib < 8 * 1024
    api.add(topic, "goes on")


def test_a_client_that_never_reads_does_not_hold_up_the_others(
    api: Api, topic: str, clients: Clients
) -> None:
    """§7.6: only the buffer of this client is full, not those of the others. [7.6-01]"""
    api.put(topic, {"durability": "memory"})
    stuck = [
        clients.follow(carrier, api, {topic: {}}, receive_buffer_bytes=4096)
        for carrier in ("sse", "ws")
    ]
    reader = clients.follow("sse", api, {topic: {}})
    reader.drained()
    for number in range(1, 21):
        api.append(topic, [{"data": "x" * 50_000}] * 10)
        reader.reads(topic, number * 10, within_s=5)
    for follower in stuck:
        follower.reads(topic, 200)
        assert follower.seqs(topic) == list(range(1, 201)), "late, but whole"
    api.drop(topic)


def test_more_than_one_request_on_a_connection_before_the_stream(api: Api, standing: str) -> None:
    """§7.3: requests of a connection are answered in their order; the stream is the last. [7-02]"""
    body: Json = good(api.http.post("/v0/watch", json={"topics": {standing: {}}}))
    before = gauges(api)[0]
    with connected(api.url) as sock:
        sock.sendall(
            b"GET /v0/health HTTP/1.1\r\nHost: localhost\r\n\r\n"
            + f"GET {body['stream_url']} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()
        )
        received = b""
        while b"caught-up" not in received:
            piece = sock.recv(65536)
            assert piece, received
            received += piece
        assert received.count(b"HTTP/1.1 200 OK") == 2
        sock.shutdown(socket.SHUT_RDWR)
    eventually(lambda: gauges(api)[0] == before, "the stream is gone")


@pytest.mark.connection(reason="other servers refuse handshakes in their own words")
def test_a_refused_handshake_repeats_no_header(api: Api) -> None:
    """A subprotocol may contain a key. [7-ws-12]"""
    headers = [*HANDSHAKES["an old version"][:2], "Sec-WebSocket-Version: 13"]
    key = "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA=="
    for wrong in ("topics.bearer.sEcret=?", "topics.bearer.sEcret,,;"):
        answer = api.raw(
            "GET", "/v0/ws", headers=[*headers, key, f"Sec-WebSocket-Protocol: {wrong}"]
        )
        assert b"sEcret" not in answer.body
    answer = api.raw("GET", "/v0/ws", headers=[*headers, "Sec-WebSocket-Key: sEcret"])
    assert b"sEcret" not in answer.body
    assert refused(answer, 400, "invalid_request") == {"field": "Sec-WebSocket-Key"}
