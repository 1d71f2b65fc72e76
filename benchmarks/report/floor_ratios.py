"""The kept ratios to the floor: their file, and what is too far below them. Pure.

Used by `check`, which measures and reads the file. A row is one comparison, named by its case and
its figure. Its ratio is about 1 where the server is as fast as the floor, and less where it is
slower.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

FORMAT = 2
# A row fails below this share of the ratio that was kept on the same kind of processor. Another one
# changes the ratio of an equal build by up to two fifths:
# docs/decisions/0345-ratios-that-ci-compares.md.
MARGIN = 0.5


class FileProblem(ValueError):
    """The text is no file of kept ratios; the message says why."""


@dataclass(frozen=True, slots=True)
class Kept:
    """The kept ratios of one case on one machine, and how they were measured."""

    machine: Mapping[str, Any]
    options: Mapping[str, Any]
    ratios: Mapping[str, float]  # by row

    @property
    def processor(self) -> str:
        """The name of the machine's processor."""
        return str(self.machine["processor"])


# By case: what was kept on each kind of processor.
Cases = Mapping[str, Sequence[Kept]]


def spelled_file(cases: Cases) -> str:
    """The file's text, from what was kept of each case."""
    content = {
        "format": FORMAT,
        "cases": {
            case: [
                {
                    "machine": dict(kept.machine),
                    "options": dict(kept.options),
                    "ratios": {row: round(ratio, 3) for row, ratio in kept.ratios.items()},
                }
                for kept in machines
            ]
            for case, machines in cases.items()
        },
    }
    return json.dumps(content, indent=1) + "\n"


def parse_file(text: str) -> dict[str, list[Kept]]:
    """What was kept of each case; raises FileProblem for any other text."""
    try:
        content = json.loads(text)
    except ValueError as error:
        raise FileProblem(f"it is not JSON: {error}") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise FileProblem(f"it is not an object of format {FORMAT}")
    cases = content.get("cases")
    if not isinstance(cases, dict) or not cases:
        raise FileProblem("it has no cases")
    for case, machines in cases.items():
        if not isinstance(machines, list) or not machines:
            raise FileProblem(f"the case {case!r} has no machines")
    return {
        case: [_parsed_kept(case, kept) for kept in machines] for case, machines in cases.items()
    }


def _parsed_kept(case: str, kept: object) -> Kept:
    parts = kept if isinstance(kept, dict) else {}
    machine, options, ratios = (parts.get(name) for name in ("machine", "options", "ratios"))
    if not isinstance(machine, dict) or "processor" not in machine or not isinstance(options, dict):
        raise FileProblem(f"the case {case!r} does not say where and how it was measured")
    if not isinstance(ratios, dict) or not ratios:
        raise FileProblem(f"the case {case!r} has no ratios")
    for row, ratio in ratios.items():
        if type(ratio) not in (int, float) or not math.isfinite(ratio) or ratio <= 0:
            raise FileProblem(f"the ratio of {row!r} is {ratio!r}, not a positive number")
    return Kept(machine, options, {row: float(ratio) for row, ratio in ratios.items()})


def added(machines: Sequence[Kept], newest: Kept) -> list[Kept]:
    """What is kept of a case, with `newest` in the place of what had the same processor."""
    return [kept for kept in machines if kept.processor != newest.processor] + [newest]


def ratios_of(cases: Cases, processor: str) -> dict[str, float]:
    """The ratio of each row of all cases, for a machine with this processor.

    Where nothing was kept on such a machine, the lowest ratio of the row counts.
    """
    found: dict[str, float] = {}
    for machines in cases.values():
        equal = [kept for kept in machines if kept.processor == processor]
        for kept in equal or machines:
            for row, ratio in kept.ratios.items():
                found[row] = min(ratio, found.get(row, ratio))
    return found


def row_problems(measured: Iterable[str], kept: Iterable[str]) -> list[str]:
    """A line for each row that only one of the two sides has."""
    now, then = dict.fromkeys(measured), dict.fromkeys(kept)
    return [
        *(
            f"FAIL {row}: measured, but the file has no ratio of it"
            for row in now
            if row not in then
        ),
        *(f"FAIL {row}: in the file, but no longer measured" for row in then if row not in now),
    ]


def holds(now: float, kept: float) -> bool:
    """Whether a ratio is within the margin; one that is not a number is outside."""
    return now >= MARGIN * kept


def verdict(row: str, now: float, kept: float) -> str:
    """One line: the ratio now, the ratio kept, the margin."""
    word = "ok  " if holds(now, kept) else "FAIL"
    return (
        f"{word} {row}: ratio to the floor {now:.3f}, kept {kept:.3f}, "
        f"fails below {MARGIN:.2f} x kept = {MARGIN * kept:.3f}"
    )
