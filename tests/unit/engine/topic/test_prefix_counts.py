"""Topics by prefix: counted as they are created and dropped, and anew when the prefixes change."""

from __future__ import annotations

import random

import pytest

from tests.unit.engine.rig import Rig
from topics_server.engine.topic.prefix_counts import PrefixCounts
from topics_server.engine.topic.quotas import Quotas
from topics_server.values.errors import TopicsError

pytestmark = pytest.mark.anyio


def test_the_counts_are_those_of_a_naive_model() -> None:
    chance = random.Random(5)
    counts, live = PrefixCounts(), set[str]()
    for _ in range(5000):
        name = "".join(chance.choices("abc", k=3))
        if name in live:
            live.remove(name)
            counts.note(name, -1)
        else:
            live.add(name)
            counts.note(name, 1)
        if chance.random() < 0.01:
            counts.expect(frozenset(chance.choices(["a", "ab", "b", "bc", "c"], k=3)), live)
        for prefix in counts.prefixes:
            assert counts.of(prefix) == sum(one.startswith(prefix) for one in live)


async def test_topics_that_are_being_created_count_too() -> None:
    prefixes = frozenset({"t."})
    quotas = Quotas(
        max_topics=0,
        max_total_bytes=0,
        max_tail_records=1 << 30,
        max_tail_bytes=1 << 40,
        max_topics_per_prefix=2,
        prefixes=lambda: prefixes,
    )
    rig = Rig(quotas=quotas)
    await rig.append("t.a", 1)
    topic, _ = rig.registry.decide_create("t.b", rig.registry.find("t.a").config, 0)  # type: ignore[union-attr]
    with pytest.raises(TopicsError) as refusal:
        await rig.append("t.c", 1)
    assert refusal.value.detail == {"limit": "max_topics_per_prefix", "max": 2, "prefix": "t."}
    await rig.append("other", 1)
    rig.registry.abandon(topic.topic_id)
    await rig.append("t.c", 1)
    # After a reload of the keys with another prefix, existing topics are counted.
    prefixes = frozenset({"t.", "ot"})
    await rig.append("other.b", 1)
    with pytest.raises(TopicsError):
        await rig.append("other.c", 1)
