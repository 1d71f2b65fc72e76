"""Restores of backups that were made under load equal the log's prefix, leases included."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.model.backups.backed_up import BackedUp
from topics_server.values.model import Durability, TopicConfig, TopicType


@pytest.mark.parametrize("seed", range(24))
def test_a_restore_equals_the_logs_prefix(seed: int) -> None:
    changes: dict[str, Any] = {"wal_shards": 1 + seed % 3}
    if seed % 2:
        # Segments move while they are copied.
        changes |= {"cold_dir": Path("cold"), "hot_retain_segments": 1}
    made = BackedUp(seed, **changes)
    with made.world.life(seed):
        made.start()
        made.world.run(made.put_topics())
        made.world.run(made.load(30))
        for _ in range(2):
            made.world.run(made.back_up_under_load())
            assert made.backups.state.status == "done", made.backups.state
            made.world.run(made.load(10))
        found = made.repository().verify()
        assert (found.backups, found.problems) == (2, [])
        number = made.rng.choice((1, 2))
        made.world.crash(made.rng.choice(("kill", "power")))
        facts = made.restore("restored", number)
        if seed % 2:
            made.world.changes["cold_dir"] = Path("another-cold")
        made.world.start()
        made.check(facts)


def test_leases_and_acks_are_those_of_the_backup() -> None:
    made = BackedUp(3)
    with made.world.life(3):
        made.start()
        config = TopicConfig(type=TopicType.QUEUE, durability=Durability.FSYNC, leases_durable=True)
        run = made.world.run
        run(made.store.put_topic("jobs", config, keep_type=False))
        run(made.append("jobs", 9))

        async def stays() -> None:
            await asyncio.get_running_loop().create_future()

        async def claim(count: int) -> list[int]:
            node = made.world.node
            assert node is not None
            claimed = await node.queues.claim("jobs", "w", count, 60_000, wait_ms=0, gone=stays)
            assert claimed is not None
            return [job.seq for job in claimed.jobs]

        assert run(claim(4)) == [1, 2, 3, 4]
        run(made.back_up())
        assert run(claim(2)) == [5, 6]
        made.world.crash("power")
        made.restore("restored")
        made.world.start()
        queue = made.store.state("jobs", touch=False).queue
        assert queue is not None
        assert (queue.in_flight, queue.ready) == (4, 5)
        assert run(claim(9)) == [5, 6, 7, 8, 9]
