"""Streams and topics share names: who owns a name, who may use it, and what is stored once.

For keys the path of a stream counts, not the hashed name of its topic. A name that forks of a
deleted stream hold is held for every way to create a topic. An idempotency key holds in both APIs.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import Any, Final

import httpx
import pytest

from tests.contract.conftest import URL, NewServer, new_name
from tests.contract.driver import Api, Server, eventually, good, refused

MOUNT: Final = "/v1/stream"
TEXT: Final = {"content-type": "text/plain"}
PREFIXES: Final = {"tenant": "ten.a", "hashed": "ds:", "letter": "d", "all": ""}


def hashed(path: str) -> str:
    """The topic name of a stream whose path is no topic name."""
    return "ds:" + hashlib.sha256(path.encode()).hexdigest()[:40]


class Keyed:
    """A server with a key of each of `PREFIXES`."""

    def __init__(self, server: Server) -> None:
        keys = [
            f"key-{who}::{prefix}" if prefix else f"key-{who}" for who, prefix in PREFIXES.items()
        ]
        server.env = {"TOPICS_API_KEYS": ",".join(keys)}
        self.api = server.start()

    def ask(
        self, who: str, method: str, path: str, body: Any = None, **more: Any
    ) -> httpx.Response:
        """Send one request with a key; a body that is not bytes is sent as JSON."""
        headers = {"authorization": f"Bearer key-{who}"}
        if isinstance(body, bytes):
            headers |= TEXT
        elif body is not None:
            headers["content-type"] = "application/json"
            body = json.dumps(body).encode()
        return self.api.http.request(method, path, content=body, headers=headers, **more)


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Keyed]:
    if URL:
        pytest.skip("needs a server of its own; TOPICS_CONTRACT_URL names a shared one")
    server = Server(tmp_path_factory.mktemp("names"), {})
    yield Keyed(server)
    server.stop()


def _made(keyed: Keyed, path: str) -> str:
    """Create a stream at a path with the key of all rights; return the name of its topic."""
    assert keyed.ask("all", "PUT", f"{MOUNT}/{path}", b"secret").status_code == 201
    return hashed(path)


@pytest.mark.parametrize("who", ["hashed", "letter", "tenant"])
def test_a_hashed_name_gives_no_access_to_another_stream(keyed: Keyed, who: str) -> None:
    """Settled rules of the contract [S-91]"""
    name = _made(keyed, f"{new_name('ten.b')}/orders")
    record = {"records": [{"data": 1}]}
    calls: list[tuple[str, str, Any]] = [
        ("GET", f"/v0/topics/{name}", None),
        ("POST", f"/v0/topics/{name}/diff", {}),
        ("POST", f"/v0/topics/{name}", record),
        ("POST", f"/v0/topics/{name}/delete", {"before_seq": 9}),
        ("PUT", f"/v0/topics/{name}", {}),
        ("DELETE", f"/v0/topics/{name}", None),
        ("POST", "/v0/watch", {"topics": {name: {}}}),
        ("PUT", "/v0/routers/ds:r", {"source": name, "dest": "ds:copies"}),
        ("POST", "/v0/admin/seal", {"topics": [name]}),
        ("PUT", "/v0/topics/ds:queue", {"type": "queue", "dead_letter": name}),
        ("GET", f"{MOUNT}/{name}", None),
        ("POST", f"{MOUNT}/{name}", b"more"),
        ("PUT", f"{MOUNT}/{name}", b""),
        ("DELETE", f"{MOUNT}/{name}", None),
    ]
    for method, path, body in calls:
        refused(keyed.ask(who, method, path, body), 403, "forbidden")
    listed = good(keyed.ask(who, "GET", "/v0/topics", params={"page_size": 1000}))["topics"]
    assert name not in [row["topic"] for row in listed]


def test_a_stream_is_its_paths_also_by_its_topics_name(keyed: Keyed) -> None:
    """A key that may use the path may use the topic. [S-91]"""
    name = _made(keyed, path := f"{new_name('ten.a')}/orders")
    assert keyed.ask("tenant", "GET", f"{MOUNT}/{path}").content == b"secret"
    assert good(keyed.ask("tenant", "GET", f"/v0/topics/{name}"))["stream"]["path"] == path
    page = good(keyed.ask("tenant", "POST", f"/v0/topics/{name}/diff", {}))
    assert [record["data"] for record in page["records"]] == ["c2VjcmV0"]
    refused(keyed.ask("hashed", "GET", f"{MOUNT}/{path}"), 403, "forbidden")


def test_no_stream_is_at_the_name_of_anothers_topic(keyed: Keyed) -> None:
    """The server compares the stored path, even for a key with all rights. [S-91]"""
    name = _made(keyed, path := f"{new_name('ten.b')}/orders")
    refused(keyed.ask("all", "GET", f"{MOUNT}/{name}"), 404, "stream_not_found")
    refused(keyed.ask("all", "POST", f"{MOUNT}/{name}", b"more"), 404, "stream_not_found")
    refused(keyed.ask("all", "PUT", f"{MOUNT}/{name}", b""), 409, "stream_conflict")
    refused(keyed.ask("all", "DELETE", f"{MOUNT}/{name}"), 404, "stream_not_found")
    assert keyed.ask("all", "GET", f"{MOUNT}/{path}").content == b"secret"


@pytest.mark.parametrize("who", PREFIXES)
def test_no_key_can_take_a_hashed_name_in_advance(keyed: Keyed, who: str) -> None:
    """No way to create a topic accepts such a name, and the stream can be made at its path
    afterwards. [S-91]
    """
    path = f"{new_name('ten.c')}/orders"
    name, expected = hashed(path), (400, "invalid_request")
    if who != "all":
        expected = (403, "forbidden")
    calls: list[tuple[str, str, Any]] = [
        ("PUT", f"/v0/topics/{name}", {}),
        ("POST", f"/v0/topics/{name}", {"records": [{"data": 1}]}),
        ("PUT", "/v0/routers/ds:r", {"source": name, "dest": "ds:copies"}),
        ("PUT", "/v0/routers/ds:r", {"source": "ds:copies", "dest": name}),
        ("PUT", f"{MOUNT}/{name}", b""),
    ]
    for method, target, body in calls:
        refused(keyed.ask(who, method, target, body), *expected)
    refused(keyed.ask("all", "GET", "/v0/topics/ds:copies"), 404, "topic_not_found")
    assert keyed.ask("all", "PUT", f"{MOUNT}/{path}", b"").status_code == 201


# --- a deleted stream that has forks ----------------------------------------------------------


def _forked(api: Api, path: str) -> None:
    """A stream that was deleted and still has a fork."""
    assert api.http.put(f"{MOUNT}/{path}", content=b"1", headers=TEXT).status_code == 201
    fork = {"stream-forked-from": f"{MOUNT}/{path}"}
    made = api.http.put(f"{MOUNT}/{path}.fork", headers=fork)
    assert made.status_code == 201, made.text
    assert api.http.delete(f"{MOUNT}/{path}").status_code == 204


def test_forks_hold_a_name_for_either_door(api: Api, topic: str) -> None:
    """Settled rules of the contract [S-92]"""
    _forked(api, topic)
    refused(api.http.put(f"{MOUNT}/{topic}", headers=TEXT), 409, "stream_conflict")
    refused(api.http.post(f"{MOUNT}/{topic}", content=b"2", headers=TEXT), 410, "stream_gone")
    told = refused(api.put(topic), 409, "stream_conflict")
    assert told == {"stream": topic}
    refused(api.append(topic, [{"data": 1}]), 410, "stream_gone")
    refused(api.append(topic, [{"data": 1}], config={"type": "queue"}), 410, "stream_gone")
    refused(api.append(topic, [{"data": 1}], create=False), 404, "topic_not_found")
    refused(api.state(topic), 404, "topic_not_found")
    # Its topic and the fork's are different topics; without the fork the name is free.
    assert api.http.get(f"{MOUNT}/{topic}.fork").content == b"1"
    assert api.http.delete(f"{MOUNT}/{topic}.fork").status_code == 204
    assert good(api.put(topic))["created"] is True


@pytest.mark.parametrize("place", ["source", "dest"])
def test_forks_hold_a_name_for_routers(api: Api, topic: str, place: str) -> None:
    """If the router is refused, its other topic is not made either. [S-92]"""
    _forked(api, topic)
    other = f"{topic}.other"
    ends = {"source": other, "dest": other} | {place: topic}
    refused(api.http.put(f"/v0/routers/{topic}", json=ends), 409, "stream_conflict")
    refused(api.state(other), 404, "topic_not_found")
    refused(api.http.get(f"/v0/routers/{topic}"), 404, "router_not_found")


def _deadly(api: Api, queue: str, dead_letter: str) -> None:
    """A queue whose only job has died."""
    config = {"type": "queue", "max_deliveries": 1, "dead_letter": dead_letter, "lease_ms": 100}
    good(api.put(queue, config))
    api.add(queue, "job")
    claim = {"node": "n"}
    assert len(good(api.http.post(f"/v0/topics/{queue}/claim", json=claim))["claimed"]) == 1
    good(api.http.post(f"/v0/topics/{queue}/nack", json={"node": "n", "seqs": [1]}))
    assert good(api.http.post(f"/v0/topics/{queue}/claim", json=claim))["claimed"] == []


def test_forks_hold_a_name_for_dead_letters(api: Api, topic: str) -> None:
    """The job stays, and moves once the name is free. [S-92]"""
    _forked(api, topic)
    queue = f"{topic}.jobs"
    _deadly(api, queue, topic)
    # A job that died later is already a dead letter, so the server refused to move this one.
    _deadly(api, f"{topic}.others", f"{topic}.dead")
    eventually(lambda: api.state(f"{topic}.dead").status_code == 200, "the other one has moved")
    refused(api.state(topic), 404, "topic_not_found")
    assert api.get_state(queue)["count"] == 1
    assert api.http.delete(f"{MOUNT}/{topic}.fork").status_code == 204

    def moved() -> bool:
        api.http.post(f"/v0/topics/{queue}/claim", json={"node": "n"})
        return api.state(topic).status_code == 200

    eventually(moved, "the dead letter is in its topic")
    assert [record["data"] for record in api.read_all(topic)] == ["job"]


def test_forks_hold_a_name_over_a_crash(own: NewServer, topic: str) -> None:
    """Settled rules of the contract [S-92]"""
    server = own()
    _forked(server.start(), topic)
    api = server.crash()
    refused(api.put(topic), 409, "stream_conflict")
    refused(api.append(topic, [{"data": 1}]), 410, "stream_gone")


# --- idempotency keys -------------------------------------------------------------------------


def _post(api: Api, path: str, key: str, body: bytes, kind: str = "text/plain", **more: str) -> Any:
    headers = {name.replace("_", "-"): value for name, value in more.items()}
    headers |= {"idempotency-key": key, "content-type": kind}
    return api.http.post(f"{MOUNT}/{path}", content=body, headers=headers)


def _offset(answer: httpx.Response, status: int = 204) -> str:
    assert answer.status_code == status, answer.text
    return answer.headers["stream-next-offset"]


@pytest.mark.parametrize("kind", ["text/plain", "application/json"])
def test_a_key_is_stored_once(api: Api, topic: str, kind: str) -> None:
    """The repeat gets the first answer, whatever came in between. [S-93]"""
    path = f"{topic}/of/its%20own"
    body = b'["a","b"]' if kind == "application/json" else b"ab"
    assert api.http.put(f"{MOUNT}/{path}", headers={"content-type": kind}).status_code == 201
    end = _offset(_post(api, path, "k1", body, kind))
    assert _offset(_post(api, path, "k1", body, kind)) == end
    later = _offset(_post(api, path, "k2", body, kind))
    assert later > end
    assert _offset(_post(api, path, "k1", body, kind)) == end
    both = b'["a","b","a","b"]' if kind == "application/json" else b"abab"
    assert api.http.get(f"{MOUNT}/{path}").content == both


def test_a_key_is_one_for_both_doors(api: Api, topic: str) -> None:
    """Settled rules of the contract [S-93]"""
    json_type = {"content-type": "application/json"}
    assert api.http.put(f"{MOUNT}/{topic}", headers=json_type).status_code == 201
    _offset(_post(api, topic, "k", b"1", "application/json"))
    again = good(api.append(topic, [{"data": 1}], idempotency_key="k"))
    assert (again["deduped"], again["seqs"]) == (True, [1])


@pytest.mark.parametrize("how", ["restart", "crash"])
def test_a_key_is_known_after_a_restart(own: NewServer, topic: str, how: str) -> None:
    """Settled rules of the contract [S-93]"""
    server = own()
    api = server.start()
    assert api.http.put(f"{MOUNT}/{topic}", headers=TEXT).status_code == 201
    end = _offset(_post(api, topic, "k", b"once"))
    api = server.restart() if how == "restart" else server.crash()
    assert _offset(_post(api, topic, "k", b"once")) == end
    assert api.http.get(f"{MOUNT}/{topic}").content == b"once"


def test_a_repeated_key_is_checked_before_its_conflicts(api: Api, topic: str) -> None:
    """`Stream-Seq` and the closing that the first request brought are no conflict. [S-93]"""
    assert api.http.put(f"{MOUNT}/{topic}", headers=TEXT).status_code == 201
    first = _post(api, topic, "k1", b"a", stream_seq="1")
    assert _offset(_post(api, topic, "k1", b"a", stream_seq="1")) == _offset(first)
    last = _post(api, topic, "k2", b"b", stream_closed="true")
    again = _post(api, topic, "k2", b"b", stream_closed="true")
    assert _offset(again) == _offset(last)
    assert again.headers["stream-closed"] == last.headers["stream-closed"] == "true"
    # For a closed stream the offset is its end, whichever request is repeated.
    assert _offset(_post(api, topic, "k1", b"a", stream_seq="1")) == _offset(last)
    refused(_post(api, topic, "k3", b"c"), 409, "stream_closed")
    assert api.http.get(f"{MOUNT}/{topic}").content == b"ab"


def test_a_key_beside_a_producer(api: Api, topic: str) -> None:
    """A producer's repeat counts first; a known key moves the producer on, and stores nothing.

    As on `/v0`. [S-93]
    """
    assert api.http.put(f"{MOUNT}/{topic}", headers=TEXT).status_code == 201
    stamp = {"producer_id": "p", "producer_epoch": "0"}
    end = _offset(_post(api, topic, "k", b"a", **stamp, producer_seq="0"), 200)
    repeated = _post(api, topic, "k", b"a", **stamp, producer_seq="0")
    assert _offset(repeated) == end
    moved = _post(api, topic, "k", b"a", **stamp, producer_seq="1")
    assert _offset(moved) == end
    assert moved.headers["producer-seq"] == "1"
    _offset(_post(api, topic, "other", b"b", **stamp, producer_seq="2"), 200)
    assert api.http.get(f"{MOUNT}/{topic}").content == b"ab"


@pytest.mark.parametrize("key", ["", "x" * 257, "\xff"])
def test_a_bad_key_is_refused(api: Api, topic: str, key: str) -> None:
    """Settled rules of the contract [S-93]"""
    assert api.http.put(f"{MOUNT}/{topic}", headers=TEXT).status_code == 201
    headers = [f"Idempotency-Key: {key}", "Content-Type: text/plain"]
    answer = api.raw("POST", f"{MOUNT}/{topic}", b"x", headers)
    assert refused(answer, 400, "invalid_request") == {"field": "Idempotency-Key"}
    assert api.http.get(f"{MOUNT}/{topic}").content == b""
