"""§0.8: repeating a request does not repeat its effect."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from tests.contract.conftest import NewServer
from tests.contract.driver import Api, Json, good, refused
from tests.contract.watch.subscriptions import Clients

JSON = "application/json"


def _keyed(api: Api, topic: str, header: str, **body: object) -> Json:
    fields = {"records": [{"data": 1}], **body}
    return good(
        api.http.post(f"/v0/topics/{topic}", json=fields, headers={"Idempotency-Key": header})
    )


def test_an_identical_put_changes_nothing(api: Api, topic: str) -> None:
    """Contract §0.8, §1.1 [0.8-01, 1.1-02]"""
    config = {"ttl_ms": 60000, "priority": 3, "discard": "reject"}
    first = good(api.put(topic, config))
    before = api.get_state(topic)
    again = api.put(topic, config)
    assert again.status_code == 200
    assert again.json()["created"] is False
    assert again.json()["config"] == first["config"]
    after = api.get_state(topic)
    for body in (before, after):
        body.pop("performance")
    assert after == before


def test_a_changed_put_takes_effect(api: Api, topic: str) -> None:
    """Contract §0.8, §1.1 [0.8-02, 1.1-03]"""
    api.put(topic, {"cap_records": 10})
    changed = api.put(topic, {"cap_records": 20})
    assert changed.status_code == 200
    assert changed.json()["created"] is False
    assert changed.json()["config"]["cap_records"] == 20
    assert api.get_state(topic)["config"]["cap_records"] == 20


def test_deleting_an_absent_topic_is_a_success(api: Api, topic: str) -> None:
    """Contract §0.8, §1.4 [0.8-03, 1.4-02]"""
    for _ in range(2):
        answer = api.drop(topic)
        assert answer.status_code == 200
        assert answer.json()["deleted"] is False
        assert answer.json()["routers_removed"] == []
        assert answer.json()["topic"] == topic


def test_a_repeated_key_returns_the_first_seqs_and_appends_nothing(api: Api, topic: str) -> None:
    """Contract §0.8 [0.8-04, 0.8-08, 0.8-11]"""
    first = api.append(topic, [{"data": 1}, {"data": 2}], idempotency_key="k")
    assert first.status_code == 201
    assert first.json()["deduped"] is False
    api.add(topic, "between")
    again = api.append(topic, [{"data": 1}, {"data": 2}], idempotency_key="k")
    assert again.status_code == 200
    body = again.json()
    assert body["deduped"] is True
    assert body["created"] is False
    assert body["seqs"] == [1, 2]
    assert (body["first_seq"], body["last_seq"]) == (1, 2)
    assert body["head_seq"] == 3
    assert [r["data"] for r in api.read_all(topic)] == [1, 2, "between"]


def test_a_repeated_key_wins_over_another_body(api: Api, topic: str) -> None:
    """Contract §0.8 [0.8-09]"""
    api.append(topic, [{"data": 1}], idempotency_key="k")
    other = good(api.append(topic, [{"data": 2}, {"data": 3}], idempotency_key="k"))
    assert other["deduped"] is True
    assert other["seqs"] == [1]
    assert [r["data"] for r in api.read_all(topic)] == [1]


def test_a_key_belongs_to_its_topic(api: Api, names: Callable[[str], str]) -> None:
    """Contract §0.8 [0.8-05]"""
    first, second = names("a"), names("b")
    for topic in (first, second):
        assert good(api.append(topic, [{"data": 1}], idempotency_key="k"))["deduped"] is False


def test_different_keys_and_no_key_append(api: Api, topic: str) -> None:
    """Contract §0.8 [0.8-04]"""
    for key in ("a", "A", "a ", None, None):
        fields = {} if key is None else {"idempotency_key": key}
        assert good(api.append(topic, [{"data": 1}], **fields))["deduped"] is False
    assert api.get_state(topic)["head_seq"] == 5


def test_the_key_may_come_as_a_header(api: Api, topic: str) -> None:
    """Contract §0.8 [0.8-07]"""
    assert _keyed(api, topic, "h")["deduped"] is False
    assert _keyed(api, topic, "h")["deduped"] is True
    by_body = good(api.append(topic, [{"data": 1}], idempotency_key="h"))
    assert by_body["deduped"] is True
    assert api.get_state(topic)["head_seq"] == 1


def test_a_key_in_the_body_wins_over_the_header(api: Api, topic: str) -> None:
    """Contract §0.8 [0.8-07]"""
    assert _keyed(api, topic, "header", idempotency_key="body")["deduped"] is False
    assert _keyed(api, topic, "header")["deduped"] is False
    assert _keyed(api, topic, "other", idempotency_key="body")["deduped"] is True


def test_a_key_is_forgotten_after_the_window(api: Api, topic: str) -> None:
    """Contract §0.8, §0.10 [0.8-06, 0.10-29]"""
    api.put(topic, {"idempotency_window_ms": 300})
    assert good(api.append(topic, [{"data": 1}], idempotency_key="k"))["deduped"] is False
    assert good(api.append(topic, [{"data": 1}], idempotency_key="k"))["deduped"] is True
    time.sleep(0.6)
    assert good(api.append(topic, [{"data": 1}], idempotency_key="k"))["deduped"] is False
    assert api.get_state(topic)["head_seq"] == 2


def test_deleting_a_topic_forgets_its_keys(api: Api, topic: str) -> None:
    """Contract §0.8, §1.4 [0.8-10, 1.4-01]"""
    api.append(topic, [{"data": 1}], idempotency_key="k")
    api.drop(topic)
    again = good(api.append(topic, [{"data": 1}], idempotency_key="k"))
    assert again["deduped"] is False
    assert again["seqs"] == [1]


def test_a_key_outlives_the_deletion_of_its_records(api: Api, topic: str) -> None:
    """§0.8: the key promises seqs, not records. [0.8-04]"""
    api.append(topic, [{"data": 1}], idempotency_key="k")
    api.delete(topic, before_seq=2)
    assert good(api.append(topic, [{"data": 1}], idempotency_key="k"))["deduped"] is True


def test_a_deduplicated_answer_may_leave_out_the_seqs(api: Api, topic: str) -> None:
    """Contract §0.8, §2 [0.8-04, 2-03]"""
    for deduped in (False, True):
        answer = api.http.post(
            f"/v0/topics/{topic}?return_seqs=false",
            json={"records": [{"data": 1}, {"data": 2}], "idempotency_key": "k"},
        )
        assert "seqs" not in answer.json()
        assert answer.json()["deduped"] is deduped
        assert (answer.json()["first_seq"], answer.json()["last_seq"]) == (1, 2)


@pytest.mark.parametrize("how", ["clean stop", "kill -9"])
def test_keys_survive_a_restart_with_their_records(own: NewServer, topic: str, how: str) -> None:
    """Settled rules of the contract [S-15]"""
    server = own()
    api = server.start()
    api.put(topic, {"durability": "fsync"})
    good(api.append(topic, [{"data": 1}, {"data": 2}], idempotency_key="in-body"))
    _keyed(api, topic, "in-header")
    api = server.restart() if how == "clean stop" else server.crash()
    again = good(api.append(topic, [{"data": 1}, {"data": 2}], idempotency_key="in-body"))
    assert again["deduped"] is True
    assert again["seqs"] == [1, 2]
    by_header = _keyed(api, topic, "in-header")
    assert by_header["deduped"] is True
    assert by_header["seqs"] == [3]
    assert [r["data"] for r in api.read_all(topic)] == [1, 2, 1]


def test_an_expired_key_stays_expired_over_a_restart(own: NewServer, topic: str) -> None:
    """Contract §0.8, settled rules [S-15, 0.8-06]"""
    server = own()
    api = server.start()
    api.put(topic, {"idempotency_window_ms": 200})
    good(api.append(topic, [{"data": 1}], idempotency_key="k"))
    time.sleep(0.3)
    api = server.restart()
    assert good(api.append(topic, [{"data": 1}], idempotency_key="k"))["deduped"] is False


# --- a key for each record ------------------------------------------------------------------------
def _batch(api: Api, topic: str, *datas: object, key: str = "b", if_: Json | None = None) -> Json:
    fields: Json = {"idempotency_key": key, "idempotency": "per_record"}
    if if_ is not None:
        fields["if"] = if_
    return good(api.append(topic, [{"data": data} for data in datas], **fields))


def _datas(api: Api, topic: str) -> list[object]:
    return [record["data"] for record in api.read_all(topic)]


def test_a_batch_may_have_a_key_for_each_record(api: Api, topic: str) -> None:
    """Beyond the contract: each record of a batch counts once. [V-12, V-14]"""
    first = _batch(api, topic, "a", "b", "c")
    assert (first["seqs"], first["deduped"], first["count"]) == ([1, 2, 3], False, 3)
    again = _batch(api, topic, "a", "b", "c")
    assert (again["seqs"], again["deduped"], again["count"]) == ([1, 2, 3], True, 3)
    assert _datas(api, topic) == ["a", "b", "c"]


def test_only_the_missing_records_of_a_batch_are_appended(api: Api, topic: str) -> None:
    """The key of record i is `base:i`, whether a batch or a single append used it first.

    [V-11, V-12, V-13]
    """
    api.add(topic, "before")
    for index in (1, 3):
        good(api.append(topic, [{"data": f"single {index}"}], idempotency_key=f"b:{index}"))
    api.add(topic, "between")
    answer = _batch(api, topic, "0", "1", "2", "3", "4")
    assert answer["seqs"] == [5, 2, 6, 3, 7]
    assert (answer["first_seq"], answer["last_seq"], answer["head_seq"]) == (2, 7, 7)
    assert (answer["count"], answer["deduped"]) == (5, False)
    # The first payload of a key wins.
    assert _datas(api, topic) == ["before", "single 1", "single 3", "between", "0", "2", "4"]
    single = good(api.append(topic, [{"data": "late"}], idempotency_key="b:4"))
    assert (single["deduped"], single["seqs"]) == (True, [7])
    longer = _batch(api, topic, *"abcdefg")
    assert (longer["seqs"], longer["deduped"]) == ([5, 2, 6, 3, 7, 8, 9], False)
    shorter = _batch(api, topic, "x")
    assert (shorter["seqs"], shorter["deduped"], shorter["count"]) == ([5], True, 1)
    assert _datas(api, topic)[-2:] == ["f", "g"]


def test_the_base_key_is_no_key_itself(api: Api, topic: str) -> None:
    """A call with the base key alone is another call, whether it comes before or after the
    batch.
    """
    good(api.append(topic, [{"data": 1}], idempotency_key="b"))
    assert _batch(api, topic, 2, 3)["deduped"] is False
    assert good(api.append(topic, [{"data": 4}], idempotency_key="b"))["seqs"] == [1]


def test_the_base_key_may_come_as_a_header(api: Api, topic: str) -> None:
    """§0.8: the header has the base key of records as it has the key of a call. [V-11]"""
    for deduped in (False, True):
        answer = _keyed(api, topic, "b", idempotency="per_record")
        assert (answer["deduped"], answer["seqs"]) == (deduped, [1])
    assert good(api.append(topic, [{"data": 1}], idempotency_key="b:0"))["deduped"] is True


def test_null_is_no_key_for_each_record(api: Api, topic: str) -> None:
    """An explicit null counts as absent."""
    records = [{"data": 1}, {"data": 2}]
    for deduped in (False, True):
        answer = good(api.append(topic, records, idempotency_key="k", idempotency=None))
        assert answer["deduped"] is deduped
    assert good(api.append(topic, records, idempotency_key="k:0"))["deduped"] is False


def test_a_batch_of_keyed_records_may_leave_out_the_seqs(api: Api, topic: str) -> None:
    """§2: `return_seqs=false` leaves `count` as it is."""
    good(api.append(topic, [{"data": 1}], idempotency_key="b:1"))
    body = {
        "records": [{"data": n} for n in range(3)],
        "idempotency_key": "b",
        "idempotency": "per_record",
    }
    answer = good(api.http.post(f"/v0/topics/{topic}?return_seqs=false", json=body))
    assert "seqs" not in answer
    assert (answer["first_seq"], answer["last_seq"], answer["count"]) == (1, 3, 3)


def test_a_key_with_its_suffix_has_at_most_256_characters(api: Api, topic: str) -> None:
    """The suffix of the last record counts. [V-16]"""
    fits = "k" * 254
    assert _batch(api, topic, *range(10), key=fits)["count"] == 10
    records = [{"data": n} for n in range(11)]
    answer = api.append(topic, records, idempotency_key=fits, idempotency="per_record")
    assert refused(answer, 400, "invalid_request")["field"] == "idempotency_key"
    answer = api.http.post(
        f"/v0/topics/{topic}",
        json={"records": records, "idempotency": "per_record"},
        headers={"Idempotency-Key": fits},
    )
    assert refused(answer, 400, "invalid_request")["field"] == "Idempotency-Key"
    assert api.get_state(topic)["head_seq"] == 10


def test_keys_of_records_need_a_base_key(api: Api, topic: str) -> None:
    """Without a base key every retry would append again. [V-16]"""
    answer = api.append(topic, [{"data": 1}], idempotency="per_record")
    assert refused(answer, 400, "invalid_request")["field"] == "idempotency_key"
    refused(api.state(topic), 404, "topic_not_found")


def test_keys_of_records_do_not_go_with_a_producer(api: Api, topic: str) -> None:
    """A producer's request is stored whole or not at all. [V-16]"""
    api.put(topic)
    answer = api.http.post(
        f"/v0/topics/{topic}",
        json={"records": [{"data": 1}], "idempotency_key": "b", "idempotency": "per_record"},
        headers={"Producer-Id": "p", "Producer-Epoch": "0", "Producer-Seq": "0"},
    )
    assert refused(answer, 400, "invalid_request")["field"] == "idempotency"
    assert api.get_state(topic)["head_seq"] == 0


def test_a_condition_counts_for_a_batch_with_missing_records(api: Api, topic: str) -> None:
    """The server checks the keys first, then the condition, as for a call with one key."""
    held = _batch(api, topic, 1, 2, if_={"exists": False})
    assert (held["condition"], held["seqs"]) == ("met", [1, 2])
    repeated = _batch(api, topic, 1, 2, if_={"exists": False})
    assert (repeated["condition"], repeated["deduped"]) == ("met", True)
    answer = api.append(
        topic,
        [{"data": n} for n in range(3)],
        idempotency_key="b",
        idempotency="per_record",
        **{"if": {"head_seq": 1}},
    )
    refused(answer, 409, "condition_failed")
    assert _batch(api, topic, 1, 2, 3, if_={"head_seq": 2})["seqs"] == [1, 2, 3]


def test_a_full_topic_takes_a_batch_that_is_stored_already(api: Api, topic: str) -> None:
    """§0.10: only the missing records need room."""
    api.put(topic, {"cap_records": 3, "discard": "reject"})
    assert _batch(api, topic, 1, 2)["seqs"] == [1, 2]
    assert _batch(api, topic, 1, 2, 3)["seqs"] == [1, 2, 3]
    assert _batch(api, topic, 1, 2, 3)["deduped"] is True
    records = [{"data": n} for n in range(4)]
    answer = api.append(topic, records, idempotency_key="b", idempotency="per_record")
    refused(answer, 422, "topic_full")


def test_delays_stay_with_their_records(api: Api, topic: str) -> None:
    """§10: a job that is appended alone keeps its own delay."""
    api.put(topic, {"type": "queue"})
    good(api.append(topic, [{"data": "first"}], idempotency_key="b:0"))
    records = [{"data": 0}, {"data": 1}, {"data": 2, "delay_ms": 3_600_000}]
    answer = good(api.append(topic, records, idempotency_key="b", idempotency="per_record"))
    assert answer["seqs"] == [1, 2, 3]
    queue = api.get_state(topic)["queue"]
    assert (queue["ready"], queue["delayed"]) == (2, 1)


def test_keys_of_records_expire_with_the_window(api: Api, topic: str) -> None:
    """§0.8: each key expires by itself. [V-15]"""
    api.put(topic, {"idempotency_window_ms": 300})
    assert _batch(api, topic, 1, 2)["seqs"] == [1, 2]
    time.sleep(0.6)
    assert _batch(api, topic, 1, 2)["seqs"] == [3, 4]


def test_keys_of_records_are_one_for_http_and_websocket(
    api: Api, topic: str, clients: Clients
) -> None:
    """§7-ws: a publish takes the fields of an append. [V-18]"""
    assert _batch(api, topic, "a", "b")["seqs"] == [1, 2]
    ws = clients.ws(api)
    command: Json = {
        "op": "publish",
        "topic": topic,
        "records": [{"data": n} for n in range(3)],
        "idempotency_key": "b",
        "idempotency": "per_record",
    }
    ack = ws.ask(**command, return_seqs=True)
    assert (ack["op"], ack["seqs"], ack["count"]) == ("ack", [1, 2, 3], 3)
    assert "deduped" not in ack
    again = ws.ask(**command, return_seqs=True)
    assert (again["seqs"], again["deduped"]) == ([1, 2, 3], True)
    error = ws.ask(**command, producer_id="p", producer_epoch=0, producer_seq=0)
    assert (error["op"], error["code"]) == ("error", "invalid_request")


@pytest.mark.parametrize("how", ["clean stop", "kill -9"])
def test_keys_of_records_survive_a_restart(own: NewServer, topic: str, how: str) -> None:
    """S-15 holds for each key, also for those of a batch that was partly stored. [V-17]"""
    server = own()
    api = server.start()
    api.put(topic, {"durability": "fsync"})
    good(api.append(topic, [{"data": "single"}], idempotency_key="b:1"))
    assert _batch(api, topic, "0", "1", "2")["seqs"] == [2, 1, 3]
    assert _keyed(api, topic, "h", idempotency="per_record")["seqs"] == [4]
    api = server.restart() if how == "clean stop" else server.crash()
    again = _batch(api, topic, "0", "1", "2")
    assert (again["deduped"], again["seqs"]) == (True, [2, 1, 3])
    assert _batch(api, topic, *"0123")["seqs"] == [2, 1, 3, 5]
    assert _keyed(api, topic, "h", idempotency="per_record")["deduped"] is True
    assert _datas(api, topic) == ["single", "0", "2", 1, "3"]


def test_a_large_batch_may_have_keys_of_records(api: Api, topic: str) -> None:
    """A body that the helper process decodes has the same keys. [V-12]"""
    good(api.append(topic, [{"data": "single"}], idempotency_key="b:2"))
    big = "x" * 400_000
    answer = _batch(api, topic, *(f"{n}{big}" for n in range(4)))
    assert (answer["seqs"], answer["deduped"]) == ([2, 3, 1, 4], False)
    assert _batch(api, topic, *(f"{n}{big}" for n in range(4)))["deduped"] is True
    stored = [str(data)[:6] for data in _datas(api, topic)]
    assert stored == ["single", "0xxxxx", "1xxxxx", "3xxxxx"]
