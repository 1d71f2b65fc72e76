"""The continuous archive of a running server: its settings, its metrics, and the content of a
restore.
"""

from __future__ import annotations

import random
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.contract.conftest import NewServer
from tests.contract.driver import Api, Json, eventually, good
from tests.contract.operation.test_restored import filled
from topics_server.archive.continuous.history import ArchiveHistory
from topics_server.archive.continuous.places.shared_folder import SharedFolder
from topics_server.archive.continuous.restoring import restore_moment
from topics_server.archive.continuous.verifying import verify_archive
from topics_server.wal.fs import OsFs

FS = OsFs()
OFTEN = {"TOPICS_ARCHIVE_BASE_INTERVAL_MS": "1000", "TOPICS_CHECKPOINT_INTERVAL_MS": "1000"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "archive"
    made.mkdir()
    return made


def figures(api: Api) -> Json:
    shown: Json = good(api.http.get("/v0/metrics", headers={"Accept": "application/json"}))
    return {
        name.removeprefix("topics_archive_"): value
        for name, value in shown.items()
        if name.startswith("topics_archive_")
    }


def archived(api: Api) -> Json:
    """Return once everything is in the archive; returns the metrics at that time."""

    def is_done() -> bool:
        shown = figures(api)
        return bool(shown["lag_seconds"] == 0 and shown["base_timestamp_ms"] > 0)

    eventually(is_done, "everything is archived", within_s=60)
    return figures(api)


def told(api: Api) -> list[str] | None:
    """The reasons of `/v0/ready` if the server is degraded."""
    shown = good(api.http.get("/v0/ready"))
    assert shown["status"] == ("degraded" if "reasons" in shown else "ready")
    reasons: list[str] | None = shown.get("reasons")
    return reasons


def restored(folder: Path, target: Path, **how: Any) -> int:
    store = SharedFolder.open(FS, str(folder))
    return restore_moment(FS, store, str(target), lambda moments: moments.newest(), **how).lsn


def test_everything_is_archived_all_the_time(own: NewServer, folder: Path, tmp_path: Path) -> None:
    server = own(TOPICS_ARCHIVE_URL=f"file://{folder}")
    api = server.start()
    filled(api)
    shown = archived(api)
    assert (shown["bases_total"], shown["gaps_total"], shown["stopped"]) == (1, 0, 0)
    assert shown["parts_total"] >= 1
    assert (shown["lag_bytes"], shown["kept_bytes"]) == (0, 0)
    records = api.read_all("t")
    jobs = api.get_state("jobs")["queue"]
    consumer = good(api.http.get("/v0/topics/t/consumers/c"))["seq"]
    server.signal(signal.SIGKILL)
    assert verify_archive(SharedFolder.open(FS, str(folder))).problems == []
    restored(folder, tmp_path / "restored")
    api = own(TOPICS_DATA_DIR=str(tmp_path / "restored")).start()
    assert api.read_all("t") == records
    assert api.get_state("jobs")["queue"] == jobs
    assert good(api.http.get("/v0/topics/t/consumers/c"))["seq"] == consumer


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_killed_server_goes_on_in_its_archive(own: NewServer, folder: Path) -> None:
    server = own(TOPICS_ARCHIVE_URL=f"file://{folder}", **OFTEN)
    for number in range(3):
        api = server.start()
        api.add("t", *range(number * 5, number * 5 + 5))
        if number != 1:
            archived(api)
        server.signal(signal.SIGKILL)
    found = verify_archive(SharedFolder.open(FS, str(folder)))
    assert (found.problems, found.stretches) == ([], 1)
    assert found.parts >= 2


def test_a_stop_archives_what_is_left(own: NewServer, folder: Path, tmp_path: Path) -> None:
    server = own(TOPICS_ARCHIVE_URL=f"file://{folder}")
    api = server.start()
    api.add("t", 1)
    archived(api)
    api.add("t", *range(2, 30))
    server.stop()
    restored(folder, tmp_path / "restored")
    api = own(TOPICS_DATA_DIR=str(tmp_path / "restored")).start()
    assert [record["data"] for record in api.read_all("t")] == list(range(1, 30))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_bases_come_as_often_as_the_setting_says(own: NewServer, folder: Path) -> None:
    server = own(TOPICS_ARCHIVE_URL=f"file://{folder}", TOPICS_ARCHIVE_BASE_INTERVAL_MS="1000")
    api = server.start()

    def has_bases() -> bool:
        api.add("t", 1)
        return bool(figures(api)["bases_total"] >= 3)

    eventually(has_bases, "bases are made", within_s=60)
    archived(api)
    assert verify_archive(SharedFolder.open(FS, str(folder))).problems == []


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_journal_is_kept_up_to_the_setting(own: NewServer, folder: Path) -> None:
    server = own(
        TOPICS_ARCHIVE_URL=f"file://{folder}",
        TOPICS_ARCHIVE_JOURNAL_BYTES="0",
        TOPICS_CHECKPOINT_INTERVAL_MS="200",
        TOPICS_WAL_SHARDS="1",
    )
    api = server.start()
    api.add("t", 1)
    archived(api)
    moved = folder.with_name("moved")
    folder.rename(moved)
    pad = "x" * 900_000

    def has_gap() -> bool:
        api.add("t", *[pad] * 10)
        return bool(figures(api)["gaps_total"] >= 1)

    eventually(has_gap, "the journal is let go", within_s=60)
    eventually(lambda: figures(api)["errors_total"] >= 1, "its errors count", within_s=60)
    eventually(lambda: "archiv" in str(told(api)), "it is told", within_s=60)
    moved.rename(folder)
    eventually(lambda: figures(api)["bases_total"] >= 2, "a base ends the gap", within_s=60)
    archived(api)
    eventually(lambda: told(api) is None, "it is told no more", within_s=60)
    found = verify_archive(SharedFolder.open(FS, str(folder)))
    assert (found.problems, found.stretches) == ([], 2)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_archive_is_written_at_the_rate_of_the_setting(
    own: NewServer, folder: Path, tmp_path: Path
) -> None:
    """A slow archive delays no client: appends are answered while it is far behind."""
    server = own(TOPICS_ARCHIVE_URL=f"file://{folder}", TOPICS_ARCHIVE_RATE_BYTES="20000")
    api = server.start()
    api.add("t", 0)
    archived(api)
    rng = random.Random(1)
    api.add("t", *[rng.randbytes(10_000).hex() for _ in range(10)])
    # At 20 kB a second, 100 kB take five seconds; at full speed the archive is a second behind at
    # most.
    eventually(lambda: figures(api)["lag_seconds"] >= 2, "it is behind", within_s=60)
    api.add("t", 1)
    assert len(api.read_all("t")) == 12
    archived(api)


def test_another_stores_archive_is_left_alone(own: NewServer, folder: Path, tmp_path: Path) -> None:
    server = own(TOPICS_ARCHIVE_URL=f"file://{folder}")
    api = server.start()
    api.add("t", 1)
    archived(api)
    server.stop()
    before = ArchiveHistory(SharedFolder.open(FS, str(folder))).numbers()
    other = own(TOPICS_ARCHIVE_URL=f"file://{folder}", TOPICS_DATA_DIR=str(tmp_path / "another"))
    api = other.start()
    api.add("t", 1)
    eventually(lambda: figures(api)["stopped"] == 1, "it stops", within_s=60)
    api.add("t", 2)
    assert told(api) == ["nothing is archived any more: see the log"]
    assert "name an empty archive" in other.log.read_text()
    assert ArchiveHistory(SharedFolder.open(FS, str(folder))).numbers() == before


def test_an_archive_in_the_data_directory_refuses_the_start(own: NewServer) -> None:
    server = own()
    inside = server.data_dir / "archive"
    inside.mkdir(parents=True)
    other = own(TOPICS_DATA_DIR=str(server.data_dir), TOPICS_ARCHIVE_URL=f"file://{inside}")
    assert "inside the other" in other.refusal()


def test_an_url_with_credentials_is_refused_and_not_repeated(own: NewServer) -> None:
    server = own(TOPICS_ARCHIVE_URL="s3://user:hunter2@bucket/archive?token=hunter3")
    told = server.refusal()
    assert "TOPICS_ARCHIVE_URL" in told
    assert "hunter" not in told
