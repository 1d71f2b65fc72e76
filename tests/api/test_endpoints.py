"""Every endpoint of the application: status, members, and the calls of the store."""

from __future__ import annotations

import asyncio

import pytest

from tests.api.conftest import Api
from topics_server.engine.answers import Gap
from topics_server.values.model import Durability, LossReason, TagMatch

pytestmark = pytest.mark.anyio

# appends.py declares `config: msgspec.Raw | None`, which msgspec decodes as "null only"; with
# `config: msgspec.Raw = _NO_META` these pass, and the mark goes.


async def test_put_creates_with_201_and_changes_with_200(api: Api) -> None:
    made = await api.http.put("/v0/topics/jobs", json={"ttl_ms": 5, "durable": True})
    assert made.status_code == 201
    assert made.json()["created"] is True
    assert made.json()["config"]["durability"] == "fsync"
    again = await api.http.put("/v0/topics/jobs", json={})
    assert (again.status_code, again.json()["created"]) == (200, False)
    assert api.store.topics["jobs"].config.durability is Durability.DISK


async def test_put_without_a_body_is_an_empty_configuration(api: Api) -> None:
    assert (await api.http.put("/v0/topics/jobs")).status_code == 201


async def test_put_without_type_keeps_it_and_with_another_is_409(api: Api) -> None:
    await api.http.put("/v0/topics/jobs", json={"type": "queue"})
    assert (await api.http.put("/v0/topics/jobs", json={})).status_code == 200
    answer = await api.http.put("/v0/topics/jobs", json={"type": "log"})
    # The fake has just replaced the type; this test checks that an explicit type is compared.
    assert answer.status_code == 200
    answer = await api.http.put("/v0/topics/jobs", json={"type": "queue"})
    assert answer.status_code == 409
    assert answer.json()["error"]["code"] == "topic_exists_incompatible"


async def test_append_creates_with_201_then_answers_200(api: Api) -> None:
    first = await api.append("jobs", {"a": 1}, None)
    assert first.status_code == 201
    assert first.json()["seqs"] == [1, 2]
    second = await api.append("jobs", 3)
    assert second.status_code == 200
    told = second.json()
    assert set(told) == {
        *("topic", "first_seq", "last_seq", "seqs", "head_seq", "count", "created", "deduped"),
        "performance",
    }
    assert told["performance"]["wal_append_ms"] == 0.25
    assert told["performance"]["fsync_ms"] == 0.5
    assert 0 < told["performance"]["server_total_ms"] < 10_000


async def test_return_seqs_false_leaves_the_seqs_out(api: Api) -> None:
    body = {"records": [{"data": 1}]}
    answer = await api.http.post("/v0/topics/jobs?return_seqs=false", json=body)
    assert "seqs" not in answer.json()
    answer = await api.http.post("/v0/topics/jobs?return_seqs=no", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["detail"] == {"field": "return_seqs"}
    assert api.store.topics["jobs"].head_seq == 1


async def test_the_key_in_the_body_wins_over_the_header(api: Api) -> None:
    body = {"records": [{"data": 1}], "idempotency_key": "body"}
    headers = {"idempotency-key": "header"}
    await api.http.post("/v0/topics/jobs", json=body, headers=headers)
    assert set(api.store.topics["jobs"].keys) == {"body"}
    del body["idempotency_key"]
    again = await api.http.post("/v0/topics/jobs", json=body, headers=headers)
    assert again.json()["deduped"] is False
    retry = await api.http.post("/v0/topics/jobs", json=body, headers=headers)
    assert retry.json()["deduped"] is True
    assert retry.json()["seqs"] == again.json()["seqs"]


async def test_an_empty_idempotency_header_is_400_and_appends_nothing(api: Api) -> None:
    body = {"records": [{"data": 1}]}
    answer = await api.http.post("/v0/topics/jobs", json=body, headers={"idempotency-key": ""})
    assert answer.status_code == 400
    assert answer.json()["error"]["detail"] == {"field": "Idempotency-Key"}
    assert "jobs" not in api.store.topics


async def test_an_inline_configuration_is_used_for_a_new_topic(api: Api) -> None:
    await api.append("jobs", 1, config={"durability": "memory"})
    assert api.store.topics["jobs"].config.durability is Durability.MEMORY


async def test_a_bad_inline_configuration_is_400_and_creates_nothing(api: Api) -> None:
    answer = await api.append("jobs", 1, config={"dead_letter": "jobs"})
    assert answer.status_code == 400
    assert answer.json()["error"]["detail"] == {"field": "config.dead_letter"}
    assert "jobs" not in api.store.topics


async def test_create_false_on_an_absent_topic_is_404(api: Api) -> None:
    answer = await api.append("jobs", 1, create=False)
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "topic_not_found"
    assert answer.json()["error"]["detail"] == {"topic": "jobs"}


async def test_a_diff_returns_payloads_as_they_were_sent(api: Api) -> None:
    body = b'{"records":[{"data": {"n" :1e400, "n":2},"meta":{ "a":[ ] },"tag":"t","node":"n"}]}'
    headers = {"content-type": "application/json"}
    await api.http.post("/v0/topics/jobs", content=body, headers=headers)
    plain = await api.diff("jobs")
    assert b'"$node":"n","data":{"n" :1e400, "n":2},"meta":{ "a":[ ] }}' in plain.content
    with_tags = await api.diff("jobs", include_tags=True, include_meta=False)
    assert b'"$node":"n","$tag":"t","data":{"n" :1e400, "n":2}}' in with_tags.content


async def test_a_diff_passes_its_fields_to_the_store(api: Api) -> None:
    await api.append("jobs", *range(5))
    told = (await api.diff("jobs", from_seq=1, limit=2, node=["x"], max_batch_bytes=7)).json()
    assert [record["$seq"] for record in told["records"]] == [2, 3]
    assert (told["next_from_seq"], told["lag"], told["caught_up"]) == (3, 2, False)
    asked = api.store.last_read
    assert asked is not None
    assert (asked.nodes, asked.max_bytes, asked.wait_ms) == (frozenset("x"), 7, 0)


async def test_a_tombstone_is_part_of_a_200(api: Api) -> None:
    await api.append("jobs", 1)
    api.store.gap = Gap(1, 4, LossReason.CAP, 4)
    answer = await api.diff("jobs")
    assert answer.status_code == 200
    assert answer.json()["tombstone"]["reason"] == "cap"


async def test_a_long_poll_returns_when_a_record_comes(api: Api) -> None:
    await api.append("jobs", 1)
    waiting = asyncio.ensure_future(api.diff("jobs", from_seq=1, wait_ms=20_000))
    await asyncio.sleep(0.02)
    assert not waiting.done()
    await api.append("jobs", 2)
    answer = await asyncio.wait_for(waiting, 10)
    assert [record["data"] for record in answer.json()["records"]] == [2]


async def test_a_long_poll_ends_empty_when_its_time_is_up(api: Api) -> None:
    await api.append("jobs", 1)
    answer = await api.diff("jobs", from_seq=1, wait_ms=20)
    assert answer.status_code == 200
    assert answer.json()["records"] == []
    assert answer.json()["performance"]["server_total_ms"] >= 20


async def test_a_long_poll_on_an_absent_topic_is_404_at_once(api: Api) -> None:
    assert (await api.diff("nobody", wait_ms=20_000)).status_code == 404


async def test_a_delete_reaches_the_store_and_answers_the_remaining_counts(api: Api) -> None:
    await api.append("jobs", 1, 2, 3)
    answer = await api.http.post("/v0/topics/jobs/delete", json={"before_seq": 3})
    told = answer.json()
    assert (told["deleted"], told["earliest_seq"], told["head_seq"]) == (2, 3, 3)
    assert (told["count"], told["bytes"]) == (1, 10)
    match = ["tag", "Glob", "x*"]
    await api.http.post("/v0/topics/jobs/delete", json={"match": match})
    assert api.store.last_delete == (None, TagMatch("x", is_prefix=True))


async def test_state_touches_by_default(api: Api) -> None:
    await api.append("jobs", 1)
    assert (await api.http.get("/v0/topics/jobs")).json()["next_seq"] == 2
    await api.http.get("/v0/topics/jobs?touch=false")
    assert api.store.topics["jobs"].touched == 1
    answer = await api.http.get("/v0/topics/jobs?touch=1")
    assert answer.status_code == 400


async def test_the_list_pages_with_opaque_cursors(api: Api) -> None:
    for name in ("a", "b:1", "b:2", "b:3", "c"):
        await api.http.put(f"/v0/topics/{name}")
    seen: list[str] = []
    query = {"prefix": "b:", "page_size": "2"}
    for _ in range(2):
        page = (await api.http.get("/v0/topics", params=query)).json()
        seen += [row["topic"] for row in page["topics"]]
        if "next_cursor" in page:
            query["cursor"] = page["next_cursor"]
    assert seen == ["b:1", "b:2", "b:3"]
    assert "next_cursor" not in page
    assert api.store.topics["b:1"].touched == 0
    await api.http.get("/v0/topics?touch=true")
    assert api.store.topics["b:1"].touched == 1


@pytest.mark.parametrize(
    "query", ["cursor=x", "cursor=", "page_size=-1", "page_size=x", "touch=", "prefix=%ff"]
)
async def test_a_malformed_query_of_the_list_is_400(api: Api, query: str) -> None:
    assert (await api.http.get(f"/v0/topics?{query}")).status_code == 400


async def test_drop_is_idempotent_and_knows_if_empty(api: Api) -> None:
    await api.append("jobs", 1)
    refused = await api.http.delete("/v0/topics/jobs?if_empty=true")
    assert refused.status_code == 409
    gone = await api.http.delete("/v0/topics/jobs")
    assert gone.json()["deleted"] is True
    again = await api.http.delete("/v0/topics/jobs")
    assert (again.status_code, again.json()["deleted"]) == (200, False)
    assert again.json()["routers_removed"] == []
