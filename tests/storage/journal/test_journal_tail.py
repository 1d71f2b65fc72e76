"""The journal's tail that the archive ships: exactly the frames that were written, byte for
byte.
"""

from __future__ import annotations

import random

import msgspec
import pytest

from tests.storage.fake_disk import FakeDisk
from tests.storage.journal.journal_rig import WAL, Life, append, new_disk, random_entry
from topics_server.archive.continuous import steps as steps_module
from topics_server.archive.continuous.format import PartFacts, decode_part, encode_part
from topics_server.archive.continuous.journal_tail import JournalTail
from topics_server.archive.continuous.shipper import _pieces
from topics_server.archive.continuous.steps import STEP_FRAMES, Steps
from topics_server.values.errors import Corrupt
from topics_server.wal.format.frames import RawFrame, encode_entry
from topics_server.wal.journal.wal_file import Sizes

# Sizes of a frame that is a view of its chunk, and of a frame that is longer than a chunk.
LONG, LONGER = 70_000, 300_000
WIDE = Sizes(file_bytes=262_144, fill_step_bytes=65_536, reserve_bytes=4_096)


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The length of each pause of the work."""
    found: list[float] = []
    monkeypatch.setattr(steps_module, "pause", found.append)
    return found


def started(disk: FakeDisk, shards: int) -> Life:
    life = Life(disk, shards=shards)
    life.recover()
    life.settle()
    return life


def read(life: Life, tail: JournalTail, max_bytes: int) -> tuple[int, list[RawFrame]]:
    upto_lsn, synced = life.journal.synced_up_to(life.next_lsn - 1)
    return upto_lsn, tail.read(upto_lsn, synced, max_bytes)


@pytest.mark.parametrize("seed", range(12))
def test_frames_are_those_that_were_written(seed: int, pauses: list[float]) -> None:
    """The frames come from all shards, in order, up to the synced lsn, whatever the size of a
    read.
    """
    rng = random.Random(seed)
    disk = new_disk(seed)
    life = started(disk, 1 + seed % 3)
    tail = JournalTail(disk, WAL, 1, Steps())
    found: list[RawFrame] = []
    for _ in range(60):
        for _ in range(rng.choice((0, 1, 3, 8))):
            entry = random_entry(rng, life.next_lsn)
            if rng.random() < 0.02:
                entry = append(2, life.next_lsn, b"x" * rng.choice((LONG, LONGER)))
            life.submit(entry, sync=rng.random() < 0.3)
        life.turn(rng.choice((1, 2, 5)))
        upto_lsn, frames = read(life, tail, rng.choice((1, 2_000, 10**6)))
        assert all(frame.lsn <= upto_lsn for frame in frames)
        found += frames
    life.loop.run_until_complete(life.journal.sync_open_shards())
    while True:
        upto_lsn, frames = read(life, tail, 50_000)
        found += frames
        if not frames:
            break
    assert upto_lsn == life.next_lsn - 1
    assert [frame.lsn for frame in found] == list(range(1, life.next_lsn))
    submitted = life.promises.submitted
    for frame in found:
        assert bytes(frame.content) == b"".join(encode_entry(frame.lsn, submitted[frame.lsn]))
    assert {type(frame.content) for frame in found} == {bytes, memoryview}
    facts = PartFacts(
        store_id="1" * 32,
        archive_id="2" * 32,
        number=1,
        previous="",
        writer="3" * 8,
        run=1,
        ts_ms=1,
        first_lsn=1,
        last_lsn=upto_lsn,
        frames=len(found),
        frames_bytes=0,
        body_xxh3="",
        stretch=1,
        base_part=1,
    )
    made, entries = decode_part(encode_part(facts, _pieces(found)), "p")
    assert entries == sorted(submitted.items())
    assert made == msgspec.structs.replace(
        facts,
        frames_bytes=sum(len(frame.content) for frame in found),
        body_xxh3=made.body_xxh3,
    )
    tail.close()
    life.close()


def test_a_read_begins_at_its_lsn(pauses: list[float]) -> None:
    disk = new_disk(1)
    life = started(disk, 2)
    for seq in range(1, 101):
        life.submit(append(seq % 4, seq, b"b" * 700), sync=True)
        life.settle()
    for start_lsn in (1, 2, 50, 100):
        tail = JournalTail(disk, WAL, start_lsn, Steps())
        upto_lsn, frames = read(life, tail, 10**6)
        assert upto_lsn == 100
        assert [frame.lsn for frame in frames] == list(range(start_lsn, 101))
        assert read(life, tail, 10**6) == (100, [])
        tail.close()
    life.close()


def test_a_changed_byte_of_what_was_synced_is_told(pauses: list[float]) -> None:
    """No frame of a group whose checksum fails is ever shipped."""
    disk = new_disk(1)
    life = started(disk, 1)
    for seq in range(1, 7):
        life.submit(append(0, seq, b"b" * 100), sync=True)
        life.settle()
    path = f"{WAL}/000001-00-0000000001.wal"
    whole = disk.content(path)
    at = whole.index(b"b" * 100)
    at = whole.index(b"b" * 100, at + 101)
    for place in range(at - 60, at + 100):
        file = disk.open(path, write=True)
        file.pwrite(bytes([whole[place] ^ 0x41]), place)
        tail = JournalTail(disk, WAL, 1, Steps())
        with pytest.raises(Corrupt, match="end at lsn 1, and it was synced up to lsn 6"):
            read(life, tail, 10**6)
        tail.close()
        file.pwrite(whole[place : place + 1], place)
        file.close()
    life.close()


def test_the_work_rests_behind_each_step(pauses: list[float]) -> None:
    """However much there is to read, other threads wait for one step only."""
    disk = new_disk(1)
    life = started(disk, 1)
    count = 5 * STEP_FRAMES
    for seq in range(1, count + 1):
        life.submit(append(0, seq), sync=True)
        life.turn(3)
    life.settle()
    tail = JournalTail(disk, WAL, 1, Steps())
    _, frames = read(life, tail, 10**6)
    assert len(frames) == count
    assert len(pauses) >= 5
    assert min(pauses) > 0
    tail.close()
    life.close()


@pytest.mark.parametrize("shards", [1, 4])
def test_frames_are_put_in_order_in_steps(shards: int, pauses: list[float]) -> None:
    """Frames of several shards come out like those of one; with several, each frame is taken
    alone.
    """
    disk = new_disk(1)
    # All frames of a shard are in one file, and are read at once.
    life = Life(disk, shards=shards, sizes=WIDE)
    life.recover()
    life.settle()
    count = 8 * STEP_FRAMES
    for seq in range(1, count + 1):
        life.submit(append(seq % shards, seq), sync=True)
        life.turn(3)
    life.settle()
    tail = JournalTail(disk, WAL, 1, Steps())
    upto_lsn, synced = life.journal.synced_up_to(life.next_lsn - 1)
    # From here on the code only puts frames in order.
    tail.read(upto_lsn, synced, 1)
    pauses.clear()
    frames = tail.read(upto_lsn, synced, 10**6)
    assert len(frames) == count - 1
    assert len(pauses) >= 1
    tail.close()
    life.close()
