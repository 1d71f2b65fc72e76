"""A shard's promises, one by one: gates, full disks, failed syncs, rotation, the reserve."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from tests.garbage import nothing_for_the_collector
from tests.storage.fake_disk import FakeDisk
from tests.storage.journal.journal_rig import SMALL, WAL, Life, append, new_disk
from topics_server.values.entries import Entry, RecordsDeleted
from topics_server.values.errors import Code, ReadOnly
from topics_server.values.limits import KIB, LOOP_WRITE_BYTES_MAX, SHARD_QUEUE_BYTES_MAX
from topics_server.values.storage_types import ReplayStart, ShardProgress
from topics_server.wal.journal import wal_file as tail_module
from topics_server.wal.journal.end_mark_file import read_end_mark
from topics_server.wal.journal.wal_file import Sizes
from topics_server.wal.journal.wal_writer import WriterState
from topics_server.wal.journal.writer_jobs import MakeRoom, SyncOnly

WAL_FILES = f"{WAL}/*.wal"


def started(disk: FakeDisk, *, shards: int = 1, turns: int = 1) -> Life:
    """A life whose shards have prepared their files, so that the loop writes small groups."""
    life = Life(disk, shards=shards, turns=lambda: turns)
    life.recover()
    life.settle()
    disk.log.clear()
    return life


def of_journal(disk: FakeDisk) -> list[str]:
    """The operations on journal files since `started`, without end marks."""
    return [op for op, path in disk.log if path.endswith(".wal")]


def delete(lsn: int) -> RecordsDeleted:
    run = lsn.to_bytes(8, "little")
    return RecordsDeleted(0, 1, run, run)


def test_a_turn_is_one_group_and_one_write_from_the_loop() -> None:
    life = started(new_disk(1))
    for seq in range(5):
        life.submit(append(0, seq))
    assert life.disk.log == []
    life.turn(2)
    assert of_journal(life.disk) == ["write"]
    assert [p.written_lsn for p in life.progress] == [5]
    assert life.progress[0].synced_lsn == 0
    assert life.journal.shards[0].counters.loop_groups == 1
    life.close()


def test_entries_that_want_a_sync_share_one() -> None:
    life = started(new_disk(1))
    for seq in range(5):
        life.submit(append(0, seq), sync=seq % 2 == 0)
    life.settle()
    assert [op for op, _ in life.disk.log if op == "sync"] == ["sync"]
    assert life.progress[-1].synced_lsn == 5
    life.close()


def test_a_mark_behind_the_last_sync_says_how_far_it_reached() -> None:
    disk = new_disk(1)
    life = started(disk)
    life.submit(append(0, 1), sync=True)
    life.settle()
    assert of_journal(disk) == ["write", "sync", "write"]
    life.settle()
    assert len(of_journal(disk)) == 3, "a mark is not followed by another"
    life.close()


def test_a_large_group_is_left_to_the_worker() -> None:
    life = started(new_disk(1))
    body = b"x" * (LOOP_WRITE_BYTES_MAX + 1)
    life.submit(append(0, 1, body))
    life.settle()
    counters = life.journal.shards[0].counters
    assert (counters.groups, counters.loop_groups) == (1, 0)
    again = Life(life.die("kill"), life.promises, shards=1)
    assert again.recover("kill")[1] == append(0, 1, body)
    again.close()


def test_what_is_submitted_during_a_sync_waits_and_shares_the_next() -> None:
    life = started(new_disk(1), turns=20)
    life.submit(append(0, 1), sync=True)
    life.turn(2)
    for seq in range(2, 6):
        life.submit(append(0, seq), sync=True)
        life.turn()
    assert life.journal.shards[0].queue_depth == 4
    life.settle()
    assert life.journal.shards[0].counters.syncs == 2
    assert life.progress[-1].synced_lsn == 5
    life.close()


def test_files_rotate_and_an_entry_larger_than_a_file_gets_its_own() -> None:
    life = started(new_disk(3))
    for seq in range(1, 20):
        life.submit(append(0, seq, b"y" * 3_000))
        life.turn(3)
    life.submit(append(0, 20, b"z" * 40_000))
    life.settle()
    assert life.journal.shards[0].tail.rotations >= 4
    again = Life(life.die("kill"), life.promises, shards=1)
    assert len(again.recover("kill")) == 20
    again.close()


def test_a_refused_write_is_undone_answered_and_forgotten() -> None:
    disk = new_disk(2)
    life = started(disk)
    life.submit(append(0, 1), sync=True)
    life.settle()
    disk.fail("write", "enospc", path=WAL_FILES)
    failed = life.submit(append(0, 2))
    life.turn(2)
    # Appends are refused until the loop has undone the failed one; then they are accepted again,
    # because there is room.
    life.settle()
    failure = next(p for p in life.progress if p.failed_from is not None)
    assert (failure.failed_from, failure.error) == (failed, "disk_full")
    assert life.journal.shards[0].state is WriterState.OPEN
    kept = life.submit(append(0, 3), sync=True)
    life.settle()
    again = Life(life.die("power"), life.promises, shards=1)
    assert set(again.recover("power")) == {1, kept}
    again.close()


def test_a_full_disk_refuses_appends_but_takes_deletes_from_the_reserve() -> None:
    disk = new_disk(4)
    life = started(disk)
    disk.capacity_bytes = disk.used_bytes()
    accepted = 0
    for seq in range(1, 200):
        if life.submit(append(0, seq, b"w" * 400)) is not None:
            accepted += 1
        life.turn(4)
    assert 0 < accepted < 100
    assert life.journal.shards[0].state is WriterState.FULL
    assert life.refused[-1].code is Code.THROTTLED
    assert life.refused[-1].detail == {"limit": "disk"}
    deletes = [life.submit(delete(lsn), urgent=True, sync=True) for lsn in range(5)]
    life.settle()
    assert None not in deletes
    assert life.progress[-1].synced_lsn == deletes[-1]
    disk.capacity_bytes = None
    life.journal.shards[0]._probe()
    life.settle()
    assert life.submit(append(0, 999), sync=True) is not None
    life.settle()
    again = Life(life.die("power"), life.promises, shards=1)
    assert set(deletes) <= set(again.recover("power"))
    again.close()


def test_a_failed_sync_makes_the_shard_read_only_and_its_neighbour_not() -> None:
    disk = new_disk(5)
    life = started(disk, shards=2)
    written = life.submit(append(0, 1))
    life.turn(2)
    waiting = life.submit(append(0, 2), sync=True)
    disk.fail("sync", "eio", path=f"{WAL}/000001-00-*")
    life.settle()
    failure = next(p for p in life.progress if p.failed_from is not None)
    assert (failure.error, failure.failed_from) == ("read_only", waiting)
    assert written is not None
    assert failure.written_lsn >= written
    assert life.journal.read_only_shards() == [0]
    assert life.submit(append(0, 3), urgent=True) is None
    assert life.refused[-1].code is Code.STORAGE_READ_ONLY
    assert life.submit(append(1, 1), sync=True) is not None
    life.settle()
    with pytest.raises(ReadOnly):
        life.loop.run_until_complete(life.journal.sync_all())
    life.close()


def test_a_failed_background_sync_fails_no_answered_entry() -> None:
    disk = new_disk(6)
    life = started(disk)
    last = life.submit(append(0, 1))
    life.turn(2)
    disk.fail("sync", "eio", path=WAL_FILES)
    with pytest.raises(ReadOnly):
        life.loop.run_until_complete(life.journal.sync_all())
    failure = next(p for p in life.progress if p.failed_from is not None)
    assert last is not None
    assert failure.failed_from == last + 1
    life.end()


def test_a_write_that_cannot_be_cut_back_makes_the_shard_read_only() -> None:
    disk = new_disk(7)
    life = started(disk)
    life.submit(append(0, 1))
    disk.fail("write", "eio", path=WAL_FILES, times=None)
    disk.fail("truncate", "eio", path=WAL_FILES)
    life.settle()
    assert life.journal.read_only_shards() == [0]
    life.end()


def test_room_is_given_back_where_even_zeros_are_refused() -> None:
    disk = new_disk(8)
    life = started(disk)
    life.submit(append(0, 1), sync=True)
    life.settle()
    disk.fail("write", "enospc", path=WAL_FILES, times=2)
    life.submit(append(0, 2))
    life.settle()
    kept = life.submit(append(0, 3), sync=True)
    life.settle()
    again = Life(life.die("power"), life.promises, shards=1)
    assert set(again.recover("power")) == {1, kept}
    again.close()


def test_too_many_open_files_is_a_full_disk() -> None:
    disk = new_disk(9)
    life = started(disk)
    disk.fail("open", "emfile", times=None)
    for seq in range(1, 100):
        life.submit(append(0, seq, b"v" * 900))
        life.turn(4)
    assert life.refused[-1].detail == {"limit": "disk"}
    assert life.journal.read_only_shards() == []
    life.end()


def test_a_folder_that_cannot_be_opened_is_no_failed_sync() -> None:
    disk = new_disk(9)
    life = started(disk)
    disk.fail("sync_dir", "emfile", times=None)
    for seq in range(1, 100):
        life.submit(append(0, seq, b"v" * 900))
        life.turn(4)
    assert life.refused[-1].detail == {"limit": "disk"}
    assert life.journal.read_only_shards() == []
    # That needs no restart: it works as soon as descriptors are available again.
    disk.heal()
    life.settle()
    life.loop.run_until_complete(asyncio.sleep(1.5))
    assert life.submit(append(0, 100), sync=True) is not None
    life.settle()
    life.end()


def test_a_full_queue_throttles_without_taking_anything() -> None:
    life = started(new_disk(10))
    life.journal.shards[0]._queue_bytes = SHARD_QUEUE_BYTES_MAX + 1
    assert life.submit(append(0, 1)) is None
    assert life.refused[-1].detail == {"limit": "journal_queue"}
    assert life.journal.shards[0].counters.submit_full == 1
    life.journal.shards[0]._queue_bytes = 0
    life.end()


def test_sync_all_waits_for_everything_submitted_before_it() -> None:
    life = started(new_disk(11), shards=2)
    for topic_id in range(4):
        life.submit(append(topic_id, 1))
    life.loop.run_until_complete(life.journal.sync_all())
    assert life.promises.synced == {1, 2, 3, 4}
    life.close()


def test_an_end_mark_that_cannot_be_made_durable_fails_no_entry() -> None:
    for op, fault in (("write", "enospc"), ("sync", "eio"), ("write", "eio")):
        for seed in range(8):
            disk = new_disk(seed)
            life = started(disk)
            hold = life.journal.hold_end
            for seq in range(1, 5):
                life.submit(append(0, seq), sync=True)
                life.settle()
                if seq > 1:
                    disk.fail(op, fault, path="*.end", times=None)  # type: ignore[arg-type]
                life.loop.run_until_complete(asyncio.wait_for(hold(0), 5))
                disk.heal()
                assert life.journal.read_only_shards() == []
            assert not life.journal.shards[0].tail.is_held
            again = Life(life.die("power"), life.promises, shards=1)
            assert set(again.recover("power")) == {1, 2, 3, 4}
            again.close()


def test_an_end_mark_of_a_read_only_shard_is_not_waited_for() -> None:
    disk = new_disk(3)
    life = started(disk)
    life.submit(append(0, 1), sync=True)
    life.settle()
    disk.fail("sync", "eio", path="*.wal")
    life.submit(append(0, 2), sync=True)
    waiting = life.loop.create_task(life.journal.hold_end(0))
    life.settle()
    life.loop.run_until_complete(asyncio.wait_for(waiting, 5))
    assert life.journal.read_only_shards() == [0]
    life.loop.run_until_complete(asyncio.wait_for(life.journal.hold_end(0), 5))
    life.die("kill")


def test_an_end_mark_is_made_durable_while_the_queue_is_never_empty() -> None:
    """Seals and delete flags wait for it: a busy shard must not keep them waiting."""
    life = started(new_disk(3), turns=3)
    life.submit(append(0, 1), sync=True)
    life.settle()
    shard = life.journal.shards[0]
    life.submit(append(0, 2), sync=True)
    life.turn()
    waiting = life.loop.create_task(life.journal.hold_end(0))
    groups = shard.counters.groups
    for seq in range(3, 60):
        life.submit(append(0, seq), sync=True)
        life.turn()
        if waiting.done():
            break
    assert waiting.done()
    assert shard.counters.groups - groups <= 2
    life.close()


def test_close_writes_and_syncs_what_is_queued() -> None:
    disk = new_disk(12)
    life = started(disk)
    life.submit(append(0, 1))
    life.close()
    disk.crash("power")
    again = Life(disk.reopen(), life.promises, shards=1)
    assert set(again.recover("power")) == {1}
    again.close()


def test_unsynced_entries_are_synced_after_the_interval() -> None:
    life = Life(new_disk(13), shards=1, sync_interval_ms=0)
    life.recover()
    life.settle()
    life.submit(append(0, 1))
    life.settle()
    assert life.progress[-1].synced_lsn == 1
    life.close()


def test_trim_removes_files_whose_entries_are_all_below() -> None:
    disk = new_disk(14)
    life = started(disk)
    for seq in range(1, 30):
        life.submit(append(0, seq, b"t" * 2_000))
        life.turn(3)
    life.loop.run_until_complete(life.journal.sync_all())
    before = len(disk.list_dir(WAL))
    life.promises.start_lsn = 20
    life.journal.trim(ReplayStart(20))
    life.settle()
    assert len(disk.list_dir(WAL)) < before
    again = Life(life.die("power"), life.promises, shards=1)
    assert min(again.recover("power")) == 20
    again.journal.trim(ReplayStart(30))
    again.settle()
    assert len(disk.reopen().list_dir(WAL) if disk.crashed else []) >= 1
    again.close()


@pytest.mark.parametrize("mode", ["kill", "power"])
def test_a_crash_at_every_operation_of_a_short_script_breaks_no_promise(mode: str) -> None:
    ending = "kill" if mode == "kill" else "power"
    nth = 0
    while True:
        nth += 1
        disk = new_disk(nth)
        life = Life(disk, shards=2, turns=lambda: 1, sizes=SMALL)
        life.recover()
        life.settle()
        disk.crash_at(nth)
        for seq in range(1, 12):
            life.submit(append(seq % 2, seq, b"c" * 1_500), sync=seq % 3 == 0)
            life.turn(4)
            if disk.crashed:
                break
        life.settle()
        crashed = disk.crashed
        again = Life(life.die("kill" if ending == "kill" else "power"), life.promises, shards=2)
        again.recover("kill" if ending == "kill" else "power")
        # Recovered entries survive the next power loss, whatever they were before.
        third = Life(again.die("power"), again.promises, shards=2)
        third.recover("power")
        third.close()
        if not crashed:
            break
    assert nth > 20


def test_a_defect_in_the_writer_makes_the_shard_read_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    life = started(new_disk(15))

    def broken() -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(life.journal.shards[0].tail, "sync", broken)
    life.submit(append(0, 1), sync=True)
    life.settle()
    assert life.journal.read_only_shards() == [0]
    assert life.progress[-1].failed_from == 1
    life.end()


def test_a_refused_mark_is_cut_and_fails_no_entry() -> None:
    disk = new_disk(16)
    life = started(disk)
    disk.fail("write", "partial", path=WAL_FILES, nth=2)
    life.submit(append(0, 1), sync=True)
    life.settle()
    assert all(p.failed_from is None for p in life.progress)
    kept = life.submit(append(0, 2), sync=True)
    life.settle()
    again = Life(life.die("power"), life.promises, shards=1)
    assert set(again.recover("power")) == {1, kept}
    again.close()


def test_files_that_cannot_be_removed_are_found_by_the_next_start() -> None:
    disk = new_disk(17)
    life = started(disk)
    for seq in range(1, 20):
        life.submit(append(0, seq, b"t" * 2_000), sync=True)
        life.turn(5)
    life.settle()
    disk.fail("unlink", "eio")
    life.journal.trim(ReplayStart(15))
    life.loop.run_until_complete(life.journal.close())
    life.end()
    disk.crash("kill")
    life.promises.start_lsn = 15
    again = Life(disk.reopen(), life.promises, shards=1)
    again.recover("kill")
    before = len(again.disk.list_dir(WAL))
    again.journal.trim(ReplayStart(15))
    again.settle()
    assert len(again.disk.list_dir(WAL)) < before
    again.close()


def test_sync_latencies_are_observed_in_microseconds() -> None:
    seen: list[float] = []
    disk = new_disk(18)
    life = started(disk)
    shard = life.journal.shards[0]
    object.__setattr__(shard, "_observe_sync_us", seen.append)
    life.submit(append(0, 1), sync=True)
    life.settle()
    assert len(seen) == shard.counters.syncs == 1
    assert seen[0] >= 0
    life.close()


# -- writes beside a job ------------------------------------------------------------------------


def syncing(disk: FakeDisk) -> Life:
    """A life in which the worker is about to sync entry 1, for which no caller waits."""
    life = Life(disk, shards=1, turns=lambda: 20, sync_interval_ms=0)
    life.recover()
    life.settle()
    life.submit(append(0, 1))
    while life.journal.shards[0].job is None:
        life.turn()
    assert life.progress[-1].written_lsn == 1
    assert life.journal.shards[0].counters.syncs == 0
    return life


def test_entries_are_written_beside_a_sync_without_waiters() -> None:
    life = syncing(new_disk(1))
    shard = life.journal.shards[0]
    life.submit(append(0, 2))
    life.turn(2)
    assert (life.progress[-1].written_lsn, life.progress[-1].synced_lsn) == (2, 0)
    assert (shard.counters.loop_groups, shard.counters.syncs) == (2, 0)
    life.settle()
    assert life.progress[-1].synced_lsn == 2
    again = Life(life.die("power"), life.promises, shards=1)
    assert set(again.recover("power")) == {1, 2}
    again.close()


def test_a_sync_covers_what_was_written_before_it_began(monkeypatch: pytest.MonkeyPatch) -> None:
    life = syncing(new_disk(1))
    shard = life.journal.shards[0]
    tail = shard.tail
    end, written_bytes = tail.end, tail.written_bytes
    file = tail._live.file

    class WrittenMeanwhile:
        """The disk syncs its bytes; then, before the call returns, the loop writes."""

        path = file.path

        def sync(self) -> None:
            file.sync()
            tail._live.file = file
            life.submit(append(0, 2), sync=True)
            shard._flush()

    monkeypatch.setattr(tail._live, "file", WrittenMeanwhile())
    while life.progress[-1].synced_lsn == 0:
        life.turn()
    first = next(p for p in life.progress if p.synced_lsn)
    assert (first.written_lsn, first.synced_lsn) == (2, 1)
    assert (tail.synced_bytes, tail.synced_lsn) == (end, 1)
    assert tail.dirty_bytes == tail.written_bytes - written_bytes > 0
    assert shard._policy.waiting_lsns == [2], "somebody still waits"
    while life.progress[-1].synced_lsn == 1:
        life.turn()
    assert (life.progress[-1].synced_lsn, tail.dirty_bytes) == (2, 0)
    life.close()


def test_what_is_behind_an_entry_that_waits_for_a_sync_is_written_too() -> None:
    life = syncing(new_disk(1))
    shard = life.journal.shards[0]
    life.submit(append(0, 2), sync=True)
    life.turn(2)
    life.submit(append(0, 3))
    life.turn(2)
    # Both are written during the running sync, which covers neither.
    assert (life.progress[-1].written_lsn, life.progress[-1].synced_lsn) == (3, 0)
    assert shard._policy.waiting_lsns == [2]
    life.settle()
    assert life.progress[-1].synced_lsn == 3
    assert not shard._policy.waiting_lsns
    life.close()


def test_those_who_all_wait_for_a_sync_share_the_next_one() -> None:
    life = syncing(new_disk(1))
    shard = life.journal.shards[0]
    for seq in (2, 3, 4):
        life.submit(append(0, seq), sync=True)
        life.turn(2)
    # The first entry was written while no caller waited; the others were written as one group, in
    # one job together with their sync.
    assert (life.progress[-1].written_lsn, shard.queue_depth) == (2, 2)
    life.settle()
    assert (shard.counters.syncs, shard.counters.groups) == (2, 3)
    assert life.progress[-1].synced_lsn == 4
    life.close()


def test_a_failed_sync_refuses_its_waiters_and_all_later_entries() -> None:
    disk = new_disk(6)
    life = syncing(disk)
    shard = life.journal.shards[0]
    for seq in range(2, 6):
        life.submit(append(0, seq), sync=seq in (3, 5))
        life.turn(2)
    # Entry 4 is reported during the sync; entry 5 waits in the queue for the next sync.
    assert (life.progress[-1].written_lsn, shard._policy.waiting_lsns) == (4, [3])
    disk.fail("sync", "eio", path=WAL_FILES)
    life.settle()
    assert shard.state is WriterState.READ_ONLY
    failure = next(p for p in life.progress if p.failed_from is not None)
    assert (failure.failed_from, failure.written_lsn, failure.synced_lsn) == (3, 4, 0)
    life.end()


# Each file has room for some groups ahead.
ROOMY = Sizes(file_bytes=65_536, fill_step_bytes=16_384, reserve_bytes=8_192)


def filling(disk: FakeDisk) -> Life:
    """A life in which the worker is about to fill ahead; the entries so far are written."""
    life = Life(disk, shards=1, turns=lambda: 20, sizes=ROOMY)
    life.recover()
    life.settle()
    shard = life.journal.shards[0]
    while shard.job is None:
        life.submit(append(0, life.next_lsn, b"x" * 1_000))
        life.turn(2)
    assert isinstance(shard.job, MakeRoom)
    assert life.progress[-1].written_lsn == life.next_lsn - 1
    return life


def test_entries_are_written_beside_filling_ahead() -> None:
    life = filling(new_disk(7))
    shard = life.journal.shards[0]
    told = len(life.progress)
    last = life.submit(append(0, 99, b"y" * 1_000))
    life.turn(2)
    assert shard.job is not None
    assert [p.written_lsn for p in life.progress[told:]] == [last]
    life.settle()
    assert shard.counters.loop_groups == shard.counters.groups
    again = Life(life.die("kill"), life.promises, shards=1)
    assert set(again.recover("kill")) == set(range(1, life.next_lsn))
    again.close()


def test_preallocation_never_fills_what_was_just_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Known mistake: zeros are written after the old filled mark, although the loop has written
    further meanwhile.
    """
    life = filling(new_disk(8))
    shard = life.journal.shards[0]
    live = shard.tail._live
    file, filled = live.file, live.filled
    starts: list[int] = []

    class WrittenMeanwhile:
        """Before zeros reach the disk, the loop writes as far as it may."""

        path = file.path

        def pwrite(self, data: bytes, position: int) -> None:
            live.file = file
            before = shard.tail.end
            for seq in range(100, 110):
                life.submit(append(0, seq, b"z" * 1_000))
                shard._flush()
            assert before < shard.tail.end <= filled
            starts.append(position)
            file.pwrite(data, position)

    monkeypatch.setattr(live, "file", WrittenMeanwhile())
    while not starts:
        life.turn()
    assert starts == [filled]
    life.settle()
    again = Life(life.die("kill"), life.promises, shards=1)
    assert set(again.recover("kill")) == set(range(1, life.next_lsn))
    again.close()


def test_a_write_that_fails_beside_filling_is_cut_behind_it() -> None:
    disk = new_disk(9)
    life = filling(disk)
    shard = life.journal.shards[0]
    kept = life.next_lsn - 1
    disk.fail("write", "enospc", path=WAL_FILES)
    failed = life.submit(append(0, 99))
    life.turn(2)
    assert (shard.state, life.progress[-1].failed_from) == (WriterState.FAILED, None)
    life.settle()
    failure = next(p for p in life.progress if p.failed_from is not None)
    assert (failure.failed_from, failure.written_lsn) == (failed, kept)
    assert shard.state is WriterState.OPEN
    behind = life.submit(append(0, 100), sync=True)
    life.settle()
    again = Life(life.die("power"), life.promises, shards=1)
    found = set(again.recover("power"))
    assert failed not in found
    assert behind in found
    again.close()


def test_filling_goes_further_ahead_once_it_fell_behind() -> None:
    """A long sync occupies the worker; the loop writes to the filled mark, then an append waits."""
    life = Life(new_disk(10), shards=1, turns=lambda: 20, sizes=ROOMY, sync_interval_ms=0)
    life.recover()
    life.settle()
    shard = life.journal.shards[0]
    tail = shard.tail
    assert tail._live.filled <= tail.end + ROOMY.fill_step_bytes
    most = tail._ahead_bytes
    for seq in range(1, 40):
        life.submit(append(0, seq, b"x" * 3_000))
        life.turn(1)
        most = max(most, tail._ahead_bytes)
    assert shard.counters.loop_groups < shard.counters.groups
    assert most == ROOMY.file_bytes // 2
    # After several files no append had to wait, and the server fills as little ahead as at first.
    life.settle()
    until = tail.rotations + 3
    while tail.rotations < until:
        life.submit(append(0, life.next_lsn, b"x" * 1_000))
        life.settle()
    assert tail._ahead_bytes == ROOMY.fill_step_bytes
    life.close()


def test_room_is_filled_a_little_at_a_time() -> None:
    """A request beside a long fill waits for the disk and for the interpreter."""
    life = Life(new_disk(10), shards=1, sizes=ROOMY)
    life.recover()
    life.settle()
    tail = life.journal.shards[0].tail
    steps = set()
    filled = tail._live.filled
    while not tail.rotations:
        life.submit(append(0, life.next_lsn, b"x" * 1_000))
        life.settle()
        if not tail.rotations:
            steps.add(tail._live.filled - filled)
        filled = tail._live.filled
    record_bytes = 1_100
    assert 0 < max(steps) <= ROOMY.fill_step_bytes // 8 + record_bytes
    life.close()


@pytest.mark.parametrize("wants_sync", [False, True])
def test_what_is_queued_when_a_sync_falls_due_is_written_beside_it(wants_sync: bool) -> None:
    """An entry is reported when it is written, unless it waits for a sync itself."""
    life = Life(new_disk(1), shards=1, turns=lambda: 20, sync_interval_ms=60_000)
    life.recover()
    life.settle()
    shard = life.journal.shards[0]
    life.submit(append(0, 1))
    life.turn(2)
    assert (life.progress[-1].written_lsn, shard.job) == (1, None)
    life.submit(append(0, 2), sync=wants_sync)
    shard._sync_due()
    assert shard.job is not None
    assert isinstance(shard.job, SyncOnly) is not wants_sync
    assert life.progress[-1].written_lsn == (1 if wants_sync else 2)
    assert life.progress[-1].synced_lsn == 0
    life.settle()
    assert life.progress[-1].synced_lsn == 2
    life.close()


def test_the_end_mark_is_written_before_a_sync_and_after_its_answer() -> None:
    """A lone synced entry costs two end marks, and its answer waits for one of them.

    An entry that waits for no sync costs one, and its answer waits for none.
    """
    life = started(new_disk(2), turns=5)
    shard = life.journal.shards[0]
    mark = shard.tail._end_mark
    before, seen = mark._counter, []
    on_progress = shard.on_progress
    assert on_progress is not None

    def note(progress: ShardProgress) -> None:
        seen.append((progress.synced_lsn, mark._counter - before))
        on_progress(progress)

    shard.on_progress = note
    lsn = life.submit(append(0, 1), sync=True)
    life.turn(2)
    assert read_end_mark(life.disk, WAL, 1, 0).is_syncing
    life.settle()
    assert seen == [(0, 0), (lsn, 1)]
    assert mark._counter - before == 2
    end = read_end_mark(life.disk, WAL, 1, 0)
    assert (end.synced_lsn, end.is_syncing) == (lsn, False)
    unsynced = life.submit(append(0, 2))
    life.turn(2)
    assert seen[2:] == [(lsn, 2)]
    assert mark._counter - before == 3
    assert read_end_mark(life.disk, WAL, 1, 0).written_lsn == unsynced
    life.close()


def write_and_fail_in_the_next_report(life: Life, entry: Entry) -> list[int | None]:
    """The next report writes this entry at once, as for a router's copy, and the disk refuses it.

    The returned list gets the lsn of the entry.
    """
    shard = life.journal.shards[0]
    failed: list[int | None] = []
    on_progress = shard.on_progress
    assert on_progress is not None

    def note(progress: ShardProgress) -> None:
        on_progress(progress)
        if not failed:
            life.disk.fail("write", "enospc", path=WAL_FILES)
            failed.append(life.submit(entry))
            shard.flush()

    shard.on_progress = note
    return failed


def test_a_write_that_fails_inside_a_report_leaves_the_end_mark_to_the_worker() -> None:
    disk = new_disk(2)
    life = started(disk, turns=5)
    shard = life.journal.shards[0]
    mark = shard.tail._end_mark
    before = mark._counter
    failed = write_and_fail_in_the_next_report(life, append(0, 2))
    written = life.submit(append(0, 1))
    life.turn(2)
    assert (shard.state, mark._counter - before) == (WriterState.FAILED, 0)
    life.settle()
    assert life.progress[-1].failed_from == failed[0]
    assert shard.state is WriterState.OPEN
    assert read_end_mark(disk, WAL, 1, 0).written_lsn == written
    again = Life(life.die("kill"), life.promises, shards=1)
    assert set(again.recover("kill")) == {written}
    again.close()


def test_a_write_that_fails_inside_a_report_beside_a_sync_leaves_the_mark_of_the_first() -> None:
    """The loop owns the mark during a sync: the group that was answered is in it at once."""
    disk = new_disk(4)
    life = syncing(disk)
    shard = life.journal.shards[0]
    write_and_fail_in_the_next_report(life, append(0, 3))
    written = life.submit(append(0, 2))
    life.turn(2)
    assert (shard.state, isinstance(shard.job, SyncOnly)) == (WriterState.FAILED, True)
    mark = read_end_mark(disk, WAL, 1, 0)
    assert (mark.written_lsn, mark.is_syncing) == (written, True)
    life.settle()
    again = Life(life.die("power"), life.promises, shards=1)
    assert set(again.recover("power")) >= {1, written}
    again.close()


def test_a_write_that_fails_beside_a_sync_is_cut_behind_it() -> None:
    disk = new_disk(4)
    life = syncing(disk)
    disk.fail("write", "enospc", path=WAL_FILES)
    failed = life.submit(append(0, 2))
    life.turn(2)
    shard = life.journal.shards[0]
    assert (shard.state, life.progress[-1].failed_from) == (WriterState.FAILED, None)
    while (failure := life.progress[-1]).failed_from is None:
        life.turn()
    assert not shard.tail.is_broken
    life.settle()
    assert (failure.failed_from, failure.written_lsn, failure.synced_lsn) == (failed, 1, 1)
    assert shard.state is WriterState.OPEN
    kept = life.submit(append(0, 3), sync=True)
    life.settle()
    again = Life(life.die("power"), life.promises, shards=1)
    assert set(again.recover("power")) == {1, kept}
    again.close()


def test_a_failed_sync_takes_nothing_back_that_was_written_beside_it() -> None:
    disk = new_disk(5)
    life = syncing(disk)
    life.submit(append(0, 2))
    life.turn(2)
    disk.fail("sync", "eio", path=WAL_FILES)
    life.settle()
    assert life.journal.shards[0].state is WriterState.READ_ONLY
    failure = next(p for p in life.progress if p.failed_from is not None)
    assert (failure.failed_from, failure.written_lsn) == (3, 2)
    life.end()


def test_where_writes_wait_for_a_sync_none_is_made_beside_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    life = syncing(new_disk(1))
    shard = life.journal.shards[0]
    slow_ms = iter((-1.0, -1.0, 1e9, -1.0, -1.0, -1.0))
    for seq in range(2, 8):
        # One fast write in between means that the machine was just busy, so counting starts again.
        monkeypatch.setattr("topics_server.wal.journal.sync_policy.SLOW_WRITE_MS", next(slow_ms))
        while not isinstance(shard.job, SyncOnly):
            life.turn()
        lsn = life.submit(append(0, seq))
        life.turn(2)
        assert (life.progress[-1].written_lsn, shard.queue_depth) == (lsn, 0)
        syncs = shard.counters.syncs
        while shard.counters.syncs == syncs:
            life.turn()
        life.submit(append(0, 100 + seq))
        life.turn(2)
    while not isinstance(shard.job, SyncOnly):
        life.turn()
    before = life.progress[-1].written_lsn
    lsn = life.submit(append(0, 9))
    life.turn(2)
    assert (life.progress[-1].written_lsn, shard.queue_depth) == (before, 1)
    life.settle()
    assert life.progress[-1].synced_lsn == lsn
    life.close()


def test_what_hurries_is_written_before_the_turn_ends() -> None:
    life = started(new_disk(1))
    life.submit(append(0, 0))
    life.submit(append(0, 1))
    life.journal.flush(0)
    assert of_journal(life.disk) == ["write"]
    assert [p.written_lsn for p in life.progress] == [2]
    life.journal.flush(0)
    life.turn(2)
    assert of_journal(life.disk) == ["write"], "there is nothing left to write"
    life.submit(append(0, 2, b"x" * LOOP_WRITE_BYTES_MAX))
    life.journal.flush(0)
    assert len(life.progress) == 1, "what the loop may not write is left to the worker"
    life.settle()
    assert life.progress[-1].written_lsn == 3
    life.close()


def test_filling_gives_way_to_a_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a concurrent write waits for milliseconds, because the kernel prefers the other
    call.
    """
    life = started(new_disk(1))
    live = life.journal.shards[0].tail._live
    paused: list[float] = []
    monkeypatch.setattr(tail_module, "pause", paused.append)
    live.fill(live.filled + 2 * 256 * KIB)
    assert not paused
    live.is_written = True
    live.fill(live.filled + 2 * 256 * KIB)
    assert len(paused) == 2
    live.is_written = False
    life.close()


def test_a_wait_for_a_sync_that_fails_leaves_nothing_for_the_collector() -> None:
    disk = new_disk(6)
    life = started(disk)
    life.submit(append(0, 1))
    life.turn(2)
    disk.fail("sync", "eio", path=WAL_FILES)

    async def failed() -> None:
        with contextlib.suppress(ReadOnly):
            await life.journal.sync_all()
            raise AssertionError("the sync fails")

    with nothing_for_the_collector():
        life.loop.run_until_complete(failed())
    life.close()
