"""The JSON schema of each topic's payloads by bucket of time, and where it changed (drift)."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from spark_jobs import job
from spark_jobs.catalog import JOBS

COLUMNS = "topic,ts,data"


def transform(frame: Any, bucket: str = "1 day") -> Any:
    """A row a topic and bucket: records, those that are no JSON, the schema that takes all others.

    `changed`: whether the schema is another one than in the topic's bucket before, `before`.
    """
    from pyspark.sql import Window
    from pyspark.sql import functions as F

    parsed = F.try_parse_json(F.col("data").cast("string"))
    seen = (
        frame.select("topic", "ts", parsed.alias("value"))
        .groupBy("topic", F.window("ts", bucket))
        .agg(
            F.count("*").alias("records"),
            F.count(F.when(F.col("value").isNull(), 1)).alias("not_json"),
            F.schema_of_variant_agg("value").alias("schema"),
        )
        .select("topic", F.col("window.start").alias("start"), "records", "not_json", "schema")
    )
    before = F.lag("schema").over(Window.partitionBy("topic").orderBy("start"))
    return (
        seen.withColumn("before", before)
        .withColumn("changed", F.coalesce(F.col("schema") != F.col("before"), F.lit(False)))
        .orderBy("topic", "start")
    )


def main(words: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = job.parser_of("payload_schema", JOBS["payload_schema"])
    parser.add_argument("--bucket", default="1 day", help="of time (1 day)")
    given = parser.parse_args(words)

    def work(spark: Any, given: argparse.Namespace) -> None:
        frame = job.load(spark, given, columns=COLUMNS)
        job.finish(transform(frame, given.bucket), given)

    return job.run("payload_schema", given, work)


if __name__ == "__main__":
    raise SystemExit(main())
