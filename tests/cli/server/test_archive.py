"""`topics archive` and `topics restore URL` as a person runs them."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import MakeServer, Ran, Topics
from tests.contract.driver import Api, Server, eventually, good


def loaded(ran: Ran) -> Any:
    return json.loads(ran.out)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "archive"
    made.mkdir()
    return made


@pytest.fixture
def url(folder: Path) -> str:
    return f"file://{folder}"


@pytest.fixture
def server(own: MakeServer, url: str) -> Server:
    return own(
        {
            "TOPICS_ARCHIVE_URL": url,
            "TOPICS_SEGMENT_MAX_EVENTS": "10",
            "TOPICS_ARCHIVE_BASE_INTERVAL_MS": "1000",
        }
    )


def archived(api: Api, bases: int = 1) -> None:
    def is_done() -> bool:
        shown = good(api.http.get("/v0/metrics", headers={"Accept": "application/json"}))
        has_bases = shown["topics_archive_bases_total"] >= bases
        return bool(shown["topics_archive_lag_seconds"] == 0 and has_bases)

    eventually(is_done, "everything is archived", within_s=60)


def data(api: Api, topic: str) -> list[Any]:
    return [record["data"] for record in api.read_all(topic)]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_an_archive_is_listed_verified_and_restored(
    server: Server, own: MakeServer, url: str, alone: Topics, tmp_path: Path
) -> None:
    api = server.start()
    api.put("t", {"durability": "fsync"})
    api.add("t", *range(25))
    archived(api)
    api.add("t", *range(25, 30))
    api.add("t", *range(30, 33))
    api.add("other", "x")
    api.delete("t", before_seq=6)
    archived(api)
    server.signal(signal.SIGKILL)

    rows = [
        json.loads(line) for line in alone.good("archive", "ls", url, "--json").out.splitlines()
    ]
    assert rows
    assert all(row["until_lsn"] >= row["last_lsn"] for row in rows)
    assert b"until" in alone.good("archive", "ls", url, "--table").out
    found = loaded(alone.good("archive", "verify", url, "--json"))
    assert (found["problems"], found["stretches"]) == ([], 1)

    target = tmp_path / "newest"
    shown = loaded(alone.good("restore", url, target, "--json"))
    assert shown["lsn"] == rows[-1]["until_lsn"]
    alone.good("verify", target)
    ran = alone("restore", url, target)
    assert (ran.code, "is not empty" in ran.err) == (1, True)
    ran = alone("restore", url, tmp_path / "archive" / "inside")
    assert (ran.code, "name a folder outside it" in ran.err) == (1, True)
    second = own({"TOPICS_DATA_DIR": str(target)}).start()
    assert data(second, "t") == list(range(5, 33))
    assert second.add("t", "new")["first_seq"] > 33

    # Seqs 26 to 30 came with one append: a restore to seq 27 has all of them.
    alone.good("restore", url, tmp_path / "seq", "--to-seq", "t=27")
    third = own({"TOPICS_DATA_DIR": str(tmp_path / "seq")}).start()
    assert data(third, "t") == list(range(30))
    assert third.add("t", "new")["first_seq"] > 33, "a seq means one record for ever"

    alone.good("restore", url, tmp_path / "time", "--to-time", str(shown["ts"]), "--topics", "o*")
    fourth = own({"TOPICS_DATA_DIR": str(tmp_path / "time")}).start()
    assert data(fourth, "other") == ["x"]
    assert [each["topic"] for each in good(fourth.topics())["topics"]] == ["other"]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_what_is_not_in_the_archive_is_refused(
    server: Server, url: str, alone: Topics, tmp_path: Path
) -> None:
    api = server.start()
    api.add("t", 1)
    archived(api)
    server.stop()
    for words, reason in (
        (("--to-time", "2001-01-01T00:00:00Z"), "before the archive's parts. The nearest moments"),
        (("--to-seq", "t=99"), "no part of the archive has the append of seq 99"),
        (("--to-seq", "nobody=1"), "no part of the archive has the append of seq 1"),
        (("--base", "99"), "there is no base 99, only "),
        (("--topics", "nobody"), "the archive has no such topic"),
    ):
        ran = alone("restore", url, tmp_path / "r", *words)
        assert (ran.code, reason in ran.err) == (1, True), ran.err
        assert not (tmp_path / "r").exists()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_old_bases_are_pruned(
    server: Server, own: MakeServer, url: str, folder: Path, alone: Topics, tmp_path: Path
) -> None:
    api = server.start()
    for number in range(3):
        api.add("t", *range(number * 20, number * 20 + 20))
        archived(api, bases=number + 1)
    ran = alone("archive", "prune", url, "--keep", "often", "--yes")
    assert ran.code == 2
    pruned = loaded(alone.good("archive", "prune", url, "--keep", "1", "--yes", "--json"))
    assert len(pruned["kept"]) == 1
    assert len(pruned["removed"]) >= 2
    assert pruned["parts"] >= 1
    assert loaded(alone.good("archive", "verify", url, "--json"))["problems"] == []
    # The server continues to write to the archive.
    api.add("t", *range(60, 65))
    archived(api)
    server.stop()
    assert loaded(alone.good("archive", "verify", url, "--json"))["problems"] == []
    alone.good("restore", url, tmp_path / "r")
    assert data(own({"TOPICS_DATA_DIR": str(tmp_path / "r")}).start(), "t") == list(range(65))


def test_a_folder_needs_no_unlock(server: Server, url: str, alone: Topics) -> None:
    api = server.start()
    archived(api)
    ran = alone("archive", "unlock", url, "--yes")
    assert (ran.code, "is not locked" in ran.err) == (0, True)
    server.stop()


def test_damage_is_told_by_name(server: Server, url: str, folder: Path, alone: Topics) -> None:
    api = server.start()
    api.add("t", *range(25))
    archived(api)
    server.stop()
    part = sorted(path for path in (folder / "parts").rglob("*") if path.is_file())[-1]
    content = bytearray(part.read_bytes())
    content[len(content) // 2] ^= 1
    part.write_bytes(content)
    ran = alone("archive", "verify", url, "--table")
    assert (ran.code, f"{part}: " in ran.err) == (1, True), ran.err
    part.unlink()
    ran = alone("archive", "ls", folder.parent.as_uri())
    assert (ran.code, "this is no archive" in ran.err) == (1, True), ran.err
