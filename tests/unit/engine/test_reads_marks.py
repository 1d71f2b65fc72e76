"""The mark of a range's state: the number of its live records, counted without their bytes."""

from __future__ import annotations

import random

import pytest

from tests.unit.engine.rig import RULES, Rig

pytestmark = pytest.mark.anyio

RECORDS = 700


@pytest.mark.parametrize("dead", [0, 1, 90, RECORDS])
async def test_a_range_has_as_many_records_as_it_has_live_seqs(dead: int) -> None:
    rng = random.Random(dead)
    rig = Rig(rules=RULES)
    for first in range(0, RECORDS, 100):
        await rig.append("t", *range(first, first + 100))
        if first == 300:
            await rig.sealer.tend(rig.registry.existing("t"), force_seal=True)
    gone = set(rng.sample(range(1, RECORDS + 1), dead))
    if gone:
        await rig.store.delete_seqs("t", sorted(gone))
    log = rig.registry.existing("t").log
    assert 0 < log.sealed_seq < RECORDS
    live = [seq for seq in range(1, RECORDS + 1) if seq not in gone]
    ranges = [(1, RECORDS), (1, 10_000), (5, 4), (701, 800), (400, 401), (0, 0)]
    ranges += [(rng.randint(1, RECORDS), rng.randint(1, RECORDS)) for _ in range(300)]
    for first, last in ranges:
        expected = len([seq for seq in live if first <= seq <= last])
        assert rig.store.range_mark("t", first, last).live == expected, (first, last)
