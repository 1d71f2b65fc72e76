"""Checks the files and seqs of sealed segments; for cron, with an exit code.

Files: every listed segment exists; its header, index and each record pass their checksums; record
and index agree; and each delete flag is one of the two kinds. Seqs: none occurs twice, and missing
seqs between the first and the last are reported (a segment whose records are all deleted is
dropped, so missing seqs alone are no damage; with `--no-gaps` they are findings).

The picture has a bar of each topic's seqs, in pieces: live, deleted, missing and damaged, with a
verdict. A damaged seq counts only as damaged, whether its flag is live or deleted.
"""

from __future__ import annotations

import argparse
import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any, Final

import numpy as np

from spark_jobs.catalog import JOBS
from spark_jobs.reader.listing import Lister, list_segments
from spark_jobs.reader.options import parse_options
from spark_jobs.reader.places.opening import is_archive
from spark_jobs.reader.places.segment import Segment
from spark_jobs.reader.query import Names, Query
from spark_jobs.reader.report import ReadReport
from spark_jobs.reader.segments import SegmentRecords, pieces_of, read_index
from spark_jobs.running import job, pictures
from topics_server.values.errors import StorageError
from topics_server.wal import layout
from topics_server.wal.format.json_objects import differing_objects
from topics_server.wal.format.segment import (
    LIVE,
    RECORD_HEADER,
    RECORD_HEADER_BYTES,
    TRACED_KIND,
    Array,
    SegmentColumns,
    damaged_flags,
)

COLUMNS: Final = "topic,epoch,seq,deleted"
FINDING: Final = "topic string, file string, first_seq bigint, last_seq bigint, problem string"
PIECES: Final = 160
KINDS: Final = (
    ("damaged", "#c53030"),
    ("missing", "#f6ad55"),
    ("deleted", "#a0aec0"),
    ("live", "#2f855a"),
)
_COLOUR: Final = dict(KINDS)
# The most findings in the picture; the job counts and writes all of them.
SHOWN_FINDINGS: Final = 10_000

Finding = tuple[str, str, int, int, str]


def transform(frame: Any) -> Any:
    """One row for each topic: number of seqs, live seqs, first and last seq, duplicate and missing
    seqs.
    """
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


def parts(frame: Any, damaged: Iterable[Any] = (), pieces: int = PIECES) -> Any:
    """One row for each topic and non-empty piece of its seqs: first and last seq, counts of live
    and deleted seqs.

    The range is cut into a number of pieces of equal size, or of one seq each. Seqs in the findings
    `damaged` count neither as live nor as deleted. A duplicate seq counts once: as live if one of
    its rows is live.
    """
    from pyspark.sql import Window
    from pyspark.sql import functions as F

    whole = Window.partitionBy("topic", "epoch")
    first, last = F.min("seq").over(whole), F.max("seq").over(whole)
    width = F.ceil((last - first + 1) / pieces)
    rows = (
        frame.groupBy("topic", "epoch", "seq")
        .agg(F.min("deleted").alias("deleted"))
        .withColumn("piece", F.floor((F.col("seq") - first) / width))
        .withColumn("first_seq", first + F.col("piece") * width)
        .withColumn("last_seq", F.least(F.col("first_seq") + width - 1, last))
    )
    ranges = [(name, a, b) for name, found in _ranges(damaged).items() for a, b in found]
    if ranges:
        bad = frame.sparkSession.createDataFrame(ranges, "name string, a bigint, b bigint")
        is_in = (F.col("topic") == F.col("name")) & F.col("seq").between(F.col("a"), F.col("b"))
        rows = rows.join(F.broadcast(bad), is_in, "left_anti")
    return (
        rows.groupBy("topic", "epoch", "first_seq", "last_seq")
        .agg(
            F.count(F.when(~F.col("deleted"), 1)).alias("live"),
            F.count(F.when(F.col("deleted"), 1)).alias("deleted"),
        )
        .orderBy("topic", "epoch", "first_seq")
    )


def _ranges(found: Iterable[Any]) -> dict[str, list[tuple[int, int]]]:
    """The seqs of findings by topic: ascending, without duplicates. Some findings have no seqs."""
    ranges: dict[str, list[tuple[int, int]]] = {}
    for each in sorted(found, key=lambda each: (each.topic, each.first_seq)):
        known = ranges.setdefault(each.topic, [])
        if not each.last_seq:
            continue
        if known and each.first_seq <= known[-1][1] + 1:
            known[-1] = known[-1][0], max(known[-1][1], each.last_seq)
        else:
            known.append((each.first_seq, each.last_seq))
    return ranges


def draw(
    rows: Sequence[Any], found: Sequence[Any], pieces: Sequence[Any], *, no_gaps: bool = False
) -> pictures.Figure:
    """Draw a bar for each topic; topics with findings come first."""
    ranges = _ranges(found)
    names = {(row.topic, row.epoch): row for row in rows}
    known = {topic for topic, _ in names}
    counts = Counter(each.topic for each in found)
    of_topic: dict[tuple[str, int], list[Any]] = {}
    for each in pieces:
        of_topic.setdefault((each.topic, each.epoch), []).append(each)
    keys = [*names, *((topic, 0) for topic in ranges if topic not in known)]
    made: list[tuple[bool, bool, pictures.Strip]] = []
    for topic, epoch in sorted(keys):
        row, count = names.get((topic, epoch)), counts[topic]
        own = of_topic.get((topic, epoch), [])
        strip, missing = _strip(topic, row, ranges.get(topic, []), own)
        twice = row.duplicates if row is not None else 0
        wrong = [
            *([f"{count:,} problem{'' if count == 1 else 's'}"] if count else []),
            *([f"{twice:,} twice"] if twice else []),
            *([f"{missing:,} missing"] if missing and no_gaps else []),
        ]
        verdict = f"wrong: {', '.join(wrong)}" if wrong else "sound"
        words = f"{verdict} · {strip.words}" if strip.words else f"{verdict}, seqs unknown"
        colour = _COLOUR["damaged"] if wrong else _COLOUR["live"]
        made.append((not wrong, not missing, replace(strip, words=words, colour=colour)))
    made.sort(key=lambda each: each[:2])
    bad = sum(not is_sound for is_sound, _, _ in made)
    note = f"{len(made):,} topics, {bad:,} with something wrong" if made else "no topics"
    unit = "seqs of each topic from the first to the last, in their segments"
    return pictures.strips("Integrity", unit, KINDS, [strip for *_, strip in made], note)


def drawn(
    topics: Any, found: Sequence[Any], frame: Any, *, no_gaps: bool = False
) -> pictures.Figure:
    """Draw a frame of `transform`. Only the topics that fit the picture are sent to the driver.

    Topics with findings come first, then those with duplicate or missing seqs.
    """
    from pyspark.sql import functions as F

    wrong = [each.topic for each in found]
    positions = {
        topic: n for n, topic in enumerate(dict.fromkeys(wrong)) if n < pictures.STRIPS_MAX
    }
    is_found = F.col("topic").isin(list(positions)) if positions else F.lit(False)
    first = (is_found, F.col("duplicates") > 0, F.col("gaps") > 0)
    order = [F.desc(each.cast("int")) for each in first]
    rows = topics.orderBy(*order, "topic", "epoch").limit(pictures.STRIPS_MAX).collect()
    names = [row.topic for row in rows]
    own = [each for each in found if each.topic in positions]
    pieces = parts(frame.where(F.col("topic").isin(names)), own).collect() if names else []
    figure = draw(rows, own, pieces, no_gaps=no_gaps)
    left = topics.count() - len(rows)
    if left:
        pictures.add_note(figure, f"and {left:,} topics that are listed and not shown")
    return figure


def _strip(
    topic: str, row: Any | None, damaged: Sequence[tuple[int, int]], pieces: Sequence[Any]
) -> tuple[pictures.Strip, int]:
    """The bar of a topic, and the number of its missing seqs."""
    ends = [(row.first_seq, row.last_seq)] if row is not None else []
    ends += damaged
    if not ends:
        return pictures.Strip(topic, 0, 0, (), (), "", ""), 0
    first, last = min(a for a, _ in ends), max(b for _, b in ends)
    cut = sorted({at for each in pieces for at in (each.first_seq, each.last_seq + 1)})
    borders = [first, last + 1]
    borders += [at for a, b in damaged for at in (a, b + 1)]
    cut = sorted({*cut, *(at for at in borders if not _is_within(at, pieces))})
    known = {each.first_seq: each for each in pieces}
    shares: list[tuple[int, int, list[tuple[str, int]]]] = []
    totals = dict.fromkeys(_COLOUR, 0)
    for begin, end in pairwise(cut):
        here = known.get(begin)
        counts = {
            "damaged": sum(max(min(b + 1, end) - max(a, begin), 0) for a, b in damaged),
            "missing": 0,
            "deleted": here.deleted if here is not None else 0,
            "live": here.live if here is not None else 0,
        }
        counts["missing"] = end - begin - sum(counts.values())
        for name, count in counts.items():
            totals[name] += count
        content = [(_COLOUR[name], count) for name, count in counts.items() if count]
        if shares and len(content) == 1 and [c for c, _ in shares[-1][2]] == [content[0][0]]:
            begin = shares.pop()[0]
            content = [(content[0][0], end - begin)]
        shares.append((begin, end - 1, content))
    words = ", ".join(f"{totals[name]:,} {name}" for name, _ in reversed(KINDS) if totals[name])
    return pictures.Strip(topic, first, last, shares, damaged, words, ""), totals["missing"]


def _is_within(seq: int, pieces: Sequence[Any]) -> bool:
    return any(each.first_seq < seq <= each.last_seq for each in pieces)


def check_segment(segment: Segment) -> Iterator[Finding]:
    """The findings of one segment; none if it is intact."""
    entry = segment.entry
    report = ReadReport()
    everything = (entry.first_seq, entry.last_seq)
    try:
        columns = read_index(segment, report)
        rows = np.arange(columns.record_count, dtype="<i8")
        with SegmentRecords(segment, columns, rows, report) as records:
            for first, end in pieces_of(columns, rows):
                for row, problem in _record_problems(columns, records, rows[first:end]):
                    seq = entry.first_seq + row
                    yield segment.topic, records.path, seq, seq, problem
            for row, problem in _flag_problems(columns, records.path, entry.record_count):
                seq = entry.first_seq + row
                yield segment.topic, records.path, seq, seq, problem
    except StorageError as error:
        text = str(error).removeprefix(f"{error.path}: ")
        yield segment.topic, str(error.path), *everything, text


def _record_problems(
    columns: SegmentColumns, records: SegmentRecords, rows: Array
) -> Iterator[tuple[int, str]]:
    """Rows whose record fails its checksum, or differs from the index."""
    content, starts, ends, bad = records.read(rows)
    for place in bad.tolist():
        yield int(rows[place]), "the record fails its checksum"
    positions = np.setdiff1d(np.arange(len(rows)), bad)
    if not len(positions):
        return
    if columns.is_json:
        part, seqs = columns.rows[rows[positions]], columns.first_seq + rows[positions]
        different = differing_objects(content, starts[positions], ends[positions], part, seqs)
        for place in different.tolist():
            yield int(rows[positions[place]]), "the record and the index differ"
        return
    heads = np.frombuffer(content, "u1")[starts[positions, None] + np.arange(RECORD_HEADER_BYTES)]
    found, indexed = heads.view(RECORD_HEADER).ravel(), columns.rows[rows[positions]]
    wrong = found["seq"] != columns.first_seq + rows[positions]
    for name in ("ts", "data_bytes", "meta_bytes", "node_bytes", "tag_bytes", "kind", "hop"):
        wrong |= found[name] != indexed[name]
    for place in np.flatnonzero(wrong).tolist():
        yield int(rows[positions[place]]), "the record and the index differ"


def _flag_problems(columns: SegmentColumns, path: str, count: int) -> Iterator[tuple[int, str]]:
    """Rows with an invalid flag, or with the flag for live but without a record."""
    with open(path, "rb") as file:
        file.seek(-count, os.SEEK_END)
        flags = file.read(count)
    for row in damaged_flags(flags).tolist():
        yield row, f"the delete flag is {flags[row]:#04x}, neither live nor deleted"
    emptied = (np.frombuffer(flags, "u1") == LIVE) & (columns.rows["data_bytes"] == 0)
    is_json = columns.rows["kind"] & ~np.uint8(TRACED_KIND) == 0
    for row in np.flatnonzero(emptied & is_json).tolist():
        yield row, "the flag says live, and the record was deleted when it was sealed"


def find_problems(spark: Any, data_dir: str, cold_dir: str | None, query: Query) -> Any:
    """A frame of findings of all listed segments; executors check the files when it is read."""
    asked = replace(query, is_tolerant=True, with_deleted=True, flags_at_listing=False)
    listing = list_segments(data_dir, asked, cold_dir=cold_dir)
    found: list[Finding] = [
        (each.topic, each.file, each.first_seq, each.last_seq, each.reason)
        for each in listing.skipped
    ]
    found += folder_problems(data_dir, cold_dir)
    problems = spark.createDataFrame(found, FINDING)
    segments = listing.segments
    if segments:
        context = spark.sparkContext
        pieces = context.parallelize(segments, min(len(segments), 4 * context.defaultParallelism))
        checked = pieces.flatMap(partial(segment_findings, data_dir=data_dir))
        problems = problems.unionAll(spark.createDataFrame(checked, FINDING))
    return problems


def folder_problems(data_dir: str, cold_dir: str | None, *, wait_s: float = 1.0) -> list[Finding]:
    """Folders of topics without a manifest: their files belong to no topic.

    A running server makes the folder before the manifest, and removes the folder after the
    manifest. A state that lasts only a moment is no finding. Topics without a manifest have no
    name.
    """
    roots = [layout.join(data_dir, layout.SEGMENTS), *([cold_dir] if cold_dir else [])]
    suspects = _without_manifest(roots)
    if suspects:
        time.sleep(wait_s)
        suspects &= _without_manifest(roots)
    problem = "the folder of a topic has no manifest"
    return [
        (f"topic {topic_id}", layout.join(root, layout.topic_dir(topic_id)), 0, 0, problem)
        for root, topic_id in sorted(suspects)
    ]


def _without_manifest(roots: Sequence[str]) -> set[tuple[str, int]]:
    """Folders of topics in one root that have no manifest in the first root."""
    found: set[tuple[str, int]] = set()
    for root in roots:
        for name in os.listdir(root) if os.path.isdir(root) else []:
            topic_id = layout.parse_topic_dir(name)
            manifest = layout.join(roots[0], name, layout.MANIFEST)
            if topic_id is not None and not os.path.exists(manifest):
                found.add((root, topic_id))
    return found


def segment_findings(segment: Segment, data_dir: str) -> Iterator[Finding]:
    """The findings of a segment; a file that the manifest no longer lists may be missing."""
    for finding in check_segment(segment):
        if not _was_dropped(finding, segment, data_dir):
            yield finding


def _was_dropped(finding: Finding, segment: Segment, data_dir: str) -> bool:
    """Whether a missing file is no longer listed, because a running server dropped the segment."""
    path = finding[1]
    if os.path.exists(path) or layout.parse_segment_file(os.path.basename(path)) is None:
        return False
    asked = Query(topics=(Names(frozenset({segment.topic})),), with_deleted=True)
    lister = Lister(data_dir, replace(asked, is_tolerant=True))
    topic = lister.topics.get(segment.topic)
    if topic is None:
        # Without a manifest, the folder itself is a finding, unless it is gone, too.
        return not lister.has_files(segment.topic_id)
    is_same = topic.manifest.topic_id == segment.topic_id
    return not is_same or segment.entry.segment_id not in {
        entry.segment_id for entry in topic.manifest.segments
    }


def main(words: Sequence[str] | None = None) -> int:
    """Run the command line; exit code 0 in order, 1 findings, 2 wrong usage."""
    parser = job.parser_of("integrity_audit", JOBS["integrity_audit"])
    parser.add_argument("--no-gaps", action="store_true", help="count missing seqs as a finding")
    given = parser.parse_args(words)
    if is_archive(str(given.data_dir)):
        parser.error("examines a data directory; `topics archive verify URL` examines an archive")

    def work(spark: Any, given: argparse.Namespace) -> int:
        from pyspark.sql import functions as F

        options = parse_options({"path": str(given.data_dir), **job.options_of(given)})
        problems = find_problems(spark, options.data_dir, options.cold_dir, options.query)
        given.tolerant = True
        frame = job.load(spark, given, columns=COLUMNS, deleted="true", flags="read", warn="false")
        topics, problems = transform(frame).cache(), problems.cache()
        count = problems.count()
        found = problems.limit(SHOWN_FINDINGS).collect()
        job.finish(
            topics,
            given,
            name="topics",
            drawn=lambda topics: drawn(topics, found, frame, no_gaps=given.no_gaps),
        )
        job.finish(problems, given, None, "problems")
        names = ("seqs", "duplicates", "gaps")
        topic_count, *sums = topics.agg(F.count("*"), *map(F.sum, names)).first()
        seqs, duplicates, gaps = (each or 0 for each in sums)
        wrong = count + duplicates + (gaps if given.no_gaps else 0)
        job.say(f"{topic_count} topics, {seqs} records, {wrong} problems")
        return 1 if wrong else 0

    return job.run("integrity_audit", given, work)


if __name__ == "__main__":
    raise SystemExit(main())
