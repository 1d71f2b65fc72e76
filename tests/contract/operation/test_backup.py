"""`/v0/admin/backup` (docs/EXTENSIONS.md, Backups)."""

from __future__ import annotations

import os
from pathlib import Path

from tests.contract.conftest import NewServer
from tests.contract.driver import Api, Json, eventually, good, refused

PATH = "/v0/admin/backup"


def backed_up(api: Api) -> Json:
    """Make a backup; the state at its end."""
    answer = api.http.post(PATH)
    assert answer.status_code == 200
    assert answer.json()["status"] in ("running", "done")
    eventually(lambda: good(api.http.get(PATH))["status"] != "running", "it ends", within_s=60)
    return good(api.http.get(PATH))


def test_a_backup_goes_into_the_folder_of_the_setting(own: NewServer, tmp_path: Path) -> None:
    folder = tmp_path / "backups"
    folder.mkdir()
    server = own(TOPICS_BACKUP_DIR=str(folder))
    api = server.start()
    assert good(api.http.get(PATH))["status"] == "none"
    api.add("a", *range(5))
    good(api.http.post("/v0/admin/seal"))
    done = backed_up(api)
    assert (done["status"], done["number"], done["topics"], done["segments"]) == ("done", 1, 1, 1)
    api.add("not-sealed", 1)
    api.add("gone", 1)
    api.drop("gone")
    assert done["copied_bytes"] == done["segment_bytes"] - 5, "the flags are not in the object"
    assert done["started_ts"] <= done["finished_ts"]
    assert "reason" not in done
    assert (folder / "backups/0000000001/backup.json").exists()
    again = backed_up(api)
    assert (again["number"], again["copied_bytes"]) == (2, 0)
    assert (again["topics"], again["segments"]) == (2, 1)
    metrics = good(api.http.get("/v0/metrics", headers={"Accept": "application/json"}))
    assert metrics["topics_backups_made_total"] == 2
    assert metrics["topics_backups_failed_total"] == 0
    assert metrics["topics_backup_running"] == 0
    newest = metrics["topics_backup_newest_timestamp_ms"]
    assert done["finished_ts"] <= newest <= again["finished_ts"]
    server.stop()
    api = server.start()

    def is_noted() -> bool:
        shown = good(api.http.get("/v0/metrics", headers={"Accept": "application/json"}))
        return bool(shown["topics_backup_newest_timestamp_ms"] == newest)

    eventually(is_noted, "a start looks into the folder")


def test_without_a_folder_there_are_no_backups(own: NewServer) -> None:
    api = own().start()
    for method in ("GET", "POST"):
        answer = api.http.request(method, PATH)
        refused(answer, 404, "not_found")
        assert "TOPICS_BACKUP_DIR" in answer.json()["error"]["message"]


def test_a_folder_that_is_not_there_fails_the_backup_and_is_not_made(
    own: NewServer, tmp_path: Path
) -> None:
    folder = tmp_path / "not-mounted"
    api = own(TOPICS_BACKUP_DIR=str(folder)).start()
    failed = backed_up(api)
    assert failed["status"] == "failed"
    assert "is its disk mounted?" in failed["reason"]
    assert not folder.exists()
    api.add("a", 1)


def test_a_key_of_some_topics_makes_no_backup(own: NewServer, tmp_path: Path) -> None:
    folder = tmp_path / "backups"
    folder.mkdir()
    keys = "some-key-000000000000000001:admin:t.,every-key-00000000000000002:admin"
    server = own(TOPICS_BACKUP_DIR=str(folder), TOPICS_API_KEYS=keys)
    api = server.start()
    some = {"Authorization": "Bearer some-key-000000000000000001"}
    for method in ("GET", "POST"):
        refused(api.http.request(method, PATH, headers=some), 403, "forbidden")
    every = {"Authorization": "Bearer every-key-00000000000000002"}
    assert good(api.http.get(PATH, headers=every))["status"] == "none"


def test_a_foreign_file_with_a_name_that_is_no_text_is_told(own: NewServer, tmp_path: Path) -> None:
    folder = tmp_path / "backups"
    folder.mkdir()
    Path(os.fsdecode(os.fsencode(folder) + b"/photo-\xff")).write_bytes(b"1")
    api = own(TOPICS_BACKUP_DIR=str(folder)).start()
    failed = backed_up(api)
    assert failed["status"] == "failed"
    assert failed["reason"] == (
        f"{folder}: this folder holds other files (photo-\\udcff): name an empty one"
    )
    assert os.listdir(os.fsencode(folder)) == [b"photo-\xff"]
