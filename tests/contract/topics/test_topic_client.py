"""`TopicClient` of the Python client: appends under conditions, reads, consumers."""

from __future__ import annotations

import pytest

from tests.contract.driver import Api
from topics_server.client import ConditionFailed, Hold, NewRecord, NotFound, TopicClient


def test_records_and_conditions(api: Api, topic: str) -> None:
    with TopicClient(topic, url=api.url) as orders:
        first = orders.append({"n": 1}, tag="seat:1", if_={"exists": False})
        assert (first.first_seq, first.condition, first.created) == (1, "met", True)
        with pytest.raises(ConditionFailed) as caught:
            orders.append({"n": 2}, tag="seat:1", if_={"none_match": "seat:1"})
        assert (caught.value.status, caught.value.detail["seq"]) == (409, 1)
        records = [NewRecord(None, meta={"k": 1}), NewRecord([2], node="n")]
        many = orders.append_many(records, if_={"head_seq": 1}, key="k")
        assert (many.first_seq, many.last_seq) == (2, 3)
        assert orders.append_many(records, if_={"head_seq": 1}, key="k").deduped
        page = orders.read()
        assert [(each.seq, each.data) for each in page.records] == [
            (1, {"n": 1}),
            (2, None),
            (3, [2]),
        ]
        assert (page.records[0].tag, page.records[1].meta, page.records[2].node) == (
            "seat:1",
            {"k": 1},
            "n",
        )
        assert (page.next_from_seq, page.caught_up, page.tombstone) == (3, True, None)
        assert [each.seq for each in orders.read(filter_=["Not", "seat:1"]).records] == [2, 3]
        with pytest.raises(ValueError, match="no record"):
            orders.append_many([])


def test_consumers(api: Api, topic: str) -> None:
    with TopicClient(topic, url=api.url) as orders:
        orders.append_many([NewRecord(number) for number in range(5)])
        assert orders.put_consumer("c").created
        assert [each.seq for each in orders.read(consumer="c", limit=2).records] == [1, 2]
        assert orders.commit("c", 2).moved
        assert not orders.commit("c", 1).moved
        assert orders.commit("c", 1, rewind=True, if_seq=2).seq == 1
        with pytest.raises(ConditionFailed):
            orders.commit("c", 3, if_seq=2)
        page = orders.read(from_seq=3, consumer="c", ack="auto")
        assert [each.seq for each in page.records] == [4, 5]
        assert (orders.consumer("c").seq, orders.consumer("c").lag) == (3, 2)
        assert orders.delete_consumer("c")
        assert not orders.delete_consumer("c")
        with pytest.raises(NotFound):
            orders.consumer("c")


def test_a_consumer_that_caps_wait_for(api: Api, topic: str) -> None:
    api.put(topic, {"cap_records": 2})
    with TopicClient(topic, url=api.url) as orders:
        made = orders.put_consumer("c", hold=Hold(5, 1 << 20))
        assert made.hold == Hold(5, 1 << 20)
        orders.append_many([NewRecord(number) for number in range(6)])
        assert [each.seq for each in orders.read(1).records] == [2, 3, 4, 5, 6]
        assert orders.consumer("c").held_records == 3
        assert orders.put_consumer("c", "head").hold == made.hold
        assert orders.put_consumer("c", hold=None).hold is None


def test_the_records_of_a_batch_may_have_keys_of_their_own(api: Api, topic: str) -> None:
    """A batch that was stored in part is completed; the result has the seq of each record."""
    records = [NewRecord(number) for number in range(4)]
    with TopicClient(topic, url=api.url) as orders:
        assert orders.append("first", key="batch:2").first_seq == 1
        done = orders.append_many(records, key="batch", per_record=True)
        assert (done.seqs, done.deduped) == ([2, 3, 1, 4], False)
        again = orders.append_many(records, key="batch", per_record=True)
        assert (again.seqs, again.deduped) == ([2, 3, 1, 4], True)
