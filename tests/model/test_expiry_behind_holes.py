"""Found by the simulation: what has expired behind a hole is told, never delivered."""

from __future__ import annotations

from tests.design7.bench import Bench
from topics_server.model import Durability


def test_expired_records_behind_a_hole_are_not_read() -> None:
    """Guard: engine/reading.py, `plan_page` ends the page where expired seqs follow a hole."""
    bench = Bench()
    try:
        bench.put(Durability.DISK, ttl_ms=60_000)
        bench.append(3)
        bench.crash("power")
        first = bench.append(2).first_seq
        bench.world.clock.step(61_000)
        seen = bench.look()
        assert list(seen.records) == []
        assert seen.gaps[-1].gap_to == first + 1
    finally:
        bench.world.abandon()
