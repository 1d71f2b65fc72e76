"""Pictures of jobs, with values computed by hand, and the pictures of edge cases."""

from __future__ import annotations

import re
import shutil
import xml.etree.ElementTree as ET
from datetime import date
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import pytest

from tests.contract.driver import Server
from tests.crash.kills.test_webhooks import EVENT_LIST
from tests.spark.conftest import HAS_SPARK, INSTALL
from tests.spark.reading.test_damage import damage, flip, record_at
from tests.spark.reading.test_reader import LEFT, webhooks

if not HAS_SPARK:
    pytest.skip(f"PySpark is not installed; {INSTALL}", allow_module_level=True)

from spark_jobs import integrity_audit, payload_schema, to_parquet
from spark_jobs.running import pictures
from tests.spark.jobs.test_jobs import at, run, utc

__all__ = ["webhooks"]

DAY_S: Final = 86_400
RED: Final = dict(integrity_audit.KINDS)["damaged"]


def texts(figure: pictures.Figure) -> list[str]:
    """The texts of a grid or of strips: times, then a row's name, note and cells; notes."""
    axes = figure.axes[0]
    names = [label.get_text() for label in axes.get_yticklabels()]
    notes = [label.get_text() for side in axes.child_axes for label in side.get_yticklabels()]
    times = [label.get_text() for label in axes.get_xticklabels()] if notes else []
    inner: dict[int, list[str]] = {}
    for text in axes.texts:
        inner.setdefault(round(text.get_position()[1]), []).append(text.get_text())
    rows = [
        [name, *notes[place : place + 1], *inner.get(place, [])] for place, name in enumerate(names)
    ]
    return [*times, *(each for row in rows for each in row), *figure.get_supxlabel().split("\n")]


def drawn_texts(file: Path) -> list[str]:
    """All texts in an SVG file, which must be well-formed XML."""
    found = [each for each in ET.parse(file).iter() if each.tag.endswith("}text")]
    return ["".join(each.itertext()) for each in found]


def boxes(figure: pictures.Figure, colour: str) -> list[tuple[float, float]]:
    """The left edges and widths of boxes of a colour, in the axes' units."""
    from matplotlib.colors import to_hex

    found = []
    for collection in figure.axes[0].collections:
        paths, colours = collection.get_paths(), collection.get_facecolors()
        for number, path in enumerate(paths):
            if to_hex(colours[number % len(colours)]) == colour:
                extent = path.get_extents()
                found.append((round(extent.x0, 4), round(extent.width, 4)))
    return found


def marks(figure: pictures.Figure) -> list[float]:
    """The positions of the bars that mark where a row begins."""
    from matplotlib.collections import LineCollection

    found = [each for each in figure.axes[0].collections if isinstance(each, LineCollection)]
    return [float(each.get_segments()[0][0][0]) for each in found]


# -- payload_schema ----------------------------------------------------------------------------


def test_payloads_by_field(spark: Any) -> None:
    rows = [
        ("a", at(0), '{"n":1}'),
        ("a", at(1), '{"n":2,"s":"x","o":{"k":[1],"a.b":{"deep":1}}}'),
        ("a", at(2), "no json"),
        ("a", at(3), '{"n":1}'),
        ("a", at(DAY_S), '{"n":1.5,"s":null}'),
        ("a", at(DAY_S + 1), '{"n":2.25}'),
        ("b", at(0), "[1]"),
    ]
    frame = spark.createDataFrame(rows, "topic string, ts timestamp, data string")
    found = payload_schema.fields(frame).collect()
    first, second = at(0), at(DAY_S)
    assert [(r.topic, utc(r.start), r.field, r.type, r.records) for r in found] == [
        ("a", first, "(payload)", "OBJECT", 3),
        ("a", first, "(payload)", "no JSON", 1),
        ("a", first, "n", "BIGINT", 3),
        ("a", first, "o", "OBJECT", 1),
        ("a", first, "o.a.b", "OBJECT", 1),
        ("a", first, "o.k", "ARRAY", 1),
        ("a", first, "s", "STRING", 1),
        ("a", second, "(payload)", "OBJECT", 2),
        ("a", second, "n", "DECIMAL", 2),
        ("a", second, "s", "VOID", 1),
        ("b", first, "(payload)", "ARRAY", 1),
    ]
    svg = payload_schema.draw(payload_schema.transform(frame).collect(), found)
    assert texts(svg) == [
        *("01-01 00:00", "01-02 00:00"),
        *("a", "6 records, 1 change"),
        *("(payload) no JSON", "17%, only 01-01 00:00", "25%", "0%"),
        *("n BIGINT", "50%, only 01-01 00:00", "75%", "0%"),
        *("n DECIMAL", "33%, only 01-02 00:00", "0%", "100%"),
        *("o OBJECT", "17%, only 01-01 00:00", "25%", "0%"),
        *("o.a.b OBJECT", "17%, only 01-01 00:00", "25%", "0%"),
        *("o.k ARRAY", "17%, only 01-01 00:00", "25%", "0%"),
        *("s STRING", "17%, only 01-01 00:00", "25%", "0%"),
        *("s VOID", "17%, only 01-02 00:00", "0%", "50%"),
        *("b", "1 record, 0 changes", "(payload) ARRAY", "100%", "100%"),
        "dark: all records of the bucket have it; a bar: first seen then; no cell: no records",
    ]
    # New types of the second day have a mark at their left: the decimal and the null.
    assert marks(svg) == [0.52, 0.52]


def test_a_field_is_told_from_when_to_when(spark: Any) -> None:
    def row(day: int, records: int) -> Any:
        return SimpleNamespace(topic="t", start=at(day * DAY_S), records=records, changed=False)

    def has(day: int, field: str, records: int) -> Any:
        return SimpleNamespace(
            topic="t", start=at(day * DAY_S), field=field, type="BIGINT", records=records
        )

    rows = [row(day, 1000) for day in range(5)]
    found = [
        *(has(day, "all", 1000) for day in range(5)),
        *(has(day, "early", 10) for day in (0, 1)),
        *(has(day, "late", 1) for day in (3, 4)),
        *(has(day, "middle", 999) for day in (1, 3)),
        *(has(day, "n" * 200, 500) for day in (0, 4)),
    ]
    said = texts(payload_schema.draw(rows, found))
    assert [each for each in said if "," in each or each == "100%"][1:] == [
        *("100%",) * 6,
        "<1%, to 2026-01-02",
        "<1%, from 2026-01-04",
        "40%, 2026-01-02..2026-01-04",
    ]
    assert said.count("99%") == 2, "nearly all are not all"
    assert "nnnnnnnnnn…nnnnnnnnnnn BIGINT" in said


# -- integrity_audit ---------------------------------------------------------------------------


def finding(topic: str, first: int, last: int) -> Any:
    """A finding of an audit of a topic."""
    return SimpleNamespace(topic=topic, first_seq=first, last_seq=last)


def test_the_audit_draws_each_topic_with_a_verdict(spark: Any) -> None:
    """In `a`, seq 4 occurs twice, 5 and 9 are missing, 7 and 8 damaged, of which 8 is listed."""
    rows = [
        *(("a", 1, seq, False) for seq in (1, 2, 4, 4, 8, 10)),
        *(("a", 1, seq, True) for seq in (3, 6)),
        *(("b", 2, seq, False) for seq in (5, 6)),
        ("c", 1, 1, False),
        ("c", 1, 4, False),
    ]
    frame = spark.createDataFrame(rows, "topic string, epoch bigint, seq bigint, deleted boolean")
    found = [finding("a", 7, 7), finding("a", 7, 8), finding("d", 20, 29), finding("topic 9", 0, 0)]
    parts = integrity_audit.parts(frame, found, pieces=5).collect()
    assert [(r.topic, r.first_seq, r.last_seq, r.live, r.deleted) for r in parts] == [
        ("a", 1, 2, 2, 0),
        ("a", 3, 4, 1, 1),
        ("a", 5, 6, 0, 1),
        ("a", 9, 10, 1, 0),
        ("b", 5, 5, 1, 0),
        ("b", 6, 6, 1, 0),
        ("c", 1, 1, 1, 0),
        ("c", 4, 4, 1, 0),
    ]
    topics = integrity_audit.transform(frame).collect()
    svg = integrity_audit.draw(topics, found, parts)
    assert texts(svg) == [
        "a\n1 .. 10",
        "wrong: 2 problems, 1 twice · 4 live, 2 deleted, 2 missing, 2 damaged",
        *("d\n20 .. 29", "wrong: 1 problem · 10 damaged"),
        *("topic 9", "wrong: 1 problem, seqs unknown"),
        *("c\n1 .. 4", "sound · 2 live, 2 missing"),
        *("b\n5 .. 6", "sound · 2 live"),
        "5 topics, 3 with something wrong",
    ]
    # Seqs 7 and 8 of 1 to 10 begin at 60 % and take a fifth, and so does the mark.
    assert boxes(svg, RED) == [(0.6, 0.2), (0.6, 0.2), (0.0, 1.0), (0.0, 1.0)]
    strict = texts(integrity_audit.draw(topics, [], parts, no_gaps=True))
    assert "wrong: 2 missing · 2 live, 2 missing" in strict
    assert strict[-1] == "3 topics, 2 with something wrong"


def test_damage_is_seen_at_any_size() -> None:
    row = SimpleNamespace(topic="t", epoch=1, first_seq=1, last_seq=10**9, duplicates=0)
    part = SimpleNamespace(
        topic="t", epoch=1, first_seq=1, last_seq=10**9, live=10**9 - 1, deleted=0
    )
    svg = integrity_audit.draw([row], [finding("t", 10**9, 10**9)], [part])
    assert boxes(svg, RED) == [(0.0, 1.0), (0.994, 0.006)]
    assert "wrong: 1 problem · 999,999,999 live, 1 damaged" in texts(svg)


# -- to_parquet --------------------------------------------------------------------------------


def test_parquet_by_day(spark: Any, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    rows = [
        *(("007", date(2026, 1, 1), seq) for seq in range(5)),
        *(("007", date(2026, 1, 4), seq) for seq in range(5, 8)),
        ("a/ä", date(2026, 1, 1), 1),
    ]
    frame = spark.createDataFrame(rows, "topic string, day date, seq bigint")
    for part in (frame.where("seq % 2 = 0"), frame.where("seq % 2 = 1")):
        part.coalesce(1).write.mode("append").partitionBy("topic", "day").parquet(str(folder))
    found = to_parquet.written(spark, str(folder)).collect()

    def size(topic: str, day: str) -> int:
        return sum(p.stat().st_size for p in folder.glob(f"topic={topic}/day={day}/*.parquet"))

    assert [(r.topic, str(r.day), r.records, r.files, r.bytes) for r in found] == [
        ("007", "2026-01-01", 5, 2, size("007", "2026-01-01")),
        ("007", "2026-01-04", 3, 2, size("007", "2026-01-04")),
        ("a/ä", "2026-01-01", 1, 1, size("a*", "2026-01-01")),
    ]
    svg = to_parquet.draw(found)
    total = sum(row.bytes for row in found)
    said = [re.sub(r", [\d,]+ bytes$", "", each) for each in texts(svg)]
    assert said == [
        *("01-01 00:00", "01-02 00:00", "01-03 00:00", "01-04 00:00"),
        *("007", "8 records", "5", "3", "a/ä", "1 records", "1"),
        f"9 records, {total:,} bytes in 5 files; darkest: most bytes; no cell: no records",
    ]
    # Four days, two of them empty: the last one is far right.
    blue = pictures.COLOURS[0]
    assert boxes(svg, blue) == [(-0.48, 0.96), (2.52, 0.96), (-0.48, 0.96)]


# -- edge cases --------------------------------------------------------------------------------


def test_pictures_of_nothing_and_of_very_much() -> None:
    for empty, words in (
        (payload_schema.draw([], []), "no records"),
        (integrity_audit.draw([], [], []), "no topics"),
        (to_parquet.draw([]), "0 records, 0 bytes in 0 files"),
    ):
        assert texts(empty)[-1].startswith(words)
    name = "<&\"'>" + "x" * 500
    times = [float(n * 60_000) for n in range(500)]
    cells = dict.fromkeys(times, (0.5, "50%"))
    rows = [pictures.GridRow(name, cells, name) for _ in range(100)]
    said = texts(pictures.grid("t", "u", times, [pictures.GridRow(name, {}, name), *rows], ""))
    assert said[-2:] == ["and 61 rows more", "the last 120 of 500 times are shown"]
    assert max(map(len, said)) <= 40
    strip = pictures.Strip(name, 1, 9, [(1, 9, [("#000", 9)])], (), name, "#000")
    said = texts(pictures.strips("t", "u", (), [strip] * 100, "note"))
    assert said[-2:] == ["note", "and 70 more"]
    assert max(map(len, said)) <= 95


# -- mains -------------------------------------------------------------------------------------


def test_mains_draw(spark: Any, webhooks: Server, tmp_path: Path) -> None:
    """All jobs have the option `--picture`; the values are those of the events."""
    picture = tmp_path / "a" / "picture.svg"
    folder = tmp_path / "copy"
    shutil.copytree(webhooks.data_dir / "segments", folder / "segments")
    shutil.copy(webhooks.data_dir / "FORMAT", folder)

    assert run(payload_schema.main, folder, "--bucket", "100 days", "--picture", picture) == 0
    said = drawn_texts(picture)
    assert f"{len(LEFT):,} records, 0 changes" in said
    assert {"event STRING", "100%"} <= set(said)

    out = tmp_path / "out"
    assert run(to_parquet.main, folder, "--out", out, "--picture", picture) == 0
    total = sum(path.stat().st_size for path in out.rglob("*.parquet"))
    said = drawn_texts(picture)
    assert any(each.startswith(f"{len(LEFT):,} records, {total:,} bytes in ") for each in said)

    damage(folder, "0000000003.data", flip(record_at(5, 200)))
    damage(folder, "0000000004.idx", flip(lambda *_: 300))
    assert run(integrity_audit.main, folder, "--picture", picture) == 1
    said = drawn_texts(picture)
    count = sum(e.seq != 46 and not 61 <= e.seq <= 80 for e in LEFT)
    dead = sum(e.tag == "issues" and not 61 <= e.seq <= 80 for e in EVENT_LIST)
    assert f"wrong: 2 problems · {count} live, {dead} deleted, 21 damaged" in said
