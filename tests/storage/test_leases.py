"""Lease entries and parts of leases on disk: verified, dumped, and their damage is found."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec
import pytest

from tests.storage.fake_disk import FakeDisk
from tests.storage.journal.journal_rig import Life
from tests.storage.test_dump import find_in_journal
from topics_server.queue.leases.lease_table import LeaseTable
from topics_server.values.appends import decode_append
from topics_server.values.entries import (
    LEASES_ID,
    Entry,
    LeasesExtended,
    LeasesGranted,
    LeasesReleased,
    RecordsAppended,
    Source,
    TopicPut,
)
from topics_server.values.model import TopicConfig, TopicType
from topics_server.values.storage_types import LeaseImage, LeasesPart, QueueImage, SnapshotImage
from topics_server.wal.directory import Directory
from topics_server.wal.snapshots.parts import decode_leases
from topics_server.wal.snapshots.store import PublishedSnapshots
from topics_server.wal.tools.dump import dump, verify

VECTORS: Final = Path(__file__).parents[1] / "vectors" / "snapshots"
VECTOR: Final = VECTORS / "leases_errors.part"
# The form before jobs had reasons.
OLDER: Final = VECTORS / "leases.part"
QUEUE: Final = 3
TS: Final = 1_700_000_000_000
BODY: Final = b'{"records":[{"data":1},{"data":2},{"data":3,"delay_ms":5000}]}'

GOLDEN: Final = LeasesPart(
    version=1,
    applied_lsn=41,
    queues=[
        QueueImage(
            queue_id=QUEUE,
            heard_lsn=40,
            next_unclaimed_seq=6,
            dead_lettered=2,
            leases=[LeaseImage(1, 2**64 - 1, "worker-1", TS + 30_000, 2, TS, 9)],
            returned=[(2, TS), (4, TS + 5_000)],
            delayed=[(7, TS + 60_000)],
            deliveries=[(2, 1), (4, 3)],
            moved=[5],
            errors=[(1, "timeout"), (4, 'no "such" file')],
        ),
        QueueImage(8, 12, 1, 0, [], [], [], [], []),
    ],
)


def granted(*seqs: int, lsn: int = 0) -> LeasesGranted:
    leases = [(seq, 2**60 + 100 * lsn + seq) for seq in seqs]
    return LeasesGranted(QUEUE, "worker-1", TS, TS + 30_000, 0, leases)


def killed_server(*more: tuple[int, bytes]) -> FakeDisk:
    """Two leases in the snapshot; in the journal one is extended, one released, one new."""
    disk = FakeDisk(1)
    Directory.open(disk, "data", boot_id="boot").note_wal_set(1, 2, 1)
    life = Life(disk)
    life.recover()
    lease_table = LeaseTable(1)

    def commit(entry: Entry) -> int:
        lsn = life.submit(entry, sync=True)
        assert lsn is not None
        if entry.topic_id == LEASES_ID:
            lease_table.apply(lsn, entry)
        return lsn

    config = TopicConfig(type=TopicType.QUEUE, leases_durable=True)
    commit(TopicPut(QUEUE, "jobs", 1, config, TS))
    commit(RecordsAppended(QUEUE, 1, 3, TS, BODY, grammar=2, decoded=decode_append(BODY)))
    last_lsn = commit(granted(1, 2))
    life.settle()
    parts = [(LEASES_ID, part) for part in lease_table.capture()]
    PublishedSnapshots(disk, "data").write(
        SnapshotImage(start_lsn=1, last_lsn=last_lsn, next_topic_id=4, parts=[*parts, *more])
    )
    commit(LeasesExtended(QUEUE, TS, TS + 60_000, [1]))
    commit(LeasesReleased(QUEUE, TS, [(2, TS)]))
    commit(granted(2, lsn=6))
    life.settle()
    return life.die("kill")


def test_the_golden_part_is_read_and_written_byte_for_byte() -> None:
    assert msgspec.msgpack.encode(GOLDEN) == VECTOR.read_bytes()
    assert decode_leases(VECTOR.read_bytes()) == GOLDEN


def test_the_golden_part_of_before_is_read() -> None:
    without = [msgspec.structs.replace(image, errors=[]) for image in GOLDEN.queues]
    assert decode_leases(OLDER.read_bytes()) == msgspec.structs.replace(GOLDEN, queues=without)


def test_the_books_restore_the_golden_part() -> None:
    lease_table = LeaseTable(1)
    lease_table.restore(VECTOR.read_bytes())
    book = lease_table.find(QUEUE)
    assert book is not None
    (lease,) = book.leases_after(TS, 0, 10)
    assert (lease.seq, lease.lease_id, lease.node) == (1, 2**64 - 1, "worker-1")
    assert (lease.deadline_ms, lease.deliveries, lease.claimed_ts) == (TS + 30_000, 2, TS)
    assert {seq: job.deliveries for seq, job in book.jobs.items()} == {1: 2, 2: 1, 4: 3}
    assert {seq: job.error for seq, job in book.jobs.items()} == {
        1: "timeout",
        2: "",
        4: 'no "such" file',
    }
    # The leases are captured again.
    (part,) = lease_table.capture()
    captured = {image.queue_id: image.errors for image in decode_leases(part).queues}
    assert captured == {QUEUE: [(1, "timeout"), (4, 'no "such" file')], 8: []}
    assert book.dead_lettered == 2
    assert lease_table.find(8) is not None


def test_leases_are_verified_and_counted() -> None:
    report = verify(killed_server(), "data")
    assert report.problems == []
    assert (report.counts["leases"], report.counts["journal_entries"]) == (2, 6)


def test_entries_of_leases_are_dumped_on_request_and_are_no_records() -> None:
    disk = killed_server()
    assert [item["seq"] for item in dump(disk, "data")] == [1, 2, 3]
    items = [item for item in dump(disk, "data", with_journal=True) if "entry" in item]
    assert [item["entry"] for item in items[2:]] == [
        "LeasesGranted",
        "LeasesExtended",
        "LeasesReleased",
        "LeasesGranted",
    ]
    assert msgspec.json.encode(items[3]) == (
        b'{"lsn":4,"entry":"LeasesExtended","queue_id":3,"ts":1700000000000,'
        b'"deadline_ms":1700000060000,"seqs":[1]}'
    )
    assert items[1]["grammar"] == 2


def test_a_source_mark_is_dumped() -> None:
    disk = FakeDisk(1)
    Directory.open(disk, "data", boot_id="boot").note_wal_set(1, 2, 1)
    life = Life(disk)
    life.recover()
    body = b'{"records":[{"data":1}]}'
    life.submit(RecordsAppended(9, 1, 1, TS, body, source=Source(QUEUE, [5])), sync=True)
    life.settle()
    items = list(dump(life.die("kill"), "data", with_journal=True))
    assert msgspec.json.encode(items[-1]["source"]) == b"[3,[5],false]"


def part(*queues: QueueImage, applied_lsn: int = 1, version: int = 1) -> bytes:
    return msgspec.msgpack.encode(LeasesPart(version, applied_lsn, list(queues)))


def queue(queue_id: int, *seqs: int, heard_lsn: int = 1) -> QueueImage:
    leases = [LeaseImage(seq, seq, "w", TS, 1, TS, 0) for seq in seqs]
    return QueueImage(queue_id, heard_lsn, 1, 0, leases, [], [], [], [])


@pytest.mark.parametrize(
    ("encoded", "expected"),
    [
        (b"\xc1", "not a part of the leases"),
        (part(version=2), "has version 2, not 1"),
        (part(queue(QUEUE, 2)), "seq 2 of queue 3 is leased twice"),
        (part(queue(5, 7, 7)), "seq 7 of queue 5 is leased twice"),
        (part(applied_lsn=9), "the leases are newer than their snapshot"),
        (part(queue(5, heard_lsn=9)), "leases of queue 5 are newer than their snapshot"),
    ],
)
def test_a_part_of_leases_that_makes_no_sense_is_a_problem(encoded: bytes, expected: str) -> None:
    report = verify(killed_server((LEASES_ID, encoded)), "data")
    assert len(report.problems) == 1
    assert expected in report.problems[0]


def test_pieces_of_several_queues_are_no_problem() -> None:
    more = part(queue(5, 1, 2), queue(QUEUE, 3)), part(queue(5, 3))
    report = verify(killed_server(*[(LEASES_ID, piece) for piece in more]), "data")
    assert report.problems == []
    assert report.counts["leases"] == 6


@pytest.mark.parametrize("offset", [0, 4, 6, 8, 16, 45, 60])
def test_a_byte_flipped_in_a_frame_of_a_lease_is_found(offset: int) -> None:
    disk = killed_server()
    path, at = find_in_journal(disk, b"\xabdeadline_ms\xcf" + (TS + 60_000).to_bytes(8, "big"))
    reserved = LEASES_ID.to_bytes(8, "little")
    frame = disk.content(path).rfind(reserved, 0, at) - 16
    disk.corrupt(path, frame + offset)
    report = verify(disk, "data")
    assert report.problems or report.infos
    # Damaged or torn, no part of that group counts as an entry.
    assert report.counts["journal_entries"] < 6


@pytest.mark.parametrize("at", range(0, 170, 13))
def test_a_byte_flipped_in_a_part_of_leases_is_found(at: int) -> None:
    disk = killed_server((LEASES_ID, part(queue(5, 7))))
    (path,) = [f"data/snapshots/{name}" for name in disk.list_dir("data/snapshots")]
    start = disk.content(path).find(b"worker-1") - 60
    disk.corrupt(path, start + at)
    report = verify(disk, "data")
    assert any("snap" in problem for problem in report.problems)
