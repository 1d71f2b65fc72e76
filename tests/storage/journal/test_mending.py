"""`topics repair`: random damage of a real server's journal, repaired, and served again.

The test has noted what was acknowledged. After a repair every record was once written, no record is
missing beyond the repair's report, readers get `damaged` for the missing ones, and no assigned seq
is assigned again.
"""

from __future__ import annotations

import json
import random
import shutil
import signal
import time
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest
from click.testing import CliRunner

from tests.contract.driver import Api, Server, refused
from topics_server.cli.server.repair import command as repair
from topics_server.wal.fs import OsFs
from topics_server.wal.tools.dump import verify

TOPICS: Final = ("alpha", "beta", "gamma", "delta")
ENV: Final = {
    "TOPICS_WAL_SHARDS": "2",
    "TOPICS_CHECKPOINT_INTERVAL_MS": "86400000",
    "TOPICS_WAL_FSYNC_INTERVAL_MS": "20",
}
SEEDS: Final = range(5)


class Store(NamedTuple):
    """A killed server's directory, and its acknowledged data by topic."""

    directory: Path
    written: dict[str, list[Any]]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    server = Server(tmp_path_factory.mktemp("mending") / "server", ENV)
    api = server.start()
    for number, name in enumerate(TOPICS):
        api.put(name, {"durability": "fsync" if number % 2 else "disk"})
    server.stop()
    api = server.start()
    rng = random.Random(8)
    written: dict[str, list[Any]] = {name: [] for name in TOPICS}
    for number in range(160):
        # The last topic stops early: only its reservation shows how far it went.
        name = rng.choice(TOPICS if number < 80 else TOPICS[:3])
        datas = [[number, "x" * rng.randrange(1, 200)] for _ in range(rng.randrange(1, 4))]
        api.add(name, *datas)
        written[name] += datas
    time.sleep(0.5)  # a background sync writes its mark
    server.signal(signal.SIGKILL)
    return Store(server.directory, written)


def run_repair(data: Path, *words: str) -> tuple[int, Any, str]:
    ran = CliRunner().invoke(repair, [str(data), "--json", *words])
    assert ran.exception is None or isinstance(ran.exception, SystemExit), repr(ran.exception)
    lines = [line for line in ran.output.splitlines() if line.startswith("{")]
    return ran.exit_code, json.loads(lines[0]) if lines else None, ran.output


def used_bytes(file: Path) -> int:
    return len(file.read_bytes().rstrip(b"\0"))


def journal_files(data: Path) -> list[Path]:
    """The newest used file of each shard; the records of older files are in the snapshot."""
    used = [file for file in sorted((data / "wal").glob("*.wal")) if used_bytes(file) > 64]
    return list({file.name[:9]: file for file in used}.values())


def image_of(data: Path) -> dict[str, bytes]:
    files = (path for path in data.rglob("*") if path.is_file() and path.name != "LOCK")
    return {str(path.relative_to(data)): path.read_bytes() for path in files}


def damage(data: Path, rng: random.Random) -> None:
    """Change one to three places of the journal, each a bit, a few bytes, or a sector of zeros."""
    for _ in range(rng.randrange(1, 4)):
        file = rng.choice(journal_files(data))
        with file.open("r+b") as target:
            at = rng.randrange(64, used_bytes(file) - 32)
            target.seek(at)
            length = rng.choice((1, 1, 7, 100, 512))
            old = target.read(length)
            flipped = bytes([old[0] ^ (1 << rng.randrange(8))])
            new = {1: flipped, 512: bytes(len(old))}.get(length, rng.randbytes(len(old)))
            target.seek(at)
            target.write(new)


def gaps_of(api: Api, topic: str) -> tuple[dict[int, Any], set[int], set[str]]:
    """Records by seq, the seqs reported as lost, and the reasons."""
    records: dict[int, Any] = {}
    gone: set[int] = set()
    reasons: set[str] = set()
    at = 0
    for _ in range(10_000):
        page = api.read(topic, from_seq=at)
        records |= {record["$seq"]: record["data"] for record in page["records"]}
        if (told := page["tombstone"]) is not None:
            gone |= set(range(told["gap_from"], min(told["gap_to"], 10_000) + 1))
            reasons.add(told["reason"])
        if page["caught_up"]:
            return records, gone, reasons
        at = page["next_from_seq"]
    raise AssertionError("no end")


@pytest.mark.parametrize("seed", SEEDS)
def test_what_is_left_is_right_and_what_is_gone_was_reported(
    store: Store, tmp_path: Path, seed: int
) -> None:
    shutil.copytree(store.directory, tmp_path / "server")
    server = Server(tmp_path / "server", ENV)
    data = server.data_dir
    damage(data, random.Random(seed))
    before = image_of(data)
    code, shown, output = run_repair(data)
    assert image_of(data) == before, "looking changes nothing"
    if code == 0:
        return  # recovery cuts the last bytes, because nothing proves that they were synced
    if shown is None:
        assert output.strip(), "a refusal says why"
        return
    assert shown["regions"], output
    if seed < 2:
        assert "cannot start" in server.refusal()
    code, told, output = run_repair(data, "--accept-loss")
    assert code == 0, output
    assert told["lost"] == shown["lost"]
    for region in told["regions"]:
        kept = Path(told["set_aside"]) / (
            f"{Path(region['file']).name}.{region['start']}-{region['end']}"
        )
        original = before[f"wal/{Path(region['file']).name}"]
        assert kept.read_bytes() == original[region["start"] : region["end"]]
    assert run_repair(data, "--accept-loss")[0] == 0, "once is enough"
    assert verify(OsFs(), str(data)).problems == []

    reported: dict[str, set[int]] = {name: set() for name in TOPICS}
    for lost in told["lost"]:
        span = range(lost["first_seq"], min(lost["last_seq"], 10_000) + 1)
        reported[lost["topic"]] |= set(span)
    api = server.start()
    for name, datas in store.written.items():
        records, gone, reasons = gaps_of(api, name)
        expected = dict(enumerate(datas, 1))
        for seq, data_ in records.items():
            assert expected[seq] == data_, f"{name} {seq} is not what was written"
        missing = expected.keys() - records.keys()
        assert missing <= reported[name], f"{name} lost more than was reported"
        assert missing <= gone, f"{name}: readers are not told"
        assert reasons <= {"damaged"}
        seq = api.add(name, "new")["seqs"][0]
        assert seq > len(datas), f"{name}: seq {seq} was given out before"
        assert gone <= reported[name], f"{name}: more is told as lost than was reported"
    api = server.crash()
    for name, datas in store.written.items():
        assert api.add(name, "again")["seqs"][0] > len(datas) + 1
    server.stop()


def test_a_whole_journal_is_left_alone(store: Store, tmp_path: Path) -> None:
    shutil.copytree(store.directory, tmp_path / "server")
    server = Server(tmp_path / "server", ENV)
    before = image_of(server.data_dir)
    assert run_repair(server.data_dir, "--accept-loss")[0] == 0
    assert image_of(server.data_dir) == before


def test_a_directory_in_use_is_refused(tmp_path: Path) -> None:
    server = Server(tmp_path / "server", ENV)
    server.start()
    code, _, output = run_repair(server.data_dir, "--accept-loss")
    assert code == 1
    assert "in use" in output or "pid" in output
    server.stop()


def test_a_damaged_file_header_is_not_mended(store: Store, tmp_path: Path) -> None:
    shutil.copytree(store.directory, tmp_path / "server")
    server = Server(tmp_path / "server", ENV)
    file = journal_files(server.data_dir)[0]
    content = bytearray(file.read_bytes())
    content[33] ^= 1
    file.write_bytes(content)
    before = image_of(server.data_dir)
    code, _, output = run_repair(server.data_dir, "--accept-loss")
    assert code == 1
    assert "header" in output
    assert image_of(server.data_dir) == before


def test_the_seqs_of_a_topic_that_wrote_no_more_are_known_exactly(
    store: Store, tmp_path: Path
) -> None:
    """One bit of a payload: the region reads well, so only its own records are reported as lost."""
    shutil.copytree(store.directory, tmp_path / "server")
    server = Server(tmp_path / "server", ENV)
    last = len(store.written["delta"])
    number = store.written["delta"][-1][0]
    needle = f'[{number},"x'.encode()
    found = [file for file in journal_files(server.data_dir) if needle in file.read_bytes()]
    content = bytearray(found[0].read_bytes())
    at = content.rindex(needle) + len(needle) - 1
    content[at] = ord("y")
    found[0].write_bytes(content)
    code, told, output = run_repair(server.data_dir, "--accept-loss")
    assert code == 0, output
    (lost,) = told["lost"]
    assert (lost["topic"], lost["last_seq"], lost["is_bound"]) == ("delta", last, False)
    api = server.start()
    page = api.read("delta", from_seq=lost["first_seq"] - 1)
    tombstone = page["tombstone"]
    assert (tombstone["gap_from"], tombstone["gap_to"]) == (lost["first_seq"], last)
    assert tombstone["reason"] == "damaged"
    assert api.add("delta", 1)["seqs"] == [last + 1]
    refused(api.state("nobody"), 404, "topic_not_found")
    server.stop()


# -- end marks ---------------------------------------------------------------------------------


def end_marks(data_dir: Path) -> list[Path]:
    return sorted((data_dir / "wal").glob("*.end"))


def appended(api: Api, count: int) -> int:
    """The last seq after this many more appends."""
    for number in range(count):
        last = api.add("alpha", number)["last_seq"]
    return int(last)


def test_an_end_mark_that_is_gone_is_made_anew(tmp_path: Path) -> None:
    server = Server(tmp_path / "server", {"TOPICS_WAL_SHARDS": "1"})
    api = server.start()
    api.put("alpha")
    assert appended(api, 5) == 5
    server.signal(signal.SIGKILL)
    (mark,) = end_marks(server.data_dir)
    mark.unlink()
    assert f"{mark}: the end mark of this shard is missing" in server.refusal()
    code, told, output = run_repair(server.data_dir)
    assert (code, told["end_marks"], told["regions"]) == (1, [str(mark)], []), output
    assert not mark.exists(), "nothing was changed"
    code, told, output = run_repair(server.data_dir, "--accept-loss")
    assert code == 0, output
    code, told, output = run_repair(server.data_dir)
    assert (code, told["end_marks"]) == (0, []), output
    assert len(gaps_of(server.start(), "alpha")[0]) == 5
    server.signal(signal.SIGKILL)


@pytest.mark.parametrize(("durability", "length"), [("fsync", 64), ("disk", 900)])
def test_a_journal_file_that_was_shortened_is_refused_and_mended(
    tmp_path: Path, durability: str, length: int
) -> None:
    server = Server(tmp_path / "server", {"TOPICS_WAL_SHARDS": "1"})
    api = server.start()
    api.put("alpha", {"durability": durability})
    last = appended(api, 20)
    server.signal(signal.SIGKILL)
    (file,) = journal_files(server.data_dir)
    whole = file.read_bytes()
    assert used_bytes(file) > length
    with file.open("r+b") as target:
        target.truncate(length)
    assert str(file) in server.refusal()
    report = verify(OsFs(), str(server.data_dir))
    assert any(str(file) in problem for problem in report.problems)
    shortened = file.read_bytes()
    # With the original file back, everything is as before; the repair works on a copy.
    shutil.copytree(server.directory, tmp_path / "other")
    file.write_bytes(whole)
    assert sorted(gaps_of(server.start(), "alpha")[0]) == list(range(1, last + 1))
    server.signal(signal.SIGKILL)
    other = Server(tmp_path / "other", {"TOPICS_WAL_SHARDS": "1"})
    assert (other.data_dir / "wal" / file.name).read_bytes() == shortened
    code, told, output = run_repair(other.data_dir, "--accept-loss")
    assert code == 0, output
    assert told["regions"]
    api = other.start()
    if length > 64:
        records, gone, reasons = gaps_of(api, "alpha")
        assert set(range(1, last + 1)) <= set(records) | gone
        assert reasons == {"damaged"}
        assert appended(api, 1) > last, "no seq is given out twice"
    other.signal(signal.SIGKILL)
