"""`wait: true`: a missing topic is followed from 0 once it exists."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.contract.conftest import NewServer
from tests.contract.driver import Api, Json, Server, good, refused
from tests.contract.streams.streams import NothingCame, SseStream, WsClient
from tests.contract.watch.subscriptions import Clients

Names = Callable[[str], str]
ABSENT = {"from_seq": 0, "head_seq": 0, "earliest_seq": 1, "waiting": True}


def asked(api: Api, *names: str, how: Json | None = None, **fields: object) -> Json:
    """The answer to a POST that waits for these topics."""
    topics = {name: how or {} for name in names}
    return good(api.http.post("/v0/watch", json={"topics": topics, "wait": True, **fields}))


def records_of(stream: SseStream, count: int) -> tuple[dict[str, list[Any]], str]:
    """The data of the next records by topic, and the last id; every received record is kept."""
    found: dict[str, list[Any]] = {}
    last_id = ""
    while sum(map(len, found.values())) < count:
        event = stream.event()
        assert event.name in ("record", "caught-up"), event
        last_id = event.id or last_id
        told = json.loads(event.data)
        rows = told.get("records", [])
        found.setdefault(told["topic"], []).extend(row["data"] for row in rows)
    return {name: datas for name, datas in found.items() if datas}, last_id


@pytest.fixture
def clients() -> Any:
    with Clients() as made:
        yield made


def test_without_it_such_a_topic_is_404(api: Api, topic: str) -> None:
    """§7.2: without `wait`, a missing topic gets 404 as before."""
    for wait in ({}, {"wait": False}):
        answer = api.http.post("/v0/watch", json={"topics": {topic: {}}, **wait})
        refused(answer, 404, "topic_not_found")


@pytest.mark.parametrize("wait", [1, "true", None])
def test_it_is_a_boolean(api: Api, topic: str, wait: object) -> None:
    answer = api.http.post("/v0/watch", json={"topics": {topic: {}}, "wait": wait})
    assert refused(answer, 400, "invalid_request")["field"] == "wait"


@pytest.mark.parametrize("how", [{}, {"tail": True}, {"from_seq": 7}])
@pytest.mark.parametrize("lenient", ["", "?lenient=true"])
def test_the_answer_names_the_awaited_topics(
    api: Api, names: Names, how: Json, lenient: str
) -> None:
    there, absent = names("there"), names("absent")
    api.add(there, 1, 2)
    body = {"topics": {absent: how, there: {}}, "wait": True}
    answer = good(api.http.post(f"/v0/watch{lenient}", json=body))
    assert answer["topics"][absent] == ABSENT
    assert answer["topics"][there] == {"from_seq": 0, "head_seq": 2, "earliest_seq": 1}
    assert "ignored" not in answer
    refused(api.state(absent), 404, "topic_not_found")


@pytest.mark.parametrize("config", [{}, {"durability": "ephemeral"}, {"type": "queue"}])
@pytest.mark.parametrize("is_put", [True, False])
def test_a_topic_is_followed_from_0_once_it_exists(
    api: Api, clients: Clients, names: Names, config: Json, is_put: bool
) -> None:
    """A PUT or the first append creates the topic; the session follows the other topic all the
    time.
    """
    there, absent = names("there"), names("absent")
    api.put(there)
    answer = asked(api, there, absent, how={"tail": True})
    stream = clients.get(api, answer["stream_url"])
    api.add(there, "a")
    assert records_of(stream, 1)[0] == {there: ["a"]}
    if is_put:
        good(api.put(absent, config))
        api.add(absent, 1)
    else:
        good(api.append(absent, [{"data": 1}], config=config))
    assert records_of(stream, 1)[0] == {absent: [1]}
    api.add(there, "b")
    api.add(absent, 2, 3)
    assert records_of(stream, 3)[0] == {there: ["b"], absent: [2, 3]}


def test_records_appended_without_a_stream_are_delivered(
    api: Api, clients: Clients, topic: str
) -> None:
    answer = asked(api, topic)
    api.add(topic, 1, 2, 3)
    stream = clients.get(api, answer["stream_url"])
    assert records_of(stream, 3)[0] == {topic: [1, 2, 3]}


def test_a_topic_that_came_and_went_is_waited_for_again(
    api: Api, clients: Clients, topic: str
) -> None:
    """Without an open stream, no reader saw the first topic."""
    answer = asked(api, topic)
    api.add(topic, "old")
    api.drop(topic)
    stream = clients.get(api, answer["stream_url"])
    with pytest.raises(NothingCame):
        stream.event(0.5)
    api.add(topic, "new")
    assert records_of(stream, 1)[0] == {topic: ["new"]}


def test_a_topic_deleted_once_it_was_there_ends_as_any(
    api: Api, clients: Clients, topic: str
) -> None:
    stream = clients.get(api, asked(api, topic)["stream_url"])
    api.add(topic, 1)
    records_of(stream, 1)
    api.drop(topic)
    while (event := stream.event()).name == "caught-up":
        pass
    assert event.name == "topic-deleted"


def test_all_sessions_that_wait_for_one_topic_are_notified(
    api: Api, clients: Clients, topic: str
) -> None:
    streams = [clients.get(api, asked(api, topic)["stream_url"]) for _ in range(40)]
    streams[3].close()
    api.add(topic, "x")
    for index, stream in enumerate(streams):
        if index != 3:
            assert records_of(stream, 1)[0] == {topic: ["x"]}


@pytest.mark.parametrize("is_seen", [True, False])
def test_a_reconnect_goes_on_where_the_client_was(
    api: Api, clients: Clients, names: Names, is_seen: bool
) -> None:
    """An id from before the topic's creation starts it at its first record."""
    there, absent = names("there"), names("absent")
    api.add(there, "a")
    answer = asked(api, there, absent)
    stream = clients.get(api, answer["stream_url"])
    _, before_id = records_of(stream, 1)
    api.add(absent, 1, 2)
    _, after_id = records_of(stream, 2)
    stream.close()
    api.add(absent, 3)
    last_id = after_id if is_seen else before_id
    again = clients.get(api, answer["stream_url"], [f"Last-Event-ID: {last_id}"])
    expected = [3] if is_seen else [1, 2, 3]
    assert records_of(again, len(expected))[0] == {absent: expected}
    # A new session from an id gives the same result.
    again.close()
    other = asked(api, there, absent, cursor=last_id)
    third = clients.get(api, other["stream_url"])
    assert records_of(third, len(expected))[0] == {absent: expected}


@pytest.mark.parametrize("restart", [Server.restart, Server.crash])
@pytest.mark.parametrize("is_made", ["before", "after", "before, and read"])
def test_a_session_waits_over_a_restart(
    own: NewServer, clients: Clients, restart: Any, is_made: str
) -> None:
    server = own()
    api = server.start()
    good(api.put("there", {"durability": "fsync"}))
    answer = asked(api, "there", "late")
    last_id = ""
    if is_made != "after":
        good(api.append("late", [{"data": 1}], config={"durability": "fsync"}))
    if is_made == "before, and read":
        stream = clients.get(api, answer["stream_url"])
        _, last_id = records_of(stream, 1)
    api = restart(server)
    headers = [f"Last-Event-ID: {last_id}"] if last_id else []
    stream = clients.get(api, answer["stream_url"], headers)
    if is_made == "after":
        api.add("late", 1)
    if is_made != "before, and read":
        assert records_of(stream, 1)[0] == {"late": [1]}
    api.add("late", 2)
    assert records_of(stream, 1)[0] == {"late": [2]}
    clients.close()
    server.stop()


def test_prefixes_of_the_key_hold_for_topics_that_are_not_there(own: NewServer) -> None:
    """§7.1: the names of the body are checked, whether or not they exist."""
    server = own(TOPICS_API_KEYS="secret::mine.,full")
    api = server.start()
    key = "Bearer secret"
    api.http.headers["Authorization"] = key
    body = {"topics": {"mine.late": {}, "theirs.late": {}}, "wait": True}
    detail = refused(api.http.post("/v0/watch", json=body), 403, "forbidden")
    assert detail["field"] == "topics.theirs.late"
    answer = asked(api, "mine.late")
    lines = ["Accept: text/event-stream", f"Authorization: {key}"]
    with contextlib.closing(SseStream(api.url, answer["stream_url"], lines)) as stream:
        api.add("mine.late", 1)
        assert records_of(stream, 1)[0] == {"mine.late": [1]}
    with contextlib.closing(WsClient(api.url, headers=[("Authorization", key)])) as socket:
        refusal = socket.ask(op="subscribe", topic="theirs.late", wait=True)
        assert refusal["code"] == "forbidden"
        assert socket.ask(op="subscribe", topic="mine.later", wait=True)["op"] == "subscribed"
    server.stop()


# -- WebSocket ---------------------------------------------------------------------------------


def test_a_websocket_waits_too(api: Api, clients: Clients, names: Names) -> None:
    there, absent = names("there"), names("absent")
    api.add(there, "a")
    socket = clients.ws(api)
    refusal = socket.ask(op="subscribe", topic=absent)
    assert refusal["op"] == "error"
    told = socket.ask(op="subscribe", topics={there: {}, absent: {}}, wait=True)
    assert told["topics"][absent] == ABSENT
    assert "waiting" not in told["topics"][there]
    assert socket.frame_of("record")["topic"] == there
    api.add(absent, 1)
    frame = socket.frame_of("record")
    assert (frame["topic"], frame["records"][0]["data"]) == (absent, 1)


def test_a_websocket_unsubscribes_from_an_awaited_topic(
    api: Api, clients: Clients, topic: str
) -> None:
    socket = clients.ws(api)
    socket.ask(op="subscribe", topic=topic, wait=True)
    assert socket.ask(op="unsubscribe", topic=topic)["op"] == "unsubscribed"
    api.add(topic, 1)
    assert socket.ask(op="ping")["op"] == "pong"
    with pytest.raises(NothingCame):
        socket.frame(0.5)
    # The client sends the command twice more: the last one counts.
    for _ in range(2):
        socket.ask(op="subscribe", topic=topic, wait=True)
    assert socket.frame_of("record")["records"][0]["data"] == 1
