"""Results as plain values: series, bars, verdicts, and their JSON. Pure.

A figure holds the value of every round, so that all shown values can be computed again from the
JSON file. Made by the cases; shown by `terminal`, `chart` and `document`.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class Series:
    """One value for each round."""

    label: str
    unit: str
    values: tuple[float, ...]

    def __post_init__(self) -> None:
        assert self.values, f"{self.label}: a series without a value"

    @property
    def median(self) -> float:
        """Median of the rounds."""
        return statistics.median(self.values)

    @property
    def low(self) -> float:
        """Smallest round."""
        return min(self.values)

    @property
    def high(self) -> float:
        """Largest round."""
        return max(self.values)

    def as_json(self) -> dict[str, Any]:
        """The series with median and spread, so that readers need not compute them."""
        return {
            "label": self.label,
            "unit": self.unit,
            "median": self.median,
            "min": self.low,
            "max": self.high,
            "values": list(self.values),
        }


@dataclass(frozen=True, slots=True)
class Bar:
    """A requirement for a series: its median (or its highest value) must be on one side of a
    limit.
    """

    sense: Literal[">=", "<="]
    limit: float
    of: Literal["median", "highest"] = "median"

    def value(self, series: Series) -> float:
        """The value that the bar limits."""
        return series.median if self.of == "median" else series.high

    def holds(self, series: Series) -> bool:
        """Whether the bar is reached; equality counts."""
        value = self.value(series)
        return value >= self.limit if self.sense == ">=" else value <= self.limit


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of the report: the measured quantity, the judged series and its bar, if there is
    one.
    """

    case: str
    name: str
    judged: Series
    bar: Bar | None = None
    beside: tuple[Series, ...] = ()  # the sides from which the judged series was computed
    notes: tuple[str, ...] = ()

    @property
    def verdict(self) -> str:
        """`PASS`, `short of`, or `stated` if there is no bar."""
        if self.bar is None:
            return "stated"
        return "PASS" if self.bar.holds(self.judged) else "short of"

    def as_json(self) -> dict[str, Any]:
        """All fields and the verdict."""
        bar = self.bar
        return {
            "case": self.case,
            "name": self.name,
            "verdict": self.verdict,
            "bar": None if bar is None else {"sense": bar.sense, "limit": bar.limit, "of": bar.of},
            "judged": self.judged.as_json(),
            "beside": [series.as_json() for series in self.beside],
            "notes": list(self.notes),
        }


@dataclass(slots=True)
class Report:
    """One run of the benchmarks."""

    machine: dict[str, Any]
    options: dict[str, Any]
    figures: list[Figure] = field(default_factory=list)
    noise_ms: list[float] = field(default_factory=list)
    # case → the reason why it was not measured
    errors: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)  # case → the missing program

    @property
    def noise_share(self) -> float:
        """The spread of the calibration loop, as a share of its median; 0 if it never ran."""
        if not self.noise_ms:
            return 0.0
        return (max(self.noise_ms) - min(self.noise_ms)) / statistics.median(self.noise_ms)

    def as_json(self) -> dict[str, Any]:
        """The JSON file's content."""
        noise = Series("calibration loop", "ms", tuple(self.noise_ms)) if self.noise_ms else None
        return {
            "format": 1,
            "machine": self.machine,
            "options": self.options,
            "noise": None if noise is None else noise.as_json(),
            "figures": [figure.as_json() for figure in self.figures],
            "errors": self.errors,
            "skipped": self.skipped,
        }


def report_from_json(value: dict[str, Any]) -> Report:
    """The report in a JSON file; verdicts are computed again."""
    assert value["format"] == 1, "a report of another version"
    noise = value["noise"]
    return Report(
        machine=value["machine"],
        options=value["options"],
        figures=[_figure(item) for item in value["figures"]],
        noise_ms=[] if noise is None else noise["values"],
        errors=value["errors"],
        skipped=value["skipped"],
    )


def _series(value: dict[str, Any]) -> Series:
    return Series(value["label"], value["unit"], tuple(value["values"]))


def _figure(value: dict[str, Any]) -> Figure:
    return Figure(
        case=value["case"],
        name=value["name"],
        judged=_series(value["judged"]),
        bar=None if value["bar"] is None else Bar(**value["bar"]),
        beside=tuple(_series(item) for item in value["beside"]),
        notes=tuple(value["notes"]),
    )


def ratios(over: Sequence[float], under: Sequence[float], label: str) -> Series:
    """The ratio of the two values of each round."""
    assert len(over) == len(under)
    return Series(label, "x", tuple(a / b for a, b in zip(over, under, strict=True)))


def spelled(value: float, unit: str) -> str:
    """A value as text for people."""
    match unit:
        case "x":
            return f"{value:.2f}x"
        case "MB":
            return f"{value:,.0f} MB"
        case _ if abs(value) >= 100:
            return f"{value:,.0f} {unit}"
        case _ if abs(value) >= 10:
            return f"{value:.1f} {unit}"
        case _:
            return f"{value:.3f} {unit}"
