"""The command line of `topics jobs to_iceberg`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any, Final

from spark_jobs.catalog import JOBS
from spark_jobs.reader.options import parse_options
from spark_jobs.reader.query import BadOption
from spark_jobs.running import job, outputs
from spark_jobs.running.installing import how, missing
from spark_jobs.to_iceberg.catalogs import LakeRefused, configured_catalog, sqlite_catalog
from topics_server.values.errors import StorageError

NAME: Final = "to_iceberg"


def note(text: str) -> None:
    """Print a line for the user."""
    sys.stderr.write(f"topics jobs {NAME}: {text}\n")


def arguments() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(prog=f"topics jobs {NAME}", description=JOBS[NAME])
    parser.add_argument(
        "data_dir",
        type=job.place,
        help="data directory of a server, or a copy of one, or its archive: a folder or a URL",
    )
    parser.add_argument("--cold-dir", type=Path, help="the server's cold folder")
    parser.add_argument("--topics", metavar="A,B*", help="topics: names, prefixes*, globs (all)")
    lake = parser.add_mutually_exclusive_group(required=True)
    lake.add_argument(
        "--out", type=Path, metavar="DIR", help="folder of the tables and of their SQLite catalog"
    )
    lake.add_argument(
        "--catalog", metavar="NAME", help="a catalog that pyiceberg's configuration names"
    )
    parser.add_argument("--namespace", default="topics", help="namespace of the tables (topics)")
    parser.add_argument(
        "--schema", help="fields of the column payload: 'a int, b struct<c: string>'"
    )
    parser.add_argument(
        "--rebuild",
        metavar="DAY[..DAY]",
        type=_days,
        help="afterwards make these days (UTC), or `all`, equal to the store: without what was "
        "deleted since, with payloads by the schema",
    )
    parser.add_argument(
        "--rows-per-commit", type=int, default=500_000, help="most rows of a commit (500000)"
    )
    return parser


def _days(text: str) -> tuple[date, date]:
    """The first and last day of a range."""
    if text == "all":
        return date.min, date.max
    first, _, last = text.partition("..")
    try:
        found = date.fromisoformat(first), date.fromisoformat(last or first)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no day such as 2026-01-31, range such as 2026-01-01..2026-01-31, or all"
        ) from None
    if found[0] > found[1]:
        raise argparse.ArgumentTypeError(f"{text!r} ends before it begins")
    return found


def main(words: Sequence[str] | None = None) -> int:
    """Run the command line: exit code 0 done, 1 failed on the way, 2 refused or wrong usage."""
    parser = arguments()
    given = parser.parse_args(words)
    if given.rows_per_commit < 1:
        parser.error("--rows-per-commit is at least 1")
    if missing("iceberg"):
        note(how("it needs", "iceberg"))
        return 2
    try:
        asked = {"topics": given.topics, "coldDir": given.cold_dir}
        options = {name: str(value) for name, value in asked.items() if value is not None}
        query = parse_options({"path": str(given.data_dir), **options}).query
        struct = _struct(given.schema)
        store = outputs.store_id_of(given.data_dir)
        with _catalog(given, store) as catalog:
            _Run(given, query, catalog, store, struct).all()
    except (BadOption, outputs.OutputRefused, LakeRefused) as error:
        note(str(error))
        return 2
    except StorageError as error:
        note(f"{error}; what was committed stays, the next run goes on")
        return 1
    return 0


def _struct(schema: str | None) -> Any:
    """The Arrow struct of a schema. Raises `BadOption`."""
    if schema is None:
        return None
    from spark_jobs.to_iceberg.payloads import parse_schema

    return parse_schema(schema)


@contextmanager
def _catalog(given: argparse.Namespace, store: str | None) -> Iterator[Any]:
    if given.out is None:
        catalog = configured_catalog(given.catalog)
        try:
            yield catalog
        finally:
            catalog.close()
        return
    folder = outputs.resolve(given.out, (given.data_dir, given.cold_dir))
    outputs.claim(folder, NAME, {"store": store})
    with outputs.locked(folder):
        catalog = sqlite_catalog(folder)
        try:
            yield catalog
        finally:
            catalog.close()


@dataclass(slots=True)
class _Run:
    given: argparse.Namespace
    query: Any
    catalog: Any
    store: str | None
    struct: Any
    tables: dict[str, dict[str, Any]] = field(default_factory=dict)

    def all(self) -> None:
        """Convert every topic. The results are printed even if a topic fails."""
        from spark_jobs.to_iceberg.sealed import SealedTopics

        given = self.given
        topics = SealedTopics(
            str(given.data_dir),
            self.query,
            cold_dir=None if given.cold_dir is None else str(given.cold_dir),
            rows_per_commit=given.rows_per_commit,
            note=note,
        )
        self.catalog.create_namespace_if_not_exists(tuple(given.namespace.split(".")))
        try:
            for name in topics.names:
                self._topic(topics, name)
        finally:
            sys.stdout.write(json.dumps({"topics": self.tables}) + "\n")

    def _topic(self, topics: Any, name: str) -> None:
        from spark_jobs.to_iceberg.days import days_of, rebuild_day
        from spark_jobs.to_iceberg.tables import TopicTable

        table = TopicTable(self.catalog, self.given.namespace, name, self.store)
        done: dict[str, Any] = {
            "table": ".".join(table.identifier),
            "records": 0,
            "commits": 0,
            "removed": 0,
            "rebuilt": 0,
        }
        self.tables[name] = done
        if self.struct is not None:
            table.widen(self.struct)
        # Without a schema, use the fields of the table, so that a run from cron needs no option for
        # them.
        struct = table.struct() if self.struct is None else self.struct
        after = table.position()
        for part in topics.parts(name, after, struct):
            table.append(part.rows, after, part.position)
            after = part.position
            done["records"] += len(part.rows)
            done["commits"] += 1
        if self.given.rebuild is not None:
            first, last = self.given.rebuild
            for day in days_of(table.table):
                if first <= day <= last:
                    rebuilt = rebuild_day(topics, name, table, day, struct)
                    done["removed"] += rebuilt.removed
                    done["rebuilt"] += rebuilt.is_new
        done["metadata"] = table.table.metadata_location


if __name__ == "__main__":
    raise SystemExit(main())
