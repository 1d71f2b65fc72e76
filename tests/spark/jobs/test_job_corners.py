"""Corners of the jobs: order, incarnations, time zones, kinds of payloads, folders, long names."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

import pytest

from spark_jobs.exporter import records
from spark_jobs.reader.listing import list_segments
from spark_jobs.reader.options import parse_options
from spark_jobs.reader.query import BadOption, Query
from spark_jobs.reader.segments import SegmentRecords
from tests.contract.driver import ROOT, Server, eventually, good
from tests.spark.conftest import HAS_SPARK, INSTALL
from tests.spark.jobs.test_outputs import run
from tests.spark.logs import seal_all

if not HAS_SPARK:
    pytest.skip(f"PySpark is not installed; {INSTALL}", allow_module_level=True)

from spark_jobs import (
    integrity_audit,
    payload_schema,
    queue_latency,
    router_lag,
    sessions,
    tag_activity,
    to_parquet,
    topic_volume,
)
from spark_jobs.datasource import payloads, read_output
from spark_jobs.running import pictures
from spark_jobs.session import TIME_ZONE, find_java, spark_session

DAY: Final = datetime(2026, 1, 1, tzinfo=UTC)
DAY_MS: Final = int(DAY.timestamp() * 1000)

Event = tuple[str, int, int, int]  # kind, epoch, seq, ms


def latency(spark: Any, events: list[Event], jobs: list[tuple[int, int, int]]) -> dict[Any, Any]:
    """Rows by (epoch, seq); `jobs` are (epoch, seq, ms)."""
    log = spark.createDataFrame(
        [
            (n, json.dumps({"event": e, "queue": "q", "epoch": p, "seq": s, "ts": DAY_MS + t}))
            for n, (e, p, s, t) in enumerate(events, 1)
        ],
        "seq bigint, data string",
    )
    queue = spark.createDataFrame(
        [("q", p, s, DAY + timedelta(milliseconds=t)) for p, s, t in jobs],
        "topic string, epoch bigint, seq bigint, ts timestamp",
    )
    rows = queue_latency.transform(log.orderBy("data"), queue).collect()
    return {(row.epoch, row.seq): row for row in rows}


def test_latency_of_a_queue_by_order_and_incarnation(spark: Any) -> None:
    events: list[Event] = [
        ("claimed", 1, 1, 1000),  # an event of a dropped queue, whose record is in no segment
        ("acked", 1, 1, 1010),
        ("claimed", 2, 1, 5000),  # an event of the current queue
        ("expired", 2, 1, 7000),
        # all events are in one millisecond: the order of the log shows the last one
        ("claimed", 2, 1, 7000),
        ("acked", 2, 1, 7000),
        ("claimed", 2, 2, 6000),
        ("expired", 2, 2, 36_000),
        ("dead_lettered", 2, 2, 36_000),
    ]
    got = latency(spark, events, [(2, 1, 4000), (2, 2, 4000)])
    assert [
        (key, r.claims, r.wait_ms, r.work_ms, r.total_ms, r.state) for key, r in got.items()
    ] == [
        ((1, 1), 1, None, 10, None, "acked"),
        ((2, 1), 2, 1000, 0, 3000, "acked"),
        ((2, 2), 1, 2000, None, 32_000, "dead_lettered"),
    ]


def test_a_bound_of_time_keeps_the_longest_waits(
    spark: Any, server: Server, tmp_path: Path
) -> None:
    """`--from` selects claims; the record may be much older."""
    api = server.start()
    good(api.put("q", {"type": "queue", "lease_log": "q.log"}))
    api.add("q", 1, 2)
    time.sleep(0.05)
    middle = int(time.time() * 1000)
    claimed = good(api.http.post("/v0/topics/q/claim", json={"node": "w", "max": 2}))["claimed"]
    good(api.http.post("/v0/topics/q/ack", json={"node": "w", "seqs": [claimed[0]["$seq"]]}))
    eventually(lambda: api.state("q.log").json().get("head_seq", 0) >= 3, "events are there")
    seal_all(api)
    words = ["--topics", "q", "--lease-log", "q.log", "--from", middle, "--out", tmp_path / "o"]
    assert run(queue_latency.main, server.data_dir, *words) == 0
    rows = spark.read.parquet(str(tmp_path / "o" / "jobs")).collect()
    assert len(rows) == 2
    assert all(row.wait_ms >= 50 and row.epoch == 1 for row in rows)
    words[-1] = tmp_path / "later"
    words[5] = middle + 3_600_000
    assert run(queue_latency.main, server.data_dir, *words) == 0
    assert spark.read.parquet(str(tmp_path / "later" / "jobs")).count() == 0


def test_days_are_utc_whatever_the_zone_of_the_session(
    spark: Any, server: Server, tmp_path: Path
) -> None:
    api = server.start()
    api.add("a", 1)
    ts = api.read("a")["records"][0]["$ts"]
    seal_all(api)
    day = datetime.fromtimestamp(ts / 1000, UTC).date()
    before = spark.conf.get(TIME_ZONE)
    try:
        for number, zone in enumerate(("Pacific/Kiritimati", "Pacific/Pago_Pago")):
            spark.conf.set(TIME_ZONE, zone)  # +14 and -11 hours: in one zone it is another day
            assert spark_session("other", config={TIME_ZONE: "UTC"}) is spark
            assert spark.conf.get(TIME_ZONE) == zone, "a session that exists is left as it is"
            out = tmp_path / str(number)
            assert run(to_parquet.main, server.data_dir, "--out", out) == 0
            assert [p.name for p in out.glob("topic=a/*")] == [f"day={day}"]
            assert read_output(spark, str(out)).first()["day"] == day
    finally:
        spark.conf.set(TIME_ZONE, before)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_spark_submit_is_utc_too(server: Server, tmp_path: Path) -> None:
    api = server.start()
    api.add("a", 1)
    ts = api.read("a")["records"][0]["$ts"]
    seal_all(api)
    java = find_java()
    assert java is not None
    words = [str(ROOT / "spark_jobs" / "to_parquet.py"), str(server.data_dir)]
    words += ["--out", str(tmp_path / "out")]
    done = subprocess.run(
        [str(Path(sys.executable).with_name("spark-submit")), "--master", "local[1]", *words],
        cwd=tmp_path,
        env={
            **os.environ,
            "JAVA_HOME": java,
            "PYSPARK_PYTHON": sys.executable,
            "TZ": "Pacific/Kiritimati",
            "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "src"))),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    day = datetime.fromtimestamp(ts / 1000, UTC).date()
    assert [p.name for p in (tmp_path / "out").glob("topic=a/*")] == [f"day={day}"]


def test_drift_is_a_change_of_kind_and_not_of_digits(spark: Any) -> None:
    payloads = [
        ('{"n":1.5}', False),
        ('{"n":1.2345}', False),
        ('{"n":1e300}', False),
        (
            '{"n":1,"n":2}',
            True,
        ),  # complete JSON from here on, also with a repeated field
        ('{"n":123456789012345678901234567890}', False),
        ('{"n":"x"}', True),
        ('{"n":"x","m":null}', True),
    ]
    rows = [("a", DAY + timedelta(days=n), text) for n, (text, _) in enumerate(payloads)]
    frame = spark.createDataFrame(rows, "topic string, ts timestamp, data string")
    with payload_schema.duplicates_allowed(spark):
        got = payload_schema.transform(frame).collect()
    assert [row.changed for row in got] == [changed for _, changed in payloads]
    assert [row.not_json for row in got] == [0] * len(payloads)


def test_the_audit_finds_a_folder_without_a_manifest(
    spark: Any, server: Server, tmp_path: Path
) -> None:
    api = server.start()
    api.add("a", *range(3))
    api.add("b", *range(3))
    seal_all(api)
    server.stop()
    assert run(integrity_audit.main, server.data_dir, "--no-gaps") == 0
    one, other = sorted(server.data_dir.glob("segments/*/manifest"))
    one.unlink()
    for path in other.parent.iterdir():
        path.unlink()  # an empty folder that remained
    out = tmp_path / "out"
    assert run(integrity_audit.main, server.data_dir, "--no-gaps", "--out", out) == 1
    problems = spark.read.parquet(str(out / "problems")).collect()
    assert {Path(row.file) for row in problems} == {one.parent, other.parent}
    assert {row.problem for row in problems} == {"the folder of a topic has no manifest"}


def test_four_digits_are_a_year(tmp_path: Path) -> None:
    def start(text: str) -> int:
        return parse_options({"path": str(tmp_path), "fromTs": text}).query.start_ts

    assert start("2026") == DAY_MS == start("2026-01-01") == start(str(DAY_MS))
    assert start("-5") == -5
    with pytest.raises(BadOption):
        start("0000")


def test_a_share_is_of_all_records_of_the_topic(spark: Any) -> None:
    """Records without a tag count too, as documented."""
    rows = [("a", "x", 1, DAY), ("a", None, 2, DAY), ("a", None, 3, DAY), ("a", "y", 4, DAY)]
    frame = spark.createDataFrame(rows, "topic string, tag string, seq bigint, ts timestamp")
    got = tag_activity.transform(frame).collect()
    assert [(row.tag, row.share) for row in got] == [("x", 0.25), ("y", 0.25)]


def test_a_name_of_255_characters_has_a_folder(spark: Any, server: Server, tmp_path: Path) -> None:
    api = server.start()
    long = "a" + ":" * 254
    api.add(long, 1)
    api.add("b", 2)
    seal_all(api)
    out = tmp_path / "out"
    assert run(to_parquet.main, server.data_dir, "--out", out) == 0
    rows = read_output(spark, str(out)).collect()
    assert {(row.topic[:2], row.data) for row in rows} == {("a:", "1"), ("b", "2")}
    assert all(len(p.name) <= 255 for p in out.iterdir())


def test_the_base64_of_bytes_is_no_payload(spark: Any) -> None:
    """`1234` and `null` are Base64 of three bytes each, and look like JSON."""
    rows = [("a", DAY, "1234", "bytes"), ("a", DAY, "null", "bytes"), ("a", DAY, "5678", "json")]
    frame = spark.createDataFrame(rows, "topic string, ts timestamp, data string, kind string")
    (row,) = payload_schema.transform(frame).collect()
    assert (row.records, row.not_json, row.schema) == (3, 2, "BIGINT")
    kinds = {(row.type, row.records) for row in payload_schema.fields(frame).collect()}
    assert kinds == {("no JSON", 2), ("BIGINT", 1)}
    found = payloads(frame).selectExpr("cast(data as int) as data").collect()
    assert [row.data for row in found] == [None, None, 5678]


def test_years_that_no_calendar_has(spark: Any, tmp_path: Path) -> None:
    """Times of year 1 and before, and of year 10000 and later: days, options, jobs, pictures."""
    far = 253_402_300_800_000  # year 10000
    rows = [records.ExportRow(1, -62_167_219_200_001, None, None, b"1", None)]
    rows += [records.ExportRow(2, far, None, None, b"2", None)]
    days = [day for day, _ in records.split_by_day(rows)]
    assert days == ["-001-12-31", "10000-01-01"] or days == ["-0001-12-31", "+10000-01-01"]
    parsed = parse_options({"path": str(tmp_path), "fromTs": str(-far), "toTs": str(far)})
    assert (parsed.query.start_ts, parsed.query.end_ts) == (-far, far)
    with pytest.raises(BadOption):
        parse_options({"path": str(tmp_path), "fromTs": "10000-01-01"})
    frame = spark.range(2).selectExpr(
        "'a' as topic", f"timestamp_millis(if(id = 0, {far}, 0)) as ts", "10L as bytes"
    )
    found = topic_volume.transform(frame, "1 hour").selectExpr("unix_millis(start) as start")
    assert sorted(row.start for row in found.collect()) == [0, far]
    figure = topic_volume.drawn(topic_volume.transform(frame))
    assert figure.get_supxlabel() == "1 times of years outside 1 to 9999 are not shown"
    pictures.save(figure, tmp_path / "p.svg")


def test_only_what_has_a_place_comes_to_the_driver(
    spark: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 300 topics, tags, queues and routers, Spark itself selects each picture's rows."""
    most: list[int] = []
    frame_class = type(spark.range(1))
    collect = frame_class.collect

    def counted(frame: Any) -> Any:
        rows = collect(frame)
        most.append(len(rows))
        return rows

    monkeypatch.setattr(frame_class, "collect", counted)
    many = spark.range(300).selectExpr("cast(id as string) as name", "id")
    when = "timestamp'2026-01-01 00:00:00' as start"
    tags = many.selectExpr("'t' as topic", "name as tag", "id as records", "id as rank")
    tag_activity.drawn(tags)
    topic_volume.drawn(many.selectExpr("name as topic", when, "id as records"))
    sessions.drawn(many.selectExpr("name as who"))
    times = [f"id as {n}_{p}_ms" for n in ("wait", "work") for p in ("p50", "p99")]
    queue_latency.drawn(many.selectExpr("name as queue", when, "id as jobs", *times))
    lags = ("id as lag_p50_ms", "id as lag_p99_ms")
    router_lag.drawn(many.selectExpr("name as source", "'d' as dest", when, "id as copies", *lags))
    to_parquet.drawn(
        many.selectExpr(
            "name as topic", "date'2026-01-01' as day", "id as records", "id as bytes", "1 as files"
        )
    )
    texts = many.selectExpr(
        "name as topic", when.replace("start", "ts"), "'{}' as data", "'json' as kind"
    )
    figure = payload_schema.drawn(payload_schema.transform(texts), texts)
    assert "of 300 topics the 40 busiest" in figure.get_supxlabel()
    seqs = many.selectExpr("name as topic", "1L as epoch", "id as seq", "false as deleted")
    figure = integrity_audit.drawn(integrity_audit.transform(seqs), [], seqs)
    assert "and 270 topics that are listed" in figure.get_supxlabel()
    assert max(most) <= 40
    assert len(most) >= 8


def test_findings_are_made_one_by_one(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """The audit of a segment yields findings before it has examined all of it."""
    api = server.start()
    api.add("a", *range(100))
    seal_all(api)
    server.stop()
    (data,) = server.data_dir.rglob("*.data")
    content = bytearray(data.read_bytes())
    for at in range(200, len(content) - 150, 40):
        content[at] ^= 1
    data.write_bytes(content)
    (segment,) = list_segments(str(server.data_dir), Query()).segments
    monkeypatch.setattr("spark_jobs.reader.segments.BATCH_ROWS", 10)
    read = 0

    class Counted(SegmentRecords):
        def read(self, rows: Any) -> Any:
            nonlocal read
            read += len(rows)
            return super().read(rows)

    monkeypatch.setattr(integrity_audit, "SegmentRecords", Counted)
    found = integrity_audit.check_segment(segment)
    next(found)
    assert read == 10
    assert len(list(found)) > 50
    assert read == 100
