"""Traces survive: kills and replay, sealing, checkpoints, backups, deleted neighbours."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.contract.conftest import NewServer
from tests.contract.driver import Api, eventually, good
from tests.contract.operation.test_archive import archived, restored
from tests.contract.traces.traced import LARGE_BYTES, OTHER, TRACE, add, kept, large_text
from topics_server.wal.fs import OsFs
from topics_server.wal.tools.dump import dump, verify

NAMES = ("t", "t-copies", "jobs", "dead", "large", "stream", "memory")


def filled(api: Api) -> None:
    """Append records with a trace in every form in which the server stores them."""
    good(api.put("memory", {"durability": "memory"}))
    good(api.put("jobs", {"type": "queue", "max_deliveries": 1, "dead_letter": "dead"}))
    body = {"source": "t", "dest": "t-copies", "guarantee": "exactly_once"}
    good(api.http.put("/v0/routers/t->t-copies", json=body))
    for number in range(60):
        add(api, "t", [{"data": number, "meta": {"n": number}}], (TRACE, None, OTHER)[number % 3])
    add(api, "t", [{"data": 60}, {"data": 61}], idempotency_key="k", idempotency="per_record")
    add(api, "large", [{"data": large_text(LARGE_BYTES)}, {"data": 2, "meta": {"m": 1}}])
    add(api, "memory", [{"data": 1}])
    sent = {"content-type": "image/png", "traceparent": TRACE}
    assert api.http.put("/v1/stream/stream", content=b"\x89", headers=sent).status_code == 201
    add(api, "jobs", [{"data": 1}])
    claim = {"node": "w", "lease_ms": 600_000}
    claimed = good(api.http.post("/v0/topics/jobs/claim", json=claim))["claimed"]
    seqs = [job["$seq"] for job in claimed]
    good(api.http.post("/v0/topics/jobs/nack", json={"node": "w", "seqs": seqs}))
    good(api.http.post("/v0/topics/jobs/claim", json=claim))
    eventually(lambda: api.get_state("jobs")["queue"]["dead_lettered"] == 1, "it is a dead letter")
    add(api, "jobs", [{"data": 2}], OTHER)
    eventually(lambda: api.get_state("t-copies")["head_seq"] == 62, "the copies are there")


def all_kept(api: Api) -> dict[str, object]:
    """Data, meta and traces of all topics."""
    return {name: kept(api, name) for name in NAMES}


def seal(api: Api) -> None:
    """Seal everything that can be."""
    good(api.http.post("/v0/admin/seal"))


@pytest.mark.parametrize("is_sealed", [False, True])
def test_a_killed_server_has_them_again(own: NewServer, is_sealed: bool) -> None:
    server = own(TOPICS_CHECKPOINT_INTERVAL_MS="3600000")
    api = server.start()
    filled(api)
    before = all_kept(api)
    assert any(TRACE in str(records) for records in before.values())
    if is_sealed:
        seal(api)
        assert all_kept(api) == before
    api = server.crash()
    assert all_kept(api) == before
    # The snapshot of a clean stop has the traces.
    api = server.restart()
    assert all_kept(api) == before
    seal(api)
    api = server.restart()
    assert all_kept(api) == before
    server.signal(signal.SIGKILL)
    assert verify(OsFs(), str(server.data_dir)).problems == []
    told = [item for item in dump(OsFs(), str(server.data_dir)) if item.get("topic") == "t"]
    assert [item.get("trace") for item in told if "seq" in item][:3] == [TRACE, None, OTHER]


def test_deleted_neighbours_leave_the_others_as_they_are(own: NewServer) -> None:
    server = own()
    api = server.start()
    for number in range(80):
        add(api, "t", [{"data": number, "tag": f"k{number % 2}", "meta": {"n": number}}])
    sent = {"content-type": "image/png", "traceparent": TRACE}
    assert api.http.put("/v1/stream/s", content=b"\x00", headers=sent).status_code == 201
    for number in range(1, 80):
        assert api.http.post("/v1/stream/s", content=bytes([number]), headers=sent).is_success
    good(api.delete("t", match="k0"))
    good(api.delete("s", before_seq=40))
    before = kept(api, "t"), kept(api, "s")
    assert (len(before[0]), len(before[1])) in {(40, 40), (40, 41)}
    seal(api)
    assert (kept(api, "t"), kept(api, "s")) == before
    good(api.delete("t", before_seq=60))
    after = kept(api, "t"), kept(api, "s")
    assert (kept(server.crash(), "t"), kept(server.api, "s")) == after


def test_an_archive_gives_them_back(own: NewServer, tmp_path: Path) -> None:
    folder = tmp_path / "archive"
    folder.mkdir()
    server = own(TOPICS_ARCHIVE_URL=f"file://{folder}")
    api = server.start()
    filled(api)
    seal(api)
    add(api, "t", [{"data": "not sealed"}], OTHER)
    eventually(lambda: api.get_state("t-copies")["head_seq"] == 63, "its copy is there")
    before = all_kept(api)
    archived(api)
    server.signal(signal.SIGKILL)
    restored(folder, tmp_path / "restored")
    api = own(TOPICS_DATA_DIR=str(tmp_path / "restored")).start()
    assert all_kept(api) == before
