"""Conditional writes: `if` of appends, deletes and configurations, and `If-Match`."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from tests.contract.conftest import NewServer
from tests.contract.driver import Api, Json, good, refused
from tests.contract.watch.subscriptions import Clients

FAILED = (409, "condition_failed")


def _if(api: Api, topic: str, condition: object, tag: str = "x", **more: Any) -> Any:
    return api.append(topic, [{"data": 1, "tag": tag}], **{"if": condition}, **more)


def _head(api: Api, topic: str) -> int:
    return int(api.get_state(topic)["head_seq"])


def test_an_append_at_the_expected_head_is_stored(api: Api, topic: str) -> None:
    api.add(topic, 1, 2)
    stored = good(_if(api, topic, {"head_seq": 2}))
    assert (stored["condition"], stored["first_seq"]) == ("met", 3)
    detail = refused(_if(api, topic, {"head_seq": 2}), *FAILED)
    assert (detail["reason"], detail["seq"], detail["head_seq"]) == ("head", 3, 3)
    assert refused(_if(api, topic, {"head_seq": 9}), *FAILED)["reason"] == "ahead"
    assert _head(api, topic) == 3


def test_a_plain_append_says_nothing_of_conditions(api: Api, topic: str) -> None:
    assert "condition" not in api.add(topic, 1)


def test_an_append_that_finds_no_match_behind_a_seq_is_stored(api: Api, topic: str) -> None:
    api.add(topic, 1, tag="user:ann")
    api.add(topic, 2, tag="user:bob")
    wanted = ["tag", "Eq", "user:ann"]
    detail = refused(_if(api, topic, {"none_match": wanted}), *FAILED)
    assert (detail["reason"], detail["seq"]) == ("match", 1)
    assert good(_if(api, topic, {"none_match": wanted, "after": 1}))["condition"] == "met"
    glob = ["tag", "Glob", "user:*"]
    assert refused(_if(api, topic, {"none_match": glob, "after": 1}), *FAILED)["seq"] == 2
    one_of = ["Or", ["tag", "In", ["no", "user:bob"]], ["node", "Eq", "n"]]
    assert refused(_if(api, topic, {"none_match": one_of}), *FAILED)["seq"] == 2
    assert good(_if(api, topic, {"none_match": "user:cid"}))["condition"] == "met"
    assert refused(_if(api, topic, {"none_match": "x", "after": 9}), *FAILED)["reason"] == "ahead"


def test_deleted_records_do_not_conflict(api: Api, topic: str) -> None:
    api.add(topic, 1, tag="seat:1")
    assert refused(_if(api, topic, {"none_match": "seat:1"}), *FAILED)["seq"] == 1
    good(api.delete(topic, match="seat:1"))
    assert good(_if(api, topic, {"none_match": "seat:1"}, tag="seat:1"))["condition"] == "met"


def test_sealed_records_are_searched(api: Api, topic: str) -> None:
    for number in range(4):
        api.add(topic, *range(5), tag=f"s:{number}")
        good(api.http.post("/v0/admin/seal", json={"topics": [topic]}))
    api.add(topic, 1, tag="tail")
    assert refused(_if(api, topic, {"none_match": "s:2"}), *FAILED)["seq"] == 11
    assert good(_if(api, topic, {"none_match": "s:2", "after": 15}))["first_seq"] == 22
    assert good(_if(api, topic, {"none_match": "s:9"}))["condition"] == "met"
    good(api.delete(topic, match="s:2"))
    assert good(_if(api, topic, {"none_match": "s:2"}))["condition"] == "met"


def test_lost_records_cannot_be_vouched_for(api: Api, topic: str) -> None:
    api.put(topic, {"cap_records": 3})
    api.add(topic, *range(6), tag="a")
    detail = refused(_if(api, topic, {"none_match": "b"}), *FAILED)
    assert detail["reason"] == "trimmed"
    assert "seq" not in detail
    assert refused(_if(api, topic, {"none_match": "b", "after": 2}), *FAILED)["reason"] == "trimmed"
    assert good(_if(api, topic, {"none_match": "b", "after": 3}))["condition"] == "met"


def test_a_topic_may_have_to_exist_or_not(api: Api, names: Callable[[str], str]) -> None:
    name = names("c")
    assert refused(_if(api, name, {"exists": True}), *FAILED)["reason"] == "absent"
    assert api.state(name).status_code == 404
    first = good(_if(api, name, {"exists": False}))
    assert (first["created"], first["condition"]) == (True, "met")
    assert refused(_if(api, name, {"exists": False}), *FAILED)["reason"] == "exists"
    assert good(_if(api, name, {"exists": True}))["condition"] == "met"
    other = names("c")
    assert refused(_if(api, other, {"head_seq": 3}), *FAILED)["reason"] == "absent"
    assert good(_if(api, other, {"head_seq": 0}))["created"] is True


def test_a_topic_made_again_has_another_epoch(api: Api, topic: str) -> None:
    api.add(topic, 1)
    epoch = api.get_state(topic)["epoch"]
    assert good(_if(api, topic, {"head_seq": 1, "epoch": epoch}))["condition"] == "met"
    good(api.drop(topic))
    api.add(topic, 1)
    detail = refused(_if(api, topic, {"head_seq": 1, "epoch": epoch}), *FAILED)
    assert detail["reason"] == "epoch"
    assert detail["epoch"] != epoch


def test_a_repeat_gets_its_first_answer(api: Api, topic: str) -> None:
    api.add(topic, 1)
    first = good(_if(api, topic, {"head_seq": 1}, idempotency_key="k"))
    again = good(_if(api, topic, {"head_seq": 1}, idempotency_key="k"))
    assert (again["first_seq"], again["deduped"], again["condition"]) == (2, True, "met")
    assert first["first_seq"] == 2
    assert _head(api, topic) == 2


def test_a_condition_that_fails_keeps_no_key(api: Api, topic: str) -> None:
    api.add(topic, 1)
    refused(_if(api, topic, {"head_seq": 0}, idempotency_key="k"), *FAILED)
    stored = good(_if(api, topic, {"head_seq": 1}, idempotency_key="k"))
    assert (stored["first_seq"], stored["deduped"]) == (2, False)


def test_a_condition_that_fails_leaves_the_producers_seq_unused(api: Api, topic: str) -> None:
    def stamped(seq: int, condition: object) -> Any:
        headers = {"Producer-Id": "p", "Producer-Epoch": "0", "Producer-Seq": str(seq)}
        body = {"records": [{"data": seq}], "if": condition}
        return api.http.post(f"/v0/topics/{topic}", json=body, headers=headers)

    assert good(stamped(0, {"head_seq": 0}))["condition"] == "met"
    refused(stamped(1, {"head_seq": 0}), *FAILED)
    assert good(stamped(1, {"head_seq": 1}))["first_seq"] == 2
    # The server recognizes a producer's repeat before it checks the condition.
    assert stamped(1, {"head_seq": 1}).status_code == 204
    assert _head(api, topic) == 2


def test_the_etag_of_a_topic_is_what_if_match_takes(api: Api, topic: str) -> None:
    def matching(tag: str) -> Any:
        headers = {"If-Match": tag}
        return api.http.post(
            f"/v0/topics/{topic}", json={"records": [{"data": 1}]}, headers=headers
        )

    assert refused(matching("*"), 412, "precondition_failed")["reason"] == "absent"
    api.add(topic, 1)
    tag = api.state(topic).headers["etag"]
    epoch = api.get_state(topic)["epoch"]
    assert tag == f'"{epoch}-1"'
    assert good(matching(tag))["condition"] == "met"
    detail = refused(matching(tag), 412, "precondition_failed")
    assert (detail["reason"], detail["seq"]) == ("head", 2)
    assert good(matching("*"))["condition"] == "met"


def test_deletes_and_configurations_are_conditional_too(api: Api, topic: str) -> None:
    def delete(condition: object) -> Any:
        return api.delete(topic, before_seq=2, **{"if": condition})

    refused(api.put(topic, {"if": {"exists": True}}), *FAILED)
    made = good(api.put(topic, {"ttl_ms": 0, "if": {"exists": False}, "strange": 1}))
    assert (made["created"], made["condition"], made["ignored"]) == (True, "met", ["strange"])
    refused(api.put(topic, {"if": {"exists": False}}), *FAILED)
    api.add(topic, 1, 2)
    assert refused(delete({"head_seq": 1}), *FAILED)["seq"] == 2
    assert good(delete({"head_seq": 2}))["deleted"] == 1
    refused(delete({"none_match": ["tag", "Glob", "*"], "after": 9}), *FAILED)
    patch = {"Content-Type": "application/merge-patch+json", "If-Match": '"0-0"'}
    path = f"/v0/topics/{topic}"
    refused(api.http.patch(path, content=b"{}", headers=patch), 412, "precondition_failed")
    patched = api.http.patch(path, json={"ttl_ms": 60_000, "if": {"head_seq": 2}})
    assert good(patched)["condition"] == "met"
    assert "ignored" not in patched.json()
    stale = api.http.delete(path, headers={"If-Match": '"0-0"'})
    refused(stale, 412, "precondition_failed")
    current = api.state(topic).headers["etag"]
    assert good(api.http.delete(path, headers={"If-Match": current}))["condition"] == "met"
    refused(api.http.delete(path, headers={"If-Match": "*"}), 412, "precondition_failed")


def test_publishes_are_conditional(api: Api, topic: str, clients: Clients) -> None:
    api.add(topic, 1)
    socket = clients.ws(api)
    command = {"topic": topic, "records": [{"data": 1}], "if": {"head_seq": 1}}
    assert socket.ask(op="publish", **command)["condition"] == "met"
    refusal = socket.ask(op="publish", request_id="second", **command)
    assert (refusal["op"], refusal["code"]) == ("error", "condition_failed")
    assert (refusal["request_id"], refusal["detail"]["seq"]) == ("second", 2)
    refused_filter = socket.ask(op="publish", **command | {"if": {"none_match": ["Not", "a"]}})
    assert refused_filter["detail"]["field"] == "if.none_match"


def test_of_many_writers_at_one_head_one_is_stored(api: Api, topic: str) -> None:
    api.put(topic, {"durability": "fsync"})
    answers: list[Json] = []

    def write(number: int) -> None:
        answer = api.append(topic, [{"data": number}], **{"if": {"head_seq": 0}})
        answers.append(answer.json() | {"status": answer.status_code})

    writers = [threading.Thread(target=write, args=(number,)) for number in range(12)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert sorted(answer["status"] for answer in answers) == [200] + [409] * 11
    assert {answer["error"]["detail"]["seq"] for answer in answers if "error" in answer} == {1}
    assert len(api.read_all(topic)) == 1


def test_a_large_append_is_conditional(api: Api, topic: str) -> None:
    records = [{"data": "x" * 100_000} for _ in range(12)]
    api.add(topic, 1)
    refused(api.append(topic, records, **{"if": {"head_seq": 0}}), *FAILED)
    assert good(api.append(topic, records, **{"if": {"head_seq": 1}}))["condition"] == "met"


def test_conditions_are_forgotten_by_a_restart_and_their_records_are_not(own: NewServer) -> None:
    server = own()
    api = server.start()
    assert good(_if(api, "t", {"exists": False}, tag="a"))["condition"] == "met"
    assert good(_if(api, "t", {"head_seq": 1}, tag="b"))["condition"] == "met"
    api = server.crash()
    # Replay evaluates no condition: by now `exists: false` and the given `head_seq` no longer hold.
    assert [record["$seq"] for record in api.read_all("t")] == [1, 2]
    assert refused(_if(api, "t", {"none_match": "b"}), *FAILED)["seq"] == 2
    server.stop()


def test_conditions_are_counted(own: NewServer) -> None:
    server = own()
    api = server.start()
    good(_if(api, "t", {"exists": False}))
    refused(_if(api, "t", {"head_seq": 0}), *FAILED)
    refused(_if(api, "t", {"head_seq": 0}), *FAILED)
    lines = api.http.get("/v0/metrics", params={"format": "prometheus"}).text.splitlines()
    counted = [line for line in lines if line.startswith("topics_conditions")]
    assert counted == [
        'topics_conditions_total{outcome="met"} 1.0',
        'topics_conditions_total{outcome="failed"} 2.0',
    ]
    server.stop()


@pytest.mark.parametrize("scopes", ["write", "read+write"])
def test_a_filter_needs_the_right_to_read(own: NewServer, scopes: str) -> None:
    server = own(TOPICS_API_KEYS=f"all,some:{scopes}")
    api = server.start()
    api.http.headers["Authorization"] = "Bearer all"
    api.add("t", 1, tag="secret")
    api.http.headers["Authorization"] = "Bearer some"
    assert good(_if(api, "t", {"head_seq": 1}))["condition"] == "met"
    asked = _if(api, "t", {"none_match": "secret"})
    if scopes == "write":
        assert refused(asked, 403, "forbidden")["scopes"] == ["read"]
    else:
        refused(asked, *FAILED)
    server.stop()
