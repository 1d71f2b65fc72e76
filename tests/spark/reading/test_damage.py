"""Must-show 3: every kind of damage is refused by file name and seqs, or skipped and reported.

Segment 3 of the webhook events (seqs 41 to 60) is damaged in a copy of their directory. A read that
returns rows returns correct ones: none differs from the stored record.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest

from spark_jobs.reader.listing import Lister, list_segments
from spark_jobs.reader.report import ReadReport, Skipped
from tests.contract.driver import Server
from tests.spark.reading.test_reader import LEFT, query, read, rows_of, webhooks
from topics_server.values.errors import Corrupt, StartRefused, StorageError
from topics_server.wal.format import manifest
from topics_server.wal.format.segment import DEAD, decode_index
from topics_server.wal.segments.salvage import rebuild_index

__all__ = ["webhooks"]

DATA: Final = "0000000003.data"
IDX: Final = "0000000003.idx"
WHOLE: Final = (41, 60)
Change = Callable[[bytearray, Path], None]


def flip(at: Callable[[bytearray, Path], int]) -> Change:
    """Flip one bit of the byte at a position."""

    def change(content: bytearray, path: Path) -> None:
        content[at(content, path)] ^= 0x10

    return change


def put(start: int, value: bytes) -> Change:
    """Write other bytes at a position."""

    def change(content: bytearray, _path: Path) -> None:
        content[start : start + len(value)] = value

    return change


def record_at(row: int, offset: int) -> Callable[[bytearray, Path], int]:
    """The position of a byte of a row's record."""

    def place(_content: bytearray, path: Path) -> int:
        columns = decode_index((path.parent / IDX).read_bytes())
        return int(columns.rows["offset"][row]) + offset

    return place


def cut(content: bytearray, _path: Path) -> None:
    """Remove the last ten bytes."""
    del content[-10:]


def of_another(content: bytearray, path: Path) -> None:
    """Put the file of the next segment under this name."""
    content[:] = path.with_name(path.name.replace("3", "4")).read_bytes()


def empty(content: bytearray, _path: Path) -> None:
    content.clear()


def bad_flag(content: bytearray, _path: Path) -> None:
    """The flag of row 7, seq 48."""
    content[len(content) - 20 + 7] = 0x41


CASES: Final[dict[str, tuple[str, Change, str, tuple[int, int]]]] = {
    "data header": (DATA, flip(lambda *_: 20), "checksum of the segment's header", WHOLE),
    "data magic": (DATA, put(0, b"x"), "does not start with", WHOLE),
    "record header": (DATA, flip(record_at(5, 3)), "fail their checksum", (46, 46)),
    "payload": (DATA, flip(record_at(5, 200)), "fail their checksum", (46, 46)),
    "first payload": (DATA, flip(record_at(0, 80)), "fail their checksum", (41, 41)),
    "flag": (DATA, bad_flag, "delete flag of seq 48", (48, 48)),
    "data cut": (DATA, cut, "bytes, listed with", WHOLE),
    "data empty": (DATA, empty, "bytes, listed with", WHOLE),
    "foreign data": (DATA, of_another, "", WHOLE),
    "index header": (IDX, flip(lambda *_: 60), "", WHOLE),
    "index row": (IDX, flip(lambda *_: 300), "checksum of the index fails", WHOLE),
    "index text": (IDX, flip(lambda content, _: len(content) - 9), "checksum of the index", WHOLE),
    "index cut": (IDX, cut, "size of the index", WHOLE),
    "index empty": (IDX, empty, "shorter than an index's header", WHOLE),
    "foreign index": (IDX, of_another, "the index of another segment", WHOLE),
}


@pytest.fixture
def folder(webhooks: Server, tmp_path: Path) -> Path:
    """A copy of the directory that may be damaged."""
    target = tmp_path / "copy"
    shutil.copytree(webhooks.data_dir / "segments", target / "segments")
    shutil.copy(webhooks.data_dir / "FORMAT", target)
    return target


def damage(folder: Path, name: str, change: Change) -> Path:
    """Damage a file of the only topic; return its path."""
    (path,) = folder.rglob(name)
    content = bytearray(path.read_bytes())
    change(content, path)
    path.write_bytes(content)
    return path


def tolerant(folder: Path, **options: str) -> tuple[list[dict[str, Any]], list[Skipped]]:
    """The rows of a tolerant read, and its report of what it left out."""
    report, asked = ReadReport(), query(checks="tolerant", **options)
    listing = list_segments(str(folder), asked)
    rows = rows_of(listing, asked, report)
    return rows, [*listing.skipped, *report.skipped]


@pytest.mark.parametrize("flags", ["listing", "read"])
@pytest.mark.parametrize("case", CASES)
def test_damage_is_refused_by_name_or_skipped_and_reported(
    case: str, flags: str, folder: Path
) -> None:
    name, change, said, (first, last) = CASES[case]
    before = read(folder)
    path = damage(folder, name, change)
    with pytest.raises(StorageError) as caught:
        read(folder, query(flags=flags))
    assert caught.value.path == str(path)
    assert name in str(caught.value)
    assert said in str(caught.value)
    assert f"seqs {first}..{last} of topic webhooks" in str(caught.value)
    rows, skipped = tolerant(folder, flags=flags)
    assert rows == [row for row in before if not first <= row["seq"] <= last]
    assert [(s.topic, Path(s.file).name, s.first_seq, s.last_seq) for s in skipped] == [
        ("webhooks", name, first, last)
    ]


@pytest.fixture
def salvaged(folder: Path) -> Path:
    """The directory after a server rebuilt the index of a damaged segment: seq 46 is lost."""
    data = damage(folder, DATA, flip(record_at(5, 200)))
    lister = Lister(str(folder), query())
    (entry,) = [e for e in lister.topics["webhooks"].manifest.segments if e.first_seq == 41]
    topic_id = lister.topics["webhooks"].manifest.topic_id
    index = data.with_name(IDX)
    index.write_bytes(rebuild_index(data.read_bytes(), topic_id, entry))
    assert decode_index(index.read_bytes()).rows["xxh3"][5] == 0
    return folder


@pytest.mark.parametrize("is_whole_again", [False, True])
@pytest.mark.parametrize(
    "options", [{}, {"columns": "seq,tag"}, {"columns": "seq", "tags": "push"}, {"tags": "push"}]
)
def test_a_lost_row_is_damage_for_every_read(
    options: dict[str, str], is_whole_again: bool, salvaged: Path, webhooks: Server
) -> None:
    """The row's time, names and size are unknown, so no read may skip it. That also holds when the
    records are intact again but the index is not yet.
    """
    if is_whole_again:
        (whole,) = webhooks.data_dir.rglob(DATA)
        next(salvaged.rglob(DATA)).write_bytes(whole.read_bytes())
    with pytest.raises(Corrupt, match=r"seqs 46\.\.46 of topic webhooks"):
        read(salvaged, query(**options))
    rows, skipped = tolerant(salvaged, **options)
    assert [(s.first_seq, s.last_seq) for s in skipped] == [(46, 46)]
    tag = options.get("tags")
    expected = [e.seq for e in LEFT if e.seq != 46 and (tag is None or e.tag == tag)]
    assert [row["seq"] for row in rows] == expected
    assert read(salvaged, query(**options, fromSeq="47")), "what is not asked for is not met"


def test_a_lost_row_that_was_deleted_is_none(salvaged: Path) -> None:
    (data,) = salvaged.rglob(DATA)
    content = bytearray(data.read_bytes())
    content[len(content) - 20 + 5] = DEAD
    data.write_bytes(content)
    assert 46 not in [row["seq"] for row in read(salvaged, query(columns="seq"))]
    with pytest.raises(Corrupt, match=r"seqs 46\.\.46"):
        read(salvaged, query(columns="seq,deleted", deleted="true"))


def test_a_lost_row_may_be_of_any_time_between_its_neighbours(salvaged: Path) -> None:
    (index,) = salvaged.rglob(IDX)
    times = decode_index(index.read_bytes()).rows["ts"].tolist()
    before, after = times[4], times[6]
    for start, end, is_met in (
        (before, before + 1, True),
        (after, after + 1, True),
        (after + 1, after + 10**9, False),
        (before - 10**9, before, False),
    ):
        asked = query(columns="seq", fromTs=str(start), toTs=str(end))
        if is_met:
            with pytest.raises(Corrupt, match=r"seqs 46\.\.46"):
                read(salvaged, asked)
        else:
            read(salvaged, asked)


@pytest.mark.parametrize("name", [DATA, IDX])
def test_a_missing_file_is_named(name: str, folder: Path) -> None:
    before = read(folder)
    (path,) = folder.rglob(name)
    path.unlink()
    with pytest.raises(StorageError, match=rf"{name}.*seqs 41\.\.60 of webhooks") as caught:
        read(folder)
    assert caught.value.path == str(path)
    rows, skipped = tolerant(folder)
    assert rows == [row for row in before if not 41 <= row["seq"] <= 60]
    assert [(s.first_seq, s.last_seq) for s in skipped] == [WHOLE]


@pytest.mark.parametrize(
    ("name", "what", "newest"),
    [(DATA, "segment", 4), (IDX, "segment", 4), ("manifest", "manifest", manifest.VERSION)],
)
def test_a_newer_format_is_never_taken_for_damage(
    name: str, what: str, newest: int, folder: Path
) -> None:
    path = damage(folder, name, put(8, (newest + 1).to_bytes(2, "little")))
    told = f"{what} format {newest + 1} is newer than {newest}"
    for checks in ("strict", "tolerant"):
        with pytest.raises(StartRefused, match=told) as caught:
            read(folder, query(checks=checks))
        assert caught.value.path == str(path)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (flip(lambda *_: 100), "checksum of the manifest"),
        (flip(lambda *_: 17), "checksum of the manifest"),
        (cut, "size of the manifest"),
        (empty, "shorter than a manifest's header"),
        (put(0, b"x"), "does not start with"),
    ],
)
def test_a_damaged_manifest_is_named(change: Change, said: str, folder: Path) -> None:
    path = damage(folder, "manifest", change)
    with pytest.raises(Corrupt, match=said) as caught:
        read(folder)
    assert caught.value.path == str(path)
    rows, skipped = tolerant(folder)
    assert rows == []
    assert [s.file for s in skipped] == [str(path)]


def test_foreign_and_unfinished_files_are_not_read(folder: Path) -> None:
    before = read(folder)
    (topic,) = (folder / "segments").iterdir()
    shutil.copy(topic / DATA, topic / "0000000099.data")
    (topic / f"{DATA}.tmp").write_bytes(b"x")
    (folder / "segments" / "notes").mkdir()
    (folder / "segments" / "99").mkdir()
    assert read(folder) == before


def test_damage_outside_the_read_is_not_noticed(folder: Path) -> None:
    """A read of other seqs, or without payload, neither pays for a damaged record nor sees it."""
    before = read(folder)
    damage(folder, DATA, flip(record_at(5, 200)))
    assert read(folder, query(toSeq="40")) == [r for r in before if r["seq"] <= 40]
    assert [r["seq"] for r in read(folder, query(columns="seq"))] == [r["seq"] for r in before]
    # A few rows are checked one by one: neighbours of a damaged one are correct.
    few = query(fromSeq="47", toSeq="49")
    assert read(folder, few) == [r for r in before if 47 <= r["seq"] <= 49]


def test_every_flipped_byte_is_reported_or_changes_nothing(folder: Path) -> None:
    """No flipped byte of a segment's files gives a wrong row; the test flips 200 positions in
    each.
    """
    before = read(folder)
    for name in (DATA, IDX):
        (path,) = folder.rglob(name)
        whole = path.read_bytes()
        step = max(1, len(whole) // 200)
        for at in range(0, len(whole), step):
            turned = bytearray(whole)
            turned[at] ^= 0x41
            path.write_bytes(turned)
            try:
                rows, skipped = tolerant(folder)
            except StartRefused:
                continue  # the version's own byte
            left = {seq for s in skipped for seq in range(s.first_seq, s.last_seq + 1)}
            assert rows == [row for row in before if row["seq"] not in left], f"{name} at {at}"
            assert rows == before or skipped
        path.write_bytes(whole)
