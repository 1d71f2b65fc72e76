"""The ballast: reserved room that the server releases on a full disk."""

from __future__ import annotations

import zlib

import pytest

from tests.storage.fake_disk import FakeDisk
from topics_server.wal.ballast import Ballast
from topics_server.wal.journal.sizing import ballast_bytes
from topics_server.wal.journal.wal_file import Sizes

PATH = "data/ballast"


def made(disk: FakeDisk, size: int = 5000) -> Ballast:
    ballast = Ballast(disk, "data")
    ballast.want(size)
    assert ballast.restore(disk.free_bytes("data"), 0)
    return ballast


def test_it_takes_room_that_cannot_be_compressed_and_is_synced(disk: FakeDisk) -> None:
    ballast = made(disk)
    content = disk.content(PATH)
    assert len(content) == 5000 == ballast.held_bytes
    assert len(zlib.compress(content)) >= 5000
    assert disk.durable_content(PATH) == content
    assert ballast.missing_bytes == 0


def test_it_is_given_back_and_made_again_when_enough_stays_free(disk: FakeDisk) -> None:
    disk.capacity_bytes = 12_000
    ballast = made(disk)
    assert ballast.release(2000) == 2000
    assert (disk.file_size(PATH), ballast.missing_bytes) == (3000, 2000)
    assert ballast.release(9000) == 3000
    assert (disk.file_size(PATH), ballast.missing_bytes, ballast.release(1)) == (0, 5000, 0)
    assert not ballast.restore(disk.free_bytes("data"), 7001)
    assert disk.file_size(PATH) == 0
    assert ballast.restore(disk.free_bytes("data"), 7000)
    assert ballast.missing_bytes == 0


def test_one_that_cannot_be_cut_is_removed(disk: FakeDisk) -> None:
    ballast = made(disk)
    disk.fail("truncate", "eio", path=PATH)
    assert ballast.release(10) == 5000
    assert not disk.exists(PATH)


def test_it_grows_with_what_it_is_for(disk: FakeDisk) -> None:
    ballast = made(disk)
    ballast.want(9000)
    assert ballast.missing_bytes == 4000
    assert ballast.restore(1 << 20, 0)
    assert disk.file_size(PATH) == 9000
    # A ballast that is larger than needed stays until the next release.
    ballast.want(100)
    assert (ballast.missing_bytes, ballast.restore(0, 1 << 20), ballast.held_bytes) == (
        0,
        True,
        9000,
    )


@pytest.mark.parametrize("op", ["open", "write", "sync"])
def test_one_that_cannot_be_made_takes_nothing(disk: FakeDisk, op: str) -> None:
    ballast = Ballast(disk, "data")
    ballast.want(5000)
    disk.fail(op, "enospc", path=PATH)  # type: ignore[arg-type]
    assert not ballast.restore(1 << 20, 0)
    assert (disk.exists(PATH), ballast.missing_bytes) == (False, 5000)
    assert ballast.restore(1 << 20, 0)


@pytest.mark.parametrize("op", ["open", "write", "sync"])
def test_one_that_cannot_grow_keeps_what_it_has(disk: FakeDisk, op: str) -> None:
    """A program that fills the disk at this moment does not take the ballast's bytes."""
    ballast = made(disk)
    ballast.want(9000)
    disk.fail(op, "enospc", path=PATH)  # type: ignore[arg-type]
    assert not ballast.restore(1 << 20, 0)
    assert (disk.file_size(PATH), ballast.held_bytes, ballast.missing_bytes) == (5000, 5000, 4000)
    assert ballast.restore(1 << 20, 0)


def test_the_next_start_finds_it(disk: FakeDisk) -> None:
    made(disk)
    again = Ballast(disk, "data")
    again.want(5000)
    assert (again.held_bytes, again.missing_bytes) == (5000, 0)


def test_it_is_as_large_as_the_next_snapshot_and_never_large_for_its_disk() -> None:
    mib, sizes = 1 << 20, Sizes()
    assert ballast_bytes(0, 1 << 40, sizes) == mib
    assert ballast_bytes(8 * mib, 1 << 40, sizes) == 11 * mib
    assert ballast_bytes(8 * mib, 32 * mib, sizes) == 2 * mib
    assert ballast_bytes(0, 32 * mib, sizes) == mib // 2
