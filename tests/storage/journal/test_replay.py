"""Recovery of a journal in every state: torn, corrupt, missing, or in order."""

from __future__ import annotations

import pytest

from tests.storage.fake_disk import FakeDisk
from tests.storage.journal.journal_rig import SMALL, WAL, Life, append, new_disk
from topics_server.values.errors import Corrupt, StartRefused
from topics_server.wal.format.frames import Opening, encode_entry
from topics_server.wal.format.groups import (
    FILE_HEADER_BYTES,
    FileHeader,
    decode_file_header,
    encode_file_header,
    encode_group,
    scan,
)
from topics_server.wal.journal.replay import JournalReplay

FIRST = f"{WAL}/000001-00-0000000001.wal"


def written(disk: FakeDisk, count: int, *, sync: bool, body: bytes = b"b" * 100) -> Life:
    """A life that wrote `count` groups of one entry each into one shard; then it is killed."""
    life = Life(disk, shards=1, turns=lambda: 1)
    life.recover()
    life.settle()
    for seq in range(1, count + 1):
        life.submit(append(0, seq, body), sync=sync)
        life.turn(2)
        if sync:
            life.settle()
    life.settle()
    return life


def groups_of(disk: FakeDisk, path: str) -> list[tuple[int, int]]:
    """(position, end) of every group of a file."""
    data = disk.content(path)
    header = decode_file_header(data[:FILE_HEADER_BYTES])
    assert header is not None
    found = scan(data[FILE_HEADER_BYTES:], FILE_HEADER_BYTES, header.file_id, len(data))
    return [(group.position, group.end) for group in found.groups]


def read(disk: FakeDisk, start_lsn: int = 0, **facts: int) -> tuple[list[int], JournalReplay]:
    replay = JournalReplay(disk, WAL, synced_lsn=facts.get("synced_lsn", 0))
    return [lsn for lsn, _ in replay.entries(start_lsn)], replay


def test_an_empty_journal_is_empty() -> None:
    lsns, replay = read(new_disk(1))
    assert lsns == []
    assert replay.progress == 1.0
    assert replay.is_finished


# Which of six groups is damaged, whether they were synced one by one, and the expected result.
VERDICTS = [
    pytest.param(0, True, "corrupt", id="first-synced"),
    pytest.param(4, True, "corrupt", id="middle-synced"),
    pytest.param(10, True, "corrupt", id="last-synced-with-mark"),
    pytest.param(0, False, "torn", id="first-unsynced"),
    pytest.param(3, False, "torn", id="middle-unsynced"),
    pytest.param(5, False, "torn", id="last-unsynced"),
]


@pytest.mark.parametrize(("hit", "sync", "verdict"), VERDICTS)
@pytest.mark.parametrize("where", ["magic", "length", "checksum", "payload"])
def test_this_byte_flipped_gives_this_verdict(
    hit: int, sync: bool, verdict: str, where: str
) -> None:
    disk = written(new_disk(1), 6, sync=sync).die("kill")
    groups = groups_of(disk, FIRST)
    assert len(groups) == (12 if sync else 6)
    position = groups[hit][0]
    offset = {"magic": 0, "length": 5, "checksum": 24, "payload": 60}[where]
    disk.corrupt(FIRST, position + offset)
    if verdict == "corrupt":
        before = disk.content(FIRST)
        with pytest.raises(Corrupt, match=FIRST):
            read(disk)
        assert disk.content(FIRST) == before, "damage is never repaired"
        return
    lsns, replay = read(disk)
    assert lsns == list(range(1, hit + 1))
    (torn,) = replay.report.torn
    assert (torn.path, torn.offset) == (FIRST, position)
    assert torn.groups_dropped == len(groups) - hit - 1
    assert not any(disk.content(torn.path)[position:]) if disk.exists(FIRST) else hit == 0
    assert len(disk.content(torn.kept)) == torn.length


def test_a_bad_last_group_is_corrupt_only_if_a_mark_covers_it() -> None:
    disk = written(new_disk(1), 2, sync=True).die("kill")
    groups = groups_of(disk, FIRST)
    # The mark after it is lost too, so nothing shows that a client got an answer.
    disk.corrupt(FIRST, groups[-2][0] + 40)
    disk.corrupt(FIRST, groups[-1][0] + 24)
    lsns, replay = read(disk)
    assert lsns == [1]
    assert len(replay.report.torn) == 1


def test_a_snapshot_that_covers_a_later_group_makes_it_corrupt() -> None:
    disk = written(new_disk(1), 4, sync=False).die("kill")
    disk.corrupt(FIRST, groups_of(disk, FIRST)[1][0] + 40)
    with pytest.raises(Corrupt, match="shows that it was synced"):
        read(disk, synced_lsn=3)


def test_a_group_of_zeros_before_valid_ones_is_torn_or_corrupt_too() -> None:
    for sync in (False, True):
        disk = written(new_disk(1), 4, sync=sync).die("kill")
        position, end = groups_of(disk, FIRST)[2 if sync else 1]
        disk.open(FIRST, write=True).pwrite(bytes(end - position), position)
        if sync:
            with pytest.raises(Corrupt, match="nothing at"):
                read(disk)
        else:
            assert read(disk)[0] == [1]


def test_damage_in_a_file_that_a_later_one_continues_is_corrupt() -> None:
    disk = written(new_disk(1), 20, sync=False, body=b"b" * 2_000).die("kill")
    last = groups_of(disk, FIRST)[-1]
    disk.corrupt(FIRST, last[0] + 50)
    with pytest.raises(Corrupt, match="later file"):
        read(disk)


def test_a_file_that_ends_before_its_follower_says_is_corrupt() -> None:
    disk = written(new_disk(1), 20, sync=False, body=b"b" * 2_000).die("kill")
    position, end = groups_of(disk, FIRST)[-1]
    disk.open(FIRST, write=True).pwrite(bytes(end - position), position)
    with pytest.raises(Corrupt, match="synced up to"):
        read(disk)


@pytest.mark.parametrize("offset", [0, 9, 33, 60])
def test_a_bad_file_header_above_groups_is_corrupt(offset: int) -> None:
    disk = written(new_disk(1), 1, sync=False).die("kill")
    disk.corrupt(FIRST, offset)
    with pytest.raises(Corrupt, match="file header"):
        read(disk)


def test_a_file_under_another_name_is_refused() -> None:
    disk = written(new_disk(1), 1, sync=False).die("kill")
    disk.rename(FIRST, f"{WAL}/000001-00-0000000009.wal")
    with pytest.raises(Corrupt, match="header says 000001-00-0000000001"):
        read(disk)


def test_an_unfinished_file_is_removed() -> None:
    disk = new_disk(1)
    disk.open(FIRST, create=True).pwrite(b"\xfftop", 0)
    lsns, replay = read(disk)
    assert lsns == []
    assert replay.report.removed == [FIRST]
    assert replay.ends[1, 0].next_number == 2


def test_a_missing_file_in_the_middle_refuses_start() -> None:
    disk = written(new_disk(1), 30, sync=False, body=b"b" * 2_000).die("kill")
    disk.unlink(f"{WAL}/000001-00-0000000002.wal")
    with pytest.raises(StartRefused, match="journal file 2"):
        read(disk)


def test_a_journal_that_does_not_reach_back_refuses_start() -> None:
    disk = written(new_disk(1), 30, sync=False, body=b"b" * 2_000).die("kill")
    disk.unlink(FIRST)
    with pytest.raises(StartRefused, match="begins after lsn"):
        read(disk, 3)
    # A snapshot that covers the missing file has everything.
    lsns, _ = read(disk, 12)
    assert lsns == list(range(12, 31))


def test_files_below_the_start_are_not_read() -> None:
    disk = written(new_disk(1), 30, sync=False, body=b"b" * 2_000).die("kill")
    lsns, replay = read(disk, 29)
    assert lsns == [29, 30]
    assert replay.report.files_read == 1
    assert [old.last_lsn for old in replay.old_files][-1] == 30


def test_groups_below_the_start_are_counted_and_not_decoded() -> None:
    disk = written(new_disk(1), 9, sync=False).die("kill")
    _, whole = read(disk)
    for start_lsn in (2, 5, 9, 10):
        lsns, replay = read(disk, start_lsn)
        assert lsns == list(range(start_lsn, 10))
        assert replay.report.last_lsn == 9
        assert replay.report.groups == whole.report.groups


def test_a_set_whose_files_are_gone_refuses_start() -> None:
    disk = written(new_disk(1), 1, sync=False).die("kill")
    sets = [(1, 1, 1), (2, 2, 10)]
    with pytest.raises(StartRefused, match="wal set 2, shard 0"):
        list(JournalReplay(disk, WAL, wal_sets=sets).entries(0))
    with pytest.raises(StartRefused, match="wal set 1, shard 1"):
        list(JournalReplay(disk, WAL, wal_sets=[(1, 2, 1)]).entries(0))
    # Recovery does not need a set that ended below the start.
    disk.unlink(FIRST)
    list(JournalReplay(disk, WAL, wal_sets=[(1, 1, 1), (2, 0, 10)]).entries(10))


def test_a_synced_tail_that_is_gone_is_corrupt() -> None:
    """The spare file was made after entries had been synced; its header proves they existed."""
    life = written(new_disk(1), 12, sync=True, body=b"b" * 2_000)
    disk = life.die("kill")
    *_, used, spare = [name for name in disk.list_dir(WAL) if name.endswith(".wal")]
    used = f"{WAL}/{used}"
    assert not groups_of(disk, f"{WAL}/{spare}")
    header = decode_file_header(disk.content(f"{WAL}/{spare}")[:FILE_HEADER_BYTES])
    assert header is not None
    assert header.after_lsn > 0
    for path in (FIRST, used):
        disk.unlink(path, missing_ok=True)
    with pytest.raises((StartRefused, Corrupt)):
        read(disk, 1)


def test_shards_are_merged_by_lsn_and_sets_follow_each_other() -> None:
    disk = new_disk(3)
    life = Life(disk, shards=3)
    life.recover()
    for seq in range(1, 30):
        life.submit(append(seq * 7 % 5, seq), sync=True)
        life.turn()
    life.settle()
    life.close()
    disk.crash("kill")
    second = Life(disk.reopen(), life.promises, shards=2, wal_set=2)
    assert list(second.recover("kill")) == list(range(1, 30))
    for seq in range(30, 40):
        second.submit(append(seq, seq), sync=True)
    second.settle()
    third = Life(second.die("power"), second.promises, shards=2, wal_set=2)
    assert list(third.recover("power")) == list(range(1, 40))
    third.close()


def test_recovered_entries_are_durable_when_the_replay_ends() -> None:
    for seed in range(30):
        life = written(new_disk(seed), 5, sync=False)
        disk = life.die("kill")
        assert read(disk)[0] == [1, 2, 3, 4, 5]
        disk.crash("power")
        assert read(disk.reopen())[0] == [1, 2, 3, 4, 5]


def test_what_a_failed_sync_left_in_the_cache_is_written_again() -> None:
    for seed in range(30):
        disk = new_disk(seed)
        life = written(disk, 2, sync=True)
        life.submit(append(0, 3))
        life.turn(2)
        disk.fail("sync", "eio", path=FIRST)
        life.submit(append(0, 4), sync=True)
        life.settle()
        disk = life.die("kill")
        assert read(disk)[0] == [1, 2, 3, 4]
        disk.crash("power")
        assert read(disk.reopen())[0] == [1, 2, 3, 4]


def test_a_reader_only_changes_nothing() -> None:
    disk = written(new_disk(1), 3, sync=False).die("kill")
    disk.corrupt(FIRST, groups_of(disk, FIRST)[2][0] + 40)
    names = disk.list_dir(WAL)
    replay = JournalReplay(disk, WAL, read_only=True)
    assert [lsn for lsn, _ in replay.entries(0)] == [1, 2]
    assert disk.list_dir(WAL) == names
    assert len(replay.report.torn) == 1


def test_the_next_journal_says_where_the_last_one_ended() -> None:
    disk = written(new_disk(1), 3, sync=False).die("kill")
    _, replay = read(disk)
    end = groups_of(disk, FIRST)[-1][1]
    assert replay.ends[1, 0].opening == Opening(1, end, 3)
    assert replay.ends[1, 0].next_number == 3


def test_replay_reads_groups_larger_than_a_chunk() -> None:
    body = b"L" * 3_000_000
    life = written(new_disk(1), 2, sync=True, body=body)
    again = Life(life.die("power"), life.promises, shards=1, sizes=SMALL)
    assert len(again.recover("power")) == 2
    again.close()


@pytest.mark.parametrize("start_lsn", [0, 2, 3])
def test_lsns_that_do_not_ascend_are_corrupt(start_lsn: int) -> None:
    """Groups below the start of replay are checked as well."""
    disk = written(new_disk(1), 2, sync=False).die("kill")
    data = disk.content(FIRST)
    header = decode_file_header(data[:FILE_HEADER_BYTES])
    assert header is not None
    end = groups_of(disk, FIRST)[-1][1]
    buffers = encode_entry(2, append(0, 9))
    group = encode_group(
        buffers,
        sum(map(len, buffers)),
        1,
        file_id=header.file_id,
        position=end,
        synced_bytes=FILE_HEADER_BYTES,
    )
    disk.open(FIRST, write=True).pwritev(group, end)
    with pytest.raises(Corrupt, match="lsn 2 follows 2"):
        read(disk, start_lsn)


def test_the_file_that_is_kept_of_an_empty_shard_is_made_durable() -> None:
    """Recovery removes the other files for good, so a power cut must not leave the shard without
    any file.
    """
    for seed in range(60):
        disk = written(new_disk(seed), 0, sync=False).die("kill")
        # The process was killed before it had synced this spare.
        spare = FileHeader(1, 0, 9, 77, 0)
        file = disk.open(f"{WAL}/000001-00-0000000009.wal", create=True)
        file.pwrite(encode_file_header(spare), 0)
        file.close()
        assert read(disk, 1)[0] == []
        disk.crash("power")
        replay = JournalReplay(disk.reopen(), WAL, wal_sets=[(1, 1, 1)])
        assert list(replay.entries(1)) == [], f"seed {seed}"
