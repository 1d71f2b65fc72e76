"""`client.front.event_reader`: the items of events, and a cursor in the middle of one."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from topics_server.client.following.live_events import LiveEvent, LiveRecord
from topics_server.client.front.event_reader import EventReader
from topics_server.client.front.items import (
    CaughtUpItem,
    GapItem,
    LiveItem,
    NoticeItem,
    RecordItem,
)


def records(topic: str, before: str, after: str, *seqs: int) -> LiveEvent:
    data = {"topic": topic, "to_seq": seqs[-1]}
    found = tuple(LiveRecord(seq=seq, ts=1, data=seq) for seq in seqs)
    return LiveEvent("record", topic, data, after, found, before)


def tombstone(first: int, last: int, reason: str = "cap") -> LiveEvent:
    data = {"gap_from": first, "gap_to": last, "reason": reason, "missed_estimate": 1}
    return LiveEvent("tombstone", "t", data, "after", (), "before")


def names(items: list[LiveItem]) -> list[str]:
    assert all(isinstance(item, RecordItem) for item in items)
    return [f"{item.topic}{item.seq}" for item in items if isinstance(item, RecordItem)]


def position(item: LiveItem) -> Any:
    return msgspec.json.decode(item.cursor)


def test_the_last_record_of_an_event_has_its_id() -> None:
    items = EventReader(None).take(records("t", "a", "b", 1, 2, 3))
    assert [position(item) for item in items] == [
        {"id": "a", "handled": {"t": 1}},
        {"id": "a", "handled": {"t": 2}},
        {"id": "b"},
    ]


def test_a_cursor_inside_an_event_goes_on_behind_its_record_beside_other_topics() -> None:
    reader = EventReader(None)
    first = reader.take(records("b", "", "b1", 1))
    [one, *_] = reader.take(records("a", "b1", "a3", 1, 2, 3))
    assert names([*first, one]) == ["b1", "a1"]
    # The server sends the event after `b1` again, and the event of the other topic may come first.
    again = EventReader(one.cursor)
    assert again.cursor == "b1"
    [other] = again.take(records("b", "b1", "x", 2))
    assert position(other) == {"id": "x", "handled": {"a": 1}}
    rest = again.take(records("a", "x", "y", 1, 2, 3))
    assert names(rest) == ["a2", "a3"]
    assert position(rest[0]) == {"id": "x", "handled": {"a": 2}}
    assert position(rest[1]) == {"id": "y"}


def test_an_event_that_ends_before_what_was_handled_is_passed_over() -> None:
    reader = EventReader('{"id":"a","handled":{"t":5}}')
    assert reader.take(records("t", "a", "b", 3, 4)) == []
    assert names(reader.take(records("t", "b", "c", 5, 6))) == ["t6"]


def test_gaps_of_what_was_handled_are_no_losses() -> None:
    cursor = '{"id":"a","handled":{"t":5}}'
    [told] = EventReader(None).take(tombstone(2, 5))
    assert isinstance(told, GapItem)
    assert (told.from_seq, told.to_seq, told.reason, told.missed) == (2, 5, "cap", 1)
    assert EventReader(cursor).take(tombstone(2, 5)) == []
    [partly] = EventReader(cursor).take(tombstone(2, 9))
    assert isinstance(partly, GapItem)
    assert (partly.from_seq, partly.to_seq) == (6, 9)
    reader = EventReader(cursor)
    [anew] = reader.take(tombstone(1, 0, "recreated"))
    assert isinstance(anew, GapItem)
    assert names(reader.take(records("t", "after", "z", 1))) == ["t1"]


def test_other_events_are_news() -> None:
    reader = EventReader(None)
    [caught_up] = reader.take(LiveEvent("caught-up", "t", {"head_seq": 3}, "a"))
    assert isinstance(caught_up, CaughtUpItem)
    [notice] = reader.take(LiveEvent("left-out", "", {"topics": ["x"]}, "a"))
    assert isinstance(notice, NoticeItem)
    assert (notice.name, notice.data) == ("left-out", {"topics": ["x"]})
    assert position(notice) == {"id": "a"}


@pytest.mark.parametrize("cursor", ["", "garbage", "7", "{}", '{"seq":1}', '{"id":7}'])
def test_a_text_that_is_no_cursor_is_refused(cursor: str) -> None:
    with pytest.raises(ValueError, match="not the cursor"):
        EventReader(cursor)
