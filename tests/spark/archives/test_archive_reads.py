"""The reader reads an archive in a folder like a data directory: rows, ranges, damage, streams."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import pytest

from spark_jobs import integrity_audit, topic_volume
from spark_jobs.reader.listing import Lister, list_segments
from spark_jobs.reader.places.opening import KnownPlace
from spark_jobs.reader.places.segment import Segment, SegmentGone, SegmentObjects
from spark_jobs.reader.query import Query
from spark_jobs.reader.report import ReadReport
from spark_jobs.reader.segments import read_segments
from tests.spark.archives.conftest import TICKS, ArchivedMoment
from tests.spark.conftest import HAS_SPARK, INSTALL
from tests.spark.logs import Row, digests
from tests.spark.reading.test_reader import AS_IS, query, read, rows_of
from tests.spark.reading.test_seeds import by_topic
from tests.vectors.stored import VECTORS
from topics_server.archive.continuous.places.shared_folder import SharedFolder
from topics_server.archive.continuous.restoring import restore_moment
from topics_server.values.errors import Corrupt, StartRefused, StorageError
from topics_server.wal import layout
from topics_server.wal.format.segment import decode_index
from topics_server.wal.fs import OsFs

if not HAS_SPARK:
    pytest.skip(f"PySpark is not installed; {INSTALL}", allow_module_level=True)

from spark_jobs.datasource import TopicsReader, register, warn_unsealed
from spark_jobs.reader.options import parse_options
from spark_jobs.reader.streaming import DataLoss, TopicsStreamReader

# Making the archive, or starting Spark, takes long on a busy machine.
pytestmark = pytest.mark.timeout(300)

ALL: Final = SimpleNamespace()


def same(found: list[Row], moment: ArchivedMoment) -> None:
    """Check by a hash of each column and topic that the rows are those of a diff at this moment."""
    topics = by_topic([row for row in found if row["topic"] != TICKS])
    for name, rows in moment.rows.items():
        assert digests(topics.get(name, [])) == digests(rows), name
    assert topics.keys() == {name for name, rows in moment.rows.items() if rows}


# -- rows --------------------------------------------------------------------------------------


def test_rows_are_those_of_a_diff(first: ArchivedMoment, second: ArchivedMoment) -> None:
    for moment in (first, second):
        same(read(moment.folder), moment)
        epochs = {row["topic"]: row["epoch"] for row in read(moment.folder)}
        epochs.pop(TICKS, None)
        assert epochs == {name: moment.epochs[name] for name in epochs}
        assert sum(map(len, moment.rows.values())) > 60
        assert sum(map(bool, moment.rows.values())) >= 6
    assert "dropped" in first.rows
    assert "dropped" not in second.rows
    assert [row["seq"] for row in second.rows["orders"]] == list(range(4, 31))


def test_spark_reads_an_archive(
    spark: Any, second: ArchivedMoment, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    register(spark)
    columns = ", ".join(f"{name} {kind}" for name, kind in AS_IS)
    report = tmp_path / "report"
    reader = spark.read.format("topics").option("report", str(report))
    frame = reader.schema(columns).load(second.folder.as_uri())
    same([row.asDict() for row in frame.collect()], second)
    shutil.rmtree(report)
    found = frame.where("topic = 'orders' and tag = 'late' and seq < 20").collect()
    assert [row.seq for row in found] == [17, 18, 19]
    lines = [line for file in report.glob("*.jsonl") for line in file.read_text().splitlines()]
    names = {Path(name).name for line in lines for name in json.loads(line)["names"]}
    # Seqs 9 to 16 have another tag: at most the index of their segment is read.
    assert {name.partition("-")[0] for name in names if name.endswith(".data")} == {"0000000003"}


def test_a_job_reads_an_archive_and_writes_beside_it(
    spark: Any, copied: Path, second: ArchivedMoment, tmp_path: Path
) -> None:
    out = tmp_path / "volume"
    words = [copied.as_uri(), "--rows", "0", "--topics", "orders,s3.fading"]
    assert topic_volume.main([*words, "--out", str(out)]) == 0
    totals = spark.read.parquet(str(out)).groupBy("topic").sum("records").collect()
    found = {row.topic: row[1] for row in totals}
    assert found == {name: len(second.rows[name]) for name in found}
    assert "orders" in found
    assert topic_volume.main([*words, "--out", str(copied / "volume")]) == 2
    for place in (str(copied), "s3://bucket/archive"):
        with pytest.raises(SystemExit):
            integrity_audit.main([place])


def test_ranges_open_the_objects_they_need(second: ArchivedMoment) -> None:
    report = ReadReport()
    asked = query(topics="orders", fromSeq="10", toSeq="12", columns="seq,data")
    listing = list_segments(str(second.folder), asked)
    rows = rows_of(listing, asked, report)
    assert [row["seq"] for row in rows] == [10, 11, 12]
    assert report.segments == 1
    assert {Path(name).suffix for name in report.names} == {".idx", ".data"}
    assert all(name.startswith(str(second.folder / "segments")) for name in report.names)
    times = sorted({row["ts"] for row in second.rows["orders"]})
    late = read(second.folder, query(topics="orders", fromTs=str(times[-1])))
    assert [row["seq"] for row in late] == [
        row["seq"] for row in second.rows["orders"] if row["ts"] >= times[-1]
    ]


def test_deleted_rows_are_shown_on_request(second: ArchivedMoment) -> None:
    rows = read(second.folder, query(topics="orders", deleted="true"))
    assert [(row["seq"], row["data"]) for row in rows if row["deleted"]] == [
        (seq, None) for seq in (1, 2, 3)
    ]


def test_flags_are_those_of_the_base_whatever_is_asked(second: ArchivedMoment) -> None:
    asked = query(topics="orders", flags="read")
    listing = list_segments(str(second.folder), asked)
    assert all(segment.dead is not None for segment in listing.segments)
    assert len(rows_of(listing, asked)) == len(second.rows["orders"])


def test_what_is_not_sealed_is_counted(
    second: ArchivedMoment, capsys: pytest.CaptureFixture[str]
) -> None:
    listing = list_segments(str(second.folder), replace(Query(), columns=AS_IS))
    assert listing.as_of_ts is not None
    listing.topics[0].manifest = replace(listing.topics[0].manifest, head_seq=10_000)
    warn_unsealed(listing, str(second.folder))
    told = capsys.readouterr().err
    assert "were not sealed in the newest base of" in told
    assert "TOPICS_ARCHIVE_BASE_INTERVAL_MS" in told


def test_a_pruned_archive_is_read(copied: Path, second: ArchivedMoment) -> None:
    before = len(list((copied / "bases").iterdir()))
    words = ["archive", "prune", copied.as_uri(), "--keep", "1", "--yes", "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "topics_server", *words], capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert len(list((copied / "bases").iterdir())) == 1 < before
    same(read(copied), second)


def test_the_golden_archive_reads_as_its_restored_base(tmp_path: Path) -> None:
    with tarfile.open(VECTORS / "archive-v1" / "archive.tar.gz") as packed:
        packed.extractall(tmp_path, filter="data")
    folder = tmp_path / "archive"
    store = SharedFolder.open(OsFs(), str(folder))
    newest = json.loads((VECTORS / "archive-v1" / "expected.json").read_bytes())["base_parts"][0]
    target = tmp_path / "restored"
    restore_moment(OsFs(), store, str(target), lambda moments: moments.at_base(newest))
    rows, restored = read(folder, now_ms=0), read(target, now_ms=0)
    assert len(rows) > 100
    assert rows == restored


# -- what is missing or damaged ------------------------------------------------------------------


def newest_base(folder: Path) -> Path:
    """The folder of the newest base."""
    return max(folder.glob("bases/*"))


def newest_part(folder: Path) -> Path:
    return max(path for path in folder.glob("parts/*/*") if path.name.isdigit())


def orders(folder: Path, suffix: str) -> Path:
    """An object of the segment with seqs 9 to 16 of `orders`."""
    listing = list_segments(str(folder), query(topics="orders", fromSeq="9", toSeq="16"))
    (segment,) = listing.segments
    return Path(segment.paths(suffix)[0])


OBJECTS: Final[dict[str, Callable[[Path], Path]]] = {
    "mark": lambda folder: folder / "ARCHIVE",
    "facts": lambda folder: newest_base(folder) / "backup.json",
    "manifests": lambda folder: newest_base(folder) / "sealed-1",
    "records": lambda folder: orders(folder, layout.DATA_SUFFIX),
    "index": lambda folder: orders(folder, layout.IDX_SUFFIX),
}


@pytest.mark.parametrize("which", OBJECTS)
def test_a_missing_object_is_named(copied: Path, which: str) -> None:
    path = OBJECTS[which](copied)
    path.unlink()
    kind = StartRefused if which == "mark" else StorageError
    with pytest.raises(kind) as caught:
        read(copied)
    named = copied if which == "mark" else path
    assert str(named) in str(caught.value)
    if which in ("records", "index"):
        assert isinstance(caught.value, SegmentGone)
        assert "seqs 9..16 of orders" in str(caught.value)


@pytest.mark.parametrize("which", [*OBJECTS, "part"])
def test_a_damaged_object_is_named(copied: Path, which: str) -> None:
    path = newest_part(copied) if which == "part" else OBJECTS[which](copied)
    content = bytearray(path.read_bytes())
    content[len(content) // 2 if which != "part" else 40] ^= 0x10
    path.write_bytes(content)
    with pytest.raises(Corrupt) as caught:
        read(copied)
    assert str(path) in str(caught.value)


def test_an_object_that_was_cut_off_is_named(copied: Path) -> None:
    for suffix in (layout.DATA_SUFFIX, layout.IDX_SUFFIX):
        path = orders(copied, suffix)
        content = path.read_bytes()
        path.write_bytes(content[:-9])
        with pytest.raises(Corrupt) as caught:
            read(copied)
        assert str(path) in str(caught.value)
        path.write_bytes(content)


def test_a_tolerant_read_leaves_out_what_is_damaged(copied: Path, second: ArchivedMoment) -> None:
    path = orders(copied, layout.DATA_SUFFIX)
    idx = decode_index(orders(copied, layout.IDX_SUFFIX).read_bytes())
    content = bytearray(path.read_bytes())
    content[int(idx.rows["offset"][2]) + 50] ^= 0x10
    path.write_bytes(content)
    report, asked = ReadReport(), query(checks="tolerant", topics="orders")
    rows = rows_of(list_segments(str(copied), asked), asked, report)
    assert [row["seq"] for row in rows] == [
        row["seq"] for row in second.rows["orders"] if row["seq"] != 11
    ]
    assert [(each.file, each.first_seq, each.last_seq) for each in report.skipped] == [
        (str(path), 11, 11)
    ]
    sealed = newest_base(copied) / "sealed-1"
    sealed.write_bytes(b"")
    listing = list_segments(str(copied), asked)
    assert (listing.segments, [each.file for each in listing.skipped]) == ([], [str(sealed)])


def test_a_damaged_file_that_was_archived_as_it_was_is_read_with_its_flags(
    copied: Path, second: ArchivedMoment
) -> None:
    """The base stores no flags of this file: they follow its records."""
    (segment,) = list_segments(str(copied), query(topics="orders", toSeq="8")).segments
    assert segment.objects is not None
    records = bytearray((copied / segment.objects.data).read_bytes())
    idx = decode_index((copied / segment.objects.idx).read_bytes())
    records[int(idx.rows["offset"][6]) + 50] ^= 0x10
    flags = bytes([0xFF] * 3 + [0] * 5)
    (copied / "segments" / "odd.damaged.data").write_bytes(bytes(records) + flags)
    objects = SegmentObjects(
        str(copied), "segments/odd.damaged.data", segment.objects.idx, has_flags=True
    )
    damaged: Segment = replace(segment, objects=objects, dead=None)
    asked, report = query(checks="tolerant", columns="seq,data"), ReadReport()
    batches = list(read_segments([damaged], asked, report))
    assert [seq for batch in batches for seq in batch["seq"].to_pylist()] == [4, 5, 6, 8]
    assert [(each.first_seq, each.last_seq) for each in report.skipped] == [(7, 7)]


def test_what_is_no_archive_or_has_no_base_is_refused(copied: Path, tmp_path: Path) -> None:
    with pytest.raises(StartRefused, match="no cold folder"):
        read(copied, cold_dir=str(tmp_path))
    shutil.rmtree(copied / "parts")
    with pytest.raises(StartRefused, match="has no base yet"):
        read(copied)
    with pytest.raises(StartRefused, match="is not a data directory"):
        read(tmp_path)


# -- planning ----------------------------------------------------------------------------------


def test_a_plan_reads_nothing_of_the_segments(copied: Path) -> None:
    reader = TopicsReader(*both(copied))
    shutil.rmtree(copied / "segments")
    planned = reader.partitions()
    assert planned
    with pytest.raises(SegmentGone, match="is not in the archive"):
        list(reader.read(planned[0]))


def both(folder: Path, **options: str) -> tuple[Any, Query]:
    """Options and query as Spark makes them."""
    parsed = parse_options({"path": folder.as_uri(), "warn": "false", **options})
    return parsed, parsed.query


def test_a_base_is_read_once(second: ArchivedMoment, first: ArchivedMoment) -> None:
    known = KnownPlace()
    Lister(str(second.folder), Query(), known=known)
    base = known.base
    assert base is not None
    Lister(str(second.folder), Query(), known=known)
    assert known.base is base
    Lister(str(first.folder), Query(), known=known)
    assert known.base is not base


# -- streams -----------------------------------------------------------------------------------


def batch_of(stream: TopicsStreamReader, start: Any, end: Any) -> list[str]:
    """`topic:seq` of a batch."""
    return [
        f"{row['topic']}:{row['seq']}"
        for partition in stream.partitions(start, end)
        for batch in stream.read(partition)
        for row in batch.to_pylist()
    ]


def test_a_stream_goes_on_with_the_next_base(
    first: ArchivedMoment, second: ArchivedMoment, tmp_path: Path
) -> None:
    place = tmp_path / "archive"
    shutil.copytree(first.folder, place)
    stream = TopicsStreamReader(*both(place, topics="orders"))
    start = stream.initialOffset()
    middle = stream.latestOffset(start, ALL)
    assert middle == {"topics": {"orders": [first.epochs["orders"], 17]}}
    assert batch_of(stream, start, middle) == [f"orders:{seq}" for seq in range(1, 17)]
    assert stream.latestOffset(middle, ALL) == middle
    shutil.copytree(second.folder, place, dirs_exist_ok=True)
    end = stream.latestOffset(middle, ALL)
    expected = [f"orders:{seq}" for seq in range(17, 31)]
    assert batch_of(stream, middle, end) == expected
    # After a restart the first batch is planned again, without the records that were deleted
    # meanwhile.
    again = TopicsStreamReader(*both(place, topics="orders"))
    assert batch_of(again, middle, end) == expected
    assert batch_of(again, start, middle) == [f"orders:{seq}" for seq in range(4, 17)]


def test_a_stream_stops_at_damage_and_goes_on_once_it_is_mended(copied: Path) -> None:
    path = orders(copied, layout.DATA_SUFFIX)
    good = path.read_bytes()
    at = int(decode_index(orders(copied, layout.IDX_SUFFIX).read_bytes()).rows["offset"][3])
    path.write_bytes(good[:at] + b"?" + good[at + 1 :])
    stream = TopicsStreamReader(*both(copied, topics="orders"))
    start = stream.initialOffset()
    end = stream.latestOffset(start, ALL)
    with pytest.raises(Corrupt) as caught:
        batch_of(stream, start, end)
    assert str(path) in str(caught.value)
    path.write_bytes(good)
    assert len(batch_of(stream, start, end)) == 27


def test_a_topic_that_was_dropped_is_lost_for_a_stream(
    first: ArchivedMoment, second: ArchivedMoment, tmp_path: Path
) -> None:
    place = tmp_path / "archive"
    shutil.copytree(first.folder, place)
    stream = TopicsStreamReader(*both(place, topics="dropped"))
    seen = stream.latestOffset(stream.initialOffset(), ALL)
    shutil.copytree(second.folder, place, dirs_exist_ok=True)
    with pytest.raises(DataLoss, match="dropped is gone"):
        stream.latestOffset(seen, ALL)
