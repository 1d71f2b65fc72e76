"""The JSON schema of each topic's payloads by time bucket, and where it changed (drift).

The picture has a row for each field and type, by bucket; a darker cell means that more records have
it. The row of a type that appeared later starts later, with a mark. Fields of array items are in
the schema only.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

from spark_jobs.catalog import JOBS
from spark_jobs.running import job, pictures
from spark_jobs.session import DUPLICATES

COLUMNS = "topic,ts,data,kind"
LEVELS: Final = 2
NOT_JSON: Final = "no JSON"
ROOT: Final = "(payload)"
_COLOURS: Final = {
    "STRING": pictures.COLOURS[0],
    "BIGINT": pictures.COLOURS[2],
    "DECIMAL": pictures.COLOURS[6],
    "DOUBLE": pictures.COLOURS[6],
    "BOOLEAN": pictures.COLOURS[3],
    "OBJECT": pictures.COLOURS[7],
    "ARRAY": pictures.COLOURS[5],
    "VOID": "#718096",
    NOT_JSON: "#c53030",
}


def transform(frame: Any, bucket: str = "1 day") -> Any:
    """One row for each topic and bucket: records, records that are not JSON, the schema of all
    others.

    `changed`: whether the bucket has a field, or a kind of a field, that the topic's previous
    bucket did not have; `before` is the schema of that bucket. A kind tells whole numbers from
    others, but ignores the number of digits.
    """
    from pyspark.sql import Window
    from pyspark.sql import functions as F

    parsed = F.try_parse_json(json_of(frame))
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
        .withColumn("changed", F.coalesce(kinds("schema") != kinds("before"), F.lit(False)))
        .orderBy("topic", "start")
    )


def json_of(frame: Any) -> Any:
    """Payloads as texts; null for bytes, whose Base64 may look like a number."""
    from pyspark.sql import functions as F

    text = F.col("data").cast("string")
    return F.when(F.col("kind") != "bytes", text) if "kind" in frame.columns else text


def kinds(schema: str) -> Any:
    """A column of schemas with kinds instead of types: a number is only whole or not whole."""
    from pyspark.sql import functions as F

    whole = F.regexp_replace(schema, r"\bDECIMAL\(\d+, ?0\)", "BIGINT")
    return F.regexp_replace(whole, r"\bDECIMAL\(\d+, ?\d+\)|\b(DOUBLE|FLOAT)\b", "DECIMAL")


def fields(frame: Any, bucket: str = "1 day") -> Any:
    """One row for each topic, bucket, field and type: how many records have it. For the picture.

    A field is a path of up to `LEVELS` names; a type is its VARIANT name without the contents of
    objects and arrays or the digits of decimals. The payload itself has the path `(payload)`.
    """
    from pyspark.sql import SparkSession
    from pyspark.sql import functions as F

    kind = F.regexp_extract(F.schema_of_variant("value"), r"^(\w+)", 1)
    level = frame.select(
        "topic",
        F.window("ts", bucket)["start"].alias("start"),
        F.lit(ROOT).alias("field"),
        F.try_parse_json(json_of(frame)).alias("value"),
    ).withColumn("type", F.coalesce(kind, F.lit(NOT_JSON)))
    found = level.drop("value")
    tables = SparkSession.active().tvf
    for depth in range(LEVELS):
        inner = tables.variant_explode(F.col("value").outer()).select(
            "key", F.col("value").alias("inner")
        )
        path = F.col("key") if depth == 0 else F.concat("field", F.lit("."), "key")
        level = (
            level.where(F.col("type") == "OBJECT")
            .lateralJoin(inner)
            .select("topic", "start", path.alias("field"), F.col("inner").alias("value"))
            .withColumn("type", kind)
        )
        found = found.unionByName(level.drop("value"))
    return (
        found.groupBy("topic", "start", "field", "type")
        .agg(F.count("*").alias("records"))
        .orderBy("topic", "start", "field", "type")
    )


def draw(rows: Sequence[Any], found: Sequence[Any]) -> pictures.Figure:
    """Draw fields and types of each topic by bucket.

    `rows` come from `transform`, `found` comes from `fields`.
    """
    totals: dict[str, dict[float, int]] = {}
    drifts: dict[str, int] = {}
    for row in rows:
        totals.setdefault(row.topic, {})[_ms(row)] = row.records
        drifts[row.topic] = drifts.get(row.topic, 0) + row.changed
    counts: dict[tuple[str, str, str], dict[float, int]] = {}
    for row in found:
        if (row.field, row.type) != (ROOT, "OBJECT"):
            counts.setdefault((row.topic, row.field, row.type), {})[_ms(row)] = row.records
    lines: list[pictures.GridRow] = []
    for topic, of in sorted(totals.items()):
        changes, records = drifts[topic], sum(of.values())
        note = f"{records:,} record{'' if records == 1 else 's'}, "
        note += f"{changes} change{'' if changes == 1 else 's'}"
        lines.append(pictures.GridRow(topic, {}, note))
        lines += [
            _line(field, kind, has, of)
            for (name, field, kind), has in sorted(counts.items())
            if name == topic
        ]
    times = sorted({time for of in totals.values() for time in of})
    note = "dark: all records of the bucket have it; a bar: first seen then; no cell: no records"
    unit = "field and type by bucket of time: share of the topic's records that have it"
    return pictures.grid("Payloads by field", unit, times, lines, note if lines else "no records")


def drawn(found: Any, frame: Any, bucket: str = "1 day") -> pictures.Figure:
    """Draw a frame of `transform` and its source: the busiest topics and their last buckets.

    Other rows do not fit the picture, so they are not sent to the driver.
    """
    from pyspark.sql import functions as F

    totals = found.groupBy("topic").agg(F.sum("records").alias("total"))
    busiest = totals.orderBy(F.desc("total"), "topic").limit(pictures.GRID_ROWS_MAX)
    busiest = F.broadcast(busiest.select("topic").cache())
    shown = found.join(busiest, "topic", "left_semi")
    starts = shown.select("start").distinct().orderBy(F.desc("start"))
    last = [row.start for row in starts.limit(pictures.GRID_COLUMNS_MAX).collect()]
    if last:
        shown = shown.where(F.col("start") >= F.lit(min(last)))
        # Only these buckets: none of them contains times that Python cannot represent.
        frame = frame.where(
            F.window("ts", bucket)["start"].between(F.lit(min(last)), F.lit(max(last)))
        )
        frame = frame.join(busiest, "topic", "left_semi")
    rows = shown.orderBy("topic", "start").collect()
    figure = draw(rows, fields(frame, bucket).collect())
    topics = totals.count()
    if topics > pictures.GRID_ROWS_MAX:
        pictures.add_note(figure, f"of {topics:,} topics the {pictures.GRID_ROWS_MAX} busiest")
    return figure


def _line(
    field: str, kind: str, has: Mapping[float, int], of: Mapping[float, int]
) -> pictures.GridRow:
    """The picture's row for a field and type of a topic that had `of` records in its buckets."""
    shares = {time: has.get(time, 0) / records for time, records in of.items()}
    first, last, start, end = min(has), max(has), min(of), max(of)
    note = _percent(sum(has.values()) / sum(of.values()))
    since, until = (pictures.moment(time, end - start) for time in (first, last))
    if first == last and start < end:
        note += f", only {since}"
    elif first > start and last < end:
        note += f", {since}..{until}"
    elif first > start:
        note += f", from {since}"
    elif last < end:
        note += f", to {until}"
    name = field if len(field) <= 22 else f"{field[:10]}…{field[-11:]}"
    cells = {time: (share, _percent(share)) for time, share in shares.items()}
    colour = _COLOURS.get(kind, pictures.COLOURS[1])
    return pictures.GridRow(f"{name} {kind}", cells, note, colour, first if first > start else None)


def _percent(share: float) -> str:
    """A share in whole percents; only an exact 0 or 100 is shown as such."""
    if 0 < share < 0.01:
        return "<1%"
    return f"{min(round(share * 100), 99) if share < 1 else 100}%"


def _ms(row: Any) -> float:
    return float(row.start.timestamp() * 1000)


@contextmanager
def duplicates_allowed(spark: Any) -> Iterator[None]:
    """Parse an object with a duplicate field as JSON, also in a session that this job did not
    make.
    """
    before = spark.conf.get(DUPLICATES)
    spark.conf.set(DUPLICATES, "true")
    try:
        yield
    finally:
        spark.conf.set(DUPLICATES, before)


def main(words: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = job.parser_of("payload_schema", JOBS["payload_schema"])
    parser.add_argument("--bucket", default="1 day", help="length of a time bucket (1 day)")
    given = parser.parse_args(words)

    def work(spark: Any, given: argparse.Namespace) -> None:
        frame = job.load(spark, given, columns=COLUMNS)

        with duplicates_allowed(spark):
            found = transform(frame, given.bucket)

            def picture(found: Any) -> pictures.Figure:
                return job.dated(found, "start", lambda rows: drawn(rows, frame, given.bucket))

            job.finish(found, given, drawn=picture)

    return job.run("payload_schema", given, work)


if __name__ == "__main__":
    raise SystemExit(main())
