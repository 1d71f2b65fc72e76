"""The Spark source `topics`: `spark.read.format("topics").load(place)`, after `register(spark)`.

A place is a data directory, or an archive in a folder or a bucket.

Needs Spark 4.0. From 4.1 on, Spark pushes filters down if `register` has enabled it; streams need
4.2, because of their limits. The driver makes the listing once, when it plans the read: all tasks
of one DataFrame's plan read the same state of each topic. Batches are Arrow batches, never Python
rows.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition

from spark_jobs.reader.filters import narrow
from spark_jobs.reader.listing import Listing, list_segments
from spark_jobs.reader.options import SourceOptions, parse_options, with_columns
from spark_jobs.reader.packing import pack
from spark_jobs.reader.partition import TopicsPartition
from spark_jobs.reader.query import BadOption, Query
from spark_jobs.reader.report import ReadReport
from spark_jobs.running.outputs import SCHEMA, names_of

if TYPE_CHECKING:
    from spark_jobs.reader.streaming import TopicsStreamReader

PUSH_DOWN: Final = "spark.sql.python.filterPushdown.enabled"
_NOTE: Final = "topics.options"
# The types of fields within data, besides arrays and structs: the types that Arrow's JSON reader
# makes.
_FIELD_TYPES: Final = {
    "string": "string",
    "bigint": "int64",
    "int": "int32",
    "smallint": "int16",
    "tinyint": "int8",
    "double": "float64",
    "float": "float32",
    "boolean": "bool_",
}


class TopicsDataSource(DataSource):
    """The data source; options are in docs/ANALYTICS.md."""

    @classmethod
    def name(cls) -> str:
        """The name of the format."""
        return "topics"

    def schema(self) -> Any:
        """All columns, or those of the option `columns`."""
        options = parse_options(self.options)
        struct = f"struct<{options.payload_schema}>"
        text = ", ".join(
            f"{name} {struct if kind == 'struct' else kind}" for name, kind in options.query.columns
        )
        return _noted(options, self.options) if "location" in self.options else text

    def reader(self, schema: Any) -> DataSourceReader:
        """Return a reader of the schema's columns."""
        options = parse_options(_options_of(schema, self.options))
        return TopicsReader(options, query_of(options, schema))

    def streamReader(self, schema: Any) -> TopicsStreamReader:
        """Return a reader of micro-batches."""
        from spark_jobs.reader.streaming import TopicsStreamReader

        options = parse_options(_options_of(schema, self.options))
        return TopicsStreamReader(options, query_of(options, schema))


def _noted(parsed: SourceOptions, options: Mapping[str, str]) -> Any:
    """The schema of a table that is being created, with its options in the first column's metadata.

    Spark's catalog stores a table's schema and passes it to each read. It also stores the options,
    but up to 4.3 it does not pass them to reads of a Python source.
    """
    from pyspark.sql import types

    kinds = {
        "string": types.StringType(),
        "binary": types.BinaryType(),
        "bigint": types.LongType(),
        "int": types.IntegerType(),
        "boolean": types.BooleanType(),
        "timestamp": types.TimestampType(),
    }
    schema = types.StructType()
    note = {_NOTE: json.dumps(dict(options))}
    for name, kind in parsed.query.columns:
        if kind == "variant":
            schema.add(name, types.VariantType(), metadata=note)
        elif kind in kinds:
            schema.add(name, kinds[kind], metadata=note)
        else:
            raise BadOption("payloadSchema is for views and frames: a table has data as text")
        note = {}
    return schema


def _options_of(schema: Any, options: Mapping[str, str]) -> Mapping[str, str]:
    """The options of a read: those of the table's creation and those of the read itself."""
    for column in schema.fields:
        if _NOTE in column.metadata:
            noted: dict[str, str] = json.loads(column.metadata[_NOTE])
            return {**noted, **options}
    return options


def query_of(options: SourceOptions, schema: Any) -> Query:
    """The query for the columns of Spark's schema. Raises `BadOption`."""
    kinds = {field.name: field.dataType for field in schema.fields}
    columns = tuple(
        (name, "struct" if kind.typeName() == "struct" else kind.simpleString())
        for name, kind in ((field.name, field.dataType) for field in schema.fields)
    )
    query = with_columns(options.query, columns)
    if dict(columns).get("data") == "struct":
        return replace(query, payload_type=arrow_type(kinds["data"]))
    if options.payload_schema is not None and "data" in kinds:
        raise BadOption("the schema and payloadSchema define data differently")
    return query


def arrow_type(kind: Any) -> Any:
    """The Arrow type for a Spark type within data. Raises `BadOption` for an unsupported type."""
    import pyarrow as pa

    if kind.typeName() == "struct":
        if not kind.fields:
            raise BadOption("payloadSchema: a struct has at least one field")
        if len(set(kind.names)) < len(kind.names):
            raise BadOption("payloadSchema: a field is named twice")
        if not all(field.nullable for field in kind.fields):
            raise BadOption("payloadSchema: no field can be NOT NULL, any may be missing")
        return pa.struct([pa.field(each.name, arrow_type(each.dataType)) for each in kind.fields])
    if kind.typeName() == "array":
        return pa.list_(pa.field("element", arrow_type(kind.elementType), kind.containsNull))
    name = kind.simpleString()
    if name not in _FIELD_TYPES:
        known = ", ".join((*_FIELD_TYPES, "array<...>", "struct<...>"))
        raise BadOption(f"payloadSchema: {name} is not offered; there are {known}")
    return getattr(pa, _FIELD_TYPES[name])()


class TopicsReader(DataSourceReader):
    """Plans on the driver, reads on executors."""

    def __init__(self, options: SourceOptions, query: Query) -> None:
        self.options = options
        self.query = query

    def partitions(self) -> Sequence[InputPartition]:
        """Make one listing and pack it into partitions."""
        options, query = self.options, self.query
        listing = list_segments(
            options.data_dir, query, cold_dir=options.cold_dir, now_ms=options.now_ms
        )
        if options.warns:
            warn_unsealed(listing, options.data_dir)
        if query.report_dir is not None and listing.skipped:
            ReadReport(skipped=listing.skipped).keep(query.report_dir)
        packed = pack(
            listing.segments,
            options.partition_bytes,
            options.min_partitions,
            payload=query.needs_payload,
        )
        return [TopicsPartition(segments) for segments in packed]

    @property
    def pushFilters(self) -> Any:
        """The object that receives pushed filters (`_PushFilters`)."""
        return _PushFilters(self)

    def read(self, partition: InputPartition) -> Iterator[Any]:
        """Yield the Arrow batches of a partition; yields none if the plan was empty."""
        from spark_jobs.reader.segments import read_segments

        segments = partition.segments if isinstance(partition, TopicsPartition) else []
        return read_segments(segments, self.query)


class _PushFilters:
    """`pushFilters` of a reader, if Spark has such a method.

    Spark compares `reader.pushFilters.__func__` with the inherited method, and refuses a reader
    that overrides it while the option for push-down is off. The source must work with the option on
    and off. So `__func__` is the inherited method here, and Spark calls this object only while the
    option is on.
    """

    def __init__(self, reader: TopicsReader) -> None:
        self._reader = reader
        self.__func__ = getattr(DataSourceReader, "pushFilters", None)

    def __call__(self, filters: list[Any]) -> Iterable[Any]:
        """Narrow the query; return the filters that Spark still has to apply."""
        self._reader.query, left = narrow(self._reader.query, filters)
        return left


def warn_unsealed(listing: Listing, data_dir: str) -> None:
    """Warn about unsealed records, which are not read.

    The last manifest of each topic gives their number.
    """
    if not listing.unsealed:
        return
    if listing.as_of_ts is not None:
        when = datetime.fromtimestamp(listing.as_of_ts / 1000, UTC).isoformat(timespec="seconds")
        sys.stderr.write(
            f"topics: at least {listing.unsealed} records were not sealed in the newest base of "
            f"{data_dir}, of {when}, and are not read. The server makes bases every "
            "TOPICS_ARCHIVE_BASE_INTERVAL_MS.\n"
        )
        return
    sys.stderr.write(
        f"topics: at least {listing.unsealed} records of {data_dir} are not sealed yet and are "
        "not read. Seal them with POST /v0/admin/seal, or export them from the running server "
        "with `topics export`.\n"
    )


def register(spark: Any) -> None:
    """Register `format("topics")`, and switch filter push-down on if Spark has it."""
    spark.dataSource.register(TopicsDataSource)
    if hasattr(DataSourceReader, "pushFilters"):
        spark.conf.set(PUSH_DOWN, "true")


def read_output(spark: Any, folder: str) -> Any:
    """Read a folder of Parquet by topic and day, written by `to_parquet` or `topics export`.

    Uses the schema file in the folder: without it, Spark would read a topic called `007` as a
    number.
    """
    from pyspark.sql.types import StructType

    text = Path(folder, SCHEMA).read_text("utf-8")
    frame = spark.read.schema(StructType.fromJson(json.loads(text))).parquet(folder)
    whole = names_of(Path(folder))
    return frame.replace(whole, subset=["topic"]) if whole else frame


def payloads(frame: Any, schema: str | None = None) -> Any:
    """Return the frame with `data` parsed: as a VARIANT, or by a schema in Spark's notation.

    A payload that is not JSON (or does not fit the schema) becomes null. Bytes become null if the
    frame has `kind`; without `kind` their Base64 is parsed as a payload. This uses Spark's own
    parser. For VARIANT it is faster than the option `data`. For a schema it is slower than
    `payloadSchema`, whose fields are not passed to Spark as JSON. But it supports all types of
    Spark, and keeps each field that fits.
    """
    from pyspark.sql import functions as F

    column = F.col("data").cast("string")
    if "kind" in frame.columns:  # the Base64 of bytes may look like a number
        column = F.when(F.col("kind") != "bytes", column)
    parsed = F.try_parse_json(column) if schema is None else F.from_json(column, schema)
    return frame.withColumn("data", parsed)
