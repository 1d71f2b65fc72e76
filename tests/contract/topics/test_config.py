"""§0.10: the configuration of a topic: defaults, clamps, resolution, what may change."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from tests.contract.driver import CONFIG_DEFAULTS, Api, Json, eventually, good, refused


def _config(api: Api, topic: str, config: object) -> Json:
    put: Json = good(api.put(topic, config))["config"]
    assert api.get_state(topic)["config"] == put, "state and PUT tell the same"
    return put


def test_an_empty_put_takes_every_default(api: Api, topic: str) -> None:
    """Contract §0.10 [0.10-01, 1.1-07, 1.1-08, 0.10-11, 0.10-25, 0.10-26, 0.10-28, 0.10-29,
    0.10-30, 0.10-31, 0.10-32, 0.10-33, 0.10-34, 0.10-35]
    """
    assert _config(api, topic, {}) == CONFIG_DEFAULTS


def test_defaults_hold_for_a_topic_made_by_an_append(api: Api, topic: str) -> None:
    """Contract §0.10 [0.10-01]"""
    api.add(topic, 1)
    assert api.get_state(topic)["config"] == CONFIG_DEFAULTS


EVERY_FIELD: Json = {
    "type": "queue",
    "ttl_ms": 1,
    "cap_records": 2,
    "cap_bytes": 3,
    "discard": "reject",
    "durable": True,
    "durability": "fsync",
    "priority": -7,
    "auto_priority": False,
    "auto_create": False,
    "idempotency_window_ms": 4,
    "dedupe_node": False,
    "lease_ms": 500,
    "claim_jitter_ms": 6,
    "max_deliveries": 7,
    "dead_letter": "some.dlq",
    "leases_durable": True,
}


def test_every_field_is_taken_and_echoed(api: Api, topic: str) -> None:
    """Contract §0.10 [0.10-01, 1.1-07, 1.1-01]"""
    assert set(EVERY_FIELD) == set(CONFIG_DEFAULTS)
    assert _config(api, topic, EVERY_FIELD) == EVERY_FIELD


def test_a_log_takes_the_queue_fields_without_effect(api: Api, topic: str) -> None:
    """Contract §0.10 [0.10-04, 0.10-02, 1.2-11]"""
    fields = {k: EVERY_FIELD[k] for k in ("lease_ms", "claim_jitter_ms", "max_deliveries")}
    fields |= {"dead_letter": "elsewhere", "leases_durable": True}
    assert _config(api, topic, fields) == CONFIG_DEFAULTS | fields
    api.add(topic, 1, 2)
    assert [r["data"] for r in api.read_all(topic)] == [1, 2]
    assert "queue" not in api.get_state(topic)
    refused(api.state("elsewhere"), 404, "topic_not_found")


def test_a_queue_is_written_and_read_like_a_log(api: Api, topic: str) -> None:
    """Contract §0.10 [0.10-03, 0.10-02]"""
    config = _config(api, topic, {"type": "queue", "max_deliveries": 5, "dead_letter": "jobs.dlq"})
    assert config == CONFIG_DEFAULTS | {
        "type": "queue",
        "max_deliveries": 5,
        "dead_letter": "jobs.dlq",
    }
    assert api.add(topic, "job-1", "job-2")["seqs"] == [1, 2]
    assert [r["data"] for r in api.read_all(topic)] == ["job-1", "job-2"]
    assert good(api.delete(topic, before_seq=2))["deleted"] == 1
    assert api.get_state(topic)["type"] == "queue"


@pytest.mark.parametrize(("first", "second"), [("log", "queue"), ("queue", "log")])
def test_the_type_cannot_change(api: Api, topic: str, first: str, second: str) -> None:
    """Contract §0.10, §1.1 [0.10-05]"""
    api.put(topic, {"type": first, "ttl_ms": 5000})
    answer = api.put(topic, {"type": second, "ttl_ms": 9000})
    refused(answer, 409, "topic_exists_incompatible")
    config = api.get_state(topic)["config"]
    assert config["type"] == first
    assert config["ttl_ms"] == 5000


def test_a_put_replaces_and_keeps_only_the_type(api: Api, topic: str) -> None:
    """Settled rules of the contract [S-28, S-29]"""
    api.put(topic, EVERY_FIELD)
    assert _config(api, topic, {"ttl_ms": 9}) == CONFIG_DEFAULTS | {"type": "queue", "ttl_ms": 9}
    assert _config(api, topic, {}) == CONFIG_DEFAULTS | {"type": "queue"}


@pytest.mark.parametrize("field", [f for f in CONFIG_DEFAULTS if f != "type"])
def test_every_field_but_the_type_can_change(api: Api, topic: str, field: str) -> None:
    """Contract §1.1 [1.1-11, 1.1-03]"""
    api.put(topic, {})
    answer = api.put(topic, {field: EVERY_FIELD[field]})
    assert answer.status_code == 200
    assert answer.json()["config"][field] == EVERY_FIELD[field]
    assert answer.json()["created"] is False


@pytest.mark.parametrize(
    ("sent", "durability", "durable"),
    [
        ({}, "disk", False),
        ({"durable": True}, "fsync", True),
        ({"durable": False}, "disk", False),
        ({"durability": "ephemeral"}, "ephemeral", False),
        ({"durability": "memory"}, "memory", False),
        ({"durability": "disk"}, "disk", False),
        ({"durability": "fsync"}, "fsync", True),
        ({"durability": "disk", "durable": True}, "disk", False),
        ({"durability": "ephemeral", "durable": True}, "ephemeral", False),
        ({"durability": "fsync", "durable": False}, "fsync", True),
    ],
)
def test_the_class_is_resolved_and_reported(
    api: Api, topic: str, sent: Json, durability: str, durable: bool
) -> None:
    """Contract §0.10 [0.10-12, 0.10-13, 0.10-14, 0.10-15, 0.10-21]"""
    config = _config(api, topic, sent)
    assert (config["durability"], config["durable"]) == (durability, durable)
    listed = good(api.topics(prefix=topic))["topics"][0]
    assert listed["durable"] is durable


def test_the_class_changes_in_place_and_records_stay(api: Api, topic: str) -> None:
    """Contract §0.10 [0.10-22, 1.1-06]"""
    expected = []
    for number, durability in enumerate(
        ["disk", "ephemeral", "fsync", "memory", "ephemeral", "disk"]
    ):
        assert _config(api, topic, {"durability": durability})["durability"] == durability
        api.add(topic, number)
        expected.append(number)
        assert [r["data"] for r in api.read_all(topic)] == expected


@pytest.mark.parametrize(
    ("field", "sent", "clamped"),
    [
        ("priority", 1001, 1000),
        ("priority", 2**31 - 1, 1000),
        ("priority", -1001, -1000),
        ("priority", -(2**31), -1000),
        ("priority", 1000, 1000),
        ("priority", 0, 0),
        ("lease_ms", 0, 100),
        ("lease_ms", 99, 100),
        ("lease_ms", 100, 100),
        ("lease_ms", 86_400_000, 86_400_000),
        ("lease_ms", 86_400_001, 86_400_000),
        ("lease_ms", 2**64 - 1, 86_400_000),
        ("claim_jitter_ms", 5000, 5000),
        ("claim_jitter_ms", 5001, 5000),
        ("claim_jitter_ms", 2**64 - 1, 5000),
    ],
)
def test_values_beyond_a_clamp_are_clamped(
    api: Api, topic: str, field: str, sent: int, clamped: int
) -> None:
    """Contract §0.10 [0.10-25, 0.10-31, 0.10-32]"""
    assert _config(api, topic, {field: sent})[field] == clamped


@pytest.mark.parametrize(
    "field", ["ttl_ms", "cap_records", "cap_bytes", "idempotency_window_ms", "max_deliveries"]
)
def test_the_largest_u64_is_a_value(api: Api, topic: str, field: str) -> None:
    """Contract §0.10 [0.10-33, S-24]"""
    api.put(topic, {field: 2**64 - 1})
    assert api.get_state(topic)["config"][field] == 2**64 - 1
    api.add(topic, 1)
    assert api.read(topic)["records"][0]["data"] == 1


NOT_U64: tuple[object, ...] = (-1, 1.0, 1.5, "1", True, 2**64, [], {})
NOT_BOOL: tuple[object, ...] = (1, 0, "true", [], {})
WRONG_VALUES: dict[str, tuple[object, ...]] = {
    "type": ("Log", "stream", "", 1, True, [], {}),
    "discard": ("OLD", "new", "", 0, True),
    "durability": ("Disk", "sync", "", 1, True),
    "ttl_ms": NOT_U64,
    "cap_records": NOT_U64,
    "cap_bytes": NOT_U64,
    "idempotency_window_ms": NOT_U64,
    "lease_ms": NOT_U64,
    "claim_jitter_ms": NOT_U64,
    "max_deliveries": NOT_U64,
    "priority": (1.0, "1", True, [], 2**31, -(2**31) - 1),
    "durable": NOT_BOOL,
    "auto_priority": NOT_BOOL,
    "auto_create": NOT_BOOL,
    "dedupe_node": NOT_BOOL,
    "leases_durable": NOT_BOOL,
    "dead_letter": (1, True, [], "", "-bad", "a/b", "x" * 256, "ä"),
}
WRONG = [(field, value) for field, values in WRONG_VALUES.items() for value in values]


@pytest.mark.parametrize(("field", "value"), WRONG)
def test_a_wrong_value_is_refused_by_its_field_and_changes_nothing(
    api: Api, topic: str, field: str, value: object
) -> None:
    """Contract §1.1, settled rules [1.1-10, S-21, S-24, 0.10-02, 0.10-11, 0.10-15, 0.10-33,
    0.10-34, 0.10-35]
    """
    detail = refused(api.put(topic, {"ttl_ms": 77000, field: value}), 400, "invalid_request")
    assert detail["field"] == field
    refused(api.state(topic), 404, "topic_not_found")
    good(api.put(topic, {"cap_records": 5}))
    refused(api.put(topic, {"ttl_ms": 77000, field: value}), 400, "invalid_request")
    assert api.get_state(topic)["config"] == CONFIG_DEFAULTS | {"cap_records": 5}


def test_a_dead_letter_topic_is_another_topic(api: Api, topic: str) -> None:
    """Contract §0.10, §1.1 [1.1-09, 0.10-34]"""
    for type_ in ("log", "queue"):
        sent = {"type": type_, "dead_letter": topic}
        assert refused(api.put(topic, sent), 400, "invalid_request")["field"] == "dead_letter"
        refused(api.state(topic), 404, "topic_not_found")
    assert _config(api, topic, {"dead_letter": f"{topic}x"})["dead_letter"] == f"{topic}x"


def test_caps_evict_the_oldest(api: Api, topic: str) -> None:
    """Contract §0.10 [0.10-08, 0.10-36, 0.10-37, 2-18, 1.2-05]"""
    api.put(topic, {"cap_records": 10})
    earliest = 1
    for number in range(1, 41):
        api.add(topic, number)
        state = api.get_state(topic)
        assert state["earliest_seq"] >= earliest
        earliest = state["earliest_seq"]
    eventually(lambda: bool(api.get_state(topic)["count"] <= 10), "count within the cap")
    state = api.get_state(topic)
    assert state["count"] == 41 - state["earliest_seq"]
    assert state["count"] >= 5
    kept = [r["data"] for r in api.read_all(topic)]
    assert kept == list(range(state["earliest_seq"], 41))


def test_a_batch_larger_than_the_cap_keeps_its_newest_records(api: Api, topic: str) -> None:
    """Contract §0.10 [0.10-08, 2-18]"""
    api.put(topic, {"cap_records": 3})
    assert api.add(topic, *range(10))["seqs"] == list(range(1, 11))
    eventually(lambda: bool(api.get_state(topic)["count"] <= 3), "count within the cap")
    assert [r["data"] for r in api.read_all(topic)][-1] == 9


def test_bytes_are_capped_as_well(api: Api, topic: str) -> None:
    """Contract §0.10 [0.10-09]"""
    api.put(topic, {"cap_bytes": 20_000})
    for _ in range(50):
        api.add(topic, "x" * 1000)
    eventually(lambda: bool(api.get_state(topic)["bytes"] <= 20_000), "bytes within the cap")
    state = api.get_state(topic)
    assert state["earliest_seq"] > 1
    assert 5 <= state["count"] <= 20


@pytest.mark.parametrize(
    ("caps", "most"),
    [
        ({"cap_records": 5, "cap_bytes": 10_000_000}, 5),
        ({"cap_records": 1000, "cap_bytes": 8000}, 8),
    ],
)
def test_the_cap_that_is_reached_first_evicts(api: Api, topic: str, caps: Json, most: int) -> None:
    """Contract §0.10 [0.10-10]"""
    api.put(topic, caps)
    for _ in range(30):
        api.add(topic, "x" * 1000)
    eventually(lambda: bool(api.get_state(topic)["count"] <= most), f"at most {most} records")
    assert api.get_state(topic)["count"] >= 1


def test_old_records_expire(api: Api, topic: str) -> None:
    """Contract §0.10 [0.10-06, 0.10-07, 0.10-36, 3-14]"""
    api.put(topic, {"ttl_ms": 400})
    api.add(topic, "old", "older")
    assert [r["data"] for r in api.read_all(topic)] == ["old", "older"]
    time.sleep(0.7)
    page = api.read(topic)
    assert page["records"] == []
    assert page["tombstone"]["reason"] == "ttl"
    assert page["earliest_seq"] == page["head_seq"] + 1 == 3
    api.add(topic, "new")
    assert [r["data"] for r in api.read_all(topic)] == ["new"]


def test_no_ttl_never_expires(api: Api, topic: str) -> None:
    """Contract §0.10 [0.10-06]"""
    api.put(topic, {"ttl_ms": 0})
    api.add(topic, 1)
    time.sleep(0.3)
    assert api.read(topic)["tombstone"] is None
    assert api.read(topic)["records"][0]["data"] == 1


def test_a_lowered_cap_evicts_existing_records(api: Api, topic: str) -> None:
    """Contract §1.1 [1.1-04]"""
    api.add(topic, *range(20))
    api.put(topic, {"cap_records": 4})
    api.add(topic, 20)
    eventually(lambda: bool(api.get_state(topic)["count"] <= 4), "count within the new cap")
    assert [r["data"] for r in api.read_all(topic)][-1] == 20
    assert api.read(topic)["tombstone"]["reason"] == "cap"


def test_a_lowered_ttl_expires_existing_records(api: Api, topic: str) -> None:
    """Contract §1.1 [1.1-05]"""
    api.add(topic, 1, 2)
    time.sleep(0.3)
    api.put(topic, {"ttl_ms": 200})
    page = api.read(topic)
    assert page["records"] == []
    assert page["tombstone"]["reason"] == "ttl"


def test_a_loosened_ttl_does_not_bring_expired_records_back(api: Api, topic: str) -> None:
    """§0.10: earliest_seq never moves back. [0.10-37, 1.1-05]"""
    api.put(topic, {"ttl_ms": 200})
    api.add(topic, 1, 2)
    time.sleep(0.4)
    api.put(topic, {"ttl_ms": 0})
    page = api.read(topic)
    assert page["records"] == []
    assert page["earliest_seq"] == 3
    assert page["tombstone"]["gap_to"] == 2


def test_a_put_does_not_touch_stored_records(api: Api, topic: str) -> None:
    """Contract §1.1 [1.1-06]"""
    api.append(topic, [{"data": {"a": 1}, "meta": {"m": 1}, "node": "n", "tag": "t"}])
    before = api.read(topic, include_tags=True)["records"]
    api.put(topic, {"durability": "fsync", "cap_records": 100, "ttl_ms": 3_600_000})
    assert api.read(topic, include_tags=True)["records"] == before


@pytest.mark.parametrize("durability", ["ephemeral", "memory", "disk", "fsync"])
def test_every_class_answers_alike_while_the_server_runs(
    api: Api, topic: str, durability: str
) -> None:
    """Contract §0.10 [0.10-16, 0.10-21, 2-28, 2-25]"""
    api.put(topic, {"durability": durability, "cap_records": 50})
    for number in range(60):
        assert api.add(topic, number, tag=f"t{number % 3}")["head_seq"] == number + 1
        assert api.read(topic, from_seq=number)["records"][0]["data"] == number
    deleted = good(api.delete(topic, match="t1"))
    assert deleted["deleted"] >= 15
    records = api.read_all(topic, include_tags=True)
    assert {r["$tag"] for r in records} == {"t0", "t2"}
    state = api.get_state(topic)
    assert state["count"] == len(records)
    assert state["head_seq"] == 60
    assert good(api.append(topic, [{"data": 1}], idempotency_key="k"))["deduped"] is False
    assert good(api.append(topic, [{"data": 1}], idempotency_key="k"))["deduped"] is True


def test_a_manual_priority_is_the_effective_one(api: Api, topic: str) -> None:
    """Contract §0.10, §1.2 [0.10-27, 1.2-12]"""
    api.put(topic, {"priority": -5})
    assert api.get_state(topic)["effective_priority"] == -5
    api.read(topic)
    assert api.get_state(topic)["effective_priority"] == -5
    api.put(topic, {"priority": 0})
    api.read(topic)
    assert api.get_state(topic)["effective_priority"] == 0


def test_auto_priority_comes_from_the_last_read_and_halves_every_30_s(api: Api, topic: str) -> None:
    """Contract §0.10, settled rules [0.10-26, S-16, 3-17, 1.2-12]"""
    api.put(topic, {})
    assert api.get_state(topic)["effective_priority"] == 0
    before = time.monotonic()
    api.read(topic)
    first = api.get_state(topic)["effective_priority"]
    assert type(first) is int
    assert 490 <= first <= 500
    read_at = time.monotonic()
    time.sleep(1.0)
    asked = time.monotonic()
    second = api.get_state(topic)["effective_priority"]
    done = time.monotonic()
    assert 500 * 2 ** (-(done - before) / 30) - 1.01 <= second
    assert second <= 500 * 2 ** (-(asked - read_at) / 30) + 1.01


def test_without_auto_priority_reads_do_not_raise_it(api: Api, topic: str) -> None:
    """Contract §0.10 [0.10-26]"""
    api.put(topic, {"auto_priority": False})
    api.read(topic)
    assert api.get_state(topic)["effective_priority"] == 0


def test_node_filtering_can_be_turned_off(api: Api, topic: str) -> None:
    """Contract §0.10, §4 [0.10-30, 4-06]"""
    api.append(topic, [{"data": 1, "node": "me"}])
    assert api.read(topic, node="me")["records"] == []
    api.put(topic, {"dedupe_node": False})
    assert [r["data"] for r in api.read(topic, node="me")["records"]] == [1]


def test_only_involuntary_loss_gives_tombstones(api: Api, names: Callable[[str], str]) -> None:
    """Contract §0.10 [0.10-38, 3.3-02, 3.3-13]"""
    deleted, evicted = names("deleted"), names("evicted")
    api.add(deleted, *range(5))
    api.delete(deleted, before_seq=4)
    assert api.read(deleted)["tombstone"] is None
    assert api.read(deleted)["earliest_seq"] == 4
    api.put(evicted, {"cap_records": 2})
    for number in range(5):
        api.add(evicted, number)
    eventually(lambda: bool(api.get_state(evicted)["count"] <= 2), "count within the cap")
    assert api.read(evicted)["tombstone"] is not None


@pytest.mark.parametrize(
    ("field", "words"),
    [
        ("type", "log, queue"),
        ("durability", "ephemeral, memory, disk, fsync"),
        ("discard", "old, reject"),
    ],
)
def test_a_word_that_a_field_does_not_take_is_answered_with_those_that_it_takes(
    api: Api, topic: str, field: str, words: str
) -> None:
    answer = api.put(topic, {field: "nonsense"})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].endswith(f"at `{field}`; one of {words}")


def test_an_empty_body_is_called_empty(api: Api, topic: str) -> None:
    path = f"/v0/topics/{topic}"
    answer = api.http.post(path, content=b"", headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == "the body is empty; it must be a JSON object"
