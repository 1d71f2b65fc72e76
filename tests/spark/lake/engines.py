"""An Iceberg table read by three engines, as the rows of a diff; and the job."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import duckdb
import duckdb_ext
import pyarrow as pa

from spark_jobs.to_iceberg.__main__ import main
from spark_jobs.to_iceberg.catalogs import sqlite_catalog
from tests.contract.driver import Json
from tests.spark.logs import Row

EXTENSIONS = Path(duckdb_ext.__path__[0]) / "extensions"


def job(data: object, out: Path, *words: object) -> Json:
    """Run the job in this process; its output by topic."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert main([str(data), "--out", str(out), *map(str, words)]) == 0
    return dict(json.loads(printed.getvalue())["topics"])


def load(out: Path, table: str) -> Any:
    """A table of an output folder."""
    catalog = sqlite_catalog(out)
    try:
        return catalog.load_table(("topics", table))
    finally:
        catalog.close()


def as_rows(table: Any) -> list[Row]:
    """The rows of an Arrow table, with times in ms."""
    place = table.schema.get_field_index("ts")
    micros = table["ts"].cast(pa.timestamp("us", tz="UTC")).cast("int64")
    found = table.set_column(place, "ts", micros).to_pylist()
    return [{**row, "ts": row["ts"] // 1000} for row in found]


def by_pyiceberg(table: Any) -> list[Row]:
    """All rows, by pyiceberg."""
    return as_rows(table.scan().to_arrow())


def by_duckdb(table: Any) -> list[Row]:
    """All rows, read by DuckDB's own Iceberg reader, beginning with the table's metadata."""
    with duckdb.connect(config={"autoinstall_known_extensions": "false"}) as connection:
        for name in ("avro", "iceberg"):
            (file,) = EXTENSIONS.glob(f"v{duckdb.__version__}/*/{name}.duckdb_extension")
            connection.execute(f"LOAD '{file}'")
        connection.execute("SET TimeZone = 'UTC'")
        where = table.metadata_location.removeprefix("file://")
        found = connection.execute("SELECT * FROM iceberg_scan(?)", [where]).arrow()
        return as_rows(found.read_all() if hasattr(found, "read_all") else found)


def by_spark(spark: Any, table: Any) -> list[Row]:
    """All rows, by Spark: the data files of the current snapshot, read as Parquet."""
    files = [task.file.file_path for task in table.scan().plan_files()]
    return as_rows(spark.read.parquet(*files).toArrow())
