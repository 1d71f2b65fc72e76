"""`client.front.page_reader`: reading page after page, also when the topic is recreated in
between.
"""

from __future__ import annotations

from typing import Any

import msgspec

from topics_server.client.calls import Call, QueueAddress
from topics_server.client.front.items import GapItem, ReadItem, RecordItem
from topics_server.client.front.page_reader import PageReader
from topics_server.client.records.topic_calls import RecordsPage, StoredRecord

HERE = QueueAddress("http://h", "t")
RAW = msgspec.Raw(b"null")


def page(*seqs: int, head: int, epoch: int = 1, **more: Any) -> RecordsPage:
    records = [StoredRecord(seq, 1, RAW) for seq in seqs]
    next_seq = seqs[-1] if seqs else head
    return RecordsPage(records, next_seq, head, next_seq == head, epoch=epoch, **more)


def asked(call: Call[Any] | None) -> Any:
    assert call is not None
    assert call.body is not None
    return msgspec.json.decode(call.body)


def shown(items: list[ReadItem]) -> list[Any]:
    return [item.seq if isinstance(item, RecordItem) else item.reason for item in items]


def reader(cursor: str | None = None, **start: Any) -> PageReader:
    return PageReader(HERE, cursor=cursor, start=start, fields={"limit": 2, "filter": None})


def test_a_read_ends_at_the_head_of_its_first_page() -> None:
    pages = reader(last=2)
    assert asked(pages.call()) == {"limit": 2, "last": 2, "include_tags": True}
    assert shown(pages.take(page(1, 2, head=4))) == [1, 2]
    assert asked(pages.call())["from_seq"] == 2
    assert "last" not in asked(pages.call())
    assert shown(pages.take(page(3, 4, head=9))) == [3, 4]
    assert pages.call() is None


def test_a_page_of_another_incarnation_is_read_from_its_beginning() -> None:
    cursor = '{"topic":"t","seq":7,"epoch":1}'
    pages = reader(cursor)
    assert asked(pages.call())["from_seq"] == 7
    [gap] = pages.take(page(8, 9, head=9, epoch=2))
    assert isinstance(gap, GapItem)
    assert (gap.reason, gap.cursor) == ("recreated", '{"topic":"t","seq":0,"epoch":2}')
    assert asked(pages.call())["from_seq"] == 0
    items = pages.take(page(1, 2, head=2, epoch=2))
    assert shown(items) == [1, 2]
    assert items[-1].cursor == '{"topic":"t","seq":2,"epoch":2}'
    assert pages.call() is None


def test_an_incarnation_that_the_server_tells_is_told_once() -> None:
    pages = reader('{"topic":"t","seq":7,"epoch":1}')
    lost = {"gap_from": 1, "gap_to": 0, "reason": "recreated"}
    assert shown(pages.take(page(1, 2, head=2, epoch=2, tombstone=lost))) == ["recreated", 1, 2]


def test_a_gap_moves_the_position() -> None:
    lost = {"gap_from": 1, "gap_to": 6, "reason": "cap", "missed_estimate": 6}
    gap, record = reader().take(page(7, head=7, tombstone=lost))
    assert gap.cursor == '{"topic":"t","seq":6,"epoch":1}'
    assert record.cursor == '{"topic":"t","seq":7,"epoch":1}'
