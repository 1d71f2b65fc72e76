"""Which topics each step of recovery visits: none that the step concerns is left out."""

from __future__ import annotations

from collections.abc import Collection

import pytest

from tests.unit.engine.background.test_recovery import (
    CLEAN,
    KILLED,
    POWER_CUT,
    Boot,
    appended,
    created,
)
from tests.unit.engine.rig import ListReplay, ListSegments, Rig
from topics_server.engine.background.recovery import _FINISHED_AT_ONCE, Stop
from topics_server.engine.topic.topic import Topic
from topics_server.values.entries import Entry, TopicPut
from topics_server.values.errors import StartRefused
from topics_server.values.limits import HEAD_RESERVE_SEQS
from topics_server.values.model import Ancestor, Durability, StreamFacts, TopicConfig
from topics_server.values.storage_types import SnapshotImage

pytestmark = pytest.mark.anyio

SEALED_AT = 8  # the records after which the rig seals


async def sealed(rig: Rig, name: str) -> Topic:
    """A topic with one full segment."""
    await rig.append(name, *range(SEALED_AT))
    topic = rig.registry.find(name)
    assert topic is not None
    await rig.sealer.tend(topic)
    assert topic.log.sealed_count == 1
    return topic


async def image_of(rig: Rig) -> SnapshotImage:
    """A snapshot of the rig as it is now."""
    await rig.checkpointer.take()
    return rig.snapshots.images[-1]


# -- files ---------------------------------------------------------------------------------------


async def test_a_topic_whose_folder_is_gone_refuses_the_start() -> None:
    """The folder is not on the disk, so only the topic's part says that files are expected."""
    rig = Rig()
    await rig.append("plain", 1)
    await sealed(rig, "t")
    image = await image_of(rig)
    await sealed(rig, "newer")
    del rig.segments.kept[2]
    entries = [(item.lsn, item.entry) for item in rig.journal.submitted]
    with pytest.raises(StartRefused, match=r"manifest of topic t \(id 2\)"):
        await Boot(*entries, image=image, segments=rig.segments).run()


class NotedSegments(ListSegments):
    """`finished`: the topics whose files recovery made durable; each then has a new manifest."""

    def __init__(self) -> None:
        super().__init__()
        self.finished: list[int] = []

    def finish_recovery(self, topic_id: int, untrusted: Collection[int] = ()) -> None:
        self.finished.append(topic_id)
        self.generations[topic_id] += 100


async def test_every_topic_with_files_gets_its_files_finished_and_its_deletes_flipped() -> None:
    """More topics than one call finishes; half of them are only in the journal."""
    rig = Rig()
    rig.segments = rig.sealer._segments = rig.fetcher._segments = NotedSegments()
    names = [f"t{number:02d}" for number in range(_FINISHED_AT_ONCE + 4)]
    half = len(names) // 2
    for name in names[:half]:
        await sealed(rig, name)
    await rig.append("plain", 1)
    image = await image_of(rig)
    for name in names[half:]:
        await sealed(rig, name)
    for name in names:
        await rig.delete(name, before_seq=3)
    entries = [(item.lsn, item.entry) for item in rig.journal.submitted]
    segments = rig.segments
    assert isinstance(segments, NotedSegments)
    boot = Boot(*entries, image=image, segments=segments)
    found = await boot.run()

    topics = {topic.name: topic for topic in boot.registry}
    assert topics.keys() == {*names, "plain"}
    with_files = [topics[name] for name in names]
    assert sorted(segments.finished) == sorted(topic.topic_id for topic in with_files)
    assert found.flips == 2 * len(names)
    for topic in with_files:
        kept = segments.kept[topic.topic_id][1]
        assert kept.disk_flags == bytes([1, 1, *[0] * (SEALED_AT - 2)])
        assert not topic.files.pending
        assert topic.files.anchor is None
        assert topic.files.generation == segments.generations[topic.topic_id] > 100


async def test_the_end_of_the_replay_is_forgotten_after_it() -> None:
    """The segment has eight records, the journal four: replay ends in the middle of the segment."""
    rig = Rig()
    await rig.append("t", *range(4))
    await rig.append("t", *range(4))
    topic = rig.registry.find("t")
    assert topic is not None
    await rig.sealer.tend(topic)
    first = rig.journal.submitted[0]
    boot = Boot((first.lsn, first.entry), segments=rig.segments)
    await boot.run()
    again = boot.registry.find("t")
    assert again is not None
    assert (again.log.sealed_seq, again.log.head_seq, again.log.live_count) == (8, 8, 8)
    assert again.log.replayed_seq is None


# -- seqs ----------------------------------------------------------------------------------------


class Losing(ListReplay):
    """A replay in which the shards of these topics may have lost entries in this boot."""

    lost: Collection[int] = ()

    def may_have_lost(self, topic_id: int) -> bool:
        return topic_id in self.lost


@pytest.mark.parametrize("stop", [KILLED, POWER_CUT])
async def test_seqs_are_skipped_in_each_topic_that_may_have_lost_some(stop: Stop) -> None:
    entries: list[tuple[int, Entry]] = [
        (1, created(1, "kept")),
        (2, created(2, "lost")),
        (3, created(3, "memory", TopicConfig(durability=Durability.EPHEMERAL))),
        (4, created(4, "also lost", TopicConfig(durability=Durability.MEMORY))),
        (5, appended(1, 1, "a")),
        (6, appended(2, 1, "a")),
        (7, appended(4, 1, "a")),
    ]
    boot = Boot(*entries)
    replay = Losing(*entries)
    replay.lost = {2, 4}
    boot.recovery._replay = replay
    found = await boot.run(stop)
    heads = {topic.name: topic.log.head_seq for topic in boot.registry}
    skipped = HEAD_RESERVE_SEQS
    kept = 1 if stop is KILLED else skipped
    assert heads == {"kept": kept, "lost": skipped, "memory": skipped, "also lost": skipped}
    assert found.heads_moved == 3 + (stop is POWER_CUT)


@pytest.mark.parametrize("stop", [CLEAN, KILLED, POWER_CUT])
async def test_each_stream_may_have_been_used_later_than_the_journal_says(stop: Stop) -> None:
    """A use is journaled once a sixteenth of the time to live has passed."""
    facts = [StreamFacts(f"s{number}", "text/plain", ttl_s=160, used_ms=5) for number in (2, 3)]
    boot = Boot(
        (1, created(1, "plain")),
        *(
            (number, TopicPut(number, f"s{number}", 1, TopicConfig(), 1, stream=each))
            for number, each in enumerate(facts, 2)
        ),
    )
    await boot.run(stop)
    used = {topic.name: topic.stream.used_ms for topic in boot.registry if topic.stream}
    assert used == {"s2": 5 + 10_000, "s3": 5 + 10_000}


# -- what is restored ----------------------------------------------------------------------------


async def test_each_restored_fork_counts_for_its_ancestors() -> None:
    """A stream with forks is not dropped before them."""
    rig = Rig()
    for number, ancestors in enumerate([(), ("s1",), ("s1", "s2")], 1):
        facts = StreamFacts(
            f"s{number}",
            "text/plain",
            ancestors=tuple(Ancestor(path, int(path[1:]), 0) for path in ancestors),
        )
        rig.registry.apply(
            number, TopicPut(number, f"s{number}", 1, TopicConfig(), 1, stream=facts)
        )
    await rig.append("plain", 1)
    boot = Boot(image=await image_of(rig))
    await boot.run()
    assert dict(boot.registry.fork_counts) == {"s1": 2, "s2": 1}
    assert len(boot.registry) == 4
