"""Watch sessions with prefixes, over a socket: kills, restarts, and the prefixes of keys."""

from __future__ import annotations

import json
from typing import Any

from tests.contract.conftest import NewServer
from tests.contract.driver import Api, Json, eventually, good, refused
from tests.contract.streams.streams import Event, SseStream
from tests.contract.watch.test_live import ACCEPT, follow, records


def open_session(api: Api, **body: Any) -> Json:
    opened = good(api.http.post("/v0/watch", json=body))
    assert "ignored" not in opened
    return opened


def until(stream: SseStream, name: str) -> Event:
    """The next event of this name."""
    while True:
        event: Event = stream.event()
        if event.name == name:
            return event


def test_a_session_keeps_its_prefixes_and_places_over_kills_and_restarts(own: NewServer) -> None:
    server = own()
    api = server.start()
    api.add("orders.a", 1)
    url = open_session(api, topics={"x": {}}, prefixes={"orders.": {}}, wait=True)["stream_url"]
    stream = follow(api, url)
    found, last_id = records(stream, 1)
    api.add("orders.b", 2)
    until(stream, "topic-created")
    found, last_id = records(stream, 1)
    assert found[0]["data"] == 2
    stream.close()
    for number, stop in ((3, server.crash), (5, server.restart), (7, server.crash)):
        api = stop()
        api.add("orders.b", number)
        api.add(f"orders.n{number}", number + 1)
        stream = follow(api, url, last_id)
        event = until(stream, "topic-created")
        assert json.loads(event.data) == {"topic": f"orders.n{number}", "epoch": 1}
        found, last_id = records(stream, 2)
        assert sorted(record["data"] for record in found) == [number, number + 1]
        stream.close()
    # The session still waits for its named topic; without an id it continues from its own position.
    stream = follow(api, url)
    api.add("x", 9)
    found, _ = records(stream, 1)
    assert found[0]["data"] == 9
    stream.close()
    server.stop()


def test_a_key_follows_its_own_prefixes_only(own: NewServer) -> None:
    server = own(TOPICS_API_KEYS="root,r:read:a.,s:read:a.b.")
    api = server.start()

    def as_key(key: str) -> Api:
        api.http.headers["Authorization"] = f"Bearer {key}"
        return api

    as_key("root").add("a.b.1", 1)
    for prefix in ("", "b.", "a"):
        body: Json = {"prefixes": {prefix: {}}}
        detail = refused(as_key("r").http.post("/v0/watch", json=body), 403, "forbidden")
        assert detail["field"] == f"prefixes.{prefix}"
    url = open_session(as_key("r"), prefixes={"a.": {}, "a.b.": {}})["stream_url"]
    stream = follow(api, url, None, "Authorization: Bearer r")
    assert records(stream, 1)[0][0]["data"] == 1
    as_key("root").add("a.c.1", 2)
    api.add("ab", 3)
    api.add("b.1", 4)
    api.add("a.c.1", 5)
    found, _ = records(stream, 2)
    assert [record["data"] for record in found] == [2, 5]
    stream.close()
    # Another key does not open it.
    stream = SseStream(api.url, url, (ACCEPT, "Authorization: Bearer s"))
    assert stream.status == 401
    stream.close()
    server.stop()


def test_nothing_of_a_prefix_is_left_behind(api: Api, topic: str) -> None:
    url = open_session(api, prefixes={f"{topic}.": {}})["stream_url"]
    streams = [follow(api, url) for _ in range(2)]
    # The second stream took the session over.
    until(streams[0], "error")
    api.add(f"{topic}.a", 1)
    assert records(streams[1], 1)[0][0]["data"] == 1
    for stream in streams:
        stream.close()
    eventually(lambda: follow_once(api, url) == [], "the session is at the head")


def follow_once(api: Api, url: str) -> list[Any]:
    """The events of a stream of the session until it has caught up."""
    stream = follow(api, url)
    found: list[Any] = []
    while (event := stream.event()).name != "caught-up":
        if event.name == "record":
            found += json.loads(event.data)["records"]
    stream.close()
    return found
