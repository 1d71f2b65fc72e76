"""`cli.importing.other_server` against a server with scripted answers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.unit.cli.door import Door, Said, opened
from topics_server.cli.connection import Failure, ServerConnection
from topics_server.cli.details import TopicDetails
from topics_server.cli.importing.appending import CHECK_MASK, SourcePlace
from topics_server.cli.importing.other_server import ServerSource, SourceServer


@pytest.fixture
def door() -> Iterator[Door]:
    with opened() as found:
        yield found


def record(seq: int, data: object) -> dict[str, Any]:
    return {"$seq": seq, "$ts": 1000 + seq, "data": data}


def page(*records: dict[str, Any], head: int = 9, **more: object) -> Said:
    last = records[-1]["$seq"] if records else head
    shown = {"records": records, "next_from_seq": last, "caught_up": last >= head, **more}
    return Said(body=json.dumps(shown).encode())


def source_of(door: Door, told: list[str], head: int = 9) -> ServerSource:
    server = SourceServer(ServerConnection(door.url), 0, told.append)
    details = TopicDetails("t", head, 1, head, 0, epoch=3)
    return ServerSource(server, details, name="s", batch_records=2, tell=told.append)


def place_of(door: Door, seq: int, data: object) -> SourcePlace:
    """The position after this record."""
    door.answers = [page(record(seq, data), head=seq)]
    ((batch, _),) = source_of(door, [], head=seq).batches(None)
    assert batch is not None
    assert batch.position == seq
    return SourcePlace(seq, batch.check & CHECK_MASK)


def test_the_place_is_continued_behind_the_last_record(door: Door) -> None:
    place = place_of(door, 5, "five")
    door.asked.clear()
    door.answers = [page(record(5, "five")), page(record(6, 6), record(7, 7)), page(record(9, 9))]
    found = list(source_of(door, []).batches(place))
    assert [batch.position for batch, _ in found if batch is not None] == [7, 9]
    assert [json.loads(asked.body)["from_seq"] for asked in door.asked] == [4, 5, 7]
    assert json.loads(found[0][0].records[0]) == {  # type: ignore[union-attr]
        "data": 6,
        "meta": {"$imported": {"from": "s", "seq": 6, "ts": 1006}},
    }


def test_another_record_at_the_place_is_another_topic(door: Door) -> None:
    place = place_of(door, 5, "five")
    door.answers = [page(record(5, "other"))]
    with pytest.raises(Failure, match=r"record 5 of topic t of .* is not the one"):
        next(source_of(door, []).batches(place))


def test_a_deleted_record_at_the_place_tells_nothing(door: Door) -> None:
    place = place_of(door, 5, "five")
    door.answers = [page(record(8, 8)), page(record(8, 8), head=8)]
    ((batch, _),) = source_of(door, [], head=8).batches(place)
    assert batch is not None
    assert batch.position == 8


def test_a_head_below_the_place_is_another_topic(door: Door) -> None:
    with pytest.raises(Failure, match="imported up to seq 10 and has 9 seqs now"):
        next(source_of(door, []).batches(SourcePlace(10, None)))


def test_gaps_are_told_and_counted(door: Door) -> None:
    told: list[str] = []
    gap = {"gap_from": 1, "gap_to": 6, "reason": "ttl", "missed_estimate": 6}
    door.answers = [page(record(7, 7), tombstone=gap), page()]
    source = source_of(door, told)
    assert [batch is None for batch, _ in source.batches(None)] == [False, True]
    assert told == ["t: gap: records 1 to 6 are gone at the source (ttl)"]
    assert source.tally.gaps == 1


def test_records_behind_the_head_of_the_begin_wait_for_the_next_run(door: Door) -> None:
    door.answers = [page(record(1, 1), record(2, 2), head=1000)]
    assert len(list(source_of(door, [], head=2).batches(None))) == 1
    assert door.answers == []


def test_a_topic_that_is_made_again_meanwhile_ends_the_import(door: Door) -> None:
    door.answers = [page(record(1, 1), record(2, 2), epoch=3), page(record(1, 1), epoch=4)]
    batches = source_of(door, []).batches(None)
    next(batches)
    with pytest.raises(Failure, match="was dropped and made again while it was read"):
        next(batches)
