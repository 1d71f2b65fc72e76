"""The kept ratios to the floor: their file, and what is too far from them. Pure.

Used by `check`, which measures and reads the file. A row is one comparison, named by its case and
its figure. Its ratio is about 1 where the server is as fast as the floor, and less where it is
slower. A ratio far above the kept one fails too: then the floor has become slow or the row compares
something else, and a slow server would pass.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

FORMAT = 2
# A row fails below this share of the ratio that was kept on the same kind of processor. Another one
# changes the ratio of an equal build by up to two fifths:
# docs/decisions/0345-ratios-that-ci-compares.md.
MARGIN = 0.5
# A row fails above this multiple of the highest ratio that was kept.
ABOVE_MAX = 3.0
# The bounds of a ratio in the file, which has three decimals.
_LEAST, _MOST = 0.001, 1000


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


class Known(NamedTuple):
    """The lowest and the highest of the kept ratios that count for a row on this machine."""

    lowest: float
    highest: float

    @property
    def least(self) -> float:
        """The lowest ratio that passes."""
        return MARGIN * self.lowest

    @property
    def most(self) -> float:
        """The highest ratio that passes."""
        return ABOVE_MAX * self.highest


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
    except (ValueError, RecursionError) as error:
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
    where = machine if isinstance(machine, dict) else {}
    if not isinstance(where.get("processor"), str) or not isinstance(options, dict):
        raise FileProblem(f"the case {case!r} does not say where and how it was measured")
    if not isinstance(ratios, dict) or not ratios:
        raise FileProblem(f"the case {case!r} has no ratios")
    for row, ratio in ratios.items():
        if not row.startswith(f"{case}: "):
            raise FileProblem(f"the case {case!r} has a ratio of {row!r}")
        if type(ratio) not in (int, float) or not _LEAST <= ratio <= _MOST:
            raise FileProblem(f"the ratio of {row!r} is not a number from {_LEAST} to {_MOST}")
    return Kept(where, options, {row: float(ratio) for row, ratio in ratios.items()})


def added(machines: Sequence[Kept], newest: Kept) -> list[Kept]:
    """What is kept of a case, with `newest` in the place of what had the same processor.

    The other machines lose the rows that are no longer measured.
    """
    others = []
    for kept in machines:
        ratios = {row: ratio for row, ratio in kept.ratios.items() if row in newest.ratios}
        if kept.processor != newest.processor and ratios:
            others.append(replace(kept, ratios=ratios))
    return [*others, newest]


def known_ratios(cases: Cases, processor: str) -> dict[str, Known]:
    """What is known of each row of all cases, for a machine with this processor.

    Where no ratio of a row was kept on such a machine, the ratios of all machines count.
    """
    here: dict[str, list[float]] = {}
    anywhere: dict[str, list[float]] = {}
    for kept in itertools.chain.from_iterable(cases.values()):
        for row, ratio in kept.ratios.items():
            anywhere.setdefault(row, []).append(ratio)
            if kept.processor == processor:
                here.setdefault(row, []).append(ratio)
    return {row: Known(min(each), max(each)) for row, each in (anywhere | here).items()}


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


def holds(now: float, known: Known) -> bool:
    """Whether a ratio is within the bounds; one that is not a number is outside."""
    return known.least <= now <= known.most


def fairest(tries: Sequence[float], known: Known) -> float:
    """The ratio of the first try within the bounds; without one, the nearest to them."""
    return min(tries, key=lambda now: max(known.least / max(now, 1e-9), now / known.most, 1.0))


def verdict(row: str, now: float, known: Known) -> str:
    """One line: the ratio now, the ratios kept, the bounds."""
    word = "ok  " if holds(now, known) else "FAIL"
    kept = " to ".join(f"{ratio:.3f}" for ratio in dict.fromkeys(known))
    return (
        f"{word} {row}: ratio to the floor {now:.3f}, kept {kept}, "
        f"passes from {known.least:.3f} to {known.most:.3f}"
    )
