"""`cli.torture.acknowledged`: every acknowledged record must be there, once, unchanged, in
order.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from topics_server.cli.torture.acknowledged import AcknowledgedTopic, Found, content


def topic_of(*counts: int) -> AcknowledgedTopic:
    """A topic with acknowledged calls of so many records, seqs from 1 on."""
    topic = AcknowledgedTopic("t", "disk")
    for count in counts:
        topic.send(count)
        topic.acknowledge(topic.head_seq + 1)
    return topic


def found(*numbers: int, shift: int = 0) -> list[Found]:
    return [Found(number + shift, content(number)) for number in numbers]


def test_a_topic_that_holds_everything_is_right() -> None:
    topic = topic_of(3, 2)
    assert topic.check(found(1, 2, 3, 4, 5), 5) == []
    assert topic.seq_of(4) == 4
    assert topic.next_number == 6


def changed(records: list[Found]) -> list[Found]:
    return [*records[:2], Found(3, {"n": 3, "pad": "other"}), *records[3:]]


Change = Callable[[list[Found]], list[Found]]
WRONG: list[tuple[Change, str]] = [
    (lambda r: r[:-1], "record 5 (number 5) was acknowledged and is lost"),
    (lambda r: r[:2] + r[3:], "record 3 (number 3) was acknowledged and is lost"),
    (lambda r: [*r, Found(6, content(6))], "record 6 (number 6) was never sent"),
    (lambda r: [*r, Found(6, content(5))], "record 6 is number 5, behind 5"),
    (changed, "record 3 has other data than were sent"),
    (lambda r: [r[1], r[0], *r[2:]], "record 1 follows record 2"),
    (
        lambda r: [Found(x.seq + 1, x.data) for x in r],
        "number 1 was acknowledged as 1 and is record 2",
    ),
    (lambda r: [*r[:4], Found(5, "foreign")], "record 5 has other data than were sent"),
]


@pytest.mark.parametrize(("change", "message"), WRONG)
def test_what_is_wrong_is_told(change: Change, message: str) -> None:
    topic = topic_of(3, 2)
    wrong = topic.check(change(found(1, 2, 3, 4, 5)), 6)
    assert f"t: {message}" in wrong


def test_a_head_that_goes_back_is_told() -> None:
    assert topic_of(3).check(found(1, 2, 3), 2) == ["t: the head went back from 3 to 2"]


def test_an_unknown_call_is_there_whole_or_not_at_all() -> None:
    topic = topic_of(2)
    topic.send(3)
    assert topic.check(found(1, 2), 2) == []
    assert topic.stored_at(found(1, 2)) is None
    whole = found(1, 2, 3, 4, 5)
    assert topic.check(whole, 5) == []
    assert topic.stored_at(whole) == 3
    assert topic.check(found(1, 2, 3, 4), 4) == ["t: 2 of the 3 records of one call are stored"]
    topic.acknowledge(3)
    assert topic.next_number == 6


def test_a_refused_call_stores_nothing() -> None:
    topic = topic_of(2)
    topic.send(3)
    topic.refuse()
    assert topic.check(found(1, 2, 3), 3) == ["t: record 3 (number 3) was never sent"]


def test_deleted_records_must_not_come_back_and_perhaps_deleted_ones_may_be_there() -> None:
    topic = topic_of(5, 5)
    topic.delete_sent = 4
    assert topic.check(found(*range(1, 11)), 10) == []
    assert topic.check(found(*range(4, 11)), 10) == []
    topic.delete_acknowledged()
    assert topic.check(found(*range(4, 11)), 10) == []
    assert "t: record 3 is back after its delete" in topic.check(found(*range(3, 11)), 10)
    topic.delete_sent = 7
    topic.delete_acknowledged()
    assert topic.check(found(*range(7, 11)), 10) == []


def test_seqs_that_were_skipped_split_the_runs() -> None:
    topic = topic_of(2)
    topic.send(2)
    topic.acknowledge(10)
    records = [*found(1, 2), *found(3, 4, shift=7)]
    assert topic.check(records, 11) == []
    assert topic.seq_of(4) == 11
    assert topic.check(found(1, 2, 3, 4), 11)[0].startswith("t: number 3 was acknowledged as 10")


def test_many_problems_are_counted() -> None:
    topic = topic_of(40)
    wrong = topic.check([], 40)
    assert len(wrong) == 11
    assert wrong[-1] == "t: and 30 more"
