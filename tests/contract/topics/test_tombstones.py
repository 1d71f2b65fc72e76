"""§3.3: readers always get tombstones for involuntary loss, never for deletes."""

from __future__ import annotations

import time

import pytest

from tests.contract.driver import Api, Json, eventually, good, seqs_of


def _evicted(api: Api, topic: str, count: int = 20, cap: int = 5) -> Json:
    """A topic that evicted records; its state once the cap holds."""
    api.put(topic, {"cap_records": cap})
    for number in range(1, count + 1):
        api.add(topic, number)
    eventually(lambda: bool(api.get_state(topic)["count"] <= cap), "count within the cap")
    return api.get_state(topic)


def test_a_cursor_below_the_floor_gets_a_tombstone_and_the_rest(api: Api, topic: str) -> None:
    """Contract §3.3, settled rules [3.3-01, 3.3-03, 3.3-04, 3.3-05, 3.3-12, S-37, S-40]"""
    earliest = _evicted(api, topic)["earliest_seq"]
    answer = api.diff(topic, from_seq=0)
    assert answer.status_code == 200
    page = answer.json()
    assert page["tombstone"] == {
        "gap_from": 1,
        "gap_to": earliest - 1,
        "reason": "cap",
        "missed_estimate": page["tombstone"]["missed_estimate"],
        "earliest_seq": earliest,
        "head_seq": 20,
    }
    assert seqs_of(page) == list(range(earliest, 21))
    assert page["next_from_seq"] == 20
    assert page["caught_up"] is True


def test_the_gap_starts_after_the_cursor(api: Api, topic: str) -> None:
    """Contract §3.3 [3.3-03, 3.3-10]"""
    earliest = _evicted(api, topic)["earliest_seq"]
    for cursor in range(earliest - 1):
        tombstone = api.read(topic, from_seq=cursor)["tombstone"]
        assert (tombstone["gap_from"], tombstone["gap_to"]) == (cursor + 1, earliest - 1)
        assert 1 <= tombstone["missed_estimate"] <= earliest - 1
    assert api.read(topic, from_seq=earliest - 1)["tombstone"] is None


def test_the_estimate_of_a_plain_eviction_is_the_gap(api: Api, topic: str) -> None:
    """Contract §3.3 [3.3-10]"""
    earliest = _evicted(api, topic)["earliest_seq"]
    assert abs(api.read(topic)["tombstone"]["missed_estimate"] - (earliest - 1)) <= 1


def test_after_the_gap_there_is_no_second_tombstone(api: Api, topic: str) -> None:
    """Contract §3.3 [3.3-11, 3.3-12, 3.3-14]"""
    earliest = _evicted(api, topic)["earliest_seq"]
    page = api.read(topic, from_seq=0, limit=1)
    assert page["tombstone"]["gap_to"] == earliest - 1
    assert seqs_of(page) == [earliest]
    assert page["next_from_seq"] == earliest
    rest = api.read(topic, from_seq=page["next_from_seq"])
    assert rest["tombstone"] is None
    assert seqs_of(rest) == list(range(earliest + 1, 21))


def test_expiry_says_ttl(api: Api, topic: str) -> None:
    """Contract §3.3 [3.3-06, 3.3-03, 0.10-07]"""
    api.put(topic, {"ttl_ms": 300})
    api.add(topic, 1, 2, 3)
    time.sleep(0.6)
    api.add(topic, 4)
    page = api.read(topic)
    tombstone = page["tombstone"]
    assert (tombstone["reason"], tombstone["gap_from"], tombstone["gap_to"]) == ("ttl", 1, 3)
    assert seqs_of(page) == [4]


def test_both_causes_say_mixed(api: Api, topic: str) -> None:
    """Contract §3.3 [3.3-07]"""
    api.put(topic, {"ttl_ms": 400, "cap_records": 5})
    api.add(topic, *range(1, 6))
    api.add(topic, *range(6, 11))
    eventually(lambda: bool(api.get_state(topic)["count"] <= 5), "count within the cap")
    time.sleep(0.7)
    tombstone = api.read(topic)["tombstone"]
    assert (tombstone["reason"], tombstone["gap_from"], tombstone["gap_to"]) == ("mixed", 1, 10)
    assert api.read(topic, from_seq=8)["tombstone"]["reason"] in ("ttl", "mixed")


def test_a_waiting_reader_hears_of_loss_at_once(api: Api, topic: str) -> None:
    """Contract §3.3, §3 [3.3-01]"""
    _evicted(api, topic)
    started = time.monotonic()
    assert api.read(topic, from_seq=0, wait_ms=20_000)["tombstone"]["reason"] == "cap"
    assert time.monotonic() - started < 10


def test_expiry_of_everything_is_reported_to_an_earlier_cursor(api: Api, topic: str) -> None:
    """Contract §3.3 [3.3-06, 3.3-12, 0.7-02]"""
    api.put(topic, {"ttl_ms": 200})
    api.add(topic, 1, 2)
    time.sleep(0.5)
    page = api.read(topic, from_seq=1)
    assert (page["tombstone"]["gap_from"], page["tombstone"]["gap_to"]) == (2, 2)
    assert (page["next_from_seq"], page["caught_up"], page["earliest_seq"]) == (2, True, 3)
    assert api.read(topic, from_seq=2)["tombstone"] is None


def test_the_gap_reaches_the_first_live_record_over_deletes(api: Api, topic: str) -> None:
    """Settled rules of the contract [S-37]"""
    earliest = _evicted(api, topic)["earliest_seq"]
    api.delete(topic, before_seq=earliest + 2)
    page = api.read(topic)
    assert page["tombstone"]["gap_to"] == earliest + 1
    assert page["tombstone"]["earliest_seq"] == page["earliest_seq"] == earliest + 2
    assert page["tombstone"]["reason"] == "cap"
    assert seqs_of(page) == list(range(earliest + 2, 21))


def test_a_range_emptied_by_deletes_is_silent(api: Api, topic: str) -> None:
    """Contract §3.3, §5 [3.3-02, 3.3-13, 5-16]"""
    api.add(topic, *range(10), tag="t")
    api.delete(topic, before_seq=6)
    page = api.read(topic)
    assert page["tombstone"] is None
    assert page["earliest_seq"] == 6
    assert seqs_of(page) == [6, 7, 8, 9, 10]
    api.delete(topic, match="t")
    page = api.read(topic)
    assert page["tombstone"] is None
    assert (page["records"], page["next_from_seq"], page["earliest_seq"]) == ([], 10, 11)
    assert page["caught_up"] is True


def test_a_cursor_between_floor_and_first_live_record_is_silent(api: Api, topic: str) -> None:
    """Contract §3.3 [3.3-02]"""
    earliest = _evicted(api, topic)["earliest_seq"]
    api.delete(topic, before_seq=earliest + 3)
    page = api.read(topic, from_seq=earliest)
    assert page["tombstone"] is None
    assert seqs_of(page) == list(range(earliest + 3, 21))


def test_records_deleted_before_they_expired_stay_silent(api: Api, topic: str) -> None:
    """Settled rules of the contract [S-41, 3.3-13]"""
    api.put(topic, {"ttl_ms": 500})
    api.add(topic, 1, 2, 3)
    api.delete(topic, before_seq=4)
    time.sleep(0.8)
    page = api.read(topic)
    assert page["tombstone"] is None
    assert (page["next_from_seq"], page["earliest_seq"]) == (3, 4)


def test_records_deleted_before_the_cap_was_reached_stay_silent(api: Api, topic: str) -> None:
    """Contract §3.3: a delete makes room, so no record is evicted. [3.3-13, 3.3-02]"""
    api.put(topic, {"cap_records": 5})
    api.add(topic, *range(5))
    api.delete(topic, before_seq=6)
    api.add(topic, *range(5))
    page = api.read(topic)
    assert page["tombstone"] is None
    assert seqs_of(page) == [6, 7, 8, 9, 10]


@pytest.mark.parametrize("cursor", [3, 10, 10_000])
def test_recreated_exactly_when_the_cursor_is_above_the_head(
    api: Api, topic: str, cursor: int
) -> None:
    """Contract §3.3, settled rules [3.3-08, S-39]"""
    api.add(topic, *range(20))
    api.drop(topic)
    api.add(topic, "a", "b")
    page = api.read(topic, from_seq=cursor)
    tombstone = page["tombstone"]
    assert tombstone["reason"] == "recreated"
    assert tombstone["gap_from"] == 1
    assert (tombstone["earliest_seq"], tombstone["head_seq"]) == (1, 2)
    assert [r["data"] for r in page["records"]] == ["a", "b"]
    assert (page["next_from_seq"], page["lag"], page["caught_up"]) == (2, 0, True)
    for below in (0, 1, 2):
        assert api.read(topic, from_seq=below)["tombstone"] is None


def test_a_recreated_and_empty_topic_is_reported_too(api: Api, topic: str) -> None:
    """Settled rules of the contract [S-39, 3.3-12]"""
    api.add(topic, 1, 2)
    api.drop(topic)
    api.put(topic)
    page = api.read(topic, from_seq=2)
    assert page["tombstone"]["reason"] == "recreated"
    assert (page["records"], page["next_from_seq"], page["head_seq"]) == ([], 0, 0)
    assert page["caught_up"] is True


def test_a_lost_range_is_reported_although_the_node_filter_hides_the_rest(
    api: Api, topic: str
) -> None:
    """Contract §3.3, §4 [3.3-01, 4-04]"""
    api.put(topic, {"cap_records": 3})
    for number in range(9):
        api.add(topic, number, node="me")
    eventually(lambda: bool(api.get_state(topic)["count"] <= 3), "count within the cap")
    page = api.read(topic, node="me")
    assert page["tombstone"]["reason"] == "cap"
    assert (page["records"], page["next_from_seq"]) == ([], 9)
    assert api.read(topic, node="me", from_seq=9)["tombstone"] is None


def test_deleting_everything_after_an_eviction_keeps_the_floor(api: Api, topic: str) -> None:
    """Contract §3.3, settled rules [S-37, 3.3-01, 5-21]"""
    earliest = _evicted(api, topic)["earliest_seq"]
    assert good(api.delete(topic, before_seq=1000))["deleted"] == 21 - earliest
    page = api.read(topic)
    assert (page["tombstone"]["gap_from"], page["tombstone"]["gap_to"]) == (1, 20)
    assert api.read(topic, from_seq=earliest)["tombstone"] is None
