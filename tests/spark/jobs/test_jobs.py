"""Must-show 2: jobs against values computed by hand, and by a plain fold on large inputs."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import pytest

from tests.contract.driver import Server, eventually, good
from tests.spark.conftest import HAS_SPARK, INSTALL
from tests.spark.logs import seal_all
from tests.spark.reading.test_damage import damage, flip, record_at
from tests.spark.reading.test_reader import LEFT, webhooks

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

__all__ = ["webhooks"]

DAY: Final = datetime(2026, 1, 1, tzinfo=UTC)


def written(figure: Any) -> str:
    """All texts of a figure, one a line."""
    from matplotlib.text import Text

    figure.draw_without_rendering()
    return "\n".join(text.get_text() for text in figure.findobj(Text))


def at(seconds: float) -> datetime:
    """A time on the day of the test's records."""
    return DAY + timedelta(seconds=seconds)


def utc(when: datetime) -> datetime:
    """Spark returns the local time of a session in UTC, without a zone."""
    return when.astimezone(UTC) if when.tzinfo else when.astimezone().astimezone(UTC)


# -- by hand -----------------------------------------------------------------------------------


def test_topic_volume(spark: Any) -> None:
    rows = [("a", at(0), 10), ("a", at(59), 30), ("a", at(60), 50), ("b", at(5), 7)]
    frame = spark.createDataFrame(rows, "topic string, ts timestamp, bytes bigint")
    got = topic_volume.transform(frame, "1 minute").collect()
    assert [
        (r.topic, utc(r.start), r.records, r.bytes, r.bytes_max, r.p50, r.p99) for r in got
    ] == [
        ("a", at(0), 2, 40, 30, 20.0, 29.8),
        ("a", at(60), 1, 50, 50, 50.0, 50.0),
        ("b", at(0), 1, 7, 7, 7.0, 7.0),
    ]
    assert [r.records_per_s for r in got] == [2 / 60, 1 / 60, 1 / 60]
    assert "Records per topic" in written(topic_volume.draw(got))


def test_tag_activity_and_churn(spark: Any) -> None:
    rows = [
        ("a", "x", 1, at(0)),
        ("a", "y", 2, at(1)),
        ("a", "x", 3, at(11)),
        ("a", None, 4, at(12)),
        ("a", "z", 5, at(35)),
        ("b", "x", 1, at(3)),
    ]
    frame = spark.createDataFrame(rows, "topic string, tag string, seq bigint, ts timestamp")
    got = tag_activity.transform(frame).collect()
    assert [(r.topic, r.tag, r.records, r.share, r.rank, r.last_seq) for r in got] == [
        ("a", "x", 2, 0.4, 1, 3),
        ("a", "y", 1, 0.2, 2, 2),
        ("a", "z", 1, 0.2, 3, 5),
        ("b", "x", 1, 1.0, 1, 1),
    ]
    assert (utc(got[0].first_seen), utc(got[0].last_seen)) == (at(0), at(11))
    # Buckets of ten seconds: x y | x | (empty) | z.
    churn = tag_activity.churn(frame, 10).collect()
    assert [(r.topic, utc(r.start), r.active, r.appeared, r.vanished) for r in churn] == [
        ("a", at(0), 2, 2, 0),
        ("a", at(10), 1, 0, 1),
        ("a", at(20), 0, 0, 1),
        ("a", at(30), 1, 1, 0),
        ("b", at(0), 1, 1, 0),
    ]
    assert "a · x" in written(tag_activity.draw(got))


def test_queue_latency(spark: Any) -> None:
    ms = int(DAY.timestamp() * 1000)
    events = [
        ("claimed", 1, 100),
        ("acked", 1, 150),
        ("claimed", 2, 200),
        ("expired", 2, 900),
        ("claimed", 2, 1000),
        ("acked", 2, 1300),
        ("claimed", 3, 400),
        ("claimed", 9, 500),
        ("acked", 9, 510),
    ]
    log = spark.createDataFrame(
        [
            (f'{{"event":"{e}","queue":"q","seq":{seq},"ts":{ms + t},"node":"n"}}',)
            for e, seq, t in events
        ],
        "data string",
    )
    jobs = spark.createDataFrame(
        [("q", 1, at(0.02)), ("q", 2, at(0.05)), ("q", 3, at(0.1)), ("q", 4, at(0.1))],
        "topic string, seq bigint, ts timestamp",
    )
    got = queue_latency.transform(log, jobs)
    assert [
        (r.seq, r.claims, r.expired, r.wait_ms, r.work_ms, r.total_ms, r.state)
        for r in got.collect()
    ] == [
        (1, 1, 0, 80, 50, 130, "acked"),
        (2, 2, 1, 150, 300, 1250, "acked"),
        (3, 1, 0, 300, None, None, "claimed"),
        (9, 1, 0, None, 10, None, "acked"),
    ]
    (row,) = queue_latency.summary(got).collect()
    assert (row.jobs, row.claimed_again, row.enqueued_unknown) == (4, 1, 1)
    assert (row.wait_p50_ms, row.work_p50_ms, row.total_p50_ms) == (150.0, 50.0, 690.0)
    assert "q wait_p50" in written(queue_latency.draw([row]))


def test_router_lag(spark: Any) -> None:
    sources = spark.createDataFrame(
        [("s", 1, 1, at(0)), ("s", 1, 2, at(1)), ("s", 2, 1, at(2))],
        "topic string, epoch bigint, seq bigint, ts timestamp",
    )

    def stamp(epoch: int, seq: int) -> str:
        return f'{{"k":1,"_topics_router":{{"source":"s","epoch":{epoch},"seq":{seq},"key":"r"}}}}'

    copies = spark.createDataFrame(
        [
            ("d", at(0.25), stamp(1, 1)),
            ("d", at(1.75), stamp(1, 2)),
            ("d", at(62), stamp(2, 1)),
            ("d", at(63), stamp(2, 7)),
            ("d", at(64), '{"k":1}'),
            ("d", at(65), None),
        ],
        "topic string, ts timestamp, meta string",
    )
    got = router_lag.transform(sources, copies).collect()
    assert [
        (r.source, r.dest, utc(r.start), r.copies, r.unknown, r.lag_p50_ms, r.lag_max_ms)
        for r in got
    ] == [
        ("s", "d", at(0), 2, 0, 500.0, 750),
        ("s", "d", at(60), 2, 1, 60000.0, 60000),
    ]
    assert "s→d p50" in written(router_lag.draw(got))


def test_payload_schema_and_its_drift(spark: Any) -> None:
    rows = [
        ("a", at(0), '{"n":1}'),
        ("a", at(1), '{"n":2,"s":"x"}'),
        ("a", at(2), "no json"),
        ("a", at(86_400), '{"n":1.5,"s":null}'),
        ("a", at(2 * 86_400), '{"n":2.5}'),
        ("b", at(0), "[1]"),
    ]
    frame = spark.createDataFrame(rows, "topic string, ts timestamp, data string")
    got = payload_schema.transform(frame).collect()
    assert [(r.topic, r.records, r.not_json, r.schema, r.changed) for r in got] == [
        ("a", 3, 1, "OBJECT<n: BIGINT, s: STRING>", False),
        ("a", 1, 0, "OBJECT<n: DECIMAL(2,1), s: VOID>", True),
        ("a", 1, 0, "OBJECT<n: DECIMAL(2,1)>", True),
        ("b", 1, 0, "ARRAY<BIGINT>", False),
    ]


def test_sessions(spark: Any) -> None:
    rows = [
        ("a", "n", at(0)),
        ("a", "n", at(9)),
        ("a", "n", at(19)),
        ("a", "n", at(29.001)),
        ("a", "m", at(5)),
        ("a", None, at(6)),
        ("b", "n", at(1)),
    ]
    frame = spark.createDataFrame(rows, "topic string, node string, ts timestamp")
    got = sessions.transform(frame, "node", "10 seconds").collect()
    assert [(r.topic, r.who, utc(r.start), r.records, r.duration_ms) for r in got] == [
        ("a", "m", at(5), 1, 0),
        ("a", "n", at(0), 3, 19000),
        ("a", "n", at(29.001), 1, 0),
        ("b", "n", at(1), 1, 0),
    ]
    assert "4 sessions of 2" in written(sessions.draw(got))


def test_continuity(spark: Any) -> None:
    rows = [
        *(("a", 1, seq, False) for seq in (3, 4, 4, 7, 8)),
        ("a", 1, 11, True),
        ("b", 2, 1, False),
    ]
    frame = spark.createDataFrame(rows, "topic string, epoch bigint, seq bigint, deleted boolean")
    a, b = integrity_audit.transform(frame).collect()
    assert (a.seqs, a.live, a.first_seq, a.last_seq) == (6, 5, 3, 11)
    assert (a.duplicates, a.gaps, a.missing) == (1, 2, 4)
    assert (b.duplicates, b.gaps, b.missing) == (0, 0, 0)


# -- by a fold ---------------------------------------------------------------------------------


def test_large_inputs_are_what_a_fold_says(spark: Any, tmp_path: Path) -> None:
    """30,000 records of a real server: volume, tags, churn, sessions and Parquet files."""
    server = Server(tmp_path / "server", {"TOPICS_SEGMENT_MAX_EVENTS": "4000"})
    api = server.start()
    chance = random.Random(5)
    sent: dict[str, list[tuple[str, str]]] = defaultdict(list)
    try:
        for _ in range(30):
            records = [
                {"data": n, "tag": f"t{chance.randrange(40)}", "node": f"n{chance.randrange(9)}"}
                for n in range(1000)
            ]
            topic = f"x{chance.randrange(3)}"
            good(api.append(topic, records))
            sent[topic] += [(str(each["tag"]), str(each["data"])) for each in records]
        seal_all(api)
    finally:
        server.stop()
    frame = (
        spark.read.format("topics")
        .option("columns", "topic,seq,ts,tag,node,bytes")
        .load(str(server.data_dir))
        .cache()
    )
    rows = frame.collect()
    assert len(rows) == 30_000

    def bucket(row: Any, ms: int) -> int:
        return int(row.ts.timestamp() * 1000) // ms

    volume = topic_volume.transform(frame, "100 milliseconds").collect()
    counts = Counter((r.topic, bucket(r, 100)) for r in rows)
    sizes: dict[Any, int] = defaultdict(int)
    for r in rows:
        sizes[r.topic, bucket(r, 100)] += r.bytes
    found = {(v.topic, int(v.start.timestamp() * 1000) // 100): v for v in volume}
    assert {key: v.records for key, v in found.items()} == counts
    assert {key: v.bytes for key, v in found.items()} == sizes

    tags = tag_activity.transform(frame).collect()
    assert {(t.topic, t.tag): t.records for t in tags} == Counter((r.topic, r.tag) for r in rows)
    assert all(a.records >= b.records for a, b in pairwise(tags) if a.topic == b.topic)

    for gap in (2, 50):
        got = sessions.transform(frame, "node", f"{gap} milliseconds").collect()
        times: dict[Any, list[int]] = defaultdict(list)
        for r in rows:
            times[r.topic, r.node].append(bucket(r, 1))
        expected = Counter[Any]()
        for who, all_times in times.items():
            all_times.sort()
            breaks = sum(b - a > gap for a, b in pairwise(all_times))
            expected[who] = breaks + 1
        assert Counter((s.topic, s.who) for s in got) == expected
    frame.unpersist()

    out = tmp_path / "parquet"
    assert run(to_parquet.main, server.data_dir, "--out", out, "--files-per-day", "3") == 0
    kept = spark.read.schema("seq bigint, tag string, data string, topic string")
    files = [kept.parquet(str(path)).collect() for path in sorted(out.rglob("*.parquet"))]
    for part in files:
        assert [r.seq for r in part] == sorted(r.seq for r in part), "a file is in order of seq"
    found_in = kept.parquet(str(out)).collect()
    assert sorted((r.topic, r.seq, r.tag, r.data) for r in found_in) == [
        (topic, seq, *fields)
        for topic, all_fields in sorted(sent.items())
        for seq, fields in enumerate(all_fields, 1)
    ]


# -- mains -------------------------------------------------------------------------------------


def run(main: Callable[[list[str]], int], *words: object) -> int:
    """A job's main, in the session of the tests."""
    return main([*map(str, words), "--rows", "0"])


def test_mains_write_parquet_and_pictures(spark: Any, webhooks: Server, tmp_path: Path) -> None:
    out, picture = tmp_path / "out", tmp_path / "a" / "picture.svg"
    data = webhooks.data_dir
    assert run(topic_volume.main, data, "--out", out / "v", "--picture", picture) == 0
    assert spark.read.parquet(str(out / "v")).agg({"records": "sum"}).first()[0] == len(LEFT)
    assert picture.read_text("utf-8").startswith("<?xml")
    assert run(tag_activity.main, data, "--out", out / "t", "--picture", picture) == 0
    rows = spark.read.parquet(str(out / "t" / "tags")).collect()
    assert {r.tag: r.records for r in rows} == Counter(e.tag for e in LEFT)
    assert run(sessions.main, data, "--by", "tag", "--out", out / "s") == 0
    assert run(payload_schema.main, data, "--out", out / "p") == 0
    (schema,) = spark.read.parquet(str(out / "p")).collect()
    assert (schema.records, schema.not_json) == (len(LEFT), 0)
    assert schema.schema.startswith("OBJECT<event: STRING, payload: OBJECT<")
    assert run(topic_volume.main, data, "--topics", "no*", "--out", out / "n") == 0
    assert run(topic_volume.main, data, "--from", "soon") == 2


def test_to_parquet_keeps_what_there_is(spark: Any, webhooks: Server, tmp_path: Path) -> None:
    data = webhooks.data_dir
    assert run(to_parquet.main, data, "--out", tmp_path / "text") == 0
    rows = spark.read.parquet(str(tmp_path / "text")).orderBy("seq").collect()
    assert [(r.seq, r.tag, r.data.encode()) for r in rows] == [(e.seq, e.tag, e.data) for e in LEFT]
    assert run(to_parquet.main, data, "--out", tmp_path / "v", "--payload", "variant") == 0
    variant = spark.read.parquet(str(tmp_path / "v"))
    names = variant.selectExpr("variant_get(data, '$.event', 'string') as e", "tag").collect()
    assert all(r.e == r.tag for r in names)
    assert len(names) == len(LEFT)
    schema = "event string"
    assert run(to_parquet.main, data, "--out", tmp_path / "s", "--schema", schema) == 0
    assert spark.read.parquet(str(tmp_path / "s")).where("data.event = tag").count() == len(LEFT)


def test_the_audit_finds_damage_and_exits_with_1(
    spark: Any, webhooks: Server, tmp_path: Path
) -> None:
    import shutil

    folder = tmp_path / "copy"
    shutil.copytree(webhooks.data_dir / "segments", folder / "segments")
    shutil.copy(webhooks.data_dir / "FORMAT", folder)
    out = tmp_path / "out"
    assert run(integrity_audit.main, folder, "--out", out, "--no-gaps") == 0
    assert spark.read.parquet(str(out / "problems")).count() == 0
    damage(folder, "0000000003.data", flip(record_at(5, 200)))
    damage(folder, "0000000004.idx", flip(lambda *_: 300))
    (gone,) = folder.rglob("0000000006.data")
    gone.unlink()

    def revive(content: bytearray, _path: Path) -> None:
        content[-20:] = bytes(20)

    damage(folder, "0000000007.data", revive)
    assert run(integrity_audit.main, folder, "--out", out) == 1
    problems = spark.read.parquet(str(out / "problems")).orderBy("first_seq").collect()
    told = [(Path(p.file).name, p.first_seq, p.last_seq) for p in problems]
    assert ("0000000003.data", 46, 46) in told
    assert ("0000000004.idx", 61, 80) in told
    assert ("0000000006.data", 101, 120) in told
    assert run(integrity_audit.main, folder, "--no-gaps") == 1


def test_jobs_of_a_queue_and_of_a_router(spark: Any, tmp_path: Path) -> None:
    """The commands of the jobs run on a real lease log and real stamps."""
    server = Server(tmp_path / "server")
    api = server.start()
    try:
        good(api.put("q", {"type": "queue", "lease_log": "q.log"}))
        good(
            api.http.put(
                "/v0/routers/r",
                json={"source": "q.log", "dest": "copy", "guarantee": "exactly_once"},
            )
        )
        api.add("q", *range(6))
        claimed = good(api.http.post("/v0/topics/q/claim", json={"node": "w", "max": 4}))["claimed"]
        seqs = [job["$seq"] for job in claimed]
        good(api.http.post("/v0/topics/q/ack", json={"node": "w", "seqs": seqs[:3]}))
        eventually(lambda: api.state("copy").json().get("head_seq", 0) >= 7, "events are copied")
        seal_all(api)
    finally:
        server.stop()
    out = tmp_path / "out"
    assert (
        run(
            queue_latency.main,
            server.data_dir,
            "--topics",
            "q",
            "--lease-log",
            "q.log",
            "--out",
            out / "q",
            "--picture",
            tmp_path / "q.svg",
        )
        == 0
    )
    rows = spark.read.parquet(str(out / "q" / "jobs")).collect()
    assert Counter(r.state for r in rows) == {"acked": 3, "claimed": 1}
    assert all(r.wait_ms is None or r.wait_ms >= 0 for r in rows)
    assert all(r.work_ms >= 0 for r in rows if r.state == "acked")
    assert (
        run(
            router_lag.main,
            server.data_dir,
            "--topics",
            "copy",
            "--source",
            "q.log",
            "--out",
            out / "r",
        )
        == 0
    )
    lags = spark.read.parquet(str(out / "r")).collect()
    assert sum(r.copies for r in lags) == 7
    assert all(r.unknown == 0 and r.lag_max_ms >= 0 for r in lags)
