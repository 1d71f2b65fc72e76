"""Small words: details that are easily overlooked, each with its own test."""

from __future__ import annotations

import email.utils
import json
import time
from typing import Any, Final

import pytest

from tests.contract.conftest import new_name
from tests.contract.driver import Api, RawResponse, eventually, good, refused
from tests.contract.streams.streams import connected
from tests.contract.watch.subscriptions import Clients

JSON: Final = "Content-Type: application/json"
STREAM: Final = "Accept: text/event-stream"
LONG: Final = "x" * 100_000
# The size of a refusal without the 256 bytes that it repeats in its message and its detail.
REFUSAL_BYTES_MAX: Final = 1_100


# --- queues -----------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["ack", "nack", "extend"])
def test_a_repeated_seq_counts_once_without_a_skip(api: Api, topic: str, verb: str) -> None:
    """Settled rules of the contract [S-94]"""
    good(api.put(topic, {"type": "queue"}))
    api.add(topic, 1, 2)
    held = good(api.http.post(f"/v0/topics/{topic}/claim", json={"node": "n", "max": 2}))["claimed"]
    lease = [job["lease_id"] for job in held]
    body: dict[str, Any] = {"node": "n", "seqs": [1, 1], "lease_ids": [lease[0]] * 2}
    body |= {"lease_ms": 1000} if verb == "extend" else {}
    told = good(api.http.post(f"/v0/topics/{topic}/{verb}", json=body))
    assert (told[f"{verb}ed"], told["skipped"]) == (1, [])
    body |= {"seqs": [2, 9, 2, 9], "lease_ids": None}
    told = good(api.http.post(f"/v0/topics/{topic}/{verb}", json=body))
    assert (told[f"{verb}ed"], told["skipped"]) == (1, [9])


def test_max_0_is_400(api: Api, topic: str) -> None:
    """Settled rules of the contract [S-94]"""
    good(api.put(topic, {"type": "queue"}))
    api.add(topic, 1)
    for verb, body in (("claim", {"node": "n"}), ("redrive", {"from": "x", "all": True})):
        answer = api.http.post(f"/v0/topics/{topic}/{verb}", json=body | {"max": 0})
        assert refused(answer, 400, "invalid_request") == {"field": "max"}
    answer = api.http.get(f"/v0/topics/{topic}/work?node=n&max=0", headers={"accept": "*/*"})
    assert refused(answer, 400, "invalid_request") == {"field": "max"}
    assert api.get_state(topic)["queue"]["ready"] == 1


# --- refusals ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "field"),
    [
        ("/v0/topics?prefix=%zz", "prefix"),
        ("/v0/topics?page_size=1&prefix=a%", "prefix"),
        ("/v0/topics?prefix=%4", "prefix"),
        ("/v0/routers?prefix=%zz", "prefix"),
        ("/v0/topics/t?touch=true%G1", "touch"),
        ("/v1/stream/t?offset=%zz", "offset"),
    ],
)
def test_a_percent_sign_that_escapes_nothing_is_400(api: Api, target: str, field: str) -> None:
    """Settled rules of the contract [S-95]"""
    assert refused(api.raw("GET", target), 400, "invalid_request") == {"field": field}


ECHOED: Final = {
    "enum": ("PUT", "/v0/topics/t", f'{{"type":"{LONG}"}}'),
    "type": ("POST", "/v0/topics/t/diff", f'{{"from_seq":"{LONG}"}}'),
    "guarantee": ("PUT", "/v0/routers/r", f'{{"source":"a","dest":"b","guarantee":"{LONG}"}}'),
    "source": ("PUT", "/v0/routers/r", f'{{"source":"{LONG}","dest":"b"}}'),
    "dead_letter": ("PUT", "/v0/topics/t", f'{{"type":"queue","dead_letter":"{LONG}"}}'),
    "config": (
        "POST",
        "/v0/topics/t",
        f'{{"records":[{{"data":1}}],"config":{{"type":"{LONG}"}}}}',
    ),
    "watched": ("POST", "/v0/watch", f'{{"topics":{{"{LONG}":{{}}}}}}'),
    "consistency": ("POST", "/v0/watch", f'{{"topics":{{"t":{{}}}},"consistency":"{LONG}"}}'),
    "cursor": ("POST", "/v0/watch", f'{{"topics":{{"t":{{}}}},"cursor":"{LONG}"}}'),
    "match": ("POST", "/v0/topics/t/delete", f'{{"match":["{LONG}","Eq","a"]}}'),
    "sealed": ("POST", "/v0/admin/seal", f'{{"topics":["{LONG}"]}}'),
    "node": ("POST", "/v0/topics/t/claim", f'{{"node":"{LONG}"}}'),
    "no JSON": ("POST", "/v0/topics/t", LONG),
}


@pytest.mark.parametrize("name", ECHOED)
def test_a_refusal_repeats_little_of_a_body(api: Api, name: str) -> None:
    """A refusal repeats at most 256 bytes of the request. [S-96]"""
    method, target, body = ECHOED[name]
    answer = api.raw(method, target, body.encode(), [JSON])
    assert 400 <= answer.status < 500
    assert len(answer.body) <= REFUSAL_BYTES_MAX
    assert b"x" * 257 not in answer.body


def test_a_refusal_repeats_little_of_a_head(api: Api) -> None:
    """Settled rules of the contract [S-96]"""
    long, path = "x" * 4000, "%C3%A9" * 500
    asked = [
        api.raw("GET", f"/v0/{long}"),
        api.raw("GET", f"/v0/topics?touch={long}"),
        api.raw("GET", f"/v0/topics?cursor={long}"),
        api.raw("GET", f"/v0/topics?{long}=%zz"),
        api.raw("GET", f"/v1/stream/a/{path}"),
        api.raw("POST", f"/v1/stream/a/{path}", b"1", ["Content-Type: text/plain"]),
        api.raw("POST", "/v0/topics/t", b"{}", [JSON, f"Content-Encoding: {long}"]),
        api.raw("POST", "/v0/topics/t", b"{}", [JSON, f"Origin: http://{long}"]),
        api.raw(
            "DELETE", "/v0/topics/t", headers=["Sec-Fetch-Site: cross-site", f"Origin: {long}"]
        ),
    ]
    for answer in asked:
        assert 400 <= answer.status < 500
        assert len(answer.body) <= REFUSAL_BYTES_MAX
        assert b"x" * 257 not in answer.body
        assert "é".encode() * 129 not in answer.body


def test_a_socket_repeats_little(api: Api, clients: Clients) -> None:
    """Settled rules of the contract [S-96]"""
    ws = clients.ws(api)
    for command in (
        {"op": LONG},
        {"op": "subscribe", "topic": LONG},
        {"op": "subscribe", "topics": {LONG: {}}},
        {"op": "publish", "topic": "t", "records": LONG},
    ):
        told = ws.ask(**command)
        assert told["op"] == "error"
        assert len(json.dumps(told)) <= REFUSAL_BYTES_MAX


@pytest.mark.parametrize(
    ("target", "body"),
    [
        ("/v0/topics/{}", r'{"records":[{"data":"\ud800"}]}'),
        ("/v0/topics/{}", r'{"records":[{"data":1,"tag":"a\uDFFFb"}]}'),
        ("/v0/topics/{}", r'{"records":[{"data":1,"meta":{"\udc00":1}}]}'),
        ("/v0/topics/{}", r'{"records":[{"data":["\\","\ud83d\ude00\ud83d"]}]}'),
        ("/v0/topics/{}/diff", r'{"node":"\ud800x"}'),
        ("/v1/stream/{}", r'["\ud800"]'),
    ],
)
def test_a_lone_surrogate_is_named_as_such(api: Api, topic: str, target: str, body: str) -> None:
    """Settled rules of the contract [S-97]"""
    api.add(topic, 1)
    answer = api.raw("POST", target.format(topic), body.encode(), [JSON])
    refused(answer, 400, "invalid_request")
    assert "lone surrogate" in answer.json()["error"]["message"]
    assert len(api.read_all(topic)) == 1


def test_other_text_is_not_named_a_lone_surrogate(api: Api, topic: str) -> None:
    """Settled rules of the contract [S-97]"""
    both = '"\\ud83d\\ude00 \\\\ud800"'
    body = f'{{"records":[{{"data":{both}}}]}}'.encode()
    assert api.raw("POST", f"/v0/topics/{topic}", body, [JSON]).status == 201
    for wrong in (b'{"records":[{"data":"\\\\ud800 \\q"}]}', b'{"records":'):
        answer = api.raw("POST", f"/v0/topics/{topic}", wrong, [JSON])
        refused(answer, 400, "invalid_request")
        assert "surrogate" not in answer.json()["error"]["message"]


@pytest.mark.parametrize("header", ["", "x" * 257, "\xff"])
def test_a_valid_key_of_the_body_wins_over_a_bad_header(api: Api, topic: str, header: str) -> None:
    """Contract §0.8 [0.8-07]"""
    body = b'{"records":[{"data":1}],"idempotency_key":"k"}'
    said = [JSON, f"Idempotency-Key: {header}"]
    assert api.raw("POST", f"/v0/topics/{topic}", body, said).status == 201
    again = api.raw("POST", f"/v0/topics/{topic}", body, said)
    assert (again.status, again.json()["deduped"]) == (200, True)
    bare = b'{"records":[{"data":1}]}'
    told = refused(api.raw("POST", f"/v0/topics/{topic}", bare, said), 400, "invalid_request")
    assert told == {"field": "Idempotency-Key"}


def test_refusals_carry_performance(api: Api, topic: str) -> None:
    """§0.9: every refusal of a request that the server has read has `performance`. [0.9-07]"""
    api.add(topic, 1)
    asked = [
        api.raw("POST", f"/v0/topics/{topic}", b"{", [JSON]),
        api.raw("POST", f"/v0/topics/{topic}?return_seqs=no", b"{}", [JSON]),
        api.raw("POST", f"/v0/topics/{topic}", b"{}", ["Content-Type: text/plain"]),
        api.raw("POST", "/v0/topics/never-made/diff", b"{}", [JSON]),
        api.raw("GET", "/v0/topics/never-made"),
        api.raw("GET", "/v0/nothing"),
        api.raw("PATCH", f"/v0/topics/{topic}/diff"),
        api.raw("POST", f"/v0/topics/{topic}/claim", b'{"node":"n"}', [JSON]),
        api.raw("GET", "/v1/stream/never/made"),
        api.raw("DELETE", f"/v0/topics/{topic}", headers=["Sec-Fetch-Site: cross-site"]),
    ]
    assert [answer.status for answer in asked] == [400, 400, 415, 404, 404, 404, 405, 409, 404, 403]
    for answer in asked:
        assert answer.json()["performance"]["server_total_ms"] >= 0


# --- answers ----------------------------------------------------------------------------------


def _check_date(answer: RawResponse) -> None:
    sent = email.utils.parsedate_to_datetime(answer.headers["date"])
    assert abs(sent.timestamp() - time.time()) < 60


def test_every_answer_has_a_date(api: Api, topic: str, clients: Clients) -> None:
    """Settled rules: every path of an answer sends a date, including refusals of a head and
    handshakes. [S-98]
    """
    shake = ["Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13"]
    key = "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA=="
    asked = [
        api.raw("POST", f"/v0/topics/{topic}", b'{"records":[{"data":1}]}', [JSON]),
        api.raw("POST", f"/v0/topics/{topic}/diff", b"{}", [JSON]),
        api.raw("PUT", f"/v0/topics/{topic}", b"{}", [JSON]),
        api.raw("GET", "/v0/health"),
        api.raw("OPTIONS", "/v0/health"),
        api.raw("GET", "/v0/nothing"),
        api.raw("GET", "nothing"),
        api.raw("GET", f"/v1/stream/{topic}"),
        api.raw("POST", f"/v1/stream/{topic}", b"1", [JSON]),
        api.raw("GET", "/v0/nothing", headers=[*shake, key]),
        api.raw("GET", "/v0/ws", headers=[*shake, key, "Origin: http://other.example"]),
    ]
    for answer in asked:
        _check_date(answer)
    url = clients.session(api, {topic: {}}).answer["stream_url"]
    _check_date(RawResponse(200, clients.get(api, url).headers, b""))
    with connected(api.url) as sock:
        head = "\r\n".join(["GET /v0/ws HTTP/1.1", "Host: localhost", *shake, key])
        sock.sendall(f"{head}\r\n\r\n".encode())
        answered = sock.recv(65536).decode("latin-1")
    assert answered.startswith("HTTP/1.1 101 ")
    assert answered.lower().count("\r\ndate: ") == 1


@pytest.mark.connection(reason="other servers refuse such a handshake in their own words")
def test_a_refused_handshake_has_a_date(api: Api) -> None:
    """[S-98]"""
    shake = ["Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13"]
    _check_date(api.raw("GET", "/v0/ws", headers=[*shake, "Sec-WebSocket-Key: no key"]))


def _stream(api: Api, target: str, version: str, *headers: str) -> tuple[list[str], bytes]:
    """The header lines of a stream, and its bytes until its end or its first event."""
    head = "\r\n".join([f"GET {target} HTTP/{version}", "Host: localhost", STREAM, *headers])
    received = b""
    with connected(api.url) as sock:
        sock.settimeout(20)
        sock.sendall(f"{head}\r\n\r\n".encode())
        while b"\r\n\r\n" not in received or not received.endswith((b"\n\n", b"\n\n\r\n")):
            piece = sock.recv(65536)
            if not piece:
                break
            received += piece
    lines, _, body = received.partition(b"\r\n\r\n")
    return lines.decode("latin-1").lower().split("\r\n"), body


# ASGI has no such answer, so plain uvicorn sends chunks.
@pytest.mark.connection(reason="framing: other protocols chunk answers to HTTP/1.0")
@pytest.mark.parametrize("kind", ["watch", "work", "stream"])
def test_events_to_http_1_0_are_not_chunked(api: Api, clients: Clients, kind: str) -> None:
    """The response ends with its connection, and a header says so. [S-99]"""
    topic = new_name("old")
    good(api.put(topic, {"type": "queue"} if kind == "work" else {}))
    api.add(topic, "hello")
    target = {
        "watch": "" if kind != "watch" else clients.session(api, {topic: {}}).answer["stream_url"],
        "work": f"/v0/topics/{topic}/work?node=n",
        "stream": f"/v1/stream/{topic}?offset=-1&live=sse",
    }[kind]
    lines, body = _stream(api, target, "1.0")
    assert lines[0].endswith(" 200 ok")
    assert [line for line in lines if line.startswith("connection:")] == ["connection: close"]
    assert not [line for line in lines if line.startswith("transfer-encoding:")]
    for line in body.splitlines():
        assert line == b"" or b":" in line, f"no line of an event stream: {body!r}"
    lines, body = _stream(api, target, "1.1", "Connection: close")
    assert [line for line in lines if line.startswith("connection:")] == ["connection: close"]
    assert "transfer-encoding: chunked" in lines
    lines, body = _stream(api, target, "1.1")
    connection = [line for line in lines if line.startswith("connection:")]
    assert connection in (["connection: keep-alive"], [])
    assert "transfer-encoding: chunked" in lines


@pytest.mark.connection(reason="framing: other protocols chunk answers to HTTP/1.0")
def test_a_whole_stream_to_http_1_0_is_not_chunked(own: Any, topic: str) -> None:
    """A catch-up of several pages ends with its connection. [S-99]"""
    api = own(TOPICS_STREAMS_PAGE_BYTES="1024").start()
    body = b"0123456789abcdef" * 32
    text = {"content-type": "text/plain"}
    assert api.http.put(f"/v1/stream/{topic}", headers=text).status_code == 201
    for _ in range(20):
        assert api.http.post(f"/v1/stream/{topic}", content=body, headers=text).is_success
    received = b""
    with connected(api.url) as sock:
        sock.settimeout(20)
        sock.sendall(f"GET /v1/stream/{topic} HTTP/1.0\r\nHost: localhost\r\n\r\n".encode())
        while piece := sock.recv(65536):
            received += piece
    head, _, sent = received.partition(b"\r\n\r\n")
    assert sent == body * 20
    assert b"transfer-encoding" not in head.lower()
    assert head.lower().count(b"\r\nconnection: close") == 1


@pytest.mark.parametrize("way", ["watch", "socket"])
def test_without_data_only_dollar_fields_are_sent(
    api: Api, topic: str, clients: Clients, way: str
) -> None:
    """`meta` is no `$` field, whatever `include_meta` says. [S-100]"""
    record = {"data": 1, "meta": {"a": 1}, "tag": "t", "node": "n"}
    good(api.append(topic, [record, {"data": 2}, *[record] * 40]))
    asked: dict[str, Any] = {"include_data": False, "include_meta": True, "include_tags": True}
    if way == "watch":
        url = clients.session(api, {topic: {}}, **asked).answer["stream_url"]
        event = clients.get(api, url).event()
        records = json.loads(event.data)["records"]
    else:
        ws = clients.ws(api)
        ws.ask(op="subscribe", topic=topic, from_seq=0, **asked)
        records = ws.frame_of("record")["records"]
    assert len(records) == 42
    assert {key for each in records for key in each} == {"$seq", "$ts", "$node", "$tag"}


def test_a_filter_takes_a_bare_string_as_a_match_does(api: Api, topic: str) -> None:
    """The string matches exactly this tag, whatever characters it has. [S-101]"""
    source, dest = f"{topic}.s", f"{topic}.d"
    body = {"source": source, "dest": dest, "filter": "a*"}
    put = good(api.http.put(f"/v0/routers/{topic}", json=body))
    assert put["filter"] == ["tag", "Eq", "a*"]
    same = good(api.http.put(f"/v0/routers/{topic}", json=body | {"filter": put["filter"]}))
    assert same["created"] is False
    good(api.append(source, [{"data": tag, "tag": tag} for tag in ("a", "a*", "ab", "a*b")]))
    eventually(lambda: api.state(dest).json().get("count") == 1, "the copy is there")
    assert [record["data"] for record in api.read_all(dest)] == ["a*"]
    wrong = api.http.put(f"/v0/routers/{topic}", json=body | {"filter": 5})
    assert refused(wrong, 400, "invalid_request") == {"field": "filter"}
