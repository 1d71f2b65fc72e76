"""The source in Spark: options, push-down by files and bytes read, columns, packing, clusters."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from spark_jobs.reader.listing import list_segments
from spark_jobs.reader.options import parse_options
from spark_jobs.reader.packing import cost, pack
from spark_jobs.reader.query import Query
from spark_jobs.reader.report import ReadReport, read_reports
from tests.contract.driver import Server, eventually, good
from tests.crash.kills.test_webhooks import EVENT_LIST, TOPIC
from tests.spark.conftest import HAS_SPARK, INSTALL
from tests.spark.reading.test_reader import LEFT, read, webhooks

if not HAS_SPARK:
    pytest.skip(f"PySpark is not installed; {INSTALL}", allow_module_level=True)

from pyspark import cloudpickle

from spark_jobs.datasource import PUSH_DOWN, TopicsReader, payloads

__all__ = ["webhooks"]


@pytest.fixture
def reports(tmp_path: Path) -> Path:
    """The folder for the tasks' reports."""
    return tmp_path / "reports"


@pytest.fixture
def frame(spark: Any, webhooks: Server, reports: Path) -> Any:
    """All events, with reports."""
    return load(spark, webhooks.data_dir, report=str(reports))


def load(spark: Any, data_dir: Path, **options: str) -> Any:
    """A frame of a directory."""
    return spark.read.format("topics").options(**options).load(str(data_dir))


def spent(reports: Path) -> ReadReport:
    """The cost of the last query; the next one starts at zero."""
    report = read_reports(reports)
    shutil.rmtree(reports, ignore_errors=True)
    return report


def test_all_rows_and_columns(frame: Any) -> None:
    assert frame.columns == ["topic", "epoch", "seq", "ts", "node", "tag", "data", "meta"]
    rows = frame.orderBy("seq").collect()
    assert [(r.seq, r.tag, r.data.encode(), r.meta.encode()) for r in rows] == [
        (event.seq, event.tag, event.data, event.meta) for event in LEFT
    ]
    assert {(r.topic, r.epoch, r.node) for r in rows} == {(TOPIC, 1, None)}


def test_a_schema_prunes_columns(spark: Any, webhooks: Server, reports: Path) -> None:
    reader = spark.read.format("topics").option("report", str(reports))
    rows = reader.schema("tag string, seq bigint").load(str(webhooks.data_dir)).collect()
    assert sorted((r.seq, r.tag) for r in rows) == [(e.seq, e.tag) for e in LEFT]
    assert {Path(name).suffix for name in spent(reports).names} == {".idx"}
    columns = load(spark, webhooks.data_dir, columns="seq,ts", report=str(reports))
    assert columns.agg({"seq": "sum"}).first()[0] == sum(e.seq for e in LEFT)
    assert {Path(name).suffix for name in spent(reports).names} == {".idx"}
    binary = reader.schema("data binary, ts bigint").load(str(webhooks.data_dir))
    assert {bytes(r.data) for r in binary.collect()} == {e.data for e in LEFT}


def test_a_schema_that_cannot_be_is_refused(spark: Any, webhooks: Server) -> None:
    for schema, said in (("body string", "no column 'body'"), ("seq string", "can be bigint")):
        with pytest.raises(Exception, match=said):
            spark.read.format("topics").schema(schema).load(str(webhooks.data_dir)).collect()
    with pytest.raises(Exception, match="there is no option"):
        load(spark, webhooks.data_dir, tag="push").collect()


def test_filters_are_pushed_down(frame: Any, reports: Path) -> None:
    """The same rows as with Spark's own filter, from fewer files and bytes."""
    frame.collect()
    full = spent(reports)
    assert (full.segments, full.rows) == (17, len(LEFT))
    middle = sorted(e.seq for e in LEFT)[len(LEFT) // 2]
    time = frame.where(f"seq = {middle}").first().ts
    spent(reports)
    cases: list[tuple[str, Any, int]] = [
        ("tag = 'push'", lambda e: e.tag == "push", 17),
        ("tag in ('push', 'star')", lambda e: e.tag in ("push", "star"), 17),
        ("startswith(tag, 'team')", lambda e: e.tag.startswith("team"), 17),
        ("seq > 40 and seq <= 60", lambda e: 40 < e.seq <= 60, 1),
        ("seq between 41 and 61 and tag != 'ping'", lambda e: 41 <= e.seq <= 61, 2),
        ("seq = 5", lambda e: e.seq == 5, 1),
        ("topic = 'webhooks' and seq < 21", lambda e: e.seq < 21, 1),
        ("topic = 'other'", lambda e: False, 0),
        ("topic like 'web%' and seq >= 321", lambda e: e.seq >= 321, 1),
        ("ts < timestamp'2001-01-01'", lambda e: False, 0),
        ("node = 'n'", lambda e: False, 17),
        ("node is null and seq < 21", lambda e: e.seq < 21, 1),
    ]
    for text, keep, segments in cases:
        rows = sorted(row.seq for row in frame.where(text).collect())
        report = spent(reports)
        assert rows == [e.seq for e in LEFT if keep(e)], text
        assert report.segments == segments, text
        assert report.bytes < full.bytes / 2, text
    assert frame.where(frame.ts >= time).count() == sum(r.ts >= time for r in frame.collect())


def test_the_source_works_with_push_down_off(spark: Any, frame: Any, reports: Path) -> None:
    spark.conf.set(PUSH_DOWN, "false")
    try:
        rows = sorted(r.seq for r in frame.where("tag = 'push' and seq > 40").collect())
    finally:
        spark.conf.set(PUSH_DOWN, "true")
    assert rows == [e.seq for e in LEFT if e.tag == "push" and e.seq > 40]
    assert spent(reports).rows == len(LEFT), "Spark filtered"


def test_options_do_what_filters_do(spark: Any, webhooks: Server, reports: Path) -> None:
    found = load(
        spark, webhooks.data_dir, tags="push", topics="web*", fromSeq="10", report=str(reports)
    )
    assert sorted(r.seq for r in found.collect()) == [
        e.seq for e in LEFT if e.tag == "push" and e.seq >= 10
    ]
    assert spent(reports).files < 34
    deleted = load(spark, webhooks.data_dir, deleted="true").where("deleted").collect()
    assert {r.seq for r in deleted} == {e.seq for e in EVENT_LIST if e.tag == "issues"}
    assert {r.data for r in deleted} == {None}


def test_variant_and_a_schema_of_ones_own(frame: Any) -> None:
    variant = payloads(frame)
    name = variant.selectExpr("variant_get(data, '$.event', 'string') as event", "tag")
    assert all(r.event == r.tag for r in name.collect())
    typed = payloads(frame, "event string, payload struct<action string>")
    rows = typed.selectExpr("data.event", "tag", "data.payload.action").collect()
    assert all(r.event == r.tag for r in rows)
    assert any(r.action for r in rows)


def test_small_segments_are_packed_and_large_ones_cut(webhooks: Server) -> None:
    segments = list_segments(str(webhooks.data_dir), Query()).segments
    assert len(pack(segments, 1 << 30, 1, payload=True)) == 1
    whole = sum(cost(segment, payload=True) for segment in segments)
    for target in (64 * 1024, 300 * 1024, whole // 3):
        packed = pack(segments, target, 1, payload=True)
        rows = [(s.entry.segment_id, s.first_row, s.end_row) for part in packed for s in part]
        assert rows == sorted(rows), "in order"
        covered = sum(end - first for _, first, end in rows)
        assert covered == sum(segment.entry.record_count for segment in segments)
        assert max(sum(cost(s, payload=True) for s in part) for part in packed) <= 2 * target + (
            1 << 20
        )
    assert len(pack(segments, 1 << 20, 1, payload=True)) > 4


def test_pieces_of_a_segment_are_the_whole(spark: Any, webhooks: Server, reports: Path) -> None:
    cut = load(
        spark, webhooks.data_dir, partitionBytes="64k", minPartitions="1", report=str(reports)
    )
    assert sorted(r.data for r in cut.collect()) == sorted(e.data.decode() for e in LEFT)
    assert cut.rdd.getNumPartitions() > 17
    one = load(spark, webhooks.data_dir, partitionBytes="1g", minPartitions="1")
    assert one.rdd.getNumPartitions() == 1
    assert one.count() == len(LEFT)


def test_the_warning_says_what_is_not_sealed(
    spark: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server = Server(tmp_path / "server", {"TOPICS_SEGMENT_MAX_EVENTS": "10"})
    api = server.start()
    try:
        api.add("a", *range(17))
        good(api.http.post("/v0/admin/seal"))
        api.add("a", *range(3))
        good(api.delete("a", before_seq=11))  # drops the first segment, so the manifest is newer
        eventually(
            lambda: list_segments(str(server.data_dir), Query()).unsealed == 3, "a manifest says so"
        )
        assert load(spark, server.data_dir).count() == 7
        # Spark's workers write it to the driver's standard error; here the test writes it.
        for options in ({}, {"warn": "false"}):
            parsed = parse_options({"path": str(server.data_dir), **options})
            TopicsReader(parsed, parsed.query).partitions()
        said = capsys.readouterr().err
        assert said.count("at least 3 records") == 1
        assert "POST /v0/admin/seal" in said
        assert "topics export" in said
        assert len(read(server.data_dir)) == 7
    finally:
        server.stop()


def test_the_source_registers_itself() -> None:
    """Spark imports every package called `pyspark_*` and registers its `DefaultSource`."""
    import pyspark_topics

    assert pyspark_topics.DefaultSource.name() == "topics"


def test_an_executor_of_spark_loads_nothing_else_of_the_server(webhooks: Server) -> None:
    """A new process stands for the executor: Spark keeps its own for the next job of any test."""
    parsed = parse_options({"path": str(webhooks.data_dir)})
    reader = TopicsReader(parsed, parsed.query)
    task = cloudpickle.dumps((reader, reader.partitions()))
    program = (
        "import pickle, sys\n"
        "reader, partitions = pickle.load(sys.stdin.buffer)\n"
        "rows = sum(batch.num_rows for part in partitions for batch in reader.read(part))\n"
        "print(rows, *(m for m in sys.modules if m.startswith('topics_server')))\n"
    )
    answer = subprocess.run(
        [sys.executable, "-c", program], input=task, capture_output=True, check=True, timeout=60
    )
    rows, *found = answer.stdout.decode().split()
    assert int(rows) == len(LEFT)
    assert set(found) == {
        "topics_server",
        *(f"topics_server.{name}" for name in ("values", "values.errors", "values.limits", "wal")),
        *(
            f"topics_server.wal.{n}"
            for n in (
                "layout",
                "format",
                "format.manifest",
                "format.json_objects",
                "format.segment",
            )
        ),
    }


def test_defaults_are_those_of_the_documentation() -> None:
    options = parse_options({"path": "/x"})
    assert (options.partition_bytes, options.warns, options.query.tier) == (2**27, True, "both")
