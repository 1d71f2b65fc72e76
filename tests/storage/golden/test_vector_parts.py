"""The parts of golden data directories beside records: producers, views, streams, routers, and what
only stored keys and tags can answer. See `test_vector_store`.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.storage.golden.conftest import problems, records, with_some
from tests.vectors.stored import Expected, definition_of, opened, read_back, router_of
from tests.vectors.stream_part import streams_of


@with_some("producers")
@pytest.mark.anyio
async def test_stored_producers_are_where_they_were(stored: Expected, folder: Path) -> None:
    for _ in range(2):
        async with opened(folder, stored) as http:
            for asked in stored.producers:
                target, body = f"/v0/topics/{asked['topic']}", {"records": [{"data": "again"}]}
                answer = await http.post(target, json=body, headers=asked["headers"])
                assert answer.status_code == asked["status"], asked
                for name, value in asked["told"].items():
                    assert answer.headers[name] == value, asked


@with_some("views")
@pytest.mark.anyio
async def test_stored_views_are_defined_and_built_anew(stored: Expected, folder: Path) -> None:
    """A vector has no files of views: each is made again from its topic."""
    for _ in range(2):
        async with opened(folder, stored) as http:
            for path, definition in stored.views.items():
                topic, view = path.split("/")
                url = f"/v0/topics/{topic}/views/{view}"
                found = await http.get(url)
                assert definition_of(found.json()) == definition
                head = stored.topics[topic]["state"]["head_seq"]
                asked = {"query": "all"}
                answer = await http.post(f"{url}/query?after={head}", json=asked)
                assert answer.json()["processed_sequence"] == head
                if view == "rows":
                    seqs = [row[0] for row in answer.json()["rows"]]
                    assert len(seqs) == stored.topics[topic]["state"]["count"]
    assert problems(folder) == []


@with_some("streams")
@pytest.mark.anyio
async def test_stored_streams_are_what_they_were(stored: Expected, folder: Path) -> None:
    for _ in range(2):
        async with opened(folder, stored) as http:
            assert await streams_of(http) == stored.streams
            gone = await http.put("/v1/stream/s-gone", headers={"Content-Type": "text/plain"})
            assert gone.status_code == 409
            low = await http.post(
                "/v1/stream/s/b%20y",
                content=b"x",
                headers={"Content-Type": "application/x-bytes", "Stream-Seq": "tai"},
            )
            assert low.status_code == 409
    assert problems(folder) == []


@pytest.mark.anyio
async def test_stored_routers_stand_where_they_stood_and_go_on(
    stored: Expected, folder: Path
) -> None:
    for is_last in (False, True):
        async with opened(folder, stored) as http:
            listed = (await http.get("/v0/routers")).json()["routers"]
            assert [row["router"] for row in listed] == sorted(stored.routers)
            for name, expected in stored.routers.items():
                # A cursor that moved without a copy since the snapshot gets there again.
                for _ in range(1000):
                    found = router_of(await http.get(f"/v0/routers/{name}"))
                    if found["cursor_seq"] == expected["cursor_seq"]:
                        break
                    await asyncio.sleep(0.005)
                assert found | {"state": ""} == expected | {"state": ""}, name
            if not (is_last and stored.routers):
                continue
            before = await read_back(http, "r-all")
            await http.post("/v0/topics/r-source", json={"records": [{"data": "later"}]})
            for _ in range(1000):
                after = await read_back(http, "r-all")
                if after != before:
                    break
                await asyncio.sleep(0.005)
            assert records(after["told"][:-1]) == records(before["told"])
            assert '"data":"later"' in after["told"][-1]
    assert problems(folder) == []


@pytest.mark.anyio
async def test_stored_keys_still_answer_a_retry(stored: Expected, folder: Path) -> None:
    async with opened(folder, stored) as http:
        for retry in stored.retries:
            target = f"/v0/topics/{retry['topic']}"
            answer = await http.post(target, json=retry["body"], headers=retry["headers"])
            assert answer.json()["deduped"] is True, retry
            assert answer.json()["seqs"] == retry["seqs"], retry


@pytest.mark.anyio
async def test_stored_tags_still_find_their_records(stored: Expected, folder: Path) -> None:
    async with opened(folder, stored) as http:
        for delete in stored.deletes:
            name = delete["topic"]
            before = stored.topics[name]["state"]["count"]
            hit = [told for told in stored.topics[name]["told"] if is_hit(told, delete["match"])]
            assert hit, "the vector has records of this tag"
            target = f"/v0/topics/{name}/delete"
            answer = (await http.post(target, json={"match": delete["match"]})).json()
            assert answer["deleted"] == len(hit), delete
            assert answer["count"] == before - len(hit), delete
            after = await read_back(http, name)
            assert not [told for told in after["told"] if is_hit(told, delete["match"])]
    assert problems(folder) == []


def is_hit(told: object, match: object) -> bool:
    """Whether a record in an answer has a tag that the match of a delete hits."""
    if not isinstance(told, str) or '"$tag":"' not in told:
        return False
    tag = told.split('"$tag":"', 1)[1].split('"', 1)[0]
    return tag == match if isinstance(match, str) else tag.startswith(str(match[2])[:-1])  # type: ignore[index]
