"""§0.8: repeating a request does not repeat its effect."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from tests.contract.conftest import NewServer
from tests.contract.driver import Api, Json, good

JSON = "application/json"


def _keyed(api: Api, topic: str, header: str, **body: object) -> Json:
    fields = {"records": [{"data": 1}], **body}
    return good(
        api.http.post(f"/v0/topics/{topic}", json=fields, headers={"Idempotency-Key": header})
    )


def test_an_identical_put_changes_nothing(api: Api, topic: str) -> None:
    """§0.8, §1.1 [0.8-01, 1.1-02]"""
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
    """§0.8, §1.1 [0.8-02, 1.1-03]"""
    api.put(topic, {"cap_records": 10})
    changed = api.put(topic, {"cap_records": 20})
    assert changed.status_code == 200
    assert changed.json()["created"] is False
    assert changed.json()["config"]["cap_records"] == 20
    assert api.get_state(topic)["config"]["cap_records"] == 20


def test_deleting_an_absent_topic_is_a_success(api: Api, topic: str) -> None:
    """§0.8, §1.4 [0.8-03, 1.4-02]"""
    for _ in range(2):
        answer = api.drop(topic)
        assert answer.status_code == 200
        assert answer.json()["deleted"] is False
        assert answer.json()["routers_removed"] == []
        assert answer.json()["topic"] == topic


def test_a_repeated_key_returns_the_first_seqs_and_appends_nothing(api: Api, topic: str) -> None:
    """§0.8 [0.8-04, 0.8-08, 0.8-11]"""
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
    """§0.8 [0.8-09]"""
    api.append(topic, [{"data": 1}], idempotency_key="k")
    other = good(api.append(topic, [{"data": 2}, {"data": 3}], idempotency_key="k"))
    assert other["deduped"] is True
    assert other["seqs"] == [1]
    assert [r["data"] for r in api.read_all(topic)] == [1]


def test_a_key_belongs_to_its_topic(api: Api, names: Callable[[str], str]) -> None:
    """§0.8 [0.8-05]"""
    first, second = names("a"), names("b")
    for topic in (first, second):
        assert good(api.append(topic, [{"data": 1}], idempotency_key="k"))["deduped"] is False


def test_different_keys_and_no_key_append(api: Api, topic: str) -> None:
    """§0.8 [0.8-04]"""
    for key in ("a", "A", "a ", None, None):
        fields = {} if key is None else {"idempotency_key": key}
        assert good(api.append(topic, [{"data": 1}], **fields))["deduped"] is False
    assert api.get_state(topic)["head_seq"] == 5


def test_the_key_may_come_as_a_header(api: Api, topic: str) -> None:
    """§0.8 [0.8-07]"""
    assert _keyed(api, topic, "h")["deduped"] is False
    assert _keyed(api, topic, "h")["deduped"] is True
    by_body = good(api.append(topic, [{"data": 1}], idempotency_key="h"))
    assert by_body["deduped"] is True
    assert api.get_state(topic)["head_seq"] == 1


def test_a_key_in_the_body_wins_over_the_header(api: Api, topic: str) -> None:
    """§0.8 [0.8-07]"""
    assert _keyed(api, topic, "header", idempotency_key="body")["deduped"] is False
    assert _keyed(api, topic, "header")["deduped"] is False
    assert _keyed(api, topic, "other", idempotency_key="body")["deduped"] is True


def test_a_key_is_forgotten_after_the_window(api: Api, topic: str) -> None:
    """§0.8, §0.10 [0.8-06, 0.10-29]"""
    api.put(topic, {"idempotency_window_ms": 300})
    assert good(api.append(topic, [{"data": 1}], idempotency_key="k"))["deduped"] is False
    assert good(api.append(topic, [{"data": 1}], idempotency_key="k"))["deduped"] is True
    time.sleep(0.6)
    assert good(api.append(topic, [{"data": 1}], idempotency_key="k"))["deduped"] is False
    assert api.get_state(topic)["head_seq"] == 2


def test_deleting_a_topic_forgets_its_keys(api: Api, topic: str) -> None:
    """§0.8, §1.4 [0.8-10, 1.4-01]"""
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
    """§0.8, §2 [0.8-04, 2-03]"""
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
    """S [S-15]"""
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
    """S, §0.8 [S-15, 0.8-06]"""
    server = own()
    api = server.start()
    api.put(topic, {"idempotency_window_ms": 200})
    good(api.append(topic, [{"data": 1}], idempotency_key="k"))
    time.sleep(0.3)
    api = server.restart()
    assert good(api.append(topic, [{"data": 1}], idempotency_key="k"))["deduped"] is False
