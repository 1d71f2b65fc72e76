"""Checkpoints: where replay starts, what is synced before they count, and what is trimmed."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from types import FrameType
from typing import TypeVar

import msgspec
import pytest

from tests.unit.engine.rig import RULES, NowOffload, Rig
from topics_server.engine.background import checkpointer as checkpointer_module
from topics_server.engine.background.capture import Captured, capture, restore
from topics_server.engine.background.checkpointer import SEAL_BEFORE_CAPTURE_BYTES, Checkpointer
from topics_server.engine.subscribe import sessions as sessions_module
from topics_server.engine.subscribe.sessions import SessionTable
from topics_server.engine.topic.topic import Topic
from topics_server.engine.topic.writes.configure import decide_drop
from topics_server.values.entries import SESSIONS_ID, CursorAt, SessionOpened, SessionOptions
from topics_server.values.errors import StorageError
from topics_server.values.model import Durability, TopicConfig
from topics_server.values.storage_types import (
    EPOCHS_PART,
    SESSIONS_PART,
    TOPIC_PARTS,
    SnapshotImage,
)

pytestmark = pytest.mark.anyio

T = TypeVar("T")


def parts_of(image: SnapshotImage) -> dict[int, bytes]:
    return {part_id: bytes(part) for part_id, part in image.parts}


async def test_a_snapshot_holds_every_topic_and_the_epochs_of_dropped_names() -> None:
    rig = Rig()
    for name in ("a", "b"):
        await rig.append(name, 1)
    await rig.store.drop_topic("a", if_empty=False)
    await rig.checkpointer.take()
    (image,) = rig.snapshots.images
    assert set(parts_of(image)) == {EPOCHS_PART, 2}
    assert restore(TOPIC_PARTS.decode(parts_of(image)[2]), []).log.head_seq == 1
    assert (image.last_lsn, image.next_topic_id) == (rig.commits.next_lsn - 1, 3)


async def test_replay_starts_at_the_oldest_entry_that_was_not_applied() -> None:
    rig = Rig(is_prompt=False)
    asked = asyncio.create_task(rig.append("a", 1))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    await rig.checkpointer.take()
    assert rig.snapshots.images[0].start_lsn == 1
    assert (await asked).created
    await rig.checkpointer.take()
    assert rig.snapshots.images[1].start_lsn == 2, "one past the last entry"


async def test_everything_captured_is_synced_before_the_snapshot_is_published() -> None:
    rig = Rig()
    await rig.append("a", 1)
    await rig.checkpointer.take()
    assert rig.journal.events == ["sync_all", "publish"]


async def test_the_journal_is_trimmed_to_the_older_snapshot_only() -> None:
    rig = Rig()
    starts = []
    for data in range(3):
        await rig.append("a", data)
        await rig.checkpointer.take()
        starts.append(rig.snapshots.images[-1].start_lsn)
    assert rig.journal.trimmed == starts[:2]
    assert rig.checkpointer.trim_lsn == starts[1]


async def test_a_read_only_shard_keeps_its_journal_and_the_others_are_trimmed() -> None:
    rig = Rig()
    await rig.append("a", 1)
    await rig.checkpointer.take()
    await rig.append("a", 2)
    rig.journal.read_only.append(0)
    for data in range(3):
        await rig.append("a", data)
        await rig.checkpointer.take()
    images = rig.snapshots.images
    before = images[0]
    for image in images[1:]:
        starts = {each.shard: each.start_lsn for each in image.shards}
        assert starts.pop(0) == before.start_lsn, "what it had in flight is looked at again"
        assert set(starts.values()) <= {image.start_lsn}
    assert images[-1].start_lsn > before.start_lsn
    assert rig.journal.trimmed == [image.start_lsn for image in images[:-1]]


async def test_a_shard_that_was_read_only_before_any_snapshot_is_replayed_whole() -> None:
    rig = Rig()
    rig.journal.read_only.append(0)
    await rig.append("a", 1)
    await rig.checkpointer.take()
    (image,) = rig.snapshots.images
    assert [each.start_lsn for each in image.shards if each.shard == 0] == [0]


async def test_topics_that_did_not_move_are_not_encoded_again() -> None:
    rig = Rig()
    await rig.append("still", 1)
    await rig.append("busy", 1)
    await rig.checkpointer.take()
    await rig.append("busy", 2)
    await rig.checkpointer.take()
    first, second = map(parts_of, rig.snapshots.images)
    assert second[1] is first[1]
    assert second[2] is not first[2]


class MeanwhileOffload(NowOffload):
    """Calls `meanwhile` once, after the first call that encodes a part."""

    def __init__(self, meanwhile: Callable[[], Awaitable[object]]) -> None:
        self.meanwhile: Callable[[], Awaitable[object]] | None = meanwhile
        self.encoded = 0

    async def run(self, call: Callable[[], T]) -> T:
        if not isinstance(getattr(call, "__self__", None), Captured):
            return call()
        self.encoded += 1
        result = call()
        if self.meanwhile is not None:
            meanwhile, self.meanwhile = self.meanwhile, None
            await meanwhile()
        return result


@pytest.mark.parametrize("datas", [(0,) * 3_000, ("x" * 40_000,) * 2], ids=["many", "large"])
async def test_a_long_tail_is_encoded_off_the_loop_as_it_was_and_again_the_next_time(
    datas: tuple[object, ...],
) -> None:
    rig = Rig(rules=msgspec.structs.replace(RULES, max_records=100_000))
    await rig.append("short", 1)
    await rig.append("long", *datas)
    offload = MeanwhileOffload(lambda: rig.append("long", "meanwhile"))
    rig.checkpointer._offload = offload
    for extra in (0, 1):
        await rig.checkpointer.take()
        part = parts_of(rig.snapshots.images[-1])[2]
        assert restore(TOPIC_PARTS.decode(part), []).log.head_seq == len(datas) + extra
    assert offload.encoded == 2, "only the long one, and each time"


async def test_a_long_tail_of_an_ephemeral_topic_is_not_in_its_part() -> None:
    rig = Rig()
    await rig.append("t", *range(3_000), config=TopicConfig(durability=Durability.EPHEMERAL))
    offload = MeanwhileOffload(lambda: rig.append("t", 1))
    rig.checkpointer._offload = offload
    await rig.checkpointer.take()
    assert offload.encoded == 0


async def test_a_topic_that_was_sealed_or_flipped_is_encoded_again() -> None:
    rig = Rig()
    await rig.append("t", *range(8))
    await rig.checkpointer.take()
    topic = rig.registry.find("t")
    assert topic is not None
    await rig.sealer.tend(topic)
    await rig.checkpointer.take()
    first, second = map(parts_of, rig.snapshots.images)
    assert len(second[1]) < len(first[1]), "the records are in the segment now"


async def test_large_tails_are_sealed_first_unless_the_server_is_stopping() -> None:
    rig = Rig()
    await rig.append("t", *["x" * (SEAL_BEFORE_CAPTURE_BYTES // 2)] * 2)
    await rig.checkpointer.take(final=True)
    assert "put 1" not in rig.journal.events
    await rig.checkpointer.take()
    assert rig.journal.events[-3:] == ["put 1", "sync_all", "publish"]


async def test_a_snapshot_that_cannot_be_published_trims_nothing() -> None:
    rig = Rig()
    await rig.append("a", 1)
    await rig.checkpointer.take()
    rig.snapshots.fault = StorageError("no room")
    with pytest.raises(StorageError):
        await rig.checkpointer.take()
    assert (rig.journal.trimmed, rig.checkpointer.taken_count) == ([], 1)
    rig.snapshots.fault = None
    await rig.checkpointer.take()
    assert rig.checkpointer.taken_count == 2


async def test_nothing_is_published_of_a_memory_that_may_be_wrong() -> None:
    rig = Rig()
    await rig.append("a", 1)
    rig.commits.is_broken = True
    with pytest.raises(StorageError):
        await rig.checkpointer.take()
    assert rig.snapshots.images == []


async def test_a_topic_dropped_between_two_slices_is_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("topics_server.engine.background.checkpointer.CAPTURE_SLICE_MS", 0)
    rig = Rig()
    for name in ("a", "b"):
        await rig.append(name, 1)
    taking = asyncio.create_task(rig.checkpointer.take())
    await asyncio.sleep(0)
    topic = rig.registry.find("b")
    assert topic is not None
    rig.registry.apply(99, decide_drop(topic, 1))
    await taking
    assert set(parts_of(rig.snapshots.images[0])) == {EPOCHS_PART, 1}


async def test_what_a_turn_reads_is_answered_before_the_next_slice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("topics_server.engine.background.checkpointer.CAPTURE_SLICE_MS", 0)
    rig = Rig()
    for name in "abc":
        await rig.append(name, 1)
    loop, slices = asyncio.get_running_loop(), 0
    order: list[str] = []

    def noted(topic: Topic) -> bytes:
        nonlocal slices
        slices += 1
        part = slices
        # Like the loop, which reads requests after the callbacks of a turn.
        loop.call_soon(loop.call_soon, order.append, f"answer {part}")
        order.append(f"slice {part}")
        return capture(topic)

    monkeypatch.setattr(checkpointer_module, "capture", noted)
    await rig.checkpointer.take()
    assert order[:5] == ["slice 1", "answer 1", "slice 2", "answer 2", "slice 3"]


async def test_room_is_made_for_all_parts_also_for_those_encoded_off_the_loop() -> None:
    rig = Rig()
    for name in ("a", "b"):
        await rig.append(name, 1)
    await rig.append("long", *["x" * 1000] * 100)
    sizes: list[int] = []

    async def make_room(size: int) -> None:
        sizes.append(size)

    rig.checkpointer.make_room = make_room
    await rig.checkpointer.take(final=True)
    (image,) = rig.snapshots.images
    assert max(len(part) for _, part in image.parts) > 100_000
    assert sizes == [sum(len(part) for _, part in image.parts)]


async def test_no_turn_of_a_checkpoint_goes_through_all_topics(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("topics_server.engine.background.checkpointer.CAPTURE_SLICE_MS", 0)
    topics = 500
    rig = Rig()
    for number in range(topics):
        await rig.append(str(number), 1)
    rig.checkpointer.make_room = lambda size: asyncio.sleep(0)
    loop, calls, longest = asyncio.get_running_loop(), 0, 0
    is_over = False

    def count(frame: FrameType, event: str, value: object) -> None:
        nonlocal calls
        calls += frame.f_code.co_filename == checkpointer_module.__file__

    def turn() -> None:
        nonlocal calls, longest
        longest, calls = max(longest, calls), 0
        if not is_over:
            loop.call_soon(turn)

    turn()
    sys.setprofile(count)
    try:
        await rig.checkpointer.take()
    finally:
        sys.setprofile(None)
    is_over = True
    assert len(rig.snapshots.images[0].parts) == topics + 1
    assert 0 < longest < topics


async def test_two_checkpoints_are_taken_one_after_the_other() -> None:
    rig = Rig()
    await rig.append("a", 1)
    await asyncio.gather(rig.checkpointer.take(), rig.checkpointer.take())
    assert rig.journal.events == ["sync_all", "publish"] * 2


async def run_for(rig: Rig, journaled: list[int], interval_ms: int, max_bytes: int) -> None:
    """Let the timer run a few times."""
    running = asyncio.create_task(
        rig.checkpointer.run(interval_ms, max_bytes, lambda: journaled[0], lambda: False)
    )
    for _ in range(10):
        await asyncio.sleep(0.001)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_nothing_is_taken_while_nothing_is_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("topics_server.engine.background.checkpointer._POLL_MS", 0)
    rig = Rig()
    await rig.append("a", 1)
    await run_for(rig, [0], 0, 1)
    assert rig.checkpointer.taken_count == 1
    await run_for(rig, [0], 0, 1)
    assert rig.checkpointer.taken_count == 1


async def test_one_is_due_after_so_many_bytes_or_so_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("topics_server.engine.background.checkpointer._POLL_MS", 0)
    rig = Rig()
    await rig.append("a", 1)
    await run_for(rig, [0], 60_000, 100)
    assert rig.checkpointer.taken_count == 0
    journaled = [0]
    running = asyncio.create_task(
        rig.checkpointer.run(60_000, 100, lambda: journaled[0], lambda: False)
    )
    await asyncio.sleep(0)
    journaled[0] = 100
    await asyncio.sleep(0.01)
    assert rig.checkpointer.taken_count == 1
    await rig.append("a", 2)
    rig.clock.move(60_000)
    await asyncio.sleep(0.01)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert rig.checkpointer.taken_count == 2


async def test_a_failed_checkpoint_ends_no_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("topics_server.engine.background.checkpointer._POLL_MS", 0)
    rig = Rig()
    await rig.append("a", 1)
    rig.snapshots.fault = StorageError("no room")
    running = asyncio.create_task(rig.checkpointer.run(0, 1, lambda: 0, lambda: False))
    await asyncio.sleep(0.005)
    rig.snapshots.fault = None
    await asyncio.sleep(0.01)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert rig.checkpointer.taken_count == 1


# # -- snapshot parts that are no topics ------------------------------------------------------


def with_sessions(rig: Rig, count: int) -> SessionTable:
    """Let the rig's checkpoints capture this many sessions of one cursor each."""
    table = SessionTable()
    for number in range(count):
        options = SessionOptions([], 1, 1, 1, 4, False)
        table.open(SessionOpened(f"w{number}", 1, options, [CursorAt("t", 1, 1, 0)]))
    rig.checkpointer = Checkpointer(
        rig.registry,
        rig.commits,
        rig.journal,
        rig.snapshots,
        NowOffload(),
        rig.clock,
        rig.sealer.seal_tails,
        {SESSIONS_ID: table},
    )
    return table


async def test_every_checkpoint_shows_the_sessions_as_they_are_now() -> None:
    rig = Rig()
    table = with_sessions(rig, 1)
    session = table.find("w0")
    assert session is not None
    table.begin(session)
    for seq in (0, 7, 9):
        session.cursors["t"].seq = seq
        await rig.checkpointer.take()
        again = SessionTable()
        again.restore(parts_of(rig.snapshots.images[-1])[SESSIONS_PART])
        found = again.find("w0")
        assert found is not None
        assert found.cursors["t"].seq == seq


async def test_a_cursor_that_moves_makes_no_checkpoint_due(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("topics_server.engine.background.checkpointer._POLL_MS", 0)
    rig = Rig()
    table = with_sessions(rig, 1)
    await rig.append("a", 1)
    await run_for(rig, [0], 0, 1)
    session = table.find("w0")
    assert session is not None
    session.cursors["t"].seq = 3
    await run_for(rig, [0], 0, 1)
    assert rig.checkpointer.taken_count == 1


async def test_what_says_that_it_has_moved_makes_one_checkpoint_due(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("topics_server.engine.background.checkpointer._POLL_MS", 0)
    rig = Rig()
    with_sessions(rig, 1)
    await rig.append("a", 1)
    await run_for(rig, [0], 0, 1)
    rig.checkpointer.moved(1)
    await run_for(rig, [0], 0, 1)
    assert rig.checkpointer.taken_count == 1, "of a topic the journal has an entry"
    rig.checkpointer.moved(SESSIONS_ID)
    await run_for(rig, [0], 0, 1)
    assert rig.checkpointer.taken_count == 2


async def test_the_journal_is_kept_until_it_may_be_trimmed() -> None:
    rig = Rig()
    for number in range(2):
        await rig.append("a", number)
        await rig.checkpointer.take(trim=False)
    assert rig.journal.trimmed == []
    rig.checkpointer.trim()
    assert rig.journal.trimmed == [rig.snapshots.images[0].start_lsn]


async def test_many_sessions_are_captured_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("topics_server.engine.background.checkpointer.CAPTURE_SLICE_MS", 0)
    monkeypatch.setattr(sessions_module, "_PART_CURSORS", 4)
    rig = Rig()
    with_sessions(rig, 10)
    await rig.append("a", 1)
    turns = 0
    taking = asyncio.create_task(rig.checkpointer.take())
    while not taking.done():
        turns += 1
        await asyncio.sleep(0)
    ids = [part_id for part_id, _ in rig.snapshots.images[0].parts]
    assert ids == [EPOCHS_PART, *[SESSIONS_PART] * 5, 1]
    assert turns > 5
