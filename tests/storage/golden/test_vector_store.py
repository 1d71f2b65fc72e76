"""Golden data directories: this server reads the files of older servers byte for byte.

Each vector is the directory of a killed server; see `tests/vectors/make_store.py`. If a vector
fails here, stored bytes changed their meaning: fix the code, never the vector.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.contract.driver import Server, good
from tests.storage.golden.conftest import NAMES, problems, records
from tests.vectors import trace_part
from tests.vectors.consumer_part import holds_of
from tests.vectors.stored import (
    NODE,
    STATE_FIELDS,
    VECTORS,
    Expected,
    consumers_of,
    node_of,
    opened,
    read_back,
    read_queue,
    unpack,
)
from topics_server.wal.fs import OsFs
from topics_server.wal.tools.dump import verify


def test_there_is_a_vector_of_every_format_that_was_released() -> None:
    assert [f"store-v{number}" for number in (*range(1, 12), *range(16, 22))] == NAMES


def test_a_golden_directory_verifies_clean(stored: Expected, folder: Path) -> None:
    report = verify(OsFs(), str(folder / "data"), str(folder / "cold"))
    assert report.problems == []
    assert report.counts["segments_cold"] > 0
    assert report.counts["segments_hot"] > 0
    assert report.counts["sealed_deleted"] > 0
    assert report.counts["snapshots"] == 2
    assert report.counts["journal_records"] > 0
    assert report.counts["clean_stop"] == 0, "the server was killed"


@pytest.mark.anyio
async def test_a_golden_directory_is_read_byte_by_byte_and_again_after_clean_stops(
    stored: Expected, folder: Path
) -> None:
    """Records, consumers and leases; at last each lease that is held still acknowledges its job."""
    for starts in range(2):
        counts = verify(OsFs(), str(folder / "data"), str(folder / "cold")).counts
        assert counts["clean_stop"] == starts
        async with opened(folder, stored) as http:
            for name, expected in stored.topics.items():
                assert await read_back(http, name) == expected, name
            for name in stored.absent:
                assert (await http.get(f"/v0/topics/{name}")).status_code == 404, name
            for name, consumers in stored.consumers.items():
                found = await http.get(f"/v0/topics/{name}/consumers")
                assert consumers_of(found.json()) == consumers
                if name in stored.holds:
                    assert holds_of(found.json()) == stored.holds[name]
            for name, expected in stored.queues.items():
                assert await read_queue(http, name) == expected, name
        assert problems(folder) == []
    if not stored.queues:
        return
    async with opened(folder, stored) as http:
        for name, expected in stored.queues.items():
            for lease in expected["leases"]:
                call = {"node": NODE, "seqs": [lease["seq"]], "lease_ids": [lease["lease_id"]]}
                answer = await http.post(f"/v0/topics/{name}/ack", json=call)
                assert answer.json()["acked"] == 1, (name, lease)
    assert problems(folder) == []


@pytest.mark.anyio
async def test_stored_sessions_stand_where_their_streams_left_them(
    stored: Expected, folder: Path
) -> None:
    async with node_of(folder, stored) as node:
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
async def test_stored_traces_are_told(folder: Path) -> None:
    """The answers of the vector have traces wherever its server was sent some, and no others."""
    expected = unpack(VECTORS / "store-v19", folder)
    for _ in range(2):
        async with opened(folder, expected) as http:
            for name in expected.topics:
                told = records((await read_back(http, name))["told"])
                traced = [record for record in told if '"$trace":"00-' in str(record)]
                assert len(traced) == trace_part.COUNTS.get(name, 0), name
    assert problems(folder) == []


@pytest.mark.anyio
async def test_heads_jump_and_records_stay_when_the_boot_is_another_one(
    stored: Expected, folder: Path
) -> None:
    async with opened(folder, stored, boot_id="22222222-2222-4222-8222-222222222222") as http:
        for name, expected in stored.topics.items():
            found = await read_back(http, name)
            # The records are the same. The reserved seqs were skipped, so readers get a tombstone.
            assert records(found["told"]) == records(expected["told"]), name
            assert found["state"]["head_seq"] >= expected["state"]["head_seq"], name
    assert problems(folder) == []


def test_a_real_server_serves_a_golden_directory(stored: Expected, folder: Path) -> None:
    environment = {**stored.environment, "TOPICS_COLD_DIR": str(folder / "cold")}
    server = Server(folder, environment)
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
    assert problems(folder) == []
