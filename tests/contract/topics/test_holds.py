"""Consumers that the caps of their topic wait for: `hold`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.contract.conftest import NewServer
from tests.contract.driver import Api, Json, good, refused, seqs_of

HOLD: dict[str, int] = {"max_records": 5, "max_bytes": 1 << 20}


def put(api: Api, topic: str, consumer: str = "c", **body: Any) -> Any:
    return api.http.put(f"/v0/topics/{topic}/consumers/{consumer}", json=body)


def commit(api: Api, topic: str, seq: int) -> Json:
    return good(api.http.post(f"/v0/topics/{topic}/consumers/c/commit", json={"seq": seq}))


def where(api: Api, topic: str, consumer: str = "c") -> Json:
    return good(api.http.get(f"/v0/topics/{topic}/consumers/{consumer}"))


def test_caps_wait_for_a_consumer_and_then_leave_a_tombstone(api: Api, topic: str) -> None:
    api.put(topic, {"cap_records": 2})
    made = put(api, topic, hold=HOLD)
    assert (made.status_code, made.json()["hold"]) == (201, HOLD)
    api.add(topic, *range(5))
    page = api.read(topic, consumer="c")
    assert seqs_of(page) == [1, 2, 3, 4, 5]
    assert page["tombstone"] is None
    state = where(api, topic)
    assert (state["hold"], state["held_records"], state["lag"]) == (HOLD, 3, 5)
    api.add(topic, 6, 7)
    page = api.read(topic, consumer="c")
    assert seqs_of(page) == [3, 4, 5, 6, 7]
    lost = page["tombstone"]
    assert (lost["reason"], lost["gap_from"], lost["gap_to"]) == ("cap", 1, 2)
    commit(api, topic, 7)
    api.add(topic, 8)
    assert seqs_of(api.read(topic, from_seq=6)) == [7, 8]
    assert api.get_state(topic)["count"] == 2


def test_bytes_are_a_bound_as_well(api: Api, topic: str) -> None:
    api.put(topic, {"cap_records": 1})
    good(put(api, topic, hold={"max_records": 100, "max_bytes": 2_500}))
    for _ in range(5):
        api.add(topic, "x" * 1_000)
    assert seqs_of(api.read(topic, from_seq=3)) == [4, 5]
    assert api.get_state(topic)["count"] == 2


def test_a_second_put_changes_the_hold_and_nothing_else(api: Api, topic: str) -> None:
    api.put(topic, {"cap_records": 2})
    api.add(topic, 1, 2)
    assert good(put(api, topic))["hold"] is None
    commit(api, topic, 1)
    for body, hold in (
        ({"hold": HOLD}, HOLD),
        ({"from": "head"}, HOLD),
        ({"hold": {"max_records": 9, "max_bytes": 1}}, {"max_records": 9, "max_bytes": 1}),
        ({"hold": None}, None),
    ):
        told = put(api, topic, **body)
        assert told.status_code == 200
        assert (told.json()["hold"], told.json()["seq"], told.json()["created"]) == (hold, 1, False)
    listed = good(api.http.get(f"/v0/topics/{topic}/consumers"))["consumers"]
    assert [(each["hold"], each["held_records"]) for each in listed] == [(None, 0)]


def test_neither_age_nor_deletes_wait(api: Api, topic: str) -> None:
    api.put(topic, {"cap_records": 2})
    good(put(api, topic, hold=HOLD))
    api.add(topic, *range(4))
    good(api.delete(topic, before_seq=3))
    assert seqs_of(api.read(topic, consumer="c")) == [3, 4]
    api.put(topic, {"cap_records": 2, "ttl_ms": 1})
    api.add(topic, 5)
    assert set(seqs_of(api.read(topic, consumer="c"))) <= {5}


@pytest.mark.parametrize("durability", ["ephemeral", "disk", "fsync"])
def test_holds_are_kept_over_a_kill_and_in_snapshots(own: NewServer, durability: str) -> None:
    server = own(TOPICS_CHECKPOINT_INTERVAL_MS="100")
    api = server.start()
    api.put("t", {"durability": durability, "cap_records": 2})
    good(put(api, "t", "made", hold=HOLD))
    good(put(api, "t", "later"))
    good(put(api, "t", "later", hold=HOLD))
    good(put(api, "t", "ended", hold=HOLD))
    good(put(api, "t", "ended", hold=None))
    for start_again in (server.crash, server.restart, server.crash):
        api = start_again()
        consumers = good(api.http.get("/v0/topics/t/consumers"))["consumers"]
        assert {each["consumer"]: each["hold"] for each in consumers} == {
            "ended": None,
            "later": HOLD,
            "made": HOLD,
        }
    head = api.get_state("t")["head_seq"]
    api.add("t", *range(5))
    assert api.get_state("t")["count"] == 5
    lines = api.http.get("/v0/metrics", params={"format": "prometheus"}).text.splitlines()
    held = {line for line in lines if line.startswith("topics_consumer_held_records{")}
    assert held == {
        'topics_consumer_held_records{consumer="t/ended"} 0.0',
        'topics_consumer_held_records{consumer="t/later"} 3.0',
        'topics_consumer_held_records{consumer="t/made"} 3.0',
    }
    for consumer in ("made", "later"):
        url = f"/v0/topics/t/consumers/{consumer}"
        good(api.http.post(f"{url}/commit", json={"seq": head + 5}))
        good(api.http.delete(url))
    api.add("t", 5)
    assert api.get_state("t")["count"] == 2
    good(api.drop("t"))
    good(api.put("t", {"cap_records": 2}))
    api.add("t", *range(5))
    assert api.get_state("t")["count"] == 2
    server.stop()


BAD: list[tuple[Any, str]] = [
    (5, "hold"),
    ([5, 5], "hold"),
    ({}, "hold.max_records"),
    ({"max_records": 5}, "hold.max_bytes"),
    ({"max_bytes": 5}, "hold.max_records"),
    ({"max_records": 0, "max_bytes": 5}, "hold.max_records"),
    ({"max_records": 5, "max_bytes": 0}, "hold.max_bytes"),
    ({"max_records": -1, "max_bytes": 5}, "hold.max_records"),
    ({"max_records": "5", "max_bytes": 5}, "hold.max_records"),
    ({"max_records": 2**64, "max_bytes": 5}, "hold.max_records"),
    ({"max_records": 5, "max_bytes": 2**64}, "hold.max_bytes"),
    ({"max_records": 5, "max_bytes": 1.5}, "hold.max_bytes"),
    ({"max_records": None, "max_bytes": 5}, "hold.max_records"),
]


@pytest.mark.parametrize(("hold", "field"), BAD)
def test_malformed_holds_change_nothing(api: Api, topic: str, hold: Any, field: str) -> None:
    api.add(topic, 1)
    assert refused(put(api, topic, hold=hold), 400, "invalid_request")["field"] == field
    assert good(api.http.get(f"/v0/topics/{topic}/consumers"))["consumers"] == []


def test_a_topic_waits_for_a_bounded_number_of_consumers(api: Api, topic: str) -> None:
    api.add(topic, 1)
    for number in range(16):
        good(put(api, topic, f"c{number}", hold=HOLD))
    detail = refused(put(api, topic, "more", hold=HOLD), 429, "throttled")
    assert detail == {"limit": "max_holds_per_topic", "max": 16}
    good(put(api, topic, "more"))
    good(put(api, topic, "c0", hold={"max_records": 1, "max_bytes": 1}))


def test_a_hold_needs_admin(own: NewServer, names: Callable[[str], str]) -> None:
    server = own(TOPICS_API_KEYS="all,rw:read+write,rwa:read+write+admin:a.,ad:admin")
    api = server.start()

    def as_key(key: str) -> Api:
        api.http.headers["Authorization"] = f"Bearer {key}"
        return api

    for name in ("a.t", "b.t"):
        as_key("all").add(name, 1)
    for hold in (HOLD, None):
        detail = refused(put(as_key("rw"), "a.t", hold=hold), 403, "forbidden")
        assert detail["scopes"] == ["admin"]
        refused(put(as_key("ad"), "a.t", hold=hold), 403, "forbidden")
    good(put(as_key("rwa"), "a.t", hold=HOLD))
    refused(put(api, "b.t", hold=HOLD), 403, "forbidden")
    # Without the member the scopes of a consumer are enough, and the hold stays.
    assert good(put(as_key("rw"), "a.t"))["hold"] == HOLD
    commit(api, "a.t", 1)
    server.stop()
