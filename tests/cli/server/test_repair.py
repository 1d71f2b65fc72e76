"""`topics repair` as a person runs it: sealed damage, `--begin-anew`, `--adopt-cold`."""

from __future__ import annotations

import json
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.cli.conftest import MakeServer, Topics
from tests.contract.driver import Api, Server, eventually

COUNT = 50
HEAD = 4 * COUNT


@pytest.fixture
def cold(tmp_path: Path) -> Path:
    return tmp_path / "cold"


@pytest.fixture
def server(own: MakeServer, cold: Path) -> Server:
    """A killed server; most of its four segments are in the cold folder."""
    env = {
        "TOPICS_SEGMENT_MAX_EVENTS": str(COUNT),
        "TOPICS_SEGMENT_MAX_AGE_MS": "200",
        "TOPICS_HOT_RETAIN_SEGMENTS": "1",
        "TOPICS_COLD_DIR": str(cold),
    }
    made = own(env)
    api = made.start()
    api.put("t", {"durability": "fsync"})
    for first in range(0, HEAD, COUNT):
        api.add("t", *(f"datum {number:03}." for number in range(first, first + COUNT)))
    eventually(lambda: len(list(cold.rglob("*.idx"))) >= 3, "segments are cold", within_s=30)
    made.signal(signal.SIGKILL)
    return made


def files(folder: Path) -> dict[str, bytes]:
    """All files by path, without `LOCK` and end marks, which reading the store may change."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != "LOCK"
    }


def seqs(api: Api) -> list[int]:
    return [int(record["$seq"]) for record in api.read_all("t")]


def store_id(server: Server) -> str:
    return str(json.loads((server.data_dir / "FORMAT").read_bytes())["store_id"])


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


# -- sealed damage -------------------------------------------------------------------------------


def test_a_damaged_index_in_the_cold_folder_is_made_again(
    server: Server, cold: Path, alone: Topics
) -> None:
    words: Sequence[str | Path] = ("repair", server.data_dir, "--cold-dir", cold, "--table")
    idx = min(cold.rglob("*.idx"))
    whole = idx.read_bytes()
    flip(idx, len(whole) // 2)
    bad = idx.read_bytes()
    before = files(server.data_dir), files(cold)
    shown = alone(*words)
    assert shown.code == 1
    assert f"{idx} is damaged; it can be made again from the segment's records" in shown.err
    assert "nothing was changed; --accept-loss gives up this part" in shown.err
    assert (files(server.data_dir), files(cold)) == before
    assert "was made again" in alone.good(*words, "--accept-loss").err
    assert idx.read_bytes() == whole
    (kept,) = (server.data_dir / "quarantine").rglob("*.idx.*")
    assert kept.read_bytes() == bad
    told = alone.good(*words)
    assert "the journal is whole" in told.err
    assert "the segments are whole" in told.err
    verified = alone.good("verify", server.data_dir, "--cold-dir", cold)
    assert verified.value["problems"] == []
    assert seqs(server.start()) == list(range(1, HEAD + 1))


def test_records_that_cannot_be_read_are_told_by_seq_until_their_file_is_back(
    server: Server, cold: Path, alone: Topics
) -> None:
    words: Sequence[str | Path] = ("repair", server.data_dir, "--cold-dir", cold, "--table")
    data = min(cold.rglob("*.data"))
    whole = data.read_bytes()
    flip(data, whole.index(b"datum 006."))
    shown = alone(*words)
    assert shown.code == 1
    assert "t: seqs 7 of segment 1 cannot be read" in shown.err
    told = alone.good(*words, "--accept-loss", "--json").value
    assert told["segments"]["lost"] == [
        {"topic": "t", "topic_id": 1, "segment_id": 1, "seqs": [[7, 7]]}
    ]
    api = server.start()
    assert seqs(api) == [seq for seq in range(1, HEAD + 1) if seq != 7]
    server.stop()
    data.write_bytes(whole)
    back = alone.good(*words)
    assert "t: seqs 7 can be read again; the next start serves them" in back.err
    assert seqs(server.start()) == list(range(1, HEAD + 1))


def test_without_the_cold_folder_repair_says_what_it_did_not_look_at(
    server: Server, alone: Topics
) -> None:
    told = alone.good("repair", server.data_dir, "--table")
    assert "not looked at: " in told.err
    assert "topic 1 has cold segments and no cold folder is set" in told.err


# -- two folders, one store ----------------------------------------------------------------------


def test_begin_anew_moves_what_is_left_aside_and_can_be_undone(
    server: Server, cold: Path, alone: Topics
) -> None:
    """The disk with the cold folder is lost for good."""
    name = store_id(server)
    before = files(server.data_dir)
    away = cold.rename(cold.with_name("lost"))
    assert name in server.refusal()
    words: Sequence[str | Path] = (
        *("repair", server.data_dir, "--cold-dir", cold),
        *("--table", "--begin-anew"),
    )
    other = alone(*words, "0" * 32)
    assert other.code == 1
    assert f"is of store {name}, not of {'0' * 32}" in other.err
    assert files(server.data_dir) == before, "a refusal changes nothing"
    told = alone.good(*words, name)
    aside = server.data_dir / "set-aside" / name
    assert f"store {name} is in {aside} now" in told.err
    assert "the next start makes a new store" in told.err
    assert files(aside) == before
    assert alone(*words, name).code == 1, "a second time there is nothing left to move"
    api = server.start()
    assert store_id(server) != name
    assert api.topics().json()["topics"] == []
    api.add("t", "new")
    server.stop()
    # To undo the command, move the new store aside, move the old files back, and mount the disk
    # again.
    alone.good(*words, store_id(server))
    for path in aside.iterdir():
        path.rename(server.data_dir / path.name)
    cold.rename(cold.with_name("new"))
    away.rename(cold)
    assert seqs(server.start()) == list(range(1, HEAD + 1))


def test_begin_anew_is_refused_while_a_server_runs(
    server: Server, cold: Path, alone: Topics
) -> None:
    server.start()
    name = store_id(server)
    ran = alone("repair", server.data_dir, "--cold-dir", cold, "--begin-anew", name, "--json")
    assert ran.code == 1
    assert "in use" in ran.err
    server.stop()
    told = alone.good("repair", server.data_dir, "--cold-dir", cold, "--begin-anew", name, "--json")
    assert told.value == {
        "store_id": name,
        "set_aside": [str(folder / "set-aside" / name) for folder in (server.data_dir, cold)],
    }


def test_a_cold_folder_that_lost_its_name_is_adopted(
    server: Server, cold: Path, alone: Topics
) -> None:
    name = store_id(server)
    mark = cold / "STORE"
    mark.unlink()
    assert str(cold) in server.refusal()
    told = alone.good("repair", server.data_dir, "--cold-dir", cold, "--adopt-cold", "--table")
    assert f"{cold} is the cold folder of store {name}" in told.err
    assert json.loads(mark.read_bytes())["store_id"] == name
    assert seqs(server.start()) == list(range(1, HEAD + 1))


def test_another_stores_cold_folder_is_not_adopted(
    server: Server, cold: Path, alone: Topics
) -> None:
    mark = cold / "STORE"
    content = json.loads(mark.read_bytes())
    other = "f" * 32
    mark.write_bytes(mark.read_bytes().replace(content["store_id"].encode(), other.encode()))
    before = files(cold)
    ran = alone("repair", server.data_dir, "--cold-dir", cold, "--adopt-cold")
    assert ran.code == 1
    assert str(cold) in ran.err
    assert files(cold) == before


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--adopt-cold",), "--adopt-cold needs --cold-dir"),
        (("--adopt-cold", "--accept-loss"), "give only one of"),
        (("--begin-anew", "0" * 32, "--accept-loss"), "give only one of"),
    ],
)
def test_wrong_usage_is_told(alone: Topics, words: Sequence[str], said: str) -> None:
    ran = alone("repair", "nowhere", *words)
    assert ran.code == 2
    assert said in ran.err


def test_begin_anew_of_no_store_is_refused(alone: Topics) -> None:
    ran = alone("repair", "nowhere", "--begin-anew", "0" * 32)
    assert ran.code == 1
    assert "no folder named here is of store" in ran.err
