"""Streams that begin at a consumer: live, over a watch session, over a WebSocket."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any, Final

import pytest

from tests.contract.conftest import NewServer
from tests.contract.driver import Api, Json, eventually, good, refused
from tests.contract.records.test_consumers import commit, put, where
from tests.contract.streams.streams import SseStream, WsClient, gauges
from tests.contract.watch.test_filters import frames_until, seqs
from tests.contract.watch.test_live import ACCEPT, follow, records
from topics_server.client import TopicClient, live

Open = Callable[..., list[int]]
CARRIERS: Final = ("live", "watch", "ws", "ws of several")


@pytest.fixture
def standing(api: Api, topic: str) -> str:
    """Six records, `odd` and `even`, and a consumer `c` at 2."""
    for number in range(1, 7):
        good(api.append(topic, [{"data": number, "tag": ("even", "odd")[number % 2]}]))
    good(put(api, topic, "c", **{"from": 2}))
    return topic


@pytest.fixture
def socket(api: Api) -> Iterator[WsClient]:
    client = WsClient(api.url)
    yield client
    client.close()


def read_to_head(carrier: str, api: Api, socket: WsClient, topic: str) -> list[int]:
    """The seqs that a stream of consumer `c` brings until it has caught up."""
    if carrier.startswith("ws"):
        start = {"consumer": "c"}
        named = {"topic": topic, **start} if carrier == "ws" else {"topics": {topic: start}}
        socket.send(op="subscribe", **named)
        return seqs(frames_until(socket, "caught_up"))
    url = f"/v0/topics/{topic}/live?consumer=c"
    if carrier == "watch":
        body = {"topics": {topic: {"consumer": "c", "ack": "manual"}}}
        opened = good(api.http.post("/v0/watch", json=body))
        assert "ignored" not in opened
        assert opened["topics"][topic]["from_seq"] == where(api, topic)["seq"]
        url = opened["stream_url"]
    stream = SseStream(api.url, url, (ACCEPT,))
    found: list[Json] = []
    while (event := stream.event()).name != "caught-up":
        found += json.loads(event.data)["records"]
    stream.close()
    return [record["$seq"] for record in found]


@pytest.mark.parametrize("carrier", CARRIERS)
def test_a_stream_begins_at_its_consumer_and_commits_nothing(
    api: Api, socket: WsClient, standing: str, carrier: str
) -> None:
    for _ in range(2):
        assert read_to_head(carrier, api, socket, standing) == [3, 4, 5, 6]
        assert where(api, standing)["seq"] == 2
    good(commit(api, standing, 5))
    assert read_to_head(carrier, api, socket, standing) == [6]
    good(commit(api, standing, 0, rewind=True))
    assert read_to_head(carrier, api, socket, standing) == [1, 2, 3, 4, 5, 6]
    good(commit(api, standing, 6))
    assert read_to_head(carrier, api, socket, standing) == []


def test_a_stream_of_a_consumer_has_filters_and_goes_on_live(api: Api, standing: str) -> None:
    stream = follow(api, f"/v0/topics/{standing}/live?consumer=c&tag=odd")
    assert [record["$seq"] for record in records(stream, 2)[0]] == [3, 5]
    good(api.append(standing, [{"data": 7, "tag": "odd"}]))
    assert [record["$seq"] for record in records(stream, 1)[0]] == [7]
    stream.close()


def test_a_client_that_comes_back_goes_on_behind_its_id(api: Api, standing: str) -> None:
    target = f"/v0/topics/{standing}/live?consumer=c"
    stream = follow(api, f"{target}&limit=2")
    found, last_id = records(stream, 2)
    assert [record["$seq"] for record in found] == [3, 4]
    stream.close()
    # That holds even if the consumer was moved or deleted.
    good(commit(api, standing, 6))
    for _ in range(2):
        again = follow(api, target, last_id)
        assert [record["$seq"] for record in records(again, 2)[0]] == [5, 6]
        again.close()
        good(api.http.delete(f"/v0/topics/{standing}/consumers/c"))


def test_a_restart_keeps_where_a_stream_begins(own: NewServer) -> None:
    server = own()
    api = server.start()
    api.add("jobs", *range(5))
    good(put(api, "jobs"))
    good(commit(api, "jobs", 3))
    api = server.crash()
    stream = follow(api, "/v0/topics/jobs/live?consumer=c")
    assert [record["$seq"] for record in records(stream, 2)[0]] == [4, 5]
    stream.close()
    opened = good(api.http.post("/v0/watch", json={"topics": {"jobs": {"consumer": "c"}}}))
    good(commit(api, "jobs", 5))
    api = server.restart()
    # A session keeps the position at which it began.
    stream = follow(api, opened["stream_url"])
    assert [record["$seq"] for record in records(stream, 2)[0]] == [4, 5]
    stream.close()


def test_a_watch_begins_each_topic_at_its_own_consumer(
    api: Api, names: Callable[[str], str]
) -> None:
    starts: dict[str, Json] = {}
    for number in range(3):
        name = names("of")
        api.add(name, *range(4))
        good(put(api, name, "mine", **{"from": number}))
        starts[name] = {"consumer": "mine"}
    late = names("late")
    starts[late] = {"last": 1}
    api.add(late, 1, 2)
    opened = good(api.http.post("/v0/watch", json={"topics": starts}))
    assert [entry["from_seq"] for entry in opened["topics"].values()] == [0, 1, 2, 1]


def test_what_a_slow_consumer_has_lost_comes_as_a_tombstone(api: Api, topic: str) -> None:
    api.put(topic, {"cap_records": 2})
    api.add(topic, 1)
    good(put(api, topic, "c", **{"from": 1}))
    for number in range(6):
        api.add(topic, number)
    eventually(lambda: bool(api.get_state(topic)["count"] <= 2), "count within the cap")
    earliest_seq = api.get_state(topic)["earliest_seq"]
    stream = follow(api, f"/v0/topics/{topic}/live?consumer=c")
    lost = stream.event()
    assert lost.name == "tombstone"
    gap = json.loads(lost.data)
    assert (gap["gap_from"], gap["gap_to"]) == (2, earliest_seq - 1)
    found = records(stream, 8 - earliest_seq)[0]
    assert [record["$seq"] for record in found] == list(range(earliest_seq, 8))
    stream.close()


# --- refusals ---------------------------------------------------------------------------------


def test_a_consumer_that_is_not_there_is_404_and_takes_no_place(
    api: Api, socket: WsClient, standing: str
) -> None:
    before = gauges(api)
    for name, code in ((standing, "consumer_not_found"), ("none-of-it", "topic_not_found")):
        for method in ("GET", "HEAD"):
            target = f"/v0/topics/{name}/live?consumer=nobody"
            answer = api.raw(method, target, headers=[ACCEPT])
            assert answer.status == 404, answer
            if method == "GET":
                assert refused(answer, 404, code)["topic"] == name
        start: Json = {"topics": {name: {"consumer": "nobody"}}}
        for wait in (False, True):
            refused(api.http.post("/v0/watch", json={**start, "wait": wait}), 404, code)
            socket.send(op="subscribe", wait=wait, **start)
            frame = socket.frame()
            assert (frame["op"], frame["code"]) == ("error", code), frame

    def is_nothing_left() -> bool:
        # Streams of earlier tests may end meanwhile.
        return all(now <= was for now, was in zip(gauges(api), before, strict=True))

    eventually(is_nothing_left, "no stream and no session is left")
    # The topic is left out, like any missing topic.
    lenient = api.http.post("/v0/watch?lenient=true", json={"topics": {"none-of-it": {}}})
    assert good(lenient)["topics"] == {}
    lost = {"topics": {"none-of-it": {"consumer": "c"}, standing: {"consumer": "c"}}}
    opened = good(api.http.post("/v0/watch?lenient=true", json=lost))
    assert list(opened["topics"]) == [standing]


@pytest.mark.parametrize("other", ["from_seq=0", "from_seq=3", "since=1m", "last=2", "tail=false"])
def test_a_live_stream_has_one_start(api: Api, standing: str, other: str) -> None:
    for query in (f"consumer=c&{other}", f"{other}&consumer=c"):
        for method in ("GET", "POST"):
            target = f"/v0/topics/{standing}/live?{query}"
            answer = api.raw(method, target, headers=[ACCEPT])
            field = other.partition("=")[0]
            assert refused(answer, 400, "invalid_request")["field"] == field
            assert f"consumer and {field} are two starts" in answer.body.decode()


def test_a_cursor_and_a_consumer_are_two_starts(api: Api, standing: str) -> None:
    stream = follow(api, f"/v0/topics/{standing}/live?consumer=c")
    _, last_id = records(stream, 4)
    stream.close()
    target = f"/v0/topics/{standing}/live?consumer=c&cursor={last_id}"
    answer = api.raw("GET", target, headers=[ACCEPT])
    assert refused(answer, 400, "invalid_request")["field"] == "cursor"
    assert b"consumer and cursor" in answer.body
    body = {"topics": {standing: {"consumer": "c"}}, "cursor": last_id}
    detail = refused(api.http.post("/v0/watch", json=body), 400, "invalid_request")
    assert detail["field"] == f"topics.{standing}.consumer"


@pytest.mark.parametrize(
    ("start", "field"),
    [
        ({"from_seq": 1}, "from_seq"),
        ({"since": 0}, "since"),
        ({"last": 1}, "last"),
        ({"tail": True}, "tail"),
    ],
)
def test_a_topic_of_a_watch_has_one_start(
    api: Api, socket: WsClient, standing: str, start: Json, field: str
) -> None:
    both = {standing: {"consumer": "c", **start}}
    answer = api.http.post("/v0/watch", json={"topics": both})
    detail = refused(answer, 400, "invalid_request")
    assert detail["field"] == f"topics.{standing}.{field}"
    assert f"consumer and {field} are two starts" in answer.text
    socket.send(op="subscribe", topic=standing, **both[standing])
    frame = socket.frame()
    assert (frame["code"], frame["detail"]["field"]) == ("invalid_request", field)


def test_a_live_stream_of_many_topics_has_no_consumer(api: Api, standing: str) -> None:
    for query in (f"topics={standing}", "prefix=x", f"topics={standing}&prefix=x"):
        answer = api.raw("GET", f"/v0/live?{query}&consumer=c", headers=[ACCEPT])
        assert refused(answer, 400, "invalid_request")["field"] == "consumer"


# --- keys and the client ----------------------------------------------------------------------


def test_a_key_that_reads_follows_from_a_consumer(own: NewServer) -> None:
    server = own(TOPICS_API_KEYS="all,r:read:a.,w:write")
    api = server.start()
    root = {"authorization": "Bearer all"}
    for name in ("a.t", "b.t"):
        good(api.http.post(f"/v0/topics/{name}", json={"records": [{"data": 1}]}, headers=root))
        good(api.http.put(f"/v0/topics/{name}/consumers/c", json={}, headers=root))
    for key, name, status in (("r", "a.t", 200), ("r", "b.t", 403), ("w", "a.t", 403)):
        target = f"/v0/topics/{name}/live?consumer=c"
        stream = SseStream(api.url, target, (ACCEPT, f"Authorization: Bearer {key}"))
        assert stream.status == status, (key, name)
        stream.close()
        body = {"topics": {name: {"consumer": "c"}}}
        head = {"authorization": f"Bearer {key}"}
        assert api.http.post("/v0/watch", json=body, headers=head).status_code == status
    # A ticket opens the stream that it was issued for.
    asked = api.http.post("/v0/topics/a.t/live?consumer=c", headers={"authorization": "Bearer r"})
    url = good(asked)["stream_url"]
    stream = follow(api, url)
    assert [record["$seq"] for record in records(stream, 1)[0]] == [1]
    stream.close()
    stream = SseStream(api.url, url.replace("consumer=c", "consumer=d"), (ACCEPT,))
    assert stream.status == 401
    stream.close()


def test_the_python_client_follows_from_a_consumer(api: Api, standing: str) -> None:
    found: list[Any] = []
    with TopicClient(standing, url=api.url) as client:
        for event in live(standing, url=api.url, consumer="c", limit=1):
            found += [record.data for record in event.records]
            if event.records:
                client.commit("c", event.records[-1].seq)
            if len(found) == 3:
                break
        assert found == [3, 4, 5]
        for event in live(standing, url=api.url, consumer="c"):
            found += [record.data for record in event.records]
            if event.kind == "caught-up":
                break
    assert found == [3, 4, 5, 6]
