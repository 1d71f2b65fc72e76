"""One node on a disk in memory: the order of start and stop, and the state after a refused
start.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest

from tests.storage.fake_disk import FakeDisk
from tests.unit.engine.rig import HandClock, body_of
from topics_server.engine.answers import ReadRequest
from topics_server.node.boot import Boot
from topics_server.node.ground import Ground
from topics_server.node.node import Node
from topics_server.runtime.thread_offload import ThreadOffload
from topics_server.settings import Settings
from topics_server.values.errors import StartRefused
from topics_server.values.limits import KIB, MIB
from topics_server.values.model import Durability, TopicConfig
from topics_server.wal.directory import read_format
from topics_server.wal.journal.sizing import journal_sizes
from topics_server.wal.journal.wal_file import Sizes
from topics_server.wal.journal.workers import BlockingWorker, InlineWorker
from topics_server.wal.segments.packing_process import InlinePacker

T = TypeVar("T")
pytestmark = pytest.mark.anyio

SMALL = Sizes(file_bytes=16_384, fill_step_bytes=4_096, reserve_bytes=1_024)


class NowOffload:
    """Runs blocking calls immediately."""

    async def run(self, call: Callable[[], T]) -> T:
        return call()


def workers(loop: asyncio.AbstractEventLoop) -> Callable[[str], BlockingWorker]:
    return lambda name: InlineWorker(loop, lambda: 0)


def opened(disk: FakeDisk, *, boot_id: str | None = None, **changes: object) -> Boot:
    """A store in `data`, not started."""
    fields: dict[str, object] = {
        "data_dir": Path("data"),
        "wal_shards": 2,
        "min_free_bytes": 0,
        "segment_max_events": 8,
        # Clients in the same process may use any host name.
        "allowed_hosts": "*",
        **changes,
    }
    ground = Ground.open(
        Settings(**fields),  # type: ignore[arg-type]
        64,
        fs=disk,
        clock=HandClock(),
        offload=NowOffload(),
        workers=workers,
        packer=InlinePacker(),
        boot_id=disk.boot_id if boot_id is None else boot_id,
        sizes=SMALL,
    )
    return Boot(ground)


async def started(disk: FakeDisk, *, boot_id: str | None = None, **changes: object) -> Node:
    """A node that is ready."""
    return await opened(disk, boot_id=boot_id, **changes).start()


async def append(node: Node, name: str, *datas: object, config: TopicConfig | None = None) -> int:
    """Append; return the last seq."""
    body, decoded = body_of(*datas)
    answer = await node.store.append(name, body, decoded, header_key=None, config=config)
    return answer.last_seq


async def count(node: Node, name: str) -> int:
    """The number of records of a read from the start."""
    page = await node.store.read(name, ReadRequest(0, 1000, 1 << 20))
    return sum(len(piece.rows) for piece in page.pieces)


def clean_mark(disk: FakeDisk) -> bool:
    mark = read_format(disk, "data")
    assert mark is not None
    return mark.clean_stop


@pytest.fixture
def disk() -> FakeDisk:
    return FakeDisk(1)


# -- start ----------------------------------------------------------------------------------


async def test_a_node_is_replaying_until_it_is_ready_and_has_no_store_before(
    disk: FakeDisk,
) -> None:
    boot = opened(disk)
    assert (boot.state.phase, boot.state.store) == ("replaying", None)
    assert boot.state.shards() == ()
    node = await boot.start()
    assert [node.state.phase] == ["ready"]
    assert node.state.store is node.store
    assert node.state.progress() == 1.0
    await node.close()


async def test_a_node_that_is_told_to_drain_while_it_starts_stays_draining(
    disk: FakeDisk,
) -> None:
    boot = opened(disk)
    boot.begin_drain()
    await boot.start()
    assert boot.state.phase == "draining"
    await boot.close()


async def test_a_second_node_on_the_directory_is_refused_and_names_the_first(
    disk: FakeDisk,
) -> None:
    node = await started(disk)
    with pytest.raises(StartRefused, match="pid"):
        opened(disk)
    await node.close()
    opened(disk).abandon()


async def test_a_folder_with_other_files_is_refused_and_left_alone(disk: FakeDisk) -> None:
    disk.make_dir("data")
    disk.open("data/thesis.txt", create=True).close()
    with pytest.raises(StartRefused, match=r"thesis\.txt"):
        opened(disk)
    assert disk.list_dir("data") == ["thesis.txt"]


async def test_what_was_written_is_there_after_a_clean_stop_and_after_a_kill(
    disk: FakeDisk,
) -> None:
    node = await started(disk)
    await append(node, "t", 1, 2)
    node.begin_drain()
    await node.close()
    node = await started(disk)
    assert await append(node, "t", 3) == 3
    disk.crash("kill")
    disk = disk.reopen()
    node = await started(disk)
    assert await count(node, "t") == 3
    assert await append(node, "t", 4) == 4
    assert "1 topics" in node.report
    await node.close()


async def test_the_clean_stop_mark_is_set_last_and_removed_first(disk: FakeDisk) -> None:
    node = await started(disk)
    await append(node, "t", 1)
    assert not clean_mark(disk)
    await node.close()
    last = disk.log[-2:]
    assert clean_mark(disk)
    assert last == [("rename", "data/FORMAT"), ("sync_dir", "data")]
    node = await started(disk)
    assert not clean_mark(disk)
    await node.close()


async def test_a_snapshot_that_cannot_be_taken_at_the_end_leaves_the_stop_unclean(
    disk: FakeDisk,
) -> None:
    node = await started(disk)
    await append(node, "t", 1)
    disk.fail("write", "enospc", path="data/snapshots/*", times=None)
    await node.close()
    assert not clean_mark(disk)
    disk.heal()
    node = await started(disk)
    assert await count(node, "t") == 1, "the journal has it"
    await node.close()


async def test_heads_that_jumped_are_published_before_the_boot_is_noted(disk: FakeDisk) -> None:
    node = await started(disk)
    await append(node, "t", 1)
    await node.journal.sync_all()
    disk.crash("power")
    disk = disk.reopen()
    before = len(disk.log)
    node = await started(disk)
    paths = [path for op, path in disk.log[before:] if op == "rename"]
    published = next(n for n, path in enumerate(paths) if "snapshots" in path)
    noted = max(n for n, path in enumerate(paths) if path.endswith("FORMAT"))
    assert published < noted
    assert "heads moved" in node.report
    await node.close()


async def test_the_number_of_shards_may_change_between_starts(disk: FakeDisk) -> None:
    for shards in (2, 1, 3):
        node = await started(disk, wal_shards=shards)
        assert node.journal.shard_count == shards
        for name in ("a", "b", "c"):
            await append(node, name, shards)
        disk.crash("kill")
        disk = disk.reopen()
    node = await started(disk, wal_shards=2)
    assert [await count(node, name) for name in ("a", "b", "c")] == [3, 3, 3]
    await node.close()


async def test_a_refused_start_writes_no_snapshot_and_sets_no_mark(disk: FakeDisk) -> None:
    node = await started(disk)
    await append(node, "t", *range(8))
    await node.journal.sync_all()
    await node.sealer.seal_tails(1)
    await node.close()
    name = next(path for path in disk.list_dir("data/segments/1") if path.endswith(".data"))
    disk.rename(f"data/segments/1/{name}", "data/segments/1/aside")
    snapshots = disk.list_dir("data/snapshots")
    boot = opened(disk)
    with pytest.raises(StartRefused, match=name):
        await boot.start()
    await boot.close()
    assert disk.list_dir("data/snapshots") == snapshots
    disk.rename("data/segments/1/aside", f"data/segments/1/{name}")
    node = await started(disk)
    assert await count(node, "t") == 8
    await node.close()


async def test_a_refused_start_does_not_turn_a_clean_stop_into_a_loss(disk: FakeDisk) -> None:
    node = await started(disk)
    await append(node, "t", *range(8))
    await node.journal.sync_all()
    await node.sealer.seal_tails(1)
    await node.close()
    name = next(path for path in disk.list_dir("data/segments/1") if path.endswith(".data"))
    disk.rename(f"data/segments/1/{name}", "data/segments/1/aside")
    # The machine was restarted, and the disk with this file was not mounted yet.
    boot = opened(disk, boot_id="boot-2")
    with pytest.raises(StartRefused):
        await boot.start()
    await boot.close()
    disk.rename("data/segments/1/aside", f"data/segments/1/{name}")
    node = await started(disk, boot_id="boot-2")
    assert node.store.state("t", touch=False).head_seq == 8
    await node.close()


@pytest.mark.parametrize("shards", [1, 4, 64])
@pytest.mark.parametrize("total_mib", [1, 64, 1 << 10, 1 << 20])
async def test_journal_files_leave_most_of_a_small_disk_alone(total_mib: int, shards: int) -> None:
    whole = Sizes()
    sizes = journal_sizes(total_mib * MIB, shards)
    assert sizes.reserve_bytes < sizes.fill_step_bytes < sizes.file_bytes
    assert all(size <= most for size, most in zip(sizes, whole, strict=True))
    smallest = Sizes(256 * KIB, 128 * KIB, 32 * KIB)
    ahead_bytes = sizes.fill_step_bytes + sizes.reserve_bytes
    if sizes.fill_step_bytes > smallest.fill_step_bytes:
        # The filled and reserved bytes of all shards.
        assert ahead_bytes * shards <= total_mib * MIB // 16
        assert sizes.file_bytes * shards <= total_mib * MIB // 10
    if total_mib == 1:
        assert sizes == smallest
    if total_mib == 1 << 20:
        assert sizes == whole


# -- running ----------------------------------------------------------------------------------


async def test_appends_stop_while_the_disk_is_nearly_full(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("topics_server.wal.disk_space._CHECK_S", 0.0)
    disk = FakeDisk(1, capacity_bytes=1 << 20)
    with caplog.at_level(logging.WARNING, "topics_server"):
        node = await started(disk, min_free_bytes=2 << 20)
        await asyncio.sleep(0.01)
        low = [node.store.is_disk_low]
        disk.capacity_bytes = 8 << 20
        await asyncio.sleep(0.01)
        assert [*low, node.store.is_disk_low] == [True, False]
    messages = [record.getMessage() for record in caplog.records]
    assert [text.rsplit(": ", 1)[1] for text in messages if "appends need" in text] == [
        "refused",
        "accepted again",
    ]
    await node.close()


async def test_background_work_that_ends_is_a_defect_and_leaves_a_traceback(
    disk: FakeDisk, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(space: object, *, was_refused: bool) -> int:
        raise ArithmeticError("a defect")

    monkeypatch.setattr("topics_server.wal.disk_space.Space._look", broken)
    with caplog.at_level(logging.ERROR, "topics_server"):
        node = await started(disk)
        await asyncio.sleep(0.01)
    assert [record.exc_info is not None for record in caplog.records] == [True]
    await node.close()


async def test_a_shards_figures_are_told_once_there_is_a_journal(disk: FakeDisk) -> None:
    node = await started(disk)
    await append(node, "t", 1, config=TopicConfig(durability=Durability.FSYNC))
    facts = node.state.shards()
    assert len(facts) == 2
    assert sum(fact.frames for fact in facts) >= 1
    assert sum(fact.syncs for fact in facts) >= 1
    assert not any(fact.read_only for fact in facts)
    await node.close()


async def test_a_draining_node_answers_waiting_calls(disk: FakeDisk) -> None:
    node = await started(disk)
    await append(node, "t", 1)
    waiting = asyncio.create_task(node.store.read("t", ReadRequest(1, 10, 1 << 20, wait_ms=60_000)))
    await asyncio.sleep(0)
    node.begin_drain()
    assert node.state.phase == "draining"
    assert (await waiting).is_empty
    await node.close()


@pytest.mark.anyio
async def test_a_call_whose_caller_was_cancelled_is_waited_for() -> None:
    """Otherwise the final snapshot could be written while another one is still being written."""
    offload = ThreadOffload()
    may_end, has_begun = threading.Event(), threading.Event()

    def call() -> None:
        has_begun.set()
        assert may_end.wait(10)

    caller = asyncio.create_task(offload.run(call))
    await asyncio.to_thread(has_begun.wait, 10)
    caller.cancel()
    await asyncio.gather(caller, return_exceptions=True)
    idle = asyncio.create_task(offload.idle())
    await asyncio.sleep(0.02)
    assert not idle.done()
    may_end.set()
    await asyncio.wait_for(idle, 10)
    await asyncio.wait_for(offload.idle(), 1)
    offload.close()
