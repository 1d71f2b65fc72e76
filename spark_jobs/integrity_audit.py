"""Everything that sealed segments promise, checked: for cron, with an exit code.

Files: every listed segment is there, its header, index and each record pass their checksums, record
and index say the same, and delete flags are of the two kinds. Seqs: none is there twice, and where
some are missing between the first and the last it is said (whole segments of deleted records are
dropped, and holes are listed, so that is no damage by itself; `--no-gaps` makes it one).
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np

from spark_jobs import job
from spark_jobs.catalog import JOBS
from spark_jobs.listing import Segment, list_segments
from spark_jobs.options import parse_options
from spark_jobs.query import Query
from spark_jobs.report import Report
from spark_jobs.segments import Records, read_index
from topics_server.errors import StorageError
from topics_server.wal import layout
from topics_server.wal.segment_format import (
    LIVE,
    RECORD_HEADER,
    RECORD_HEADER_BYTES,
    Array,
    Columns,
    damaged_flags,
)

COLUMNS: Final = "topic,epoch,seq,deleted"
FINDING: Final = "topic string, file string, first_seq bigint, last_seq bigint, problem string"
_ROWS: Final = 16_384

Finding = tuple[str, str, int, int, str]


def transform(frame: Any) -> Any:
    """A row a topic: how many seqs, live ones, from where to where, twice there, and missing."""
    from pyspark.sql import Window
    from pyspark.sql import functions as F

    before = F.lag("seq").over(Window.partitionBy("topic", "epoch").orderBy("seq"))
    step = F.col("seq") - before
    return (
        frame.select("topic", "epoch", "seq", "deleted", step.alias("step"))
        .groupBy("topic", "epoch")
        .agg(
            F.count("*").alias("seqs"),
            F.count(F.when(~F.col("deleted"), 1)).alias("live"),
            F.min("seq").alias("first_seq"),
            F.max("seq").alias("last_seq"),
            F.count(F.when(F.col("step") == 0, 1)).alias("duplicates"),
            F.count(F.when(F.col("step") > 1, 1)).alias("gaps"),
            F.coalesce(F.sum(F.when(F.col("step") > 1, F.col("step") - 1)), F.lit(0)).alias(
                "missing"
            ),
        )
        .orderBy("topic")
    )


def check_segment(segment: Segment) -> Iterator[Finding]:
    """What is wrong with one segment; nothing if all is well."""
    entry = segment.entry
    report = Report()
    everything = (entry.first_seq, entry.last_seq)
    try:
        columns = read_index(segment, report)
        rows = np.arange(columns.record_count, dtype="<i8")
        with Records(segment, columns, rows, report) as records:
            for first in range(0, len(rows), _ROWS):
                for row, problem in _record_problems(columns, records, rows[first : first + _ROWS]):
                    seq = entry.first_seq + row
                    yield segment.topic, records.path, seq, seq, problem
            for row, problem in _flag_problems(columns, records.path, entry.record_count):
                seq = entry.first_seq + row
                yield segment.topic, records.path, seq, seq, problem
    except StorageError as error:
        text = str(error).removeprefix(f"{error.path}: ")
        yield segment.topic, str(error.path), *everything, text


def _record_problems(columns: Columns, records: Records, rows: Array) -> Iterator[tuple[int, str]]:
    """Rows whose record fails its checksum, or says something else than the index."""
    content, starts, bad = records.read(rows)
    for place in bad.tolist():
        yield int(rows[place]), "the record fails its checksum"
    places = np.setdiff1d(np.arange(len(rows)), bad)
    if not len(places):
        return
    heads = np.frombuffer(content, "u1")[starts[places, None] + np.arange(RECORD_HEADER_BYTES)]
    found, listed = heads.view(RECORD_HEADER).ravel(), columns.rows[rows[places]]
    wrong = found["seq"] != columns.first_seq + rows[places]
    for name in ("ts", "data_bytes", "meta_bytes", "node_bytes", "tag_bytes", "kind", "hop"):
        wrong |= found[name] != listed[name]
    for place in np.flatnonzero(wrong).tolist():
        yield int(rows[places[place]]), "the record and the index differ"


def _flag_problems(columns: Columns, path: str, count: int) -> Iterator[tuple[int, str]]:
    """Rows whose flag is of neither kind, or says live where there is no record."""
    with open(path, "rb") as file:
        file.seek(-count, os.SEEK_END)
        flags = file.read(count)
    for row in damaged_flags(flags).tolist():
        yield row, f"the delete flag is {flags[row]:#04x}, neither live nor deleted"
    emptied = (np.frombuffer(flags, "u1") == LIVE) & (columns.rows["data_bytes"] == 0)
    is_json = columns.rows["kind"] == 0
    for row in np.flatnonzero(emptied & is_json).tolist():
        yield row, "the flag says live, and the record was deleted when it was sealed"


def find_problems(spark: Any, data_dir: str, cold_dir: str | None, query: Query) -> Any:
    """A frame of findings of all listed segments; files are checked by executors."""
    asked = replace(query, is_tolerant=True, with_deleted=True, flags_at_listing=False)
    listing = list_segments(data_dir, asked, cold_dir=cold_dir)
    found: list[Finding] = [
        (each.topic, each.file, each.first_seq, each.last_seq, each.reason)
        for each in listing.skipped
    ]
    segments = listing.segments
    if segments:
        context = spark.sparkContext
        pieces = context.parallelize(segments, min(len(segments), 4 * context.defaultParallelism))
        checked: list[Finding] = pieces.flatMap(check_segment).collect()
        found += [each for each in checked if not _was_dropped(each, data_dir, asked)]
    return spark.createDataFrame(found, FINDING)


def _was_dropped(finding: Finding, data_dir: str, query: Query) -> bool:
    """Whether a missing file is no longer listed: a server at work drops segments."""
    topic, path, first_seq, *_ = finding
    if os.path.exists(path) or layout.parse_segment_file(os.path.basename(path)) is None:
        return False
    again = list_segments(data_dir, query)
    return not any(
        segment.topic == topic and segment.entry.first_seq == first_seq
        for segment in again.segments
    )


def main(words: Sequence[str] | None = None) -> int:
    """The command line; 0 all is well, 1 something is wrong, 2 wrong usage."""
    parser = job.parser_of("integrity_audit", JOBS["integrity_audit"])
    parser.add_argument("--no-gaps", action="store_true", help="missing seqs are a problem too")
    given = parser.parse_args(words)

    def work(spark: Any, given: argparse.Namespace) -> int:
        options = parse_options({"path": str(given.data_dir), **job.options_of(given)})
        problems = find_problems(spark, options.data_dir, options.cold_dir, options.query)
        given.tolerant = True
        frame = job.load(spark, given, columns=COLUMNS, deleted="true", flags="read", warn="false")
        topics = transform(frame).cache()
        rows, found = topics.collect(), problems.collect()
        job.finish(topics, given, None, "topics")
        job.finish(problems, given, None, "problems")
        wrong = len(found) + sum(row.duplicates for row in rows)
        if given.no_gaps:
            wrong += sum(row.gaps for row in rows)
        job.say(f"{len(rows)} topics, {sum(row.seqs for row in rows)} records, {wrong} problems")
        return 1 if wrong else 0

    return job.run("integrity_audit", given, work)


if __name__ == "__main__":
    raise SystemExit(main())
