"""The delay of a router's copies behind their source, over time.

An `exactly_once` router stamps each copy's `meta` with the topic, epoch and seq of its source
record; the difference of the two commit times is the lag.

Copies of an `at_least_once` router carry no stamp: no stored field names the source record of a
copy (payloads may repeat, tags are kept on request only, a filter or a restart shifts the count).
Any match would be a guess, so these copies are not shown. The router's state has its current lag.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from spark_jobs.catalog import JOBS
from spark_jobs.running import job, pictures

SEEN = (
    "Seen are copies of exactly_once routers: these carry the topic, epoch and seq they come from "
    "in their meta. Copies of at_least_once routers carry nothing that says which record they are "
    "of, so their lag is not in what is stored; `topics router get` shows it as of now."
)
# The most routers in the picture, which has two lines for each.
SHOWN = pictures.SERIES_MAX // 2
STAMP = "_topics_router struct<source string, epoch bigint, seq bigint>"


def transform(sources: Any, copies: Any, bucket: str = "1 minute") -> Any:
    """One row for each source, destination and bucket of the copies: copies, lag in ms, unknown
    ones.

    `sources`: `topic, epoch, seq, ts`, with deleted records. `copies`: `topic, ts, meta`. A copy
    whose source record is no longer in any segment counts in `unknown`.
    """
    from pyspark.sql import functions as F

    stamped = copies.select(
        F.col("topic").alias("dest"),
        F.col("ts").alias("copied"),
        F.from_json("meta", STAMP)["_topics_router"].alias("stamp"),
    ).where("stamp.source is not null")
    origins = sources.select(
        F.col("topic").alias("source"), "epoch", "seq", F.col("ts").alias("appended")
    )
    lag = F.unix_millis("copied") - F.unix_millis("appended")
    joined = (
        stamped.select("dest", "copied", "stamp.*")
        .join(origins, ["source", "epoch", "seq"], "left")
        .select("source", "dest", "copied", lag.alias("lag_ms"))
    )
    percentiles = F.percentile("lag_ms", F.array(*map(F.lit, (0.5, 0.99))))
    return (
        joined.groupBy("source", "dest", F.window("copied", bucket))
        .agg(
            F.count("*").alias("copies"),
            F.count(F.when(F.col("lag_ms").isNull(), 1)).alias("unknown"),
            percentiles.alias("lags"),
            F.max("lag_ms").alias("lag_max_ms"),
        )
        .select(
            *("source", "dest", F.col("window.start").alias("start"), "copies", "unknown"),
            F.col("lags")[0].alias("lag_p50_ms"),
            F.col("lags")[1].alias("lag_p99_ms"),
            "lag_max_ms",
        )
        .orderBy("source", "dest", "start")
    )


def draw(rows: Sequence[Any]) -> pictures.Figure:
    """Draw median and 99th percentile over time for each router."""
    series: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        for name in ("lag_p50_ms", "lag_p99_ms"):
            if row[name] is not None:
                point = (row.start.timestamp() * 1000, float(row[name]))
                series.setdefault(f"{row.source}→{row.dest} {name[4:7]}", []).append(point)
    return pictures.lines("Lag of routers", "ms behind the source, by time of the copy", series)


def drawn(frame: Any) -> pictures.Figure:
    """Draw a frame of `transform` for the routers with most copies."""
    from pyspark.sql import functions as F

    pair = ["source", "dest"]
    totals = frame.groupBy(pair).agg(F.sum("copies").alias("total"))
    busiest = totals.orderBy(F.desc("total"), *pair).limit(SHOWN).select(pair)
    shown = frame.join(F.broadcast(busiest), pair, "left_semi")
    return job.dated(shown, "start", lambda rows: draw(rows.orderBy(*pair, "start").collect()))


def main(words: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = job.parser_of("router_lag", JOBS["router_lag"])
    parser.epilog = SEEN
    parser.add_argument("--source", help="source topics: names, prefixes*, globs (all)")
    parser.add_argument("--bucket", default="1 minute", help="length of a time bucket (1 minute)")
    given = parser.parse_args(words)

    def work(spark: Any, given: argparse.Namespace) -> None:
        copies = job.load(spark, given, columns="topic,ts,meta")
        given.topics, given.from_ts = given.source, None
        sources = job.load(spark, given, columns="topic,epoch,seq,ts", deleted="true")
        job.finish(transform(sources, copies, given.bucket), given, drawn=drawn)

    return job.run("router_lag", given, work)


if __name__ == "__main__":
    raise SystemExit(main())
