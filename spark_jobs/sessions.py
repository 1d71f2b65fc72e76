"""Sessions per node or tag: sequences of its records without a gap longer than the limit."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from spark_jobs.catalog import JOBS
from spark_jobs.running import job, pictures

SHOWN = 20


def transform(frame: Any, key: str = "node", gap: str = "30 minutes") -> Any:
    """One row for each session: topic, node or tag, begin and end, records. Records without `key`
    belong to no session. A gap of exactly `gap` does not end a session.
    """
    from pyspark.sql import functions as F

    assert key in ("node", "tag")
    who = F.col(key)
    return (
        frame.where(who.isNotNull())
        .groupBy("topic", who.alias("who"), F.session_window("ts", gap))
        .agg(
            F.min("ts").alias("start"),
            F.max("ts").alias("end"),
            F.count("*").alias("records"),
        )
        .select(
            *("topic", "who", "start", "end", "records"),
            (F.unix_millis("end") - F.unix_millis("start")).alias("duration_ms"),
        )
        .orderBy("topic", "who", "start")
    )


def draw(rows: Sequence[Any]) -> pictures.Figure:
    """Draw the names with most sessions."""
    counts: dict[str, int] = {}
    for row in rows:
        counts[row.who] = counts.get(row.who, 0) + 1
    busiest = sorted(counts.items(), key=lambda each: (-each[1], each[0]))[:SHOWN]
    return _bars(busiest, len(rows), len(counts))


def drawn(frame: Any) -> pictures.Figure:
    """Draw a frame of `transform`.

    Spark counts, and only the busiest names are sent to the driver.
    """
    from pyspark.sql import functions as F

    counted = frame.groupBy("who").agg(F.count("*").alias("sessions")).cache()
    count, sessions = counted.agg(F.count("*"), F.sum("sessions")).first()
    busiest = counted.orderBy(F.desc("sessions"), "who").limit(SHOWN).collect()
    counted.unpersist()
    return _bars([(row.who, row.sessions) for row in busiest], sessions or 0, count)


def _bars(busiest: Sequence[tuple[str, int]], sessions: int, count: int) -> pictures.Figure:
    note = f"{sessions} sessions of {count}; the busiest {len(busiest)} are shown"
    return pictures.bars("Sessions", "by who", [(n, float(c)) for n, c in busiest], note)


def main(words: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = job.parser_of("sessions", JOBS["sessions"])
    parser.add_argument(
        "--by", choices=("node", "tag"), default="node", help="sessions of nodes or tags (node)"
    )
    parser.add_argument("--gap", default="30 minutes", help="gap that ends a session (30 minutes)")
    given = parser.parse_args(words)

    def work(spark: Any, given: argparse.Namespace) -> None:
        frame = job.load(spark, given, columns=f"topic,ts,{given.by}")
        job.finish(transform(frame, given.by, given.gap), given, drawn=drawn)

    return job.run("sessions", given, work)


if __name__ == "__main__":
    raise SystemExit(main())
