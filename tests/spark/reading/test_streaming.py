"""Streams: offsets, limits, start positions, losses, and a query into a file sink."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from spark_jobs.reader.options import parse_options
from spark_jobs.reader.places.segment import SegmentGone
from tests.contract.driver import Api, Server, eventually, good
from tests.spark.conftest import HAS_SPARK, INSTALL
from tests.spark.logs import seal_all

if not HAS_SPARK:
    pytest.skip(f"PySpark is not installed; {INSTALL}", allow_module_level=True)

from spark_jobs.reader.streaming import DataLoss, ManifestMissing, TopicsStreamReader

ALL = SimpleNamespace()


def reader(data_dir: Path, **options: str) -> TopicsStreamReader:
    """A reader as Spark creates it."""
    parsed = parse_options({"path": str(data_dir), **options})
    return TopicsStreamReader(parsed, parsed.query)


def rows_between(made: TopicsStreamReader, start: dict[str, Any], end: dict[str, Any]) -> list[str]:
    """`topic:seq` of a batch."""
    return [
        f"{row['topic']}:{row['seq']}"
        for partition in made.partitions(start, end)
        for batch in made.read(partition)
        for row in batch.to_pylist()
    ]


def add_sealed(api: Api, topic: str, count: int) -> None:
    """Append and seal this many records more."""
    api.add(topic, *range(count))
    good(api.http.post("/v0/admin/seal", json={"topics": [topic]}))


def test_batches_follow_each_other(server: Server) -> None:
    api = server.start()
    add_sealed(api, "a", 10)
    add_sealed(api, "b", 4)
    stream = reader(server.data_dir)
    start = stream.initialOffset()
    end = stream.latestOffset(start, ALL)
    assert end == {"topics": {"a": [1, 11], "b": [1, 5]}}
    assert len(rows_between(stream, start, end)) == 14
    assert stream.latestOffset(end, ALL) == end
    assert rows_between(stream, end, end) == []
    add_sealed(api, "a", 2)
    later = reader(server.data_dir).latestOffset(end, ALL)
    assert rows_between(reader(server.data_dir), end, later) == ["a:11", "a:12"]


def test_a_limit_is_shared_and_kept(server: Server) -> None:
    api = server.start()
    for _ in range(3):
        add_sealed(api, "a", 10)
    add_sealed(api, "b", 5)
    stream = reader(server.data_dir, maxRecordsPerTrigger="8")
    limit = stream.getDefaultReadLimit()
    start, seen = stream.initialOffset(), []
    for _ in range(20):
        end = stream.latestOffset(start, limit)
        if end == start:
            break
        batch = rows_between(stream, start, end)
        assert 0 < len(batch) <= 8
        seen += batch
        start = end
    assert sorted(seen) == sorted(
        [*(f"a:{n}" for n in range(1, 31)), *(f"b:{n}" for n in range(1, 6))]
    )


def test_where_a_stream_begins(server: Server) -> None:
    api = server.start()
    add_sealed(api, "a", 10)
    latest = reader(server.data_dir, startingOffsets="latest").initialOffset()
    assert latest == {"topics": {"a": [1, 11]}}
    stream = reader(server.data_dir, startingOffsets='{"a": 8}')
    start = stream.initialOffset()
    assert rows_between(stream, start, stream.latestOffset(start, ALL)) == ["a:8", "a:9", "a:10"]
    with pytest.raises(ValueError, match="startingOffsets is earliest"):
        reader(server.data_dir, startingOffsets="soon").initialOffset()


def test_deletes_are_no_loss_and_evictions_are(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    api = server.start()
    add_sealed(api, "a", 10)
    stream = reader(server.data_dir)
    start = {"topics": {"a": [1, 3]}}
    good(api.delete("a", before_seq=6))
    seal_all(api)
    assert rows_between(stream, start, stream.latestOffset(start, ALL)) == [
        f"a:{n}" for n in range(6, 11)
    ]
    good(api.put("a", {"cap_records": 2}))
    add_sealed(api, "a", 1)
    with pytest.raises(DataLoss, match=r"seqs 3\.\.9 of a were evicted unread"):
        stream.latestOffset(start, ALL)
    patient = reader(server.data_dir, failOnDataLoss="false")
    end = patient.latestOffset(start, ALL)
    assert rows_between(patient, start, end) == ["a:10", "a:11"]
    assert "evicted unread" in capsys.readouterr().err


def test_a_dropped_topic_is_a_loss_and_a_new_one_begins_anew(server: Server) -> None:
    api = server.start()
    add_sealed(api, "a", 5)
    stream = reader(server.data_dir)
    end = stream.latestOffset(stream.initialOffset(), ALL)
    good(api.drop("a"))
    eventually(lambda: not list(server.data_dir.rglob("*.data")), "files are gone")
    with pytest.raises(DataLoss, match="a is gone"):
        stream.latestOffset(end, ALL)
    add_sealed(api, "a", 2)
    with pytest.raises(DataLoss, match=r"made again \(epoch 2\)"):
        stream.latestOffset(end, ALL)
    patient = reader(server.data_dir, failOnDataLoss="false")
    later = patient.latestOffset(end, ALL)
    assert rows_between(patient, end, later) == ["a:1", "a:2"]


@pytest.mark.slow
def test_a_query_reads_what_is_there_and_what_comes(
    spark: Any, server: Server, tmp_path: Path
) -> None:
    api = server.start()
    add_sealed(api, "a", 25)

    def run() -> int:
        frame = (
            spark.readStream.format("topics")
            .option("maxRecordsPerTrigger", "10")
            .load(str(server.data_dir))
        )
        query = (
            frame.writeStream.format("parquet")
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .trigger(availableNow=True)
            .start(str(tmp_path / "out"))
        )
        assert query.awaitTermination(60)
        return len(query.recentProgress)

    assert run() >= 3, "the limit makes several batches"
    add_sealed(api, "a", 5)
    run()
    rows = spark.read.parquet(str(tmp_path / "out")).select("seq").collect()
    assert sorted(r.seq for r in rows) == list(range(1, 31))


def hidden(path: Path) -> Path:
    """Move a file or folder away; return its new path."""
    return path.rename(path.with_name(f"{path.name}.away"))


def test_a_topic_that_is_away_for_a_trigger_goes_on_where_it_was(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    api = server.start()
    add_sealed(api, "a", 5)
    add_sealed(api, "b", 3)
    stream = reader(server.data_dir, failOnDataLoss="false")
    place = stream.latestOffset(stream.initialOffset(), ALL)
    folder = next(p for p in server.data_dir.glob("segments/*") if b'"a"' in manifest_of(p))
    away = hidden(folder / "manifest")
    for _ in range(2):
        assert stream.latestOffset(place, ALL) == place, "its place is kept"
    assert capsys.readouterr().err.count("a is gone") == 1
    strict = reader(server.data_dir)
    with pytest.raises(DataLoss, match="a is gone"):
        strict.latestOffset(place, ALL)
    away.rename(folder / "manifest")
    add_sealed(api, "a", 2)
    for made in (stream, strict):
        end = made.latestOffset(place, ALL)
        assert rows_between(made, place, end) == ["a:6", "a:7"]


def manifest_of(folder: Path) -> bytes:
    """The bytes of its manifest."""
    path = folder / "manifest"
    return path.read_bytes() if path.exists() else b""


@pytest.mark.parametrize("mode", ["true", "false"])
def test_a_batch_whose_manifest_is_away_is_not_passed_over(server: Server, mode: str) -> None:
    """The manifest disappears between the offset and the plan: the batch fails, and is planned
    again.
    """
    api = server.start()
    add_sealed(api, "a", 4)
    stream = reader(server.data_dir, failOnDataLoss=mode)
    start = stream.initialOffset()
    end = stream.latestOffset(start, ALL)
    (path,) = server.data_dir.glob("segments/*/manifest")
    away = hidden(path)
    with pytest.raises(ManifestMissing, match="nothing is passed over"):
        stream.partitions(start, end)
    away.rename(path)
    assert len(rows_between(stream, start, end)) == 4


def test_what_was_consumed_is_not_looked_at(server: Server) -> None:
    """Segments of earlier batches may move or disappear, and a trigger spends no time on them."""
    api = server.start()
    for _ in range(3):
        add_sealed(api, "a", 5)
    stream = reader(server.data_dir)
    place = stream.latestOffset(stream.initialOffset(), ALL)
    for path in server.data_dir.glob("segments/*/*.data"):
        path.unlink()
    assert stream.latestOffset(place, ALL) == place
    add_sealed(api, "a", 2)
    end = stream.latestOffset(place, ALL)
    assert rows_between(stream, place, end) == ["a:16", "a:17"]


@pytest.mark.parametrize("mode", ["true", "false"])
def test_the_sink_is_exact_over_kills_and_manifests_that_come_and_go(
    server: Server, mode: str
) -> None:
    """A driver like Spark's: offsets are stored before a batch is planned, and a killed batch is
    repeated.

    It is killed 20 times and more, at any of its steps; manifests disappear and return between
    these, segments move to the cold folder. The sink replaces a batch by its number.
    """
    chance = random.Random(7)
    cold = server.directory / "cold"
    server.env = {
        **server.env,
        "TOPICS_COLD_DIR": str(cold),
        "TOPICS_HOT_RETAIN_SEGMENTS": "1",
    }
    api = server.start()
    options = {"failOnDataLoss": mode, "coldDir": str(cold), "maxRecordsPerTrigger": "7"}
    heads = dict.fromkeys("abc", 0)
    batches: list[list[str]] = []  # the sink
    offsets: list[dict[str, Any]] = []  # the checkpoint: the end of each batch
    kills = 0
    stream = reader(server.data_dir, **options)

    def restarted() -> TopicsStreamReader:
        nonlocal kills
        kills += 1
        return reader(server.data_dir, **options)

    def append() -> None:
        topic = chance.choice("abc")
        count = chance.randint(1, 9)
        add_sealed(api, topic, count)
        heads[topic] += count
        # and a segment moves to the cold folder
        good(api.put(topic, {"cap_records": 10_000 + heads[topic]}))

    def step() -> bool:
        """One step of the driver; return whether there was anything to do. Raises if it fails."""
        if len(offsets) == len(batches):
            start = offsets[-1] if offsets else stream.initialOffset()
            end = stream.latestOffset(start, stream.getDefaultReadLimit())
            if end == start:
                return False
            offsets.append(end)
            return True
        start = offsets[-2] if len(offsets) > 1 else stream.initialOffset()
        rows = rows_between(stream, start, offsets[-1])
        if chance.random() < 0.3:
            raise SegmentGone("killed before the batch was written", "")
        batches.append(rows)
        return True

    for _ in range(60):
        append()
        manifests = sorted(server.data_dir.glob("segments/*/manifest"))
        away = hidden(chance.choice(manifests)) if chance.random() < 0.4 else None
        for _ in range(chance.randint(1, 4)):
            try:
                step()
            except (DataLoss, ManifestMissing, SegmentGone):
                stream = restarted()
        if away is not None:
            away.rename(away.with_name("manifest"))
        if chance.random() < 0.2:
            stream = restarted()
    for _ in range(1000):
        try:
            if not step():
                break
        except SegmentGone:
            stream = restarted()
    seen = [row for batch in batches for row in batch]
    assert kills >= 20
    assert any(cold.rglob("*.data"))
    assert sorted(seen) == sorted(f"{t}:{n}" for t in "abc" for n in range(1, heads[t] + 1))
