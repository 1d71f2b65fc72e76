"""Parses durations and sizes as people write them: `5s`, `64KB`. Pure.

A plain number is in the base unit: milliseconds, or bytes. `KB`, `MB`, `GB` and `TB` are powers of
1000; `KiB` and so on, and the bare letters `K`, `M`, `G` and `T`, are powers of 1024. Units are
read in any case. Used by the command line's options and by the server's settings.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from fractions import Fraction
from typing import Final

SECOND_MS: Final = 1000
_DAY_MS: Final = 86_400_000
DURATION_UNITS: Final[Mapping[str, int]] = {
    "ms": 1,
    "s": SECOND_MS,
    "sec": SECOND_MS,
    "m": 60_000,
    "min": 60_000,
    "h": 3_600_000,
    "d": _DAY_MS,
    "w": 7 * _DAY_MS,
}
SIZE_UNITS: Final[Mapping[str, int]] = {
    "b": 1,
    **{f"{letter}b": 1000**power for power, letter in enumerate("kmgt", 1)},
    **{f"{letter}ib": 1024**power for power, letter in enumerate("kmgt", 1)},
    **{letter: 1024**power for power, letter in enumerate("kmgt", 1)},
}
_PART: Final = re.compile(r"([0-9]{1,20}(?:\.[0-9]{1,9})?) ?([a-z]+)")
_PLAIN: Final = re.compile(r"[0-9]{1,20}")


def parse_duration(text: str, *, plain_ms: int = 1) -> int:
    """Milliseconds of `5s`, `250ms`, `1h30m` or a plain number of units of `plain_ms`.

    Raises `ValueError` with a sentence that names the text.
    """
    unit = {1: "milliseconds", SECOND_MS: "seconds"}[plain_ms]
    found = _total(text, DURATION_UNITS, plain_ms)
    if found is None:
        raise ValueError(
            f"{text!r} is not a duration: write {unit}, or a number with a unit "
            "(ms, s, m, h, d, w), such as 250ms, 5s, 10m or 1h30m"
        )
    if found.denominator != 1:
        raise ValueError(f"{text!r} is not a whole number of milliseconds")
    return int(found)


def parse_size(text: str) -> int:
    """Bytes of `64KB`, `1MiB`, `1.5G` or a plain number; `ValueError` as `parse_duration`."""
    found = _total(text, SIZE_UNITS, 1)
    if found is None:
        raise ValueError(
            f"{text!r} is not a size: write bytes, or a number with a unit "
            "(B, KB, KiB, MB, MiB, GB, GiB), such as 64KB or 1MiB"
        )
    if found.denominator != 1:
        raise ValueError(f"{text!r} is not a whole number of bytes")
    return int(found)


def _total(text: str, units: Mapping[str, int], plain: int) -> Fraction | None:
    """The sum of all parts, each unit smaller than the one before; `None` if invalid."""
    rest = text.strip().lower()
    if _PLAIN.fullmatch(rest):
        return Fraction(rest) * plain
    if plain != 1 and re.fullmatch(r"[0-9]{1,20}\.[0-9]{1,9}", rest):
        return Fraction(rest) * plain
    total, before = Fraction(0), None
    while rest:
        part = _PART.match(rest)
        unit = None if part is None else units.get(part[2])
        if part is None or unit is None or (before is not None and unit >= before):
            return None
        total += Fraction(part[1]) * unit
        before = unit
        rest = rest[part.end() :].lstrip()
    return None if before is None else total


def duration_text(ms: int) -> str:
    """A duration in its largest units, at most two of them: `250 ms`, `1.5 s`, `2 h 5 min`."""
    if ms < SECOND_MS:
        return f"{ms} ms"
    if ms < 60_000:
        return f"{ms / SECOND_MS:.3f}".rstrip("0").rstrip(".") + " s"
    for size, name, below, below_name in (
        (_DAY_MS, "d", 3_600_000, "h"),
        (3_600_000, "h", 60_000, "min"),
        (60_000, "min", SECOND_MS, "s"),
    ):
        if ms >= size:
            rest = ms % size // below
            return f"{ms // size} {name}" + (f" {rest} {below_name}" if rest else "")
    raise AssertionError("one minute at least")


def size_text(size: int) -> str:
    """Bytes in the largest binary unit: `17 B`, `1.5 KiB`, `64 MiB`."""
    value, unit = float(size), "B"
    for name in ("KiB", "MiB", "GiB", "TiB"):
        if round(value, 1) < 1024:
            break
        value, unit = value / 1024, name
    return f"{value:.1f}".removesuffix(".0") + f" {unit}"
