"""`cli.importing.appending` against a server with scripted answers: lost answers and rivals."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

import pytest

from tests.unit.cli.door import Door, Said, opened
from topics_server.cli import retries
from topics_server.cli.connection import Failure, ServerConnection
from topics_server.cli.importing import appending
from topics_server.cli.importing.appending import CHECK_BITS, Appending, ImportBatch, SourcePlace
from topics_server.client import Backoff

BATCH = ImportBatch([b'{"data":1}', b'{"data":2}'], 2, 5, "lines 1 to 2")
EPOCH = 2 << CHECK_BITS | 5


@pytest.fixture
def door(monkeypatch: pytest.MonkeyPatch) -> Iterator[Door]:
    """The server; retries follow at once."""
    monkeypatch.setattr(retries, "PAUSES", Backoff(base_ms=10, cap_ms=10))
    with opened() as found:
        yield found


def refused(
    status: int, code: str, headers: Mapping[str, str] | None = None, **detail: object
) -> Said:
    error = {"code": code, "message": "why", "detail": detail}
    return Said(status, headers or {}, json.dumps({"error": error}).encode())


def answered(**fields: object) -> Said:
    return Said(body=json.dumps(fields).encode())


ABSENT = refused(404, "topic_not_found")
UNKNOWN = refused(409, "producer_seq_conflict", {"Producer-Expected-Seq": "0"})
MOVED_ON = refused(409, "condition_failed", reason="head", seq=1)


def known(epoch: int) -> Said:
    return refused(403, "producer_fenced", {"Producer-Epoch": str(epoch)})


def stored(last_seq: int) -> Said:
    return Said(204, {"Producer-Epoch": "1", "Producer-Seq": "0", "Topic-Last-Seq": str(last_seq)})


def appending_to(door: Door, retry_s: float = 30) -> Appending:
    return Appending(
        ServerConnection(door.url), "t", "s", create=True, retry_s=retry_s, tell=lambda _: None
    )


def begun(door: Door) -> Appending:
    """An import into a topic that does not exist yet."""
    door.answers = [ABSENT, ABSENT]
    found = appending_to(door)
    assert found.resume(append_anyway=False) is None
    door.asked.clear()
    return found


def test_a_batch_carries_its_place_and_the_head_that_it_expects(door: Door) -> None:
    made = begun(door)
    door.answers = [answered(first_seq=1), answered(first_seq=3)]
    made.send(BATCH)
    made.send(ImportBatch([b'{"data":3}'], 9, 1, "lines 3 to 9"))
    first, second = door.asked
    assert first.headers["producer-id"] == "import:s"
    assert first.headers["producer-epoch"] == str(EPOCH)
    assert first.headers["producer-seq"] == "0"
    body = json.loads(first.body)
    assert body["if"] == {"head_seq": 0}
    assert body["records"] == [{"data": 1}, {"data": 2}]
    assert second.headers["producer-epoch"] == str(9 << CHECK_BITS | 1)
    assert json.loads(second.body)["if"] == {"head_seq": 2}
    assert made.head_seq == 3


def test_an_answer_that_is_lost_is_asked_for_again(door: Door) -> None:
    made = begun(door)
    door.answers = [None, refused(503, "not_ready"), stored(2)]
    made.send(BATCH)
    assert [each.headers["producer-epoch"] for each in door.asked] == [str(EPOCH)] * 3
    assert made.head_seq == 2


def test_a_foreign_append_in_between_moves_the_expected_head(door: Door) -> None:
    made = begun(door)
    door.answers = [MOVED_ON, UNKNOWN, answered(head_seq=7), answered(first_seq=8)]
    made.send(BATCH)
    assert json.loads(door.asked[-1].body)["if"] == {"head_seq": 7}
    assert made.head_seq == 9


def test_another_import_of_the_same_source_ends_this_one(door: Door) -> None:
    made = begun(door)
    door.answers = [MOVED_ON, known(1 << CHECK_BITS)]
    with pytest.raises(Failure, match="another import of this source into topic t is at work"):
        made.send(BATCH)
    made = begun(door)
    door.answers = [known(3 << CHECK_BITS)]
    with pytest.raises(Failure, match="another import"):
        made.send(BATCH)


def test_it_gives_up_against_writers_that_are_always_faster(
    door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(appending, "OVERTAKEN_MAX", 3)
    made = begun(door)
    door.answers = [MOVED_ON, UNKNOWN, answered(head_seq=7)] * 3
    with pytest.raises(Failure, match="other clients append to topic t too often"):
        made.send(BATCH)
    assert door.answers == []


def test_a_refusal_names_the_lines_and_a_smaller_batch(door: Door) -> None:
    made = begun(door)
    door.answers = [refused(400, "batch_too_large", max_batch_records=1)]
    with pytest.raises(Failure, match=r"--batch-records 1$"):
        made.send(BATCH)
    door.answers = [refused(400, "invalid_request", field="records[1].meta")]
    with pytest.raises(Failure, match=r"records\[1\].meta.*lines 1 to 2; nothing of them"):
        made.send(BATCH)


def test_the_place_is_read_from_the_epoch(door: Door) -> None:
    door.answers = [answered(head_seq=4), known(3 << CHECK_BITS | 77)]
    made = appending_to(door)
    assert made.resume(append_anyway=False) == SourcePlace(3, 77)
    assert made.head_seq == 4


def test_records_of_others_are_refused_unless_allowed(door: Door) -> None:
    nothing = answered(records=[], next_from_seq=4, caught_up=True)
    door.answers = [answered(head_seq=4), UNKNOWN, nothing]
    with pytest.raises(Failure, match=r"topic t has had 4 records.*--append-anyway"):
        appending_to(door).resume(append_anyway=False)
    door.answers = [answered(head_seq=4), UNKNOWN, nothing]
    assert appending_to(door).resume(append_anyway=True) is None


def test_stamps_tell_the_place_once_the_producer_is_forgotten(
    door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1_000 * appending.FORGOTTEN_MS
    monkeypatch.setattr(appending, "now_ms", lambda: now)
    old = now - appending.FORGOTTEN_MS - 1

    def record(seq: int, ts: int, **meta: object) -> dict[str, object]:
        return {"$seq": seq, "$ts": ts, "data": 0, "meta": meta}

    records = [
        record(1, old, **{"$imported": {"from": "s", "line": 5}}),
        record(2, old, **{"$imported": {"from": "other", "line": 9}}),
        record(3, old, **{"$imported": "of nobody"}),
        {"$seq": 4, "$ts": old, "data": 0},
        # If an import had written this recent record, the topic would still have its producer: so
        # the import ignores the record.
        record(5, now, **{"$imported": {"from": "s", "line": 8}}),
    ]
    page = answered(records=records, next_from_seq=5, caught_up=False)
    door.answers = [answered(head_seq=9), UNKNOWN, page]
    assert appending_to(door).resume(append_anyway=False) == SourcePlace(5, None)


def test_a_server_that_is_away_says_how_to_go_on(door: Door) -> None:
    door.answers = [refused(429, "throttled")]
    with pytest.raises(Failure, match=r"throttled: why \(the request; run it again to continue\)"):
        appending_to(door, 0).resume(append_anyway=False)
