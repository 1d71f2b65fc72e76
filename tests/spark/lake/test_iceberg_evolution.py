"""Random schemas, one after the other, over random payloads: the rows equal those of a small
model.
"""

from __future__ import annotations

import json
import random
import struct
from pathlib import Path
from typing import Any, Final

import pytest

from tests.contract.driver import Server, good
from tests.spark.lake.engines import by_duckdb, by_pyiceberg, job, load
from tests.spark.logs import seal_all

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

# A type: a name, a list of one type, or fields by name.
Kind = str | list[Any] | dict[str, Any]
NAMES: Final = ("a", "y z", "é", "1x", "x`q", "_", "payload", "seq", "select")
SCALARS: Final[dict[str, tuple[object, ...]]] = {
    "string": ("", "ä𝄞", "\x00", '\n"}{', "\\u00e9"),
    "bigint": (0, -1, 2**63 - 1, -(2**63)),
    "int": (0, -1, 2**31 - 1, -(2**31)),
    "double": (0.0, 1.5, 3, 0.1, 1e300, 5e-324, 2**62 + 1),
    "float": (-0.0, 1.5, 3, 0.1, 1e30, 1.5e-40),
    "boolean": (True, False),
}
UNFIT: Final[tuple[object, ...]] = (1, "s", True, [], {}, [1], 1.5, 2**70, {"a": 1})
WIDER: Final = {"int": "bigint", "float": "double"}


def new_struct(rng: random.Random, depth: int = 0) -> dict[str, Kind]:
    return {name: new_kind(rng, depth) for name in rng.sample(NAMES, rng.randrange(1, 4))}


def new_kind(rng: random.Random, depth: int) -> Kind:
    chance = rng.random()
    if depth < 2 and chance < 0.25:
        return new_struct(rng, depth + 1)
    scalar = rng.choice(sorted(SCALARS))
    return [scalar] if chance < 0.4 else scalar


def later(rng: random.Random, kind: Kind, depth: int = 0) -> Kind:
    """A type that a table with this one can follow: some fields, wider ones, and new ones."""
    if isinstance(kind, list):
        return [later(rng, kind[0], depth)]
    if isinstance(kind, str):
        return WIDER.get(kind, kind) if rng.random() < 0.3 else kind
    kept = [name for name in kind if rng.random() < 0.75] or [next(iter(kind))]
    found = {name: later(rng, kind[name], depth + 1) for name in kept}
    more = [name for name in rng.sample(NAMES, rng.randrange(3)) if name not in kind]
    found |= {name: new_kind(rng, depth + 1) for name in more}
    return dict(rng.sample(sorted(found.items()), len(found)))


def union(known: Any, asked: Any) -> Any:
    """The type of the table after the change."""
    if isinstance(known, list):
        return [union(known[0], asked[0])]
    if not isinstance(known, dict):
        return asked
    both = {name: union(kind, asked.get(name, kind)) for name, kind in known.items()}
    return both | {name: kind for name, kind in asked.items() if name not in known}


def value(rng: random.Random, kind: Kind) -> Any:
    chance = rng.random()
    if chance < 0.1:
        return None
    if chance < 0.13:
        return rng.choice(UNFIT)
    if isinstance(kind, list):
        return [value(rng, kind[0]) for _ in range(rng.randrange(3))]
    if isinstance(kind, str):
        return rng.choice(SCALARS[kind])
    return {name: value(rng, each) for name, each in kind.items() if rng.random() < 0.85}


def fitted(datum: Any, kind: Any) -> Any:
    """The value converted to a type. Raises `TypeError` if it does not fit."""
    if datum is None:
        return None
    if isinstance(kind, dict) and type(datum) is dict:
        return {name: fitted(datum.get(name), each) for name, each in kind.items()}
    if isinstance(kind, list) and type(datum) is list:
        return [fitted(each, kind[0]) for each in datum]
    wanted = {"string": str, "boolean": bool, "int": int, "bigint": int}
    if isinstance(kind, str) and type(datum) is wanted.get(kind):
        bits = {"int": 31, "bigint": 63}.get(kind)
        if bits is None or -(2**bits) <= datum < 2**bits:
            return datum
    if kind == "double" and type(datum) in (int, float):
        return float(datum)
    if kind == "float" and type(datum) in (int, float):
        return struct.unpack("<f", struct.pack("<f", datum))[0]
    raise TypeError(kind)


def typed(datum: Any, kind: Kind | None) -> Any:
    try:
        return fitted(datum, kind) if type(datum) is dict and kind is not None else None
    except (TypeError, OverflowError):
        return None


def widened(datum: Any, kind: Any) -> Any:
    """The value of an earlier row in a table of this type."""
    if isinstance(datum, dict):
        return {name: widened(datum.get(name), each) for name, each in kind.items()}
    return [widened(each, kind[0]) for each in datum] if isinstance(datum, list) else datum


def notation(kind: Kind) -> str:
    if isinstance(kind, list):
        return f"array<{notation(kind[0])}>"
    return kind if isinstance(kind, str) else f"struct<{fields(kind)}>"


def fields(kind: dict[str, Any]) -> str:
    named = ((name.replace("`", "``"), notation(each)) for name, each in kind.items())
    return ", ".join(f"`{name}`: {each}" for name, each in named)


@pytest.mark.parametrize("seed", [5, 6])
def test_rows_are_those_of_the_schemas_that_were(seed: int, server: Server, tmp_path: Path) -> None:
    """The runs have added, missing, wider and moved fields, or no schema; there are rebuilds and
    deletes.
    """
    rng, out, api = random.Random(seed), tmp_path / "out", server.start()
    table: dict[str, Kind] | None = None
    data: list[Any] = []
    rows: dict[int, Any] = {}
    gone = 0
    for step in range(5):
        asked: Any = None
        if rng.random() < 0.75:
            asked = new_struct(rng) if table is None else later(rng, table)
            table = asked if table is None else union(table, asked)
        by = table if asked is None else asked
        first = len(data) + 1
        data += [value(rng, table or "string") for _ in range(rng.randrange(1, 12))]
        api.add("a", *data[first - 1 :])
        if step and rng.random() < 0.4:
            gone = rng.randrange(gone, first)
            good(api.delete("a", before_seq=gone + 1))
        seal_all(api)
        words = [] if asked is None else ["--schema", fields(asked)]
        words += ["--rows-per-commit", str(rng.choice((2, 5, 500)))]
        is_rebuilt = step == 4 or rng.random() < 0.4
        if is_rebuilt:
            words += ["--rebuild", "all"]
            rows = {seq: typed(data[seq - 1], by) for seq in rows if seq > gone}
        rows |= {seq: typed(data[seq - 1], by) for seq in range(first, len(data) + 1)}
        job(server.data_dir, out, *words)
        found = load(out, "a")
        expected = [(seq, shown(widened(rows[seq], table))) for seq in sorted(rows)]
        for read in (by_pyiceberg, by_duckdb):
            read_rows = sorted(read(found), key=lambda row: int(row["seq"]))
            assert [(row["seq"], shown(row.get("payload"))) for row in read_rows] == expected
        if is_rebuilt:
            job(server.data_dir, out, *words)
            assert load(out, "a").metadata_location == found.metadata_location, "once more"


def shown(datum: Any) -> str:
    """A value, whatever the order of its fields; -0.0 is not 0.0."""
    return json.dumps(datum, sort_keys=True)
