"""Golden data directories: this server reads the files of older servers byte for byte.

Each vector is the directory of a killed server; see `tests/vectors/make_store.py`. If a vector
fails here, stored bytes changed their meaning: fix the code, never the vector.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from tests.contract.driver import Server, good
from tests.vectors import trace_part
from tests.vectors.consumer_part import holds_of
from tests.vectors.stored import (
    NODE,
    STATE_FIELDS,
    VECTORS,
    Expected,
    consumers_of,
    definition_of,
    node_of,
    opened,
    read_back,
    read_queue,
    router_of,
    unpack,
)
from tests.vectors.stream_part import streams_of
from topics_server.wal.fs import OsFs
from topics_server.wal.tools.dump import verify

NAMES = sorted((path.name for path in VECTORS.glob("store-v*")), key=lambda name: (len(name), name))


@pytest.fixture(params=NAMES)
def stored(request: pytest.FixtureRequest, tmp_path: Path) -> Expected:
    """A copy of one vector in `tmp_path`, and its expected answers."""
    return unpack(VECTORS / request.param, tmp_path)


def problems(folder: Path) -> list[str]:
    """The complaints of `verify`."""
    return verify(OsFs(), str(folder / "data"), str(folder / "cold")).problems


def test_there_is_a_vector_of_every_format_that_was_released() -> None:
    assert [f"store-v{number}" for number in (*range(1, 12), *range(16, 20))] == NAMES


def test_a_golden_directory_verifies_clean(stored: Expected, tmp_path: Path) -> None:
    report = verify(OsFs(), str(tmp_path / "data"), str(tmp_path / "cold"))
    assert report.problems == []
    assert report.counts["segments_cold"] > 0
    assert report.counts["segments_hot"] > 0
    assert report.counts["sealed_deleted"] > 0
    assert report.counts["snapshots"] == 2
    assert report.counts["journal_records"] > 0
    assert report.counts["clean_stop"] == 0, "the server was killed"


@pytest.mark.anyio
async def test_a_golden_directory_is_read_byte_by_byte(stored: Expected, tmp_path: Path) -> None:
    async with opened(tmp_path, stored) as http:
        for name, expected in stored.topics.items():
            assert await read_back(http, name) == expected, name
        for name in stored.absent:
            assert (await http.get(f"/v0/topics/{name}")).status_code == 404, name
    assert problems(tmp_path) == []


@pytest.mark.anyio
async def test_it_reads_the_same_after_a_clean_stop(stored: Expected, tmp_path: Path) -> None:
    async with opened(tmp_path, stored) as http:
        assert (await http.get("/v0/ready")).status_code == 200
    assert verify(OsFs(), str(tmp_path / "data"), str(tmp_path / "cold")).counts["clean_stop"] == 1
    async with opened(tmp_path, stored) as http:
        for name, expected in stored.topics.items():
            assert await read_back(http, name) == expected, name
    assert problems(tmp_path) == []


@pytest.mark.anyio
async def test_stored_sessions_stand_where_their_streams_left_them(
    stored: Expected, tmp_path: Path
) -> None:
    async with node_of(tmp_path, stored) as node:
        assert len(node.sessions) == len(stored.sessions)
        for wid, positions in stored.sessions.items():
            session = node.sessions.find(wid)
            assert session is not None, wid
            assert {name: at.seq for name, at in session.cursors.items()} == positions
            assert session.is_restored
            assert session.options.limit == 7
            assert json.loads(session.filter or "null") == json.loads(
                stored.filters.get(wid, "null")
            )
            assert list(session.prefixes) == stored.prefixes.get(wid, [])
            assert dict(session.acks) == stored.acks.get(wid, {})


@pytest.mark.anyio
async def test_stored_traces_are_told(tmp_path: Path) -> None:
    """The answers of the vector have exactly the traces that were sent to its server."""
    expected = unpack(VECTORS / "store-v19", tmp_path)
    for _ in range(2):
        async with opened(tmp_path, expected) as http:
            for name in expected.topics:
                told = records((await read_back(http, name))["told"])
                traced = [record for record in told if '"$trace":"00-' in str(record)]
                assert len(traced) == trace_part.COUNTS.get(name, 0), name
    assert problems(tmp_path) == []


@pytest.mark.anyio
async def test_stored_keys_still_answer_a_retry(stored: Expected, tmp_path: Path) -> None:
    async with opened(tmp_path, stored) as http:
        for retry in stored.retries:
            target = f"/v0/topics/{retry['topic']}"
            answer = await http.post(target, json=retry["body"], headers=retry["headers"])
            assert answer.json()["deduped"] is True, retry
            assert answer.json()["seqs"] == retry["seqs"], retry


@pytest.mark.anyio
async def test_stored_producers_are_where_they_were(stored: Expected, tmp_path: Path) -> None:
    for _ in range(2):
        async with opened(tmp_path, stored) as http:
            for asked in stored.producers:
                target, body = f"/v0/topics/{asked['topic']}", {"records": [{"data": "again"}]}
                answer = await http.post(target, json=body, headers=asked["headers"])
                assert answer.status_code == asked["status"], asked
                for name, value in asked["told"].items():
                    assert answer.headers[name] == value, asked


@pytest.mark.anyio
async def test_stored_views_are_defined_and_built_anew(stored: Expected, tmp_path: Path) -> None:
    """A vector has no files of views: each view is built again from its topic."""
    for _ in range(2):
        async with opened(tmp_path, stored) as http:
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
    assert problems(tmp_path) == []


@pytest.mark.anyio
async def test_stored_streams_are_what_they_were(stored: Expected, tmp_path: Path) -> None:
    for _ in range(2):
        async with opened(tmp_path, stored) as http:
            if stored.streams:
                assert await streams_of(http) == stored.streams
                gone = await http.put("/v1/stream/s-gone", headers={"Content-Type": "text/plain"})
                assert gone.status_code == 409
                low = await http.post(
                    "/v1/stream/s/b%20y",
                    content=b"x",
                    headers={"Content-Type": "application/x-bytes", "Stream-Seq": "tai"},
                )
                assert low.status_code == 409
    assert problems(tmp_path) == []


@pytest.mark.anyio
async def test_stored_leases_are_held_still(stored: Expected, tmp_path: Path) -> None:
    for _ in range(2):
        async with opened(tmp_path, stored) as http:
            for name, expected in stored.queues.items():
                assert await read_queue(http, name) == expected, name
    async with opened(tmp_path, stored) as http:
        for name, expected in stored.queues.items():
            for lease in expected["leases"]:
                call = {"node": NODE, "seqs": [lease["seq"]], "lease_ids": [lease["lease_id"]]}
                answer = await http.post(f"/v0/topics/{name}/ack", json=call)
                assert answer.json()["acked"] == 1, (name, lease)
    assert problems(tmp_path) == []


@pytest.mark.anyio
async def test_stored_routers_stand_where_they_stood_and_go_on(
    stored: Expected, tmp_path: Path
) -> None:
    for _ in range(2):
        async with opened(tmp_path, stored) as http:
            listed = (await http.get("/v0/routers")).json()["routers"]
            assert [row["router"] for row in listed] == sorted(stored.routers)
            for name, expected in stored.routers.items():
                # A cursor that moved without a copy since the snapshot reaches the same position
                # again.
                for _ in range(1000):
                    found = router_of(await http.get(f"/v0/routers/{name}"))
                    if found["cursor_seq"] == expected["cursor_seq"]:
                        break
                    await asyncio.sleep(0.005)
                assert found | {"state": ""} == expected | {"state": ""}, name
    if not stored.routers:
        return
    async with opened(tmp_path, stored) as http:
        before = await read_back(http, "r-all")
        await http.post("/v0/topics/r-source", json={"records": [{"data": "later"}]})
        for _ in range(1000):
            after = await read_back(http, "r-all")
            if after != before:
                break
            await asyncio.sleep(0.005)
        assert records(after["told"][:-1]) == records(before["told"])
        assert '"data":"later"' in after["told"][-1]
    assert problems(tmp_path) == []


@pytest.mark.anyio
async def test_stored_tags_still_find_their_records(stored: Expected, tmp_path: Path) -> None:
    async with opened(tmp_path, stored) as http:
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
    assert problems(tmp_path) == []


def is_hit(told: object, match: object) -> bool:
    """Whether a record in an answer has a tag that the match of a delete hits."""
    if not isinstance(told, str) or '"$tag":"' not in told:
        return False
    tag = told.split('"$tag":"', 1)[1].split('"', 1)[0]
    return tag == match if isinstance(match, str) else tag.startswith(str(match[2])[:-1])  # type: ignore[index]


@pytest.mark.anyio
async def test_heads_jump_and_records_stay_when_the_boot_is_another_one(
    stored: Expected, tmp_path: Path
) -> None:
    async with opened(tmp_path, stored, boot_id="22222222-2222-4222-8222-222222222222") as http:
        for name, expected in stored.topics.items():
            found = await read_back(http, name)
            # Only the tombstone of a power cut is new: its reserved seqs are a gap.
            assert records(found["told"]) == records(expected["told"]), name
            assert found["state"]["head_seq"] >= expected["state"]["head_seq"], name
    assert problems(tmp_path) == []


def records(told: list[object]) -> list[object]:
    """The records of a topic's answers, without tombstones."""
    return [item for item in told if isinstance(item, str)]


def test_a_real_server_serves_a_golden_directory(stored: Expected, tmp_path: Path) -> None:
    environment = {**stored.environment, "TOPICS_COLD_DIR": str(tmp_path / "cold")}
    server = Server(tmp_path, environment)
    api = server.start()
    try:
        for name, expected in stored.topics.items():
            state = good(api.state(name))
            assert set(STATE_FIELDS) <= set(state)
            assert state["config"] == expected["state"]["config"], name
            found = [record["$seq"] for record in api.read_all(name)]
            # This clock is later than the vector's, but its topics with a TTL are empty.
            assert len(found) == len(records(expected["told"])), name
    finally:
        server.stop()
    assert problems(tmp_path) == []


@pytest.mark.anyio
async def test_stored_consumers_are_where_they_were(stored: Expected, tmp_path: Path) -> None:
    for _ in range(2):
        async with opened(tmp_path, stored) as http:
            for topic, consumers in stored.consumers.items():
                found = await http.get(f"/v0/topics/{topic}/consumers")
                assert consumers_of(found.json()) == consumers
                if topic in stored.holds:
                    assert holds_of(found.json()) == stored.holds[topic]
