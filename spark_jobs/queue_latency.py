"""How long jobs of a queue wait and take, from the queue's records and its lease log.

The lease log says when a job was claimed, acked, released or had expired; when it was enqueued is
the time of its record, which is still in its segment after the ack deleted it. Once the segment is
dropped that time is unknown: such jobs are counted, and have no wait.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from spark_jobs import job, outputs, pictures
from spark_jobs.catalog import JOBS

EVENT = "event string, queue string, seq bigint, ts bigint, node string"


def transform(log: Any, jobs: Any) -> Any:
    """A row a job that was ever claimed: `wait_ms`, `work_ms`, `total_ms`, claims, how it ended.

    `log`: records of the lease log; `jobs`: of the queues, deleted ones too (`topic, seq, ts`).
    `work_ms` is from the last claim before the ack.
    """
    from pyspark.sql import functions as F

    event = F.from_json("data", EVENT)
    events = log.select(event.alias("event")).select("event.*").where("queue is not null")
    claimed = F.when(F.col("event") == "claimed", F.col("ts"))
    ended = F.when(F.col("event").isin("acked", "dead_lettered"), F.col("ts"))
    leases = events.groupBy("queue", "seq").agg(
        F.min(claimed).alias("first_claim"),
        F.max(claimed).alias("last_claim"),
        F.max(ended).alias("ended"),
        F.count(claimed).alias("claims"),
        F.count(F.when(F.col("event") == "expired", 1)).alias("expired"),
        F.max_by("event", "ts").alias("last_event"),
    )
    enqueued = jobs.select(
        F.col("topic").alias("queue"), "seq", F.unix_millis("ts").alias("enqueued")
    )
    return (
        leases.where("first_claim is not null")
        .join(enqueued, ["queue", "seq"], "left")
        .select(
            *("queue", "seq", "claims", "expired"),
            F.timestamp_millis("first_claim").alias("claimed_at"),
            (F.col("first_claim") - F.col("enqueued")).alias("wait_ms"),
            (F.col("ended") - F.col("last_claim")).alias("work_ms"),
            (F.col("ended") - F.col("enqueued")).alias("total_ms"),
            F.col("last_event").alias("state"),
        )
        .orderBy("queue", "seq")
    )


def summary(jobs: Any, bucket: str = "1 hour") -> Any:
    """A row a queue and bucket of first claims: jobs, and percentiles of their times."""
    from pyspark.sql import functions as F

    shares = F.array(*map(F.lit, (0.5, 0.95, 0.99)))
    times = ("wait_ms", "work_ms", "total_ms")
    grouped = jobs.groupBy("queue", F.window("claimed_at", bucket)).agg(
        F.count("*").alias("jobs"),
        F.sum(F.col("claims") - 1).alias("claimed_again"),
        F.count(F.when(F.col("wait_ms").isNull(), 1)).alias("enqueued_unknown"),
        *(F.percentile(name, shares).alias(name) for name in times),
    )
    percentiles = [
        F.col(name)[n].alias(f"{name.removesuffix('_ms')}_{p}_ms")
        for name in times
        for n, p in enumerate(("p50", "p95", "p99"))
    ]
    return grouped.select(
        "queue",
        F.col("window.start").alias("start"),
        *("jobs", "claimed_again", "enqueued_unknown"),
        *percentiles,
    ).orderBy("queue", "start")


def draw(rows: Sequence[Any]) -> str:
    """Wait and work, median and 99 of 100, over time."""
    series: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        for name in ("wait_p50_ms", "wait_p99_ms", "work_p50_ms", "work_p99_ms"):
            if row[name] is not None:
                point = (row.start.timestamp() * 1000, float(row[name]))
                series.setdefault(f"{row.queue} {name[:-3]}", []).append(point)
    return pictures.lines("Latency of queues", "ms, by the hour of the first claim", series)


def main(words: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = job.parser_of("queue_latency", JOBS["queue_latency"])
    parser.add_argument("--lease-log", required=True, help="the topic the queue's log goes to")
    parser.add_argument("--bucket", default="1 hour", help="of time (1 hour)")
    given = parser.parse_args(words)

    def work(spark: Any, given: argparse.Namespace) -> None:
        queues = job.load(spark, given, columns="topic,seq,ts", deleted="true")
        given.topics = given.lease_log
        log = job.load(spark, given, columns="data")
        found = transform(log, queues)
        if given.out is not None:
            outputs.replace_files(found, given.out / "jobs")
        job.finish(summary(found, given.bucket), given, draw, "summary")

    return job.run("queue_latency", given, work)


if __name__ == "__main__":
    raise SystemExit(main())
