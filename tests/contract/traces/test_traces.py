"""`$trace`: the `traceparent` of an append, and every way to read it (docs/EXTENSIONS.md)."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest

from tests.contract.driver import Api, Json, eventually, good, refused
from tests.contract.queues.queues import LONG_MS, Queue
from tests.contract.streams.streams import SseStream
from tests.contract.traces.traced import OTHER, TRACE, add, kept, large_text, send, traces_of
from tests.contract.watch.subscriptions import Clients

STREAM = "/v1/stream/"


def test_the_records_of_an_append_have_its_trace(api: Api, topic: str) -> None:
    add(api, topic, [{"data": 1, "tag": "t", "node": "n", "meta": {"k": [1.0, "é"]}}, {"data": 2}])
    add(api, topic, [{"data": 3}], None)
    add(api, topic, [{"data": 4}], OTHER)
    records = api.read_all(topic, include_tags=True)
    assert traces_of(records) == [TRACE, TRACE, None, OTHER]
    assert "$trace" not in records[2]
    assert list(records[0]) == ["$seq", "$ts", "$node", "$tag", "$trace", "data", "meta"]
    assert records[0]["meta"] == {"k": [1.0, "é"]}
    assert "meta" not in records[1]


def test_data_and_meta_stay_byte_for_byte(api: Api, topic: str) -> None:
    body = b'{"records":[{"data": [1e400 , "\\u00e9"],"meta": {"a" :1, "a":2}}]}'
    sent = ["Content-Type: application/json", f"traceparent: {TRACE}"]
    assert api.raw("POST", f"/v0/topics/{topic}", body, sent).status in (200, 201)
    page = api.raw("POST", f"/v0/topics/{topic}/diff", b"{}", ["Content-Type: application/json"])
    wanted = f'"$trace":"{TRACE}","data":[1e400 , "\\u00e9"],"meta":{{"a" :1, "a":2}}}}]'
    assert wanted.encode() in page.body


@pytest.mark.parametrize(
    "headers",
    [
        [f"traceparent: {TRACE.upper()}"],
        [f"traceparent: {TRACE[:-1]}"],
        [f"traceparent: {TRACE}-00"],
        [f"traceparent: ff{TRACE[2:]}"],
        [f"traceparent: 01{TRACE[2:]}"],
        [f"traceparent: 00-{'0' * 32}-00f067aa0ba902b7-01"],
        [f"traceparent: 00-4bf92f3577b34da6a3ce929d0e0e4736-{'0' * 16}-01"],
        ["traceparent:"],
        [f"traceparent: {'x' * 5000}"],
        [f"traceparent: {TRACE}", f"traceparent: {OTHER}"],
        [f"traceparent: {TRACE}", f"Traceparent: {TRACE}"],
        [f"traceparent: {TRACE}, {OTHER}"],
    ],
    ids=str,
)
def test_an_invalid_trace_is_ignored(api: Api, topic: str, headers: list[str]) -> None:
    body = b'{"records":[{"data":1}]}'
    for _ in range(2):
        answer = api.raw(
            "POST", f"/v0/topics/{topic}", body, ["Content-Type: application/json", *headers]
        )
        assert answer.status in (200, 201)
    assert traces_of(api.read_all(topic)) == [None, None]


def test_one_connection_has_a_trace_with_each_request(api: Api, topic: str) -> None:
    """The server recognizes repeated heads by their bytes, and yet never takes the trace of another
    request.
    """
    traces = [TRACE, None, OTHER, OTHER, None, TRACE]
    for trace in traces:
        add(api, topic, [{"data": 0}], trace)
    assert traces_of(api.read_all(topic)) == traces


@pytest.mark.parametrize("is_sealed", [False, True])
def test_every_plain_read_shows_it(api: Api, topic: str, is_sealed: bool) -> None:
    for number in range(40):
        add(api, topic, [{"data": number, "tag": "t", "meta": {"n": 1}}], TRACE if number else None)
    if is_sealed:
        good(api.http.post("/v0/admin/seal", json={"topics": [topic]}))
    expected = [None] + 39 * [TRACE]
    path = f"/v0/topics/{topic}/records"
    assert traces_of(api.read_all(topic)) == expected
    assert traces_of(good(api.http.get(path))["records"]) == expected
    assert traces_of(good(api.http.get(path, params={"last": "3"}))["records"]) == 3 * [TRACE]
    newest_first = good(api.http.get(path, params={"order": "desc"}))["records"]
    assert traces_of(newest_first) == expected[::-1]
    assert good(api.http.get(f"{path}/2"))["record"]["$trace"] == TRACE
    assert "$trace" not in good(api.http.get(f"{path}/1"))["record"]
    assert traces_of(api.read(topic, filter="t")["records"]) == expected
    bare = api.read(topic, include_meta=False)["records"]
    assert list(bare[1]) == ["$seq", "$ts", "$trace", "data"]
    lines = api.http.get(path, headers={"Accept": "application/x-ndjson"}).text.splitlines()
    assert traces_of([json.loads(line) for line in lines]) == expected
    waited = api.read(topic, from_seq=39, wait_ms=10)
    assert traces_of(waited["records"]) == [TRACE]


def test_live_streams_watches_and_sockets_bring_it(api: Api, topic: str, clients: Clients) -> None:
    good(api.put(topic))
    add(api, topic, [{"data": 1}])
    live = clients.get(api, f"/v0/topics/{topic}/live?from_seq=0")
    watches = [
        clients.follow(carrier, api, {topic: {"from_seq": 0}}, include_data=False)
        for carrier in ("sse", "ws")
    ]
    assert _next_records(live) == [TRACE]
    for follower in watches:
        follower.reads(topic, 1)
        assert traces_of(follower.seen[topic]) == [TRACE]
        assert list(follower.seen[topic][0]) == ["$seq", "$ts", "$trace"]
    add(api, topic, [{"data": 2}, {"data": 3}], OTHER)
    assert _next_records(live) == [OTHER, OTHER]
    for follower in watches:
        follower.reads(topic, 3)
        assert traces_of(follower.seen[topic]) == [TRACE, OTHER, OTHER]


def _next_records(stream: SseStream) -> list[str | None]:
    """The traces of the next records of a live stream."""
    while (event := stream.event()).name != "record":
        pass
    return traces_of(json.loads(event.data)["records"])


def test_a_publish_takes_the_field(api: Api, topic: str, clients: Clients) -> None:
    socket = clients.ws(api)
    records = [{"data": 1, "meta": {"m": 1}}]
    for number, trace in enumerate((TRACE, None, TRACE.upper(), "é" * 55, OTHER)):
        sent = {} if trace is None else {"traceparent": trace}
        answer = socket.ask(
            op="publish", request_id=str(number), topic=topic, records=records, **sent
        )
        assert answer["op"] == "ack"
    refusal = socket.ask(op="publish", request_id="x", topic=topic, records=records, traceparent=7)
    assert (refusal["op"], refusal["detail"]["field"]) == ("error", "traceparent")
    assert traces_of(api.read_all(topic)) == [TRACE, None, None, None, OTHER]


def test_workers_get_it(api: Api, topic: str, clients: Clients) -> None:
    queue = Queue.made(api, topic, lease_ms=LONG_MS)
    for trace in (TRACE, None, OTHER):
        add(api, topic, [{"data": 1, "meta": {"m": 1}}], trace)
    jobs = queue.take("w", 3)
    assert traces_of(jobs) == [TRACE, None, OTHER]
    assert list(jobs[0]) == [
        *("$seq", "lease_id", "deadline", "$ts", "$trace", "deliveries", "data", "meta")
    ]
    assert jobs[0]["meta"] == {"m": 1}
    queue.nack("w", [1, 2])
    again = queue.take("w", 3)
    assert traces_of(again) == [TRACE, None]
    done = good(queue.post("ack", {"node": "w", "seqs": [1, 2], "claim_next": {"max": 1}}))
    assert done["next"]["claimed"] == []
    queue.nack("w", [3])
    stream = clients.get(api, f"{queue.path}/work?node=w&max=1")
    while (event := stream.event()).name != "job":
        pass
    assert json.loads(event.data)["$trace"] == OTHER


def test_a_dead_letter_and_its_redrive_keep_it(api: Api, topic: str) -> None:
    dead = f"{topic}.dead"
    queue = Queue.made(api, topic, max_deliveries=1, dead_letter=dead, lease_ms=LONG_MS)
    add(api, topic, [{"data": 1}, {"data": 2, "meta": {"m": 1}}])
    add(api, topic, [{"data": 3, "meta": {}}], None)
    queue.nack("w", [job["$seq"] for job in queue.take("w", 3)])
    assert queue.take("w", 3) == []
    eventually(lambda: queue.counts()[2] == 3, "they are dead letters")
    letters = api.read_all(dead)
    assert traces_of(letters) == [TRACE, TRACE, None]
    assert letters[0]["meta"]["$dead_letter_from"] == topic
    assert next(iter(letters[1]["meta"])) == "m"
    redriven = good(queue.post("redrive", {"all": True}))
    assert redriven["redriven"] == 3
    assert kept(api, topic) == [("1", None, TRACE), ("2", {"m": 1}, TRACE), ("3", {}, None)]


def test_copies_keep_it(api: Api, topic: str) -> None:
    """The copies go through a chain of two routers, the first of which stamps them; some records
    have traces.
    """
    chain = [topic, f"{topic}-b", f"{topic}-c"]
    for source, dest in pairwise(chain):
        body = {"source": source, "dest": dest, "guarantee": "exactly_once"}
        good(api.http.put(f"/v0/routers/{source}->{dest}", json=body))
    add(api, topic, [{"data": 1}, {"data": 2, "meta": {"m": 1}}])
    add(api, topic, [{"data": 3}], None)
    for dest in chain[1:]:
        eventually(lambda: api.get_state(dest)["head_seq"] == 3, "the copies are there")  # noqa: B023
        records = api.read_all(dest)
        assert traces_of(records) == [TRACE, TRACE, None]
        assert [list(record["meta"]) for record in records] == [
            *(["_topics_router"], ["m", "_topics_router"], ["_topics_router"])
        ]


def test_a_stream_keeps_it(api: Api, topic: str) -> None:
    url = f"{STREAM}{topic}"
    sent = {"content-type": "image/png", "traceparent": TRACE}
    assert api.http.put(url, content=b"\x89P", headers=sent).status_code == 201
    other = sent | {"traceparent": OTHER}
    assert api.http.post(url, content=b"\x00", headers=other).is_success
    plain = {"content-type": "image/png"}
    assert api.http.post(url, content=b"\x01", headers=plain).is_success
    assert api.http.get(url).content == b"\x89P\x00\x01"
    records = api.read_all(topic)
    assert traces_of(records) == [TRACE, OTHER, None]
    assert [record["$content_type"] for record in records] == 3 * ["image/png"]
    assert [record["data"] for record in records] == ["iVA=", "AA==", "AQ=="]
    assert list(records[0]) == [*("$seq", "$ts", "$trace", "$encoding", "$content_type", "data")]
    fork = other | {"Stream-Forked-From": url}
    assert api.http.put(f"{url}-f", content=b"\x02", headers=fork).status_code == 201
    assert traces_of(api.read_all(f"{topic}-f")) == [TRACE, OTHER, None, OTHER]


def test_messages_of_a_stream_keep_it(api: Api, topic: str) -> None:
    url = f"{STREAM}{topic}"
    sent = {"content-type": "application/json", "traceparent": TRACE}
    assert api.http.put(url, content=b'[1, {"a": 2}]', headers=sent).status_code == 201
    assert traces_of(api.read_all(topic)) == [TRACE, TRACE]
    assert api.http.get(url).json() == [1, {"a": 2}]


def test_a_large_append_keeps_it(api: Api, topic: str) -> None:
    text = large_text()
    add(api, topic, [{"data": text, "meta": {"m": 1}}, {"data": 2}])
    stream = f"{STREAM}{topic}-s"
    sent = {"content-type": "text/plain", "traceparent": OTHER}
    assert api.http.put(stream, content=text.encode(), headers=sent).status_code == 201
    json_sent = {"content-type": "application/json", "traceparent": OTHER}
    messages = json.dumps([text, 1]).encode()
    assert api.http.put(f"{stream}-j", content=messages, headers=json_sent).status_code == 201
    assert kept(api, topic) == [(json.dumps(text), {"m": 1}, TRACE), ("2", None, TRACE)]
    assert traces_of(api.read_all(f"{topic}-s")) == [OTHER]
    assert traces_of(api.read_all(f"{topic}-s-j")) == [OTHER, OTHER]


def test_it_counts_in_the_bytes_of_the_topic_and_not_in_the_limits(api: Api, topic: str) -> None:
    settings_meta = {"m": "x" * (16 * 1024 - len('{"m":""}'))}
    records: list[Json] = [{"data": 1, "meta": settings_meta}]
    assert send(api, f"{topic}-a", records, None).status_code == 201
    assert send(api, f"{topic}-b", records).status_code == 201
    plain, traced = (api.get_state(f"{topic}-{name}")["bytes"] for name in "ab")
    assert traced - plain == 56
    longer: list[Json] = [{"data": 1, "meta": {"m": settings_meta["m"] + "x"}}]
    for trace in (None, TRACE):
        detail = refused(send(api, topic, longer, trace), 400, "invalid_request")
        assert detail["field"] == "records[0].meta"
    data = "x" * (1024 * 1024 - 2)
    assert send(api, f"{topic}-c", [{"data": data}]).status_code == 201
    refused(send(api, f"{topic}-c", [{"data": data + "x"}]), 400, "record_too_large")


def test_a_repeat_keeps_the_first_trace(api: Api, topic: str) -> None:
    batch = [{"data": 1}, {"data": 2}]
    add(api, topic, batch[:1], TRACE, idempotency_key="k", idempotency="per_record")
    add(api, topic, batch, OTHER, idempotency_key="k", idempotency="per_record")
    add(api, topic, batch, None, idempotency_key="k", idempotency="per_record")
    assert traces_of(api.read_all(topic)) == [TRACE, OTHER]
    headers = {"Producer-Id": "p", "Producer-Epoch": "0", "Producer-Seq": "0"}
    for trace in (TRACE, OTHER):
        answer = api.http.post(
            f"/v0/topics/{topic}",
            json={"records": [{"data": 3}]},
            headers=headers | {"traceparent": trace},
        )
        assert answer.status_code in (200, 204)
    assert traces_of(api.read_all(topic)) == [TRACE, OTHER, TRACE]


def test_a_view_sees_data_and_meta_only(api: Api, topic: str) -> None:
    add(api, topic, [{"data": {"a": 1}, "meta": {"m": 1}}, {"data": 2}])
    url = f"/v0/topics/{topic}/views/rows"
    definition = {
        "schema": "CREATE TABLE rows (seq INTEGER PRIMARY KEY, data, meta)",
        "apply": "INSERT INTO rows VALUES (:seq, :data, :meta)",
        "queries": {"all": "SELECT seq, data, meta FROM rows ORDER BY seq"},
    }
    good(api.http.put(url, json=definition))
    answer = good(api.http.post(f"{url}/query?after=2", json={"query": "all"}))
    assert answer["rows"] == [[1, '{"a":1}', '{"m":1}'], [2, "2", None]]
