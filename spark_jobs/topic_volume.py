"""Records and bytes per topic over time: rates, sizes and their percentiles. Reads no payload."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from spark_jobs.catalog import JOBS
from spark_jobs.running import job, pictures

COLUMNS = "topic,ts,bytes"
_POINTS_MAX = 2_000
# The most topics in the picture: more lines are hard to distinguish.
SHOWN = 12


def transform(frame: Any, bucket: str = "1 hour") -> Any:
    """One row for each topic and bucket with records: counts, bytes, rate, percentiles of sizes.

    `bytes` is the size by which a record counts in its topic: payload, names and 24 bytes for the
    frame.
    """
    from pyspark.sql import functions as F

    start, end = F.col("window.start"), F.col("window.end")
    seconds = (F.unix_micros(end) - F.unix_micros(start)) / 1_000_000
    sizes = F.percentile("bytes", F.array(*map(F.lit, (0.5, 0.95, 0.99))))
    return (
        frame.groupBy("topic", F.window("ts", bucket))
        .agg(
            F.count("*").alias("records"),
            F.sum("bytes").alias("bytes"),
            F.max("bytes").alias("bytes_max"),
            sizes.alias("sizes"),
        )
        .select(
            "topic",
            start.alias("start"),
            "records",
            "bytes",
            (F.col("records") / seconds).alias("records_per_s"),
            *(F.col("sizes")[n].alias(name) for n, name in enumerate(("p50", "p95", "p99"))),
            "bytes_max",
        )
        .orderBy("topic", "start")
    )


def draw(rows: Sequence[Any]) -> pictures.Figure:
    """Draw records over time, a line for each topic. A bucket without a row had no record."""
    found: dict[str, dict[float, float]] = {}
    for row in rows:
        found.setdefault(row.topic, {})[row.start.timestamp() * 1000] = float(row.records)
    times = sorted({t for points in found.values() for t in points})
    step = min((after - before for before, after in pairwise(times)), default=0.0)
    if step and (times[-1] - times[0]) / step <= _POINTS_MAX:
        times = [times[0] + step * n for n in range(round((times[-1] - times[0]) / step) + 1)]
    series = {
        topic: [(t, points.get(round(t, 3), 0.0)) for t in times]
        for topic, points in ((name, _rounded(each)) for name, each in found.items())
    }
    return pictures.lines("Records per topic", "records in a bucket of time", series)


def drawn(frame: Any) -> pictures.Figure:
    """Draw a frame of `transform` for the topics with most records."""
    from pyspark.sql import functions as F

    totals = frame.groupBy("topic").agg(F.sum("records").alias("total"))
    busiest = totals.orderBy(F.desc("total"), "topic").limit(SHOWN).select("topic")
    shown = frame.join(F.broadcast(busiest), "topic", "left_semi")
    return job.dated(shown, "start", lambda rows: draw(rows.orderBy("topic", "start").collect()))


def _rounded(points: dict[float, float]) -> dict[float, float]:
    return {round(t, 3): value for t, value in points.items()}


def main(words: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = job.parser_of("topic_volume", JOBS["topic_volume"])
    parser.add_argument("--bucket", default="1 hour", help="length of a time bucket (1 hour)")
    given = parser.parse_args(words)

    def work(spark: Any, given: argparse.Namespace) -> None:
        frame = job.load(spark, given, columns=COLUMNS)
        job.finish(transform(frame, given.bucket), given, drawn=drawn)

    return job.run("topic_volume", given, work)


if __name__ == "__main__":
    raise SystemExit(main())
