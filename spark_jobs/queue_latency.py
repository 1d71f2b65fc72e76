"""How long jobs of a queue wait and run, from the queue's records and its lease log.

The lease log holds the times at which a job was claimed, acked or released, or its lease expired.
The job was enqueued at the time of its record, which stays in its segment after the ack has deleted
it. Once the segment is dropped, that time is unknown: such jobs are counted without a wait.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from spark_jobs.catalog import JOBS
from spark_jobs.reader.options import parse_options
from spark_jobs.running import job, outputs, pictures

# The most queues in the picture, which has four lines for each.
SHOWN = pictures.SERIES_MAX // 4
EVENT = "event string, queue string, epoch bigint, seq bigint, ts bigint, node string"


def transform(log: Any, jobs: Any) -> Any:
    """One row for each job that was ever claimed: `wait_ms`, `work_ms`, `total_ms`, claims, result.

    `log`: records of the lease log (`data`, and `seq` as the order of equal times); `jobs`: records
    of the queues, deleted ones included (`topic, epoch, seq, ts`). `work_ms` is from the last claim
    before the ack; a job that was never acked has none. Events of servers that do not log the epoch
    belong to the incarnation in `jobs`.
    """
    from pyspark.sql import functions as F

    event = F.from_json("data", EVENT)
    order = F.col("seq") if "seq" in log.columns else F.monotonically_increasing_id()
    events = (
        log.select(event.alias("event"), order.alias("place"))
        .select("event.*", F.struct(F.col("event.ts").alias("ts"), "place").alias("at"))
        .where("queue is not null")
    )
    claimed = F.when(F.col("event") == "claimed", F.col("at"))
    acked = F.when(F.col("event") == "acked", F.col("at"))
    ended = F.when(F.col("event").isin("acked", "dead_lettered"), F.col("at"))
    leases = events.groupBy("queue", "epoch", "seq").agg(
        F.min(claimed).alias("first_claim"),
        F.collect_list(claimed).alias("all_claims"),
        F.max(acked).alias("acked"),
        F.max(ended)["ts"].alias("ended"),
        F.count(claimed).alias("claims"),
        F.count(F.when(F.col("event") == "expired", 1)).alias("expired"),
        F.max_by("event", "at").alias("last_event"),
    )
    before_ack = F.filter("all_claims", lambda claim: claim < F.col("acked"))
    epoch = F.col("epoch") if "epoch" in jobs.columns else F.lit(None).cast("bigint")
    enqueued = jobs.select(
        F.col("topic").alias("of_queue"),
        epoch.alias("of_epoch"),
        F.col("seq").alias("of_seq"),
        F.unix_millis("ts").alias("enqueued"),
    )
    is_same = (F.col("queue") == F.col("of_queue")) & (F.col("seq") == F.col("of_seq"))
    is_same &= F.coalesce(F.col("epoch") == F.col("of_epoch"), F.lit(True))
    return (
        leases.where("first_claim is not null")
        .join(enqueued, is_same, "left")
        .select(
            *("queue", "epoch", "seq", "claims", "expired"),
            F.timestamp_millis(F.col("first_claim.ts")).alias("claimed_at"),
            (F.col("first_claim.ts") - F.col("enqueued")).alias("wait_ms"),
            (F.col("acked.ts") - F.array_max(before_ack)["ts"]).alias("work_ms"),
            (F.col("ended") - F.col("enqueued")).alias("total_ms"),
            F.col("last_event").alias("state"),
        )
        .orderBy("queue", "epoch", "seq")
    )


def within(jobs: Any, start_ms: int, end_ms: int) -> Any:
    """Jobs whose first claim was at or after `start_ms` and before `end_ms`."""
    from pyspark.sql import functions as F

    claimed = F.unix_millis("claimed_at")
    return jobs.where((claimed >= F.lit(start_ms)) & (claimed < F.lit(end_ms)))


def summary(jobs: Any, bucket: str = "1 hour") -> Any:
    """One row for each queue and bucket of first claims: jobs, and percentiles of their times."""
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


def draw(rows: Sequence[Any]) -> pictures.Figure:
    """Draw wait and work over time, median and 99th percentile."""
    series: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        for name in ("wait_p50_ms", "wait_p99_ms", "work_p50_ms", "work_p99_ms"):
            if row[name] is not None:
                point = (row.start.timestamp() * 1000, float(row[name]))
                series.setdefault(f"{row.queue} {name[:-3]}", []).append(point)
    return pictures.lines("Latency of queues", "ms, by the hour of the first claim", series)


def drawn(frame: Any) -> pictures.Figure:
    """Draw a frame of `summary` for the queues with most jobs."""
    from pyspark.sql import functions as F

    totals = frame.groupBy("queue").agg(F.sum("jobs").alias("total"))
    busiest = totals.orderBy(F.desc("total"), "queue").limit(SHOWN).select("queue")
    shown = frame.join(F.broadcast(busiest), "queue", "left_semi")
    return job.dated(shown, "start", lambda rows: draw(rows.orderBy("queue", "start").collect()))


def main(words: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = job.parser_of("queue_latency", JOBS["queue_latency"])
    parser.add_argument("--lease-log", required=True, help="the topic of the queue's lease log")
    parser.add_argument("--bucket", default="1 hour", help="length of a time bucket (1 hour)")
    given = parser.parse_args(words)

    def work(spark: Any, given: argparse.Namespace) -> None:
        # The times select jobs by their first claim, but do not limit the records that are read: a
        # job may have been enqueued earlier, and earlier records show which claim is the first.
        query = parse_options({"path": str(given.data_dir), **job.options_of(given)}).query
        given.from_ts = given.to_ts = None
        queues = job.load(spark, given, columns="topic,epoch,seq,ts", deleted="true")
        given.topics = given.lease_log
        log = job.load(spark, given, columns="seq,data")
        found = within(transform(log, queues), query.start_ts, query.end_ts)
        if given.out is not None:
            outputs.replace_files(found, given.out / "jobs")
        job.finish(summary(found, given.bucket), given, None, "summary", drawn)

    return job.run("queue_latency", given, work)


if __name__ == "__main__":
    raise SystemExit(main())
