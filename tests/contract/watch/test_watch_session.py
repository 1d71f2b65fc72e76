"""§7.1, §7.2: a watch session: its definition, its id, its limits, its life without a stream."""

from __future__ import annotations

import base64
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.contract.conftest import URL, NewServer
from tests.contract.driver import Api, Json, Server, eventually, good, refused
from tests.contract.streams.streams import gauges, nothing_left
from tests.contract.watch.subscriptions import CaughtUp, Clients, hang_up, id_of

Names = Callable[[str], str]
SESSION_TTL_MS = 500


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    """A server with room for three sessions, which live half a second without a stream."""
    if URL:
        pytest.skip("needs a server of its own; TOPICS_CONTRACT_URL names a shared one")
    env = {"TOPICS_MAX_WATCH_SESSIONS": "3", "TOPICS_SESSION_TTL_MS": str(SESSION_TTL_MS)}
    server = Server(tmp_path_factory.mktemp("small"), env)
    yield server.start()
    server.stop()


def _post(api: Api, topics: object, **fields: object) -> Json:
    return good(api.http.post("/v0/watch", json={"topics": topics, **fields}))


def test_the_answer_is_complete(api: Api, names: Names) -> None:
    """Contract §7.2 [7.2-11, 7.2-03, 7.2-04, 7.2-12, 7-02, 9-03]"""
    jobs, events, audit = names("jobs"), names("events"), names("audit")
    api.add(jobs, *range(30))
    api.add(events, *range(20))
    api.put(audit)
    answer = api.http.post(
        "/v0/watch",
        json={
            "node": "worker-eu-1",
            "topics": {jobs: {"from_seq": 12}, events: {"tail": True, "from_seq": 3}, audit: {}},
            "limit": 256,
            "max_batch_bytes": 262_144,
            "heartbeat_ms": 15_000,
            "include_meta": True,
            "include_tags": False,
            "include_data": True,
            "consistency": "eventual",
        },
    )
    assert answer.status_code == 200
    body = good(answer)
    assert set(body) == {"wid", "stream_url", "session_ttl_ms", "topics", "performance"}
    assert body["stream_url"] == f"/v0/watch/{body['wid']}"
    assert body["session_ttl_ms"] == 300_000
    assert body["topics"] == {
        jobs: {"from_seq": 12, "head_seq": 30, "earliest_seq": 1},
        events: {"from_seq": 20, "head_seq": 20, "earliest_seq": 1},
        audit: {"from_seq": 0, "head_seq": 0, "earliest_seq": 1},
    }
    assert list(body["topics"]) == [jobs, events, audit]
    assert body["performance"]["server_total_ms"] >= 0


def test_a_cursor_that_fell_off_the_start_is_seen_in_the_answer(api: Api, topic: str) -> None:
    """§7.2: the answer shows the loss before any stream is open. [7.2-11, 7-02]"""
    api.put(topic, {"cap_records": 5})
    for number in range(20):
        api.add(topic, number)
    eventually(lambda: bool(api.get_state(topic)["count"] <= 5), "count within the cap")
    facts = _post(api, {topic: {"from_seq": 2}})["topics"][topic]
    assert facts == {
        "from_seq": 2,
        "head_seq": 20,
        "earliest_seq": api.get_state(topic)["earliest_seq"],
    }
    assert facts["earliest_seq"] >= 15


def test_a_wid_cannot_be_guessed(api: Api, topic: str) -> None:
    """§7.1: a wid has 128 random bits as base64url, and no counter. [7.1-05]"""
    api.put(topic)
    wids = [_post(api, {topic: {}})["wid"] for _ in range(50)]
    assert len(set(wids)) == 50
    seen = set()
    for wid in wids:
        match = re.fullmatch(r"wid_([A-Za-z0-9_-]{22,})", wid)
        assert match, wid
        chance = base64.urlsafe_b64decode(match[1] + "=" * (-len(match[1]) % 4))
        assert len(chance) >= 16
        seen |= {chance[:4], chance[-4:]}
    assert len(seen) == 100, "parts of the ids repeat: they are no random bits"


def test_unknown_fields_and_an_absent_body_option_do_no_harm(api: Api, topic: str) -> None:
    """Versions are additive. [S-20, 7.2-08]"""
    api.put(topic)
    body = _post(api, {topic: {"from_seq": 0, "later": [1]}}, later={"x": 1}, limit=0)
    assert set(body["topics"]) == {topic}


def test_an_unknown_topic_is_404_and_no_session(api: Api, names: Names) -> None:
    """Contract §7.2 [7.2-14]"""
    known, unknown = names("known"), names("unknown")
    api.put(known)
    before = gauges(api)
    answer = api.http.post("/v0/watch", json={"topics": {known: {}, unknown: {}}})
    refused(answer, 404, "topic_not_found")
    nothing_left(api, before)
    refused(api.state(unknown), 404, "topic_not_found")


def test_lenient_leaves_unknown_topics_out(api: Api, names: Names, clients: Clients) -> None:
    """§7.2: unknown topics are absent from the answer, and no frame names them. [7.2-14]"""
    known, unknown = names("known"), names("unknown")
    api.add(known, 1)
    answer = api.http.post("/v0/watch?lenient=true", json={"topics": {unknown: {}, known: {}}})
    body = good(answer)
    assert body["topics"] == {known: {"from_seq": 0, "head_seq": 1, "earliest_seq": 1}}
    stream = clients.get(api, body["stream_url"])
    assert [stream.event().name for _ in range(2)] == ["record", "caught-up"]
    refused(api.state(unknown), 404, "topic_not_found")


def test_without_lenient_or_with_false_it_is_strict(api: Api, names: Names) -> None:
    """Contract §7.2 [7.2-14]"""
    body: Json = {"topics": {names("unknown"): {}}}
    for query in ("", "?lenient=false"):
        refused(api.http.post(f"/v0/watch{query}", json=body), 404, "topic_not_found")
    for query in ("?lenient=maybe", "?lenient="):
        refused(api.http.post(f"/v0/watch{query}", json=body), 400, "invalid_request")


def test_256_topics_are_taken_and_257_refused(api: Api, topic: str, clients: Clients) -> None:
    """Contract §7.2 [7.2-01, 7.2-13, S-13]"""
    many = [f"{topic}.{number}" for number in range(257)]
    for name in many:
        api.put(name)
    answer = api.http.post("/v0/watch", json={"topics": {name: {} for name in many}})
    assert refused(answer, 400, "invalid_request").get("field", "topics") == "topics"
    session = clients.session(api, {name: {} for name in many[:256]})
    assert len(session.answer["topics"]) == 256
    follower = session.stream(api)
    follower.drained()
    for name in many:
        api.drop(name)


def test_the_number_of_topics_is_a_setting(own: NewServer, names: Names) -> None:
    """Contract §7.2, settled rules [7.2-01, S-13]"""
    api = own(TOPICS_MAX_WATCH_TOPICS="2").start()
    three = [names("t") for _ in range(3)]
    for name in three:
        api.put(name)
    refused(
        api.http.post("/v0/watch", json={"topics": {name: {} for name in three}}),
        400,
        "invalid_request",
    )
    assert len(_post(api, {name: {} for name in three[:2]})["topics"]) == 2


def test_a_session_without_a_stream_is_reclaimed(small: Api, topic: str) -> None:
    """Contract §7.1, §7.7 [7.1-02, 7.7-03, 11-14]"""
    small.put(topic)
    body = _post(small, {topic: {}})
    assert body["session_ttl_ms"] == SESSION_TTL_MS
    time.sleep(SESSION_TTL_MS / 1000 + 0.1)
    refused(small.http.get(body["stream_url"]), 404, "not_found")
    eventually(lambda: gauges(small)[1] == 0, "no session is counted")


def test_a_stream_keeps_its_session_and_its_end_starts_the_time(
    small: Api, topic: str, clients: Clients
) -> None:
    """Contract §7.1 [7.1-03, 7.1-02]"""
    small.add(topic, 1)
    session = clients.session(small, {topic: {}})
    first = session.stream(small)
    first.drained()
    time.sleep(SESSION_TTL_MS / 1000 * 2)
    _post(small, {topic: {}})
    small.add(topic, 2)
    first.reads(topic, 2)
    hang_up(small, first)
    again = session.stream(small)
    assert again.frame() == CaughtUp(topic, 2)
    hang_up(small, again)
    time.sleep(SESSION_TTL_MS / 1000 + 0.1)
    refused(small.http.get(session.answer["stream_url"]), 404, "not_found")


def test_sessions_are_capped_and_expired_ones_make_room(
    small: Api, topic: str, clients: Clients
) -> None:
    """Contract §7.1, §11 [11-04, 11-12, 11-14, 7.1-02, 8.3-06]"""
    small.put(topic)
    eventually(lambda: gauges(small)[0] == 0, "no stream from before")
    time.sleep(SESSION_TTL_MS / 1000 + 0.1)
    watched = clients.session(small, {topic: {}}).stream(small)
    _post(small, {topic: {}})
    _post(small, {topic: {}})
    assert gauges(small) == (1, 3)
    answer = small.http.post("/v0/watch", json={"topics": {topic: {}}})
    detail = refused(answer, 429, "throttled")
    assert (detail["limit"], detail["max"]) == ("max_watch_sessions", 3)
    assert int(answer.headers["retry-after"]) >= 1
    time.sleep(SESSION_TTL_MS / 1000 + 0.1)
    _post(small, {topic: {}})
    assert gauges(small) == (1, 2)
    small.add(topic, 1)
    watched.reads(topic, 1)


@pytest.mark.parametrize("others", [{}, {"from_seq": 1}, {"tail": True}])
def test_a_cursor_sets_the_positions_it_names(
    api: Api, names: Names, clients: Clients, others: Json
) -> None:
    """§0.7, settled rules: an id seen before takes precedence over from_seq and tail. [S-66,
    0.7-05]
    """
    first, second = names("c"), names("c")
    for name in (first, second):
        api.add(name, *range(10))
    session = clients.session(api, {first: others, second: {}}, cursor=id_of({first: 7}))
    assert session.answer["topics"][first]["from_seq"] == 7
    assert session.answer["topics"][second]["from_seq"] == 0
    follower = session.stream(api)
    follower.drained()
    assert follower.seqs(first) == [8, 9, 10]
    assert follower.seqs(second) == list(range(1, 11))


def test_heartbeats_out_of_range_are_clamped(api: Api, topic: str, clients: Clients) -> None:
    """§7.2: 1 ms means a second. [7.2-07]"""
    api.put(topic)
    for value in (0, 999, 60_001, 2**63):
        _post(api, {topic: {}}, heartbeat_ms=value)
    follower = clients.session(api, {topic: {}}, heartbeat_ms=1).stream(api)
    follower.drained()
    caught_up_s = time.monotonic()
    assert 0.8 <= follower.stream.comment(0).at_s - caught_up_s <= 3


def test_sessions_are_counted(own: NewServer) -> None:
    """Contract §8.3 [8.3-06, 7.1-01]"""
    # Sessions of other tests would expire meanwhile.
    api, topic = own().start(), "counted"
    api.put(topic)
    streams, sessions = gauges(api)
    for number in range(1, 4):
        _post(api, {topic: {}})
        assert gauges(api) == (streams, sessions + number)
    snapshot = api.http.get("/v0/metrics", headers={"Accept": "application/json"}).json()
    assert "topics_watch_sessions" in str(snapshot)


def test_a_session_is_no_topic(api: Api, topic: str) -> None:
    """§7: sessions are not listed among the topics. [7-02]"""
    api.put(topic)
    before = good(api.http.get("/v0/ready"))["topics"]
    wid = _post(api, {topic: {}})["wid"]
    assert good(api.http.get("/v0/ready"))["topics"] == before
    refused(api.state(wid), 404, "topic_not_found")


def test_a_body_may_be_compressed_and_large(api: Api, topic: str) -> None:
    """§0.3, §7.2: the body has one hundred names of 255 characters. [7.2-01]"""
    import gzip
    import json

    many = [f"{topic}.{number}".ljust(255, "x") for number in range(100)]
    for name in many:
        api.put(name)
    body = gzip.compress(json.dumps({"topics": {name: {} for name in many}}).encode())
    answer = api.http.post(
        "/v0/watch",
        content=body,
        headers={"Content-Type": "application/json", "Content-Encoding": "gzip"},
    )
    assert list(good(answer)["topics"]) == many
    for name in many:
        api.drop(name)


def test_the_settings_are_listed_for_operators() -> None:
    """Each limit has a name and is listed in the example environment. [S-13]"""
    text = (Path(__file__).resolve().parents[3] / ".env.example").read_text(encoding="utf-8")
    for name in (
        "MAX_WATCH_TOPICS",
        "MAX_WATCH_SESSIONS",
        "MAX_SSE_CONNECTIONS",
        "SESSION_TTL_MS",
        "BUFFER_GRACE_MS",
        "SLOW_CONSUMER_TIMEOUT_MS",
        "CORS_ORIGINS",
        "MAX_WS_MESSAGE_BYTES",
        "MAX_WS_COMMANDS",
    ):
        assert f"TOPICS_{name}" in text
