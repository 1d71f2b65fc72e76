"""Everything that a store keeps beside its records comes back from a backup."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

from tests.contract.conftest import NewServer
from tests.contract.driver import Api, Json, eventually, good, refused
from topics_server.archive.object_store import FolderStore
from topics_server.archive.restore import restore
from topics_server.wal.fs import OsFs

STREAM = "/v1/stream/s"
KEY = {"Idempotency-Key": "k-1"}
PRODUCER = {"Producer-Id": "p", "Producer-Epoch": "4", "Producer-Seq": "0"}
JSON = {"Content-Type": "application/json"}


def filled(api: Api) -> dict[str, Any]:
    """Make one of each kind of state; returns what clients remember of it."""
    api.put("t", {"durability": "fsync"})
    good(api.http.put("/v0/routers/r", json={"source": "t", "dest": "copies"}))
    api.add("t", *range(5), tag="x")
    good(api.http.put("/v0/topics/t/consumers/c", json={"from": "earliest"}))
    good(api.http.post("/v0/topics/t/consumers/c/commit", json={"seq": 3}))
    good(api.http.post("/v0/topics/t", json={"records": [{"data": "keyed"}]}, headers=KEY))
    good(api.http.post("/v0/topics/t", json={"records": [{"data": "p"}]}, headers=PRODUCER))
    eventually(lambda: len(api.read_all("copies")) == 7, "the router copies")
    api.put("jobs", {"type": "queue", "leases_durable": True})
    api.add("jobs", *range(4))
    claimed = good(
        api.http.post("/v0/topics/jobs/claim", json={"node": "w", "max": 2, "lease_ms": 600_000})
    )
    good(
        api.http.put("/v0/topics/t/views/v", json={"shortcut": {"count_by_tag": True}}),
    )
    for path, headers in (
        (STREAM, JSON),
        ("/v1/stream/f", {**JSON, "Stream-Forked-From": STREAM}),
    ):
        assert api.http.put(path, headers=headers).status_code == 201
        if path == STREAM:
            assert api.http.post(path, headers=JSON, json=[1, 2]).status_code == 204
    assert api.http.post(STREAM, headers={**JSON, "Stream-Closed": "true"}).status_code == 204
    session = good(api.http.post("/v0/watch", json={"topics": {"t": {"from_seq": 1}}}))
    api.put("gone")
    epoch = api.get_state("gone")["epoch"]
    api.drop("gone")
    return {"claimed": claimed, "session": session, "epoch": epoch, "state": api.get_state("t")}


def backed_up(api: Api) -> None:
    good(api.http.post("/v0/admin/backup"))
    eventually(lambda: good(api.http.get("/v0/admin/backup"))["status"] != "running", "it ends", 60)
    assert good(api.http.get("/v0/admin/backup"))["status"] == "done"


def test_everything_beside_the_records_is_restored(own: NewServer, tmp_path: Path) -> None:
    folder = tmp_path / "backups"
    folder.mkdir()
    server = own(TOPICS_BACKUP_DIR=str(folder))
    api = server.start()
    known = filled(api)
    shown = _shown(api)
    backed_up(api)
    # Records of the history that ends here.
    later = api.add("t", "later")["first_seq"]
    good(api.http.post("/v0/topics/t/consumers/c/commit", json={"seq": later}))
    server.signal(signal.SIGKILL)
    fs = OsFs()
    restore(fs, FolderStore.open(fs, str(folder), write=False), str(tmp_path / "restored"))
    api = own(TOPICS_DATA_DIR=str(tmp_path / "restored")).start()
    assert _shown(api) == shown
    # A request that is sent again counts once, and workers still hold their leases.
    again = good(api.http.post("/v0/topics/t", json={"records": [{"data": "keyed"}]}, headers=KEY))
    assert again["first_seq"] == 6
    answer = api.http.post("/v0/topics/t", json={"records": [{"data": "p"}]}, headers=PRODUCER)
    assert answer.status_code == 204
    stale = {**PRODUCER, "Producer-Epoch": "3"}
    answer = api.http.post("/v0/topics/t", json={"records": [{"data": "p"}]}, headers=stale)
    refused(answer, 403, "producer_fenced")
    leases = [job["lease_id"] for job in known["claimed"]["claimed"]]
    acked = good(
        api.http.post(
            "/v0/topics/jobs/ack", json={"node": "w", "seqs": [1, 2], "lease_ids": leases}
        )
    )
    assert acked["acked"] == 2
    claimed = good(api.http.post("/v0/topics/jobs/claim", json={"node": "w", "max": 9}))
    assert [job["$seq"] for job in claimed["claimed"]] == [3, 4]
    # A new history: readers of the old one get tombstones of lost records, and no seq is reused.
    page = api.read("t", from_seq=8)
    assert page["records"] == []
    gap = page["tombstone"]
    assert gap["reason"] == "damaged"
    assert 8 <= gap["gap_from"] <= later + 1
    assert gap["gap_to"] == page["head_seq"] > later
    assert api.add("t", "new")["first_seq"] > later
    api.put("gone")
    assert api.get_state("gone")["epoch"] > known["epoch"]
    with api.http.stream("GET", known["session"]["stream_url"]) as stream:
        assert stream.status_code == 200


def _shown(api: Api) -> Json:
    """The store as clients see it, without the timings in the answers."""
    view = good(api.http.get("/v0/topics/t/views/v/query/all?after=7"))
    router = good(api.http.get("/v0/routers/r"))
    stream = api.http.head(STREAM).headers
    return {
        "consumer": good(api.http.get("/v0/topics/t/consumers/c"))["seq"],
        "router": {name: router[name] for name in ("source", "dest")},
        "copies": [record["data"] for record in api.read_all("copies")],
        "jobs": api.get_state("jobs")["queue"],
        # The view may be further ahead, because it passes the seqs that the restore skips.
        "view": (view["processed_sequence"] >= 7, view["rows"]),
        "stream": api.http.get(STREAM, params={"offset": "-1"}).text,
        "fork": api.http.get("/v1/stream/f", params={"offset": "-1"}).text,
        "end": (stream["stream-next-offset"], stream["stream-closed"]),
    }
