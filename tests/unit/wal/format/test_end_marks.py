"""End marks: golden bytes, which slot counts, and the verdict on every flipped byte."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest
import xxhash
from msgspec.structs import replace

from tests.storage.fake_disk import FakeDisk
from topics_server.values.errors import StartRefused, SyncFailed
from topics_server.wal.format.end_marks import (
    BEGINNINGS,
    FILE_BYTES,
    SLOT_BYTES,
    SLOT_DISTANCE,
    SLOTS,
    EndMark,
    decode,
    encode_slot,
)
from topics_server.wal.journal.end_mark_file import EndMarkFile, end_mark_path, read_end_mark

VECTORS: Final = Path(__file__).parents[3] / "vectors" / "wal"
OLDER: Final = EndMark(7, 41, 0x0123_4567_89AB_CDEF, 4096, 2048, 102, 100)
NEWER: Final = replace(OLDER, written_end=8192, synced_end=4096, synced_lsn=102, is_syncing=True)


def file_of(**slots: tuple[int, EndMark]) -> bytes:
    """`s1=(9, mark)`: the mark of counter 9 in slot 1."""
    data = bytearray(FILE_BYTES)
    for name, (counter, mark) in slots.items():
        slot = int(name[1:])
        at = slot * SLOT_DISTANCE
        data[at : at + SLOT_BYTES] = encode_slot(2, 3, slot, counter, mark)
    return bytes(data)


def test_golden_file() -> None:
    data = file_of(s0=(10, OLDER), s1=(11, NEWER))
    assert data == (VECTORS / "mark.end").read_bytes()
    assert decode(data, 2, 3) == {0: (10, OLDER), 1: (11, NEWER)}


def test_a_slot_lies_in_one_sector_and_in_a_page_of_its_own() -> None:
    assert SLOT_BYTES <= 512
    assert SLOT_DISTANCE * len(SLOTS) == FILE_BYTES
    assert SLOT_DISTANCE % 4096 == 0


@pytest.mark.parametrize("offset", range(SLOT_BYTES))
def test_a_torn_slot_leaves_the_other_one(offset: int) -> None:
    data = bytearray(file_of(s0=(10, OLDER), s1=(11, NEWER)))
    data[SLOT_DISTANCE + offset] ^= 0x20
    assert decode(bytes(data), 2, 3) == {0: (10, OLDER)}
    data[offset] ^= 0x20
    assert decode(bytes(data), 2, 3) == {}


@pytest.mark.parametrize("length", [0, 95, SLOT_DISTANCE, SLOT_DISTANCE + 95])
def test_a_file_cut_short_has_what_is_left_of_it(length: int) -> None:
    found = decode(file_of(s0=(10, OLDER), s1=(11, NEWER))[:length], 2, 3)
    assert found == ({0: (10, OLDER)} if length >= SLOT_BYTES else {})


def test_a_mark_counts_for_its_shard_and_slot_only() -> None:
    data = file_of(s1=(11, NEWER))
    assert not decode(data, 2, 4)
    assert not decode(data, 1, 3)
    assert not decode(data[SLOT_DISTANCE:] + bytes(SLOT_DISTANCE), 2, 3)


@pytest.mark.parametrize("marks", [(OLDER, NEWER), (NEWER, OLDER)])
def test_of_two_slots_with_one_counter_the_further_mark_counts(
    marks: tuple[EndMark, EndMark],
) -> None:
    disk = FakeDisk(1)
    disk.make_dir("wal", 0o700)
    file = disk.open(end_mark_path("wal", 2, 3), create=True)
    file.pwrite(file_of(s0=(10, marks[0]), s2=(10, marks[1])), 0)
    file.close()
    assert read_end_mark(disk, "wal", 2, 3) == NEWER


def test_a_newer_version_is_refused() -> None:
    data = bytearray(file_of(s0=(10, OLDER)))
    data[8] = 2
    data[88:96] = xxhash.xxh3_64_intdigest(bytes(data[:88])).to_bytes(8, "little")
    with pytest.raises(StartRefused, match="version 2"):
        decode(bytes(data), 2, 3)


def test_another_magic_is_no_end_mark() -> None:
    data = bytearray(file_of(s0=(10, OLDER)))
    data[0:6] = b"puzzle"
    data[88:96] = xxhash.xxh3_64_intdigest(bytes(data[:88])).to_bytes(8, "little")
    assert decode(bytes(data), 2, 3) == {}


def test_a_beginning_whose_sync_failed_is_written_again_and_the_durable_one_stays() -> None:
    for seed in range(20):
        disk = FakeDisk(seed)
        disk.make_dir("wal", 0o700)
        file = EndMarkFile.open(disk, "wal", 2, 3, OLDER)
        for number in range(4):
            disk.fail("sync", "eio", path="*.end")
            file.write_beginning(replace(NEWER, written_lsn=200 + number))
            with pytest.raises(SyncFailed):
                file.sync_beginning()
        found = decode(disk.durable_content("wal/000002-03.end"), 2, 3)
        assert OLDER in {mark for _, mark in found.values()}
        file.begin(NEWER)
        file.begin(NEWER)
        found = decode(disk.durable_content("wal/000002-03.end"), 2, 3)
        assert {mark for slot, (_, mark) in found.items() if slot in BEGINNINGS} == {NEWER}
