"""Sealed records as Parquet, partitioned by topic and day: text, VARIANT or typed payloads."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from spark_jobs import job
from spark_jobs.catalog import JOBS
from spark_jobs.datasource import payloads


def transform(frame: Any, payload: str = "text", schema: str | None = None) -> Any:
    """The records with a `day` (UTC), and `data` as text, as VARIANT or by a schema."""
    from pyspark.sql import functions as F

    if schema is not None or payload == "variant":
        frame = payloads(frame, schema)
    return frame.withColumn("day", F.to_date(F.to_utc_timestamp("ts", "UTC")))


def main(words: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = job.parser_of("to_parquet", JOBS["to_parquet"])
    parser.add_argument(
        "--payload", choices=("text", "variant"), default="text", help="how data are kept (text)"
    )
    parser.add_argument("--schema", help="of data, in Spark's words: 'a int, b struct<c: string>'")
    parser.add_argument("--files-per-day", type=int, default=1, help="of each topic (1)")
    given = parser.parse_args(words)
    if given.out is None:
        parser.error("--out says where the files go")

    def work(spark: Any, given: argparse.Namespace) -> None:
        from pyspark.sql import functions as F

        found = transform(job.load(spark, given), given.payload, given.schema)
        spread = F.pmod(F.col("seq"), F.lit(given.files_per_day))
        days = found.repartition("topic", "day", spread).sortWithinPartitions("topic", "seq")
        writer = days.write.mode("overwrite").partitionBy("topic", "day")
        writer.option("compression", "zstd").parquet(str(given.out))
        job.say(f"written: {given.out}")

    return job.run("to_parquet", given, work)


if __name__ == "__main__":
    raise SystemExit(main())
