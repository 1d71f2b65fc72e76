"""Consumers: named, durable cursors of a topic's readers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from tests.contract.conftest import NewServer
from tests.contract.driver import Api, Json, good, refused


def put(api: Api, topic: str, consumer: str = "c", **body: Any) -> Any:
    return api.http.put(f"/v0/topics/{topic}/consumers/{consumer}", json=body)


def commit(api: Api, topic: str, seq: int, consumer: str = "c", **more: Any) -> Any:
    url = f"/v0/topics/{topic}/consumers/{consumer}/commit"
    return api.http.post(url, json={"seq": seq, **more})


def where(api: Api, topic: str, consumer: str = "c") -> Json:
    return good(api.http.get(f"/v0/topics/{topic}/consumers/{consumer}"))


def seqs(page: Json) -> list[int]:
    return [record["$seq"] for record in page["records"]]


def test_a_consumer_begins_where_it_is_told(api: Api, topic: str) -> None:
    api.add(topic, 1, 2, 3)
    made = put(api, topic)
    assert made.status_code == 201
    assert (made.json()["seq"], made.json()["lag"], made.json()["created"]) == (0, 3, True)
    for name, start, seq in (("head", "head", 3), ("two", 2, 2), ("beyond", 9, 3)):
        assert good(put(api, topic, name, **{"from": start}))["seq"] == seq
    # An existing consumer stays where it is.
    again = put(api, topic, "two", **{"from": "head"})
    assert (again.status_code, again.json()["created"], again.json()["seq"]) == (200, False, 2)


def test_a_commit_never_goes_back_by_itself(api: Api, topic: str) -> None:
    api.add(topic, *range(5))
    put(api, topic)
    moved = good(commit(api, topic, 3))
    assert (moved["moved"], moved["seq"], moved["lag"]) == (True, 3, 2)
    late = good(commit(api, topic, 2))
    assert (late["moved"], late["seq"]) == (False, 3)
    assert good(commit(api, topic, 3))["moved"] is False
    back = good(commit(api, topic, 1, rewind=True))
    assert (back["moved"], back["seq"]) == (True, 1)
    assert refused(commit(api, topic, 6), 400, "invalid_request")["field"] == "seq"
    assert where(api, topic)["seq"] == 1


def test_a_commit_may_ask_where_the_consumer_is(api: Api, topic: str) -> None:
    api.add(topic, *range(5))
    put(api, topic)
    assert good(commit(api, topic, 2, if_seq=0))["seq"] == 2
    detail = refused(commit(api, topic, 3, if_seq=0), 409, "condition_failed")
    assert (detail["reason"], detail["seq"]) == ("seq", 2)
    answers: list[int] = []

    def race() -> None:
        answers.append(commit(api, topic, 4, if_seq=2).status_code)

    racers = [threading.Thread(target=race) for _ in range(6)]
    for racer in racers:
        racer.start()
    for racer in racers:
        racer.join()
    assert sorted(answers) == [200] + [409] * 5


def test_a_diff_of_a_consumer_starts_where_it_is(api: Api, topic: str) -> None:
    api.add(topic, *range(5))
    put(api, topic)
    assert seqs(api.read(topic, consumer="c", limit=2)) == [1, 2]
    # Reading commits nothing.
    assert seqs(api.read(topic, consumer="c", limit=2)) == [1, 2]
    good(commit(api, topic, 2))
    assert seqs(api.read(topic, consumer="c")) == [3, 4, 5]
    assert seqs(api.read(topic, consumer="c", from_seq=4)) == [5]
    assert where(api, topic)["seq"] == 2


def test_ack_auto_commits_what_the_client_presents(api: Api, topic: str) -> None:
    api.add(topic, *range(5))
    put(api, topic)
    first = api.read(topic, consumer="c", ack="auto", limit=2)
    assert (seqs(first), where(api, topic)["seq"]) == ([1, 2], 0)
    second = api.read(topic, consumer="c", ack="auto", limit=2, from_seq=first["next_from_seq"])
    assert (seqs(second), where(api, topic)["seq"]) == ([3, 4], 2)
    # A client that lost its position gets the records after the last commit again: at least once.
    assert seqs(api.read(topic, consumer="c", ack="auto")) == [3, 4, 5]


def test_a_consumer_waits_for_records(api: Api, topic: str) -> None:
    api.add(topic, 1)
    put(api, topic, **{"from": "head"})
    found: list[Json] = []
    reader = threading.Thread(
        target=lambda: found.append(api.read(topic, consumer="c", wait_ms=20_000))
    )
    reader.start()
    api.add(topic, 2)
    reader.join()
    assert seqs(found[0]) == [2]


def test_lag_counts_seqs_and_time(api: Api, topic: str) -> None:
    api.add(topic, *range(3))
    put(api, topic)
    state = where(api, topic)
    assert state["lag"] == 3
    assert state["lag_ms"] >= 0
    good(commit(api, topic, 3))
    state = where(api, topic)
    assert (state["lag"], state["lag_ms"]) == (0, 0)
    assert state["created_ts"] <= state["committed_ts"] <= state["last_seen_ts"]


def test_ack_auto_is_refused_where_it_would_commit_nothing(api: Api, topic: str) -> None:
    api.add(topic, 1, 2)
    good(put(api, topic))
    alone = api.diff(topic, ack="auto")
    assert refused(alone, 400, "invalid_request")["field"] == "ack"
    beyond = api.diff(topic, consumer="c", ack="auto", from_seq=9)
    assert refused(beyond, 400, "invalid_request")["field"] == "from_seq"
    assert where(api, topic)["seq"] == 0


def test_consumers_are_listed_in_pages_and_deleted(api: Api, topic: str) -> None:
    api.add(topic, 1)
    names = [f"c{number}" for number in range(5)]
    for name in reversed(names):
        good(put(api, topic, name))
    url = f"/v0/topics/{topic}/consumers"
    found: list[str] = []
    query: dict[str, Any] = {"page_size": 2}
    while True:
        page = good(api.http.get(url, params=query))
        found += [each["consumer"] for each in page["consumers"]]
        if "next_cursor" not in page:
            break
        query["cursor"] = page["next_cursor"]
    assert found == names
    assert good(api.http.delete(f"{url}/c1"))["deleted"] is True
    assert good(api.http.delete(f"{url}/c1"))["deleted"] is False
    assert refused(api.http.get(f"{url}/c1"), 404, "consumer_not_found")["consumer"] == "c1"
    refused(commit(api, topic, 1, "c1"), 404, "consumer_not_found")
    refused(api.diff(topic, consumer="c1"), 404, "consumer_not_found")
    assert len(good(api.http.get(url))["consumers"]) == 4


def test_consumers_are_gone_with_their_topic(api: Api, topic: str) -> None:
    api.add(topic, 1)
    put(api, topic)
    good(api.drop(topic))
    refused(put(api, topic), 404, "topic_not_found")
    refused(commit(api, topic, 1), 404, "topic_not_found")
    api.add(topic, 1)
    refused(api.http.get(f"/v0/topics/{topic}/consumers/c"), 404, "consumer_not_found")


@pytest.mark.parametrize("durability", ["ephemeral", "memory", "disk", "fsync"])
def test_consumers_are_kept_over_a_kill_and_in_snapshots(own: NewServer, durability: str) -> None:
    server = own(TOPICS_CHECKPOINT_INTERVAL_MS="100")
    api = server.start()
    api.put("t", {"durability": durability})
    api.add("t", *range(9))
    for name in ("kept", "back", "gone"):
        good(put(api, "t", name))
    good(commit(api, "t", 7, "kept"))
    good(commit(api, "t", 8, "back"))
    good(commit(api, "t", 3, "back", rewind=True))
    good(api.http.delete("/v0/topics/t/consumers/gone"))
    for start_again in (server.crash, server.restart, server.crash):
        api = start_again()
        consumers = good(api.http.get("/v0/topics/t/consumers"))["consumers"]
        assert [(each["consumer"], each["seq"]) for each in consumers] == [
            ("back", 3),
            ("kept", 7),
        ]
    lines = api.http.get("/v0/metrics", params={"format": "prometheus"}).text.splitlines()
    lags = {line.split()[0] for line in lines if line.startswith("topics_consumer_lag{")}
    assert lags == {
        'topics_consumer_lag{consumer="t/back"}',
        'topics_consumer_lag{consumer="t/kept"}',
    }
    server.stop()


BAD: list[tuple[str, str, Any, str]] = [
    ("PUT", "/c", {"from": "middle"}, "from"),
    ("PUT", "/c", {"from": -1}, "from"),
    ("PUT", "/c", {"from": 2**64}, "from"),
    ("PUT", "/c", {"from": None}, "from"),
    ("PUT", "/-c", {}, "consumer"),
    ("PUT", f"/{'c' * 256}", {}, "consumer"),
    ("PUT", "/c%20d", {}, "consumer"),
    ("POST", "/c/commit", {}, "seq"),
    ("POST", "/c/commit", {"seq": "1"}, "seq"),
    ("POST", "/c/commit", {"seq": -1}, "seq"),
    ("POST", "/c/commit", {"seq": 1.5}, "seq"),
    ("POST", "/c/commit", {"seq": 2**64}, "seq"),
    ("POST", "/c/commit", {"seq": 1, "rewind": "yes"}, "rewind"),
    ("POST", "/c/commit", {"seq": 1, "if_seq": "0"}, "if_seq"),
    ("POST", "/c/commit", {"seq": 1, "if_seq": 2**64}, "if_seq"),
]


@pytest.mark.parametrize(("method", "path", "body", "field"), BAD)
def test_malformed_requests_change_nothing(
    api: Api, topic: str, method: str, path: str, body: Any, field: str
) -> None:
    api.add(topic, 1, 2)
    answer = api.http.request(method, f"/v0/topics/{topic}/consumers{path}", json=body)
    assert refused(answer, 400, "invalid_request")["field"] == field
    assert good(api.http.get(f"/v0/topics/{topic}/consumers"))["consumers"] == []


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"consumer": 1}, "consumer"),
        ({"consumer": "a b"}, "consumer"),
        ({"consumer": "c", "ack": "later"}, "ack"),
        ({"consumer": "c", "last": 1}, "consumer"),
        ({"consumer": "c", "since": "1h"}, "consumer"),
    ],
)
def test_malformed_reads_of_a_consumer(api: Api, topic: str, fields: Json, field: str) -> None:
    api.add(topic, 1)
    put(api, topic)
    detail = refused(api.diff(topic, **fields), 400, "invalid_request")
    assert detail["field"] in (field, "last", "since")


def test_unknown_members_are_named(api: Api, topic: str) -> None:
    api.add(topic, 1)
    assert good(put(api, topic, frm="head"))["ignored"] == ["frm"]
    assert good(commit(api, topic, 1, ifseq=0))["ignored"] == ["ifseq"]


def test_a_key_needs_read_and_write(own: NewServer, names: Callable[[str], str]) -> None:
    server = own(TOPICS_API_KEYS="all,r:read,w:write,rw:read+write:a.")
    api = server.start()

    def as_key(key: str) -> Api:
        api.http.headers["Authorization"] = f"Bearer {key}"
        return api

    for name in ("a.t", "b.t"):
        as_key("all").add(name, 1, 2)
        good(put(api, name))
    for key in ("r", "w"):
        refused(put(as_key(key), "a.t", "d"), 403, "forbidden")
        refused(commit(api, "a.t", 1), 403, "forbidden")
    good(commit(as_key("rw"), "a.t", 1))
    refused(commit(api, "b.t", 1), 403, "forbidden")
    assert seqs(as_key("r").read("a.t", consumer="c")) == [2]
    refused(api.diff("a.t", consumer="c", ack="auto", from_seq=2), 403, "forbidden")
    lines = as_key("rw").http.get("/v0/metrics", params={"format": "prometheus"}).text
    assert 'consumer="a.t/c"' in lines
    assert 'consumer="b.t/c"' not in lines
    server.stop()
