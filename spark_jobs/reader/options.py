"""Turns the text options of the Spark source into a query, and checks the columns of a schema.

Option names are accepted in upper and lower case, as in Spark. Unknown options and bad values are
refused, because a misspelled filter would read everything.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from spark_jobs.reader.query import (
    COLUMNS,
    EXTRA_COLUMNS,
    TS_HIGH,
    TS_LOW,
    TYPES,
    BadOption,
    Names,
    Query,
)

PARTITION_BYTES_MIN: Final = 16 * 1024
PARTITION_BYTES: Final = 128 * 2**20
KNOWN: Final = (
    "path",
    "coldDir",
    "topics",
    "tags",
    "nodes",
    "fromSeq",
    "toSeq",
    "fromTs",
    "toTs",
    "deleted",
    "tier",
    "checks",
    "flags",
    "data",
    "payloadSchema",
    "payloadMode",
    "columns",
    "partitionBytes",
    "minPartitions",
    "report",
    "now",
    "warn",
    # options of streams only
    "startingOffsets",
    "maxRecordsPerTrigger",
    "failOnDataLoss",
)
# Properties that Spark's catalog adds to the options of a table.
_OF_CATALOG: Final = frozenset(
    {"location", "provider", "owner", "external", "is_managed_location", "comment", "collation"}
)
_GLOB: Final = re.compile(r"[*?\[]")
_SIZE: Final = re.compile(r"(\d+)\s*([kmg]?)i?b?", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class SourceOptions:
    """The options of a read: its records and its partitions; `query` has the default columns."""

    data_dir: str
    query: Query
    cold_dir: str | None = None
    partition_bytes: int = PARTITION_BYTES
    min_partitions: int = 1
    now_ms: int | None = None
    warns: bool = True
    starting: str = "earliest"
    max_records: int | None = None
    fails_on_loss: bool = True
    # Fields of data in Spark's notation; Spark turns them into a type (`datasource`).
    payload_schema: str | None = None


def parse_options(given: Mapping[str, str]) -> SourceOptions:
    """Parse options into `SourceOptions`. Raises `BadOption`, naming the option."""
    names = {name.lower(): name for name in KNOWN}
    found: dict[str, str] = {}
    for name, value in given.items():
        if name.lower() in _OF_CATALOG or name.lower().startswith("option."):
            if name.lower() == "location":
                found.setdefault("path", str(value))
            continue
        if name.lower() not in names:
            raise BadOption(f"there is no option {name!r}; there are: {', '.join(KNOWN)}")
        found[names[name.lower()]] = str(value)
    path = found.get("path", "")
    if not path:
        raise BadOption(
            'the data directory is missing: .load("DIR") or the option "path"; a table is made '
            "without columns: the option columns names them"
        )
    return SourceOptions(
        data_dir=place_of(path),
        query=_query(found),
        cold_dir=_local(found["coldDir"]) if found.get("coldDir") else None,
        partition_bytes=_size(found, "partitionBytes", PARTITION_BYTES),
        min_partitions=_count(found, "minPartitions", 2 * (os.cpu_count() or 1)) or 1,
        now_ms=_time(found, "now", 0) if "now" in found else None,
        warns=_switch(found, "warn", True),
        starting=found.get("startingOffsets", "earliest"),
        max_records=_count(found, "maxRecordsPerTrigger", 0) or None,
        fails_on_loss=_switch(found, "failOnDataLoss", True),
        payload_schema=found.get("payloadSchema", "").strip() or None,
    )


def _query(found: Mapping[str, str]) -> Query:
    tag_names, node_names = names_of(found.get("tags")), names_of(found.get("nodes"))
    if any(names.globs for names in (*tag_names, *node_names)):
        raise BadOption("tags, nodes: an exact name, or a prefix with one * at its end")
    with_deleted = _switch(found, "deleted", False)
    flags = _choice(found, "flags", ("auto", "listing", "read"))
    query = Query(
        topics=names_of(found.get("topics")),
        tags=tag_names,
        nodes=node_names,
        first_seq=_count(found, "fromSeq", 0),
        last_seq=_count(found, "toSeq", Query().last_seq),
        start_ts=_time(found, "fromTs", TS_LOW),
        end_ts=_time(found, "toTs", TS_HIGH),
        tier=_choice(found, "tier", ("both", "hot", "cold")),
        with_deleted=with_deleted,
        is_tolerant=_choice(found, "checks", ("strict", "tolerant")) == "tolerant",
        flags_at_listing=flags != "read",
        flags_may_wait=flags == "auto",
        report_dir=_local(found["report"]) if found.get("report") else None,
        is_failfast=_choice(found, "payloadMode", ("permissive", "failfast")) == "failfast",
    )
    return with_columns(query, default_columns(found, with_deleted=with_deleted))


def default_columns(found: Mapping[str, str], *, with_deleted: bool) -> tuple[tuple[str, str], ...]:
    """Columns if the user gave no schema: all, or those of the option `columns`."""
    payload = _choice(found, "data", ("string", "binary", "variant"))
    if found.get("payloadSchema", "").strip():
        if "data" in found:
            raise BadOption("payloadSchema defines data: leave the option data out")
        payload = "struct"
    asked = [*COLUMNS, *(("deleted",) if with_deleted else ())]
    if found.get("columns"):
        asked = [name.strip() for name in found["columns"].split(",")]
    for name in asked:
        if name not in TYPES:
            known = ", ".join((*COLUMNS, *EXTRA_COLUMNS))
            raise BadOption(f"there is no column {name!r}; there are: {known}")
    kinds = {"data": payload, "meta": payload if payload in TYPES["meta"] else "string"}
    return tuple((name, kinds.get(name, TYPES[name][0])) for name in asked)


def with_columns(query: Query, columns: tuple[tuple[str, str], ...]) -> Query:
    """The query for these (name, Spark type) pairs. Raises `BadOption` for an unavailable
    column.
    """
    from dataclasses import replace

    for name, kind in columns:
        if name not in TYPES:
            known = ", ".join((*COLUMNS, *EXTRA_COLUMNS))
            raise BadOption(f"there is no column {name!r}; there are: {known}")
        if kind not in TYPES[name]:
            raise BadOption(f"column {name} can be {' or '.join(TYPES[name])}, not {kind}")
    if len({name for name, _ in columns}) < len(columns):
        raise BadOption("a column is named twice")
    return replace(query, columns=columns)


def place_of(path: str) -> str:
    """A path of this machine's file system, or the plain URL of an archive in a bucket.

    Raises `BadOption`; the message does not repeat a URL, which may hold a secret by mistake.
    """
    if "://" not in path or path.startswith("file:"):
        return _local(path)
    # Imported here, because only the driver parses a path: an executor need not load the module.
    from topics_server.values.texts.archive_url import parse_archive_url

    try:
        return parse_archive_url(path).text
    except ValueError as error:
        raise BadOption(
            f"the path is a folder, file:///..., or s3://, gs:// or az://BUCKET/PREFIX; this is "
            f"{error}"
        ) from None


def _local(path: str) -> str:
    """A path of this machine's file system; every executor must see the same files there."""
    if path.startswith("file:"):
        path = "/" + path.removeprefix("file:").lstrip("/")
    if "://" in path:
        raise BadOption("only directories that are mounted can be used here, not URLs")
    return os.path.abspath(path)


def names_of(text: str | None) -> tuple[Names, ...]:
    """Parse a comma-separated list of names, prefixes (`a*`) and globs; () selects any."""
    if text is None or text.strip() in ("", "*"):
        return ()
    exact, prefixes, globs = set(), [], []
    for each in filter(None, (part.strip() for part in text.split(","))):
        if not _GLOB.search(each):
            exact.add(each)
        elif each.endswith("*") and not _GLOB.search(each[:-1]):
            prefixes.append(each[:-1])
        else:
            globs.append(each)
    return (Names(frozenset(exact), tuple(prefixes), tuple(globs)),)


def _choice(found: Mapping[str, str], name: str, known: tuple[str, ...]) -> str:
    value = found.get(name, known[0]).lower()
    if value not in known:
        hint = "; for a schema of your own there is payloadSchema" if name == "data" else ""
        raise BadOption(f"{name} is {' or '.join(known)}, not {value!r}{hint}")
    return value


def _switch(found: Mapping[str, str], name: str, default: bool) -> bool:
    value = found.get(name, str(default)).lower()
    if value not in ("true", "false"):
        raise BadOption(f"{name} is true or false, not {value!r}")
    return value == "true"


def _count(found: Mapping[str, str], name: str, default: int) -> int:
    text = found.get(name)
    if text is None:
        return default
    if not text.isascii() or not text.isdigit():
        raise BadOption(f"{name} is a number from 0 on, not {text!r}")
    return int(text)


def _size(found: Mapping[str, str], name: str, default: int) -> int:
    text = found.get(name)
    if text is None:
        return default
    match = _SIZE.fullmatch(text.strip())
    if match is None or int(match[1]) == 0:
        raise BadOption(f"{name} must be a size such as 67108864 or 64m, not {text!r}")
    size = int(match[1]) << {"": 0, "k": 10, "m": 20, "g": 30}[match[2].lower()]
    if size < PARTITION_BYTES_MIN:
        raise BadOption(f"{name} is at least {PARTITION_BYTES_MIN}: a task costs milliseconds")
    return size


def _time(found: Mapping[str, str], name: str, default: int) -> int:
    """Parse milliseconds since the epoch, or a date and time of ISO 8601 (UTC unless it has a
    zone).

    Four digits are a year: as milliseconds they would be the first ten seconds of 1970.
    """
    text = found.get(name)
    if text is None:
        return default
    if re.fullmatch(r"\d{4}", text, re.ASCII):
        text = f"{text}-01-01"
    elif re.fullmatch(r"-?\d+", text, re.ASCII):
        return int(text)
    try:
        when = datetime.fromisoformat(text)
    except ValueError:
        raise BadOption(f"{name} is ms since the epoch or a date, not {text!r}") from None
    if when.tzinfo is None:
        when = when.replace(tzinfo=UTC)
    return floor_ms(when)


def floor_ms(when: datetime) -> int:
    """Whole milliseconds since the epoch of an aware time, rounded down."""
    since = when - datetime(1970, 1, 1, tzinfo=UTC)
    return (since.days * 86_400 + since.seconds) * 1000 + since.microseconds // 1000
