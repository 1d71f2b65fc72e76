"""The busiest tags of each topic, their first and last time, and tag churn."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from spark_jobs.catalog import JOBS
from spark_jobs.running import job, pictures

COLUMNS = "topic,tag,seq,ts"
SHOWN = 20


def transform(frame: Any) -> Any:
    """One row for each topic and tag: records, share of the topic's records, first and last time,
    rank.
    """
    from pyspark.sql import Window
    from pyspark.sql import functions as F

    of_topic = Window.partitionBy("topic")
    by_count = of_topic.orderBy(F.desc("records"), "tag")
    counted = frame.groupBy("topic", "tag").agg(
        F.count("*").alias("records"),
        F.min("ts").alias("first_seen"),
        F.max("ts").alias("last_seen"),
        F.max("seq").alias("last_seq"),
    )
    # Records without a tag count for the topic, too.
    share = (F.col("records") / F.sum("records").over(of_topic)).alias("share")
    return (
        counted.select("*", share)
        .where(F.col("tag").isNotNull())
        .select("*", F.row_number().over(by_count).alias("rank"))
        .orderBy("topic", "rank")
    )


def churn(frame: Any, bucket_s: int) -> Any:
    """One row for each topic and bucket: active tags, tags new since the previous bucket, tags gone
    since then.

    A bucket without any record of the topic has a row only if tags disappeared in it.
    """
    from pyspark.sql import functions as F

    number = F.floor(F.unix_seconds("ts") / bucket_s)
    active = (
        frame.where(F.col("tag").isNotNull())
        .select("topic", "tag", number.alias("bucket"))
        .distinct()
    )
    before = active.select("topic", "tag", (F.col("bucket") + 1).alias("bucket"))
    keys = ["topic", "tag", "bucket"]
    came = active.join(before, keys, "left_anti").groupBy("topic", "bucket")
    went = before.join(active, keys, "left_anti").groupBy("topic", "bucket")
    last = active.groupBy("topic").agg(F.max("bucket").alias("last"))
    return (
        active.groupBy("topic", "bucket")
        .agg(F.count("*").alias("active"))
        .join(came.agg(F.count("*").alias("appeared")), ["topic", "bucket"], "full")
        .join(went.agg(F.count("*").alias("vanished")), ["topic", "bucket"], "full")
        .join(last, "topic")
        .where(F.col("bucket") <= F.col("last"))
        .na.fill(0, ["active", "appeared", "vanished"])
        .select(
            "topic",
            F.timestamp_seconds(F.col("bucket") * bucket_s).alias("start"),
            *("active", "appeared", "vanished"),
        )
        .orderBy("topic", "start")
    )


def draw(rows: Sequence[Any], totals: tuple[int, int] | None = None) -> pictures.Figure:
    """Draw the twenty busiest tags.

    `totals`: counts of tags and topics, needed if `rows` are only a part.
    """
    tags, topics = totals or (len(rows), len({row.topic for row in rows}))
    busiest = sorted(rows, key=lambda row: -row.records)[:SHOWN]
    named = [
        (row.tag if topics == 1 else f"{row.topic} · {row.tag}", float(row.records))
        for row in busiest
    ]
    note = f"{tags} tags in {topics} topics; the busiest {len(named)} are shown"
    return pictures.bars("Busiest tags", "records", named, note)


def drawn(frame: Any) -> pictures.Figure:
    """Draw a frame of `transform`. Only the busiest tags are sent to the driver."""
    from pyspark.sql import functions as F

    tags, topics = frame.agg(F.count("*"), F.count_distinct("topic")).first()
    busiest = frame.orderBy(F.desc("records"), "topic", "rank").limit(SHOWN)
    return draw(busiest.collect(), (tags, topics))


def main(words: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = job.parser_of("tag_activity", JOBS["tag_activity"])
    parser.add_argument(
        "--bucket-s", type=int, default=3600, help="seconds of a churn bucket (3600)"
    )
    given = parser.parse_args(words)

    def work(spark: Any, given: argparse.Namespace) -> None:
        frame = job.load(spark, given, columns=COLUMNS)
        job.finish(transform(frame), given, None, "tags", drawn)
        job.finish(churn(frame, given.bucket_s), given, None, "churn")

    return job.run("tag_activity", given, work)


if __name__ == "__main__":
    raise SystemExit(main())
