"""`verify` and `dump` on the files of a killed server: nothing changes, damage is named."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np
import pytest

from tests.storage.fake_disk import FakeDisk
from tests.storage.journal.journal_rig import Life
from topics_server.engine.background.capture import capture
from topics_server.engine.background.seal_plan import plan_seal
from topics_server.engine.subscribe.sessions import SessionTable
from topics_server.engine.topic.topic import Topic
from topics_server.engine.topic.writes.apply import apply_entry
from topics_server.values.appends import decode_append
from topics_server.values.entries import (
    RESERVED_ID_MIN,
    SESSIONS_ID,
    CursorAt,
    Entry,
    RecordsAppended,
    RecordsDeleted,
    SessionEntry,
    SessionMoved,
    SessionOpened,
    SessionOptions,
    SessionsClosed,
    TopicPut,
)
from topics_server.values.errors import StartRefused
from topics_server.values.model import TopicConfig
from topics_server.values.storage_types import SnapshotImage
from topics_server.wal.cold_folder import StoreMark, write_store
from topics_server.wal.directory import Directory, read_format
from topics_server.wal.format.groups import GROUP_MAGIC
from topics_server.wal.segments.packing_process import InlinePacker
from topics_server.wal.segments.store import SealedSegments
from topics_server.wal.snapshots.store import PublishedSnapshots
from topics_server.wal.tools.dump import Item, JournalUnread, dump, verify

TOPIC = 3
TS = 1_700_000_000_000
HOT = f"data/segments/{TOPIC}"


def bodies(first: int, count: int) -> bytes:
    records = [
        b'{"data":{"n" : %d},"tag":"t%d","meta":{"m":%d}}' % (n, n, n)
        for n in range(first, first + count)
    ]
    return b'{"node":"u1","records":[' + b",".join(records) + b"]}"


def append(first_seq: int, count: int) -> RecordsAppended:
    body = bodies(first_seq, count)
    return RecordsAppended(TOPIC, first_seq, count, TS, body, decoded=decode_append(body))


def delete(*seqs: int) -> RecordsDeleted:
    column = np.array(seqs, "<u8").tobytes()
    return RecordsDeleted(TOPIC, TS, column, column)


def killed_server(seed: int = 1) -> FakeDisk:
    """Seqs 1-3 sealed (2 dead), 4-6 in the snapshot (5 dead), 7-9 in the journal (9 dead)."""
    disk = FakeDisk(seed)
    Directory.open(disk, "data", boot_id="boot").note_wal_set(1, 2, 1)
    life = Life(disk)
    life.recover()
    topic = Topic(TOPIC, "orders", 1, TopicConfig(), TS)
    segments = SealedSegments(disk, "data", "cold", InlinePacker())

    def commit(entry: Entry) -> None:
        lsn = life.submit(entry, sync=True)
        assert lsn is not None
        apply_entry(topic, lsn, entry)

    commit(TopicPut(TOPIC, "orders", 1, TopicConfig(), TS))
    commit(append(1, 3))
    commit(delete(2))
    plan = plan_seal(topic, 3, TS, 3, 2**20, 2**40, force=True)
    assert plan is not None
    topic.mark_sealed(plan, segments.put(plan, topic.facts()))
    commit(append(4, 3))
    commit(delete(5))
    life.settle()
    PublishedSnapshots(disk, "data").write(
        SnapshotImage(start_lsn=6, last_lsn=5, next_topic_id=4, parts=[(TOPIC, capture(topic))])
    )
    commit(append(7, 3))
    life.settle()
    commit(delete(9))
    life.settle()
    return life.die("kill")


def test_every_record_is_dumped_once_from_wherever_it_is() -> None:
    items = list(dump(killed_server(), "data", "cold"))
    assert [item["seq"] for item in items] == list(range(1, 10))
    assert [item["deleted"] for item in items] == [n in (2, 5, 9) for n in range(1, 10)]
    assert [item["where"].split()[0] for item in items] == ["hot"] * 3 + ["snapshot"] * 3 + [
        "journal"
    ] * 3
    line = msgspec.json.encode(items[6])
    assert line == (
        b'{"topic":"orders","seq":7,"ts":1700000000000,"node":"u1","tag":"t7",'
        b'"data":{"n" : 7},"meta":{"m":7},"deleted":false,"where":"journal 6"}'
    )
    assert items[1]["data"] is None


def test_entries_are_dumped_on_request() -> None:
    items = list(dump(killed_server(), "data", "cold", with_journal=True))[9:]
    assert [(item["lsn"], item["entry"]) for item in items] == [
        (6, "RecordsAppended"),
        (7, "RecordsDeleted"),
    ]
    assert items[1]["firsts"] == [9]
    assert msgspec.json.encode(items)


def test_what_a_killed_server_left_is_whole() -> None:
    report = verify(killed_server(), "data", "cold")
    assert report.problems == []
    assert report.is_clean
    counts = report.counts
    assert (counts["segments"], counts["sealed_records"], counts["sealed_deleted"]) == (1, 3, 1)
    assert (counts["snapshots"], counts["snapshot_parts"], counts["journal_entries"]) == (1, 1, 2)


def test_verify_and_dump_change_nothing() -> None:
    disk = killed_server()
    before = len(disk.log)
    verify(disk, "data", "cold")
    list(dump(disk, "data", "cold", with_journal=True))
    assert {op for op, _ in disk.log[before:]} <= {"open"}


def test_a_torn_tail_is_information() -> None:
    disk = killed_server()
    names = [name for name in disk.list_dir("data/wal") if name.endswith(".wal")]
    last = max(names, key=lambda name: disk.content(f"data/wal/{name}").rstrip(b"\0").__len__())
    path = f"data/wal/{last}"
    end = len(disk.content(path).rstrip(b"\0"))
    file = disk.open(path, write=True)
    file.pwrite(b"\xffGR\0 half a group", (end + 63) // 64 * 64)
    report = verify(disk, "data", "cold")
    assert report.problems == []
    assert len(report.infos) == 1
    assert "unfinished write" in report.infos[0]
    # A start moves these bytes aside; `verify` reports only what would make a start fail.
    kept = f"data/wal/torn/{last}.{report.infos[0].partition(' at ')[2].split()[0]}"
    disk.put(kept, b"half of them")
    assert verify(disk, "data", "cold").problems == []
    disk.fail("open", "eio", path=kept)
    (problem,) = verify(disk, "data", "cold").problems
    assert kept in problem


def flip_byte(path: str, offset: int) -> Callable[[FakeDisk], None]:
    def damage(disk: FakeDisk) -> None:
        disk.corrupt(path, offset % len(disk.content(path)), 0x10)

    return damage


def remove(path: str) -> Callable[[FakeDisk], None]:
    return lambda disk: disk.unlink(path)


DATA, IDX, MANIFEST = f"{HOT}/0000000001.data", f"{HOT}/0000000001.idx", f"{HOT}/manifest"
SNAPSHOT = "data/snapshots/00000000000000000001.snap"
DAMAGES = {
    "record": (flip_byte(DATA, 64 + 33), "checksum of seq 1 fails"),
    "record's own checksum": (flip_byte(DATA, -4), "checksum of the records fails"),
    "header": (flip_byte(DATA, 20), "checksum of the segment's header fails"),
    "flag": (flip_byte(DATA, -3), "delete flag of seq 1 is 0x10"),
    "index": (flip_byte(IDX, 140), "checksum of the index fails"),
    "manifest": (flip_byte(MANIFEST, 90), "checksum of the manifest fails"),
    "snapshot part": (flip_byte(SNAPSHOT, 70), "checksum of the part of topic 3 fails"),
    "snapshot table": (flip_byte(SNAPSHOT, -1), "checksum of the snapshot's header and table"),
    "data missing": (remove(DATA), "listed segment file is missing"),
    "index missing": (remove(IDX), "listed segment file is missing"),
}


@pytest.mark.parametrize("name", list(DAMAGES))
def test_damage_is_a_problem_and_named(name: str) -> None:
    damage, expected = DAMAGES[name]
    disk = killed_server()
    damage(disk)
    report = verify(disk, "data", "cold")
    assert not report.is_clean
    assert any(expected in problem for problem in report.problems), report.problems


def test_damage_in_the_journal_below_what_was_synced_is_a_problem() -> None:
    disk = killed_server()
    for name in disk.list_dir("data/wal"):
        at = disk.content(f"data/wal/{name}").find(b'"t7"')
        if at > 0:
            disk.corrupt(f"data/wal/{name}", at)
    report = verify(disk, "data", "cold")
    assert len(report.problems) == 1
    assert "shows that it was synced" in report.problems[0]


def dumped(disk: FakeDisk, *, with_journal: bool = False) -> tuple[list[Item], JournalUnread]:
    """The dumped records of a directory with a damaged journal, and the last messages."""
    items: list[Item] = []
    with pytest.raises(JournalUnread) as caught:
        items.extend(dump(disk, "data", "cold", with_journal=with_journal))
    return items, caught.value


def find_in_journal(disk: FakeDisk, part: bytes) -> tuple[str, int]:
    """The file and offset of these bytes."""
    paths = [f"data/wal/{name}" for name in disk.list_dir("data/wal") if name.endswith(".wal")]
    (found,) = [(p, disk.content(p).find(part)) for p in paths if part in disk.content(p)]
    return found


def test_a_damaged_journal_costs_only_what_lies_in_it() -> None:
    disk = killed_server()
    path, at = find_in_journal(disk, b'"t7"')
    disk.corrupt(path, at)
    items, said = dumped(disk)
    assert [item["seq"] for item in items] == [1, 2, 3, 4, 5, 6]
    assert [item["deleted"] for item in items] == [False, True, False, False, True, False]
    assert (said.path, said.last_lsn) == (path, 0)
    group = disk.content(path).rfind(GROUP_MAGIC, 0, at)
    assert f"could not be read; what it adds or deletes behind that is not shown: {path}: " in str(
        said
    )
    assert f" at {group}, but the group at " in str(said)


def test_what_lies_before_the_damage_is_dumped() -> None:
    disk = killed_server()
    path, at = find_in_journal(disk, np.array([9], "<u8").tobytes() * 2)
    disk.corrupt(path, at)
    items, said = dumped(disk, with_journal=True)
    assert said.last_lsn == 6
    assert "was read up to lsn 6 only" in str(said)
    assert [item["seq"] for item in items[:-1]] == list(range(1, 10))
    assert not items[8]["deleted"]  # the damage is in its delete
    assert items[-1]["lsn"] == 6


def test_a_missing_journal_costs_only_what_lay_in_it() -> None:
    disk = killed_server()
    for name in disk.list_dir("data/wal"):
        disk.unlink(f"data/wal/{name}")
    items, said = dumped(disk)
    assert [item["seq"] for item in items] == [1, 2, 3, 4, 5, 6]
    assert "journal files of wal set 1, shard 0 are missing" in str(said)


def test_a_damaged_record_does_not_hide_its_neighbours() -> None:
    disk = killed_server()
    flip_byte(DATA, 64 + 33)(disk)
    items = list(dump(disk, "data", "cold"))
    assert [item["seq"] for item in items] == list(range(1, 10))
    assert "damaged" in items[0]
    assert items[2]["tag"] == "t3"


def test_a_cold_folder_that_is_not_named_is_a_problem() -> None:
    disk = killed_server()
    segments = SealedSegments(disk, "data", "cold", InlinePacker())
    facts = segments.open_topic(TOPIC)[0].facts
    assert facts is not None
    segments.finish_recovery(TOPIC)
    segments.relocate(TOPIC, 1, facts)
    mark = read_format(disk, "data")
    assert mark is not None
    write_store(disk, "cold", StoreMark(store_id=mark.store_id))
    assert verify(disk, "data", "cold").problems == []
    assert next(dump(disk, "data", "cold"))["where"] == "cold segment 1"
    assert any("no cold folder" in problem for problem in verify(disk, "data").problems)
    elsewhere = verify(disk, "data", "elsewhere").problems
    assert any("is the cold disk mounted" in problem for problem in elsewhere)


def test_leftovers_of_a_crash_are_information() -> None:
    disk = killed_server()
    for name in ("0000000009.data", "0000000001.idx.tmp"):
        disk.open(f"{HOT}/{name}", create=True)
    report = verify(disk, "data", "cold")
    assert report.problems == []
    assert len(report.infos) == 2


def test_what_is_no_data_directory_is_refused() -> None:
    disk = FakeDisk()
    disk.make_dir("data")
    for call in (verify, lambda fs, path: list(dump(fs, path))):
        with pytest.raises(StartRefused, match="no FORMAT"):
            call(disk, "data")


# -- watch sessions ------------------------------------------------------------------------


def watched_server(*more: tuple[int, bytes]) -> FakeDisk:
    """One session in the snapshot; in the journal it moves, and another is opened and closed."""
    disk = FakeDisk(1)
    Directory.open(disk, "data", boot_id="boot").note_wal_set(1, 2, 1)
    life = Life(disk)
    life.recover()
    table = SessionTable()

    def commit(entry: SessionEntry) -> None:
        lsn = life.submit(entry, urgent=True)
        assert lsn is not None
        table.apply(lsn, entry)

    options = SessionOptions([], 256, 262_144, 15_000, 6, False)
    commit(SessionOpened("wid_kept", TS, options, [CursorAt("orders", TOPIC, 1, 4)]))
    life.settle()
    parts = [(SESSIONS_ID, part) for part in table.capture()]
    PublishedSnapshots(disk, "data").write(
        SnapshotImage(start_lsn=2, last_lsn=1, next_topic_id=4, parts=[*parts, *more])
    )
    commit(SessionMoved("wid_kept", TS, False, [CursorAt("orders", TOPIC, 1, 9)]))
    commit(SessionOpened("wid_gone", TS, options, []))
    commit(SessionsClosed(["wid_gone"], TS))
    life.settle()
    return life.die("kill")


def test_watch_sessions_are_verified_and_counted() -> None:
    report = verify(watched_server(), "data")
    assert report.problems == []
    assert (report.counts["watch_sessions"], report.counts["journal_entries"]) == (1, 3)


def test_entries_of_watch_sessions_are_dumped_on_request_and_are_no_records() -> None:
    disk = watched_server()
    assert list(dump(disk, "data")) == []
    items = list(dump(disk, "data", with_journal=True))
    assert msgspec.json.encode(items[0]) == (
        b'{"lsn":2,"entry":"SessionMoved","wid":"wid_kept","ts":1700000000000,'
        b'"is_streaming":false,"cursors":[["orders",3,1,9]]}'
    )
    assert [item["entry"] for item in items[1:]] == ["SessionOpened", "SessionsClosed"]


def sessions_part(*images: list[object], version: int = 1) -> bytes:
    return msgspec.msgpack.encode([version, 1, list(images)])


def image_of(wid: str, lsn: int) -> list[object]:
    return [wid, [[], 1, 1, 1, 4, False], [], TS, TS, False, lsn]


@pytest.mark.parametrize(
    ("part_id", "part", "expected"),
    [
        (SESSIONS_ID, b"\xc1", "not a part of the watch sessions"),
        (SESSIONS_ID, sessions_part(version=2), "has version 2, not 1"),
        (SESSIONS_ID, sessions_part(image_of("wid_kept", 0)), "wid_kept occurs twice"),
        (SESSIONS_ID, sessions_part(image_of("wid_new", 2)), "wid_new is newer than its snapshot"),
        (RESERVED_ID_MIN, b"later", "newer version"),
    ],
)
def test_a_part_of_watch_sessions_that_makes_no_sense_is_a_problem(
    part_id: int, part: bytes, expected: str
) -> None:
    report = verify(watched_server((part_id, part)), "data")
    assert len(report.problems) == 1
    assert expected in report.problems[0]


@pytest.mark.parametrize("offset", [0, 8, 45, 60])
def test_a_byte_flipped_in_a_frame_of_a_session_is_found(offset: int) -> None:
    disk = watched_server()
    path, at = find_in_journal(disk, b"wid_kept\xa2ts\xcf")
    frame = disk.content(path).rfind(b"\xff" * 8, 0, at) - 16
    disk.corrupt(path, frame + offset)
    report = verify(disk, "data")
    assert report.problems or report.infos
    # Damaged or torn, no part of that group counts as an entry.
    assert report.counts["journal_entries"] < 3


def test_an_end_mark_that_binds_nobody_yet_and_cannot_be_read_is_a_problem() -> None:
    """A killed first start left an end mark, and the next start must read it before it writes."""
    disk = FakeDisk()
    Directory.open(disk, "data", boot_id="boot").close()
    life = Life(disk, shards=1)
    life.recover()
    disk = life.die("kill")
    assert verify(disk, "data").problems == []
    disk.fail("read", "eio", path="*.end", times=None)
    (problem,) = verify(disk, "data").problems
    assert problem == "journal: data/wal/000001-00.end: EIO"
