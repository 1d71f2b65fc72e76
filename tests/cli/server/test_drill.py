"""`topics backups drill`: a good backup passes, a bad one does not, and nothing stays behind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import MakeServer, Ran, Topics
from tests.contract.driver import Api, Server, eventually, good
from topics_server.cli.backups import drill as drills
from topics_server.wal.fs import OsFs
from topics_server.wal.tools.dump import dump


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "backups"
    made.mkdir()
    return made


@pytest.fixture
def scratch(tmp_path: Path) -> Path:
    made = tmp_path / "scratch"
    made.mkdir()
    return made


@pytest.fixture
def server(own: MakeServer, folder: Path) -> Server:
    return own({"TOPICS_BACKUP_DIR": str(folder), "TOPICS_SEGMENT_MAX_EVENTS": "10"})


def fill(api: Api) -> None:
    """Topics of every kind: sealed and unsealed, with deletes, queues, routers and bytes."""
    api.put("t", {"durability": "fsync"})
    for number in range(0, 40, 8):
        api.append("t", [{"data": {"n": n}, "tag": f"t{n}"} for n in range(number, number + 8)])
    api.delete("t", before_seq=5)
    api.delete("t", match="t20")
    api.put("capped", {"cap_records": 5})
    for number in range(20):
        api.add("capped", number)
    api.put("q", {"type": "queue"})
    api.add("q", *range(6))
    api.http.post("/v0/topics/q/claim", json={"node": "w", "max": 2})
    api.put("old", {"ttl_ms": 3_600_000})
    api.add("old", 1, 2)
    api.put("soft", {"durability": "ephemeral"})
    api.add("soft", 1)
    api.put("empty")
    api.http.put("/v0/routers/r", json={"source": "t", "dest": "copies", "from": "earliest"})
    media = {"content-type": "application/octet-stream"}
    api.http.put("/v1/stream/blob", headers=media)
    api.http.post("/v1/stream/blob", headers=media, content=b"\x00\xff")
    api.http.post("/v0/admin/seal", json={"topics": ["t", "capped"]})
    api.add("t", {"n": 40}, {"n": 41})
    api.delete("t", match="t30")


def drilled(topics: Topics, *words: str | Path) -> tuple[Ran, dict[str, Any]]:
    ran = topics("backups", "drill", *words, "--json")
    found: dict[str, Any] = json.loads(ran.out)
    return ran, found


def test_a_good_backup_comes_back(
    server: Server, folder: Path, scratch: Path, alone: Topics
) -> None:
    api = server.start()
    fill(api)
    topics = len(api.topics().json()["topics"])
    alone.good("backup", "--url", api.url)
    api.add("t", "later")
    ran, found = drilled(alone, folder, "--scratch", scratch)
    assert (ran.code, found["problems"], ran.err) == (0, [], "")
    assert (found["backup"], found["topics"]) == (1, topics)
    assert found["records"] > 60
    assert list(scratch.iterdir()) == []
    # The same backup gives the same hash, another backup another hash.
    _, again = drilled(alone, folder, "--scratch", scratch, "--backup", "1")
    assert again["hash"] == found["hash"]
    alone.good("backup", "--url", api.url)
    _, newest = drilled(alone, folder, "--scratch", scratch)
    assert newest["backup"] == 2
    assert newest["hash"] != found["hash"]
    line = alone.good("backups", "drill", folder, "--scratch", scratch, "--table").out.decode()
    assert line.startswith("backup 2 of ")
    assert line.endswith(": all came back\n")
    assert line.count("\n") == 1


def test_damage_is_told_and_the_scratch_folder_goes(
    server: Server, folder: Path, scratch: Path, alone: Topics
) -> None:
    api = server.start()
    fill(api)
    alone.good("backup", "--url", api.url)
    server.stop()
    path = next(folder.rglob("snapshot"))
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    ran = alone("backups", "drill", folder, "--scratch", scratch)
    assert (ran.code, ran.out) == (1, b"")
    assert ran.message.startswith("the drill failed: ")
    assert "snapshot: fails its check" in ran.message
    assert list(scratch.iterdir()) == []


def test_what_a_server_shows_is_compared_with_the_files(
    server: Server, folder: Path, scratch: Path, alone: Topics, monkeypatch: pytest.MonkeyPatch
) -> None:
    api = server.start()
    fill(api)
    alone.good("backup", "--url", api.url)
    server.stop()

    def fewer(*args: Any) -> Any:
        """Remove a record of one topic, and change a record of another."""
        for item in dump(*args):
            if item["topic"] == "q" and item["seq"] == 2:
                continue
            if item["topic"] == "t" and item["seq"] == 7:
                item = {**item, "tag": "other"}
            yield item
        yield {"topic": "lost", "seq": 1, "ts": 1, "tag": None, "data": b"1", "deleted": False}

    monkeypatch.setattr(drills, "dump", fewer)
    found = drills.drilled(
        OsFs(), scratch, 60_000, lambda data: drills.from_folder(str(folder), data, None)
    )
    assert found.problems == [
        "topic lost is missing in the restored server",
        "topic q has 6 records, and 5 in the files",
        "topic t has other records than the files",
    ]


def archiving(own: MakeServer, folder: Path) -> Server:
    return own({"TOPICS_ARCHIVE_URL": f"file://{folder}", "TOPICS_SEGMENT_MAX_EVENTS": "10"})


def archived(api: Api) -> None:
    def is_done() -> bool:
        shown = good(api.http.get("/v0/metrics", headers={"Accept": "application/json"}))
        is_based = shown["topics_archive_base_timestamp_ms"] > 0
        return bool(shown["topics_archive_lag_seconds"] == 0 and is_based)

    eventually(is_done, "everything is archived", within_s=60)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_newest_moment_of_an_archive_comes_back(
    own: MakeServer, folder: Path, scratch: Path, alone: Topics
) -> None:
    server = archiving(own, folder)
    api = server.start()
    api.put("gone")
    archived(api)
    # All of these records come after the only base.
    fill(api)
    api.http.delete("/v0/topics/gone")
    archived(api)
    topics = len(api.topics().json()["topics"])
    url = f"file://{folder}"
    ran = alone("archive", "drill", url, "--scratch", scratch, "--json")
    found = json.loads(ran.out)
    assert (ran.code, found["problems"], ran.err) == (0, [], "")
    assert found["topics"] == topics
    assert found["records"] > 60
    assert found["base"] == 1
    assert list(scratch.iterdir()) == []
    line = alone.good("archive", "drill", url, "--scratch", scratch, "--table").out.decode()
    assert line.startswith("lsn ")
    assert line.endswith(": all came back\n")
    server.stop()
    # Without the newest part the drill restores an earlier moment; with a damaged part it restores
    # none.
    part = sorted(path for path in (folder / "parts").rglob("*") if path.is_file())[-1]
    content = bytearray(part.read_bytes())
    content[-1] ^= 1
    part.write_bytes(content)
    ran = alone("archive", "drill", url, "--scratch", scratch)
    assert (ran.code, ran.out) == (1, b"")
    assert ran.message.startswith("the drill failed: ")
    assert f"{part}: fails its check" in ran.message
    assert list(scratch.iterdir()) == []


def test_a_scratch_folder_that_is_none(folder: Path, alone: Topics, tmp_path: Path) -> None:
    ran = alone("backups", "drill", folder, "--scratch", tmp_path / "none")
    assert ran.code == 2
    ran = alone("backups", "drill", folder, "--scratch", "/proc")
    assert (ran.code, "/proc: " in ran.message) == (1, True)
    ran = alone("backups", "drill", folder)
    assert (ran.code, "this is no backup folder" in ran.message) == (1, True)
