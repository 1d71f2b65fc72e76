"""(name, epoch, seq) names one record for ever: no epoch of a name is assigned twice."""

from __future__ import annotations

import asyncio

import pytest

from tests.design7.bench import TOPIC, Bench
from topics_server.values.appends import decode_append
from topics_server.values.model import Durability, TopicConfig


def _create_by_append(bench: Bench, durability: Durability) -> tuple[int, int]:
    """Append to a missing topic; return its id and epoch."""
    body = b'{"records":[{"data":1},{"data":2}]}'
    config = TopicConfig(durability=durability)
    bench.world.run(
        bench.store.append(TOPIC, body, decode_append(body), header_key=None, config=config)
    )
    topic = bench.store.topic(TOPIC)
    return topic.topic_id, topic.epoch


@pytest.mark.parametrize("durability", list(Durability))
def test_a_power_cut_does_not_take_back_a_topic_that_an_append_created(
    durability: Durability,
) -> None:
    """Guard: engine/commit/gates.py, `CREATES_TOPIC`."""
    for seed in range(1, 13):
        bench = Bench(seed)
        try:
            made = _create_by_append(bench, durability)
            bench.crash("power")
            topic = bench.node.registry.find(TOPIC)
            assert topic is not None, f"seed {seed}: the topic is gone"
            assert (topic.topic_id, topic.epoch) == made
            assert bench.append().first_seq > 2, f"seed {seed}: a seq was handed out twice"
        finally:
            bench.world.abandon()


def test_a_name_that_is_dropped_while_a_snapshot_is_taken_keeps_its_epoch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Guard: engine/background/checkpointer.py, `_capture` captures the epochs after the topics."""
    monkeypatch.setattr("topics_server.engine.background.checkpointer.CAPTURE_SLICE_MS", 0)
    bench = Bench()
    try:
        for number in range(40):
            bench.append(name=f"other{number}")
        assert _create_by_append(bench, Durability.FSYNC)[1] == 1

        async def both() -> None:
            taking = asyncio.ensure_future(bench.node.checkpointer.take())
            await asyncio.sleep(0)
            await bench.store.drop_topic(TOPIC, if_empty=False)
            assert bench.node.checkpointer.taken_count == 0, "the drop came too late"
            await taking

        bench.world.run(both())
        bench.crash("kill")
        assert _create_by_append(bench, Durability.FSYNC)[1] == 2
    finally:
        bench.world.abandon()


def test_a_name_that_was_forgotten_begins_above_the_floor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guard: engine/topic/registry.py, `remember_epoch` raises the floor;
    engine/background/epochs.py keeps it.
    """
    monkeypatch.setattr("topics_server.values.limits.DROPPED_NAMES_MAX", 3)
    bench = Bench()
    try:
        for _ in range(5):
            last = _create_by_append(bench, Durability.DISK)
            bench.world.run(bench.store.drop_topic(TOPIC, if_empty=False))
        for number in range(4):
            bench.append(name=f"other{number}")
            bench.world.run(bench.store.drop_topic(f"other{number}", if_empty=False))
        assert TOPIC not in bench.node.registry.dropped_epochs
        bench.checkpoint()
        bench.checkpoint()
        bench.crash("power")
        assert _create_by_append(bench, Durability.DISK)[1] == last[1] + 1
    finally:
        bench.world.abandon()
