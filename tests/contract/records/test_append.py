"""§2: append: seqs, limits, all or nothing, creation, full topics."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable

import pytest

from tests.contract.conftest import NewServer
from tests.contract.driver import CONFIG_DEFAULTS, Api, Json, eventually, good, refused

JSON = ["Content-Type: application/json"]


def test_seqs_are_contiguous_in_array_order(api: Api, topic: str) -> None:
    """Contract §2 [2-01, 2-02]"""
    assert api.add(topic, "a", "b", "c")["seqs"] == [1, 2, 3]
    body = api.add(topic, "d", "e")
    assert set(body) == {
        "topic",
        "first_seq",
        "last_seq",
        "seqs",
        "head_seq",
        "count",
        "created",
        "deduped",
        "performance",
    }
    assert body["topic"] == topic
    assert (body["first_seq"], body["last_seq"], body["head_seq"]) == (4, 5, 5)
    assert body["seqs"] == [4, 5]
    assert (body["created"], body["deduped"]) == (False, False)
    assert [r["data"] for r in api.read_all(topic)] == ["a", "b", "c", "d", "e"]
    assert [r["$seq"] for r in api.read_all(topic)] == [1, 2, 3, 4, 5]


def test_count_is_the_number_of_records_of_the_call(api: Api, topic: str) -> None:
    """Contract §2 [2-02]"""
    api.add(topic, 1)
    assert api.add(topic, 2, 3, 4)["count"] == 3


@pytest.mark.parametrize("value", ["false", "true", None])
def test_the_seqs_can_be_left_out(api: Api, topic: str, value: str | None) -> None:
    """Contract §2 [2-03]"""
    query = "" if value is None else f"?return_seqs={value}"
    answer = api.http.post(f"/v0/topics/{topic}{query}", json={"records": [{"data": 1}] * 3})
    body = good(answer)
    assert ("seqs" in body) == (value != "false")
    assert (body["first_seq"], body["last_seq"], body["count"]) == (1, 3, 3)


def test_the_largest_batch_is_taken_and_one_more_refused(api: Api, topic: str) -> None:
    """Contract §2 [2-04, 2-05, 2-22]"""
    most: list[object] = [{"data": 0}] * 10_000
    refused(api.append(topic, [*most, {"data": 0}]), 400, "batch_too_large")
    refused(api.state(topic), 404, "topic_not_found")
    body = good(api.append(topic, most))
    assert body["seqs"] == list(range(1, 10_001))
    refused(api.append(topic, [*most, {"data": 0}]), 400, "batch_too_large")
    assert api.get_state(topic)["head_seq"] == 10_000


def test_no_records_is_no_request(api: Api, topic: str) -> None:
    """Contract §2 [2-04]"""
    wrong: tuple[Json, ...] = (
        {"records": []},
        {},
        {"records": None},
        {"records": {}},
        {"records": "x"},
    )
    for body in wrong:
        answer = api.http.post(f"/v0/topics/{topic}", json=body)
        assert refused(answer, 400, "invalid_request")["field"] == "records"
    refused(api.state(topic), 404, "topic_not_found")


def test_data_is_required_and_null_is_data(api: Api, topic: str) -> None:
    """Contract §2 [2-06]"""
    detail = refused(api.append(topic, [{"data": 1}, {"tag": "t"}]), 400, "invalid_request")
    assert detail["field"] == "records[1].data"
    assert good(api.append(topic, [{"data": None}]))["last_seq"] == 1


def test_a_record_has_at_most_1_mib_of_data_and_meta(api: Api, topic: str) -> None:
    """Contract §2 [2-07, 2-22]"""
    mib = 1024 * 1024
    fits = "x" * (mib - 2)
    assert good(api.append(topic, [{"data": fits}]))["last_seq"] == 1
    refused(api.append(topic, [{"data": 1}, {"data": fits + "x"}]), 400, "record_too_large")
    meta = {"k": "v"}
    short = "x" * (mib - 2 - len('{"k":"v"}'))
    raw = json.dumps({"records": [{"data": short, "meta": meta}]}, separators=(",", ":"))
    assert api.raw("POST", f"/v0/topics/{topic}", raw.encode(), JSON).status == 200
    raw = json.dumps({"records": [{"data": short + "x", "meta": meta}]}, separators=(",", ":"))
    answer = api.raw("POST", f"/v0/topics/{topic}", raw.encode(), JSON)
    refused(answer, 400, "record_too_large")
    assert api.get_state(topic)["head_seq"] == 2


@pytest.mark.parametrize("unit", ["t", "ä", "水", "😀"])
def test_a_tag_has_at_most_256_bytes_of_utf8(api: Api, topic: str, unit: str) -> None:
    """Contract §2 [2-08, 2-22]"""
    size = len(unit.encode())
    most = unit * (256 // size) + "t" * (256 % size)
    assert len(most.encode()) == 256
    good(api.append(topic, [{"data": 0, "tag": most}]))
    assert api.read(topic, include_tags=True)["records"][0]["$tag"] == most
    detail = refused(
        api.append(topic, [{"data": 0}, {"data": 0, "tag": most + "t"}]), 400, "invalid_request"
    )
    assert detail["field"] == "records[1].tag"
    assert api.get_state(topic)["head_seq"] == 1


@pytest.mark.parametrize("unit", ["n", "ä", "😀"])
def test_a_node_has_at_most_128_bytes_of_utf8(api: Api, topic: str, unit: str) -> None:
    """Contract §2 [2-09, 2-22]"""
    most = unit * (128 // len(unit.encode()))
    good(api.append(topic, [{"data": 0, "node": most}]))
    good(api.append(topic, [{"data": 0}], node=most))
    assert [r["$node"] for r in api.read_all(topic)] == [most, most]
    answer = api.append(topic, [{"data": 0, "node": most + "n"}])
    assert refused(answer, 400, "invalid_request")["field"] == "records[0].node"
    answer = api.append(topic, [{"data": 0}], node=most + "n")
    assert refused(answer, 400, "invalid_request")["field"] == "node"
    assert api.get_state(topic)["head_seq"] == 2


def test_an_unused_batch_node_is_bounded_too(api: Api, topic: str) -> None:
    """Contract §2 [2-09]"""
    answer = api.append(topic, [{"data": 0, "node": "own"}], node="n" * 129)
    assert refused(answer, 400, "invalid_request")["field"] == "node"
    refused(api.state(topic), 404, "topic_not_found")


def test_meta_is_an_object_of_at_most_64_keys_and_16_kib(api: Api, topic: str) -> None:
    """Contract §2 [2-10, 2-22]"""
    good(api.append(topic, [{"data": 0, "meta": {f"k{n}": n for n in range(64)}}]))
    answer = api.append(topic, [{"data": 0, "meta": {f"k{n}": n for n in range(65)}}])
    assert refused(answer, 400, "invalid_request")["field"] == "records[0].meta"
    frame = len('{"k":""}')
    fits = {"k": "v" * (16 * 1024 - frame)}
    for meta, status in ((fits, 200), ({"k": fits["k"] + "v"}, 400)):
        raw = json.dumps({"records": [{"data": 0, "meta": meta}]}, separators=(",", ":"))
        assert api.raw("POST", f"/v0/topics/{topic}", raw.encode(), JSON).status == status
    wrong: tuple[object, ...] = ([], "x", 1, True)
    for value in wrong:
        answer = api.append(topic, [{"data": 0, "meta": value}])
        assert refused(answer, 400, "invalid_request")["field"] == "records[0].meta"
    assert api.get_state(topic)["head_seq"] == 2


def test_keys_inside_nested_meta_do_not_count(api: Api, topic: str) -> None:
    """§2: the limit of 64 keys applies to the outer object only. [2-10]"""
    good(api.append(topic, [{"data": 0, "meta": {"k": {f"n{n}": n for n in range(100)}}}]))


def test_a_record_keeps_its_node_over_the_batch_node(api: Api, topic: str) -> None:
    """Contract §2 [2-11]"""
    api.append(topic, [{"data": 1}, {"data": 2, "node": "own"}], node="batch")
    assert [r["$node"] for r in api.read_all(topic)] == ["batch", "own"]


def test_an_idempotency_key_has_at_most_256_characters(api: Api, topic: str) -> None:
    """Contract §2 [2-12]"""
    for key in ("k" * 256, "水" * 256):
        good(api.append(topic, [{"data": 0}], idempotency_key=key))
    answer = api.append(topic, [{"data": 0}], idempotency_key="k" * 257)
    assert refused(answer, 400, "invalid_request")["field"] == "idempotency_key"
    answer = api.http.post(
        f"/v0/topics/{topic}",
        json={"records": [{"data": 0}]},
        headers={"Idempotency-Key": "k" * 257},
    )
    refused(answer, 400, "invalid_request")
    assert api.get_state(topic)["head_seq"] == 2


def test_create_true_creates_and_false_does_not(api: Api, topic: str) -> None:
    """Contract §2 [2-13, 2-14, 2-20]"""
    refused(api.append(topic, [{"data": 1}], create=False), 404, "topic_not_found")
    refused(api.state(topic), 404, "topic_not_found")
    assert api.append(topic, [{"data": 1}], create=True).status_code == 201
    assert api.append(topic, [{"data": 1}], create=False).status_code == 200


def test_an_absent_topic_is_created_by_default(api: Api, topic: str) -> None:
    """Contract §2 [2-14, 2-20]"""
    answer = api.append(topic, [{"data": 1}])
    assert answer.status_code == 201
    assert answer.json()["created"] is True


def test_an_inline_config_counts_only_for_creation(api: Api, topic: str) -> None:
    """Contract §2 [2-15]"""
    config = {"ttl_ms": 60000, "cap_records": 100, "priority": 5000, "type": "queue"}
    made = api.append(topic, [{"data": 1}], config=config)
    assert made.status_code == 201
    expected = CONFIG_DEFAULTS | config | {"priority": 1000}
    assert api.get_state(topic)["config"] == expected
    other = api.append(topic, [{"data": 2}], config={"ttl_ms": 1, "type": "log"})
    assert other.status_code == 200
    assert api.get_state(topic)["config"] == expected


def test_an_inline_config_resolves_the_class(api: Api, topic: str) -> None:
    """Contract §2, §0.10 [2-15, 0.10-12]"""
    performance = good(api.append(topic, [{"data": 1}], config={"durable": True}))["performance"]
    assert performance["fsync_ms"] > 0
    assert api.get_state(topic)["config"]["durability"] == "fsync"


@pytest.mark.parametrize(
    ("config", "field"),
    [
        ({"ttl_ms": -1}, "config.ttl_ms"),
        ({"type": "stack"}, "config.type"),
        ({"cap_records": "9"}, "config.cap_records"),
        ({"dead_letter": "!"}, "config.dead_letter"),
        ({"durable": 1}, "config.durable"),
        ([], "config"),
        ("x", "config"),
        (5, "config"),
    ],
)
def test_an_invalid_inline_config_creates_nothing(
    api: Api, topic: str, config: object, field: str
) -> None:
    """Contract §2 [2-16]"""
    answer = api.append(topic, [{"data": 1}], config=config)
    assert refused(answer, 400, "invalid_request")["field"] == field
    refused(api.state(topic), 404, "topic_not_found")


def test_an_inline_dead_letter_is_not_the_topic_itself(api: Api, topic: str) -> None:
    """Contract §2, §1.1 [2-16, 1.1-09]"""
    answer = api.append(topic, [{"data": 1}], config={"dead_letter": topic})
    refused(answer, 400, "invalid_request")
    refused(api.state(topic), 404, "topic_not_found")


@pytest.mark.parametrize(
    "bad",
    [
        {},
        {"tag": "no data"},
        {"data": 1, "tag": 7},
        {"data": 1, "node": []},
        {"data": 1, "meta": []},
        {"data": 1, "tag": "x" * 257},
        {"data": "x" * (1024 * 1024)},
        None,
        [],
        "text",
    ],
)
@pytest.mark.parametrize("place", [0, 5, 9])
def test_one_bad_record_refuses_the_whole_batch(
    api: Api, topic: str, bad: object, place: int
) -> None:
    """Contract §2 [2-17, 2-27]"""
    api.add(topic, "before")
    records: list[object] = [{"data": n} for n in range(9)]
    records.insert(place, bad)
    assert api.append(topic, records).status_code == 400
    state = api.get_state(topic)
    assert (state["head_seq"], state["count"]) == (1, 1)
    assert api.add(topic, "after")["first_seq"] == 2


def test_a_full_topic_evicts_for_a_new_record(api: Api, topic: str) -> None:
    """Contract §2 [2-18]"""
    api.put(topic, {"cap_records": 3, "discard": "old"})
    for number in range(9):
        assert api.append(topic, [{"data": number}]).status_code == 200
    eventually(lambda: bool(api.get_state(topic)["count"] <= 3), "count within the cap")
    assert [r["data"] for r in api.read_all(topic)][-1] == 8


@pytest.mark.parametrize("caps", [{"cap_records": 3}, {"cap_bytes": 400}])
def test_a_full_reject_topic_refuses_the_whole_batch(api: Api, topic: str, caps: Json) -> None:
    """Contract §2, §0.6 [2-19, 0.6-09, 2-27, 0.10-11]"""
    api.put(topic, {"discard": "reject", **caps})
    text = "x" * 75
    for _ in range(2):
        good(api.append(topic, [{"data": text}]))
    refused(api.append(topic, [{"data": text}] * 3), 422, "topic_full")
    state = api.get_state(topic)
    assert (state["head_seq"], state["count"]) == (2, 2)
    good(api.append(topic, [{"data": text}]))
    for _ in range(3):
        refused(api.append(topic, [{"data": text}] * 3), 422, "topic_full")
    assert [r["data"] for r in api.read_all(topic)] == [text] * 3


def test_a_batch_over_the_whole_cap_is_full_also_when_empty(api: Api, topic: str) -> None:
    """Settled rules of the contract [S-46]"""
    api.put(topic, {"discard": "reject", "cap_records": 3})
    refused(api.append(topic, [{"data": 1}] * 4), 422, "topic_full")
    assert api.get_state(topic)["head_seq"] == 0
    assert good(api.append(topic, [{"data": 1}] * 3))["first_seq"] == 1
    refused(api.append(topic, [{"data": 1}]), 422, "topic_full")


def test_room_made_by_deletes_is_room(api: Api, topic: str) -> None:
    """Settled rules of the contract [S-47]"""
    api.put(topic, {"discard": "reject", "cap_records": 3})
    api.add(topic, 1, 2, 3)
    refused(api.append(topic, [{"data": 4}]), 422, "topic_full")
    api.delete(topic, before_seq=3)
    assert api.add(topic, 4, 5)["seqs"] == [4, 5]
    refused(api.append(topic, [{"data": 6}]), 422, "topic_full")
    assert api.read(topic)["tombstone"] is None


def test_room_made_by_expiry_is_room(api: Api, topic: str) -> None:
    """An expired record no longer counts for the cap. [S-47, 0.10-06]"""
    api.put(topic, {"discard": "reject", "cap_records": 2, "ttl_ms": 200})
    api.add(topic, 1, 2)

    def taken() -> bool:
        return api.append(topic, [{"data": 3}]).status_code == 200

    eventually(taken, "an expired topic takes a record", within_s=5)


def test_a_refused_repeat_of_a_key_in_a_full_topic_still_dedupes(api: Api, topic: str) -> None:
    """§0.8, §2: the repeat needs no room. [0.8-04]"""
    api.put(topic, {"discard": "reject", "cap_records": 1})
    good(api.append(topic, [{"data": 1}], idempotency_key="k"))
    assert good(api.append(topic, [{"data": 1}], idempotency_key="k"))["deduped"] is True


def test_an_acknowledged_append_is_visible_at_once(api: Api, topic: str) -> None:
    """Contract §2 [2-28]"""
    for number in range(1, 100):
        head = api.add(topic, number)["head_seq"]
        page = api.read(topic, from_seq=number - 1)
        assert head == page["head_seq"] == number
        assert page["records"][0]["data"] == number


def test_concurrent_writers_get_seqs_of_their_own(api: Api, topic: str) -> None:
    """§2: appends stay atomic and their seqs contiguous under concurrency. [2-01, 2-17]"""
    seqs: list[list[int]] = []

    def write(writer: int) -> None:
        client = Api(api.url)
        for _ in range(20):
            seqs.append(client.add(topic, *[writer] * 5)["seqs"])
        client.close()

    threads = [threading.Thread(target=write, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(run == list(range(run[0], run[0] + 5)) for run in seqs)
    assert sorted(seq for run in seqs for seq in run) == list(range(1, 601))
    datas = [r["data"] for r in api.read_all(topic)]
    assert all(len(set(datas[start : start + 5])) == 1 for start in range(0, 600, 5))


def test_times_never_go_back_within_a_topic(api: Api, topic: str) -> None:
    """Settled rules of the contract [S-25]"""
    for _ in range(50):
        api.add(topic, 1, 2)
    stamps = [r["$ts"] for r in api.read_all(topic)]
    assert stamps == sorted(stamps)


def test_a_lazily_created_topic_that_was_refused_does_not_exist(
    api: Api, names: Callable[[str], str]
) -> None:
    """Contract §2 [2-16, 2-17]"""
    wrong: tuple[list[Json], ...] = ([], [{}], [{"data": 1, "tag": 1}])
    for records in wrong:
        name = names("never")
        assert api.append(name, records).status_code == 400
        refused(api.state(name), 404, "topic_not_found")


def test_each_batching_limit_has_its_variable(own: NewServer, topic: str) -> None:
    """Contract §2 [2-23, 2-05, 2-07, 2-08, 2-09, 2-10]"""
    api = own(
        TOPICS_MAX_BATCH_RECORDS="3",
        TOPICS_MAX_RECORD_BYTES="50",
        TOPICS_MAX_META_BYTES="20",
        TOPICS_MAX_TAG_BYTES="4",
        TOPICS_MAX_NODE_BYTES="5",
        TOPICS_MAX_BODY_BYTES="2000",
    ).start()
    good(api.append(topic, [{"data": "x" * 48, "tag": "tttt", "node": "nnnnn"}] * 3))
    good(api.append(topic, [{"data": "x" * 28, "meta": {"k": "v" * 10}}]))
    refused(api.append(topic, [{"data": 1}] * 4), 400, "batch_too_large")
    refused(api.append(topic, [{"data": "x" * 49}]), 400, "record_too_large")
    refused(api.append(topic, [{"data": 1, "meta": {"k": "v" * 15}}]), 400, "invalid_request")
    refused(api.append(topic, [{"data": 1, "tag": "ttttt"}]), 400, "invalid_request")
    refused(api.append(topic, [{"data": 1, "node": "nnnnnn"}]), 400, "invalid_request")
    refused(api.append(topic, [{"data": 1}], node="nnnnnn"), 400, "invalid_request")
    refused(api.append(topic, [{"data": 1}], pad="p" * 2000), 413, "payload_too_large")
    assert api.get_state(topic)["head_seq"] == 4


def test_a_lowered_limit_leaves_stored_records_readable(own: NewServer, topic: str) -> None:
    """§2, settled rules: limits are checked on write only. [2-23]"""
    server = own()
    api = server.start()
    api.append(topic, [{"data": "x" * 500, "tag": "t" * 100, "meta": {"k": "v" * 100}}] * 20)
    server.stop()
    server.env = {"TOPICS_MAX_RECORD_BYTES": "50", "TOPICS_MAX_TAG_BYTES": "4"}
    api = server.start()
    assert len(api.read_all(topic)) == 20
    refused(api.append(topic, [{"data": "x" * 500}]), 400, "record_too_large")
