"""The client's producers against a real server: the server is killed, and producers claim epochs
from each other.
"""

from __future__ import annotations

import pytest

from tests.contract.conftest import NewServer
from tests.contract.driver import Api
from tests.contract.records.producing import check, messages_in, storm, stream_in
from topics_server.client import Fenced, IdempotentProducer, Undelivered


def test_a_server_that_is_killed_loses_and_doubles_nothing(own: NewServer) -> None:
    server = own()
    sent = storm(server, 2, lambda api: f"{api.url}/v0/topics/t")
    check([record["data"] for record in server.api.read_all("t")], sent)


def test_a_stream_in_a_server_that_is_killed_too(own: NewServer) -> None:
    server = own()
    sent = storm(server, 2, stream_in)
    check(messages_in(server.api), sent)


def test_each_life_claims_the_next_epoch(api: Api, topic: str) -> None:
    for life in range(3):
        with IdempotentProducer(topic, "p", url=api.url) as producer:
            for number in range(5):
                producer.send([life, number], tag="t")
            assert producer.send([life, 5]).result(60).seq == 6 * (life + 1)
            assert producer.epoch == life
    expected = [[life, number] for life in range(3) for number in range(6)]
    assert [record["data"] for record in api.read_all(topic)] == expected


def test_a_zombie_is_fenced_and_one_that_claims_goes_on(api: Api, topic: str) -> None:
    zombie = IdempotentProducer(topic, "p", url=api.url)
    rival = IdempotentProducer(topic, "p", url=api.url, claim=True)
    zombie.send(0).result(60)
    rival.send(1).result(60)
    late = zombie.send("late")
    with pytest.raises(Undelivered) as told:
        zombie.close()
    assert isinstance(told.value.reason, Fenced)
    with pytest.raises(Undelivered):
        late.result(0)
    with IdempotentProducer(topic, "p", url=api.url) as third:
        assert third.send(2).result(60).epoch == 2
    assert rival.send(3).result(60).epoch == 3
    rival.close()
    assert [record["data"] for record in api.read_all(topic)] == [0, 1, 2, 3]


def test_a_given_epoch_is_gone_on_with_without_doubling(api: Api, topic: str) -> None:
    """A producer that kept its numbers sends all of its last records again."""
    for life in range(2):
        seq = None if life == 0 else 0
        with IdempotentProducer(
            topic, "p", url=api.url, epoch=4, seq=seq, batch_records=1
        ) as producer:
            receipts = [producer.send(number) for number in range(5 + life)]
        assert [receipt.result().repeated for receipt in receipts[:5]] == [life == 1] * 5
    assert [record["data"] for record in api.read_all(topic)] == list(range(6))
