"""Must-show 1: Spark's rows equal a diff's, per column, for random logs and beside a server."""

from __future__ import annotations

import threading
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import pytest

from spark_jobs import export, to_parquet
from spark_jobs.reader.listing import list_segments
from spark_jobs.reader.places.segment import SegmentGone
from spark_jobs.reader.query import Query
from spark_jobs.session import TIME_ZONE
from tests.contract.driver import Api, Server, eventually, good
from tests.spark.logs import (
    COLUMNS,
    Row,
    change_later,
    digests,
    fade,
    make_log,
    read_rows,
    seal_all,
)
from tests.spark.reading.test_reader import AS_IS, read, rows_of

DAY_MS: Final = 86_400_000


def by_topic(rows: list[dict[str, Any]]) -> dict[str, list[Row]]:
    """Rows by the topic they are of."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row["topic"], []).append({name: row[name] for name in COLUMNS})
    return found


class Seen:
    """The records of all topics by diff at one moment, and the topics' incarnations."""

    def __init__(self, api: Api, names: list[str]) -> None:
        there = [name for name in names if _exists(api, name)]
        self.rows = {name: read_rows(api, name) for name in there}
        self.epochs = {name: int(api.get_state(name)["epoch"]) for name in there}


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_rows_are_those_of_a_diff_for_random_logs(
    spark: Any, server: Server, request: pytest.FixtureRequest
) -> None:
    """Deletes, caps, routers, queues, new incarnations, both folders: a hash of each column and
    topic.

    Then configurations change, topics are dropped and recreated after the seal, and everything is
    compared again; runs continue earlier outputs.
    """
    seeds = int(request.config.getoption("--spark-seeds", default=12))
    cold = server.directory / "cold"
    server.env = {
        **server.env,
        "TOPICS_SEGMENT_MAX_EVENTS": "16",
        "TOPICS_COLD_DIR": str(cold),
        "TOPICS_HOT_RETAIN_SEGMENTS": "1",
    }
    api = server.start()
    topics = [name for seed in range(seeds) for name in make_log(api, seed)]
    eventually(lambda: _lag(api, seeds) == 0, "routers have copied everything", within_s=60)
    seal_all(api)
    before = Seen(api, topics)
    seal_all(api)
    _compare_reads(spark, server, cold, before)
    _write_outputs(spark, server, cold)
    _compare_outputs(spark, server, [before])

    for seed in range(seeds):
        change_later(api, seed)
    eventually(lambda: _lag(api, seeds) == 0, "routers have copied everything", within_s=60)
    seal_all(api)
    for seed in range(seeds):
        # background jobs process the sealed records and move them to the cold folder
        fade(api, seed)
    seal_all(api)
    after = Seen(api, topics)
    seal_all(api)
    assert sum(map(len, after.rows.values())) > 20 * seeds
    eventually(lambda: any(cold.rglob("*.data")), "some segments are cold", 30)
    left = [[row["seq"] for row in after.rows[f"s{seed}.fading"]] for seed in range(seeds)]
    again = [name for name, epoch in after.epochs.items() if epoch != before.epochs[name]]
    assert len(again) >= seeds // 4
    if seeds >= 20:
        assert any(not seqs for seqs in left), "time took all of some topics"
        assert sum(bool(seqs) and seqs[0] > 1 for seqs in left) > seeds // 5, "and a part of others"
        assert before.rows.keys() - after.rows.keys(), "some were dropped for good"
    _compare_reads(spark, server, cold, after)
    for _ in range(2):  # the second run has nothing to do
        _write_outputs(spark, server, cold)
        _compare_outputs(spark, server, [before, after])


def _compare_reads(spark: Any, server: Server, cold: Path, seen: Seen) -> None:
    """The reader's rows and Spark's, straight from the segments."""
    columns = ", ".join(f"{name} {kind}" for name, kind in AS_IS)
    frame = (
        spark.read.format("topics")
        .option("coldDir", str(cold))
        .schema(columns)
        .load(str(server.data_dir))
    )
    found = by_topic([row.asDict() for row in frame.collect()])
    direct = by_topic(read(server.data_dir, cold_dir=str(cold)))
    for name, rows in seen.rows.items():
        assert digests(direct.get(name, [])) == digests(rows), f"the reader's {name}"
        assert digests(found.get(name, [])) == digests(rows), f"Spark's {name}"
    assert found.keys() == {name for name, rows in seen.rows.items() if rows}


def _write_outputs(spark: Any, server: Server, cold: Path) -> None:
    """Exports from segments and over HTTP, and days of Parquet, in a session that is not UTC."""
    given = ["--data-dir", str(server.data_dir), "--cold-dir", str(cold), "--sealed"]
    lake = server.directory / "lake"
    words = [str(server.data_dir), "--cold-dir", str(cold), "--out", str(lake), "--rows", "0"]
    zone = spark.conf.get(TIME_ZONE)
    spark.conf.set(TIME_ZONE, "America/St_Johns")
    try:
        for name, source in (("sealed", given), ("http", ["--url", server.api.url])):
            assert export.main(["--to", str(server.directory / name), *source, "s*"]) == 0
        assert to_parquet.main([*words, "--topics", "s*"]) == 0
    finally:
        spark.conf.set(TIME_ZONE, zone)


def _compare_outputs(spark: Any, server: Server, moments: list[Seen]) -> None:
    """Outputs that are read back equal the diff, by topic and incarnation.

    An export keeps its records: all that a diff showed at one of its runs. A lake has the current
    days, and earlier days without remaining records.
    """
    import pandas as pd
    from pyspark.sql import functions as F

    from spark_jobs.datasource import read_output

    kept: dict[tuple[str, int], dict[int, Row]] = {}
    days: dict[tuple[str, int], list[tuple[int, Row]]] = {}
    for seen in moments:
        of_now: dict[tuple[str, int], list[tuple[int, Row]]] = {}
        for name, rows in seen.rows.items():
            epoch = seen.epochs[name]
            kept.setdefault((name, epoch), {}).update({row["seq"]: row for row in rows})
            for row in rows:
                of_now.setdefault((name, row["ts"] // DAY_MS), []).append((epoch, row))
        days.update(of_now)
    lake: dict[tuple[str, int], list[Row]] = {}
    for (name, _), written in days.items():
        for epoch, row in written:
            lake.setdefault((name, epoch), []).append(row)
    exported = {key: list(rows.values()) for key, rows in kept.items() if rows}
    zone = spark.conf.get(TIME_ZONE)
    spark.conf.set(TIME_ZONE, "America/St_Johns")
    try:
        for folder, expected in (("sealed", exported), ("http", exported), ("lake", lake)):
            frame = read_output(spark, str(server.directory / folder))
            rows = [row.asDict() for row in frame.withColumn("ts", F.unix_millis("ts")).collect()]
            _compare(rows, expected, folder)
    finally:
        spark.conf.set(TIME_ZONE, zone)
    table = pd.read_parquet(server.directory / "sealed", partitioning=None)
    table["ts"] = table["ts"].astype("int64") // 1000
    rows = table.astype(object).where(table.notna(), None).to_dict("records")
    _compare(rows, exported, "pandas")


def _compare(rows: list[Row], expected: dict[tuple[str, int], list[Row]], what: str) -> None:
    found: dict[tuple[str, int], list[Row]] = {}
    for row in rows:
        key = (row["topic"], int(row["epoch"]))
        found.setdefault(key, []).append({name: row[name] for name in COLUMNS})
    assert found.keys() == expected.keys(), what
    for key, wanted in expected.items():
        assert digests(found[key]) == digests(wanted), f"{what}: {key}"


def _exists(api: Api, name: str) -> bool:
    return api.state(name).status_code == 200


def _lag(api: Api, seeds: int) -> int:
    routers = (good(api.http.get(f"/v0/routers/s{seed}.r")) for seed in range(seeds))
    return sum(int(router["lag"]) for router in routers)


@pytest.mark.slow
def test_every_read_beside_a_server_at_work_is_one_state(server: Server) -> None:
    """Meanwhile appends continue, the oldest are deleted, segments are sealed, moved and dropped.

    The writer notes its progress before and after each call. A read must show all records that were
    sealed at its listing and not deleted by then, none that was deleted before it, and each record
    once and complete.
    """
    cold = server.directory / "cold"
    server.env = {
        **server.env,
        "TOPICS_SEGMENT_MAX_EVENTS": "50",
        "TOPICS_COLD_DIR": str(cold),
        "TOPICS_HOT_RETAIN_SEGMENTS": "2",
    }
    api = server.start()
    good(api.put("a", {}))
    state = {"deleting": 0, "head": 0}
    stop = threading.Event()

    def write() -> None:
        for n in range(100_000):
            if stop.is_set():
                return
            head = api.add("a", *range(20 * n, 20 * n + 20))["last_seq"]
            state["head"] = head
            if n % 5 == 4:
                state["deleting"] = head - 300
                good(api.delete("a", before_seq=max(1, head - 300)))

    writer = threading.Thread(target=write)
    writer.start()
    asked = replace(Query(), columns=AS_IS)
    reads = dropped = 0
    try:
        eventually(lambda: state["head"] > 600, "the writer is under way", 30)
        while reads < 60 or state["head"] < 3000:
            listing = list_segments(str(server.data_dir), asked, cold_dir=str(cold))
            listed = [(s.entry.first_seq, s.entry.last_seq) for s in listing.segments]
            try:
                rows = rows_of(listing, asked)
            except SegmentGone:
                dropped += 1
                continue
            reads += 1
            after = state["deleting"]
            seqs = [row["seq"] for row in rows]
            assert seqs == sorted(set(seqs))
            assert all(row["data"] == str(row["seq"] - 1) for row in rows)
            sealed = {seq for first, last in listed for seq in range(first, last + 1)}
            missing = sealed - set(seqs)
            assert set(seqs) <= sealed
            assert all(seq < after for seq in missing), "missing is what was deleted"
    finally:
        stop.set()
        writer.join()
    assert dropped < reads


@pytest.mark.slow
def test_spark_beside_a_server_that_seals_and_drops(spark: Any, server: Server) -> None:
    """Records go to two topics with a cap, everything is sealed repeatedly, and Spark reads.

    Each read of a topic is a run of the sent records without a hole. It begins at the first record
    that was live in some state between the last seal before the read and the end of the read, and
    ends at least where that seal ended.
    """
    server.env = {**server.env, "TOPICS_SEGMENT_MAX_EVENTS": "256"}
    api = server.start()
    topics = ("a", "b")
    for topic in topics:
        good(api.put(topic, {"cap_records": 1500}))
        for first in range(1, 2001, 500):
            api.add(topic, *(f"{topic}{n}" for n in range(first, first + 500)))
    sealed = dict.fromkeys(topics, (0, 0))  # the first live seq and the head before a seal
    sent = dict.fromkeys(topics, 2000)
    stop = threading.Event()
    failed: list[BaseException] = []

    def write() -> None:
        own = Api(api.url)
        try:
            for turn in range(100_000):
                if stop.is_set():
                    return
                for topic, count in zip(topics, (20, 7), strict=True):
                    datas = range(sent[topic] + 1, sent[topic] + count + 1)
                    sent[topic] = own.add(topic, *(f"{topic}{n}" for n in datas))["last_seq"]
                if turn % 12 == 11:
                    states = {topic: own.get_state(topic) for topic in topics}
                    seal_all(own)
                    sealed.update(
                        {t: (s["earliest_seq"], s["head_seq"]) for t, s in states.items()}
                    )
                stop.wait(0.1)  # so a segment of each topic is dropped about once a read
        except BaseException as error:
            failed.append(error)
        finally:
            own.close()

    def has_gone_on(known: dict[str, tuple[int, int]]) -> bool:
        return bool(failed) or sealed != known

    seal_all(api)
    frames = spark.read.format("topics").option("warn", "false")
    assert frames.load(str(server.data_dir)).count() == 3000  # and Spark is warm
    writer = threading.Thread(target=write)
    writer.start()
    reads: list[dict[str, tuple[int, int]]] = []
    gone = 0
    try:
        eventually(lambda: bool(failed) or sealed["a"][0] > 256, "a whole segment is evicted", 60)
        oldest = "0000000001.data"  # the files of each topic, in its folder
        eventually(lambda: len([*server.data_dir.rglob(oldest)]) < 2, "its file is dropped", 30)
        before: dict[str, tuple[int, int]] = {}
        while len(reads) < 5 and gone < 40 and not failed:
            eventually(partial(has_gone_on, before), "it is sealed again", 30)
            before = dict(sealed)
            try:
                rows = frames.load(str(server.data_dir)).select("topic", "seq", "data").collect()
            except Exception as error:
                if "dropped since the listing" not in str(error):
                    raise
                gone += 1
                continue
            earliest = {topic: api.get_state(topic)["earliest_seq"] for topic in topics}
            found = {}
            for topic in topics:
                seqs = sorted(row.seq for row in rows if row.topic == topic)
                assert seqs == [*range(seqs[0], seqs[-1] + 1)], "no hole, none twice"
                assert before[topic][0] <= seqs[0] <= earliest[topic], "nothing evicted, all else"
                assert before[topic][1] <= seqs[-1] <= sent[topic] + 20
                found[topic] = seqs[0], seqs[-1]
            assert all(row.data == f'"{row.topic}{row.seq}"' for row in rows)
            reads.append(found)
    finally:
        stop.set()
        writer.join()
    assert not failed
    assert len(reads) == 5, f"{gone} reads met segments that were dropped"
    for earlier, later in pairwise(reads):
        assert all(earlier[t][0] <= later[t][0] and earlier[t][1] <= later[t][1] for t in topics)
    assert reads[0]["a"][0] < reads[-1]["a"][0], "something was dropped between reads"
    assert reads[0]["a"][1] < reads[-1]["a"][1], "and sealed"
