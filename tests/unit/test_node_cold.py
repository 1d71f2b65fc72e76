"""The data directory and the cold folder form one store, and a start checks that."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from tests.storage.fake_disk import FakeDisk
from tests.unit.test_node import append, count, opened, started
from topics_server.archive.backup import BackupWriter
from topics_server.values.errors import StartRefused, StorageError
from topics_server.wal.cold_folder import read_store
from topics_server.wal.directory import Directory, read_format
from topics_server.wal.format.manifest import decode_manifest, encode_manifest
from topics_server.wal.tools.begin_anew import adopt_cold, begin_anew
from topics_server.wal.tools.dump import verify

pytestmark = pytest.mark.anyio

COLD: dict[str, Any] = {"cold_dir": Path("cold"), "hot_retain_segments": 0}


@pytest.fixture
def disk() -> FakeDisk:
    return FakeDisk(1)


async def fill(disk: FakeDisk, *, data: str = "data", cold: str = "cold", topic: str = "t") -> None:
    """One life of a store: 24 records, sealed, in the cold folder."""
    node = await started(disk, **{**COLD, "data_dir": Path(data), "cold_dir": Path(cold)})
    for number in range(24):
        await append(node, topic, number)
    await node.sealer.seal_topics([topic])
    known = node.registry.find(topic)
    assert known is not None
    await node.sealer.tend(known)
    (hot_files, _), (cold_files, _) = node.segments.totals()
    assert (hot_files, cold_files > 0) == (0, True)
    await node.close()


async def found(disk: FakeDisk, **changes: Any) -> int:
    """One more life: the number of its records."""
    boot = opened(disk, **{**COLD, **changes})
    try:
        return await count(await boot.start(), "t")
    finally:
        await boot.close()


def tree(disk: FakeDisk, root: str) -> dict[str, bytes]:
    """Every file below a folder, except for the locks' contents."""
    return {
        path: disk.content(path)
        for path in disk._files
        if path.startswith(f"{root}/") and not path.endswith("LOCK")
    }


async def test_a_store_finds_its_cold_folder_again(disk: FakeDisk) -> None:
    await fill(disk)
    store = read_store(disk, "cold")
    mark = read_format(disk, "data")
    assert store is not None
    assert mark is not None
    assert (store.store_id, store.run, mark.cold) == (mark.store_id, 1, "held")
    assert await found(disk) == 24
    assert verify(disk, "data", "cold").is_clean


async def test_two_servers_cannot_share_a_cold_folder(disk: FakeDisk) -> None:
    await fill(disk)
    boot = opened(disk, **COLD)
    # A copy of the data directory has the store's id and, when started beside it, a lock too.
    disk.make_dir("copy")
    for path, content in tree(disk, "data").items():
        if path.count("/") == 1:
            disk.open(path.replace("data/", "copy/"), create=True).pwrite(content, 0)
    with pytest.raises(StartRefused, match=r"cold.*: in use by another server"):
        opened(disk, **COLD, data_dir=Path("copy"))
    boot.abandon()


async def test_the_cold_folder_of_another_store_is_refused_and_left_alone(disk: FakeDisk) -> None:
    await fill(disk)
    before = tree(disk, "cold")
    await fill(disk, data="other", cold="other-cold")
    with pytest.raises(StartRefused, match=r"is of store .*, but other is store"):
        opened(disk, **COLD, data_dir=Path("other"))
    assert tree(disk, "cold") == before
    assert await found(disk) == 24
    problems = verify(disk, "other", "cold").problems
    assert any("name that store's own cold folder" in problem for problem in problems)


async def test_an_empty_data_directory_beside_a_store_of_its_own_is_refused_and_stays_empty(
    disk: FakeDisk,
) -> None:
    await fill(disk)
    disk.make_dir("unmounted")
    before = tree(disk, "cold")
    with pytest.raises(StartRefused, match=r"is its disk mounted.*--begin-anew [0-9a-f]{32}"):
        opened(disk, **COLD, data_dir=Path("unmounted"))
    assert disk.list_dir("unmounted") == []
    assert tree(disk, "cold") == before


async def test_an_empty_cold_folder_of_a_store_that_used_one_is_refused(disk: FakeDisk) -> None:
    # That also holds if no segment is cold any more, so that none can be missing.
    node = await started(disk, **COLD)
    await append(node, "t", 1)
    await node.close()
    with pytest.raises(StartRefused, match="is the cold disk mounted"):
        opened(disk, **{**COLD, "cold_dir": Path("unmounted")})
    assert not disk.exists("unmounted")
    assert await found(disk) == 1


@pytest.mark.parametrize("cold", ["data", "data/segments", "data/segments/cold", "."])
async def test_folders_that_overlap_are_refused(disk: FakeDisk, cold: str) -> None:
    node = await started(disk)
    await append(node, "t", 1)
    await node.close()
    before = tree(disk, "data")
    with pytest.raises((StartRefused, ValueError), match=r"inside the other|folder other than"):
        opened(disk, cold_dir=Path(cold))
    assert tree(disk, "data") == before


@pytest.mark.parametrize(
    ("data", "cold_dir"),
    [
        *(("another", "data/segments"), ("another", "data/more/cold")),
        *(("data/other", "elsewhere"), ("cold/other/data", "elsewhere")),
    ],
)
async def test_a_folder_inside_one_of_another_store_is_refused(
    disk: FakeDisk, data: str, cold_dir: str
) -> None:
    """Guard: wal/directory.py, `refuse_inside_store`."""
    await fill(disk)
    before = tree(disk, "data"), tree(disk, "cold"), set(disk._dirs)
    with pytest.raises(StartRefused, match=r"lies inside .*(data|cold).*another store"):
        await started(disk, data_dir=Path(data), cold_dir=Path(cold_dir))
    after = tree(disk, "data"), tree(disk, "cold"), disk._dirs - {"another"}
    assert after == before
    assert await found(disk) == 24


@pytest.mark.parametrize("name", ["7", "photos"])
async def test_a_folder_with_other_things_does_not_become_a_cold_one(
    disk: FakeDisk, name: str
) -> None:
    node = await started(disk)
    await append(node, "t", 1)
    await node.close()
    for folder in ("cold", f"cold/{name}"):
        disk.make_dir(folder)
    disk.open(f"cold/{name}/file", create=True)
    with pytest.raises(StartRefused, match="name an empty folder"):
        opened(disk, **COLD)
    with pytest.raises(StartRefused, match="name an empty folder"):
        opened(disk, **COLD, data_dir=Path("new"))
    assert list(tree(disk, "cold")) == [f"cold/{name}/file"]
    assert not disk.exists("new")


async def test_an_older_copy_of_the_data_directory_is_refused(disk: FakeDisk) -> None:
    await fill(disk)
    older = tree(disk, "data")
    assert await found(disk) == 24
    newer = tree(disk, "data")
    put(disk, older, newer)
    with pytest.raises(StartRefused, match="knows 1 runs only: one of the two is an older copy"):
        opened(disk, **COLD)
    put(disk, newer, older)
    assert await found(disk) == 24


def put(disk: FakeDisk, files: dict[str, bytes], instead_of: dict[str, bytes]) -> None:
    """Restore a copy: these files and no others."""
    for path in set(instead_of) - set(files):
        disk.unlink(path)
    for path, content in files.items():
        disk.open(path, create=True).pwrite(content, 0)


@pytest.fixture
def same_id(monkeypatch: pytest.MonkeyPatch) -> None:
    """The adoption makes the id that the manifests here have; those of version 1 had none."""
    monkeypatch.setattr("topics_server.wal.directory.random_hex", lambda size: "ab" * size)


async def test_the_folders_of_version_1_are_taken_over_once(
    disk: FakeDisk, caplog: pytest.LogCaptureFixture
) -> None:
    for folder in ("data", "cold"):
        disk.make_dir(folder)
    disk.open("data/FORMAT", create=True).pwrite(b'{"format": 1}', 0)
    disk.open("cold/note", create=True)  # an older server ignored such a file
    with caplog.at_level("INFO"):
        node = await started(disk, **COLD)
    await node.close()
    assert "cold is now the cold folder of store" in caplog.text
    store = read_store(disk, "cold")
    assert store is not None
    # After that the folder must carry the id.
    disk.unlink("cold/STORE")
    with pytest.raises(StartRefused, match="STORE: is missing"):
        opened(disk, **COLD)


@pytest.mark.usefixtures("same_id")
@pytest.mark.parametrize("nth", range(1, 12))
async def test_a_takeover_that_is_cut_short_goes_on(nth: int) -> None:
    disk = FakeDisk(nth)
    await fill(disk)
    as_version_1(disk)
    boot = opened(disk, **COLD)
    disk.fail("any", "eio", nth=nth, path="*STORE*")
    try:
        boot.ground.begin()
    except StorageError:
        pass
    disk.crash("power")
    assert await found(disk.reopen()) == 24


def as_version_1(disk: FakeDisk) -> None:
    """The files as an older server would have left them."""
    disk.unlink("cold/STORE")
    for path in [path for path in disk._files if path.endswith("/manifest")]:
        manifest = dataclasses.replace(decode_manifest(disk.content(path)), store_id="")
        disk.put(path, encode_manifest(manifest))
    text = b'{"format": 1, "wal_sets": [{"wal_set": 1, "shard_count": 2, "first_lsn": 1}]}'
    disk.open("data/FORMAT", create=True).pwrite(text, 0)
    for path in ("data", "cold"):
        disk.sync_dir(path)
    file = disk.open("data/FORMAT", write=True)
    file.sync()


@pytest.mark.parametrize("content", [b"", b"{}", b'{"format": 1, "store_id": "x", "run": 0}\n'])
async def test_a_damaged_mark_is_refused_by_name_and_heals(disk: FakeDisk, content: bytes) -> None:
    await fill(disk)
    good = disk.content("cold/STORE")
    disk.open("cold/STORE", create=True).pwrite(content, 0)
    with pytest.raises(StartRefused, match="cold/STORE: cannot be read"):
        opened(disk, **COLD)
    for at in range(len(good)):
        disk.open("cold/STORE", create=True).pwrite(good, 0)
        disk.corrupt("cold/STORE", at)
        with pytest.raises(StartRefused, match="cold/STORE: "):
            opened(disk, **COLD)
    disk.open("cold/STORE", create=True).pwrite(good, 0)
    assert await found(disk) == 24


async def test_a_newer_mark_is_refused(disk: FakeDisk) -> None:
    await fill(disk)
    disk.open("cold/STORE", create=True).pwrite(b'{"format": 2}', 0)
    with pytest.raises(StartRefused, match="has format 2, this server knows up to 1"):
        opened(disk, **COLD)


# -- beginning anew -------------------------------------------------------------------------


async def test_beginning_anew_moves_remaining_files_aside_and_deletes_nothing(
    disk: FakeDisk,
) -> None:
    await fill(disk)
    store_id = id_of(disk)
    disk.make_dir("unmounted")
    before = tree(disk, "cold")
    assert begin_anew(disk, "unmounted", "cold", store_id) == [f"cold/set-aside/{store_id}"]
    aside = tree(disk, f"cold/set-aside/{store_id}")
    assert sorted(aside.values()) == sorted(before.values())
    node = await started(disk, **COLD, data_dir=Path("unmounted"))
    assert node.registry.find("t") is None
    await node.close()
    # A second call does nothing to the new store.
    with pytest.raises(StartRefused, match=f"is of store .*, not of {store_id}"):
        begin_anew(disk, "unmounted", "cold", store_id)


@pytest.mark.parametrize("nth", range(1, 40, 3))
async def test_beginning_anew_may_be_cut_short_anywhere_and_repeated(nth: int) -> None:
    disk = FakeDisk(nth)
    await fill(disk)
    store_id = id_of(disk)
    before = sorted([*tree(disk, "data").values(), *tree(disk, "cold").values()])
    disk.fail("any", "eio", nth=nth)
    try:
        begin_anew(disk, "data", "cold", store_id)
    except StorageError:
        if disk.exists("data/FORMAT") or disk.exists("cold/STORE"):
            try:
                assert await found(disk) == 24
            except StorageError:
                assert disk.exists("data/set-aside")
        before = sorted([*tree(disk, "data").values(), *tree(disk, "cold").values()])
        # Only the very last sync may fail after everything has moved.
        if disk.exists("data/FORMAT") or disk.exists("cold/STORE"):
            begin_anew(disk, "data", "cold", store_id)
    disk.heal()
    kept = sorted([*tree(disk, "data").values(), *tree(disk, "cold").values()])
    assert kept == before
    assert await found_nothing(disk)


async def found_nothing(disk: FakeDisk) -> bool:
    node = await started(disk, **COLD)
    is_new = node.registry.find("t") is None
    await node.close()
    return is_new


async def test_beginning_anew_names_the_store_it_is_for(disk: FakeDisk) -> None:
    await fill(disk)
    with pytest.raises(StartRefused, match="not of 00"):
        begin_anew(disk, "data", "cold", "00")
    with pytest.raises(StartRefused, match="no folder named here is of store 00"):
        begin_anew(disk, "none", None, "00")
    boot = opened(disk, **COLD)
    with pytest.raises(StartRefused, match="in use"):
        begin_anew(disk, "data", "cold", id_of(disk))
    boot.abandon()
    assert await found(disk) == 24


async def test_a_cold_folder_without_an_id_can_be_adopted(disk: FakeDisk) -> None:
    await fill(disk)
    disk.unlink("cold/STORE")
    with pytest.raises(StartRefused, match="--adopt-cold"):
        opened(disk, **COLD)
    adopt(disk, "cold")
    assert await found(disk) == 24
    await fill(disk, data="other", cold="other-cold")
    with pytest.raises(StartRefused, match="but data is store"):
        adopt(disk, "other-cold")


def adopt(disk: FakeDisk, cold: str) -> None:
    directory = Directory.open(disk, "data", boot_id="")
    try:
        adopt_cold(disk, directory, cold)
    finally:
        directory.close()


def id_of(disk: FakeDisk) -> str:
    mark = read_format(disk, "data")
    assert mark is not None
    return mark.store_id


async def test_a_folder_of_backups_is_no_cold_folder(disk: FakeDisk) -> None:
    """The folder of backups names the same store; a start must neither write `STORE` nor put
    segments there.
    """
    node = await started(disk)
    store_id = node.ground.directory.store_id
    await node.close()
    disk.make_dir("cold")
    BackupWriter.open(disk, "cold", "data", None, store_id).close()
    before = disk.image()
    with pytest.raises(StartRefused, match="STORE: is that of a folder of backups"):
        opened(disk, **COLD)
    assert disk.image().files["cold/STORE"] == before.files["cold/STORE"]
