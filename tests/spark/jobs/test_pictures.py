"""Pictures are legible with four records and with millions: no text covers another, none is cut
off.
"""

from __future__ import annotations

import math
import random
import xml.etree.ElementTree as ET
from itertools import combinations
from pathlib import Path
from typing import Final

import pytest

pytest.importorskip("matplotlib")

from spark_jobs.running import pictures
from spark_jobs.running.pictures import Figure, GridRow, Strip

HOUR_MS: Final = 3_600_000
DAY_MS: Final = 24 * HOUR_MS
START_MS: Final = 20_600 * DAY_MS
KINDS: Final = (("damaged", "#c53030"), ("missing", "#f6ad55"), ("live", "#2f855a"))
LIVE: Final = KINDS[2][1]
ODD: Final = "_\x00\x1b\u0085<&\"'> $x_1$ \ud800é"


def wave(topic: int, hours: int) -> list[tuple[float, float]]:
    """Hours of a topic with daily waves and some noise."""
    chance = random.Random(topic)
    return [
        (START_MS + n * HOUR_MS, 1e4 * (topic + 1) * (1 + math.sin(n / 4)) + chance.random() * 1e3)
        for n in range(hours)
    ]


def row(name: str, days: list[float]) -> GridRow:
    """A row of a grid with a value on each day."""
    cells = {day: (n % 10 / 9, f"{n}0k") for n, day in enumerate(days)}
    return GridRow(name, cells, "99,999,999 records, 12.3G bytes", since=days[len(days) // 2])


def strip(name: str, seqs: int, pieces: int) -> Strip:
    """A topic in pieces; its last seq is damaged."""
    wide = seqs // pieces
    cut = [(1 + n * wide, (n + 1) * wide, ((LIVE, wide),)) for n in range(pieces)]
    words = f"wrong: 1 problem · {seqs - 1:,} live, 1 damaged"
    return Strip(name, 1, seqs, cut, ((seqs, seqs),), words, KINDS[0][1])


def day(number: int) -> float:
    return float(START_MS + number * DAY_MS)


def figures(size: str) -> dict[str, Figure]:
    """One of each chart: of four records, or of millions."""
    if size == "few":
        days = [day(0), day(1)]
        return {
            "lines": pictures.lines("T", "unit", {"a": [(day(0), 3.0)], "b": [(day(0), 1.0)]}),
            "bars": pictures.bars("T", "unit", [("push", 2), ("pull", 1), ("x", 1)], "3 tags"),
            "grid": pictures.grid("T", "unit", days, [row("a", days), row("b", days)], "note"),
            "strips": pictures.strips("T", "unit", KINDS, [strip("a", 3, 1)], "1 topic"),
        }
    days = [day(n) for n in range(800)]
    name = "a-topic-with-a-rather-long-name"
    return {
        "lines": pictures.lines("T", "u", {f"{n}-{name}": wave(n, 20_000) for n in range(12)}),
        "bars": pictures.bars("T", "u", [(f"{name}:{n}", 4e6 / (n + 1)) for n in range(20)], "n"),
        "grid": pictures.grid(
            "T", "u", days, [row(f"{n}-{name}", days) for n in range(100)], "note"
        ),
        "strips": pictures.strips(
            "T", "u", KINDS, [strip(f"{n}-{name}", 4_000_000, 160) for n in range(100)], "note"
        ),
    }


def words(figure: Figure) -> list[tuple[str, tuple[float, float, float, float]]]:
    """Every visible text with its box (left, bottom, right, top) in pixels."""
    from matplotlib.text import Text

    figure.draw_without_rendering()
    found = []
    unseen = set()  # ticks beyond the axis: matplotlib makes them and does not draw them
    for axis in (figure.axes[0].xaxis, figure.axes[0].yaxis):
        low, high = sorted(axis.get_view_interval())
        outside = [t for t in axis.get_major_ticks() if not low <= t.get_loc() <= high]
        unseen |= {id(label) for tick in outside for label in (tick.label1, tick.label2)}
    for each in figure.findobj(Text):
        if id(each) not in unseen and each.get_visible() and each.get_text().strip():
            box = each.get_window_extent()
            found.append((each.get_text(), (box.x0, box.y0, box.x1, box.y1)))
    return found


@pytest.mark.parametrize("size", ["few", "many"])
@pytest.mark.parametrize("chart", ["lines", "bars", "grid", "strips"])
def test_no_text_covers_another_or_is_cut_off(size: str, chart: str, tmp_path: Path) -> None:
    figure = figures(size)[chart]
    found = words(figure)
    wide, tall = figure.get_size_inches() * figure.dpi
    assert len(found) >= 6
    for text, (left, bottom, right, top) in found:
        assert left >= -1, text
        assert bottom >= -1, text
        assert right <= wide + 1, text
        assert top <= tall + 1, text
    for (one, a), (other, b) in combinations(found, 2):
        # Two pixels of a line's height are empty.
        is_beside = a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] + 2 or b[3] <= a[1] + 2
        assert is_beside, f"{one!r} covers {other!r}"
    for suffix, most in ((".svg", 200_000), (".png", 500_000)):
        pictures.save(figure, tmp_path / f"p{suffix}")
        assert (tmp_path / f"p{suffix}").stat().st_size < most
    ET.parse(tmp_path / "p.svg")


def test_a_picture_is_the_same_file_each_time(tmp_path: Path) -> None:
    for name in ("a.svg", "b.svg"):
        pictures.save(figures("few")["strips"], tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


def test_names_of_any_characters(tmp_path: Path) -> None:
    """Control characters, halves of surrogates, mathematics and markup are drawn as text."""
    days = [day(0), day(1)]
    for figure in (
        pictures.lines("T", "u", {ODD: [(day(0), 1.0), (day(1), 2.0)]}),
        pictures.bars("T", "u", [(ODD, 1.0)], ODD),
        pictures.grid("T", "u", days, [GridRow(ODD, {day(0): (1.0, ODD[:3])}, ODD)], ODD),
        pictures.strips("T", "u", KINDS, [Strip(ODD, 1, 2, (), (), ODD, "#000000")], ODD),
    ):
        pictures.save(figure, tmp_path / "p.png")
        pictures.save(figure, tmp_path / "p.svg")
        texts = ["".join(each.itertext()) for each in ET.parse(tmp_path / "p.svg").iter()]
        shown = "_\\x00\\x1b\\x85<&\"'> $x_1$ \ufffdé"
        assert any(shown in each for each in texts)


def test_many_points_are_means_with_the_extremes_beside() -> None:
    points = [(day(n), float(n % 2)) for n in range(4_000)]
    axes = pictures.lines("T", "u", {"a": points}).axes[0]
    assert len(axes.lines[0].get_xdata()) == pictures.POINTS_MAX
    assert set(axes.lines[0].get_ydata()) == {0.5}
    band = axes.collections[0].get_paths()[0].get_extents()
    assert (band.y0, band.y1) == (0, 1)


def test_times_of_years_that_no_calendar_has(tmp_path: Path) -> None:
    far = 10.0**16
    for times in ([0.0, far], [-far, 0.0], [far, far + 1]):
        figure = pictures.lines("T", "u", {"a": [(t, 1.0) for t in times]})
        pictures.save(figure, tmp_path / "p.svg")
        pictures.save(pictures.grid("T", "u", times, [row("a", times)], ""), tmp_path / "p.svg")
    assert "10000000000000000 ms" in (tmp_path / "p.svg").read_text("utf-8")
