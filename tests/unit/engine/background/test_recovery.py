"""The boot sequence over lists: its start lsn, its order, and what it never removes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
import numpy as np
import pytest

from tests.unit.engine.drive import seqs_of
from tests.unit.engine.rig import ListReplay, ListSegments, NowOffload, Rig, body_of
from topics_server.engine.answers import ReadRequest
from topics_server.engine.background import recovery
from topics_server.engine.background.capture import capture
from topics_server.engine.background.large_appends import LargeAppends
from topics_server.engine.background.recovery import Recovered, Recovery, Stop
from topics_server.engine.read.page import plan_page
from topics_server.engine.subscribe.sessions import SessionTable
from topics_server.engine.topic.applied import Applied
from topics_server.engine.topic.registry import Registry
from topics_server.values.appends import AppendLimits
from topics_server.values.entries import (
    RESERVED_ID_MIN,
    SESSIONS_ID,
    CursorAt,
    Entry,
    RecordsAppended,
    RecordsDeleted,
    SessionMoved,
    SessionOpened,
    SessionOptions,
    SessionsClosed,
    Source,
    TopicDropped,
    TopicPut,
)
from topics_server.values.errors import StartRefused
from topics_server.values.file_inventory import FoundTopic, Objection, anchor_of
from topics_server.values.limits import HEAD_RESERVE_SEQS
from topics_server.values.model import Durability, Hole, LossReason, TopicConfig
from topics_server.values.storage_types import EPOCHS_PART, TOPIC_PARTS, EncodedPart, SnapshotImage

pytestmark = pytest.mark.anyio

T = TypeVar("T")

CLEAN = Stop(was_clean=True, same_boot=True)
KILLED = Stop(was_clean=False, same_boot=True)
POWER_CUT = Stop(was_clean=False, same_boot=False)


class Boot:
    """One recovery of this journal on these segments."""

    def __init__(
        self,
        *entries: tuple[int, Entry],
        image: SnapshotImage | None = None,
        segments: ListSegments | None = None,
    ) -> None:
        self.registry = Registry()
        self.segments = segments or ListSegments()
        self.replay = ListReplay(*entries)
        self.sessions = SessionTable()
        self.heard: list[tuple[int, Entry, Applied]] = []
        self.large_appends = LargeAppends(AppendLimits())
        self.recovery = Recovery(
            self.registry,
            self.segments,
            image,
            self.replay,
            NowOffload(),
            self.large_appends,
            {SESSIONS_ID: self.sessions},
            [lambda lsn, entry, applied: self.heard.append((lsn, entry, applied))],
        )

    async def run(self, stop: Stop = CLEAN) -> Recovered:
        try:
            return await self.recovery.run(stop, lambda: None)
        finally:
            self.large_appends.close()

    def head(self, name: str) -> int:
        topic = self.registry.find(name)
        assert topic is not None
        return topic.log.head_seq


def created(topic_id: int, name: str, config: TopicConfig | None = None) -> TopicPut:
    return TopicPut(topic_id, name, 1, config or TopicConfig(), 1)


def appended(topic_id: int, first_seq: int, *datas: object) -> RecordsAppended:
    body, _ = body_of(*datas)
    return RecordsAppended(topic_id, first_seq, len(datas), 2, body)


async def test_an_empty_directory_is_replayed_from_the_first_lsn() -> None:
    boot = Boot()
    found = await boot.run()
    assert boot.replay.asked_from == 1
    assert (found.topics, found.entries, found.last_lsn, found.had_snapshot) == (0, 0, 0, False)


async def test_entries_are_applied_again_as_they_were() -> None:
    boot = Boot((1, created(1, "t")), (2, appended(1, 1, "a", "b")), (5, appended(1, 3, "c")))
    found = await boot.run()
    assert boot.head("t") == 3
    assert (found.topics, found.entries, found.last_lsn) == (1, 3, 5)


async def test_a_snapshot_says_where_replay_starts_and_what_ids_are_taken() -> None:
    rig = Rig()
    await rig.append("t", 1, 2)
    await rig.checkpointer.take()
    image = rig.snapshots.images[0]
    boot = Boot((2, appended(1, 3, "c")), image=image)
    found = await boot.run()
    assert boot.replay.asked_from == image.start_lsn == 2
    assert boot.head("t") == 3
    assert found.had_snapshot
    assert boot.registry.next_topic_id == 2


class NotedOffload(NowOffload):
    """`depth` is above 0 while a call runs off the loop."""

    depth = 0

    async def run(self, call: Callable[[], T]) -> T:
        self.depth += 1
        try:
            return call()
        finally:
            self.depth -= 1


@pytest.mark.parametrize("has_snapshot", [True, False])
async def test_topics_are_restored_and_their_segments_opened_beside_the_loop(
    monkeypatch: pytest.MonkeyPatch, has_snapshot: bool
) -> None:
    """One topic may have 60 MB of records in the snapshot, or thousands of segments."""
    rig = Rig()
    await rig.append("t", *range(8))
    topic = rig.registry.find("t")
    assert topic is not None
    await rig.sealer.tend(topic)
    await rig.append("t", 9)
    await rig.checkpointer.take()
    boot = Boot(
        *[(item.lsn, item.entry) for item in rig.journal.submitted],
        image=rig.snapshots.images[0] if has_snapshot else None,
        segments=rig.segments,
    )
    offload = boot.recovery._offload = NotedOffload()
    depths: dict[str, list[int]] = {}

    def noted(where: object, name: str) -> None:
        call = getattr(where, name)

        def note(*given: Any) -> Any:
            depths.setdefault(name, []).append(offload.depth)
            return call(*given)

        monkeypatch.setattr(where, name, note)

    noted(rig.segments, "open_topic")
    noted(recovery, "restore")
    await boot.run()
    assert boot.head("t") == 9
    expected = {"open_topic": [1]} | ({"restore": [1]} if has_snapshot else {})
    assert depths == expected


async def test_parts_are_taken_in_order_and_released_on_the_way() -> None:
    """The parts are as large as all tails together, so restored parts must not stay in memory until
    the last one.
    """
    ids = [EPOCHS_PART, *range(1, 700), SESSIONS_ID, 900]
    parts: list[tuple[int, EncodedPart]] = [(topic_id, b"part") for topic_id in ids]
    taken: list[list[int]] = []
    for some in recovery._some_parts(parts):
        taken.append([topic_id for topic_id, _ in some])
        # The next part may already be taken.
        assert len(parts) in (len(ids) - sum(map(len, taken)) - at for at in (0, 1))
    assert [topic_id for some in taken for topic_id in some] == ids
    assert [EPOCHS_PART] in taken
    assert [SESSIONS_ID] in taken
    assert max(map(len, taken)) < 300
    assert parts == []


async def test_the_last_lsn_is_that_of_the_snapshot_when_the_journal_is_shorter() -> None:
    image = SnapshotImage(start_lsn=8, last_lsn=9, next_topic_id=3, parts=[])
    assert (await Boot(image=image).run()).last_lsn == 9


async def test_an_entry_that_its_part_has_already_changes_nothing() -> None:
    rig = Rig()
    await rig.append("t", 1, 2)
    await rig.checkpointer.take()
    image = SnapshotImage(
        start_lsn=1, last_lsn=1, next_topic_id=2, parts=rig.snapshots.images[0].parts
    )
    boot = Boot((1, rig.journal.entries[0]), image=image)
    await boot.run()
    assert boot.head("t") == 2
    assert boot.registry.records_live == 2


async def test_sealed_records_are_not_taken_twice_when_no_snapshot_knows_the_segment() -> None:
    rig = Rig()
    await rig.append("t", *range(8))
    topic = rig.registry.find("t")
    assert topic is not None
    await rig.sealer.tend(topic)
    await rig.append("t", 8)
    entries = [(item.lsn, item.entry) for item in rig.journal.submitted]
    boot = Boot(*entries, segments=rig.segments)
    await boot.run()
    again = boot.registry.find("t")
    assert again is not None
    assert (again.log.sealed_seq, again.log.head_seq, again.log.live_count) == (8, 9, 9)


@pytest.mark.parametrize("has_snapshot", [True, False])
async def test_seqs_that_a_head_jumped_over_stay_told_before_a_segment_no_snapshot_knows(
    has_snapshot: bool,
) -> None:
    """The newer snapshot with the hole is damaged; the older snapshot and the journal show the
    hole.
    """
    rig = Rig()
    await rig.append("t", 1, 2)
    await rig.checkpointer.take()
    image = rig.snapshots.images[0] if has_snapshot else None
    topic = rig.registry.find("t")
    assert topic is not None
    topic.log.jump_head(50, LossReason.DAMAGED)
    await rig.append("t", *range(8))
    await rig.sealer.tend(topic)
    await rig.append("t", 9)
    assert topic.log.sealed_seq == 58
    told = [Hole(3, 50, LossReason.DAMAGED)]
    assert topic.log.holes == told
    entries = [(item.lsn, item.entry) for item in rig.journal.submitted]
    boot = Boot(*entries, image=image, segments=rig.segments)
    await boot.run()
    again = boot.registry.find("t")
    assert again is not None
    assert (again.log.head_seq, again.log.live_count) == (59, 11)
    assert again.log.holes == told
    # Later jumps are again reported as jumps of the head.
    again.log.jump_head(70, LossReason.RESTART)
    assert again.log.holes == [*told, Hole(60, 70, LossReason.RESTART)]


async def test_epochs_of_dropped_names_survive() -> None:
    rig = Rig()
    await rig.append("t", 1)
    await rig.store.drop_topic("t", if_empty=False)
    await rig.checkpointer.take()
    boot = Boot(image=rig.snapshots.images[0])
    await boot.run()
    topic, _ = boot.registry.decide_create("t", TopicConfig(), 1)
    assert (topic.epoch, topic.topic_id) == (2, 2)


@pytest.mark.parametrize(
    ("durability", "stop", "head"),
    [
        (Durability.EPHEMERAL, CLEAN, 0),
        (Durability.EPHEMERAL, KILLED, HEAD_RESERVE_SEQS),
        (Durability.EPHEMERAL, POWER_CUT, HEAD_RESERVE_SEQS),
        (Durability.MEMORY, KILLED, 1),
        (Durability.DISK, KILLED, 1),
        (Durability.DISK, CLEAN, 1),
        (Durability.DISK, POWER_CUT, HEAD_RESERVE_SEQS),
        (Durability.MEMORY, POWER_CUT, HEAD_RESERVE_SEQS),
        (Durability.FSYNC, POWER_CUT, 1),
    ],
)
async def test_a_head_jumps_only_where_a_seq_may_have_been_handed_out_and_lost(
    durability: Durability, stop: Stop, head: int
) -> None:
    entries: list[tuple[int, Entry]] = [(1, created(1, "t", TopicConfig(durability=durability)))]
    if durability is not Durability.EPHEMERAL:
        entries.append((2, appended(1, 1, "a")))
    boot = Boot(*entries)
    found = await boot.run(stop)
    assert boot.head("t") == head
    assert found.heads_moved == (head == HEAD_RESERVE_SEQS)


async def test_flips_that_a_snapshot_holds_are_made_before_anybody_reads() -> None:
    rig = Rig()
    await rig.append("t", *range(8))
    topic = rig.registry.find("t")
    assert topic is not None
    await rig.sealer.tend(topic)
    await rig.delete("t", before_seq=3)
    await rig.checkpointer.take()
    assert topic.files.pending
    boot = Boot(image=rig.snapshots.images[0], segments=rig.segments)
    found = await boot.run()
    assert found.flips == 2
    assert rig.segments.kept[1][1].disk_flags[:3] == bytes([1, 1, 0])
    again = boot.registry.find("t")
    assert again is not None
    assert not again.files.pending


async def test_a_delete_in_the_journal_is_flipped_too() -> None:
    rig = Rig()
    await rig.append("t", *range(8))
    topic = rig.registry.find("t")
    assert topic is not None
    await rig.sealer.tend(topic)
    await rig.delete("t", before_seq=3)
    entries = [(item.lsn, item.entry) for item in rig.journal.submitted]
    assert (await Boot(*entries, segments=rig.segments).run()).flips == 2


async def test_the_folder_of_a_dropped_topic_is_removed() -> None:
    rig = Rig()
    await rig.append("t", *range(8))
    topic = rig.registry.find("t")
    assert topic is not None
    await rig.sealer.tend(topic)
    boot = Boot((1, rig.journal.entries[0]), (2, TopicDropped(1, "t", 1)), segments=rig.segments)
    found = await boot.run()
    assert found.folders_removed == 1
    assert rig.segments.kept == {}


async def test_a_folder_that_nobody_knows_refuses_start_and_stays() -> None:
    rig = Rig()
    await rig.append("t", *range(8))
    topic = rig.registry.find("t")
    assert topic is not None
    await rig.sealer.tend(topic)
    with pytest.raises(StartRefused, match="topic 1"):
        await Boot(segments=rig.segments).run()
    assert 1 in rig.segments.kept


async def test_a_missing_segment_refuses_start(monkeypatch: pytest.MonkeyPatch) -> None:
    segments = ListSegments()
    segments.kept[1] = {}
    missing = Objection("segments/1/0000000001.data", "a listed file is missing")
    report = FoundTopic(1, "segments/1/manifest", 1, objections=[missing])
    monkeypatch.setattr(segments, "open_topic", lambda topic_id, anchor=None: (report, []))
    with pytest.raises(StartRefused, match=r"0000000001\.data: a listed file is missing"):
        await Boot((1, created(1, "t")), segments=segments).run()
    # Files are checked after replay, because a topic dropped since then needs no files.
    dropped = Boot((1, created(1, "t")), (2, TopicDropped(1, "t", 1)), segments=segments)
    assert (await dropped.run()).folders_removed == 1


async def flagged_after_capture() -> tuple[Rig, SnapshotImage]:
    """A snapshot of eight sealed records; two of them got their flag on disk since then."""
    rig = Rig()
    await rig.append("t", *range(8))
    topic = rig.registry.find("t")
    assert topic is not None
    await rig.sealer.tend(topic)
    await rig.checkpointer.take()
    rig.segments.kept[1][1].disk_flags[:2] = b"\1\1"
    return rig, rig.snapshots.images[0]


async def test_flags_that_nothing_explains_damage_their_segment_until_they_are_right() -> None:
    rig, image = await flagged_after_capture()
    boot = Boot(image=image, segments=rig.segments)
    await boot.run()
    topic = boot.registry.find("t")
    assert topic is not None
    assert topic.files.untrusted == {1}
    assert (topic.log.live_count, boot.registry.damaged_records) == (0, 6)
    assert not topic.log.dead_segments(), "its file may be put back"
    again = TOPIC_PARTS.decode(capture(topic))
    assert again.flags == {1: tuple(anchor_of(TOPIC_PARTS.decode(dict(image.parts)[1])).flags[1])}
    rig.segments.kept[1][1].disk_flags[:2] = b"\0\0"
    part = (1, capture(topic))
    healed = Boot(image=msgspec.structs.replace(image, parts=[part]), segments=rig.segments)
    await healed.run()
    assert healed.registry.records_live == 8


async def test_a_replayed_delete_explains_flags() -> None:
    rig, image = await flagged_after_capture()
    seqs = (np.array([1], "<u8").tobytes(), np.array([2], "<u8").tobytes())
    boot = Boot((9, RecordsDeleted(1, 1, *seqs)), image=image, segments=rig.segments)
    await boot.run()
    assert boot.registry.records_live == 6


async def test_a_mended_journal_may_lack_the_deletes_that_explain_flags() -> None:
    rig, image = await flagged_after_capture()
    filling = (9, TopicDropped(0, "xxxx", 0))
    boot = Boot(filling, image=image, segments=rig.segments)
    await boot.run()
    assert boot.registry.records_live == 6


async def test_progress_goes_from_nothing_to_one() -> None:
    boot = Boot((1, created(1, "t")))
    assert boot.recovery.progress == 0.0
    await boot.run()
    assert boot.recovery.progress == 1.0


async def test_what_was_recovered_reads_as_before() -> None:
    rig = Rig()
    await rig.append("t", *range(5), tag="a")
    await rig.delete("t", before_seq=2)
    entries = [(item.lsn, item.entry) for item in rig.journal.submitted]
    boot = Boot(*entries)
    await boot.run()
    topic = boot.registry.find("t")
    assert topic is not None
    plan = plan_page(topic, ReadRequest(0, 100, 1 << 20), 1_000_000)
    page = await Rig().fetcher.complete(topic, plan)
    assert page is not None
    assert seqs_of(page) == seqs_of(await rig.read("t")) == [2, 3, 4, 5]


# # -- snapshot parts that are no topics ------------------------------------------------------

OPTIONS = SessionOptions([], 256, 262_144, 15_000, 6, False)


def watching(wid: str, *cursors: CursorAt) -> SessionOpened:
    return SessionOpened(wid, 5, OPTIONS, list(cursors))


async def test_watch_sessions_come_back_even_those_of_topics_that_are_gone() -> None:
    gone = CursorAt("gone", 9, 1, 4)
    boot = Boot(
        (1, created(1, "t")),
        (2, watching("kept", CursorAt("t", 1, 1, 0), gone)),
        (3, watching("closed")),
        (4, SessionMoved("kept", 7, True, [CursorAt("t", 1, 1, 3)])),
        (5, SessionsClosed(["closed"], 8)),
        (6, SessionMoved("closed", 9, True, [])),
    )
    found = await boot.run(KILLED)
    assert (found.last_lsn, found.entries, found.topics) == (6, 6, 1)
    (session,) = boot.sessions
    assert session.positions() == [CursorAt("t", 1, 1, 3), gone]
    assert session.is_streaming


async def test_captured_sessions_are_not_moved_back_by_what_they_have_already() -> None:
    table = SessionTable()
    table.apply(3, watching("w", CursorAt("t", 1, 1, 0)))
    session = table.find("w")
    assert session is not None
    session.lsn = 5
    session.cursors["t"].seq = 8
    parts = [(SESSIONS_ID, part) for part in table.capture()]
    boot = Boot(
        (4, SessionMoved("w", 7, True, [CursorAt("t", 1, 1, 2)])),
        (5, SessionMoved("w", 8, False, [CursorAt("t", 1, 1, 5)])),
        image=SnapshotImage(start_lsn=4, last_lsn=5, next_topic_id=1, parts=parts),
    )
    await boot.run()
    again = boot.sessions.find("w")
    assert again is not None
    assert again.positions() == [CursorAt("t", 1, 1, 8)]


async def test_a_part_of_an_unknown_reserved_id_refuses_start() -> None:
    image = SnapshotImage(
        start_lsn=1, last_lsn=0, next_topic_id=1, parts=[(RESERVED_ID_MIN, b"later")]
    )
    with pytest.raises(StartRefused, match="newer version"):
        await Boot(image=image).run()


async def test_sessions_that_cannot_be_read_refuse_start() -> None:
    image = SnapshotImage(start_lsn=1, last_lsn=0, next_topic_id=1, parts=[(SESSIONS_ID, b"\xc1")])
    with pytest.raises(StartRefused, match="not a part of the watch sessions"):
        await Boot(image=image).run()


# -- observers ------------------------------------------------------------------------------


async def test_who_observes_hears_every_entry_of_the_replay_and_what_it_did() -> None:
    entries: list[tuple[int, Entry]] = [
        (1, created(1, "t")),
        (2, appended(1, 1, "a", "b")),
        (3, SessionOpened("wid_a", 5, OPTIONS, [])),
        (4, RecordsDeleted(1, 6, (1).to_bytes(8, "little"), (1).to_bytes(8, "little"))),
        (5, appended(7, 1, "of a topic that is gone")),
    ]
    boot = Boot(*entries)
    await boot.run()
    assert [(lsn, entry) for lsn, entry, _ in boot.heard] == entries
    assert [applied.deleted for _, _, applied in boot.heard] == [0, 0, 0, 1, 0]


async def test_source_marks_are_collected_and_their_topics_ids_stay_used() -> None:
    body, _ = body_of("a")
    first, second = Source(1, [4]), Source(9, [1, 2], is_redrive=True)
    boot = Boot(
        (1, created(2, "dead")),
        (2, RecordsAppended(2, 1, 1, 2, body, source=first)),
        (3, RecordsAppended(5, 1, 1, 2, body, source=second)),
    )
    await boot.run()
    assert boot.recovery.marks == [first, second]
    # The creation of topic 9 was not synced, but the mark was: a new topic must not get its id.
    assert boot.registry.next_topic_id == 10


async def test_the_loop_does_other_things_while_much_is_replayed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The time for applying entries limits a turn of the loop, however many entries were read at
    once.
    """
    clock = [0.0]

    def monotonic_ms() -> float:
        clock[0] += 6.0
        return clock[0]

    monkeypatch.setattr(recovery, "monotonic_ms", monotonic_ms)
    boot = Boot((1, created(1, "t")), *((n, appended(1, n - 1, "a")) for n in range(2, 40)))
    seen: list[int] = []

    async def watch() -> None:
        while not seen or seen[-1] < 39:
            seen.append(boot.recovery.found.last_lsn)
            await asyncio.sleep(0)

    watching = asyncio.create_task(watch())
    await boot.run()
    await watching
    assert set(range(1, 40)) <= set(seen)


async def test_a_large_append_is_decoded_once_and_in_blocks() -> None:
    data = "x" * 3000
    boot = Boot((1, created(1, "t")), (2, appended(1, 1, *[data] * 600)), (3, appended(1, 601, 7)))
    await boot.run()
    topic = boot.registry.find("t")
    assert topic is not None
    assert boot.large_appends.process.started_count == 1
    assert [run.count for run in topic.log.tail()] == [256, 256, 88]
    assert topic.log.head_seq == 601
