"""Sealed records as Parquet, partitioned by topic and day: text, VARIANT or typed payloads.

The picture has a cell for each topic and day, from the footers of the written files, so that a
missing or small day is visible at once.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from datetime import UTC, datetime, time
from typing import Any, Final

from spark_jobs.catalog import JOBS
from spark_jobs.datasource import payloads
from spark_jobs.reader.listing import Lister
from spark_jobs.reader.options import parse_options
from spark_jobs.reader.query import COLUMNS, TS_HIGH, TS_LOW, BadOption
from spark_jobs.running import job, outputs, pictures

_DAY_MS: Final = 86_400_000


def transform(frame: Any, payload: str = "text", schema: str | None = None) -> Any:
    """The records with a `day` (UTC), and `data` as text, as VARIANT or by a schema."""
    from pyspark.sql import functions as F

    if schema is not None or payload == "variant":
        frame = payloads(frame, schema).drop("kind")
    # UTC, even if the session has another time zone
    days = F.floor(F.unix_millis("ts") / _DAY_MS).cast("int")
    return frame.withColumn("day", F.date_from_unix_date(days))


def written(spark: Any, folder: str) -> Any:
    """One row for each topic and day in a folder of this job: records, bytes and files."""
    from pyspark.sql import functions as F

    # Pass the schema; otherwise a topic called `007` would become a number.
    frame = spark.read.schema("seq bigint, topic string, day date").parquet(folder)
    file = frame.select("topic", "day", "_metadata.file_path", "_metadata.file_size")
    return (
        file.groupBy("topic", "day", "file_path", "file_size")
        .agg(F.count("*").alias("records"))
        .groupBy("topic", "day")
        .agg(
            F.sum("records").alias("records"),
            F.sum("file_size").alias("bytes"),
            F.count("*").alias("files"),
        )
        .orderBy("topic", "day")
    )


def draw(rows: Sequence[Any]) -> pictures.Figure:
    """Draw bytes by topic and day; the largest value is darkest. `rows` come from `written`."""
    largest = max((row.bytes for row in rows), default=0) or 1
    lines: list[pictures.GridRow] = []
    for topic in sorted({row.topic for row in rows}):
        own = [row for row in rows if row.topic == topic]
        cells = {_ms(row): (row.bytes / largest, pictures.amount(row.records)) for row in own}
        counts = (sum(row.records for row in own), sum(row.bytes for row in own))
        note = "{} records, {} bytes".format(*map(pictures.amount, counts))
        lines.append(pictures.GridRow(topic, cells, note))
    records, size = sum(row.records for row in rows), sum(row.bytes for row in rows)
    note = (
        f"{records:,} records, {size:,} bytes in {sum(row.files for row in rows):,} files; "
        "darkest: most bytes; no cell: no records"
    )
    days = [int(_ms(row)) for row in rows]
    times = range(min(days), max(days) + 1, _DAY_MS) if days else ()
    unit = "records by topic and day (UTC), as dark as bytes of Parquet"
    return pictures.grid("Parquet by day", unit, times, lines, note)


def drawn(frame: Any) -> pictures.Figure:
    """Draw a frame of `written`: the topics with most bytes, and the last days."""
    from pyspark.sql import functions as F

    totals = frame.groupBy("topic").agg(F.sum("bytes").alias("total"))
    largest = totals.orderBy(F.desc("total"), "topic").limit(pictures.GRID_ROWS_MAX)
    shown = frame.join(F.broadcast(largest.select("topic")), "topic", "left_semi")
    days = shown.select("day").distinct().orderBy(F.desc("day"))
    last = [row.day for row in days.limit(pictures.GRID_COLUMNS_MAX).collect()]
    if last:
        shown = shown.where(F.col("day") >= F.lit(min(last)))
    figure = draw(shown.orderBy("topic", "day").collect())
    topics = totals.count()
    if topics > pictures.GRID_ROWS_MAX:
        pictures.add_note(figure, f"of {topics:,} topics the {pictures.GRID_ROWS_MAX} largest")
    return figure


def _ms(row: Any) -> float:
    return datetime.combine(row.day, time(), UTC).timestamp() * 1000


def whole_days(given: argparse.Namespace) -> None:
    """Refuse a bound within a day, because a part must not replace a whole day."""
    query = parse_options({"path": str(given.data_dir), **job.options_of(given)}).query
    for name, bound in (("--from", query.start_ts), ("--to", query.end_ts)):
        if bound not in (TS_LOW, TS_HIGH) and bound % _DAY_MS:
            raise BadOption(f"{name}: a day is replaced as a whole: give a midnight (UTC)")


def main(words: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = job.parser_of("to_parquet", JOBS["to_parquet"])
    parser.add_argument(
        "--payload",
        choices=("text", "variant"),
        default="text",
        help="type of the data column (text)",
    )
    parser.add_argument("--schema", help="schema of data for Spark: 'a int, b struct<c: string>'")
    parser.add_argument(
        "--files-per-day", type=int, default=1, help="files of each topic and day (1)"
    )
    given = parser.parse_args(words)
    if given.out is None:
        parser.error("--out says where the files go")
    if given.files_per_day < 1:
        parser.error("--files-per-day is at least 1")
    try:
        whole_days(given)
    except BadOption as error:
        parser.error(str(error))

    def work(spark: Any, given: argparse.Namespace) -> None:
        from pyspark.sql import functions as F

        is_parsed = given.schema is not None or given.payload == "variant"
        columns = ",".join((*COLUMNS, *(("kind",) if is_parsed else ())))
        found = transform(job.load(spark, given, columns=columns), given.payload, given.schema)
        spread = F.pmod(F.col("seq"), F.lit(given.files_per_day))
        # Sort by the columns of the folders first. Otherwise Spark sorts by these columns itself
        # and drops this sort.
        days = found.repartition("topic", "day", spread)
        days = days.sortWithinPartitions("topic", "day", "seq")
        options = parse_options({"path": str(given.data_dir), **job.options_of(given)})
        names = Lister(options.data_dir, options.query).topics
        outputs.replace_partitions(days, given.out, ("topic", "day"), names)
        job.say(f"written: {given.out}")
        job.picture(given, lambda: job.dated(written(spark, str(given.out)), "day", drawn))

    # The store's id is checked, because days of two stores in one folder would replace each other.
    details = {
        "payload": "schema" if given.schema else given.payload,
        "schema": given.schema,
        "store": outputs.store_id_of(given.data_dir),
    }
    return job.run("to_parquet", given, work, details)


if __name__ == "__main__":
    raise SystemExit(main())
