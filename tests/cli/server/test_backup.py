"""`topics backup`, `topics backups` and `topics restore` as a person runs them."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import MakeServer, Ran, Topics
from tests.contract.driver import Server


def loaded(ran: Ran) -> Any:
    return json.loads(ran.out)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "backups"
    made.mkdir()
    return made


@pytest.fixture
def server(own: MakeServer, folder: Path) -> Server:
    return own({"TOPICS_BACKUP_DIR": str(folder), "TOPICS_SEGMENT_MAX_EVENTS": "10"})


def test_a_running_server_is_backed_up_and_restored(
    server: Server, own: MakeServer, folder: Path, alone: Topics, tmp_path: Path
) -> None:
    api = server.start()
    api.put("t", {"durability": "fsync"})
    api.add("t", *range(25))
    url = ("--url", api.url)
    made = loaded(alone.good("backup", *url, "--json"))
    assert (made["status"], made["number"]) == ("done", 1)
    api.add("t", *range(25, 40))
    api.delete("t", before_seq=6)
    alone.good("backup", *url)
    server.signal(signal.SIGKILL)

    lines = alone.good("backups", "ls", folder, "--json").out.splitlines()
    assert [json.loads(line)["backup"] for line in lines] == [1, 2]
    assert loaded(alone.good("backups", "verify", folder, "--json"))["problems"] == []
    target = tmp_path / "restored"
    shown = loaded(alone.good("restore", folder, target, "--json"))
    assert shown["backup"] == 2
    assert shown["store_id"] != json.loads((server.data_dir / "FORMAT").read_bytes())["store_id"]
    alone.good("verify", target)
    ran = alone("restore", folder, target)
    assert (ran.code, "is not empty" in ran.err) == (1, True)

    second = own({"TOPICS_DATA_DIR": str(target)})
    api = second.start()
    assert [record["data"] for record in api.read_all("t")] == list(range(5, 40))
    assert api.add("t", "new")["first_seq"] > 40


def test_an_older_backup_and_one_that_is_not_there(
    server: Server, folder: Path, alone: Topics, tmp_path: Path
) -> None:
    api = server.start()
    api.add("t", 1)
    alone.good("backup", "--url", api.url)
    alone.good("backup", "--url", api.url)
    server.stop()
    ran = alone("restore", folder, tmp_path / "r", "--backup", "3")
    assert (ran.code, "there is no backup 3, only 1, 2" in ran.err) == (1, True)
    assert not (tmp_path / "r").exists()
    assert loaded(alone.good("restore", folder, tmp_path / "r", "--backup", "1"))["backup"] == 1


def test_a_stopped_servers_directory(server: Server, folder: Path, alone: Topics) -> None:
    api = server.start()
    api.add("t", *range(25))
    ran = alone("backup", server.data_dir, "--into", folder)
    assert (ran.code, "pid" in ran.err) == (1, True), ran.err
    server.stop()
    made = loaded(alone.good("backup", server.data_dir, "--into", folder, "--json"))
    assert (made["number"], made["topics"], made["damaged_segments"]) == (1, 1, 0)
    ran = alone("backup", server.data_dir)
    assert (ran.code, "--into" in ran.err) == (2, True)


def test_pruning_asks_and_keeps_the_newest(server: Server, folder: Path, alone: Topics) -> None:
    api = server.start()
    for number in range(3):
        api.add("t", *range(10))
        api.http.post("/v0/admin/seal")
        alone.good("backup", "--url", api.url)
        if number == 1:
            api.http.delete("/v0/topics/t")
    server.stop()
    ran = alone("backups", "prune", folder, "--keep", "1")
    assert (ran.code, "--yes is missing" in ran.err) == (2, True)
    ran = alone("backups", "prune", folder, "--keep", "often", "--yes")
    assert (ran.code, "'often' is not a number" in ran.err) == (2, True)
    pruned = loaded(alone.good("backups", "prune", folder, "--keep", "1", "--yes", "--json"))
    assert (pruned["kept"], pruned["removed"]) == ([3], [1, 2])
    assert pruned["segments"] > 0
    assert loaded(alone.good("backups", "verify", folder, "--json")) == {
        "backups": 1,
        "problems": [],
    }


def test_a_damaged_backup_is_told(server: Server, folder: Path, alone: Topics) -> None:
    api = server.start()
    api.add("t", *range(10))
    alone.good("backup", "--url", api.url)
    server.stop()
    path = next(folder.rglob("snapshot"))
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    ran = alone("backups", "verify", folder, "--table")
    assert ran.code == 1
    assert "snapshot: fails its check" in ran.err


def test_a_failed_backup_is_told(own: MakeServer, alone: Topics, tmp_path: Path) -> None:
    api = own({"TOPICS_BACKUP_DIR": str(tmp_path / "gone")}).start()
    ran = alone("backup", "--url", api.url)
    assert (ran.code, "is its disk mounted?" in ran.err) == (1, True)
    ran = alone("backups", "ls", tmp_path)
    assert (ran.code, "this is no backup folder" in ran.err) == (1, True)


def test_a_damaged_backup_is_listed_and_skipped(
    server: Server, folder: Path, alone: Topics, tmp_path: Path
) -> None:
    api = server.start()
    for number in range(2):
        api.add("t", number)
        alone.good("backup", "--url", api.url)
    server.stop()
    (folder / "backups/0000000001/backup.json").unlink()
    ran = alone("backups", "ls", folder, "--json")
    assert (ran.code, "0000000001/backup.json: is missing" in ran.err) == (1, True), ran.err
    assert [json.loads(line)["backup"] for line in ran.out.splitlines()] == [2]
    ran = alone("backups", "prune", folder, "--keep", "1", "--yes")
    assert (ran.code, "nothing is removed" in ran.err) == (1, True), ran.err
    ran = alone("restore", folder, tmp_path / "r")
    assert (ran.code, "--skip 1" in ran.err) == (1, True), ran.err
    assert not (tmp_path / "r").exists()
    ran = alone("restore", folder, folder / "r", "--skip", "1")
    assert (ran.code, "lies in the backup folder" in ran.err) == (1, True), ran.err
    assert (
        loaded(alone.good("restore", folder, tmp_path / "r", "--skip", "1", "--json"))["backup"]
        == 2
    )


def test_a_relative_folder_is_noted_by_its_whole_path(
    server: Server, folder: Path, alone: Topics, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.start()
    server.stop()
    monkeypatch.chdir(folder.parent)
    alone.good("backup", server.data_dir, "--into", folder.name)
    noted = json.loads((server.data_dir / "BACKUP_FOLDER").read_bytes())
    assert noted["path"] == str(folder)
