"""A producer's batches: every rule of `client/producing/batches`, and random faults against a model
server.
"""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.client.model_server import Client, ModelServer, Network
from topics_server.client.backoff import Backoff
from topics_server.client.errors import (
    BadAnswer,
    ClientError,
    Fenced,
    Forgotten,
    InDoubt,
    InvalidRequest,
    Throttled,
    Unavailable,
    Undelivered,
    Unreachable,
)
from topics_server.client.producing.batches import KEY_MS, Outgoing, SendTerms, Stored
from topics_server.client.producing.targets import NUMBER_MAX, Accepted, Beaten, Repeated, StampGap

LOST = Unreachable("lost", sent=True)
EAGER: dict[str, Any] = {"linger_ms": 0, "batch_records": 1, "pauses": Backoff(base_ms=50)}


def client_of(
    *records: bytes, epoch: int | None = 0, seq: int | None = None, **terms: Any
) -> Client:
    client = Client(SendTerms(**{**EAGER, **terms}), epoch, seq)
    for record in records:
        client.send(record, 0)
    return client


def seqs(outgoing: list[Outgoing]) -> list[int]:
    return [out.seq for out in outgoing]


def failure(client: Client) -> ClientError:
    assert client.book.failure is not None
    return client.book.failure


def owned(*records: bytes, **terms: Any) -> tuple[Client, list[Outgoing]]:
    """A client whose epoch is begun, with these records in flight."""
    client = client_of(b"first", **terms)
    (first,) = client.book.take(0)
    client.book.answered(first, Accepted(1), 0, 1)
    for record in records:
        client.send(record, 0)
    return client, client.book.take(0)


# -- when batches go -------------------------------------------------------------------------------


def test_the_first_of_an_epoch_goes_alone_then_several() -> None:
    client = client_of(b"a", b"b", b"c", b"d", in_flight=2)
    (first,) = client.book.take(0)
    assert (first.epoch, first.seq, first.is_probe) == (0, 0, False)
    assert client.book.take(0) == []
    assert client.book.next_ms() is None
    client.book.answered(first, Accepted(1, "o"), 0, 1)
    assert client.fates[b"a"] == Stored(0, 0, 1, "o")
    assert seqs(client.book.take(0)) == [1, 2]


def test_a_batch_goes_when_it_is_old_or_full() -> None:
    client = Client(SendTerms(linger_ms=5, batch_records=2, batch_bytes=10), 0)
    client.send(b"a", 0)
    assert client.book.take(4) == []
    assert client.book.next_ms() == 5
    (out,) = client.book.take(5)
    assert out.batch.records == [b"a"]
    client.book.answered(out, Accepted(), 5, 1)
    assert client.book.is_idle
    client.send(b"b", 6)
    client.send(b"c", 6)
    client.send(b"long-enough", 6)
    client.send(b"d", 6)
    client.send(b"123456789", 6)
    taken = [out.batch.records for out in client.book.take(6)]
    assert taken == [[b"b", b"c"], [b"long-enough"], [b"d", b"123456789"]]


def test_what_does_not_fit_beside_others_goes_into_the_next_batch() -> None:
    client = Client(SendTerms(batch_bytes=10), 0)
    client.send(b"123456", 0)
    client.send(b"12345", 0)
    assert [batch.records for batch in client.book.flush()] == [[b"123456"], [b"12345"]]


def test_room_is_what_is_unacknowledged() -> None:
    client = Client(SendTerms(buffer_records=2, buffer_bytes=4, batch_records=1), 0)
    assert client.book.has_room(100)  # a single record always fits
    client.send(b"abc", 0)
    assert client.book.has_room(1)
    assert not client.book.has_room(2)
    client.send(b"d", 0)
    assert not client.book.has_room(0)
    (out,) = client.book.take(0)
    client.book.answered(out, Accepted(), 0, 1)
    assert client.book.has_room(3)


@pytest.mark.parametrize("name", ["linger_ms", "batch_records", "in_flight", "patience_ms"])
def test_terms_have_bounds(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        SendTerms(**{name: -1})  # type: ignore[arg-type]


# -- repeats ---------------------------------------------------------------------------------------


def test_a_lost_answer_is_asked_for_again_under_the_same_seq() -> None:
    client, (out,) = owned(b"a")
    client.book.answered(out, LOST, 0, 1)
    assert client.book.take(0) == []
    assert client.book.next_ms() == 50
    (again,) = client.book.take(50)
    assert (again.seq, again.batch) == (out.seq, out.batch)
    client.book.answered(again, Repeated(1, 7, "o"), 50, 1)
    assert client.fates[b"a"] == Stored(0, 1, 7, "o", True)


def test_pauses_double_and_heed_the_server_and_begin_anew() -> None:
    client, (out,) = owned(b"a", patience_ms=None)
    now_ms = 0.0
    for wait_ms in (50, 100, 200, 400):
        client.book.answered(out, LOST, now_ms, 1)
        assert client.book.next_ms() == now_ms + wait_ms
        now_ms += wait_ms
        (out,) = client.book.take(now_ms)
    client.book.answered(out, Throttled(429, "t", "m", None, 3000), now_ms, 1)
    assert client.book.next_ms() == now_ms + 3000
    (out,) = client.book.take(now_ms + 3000)
    client.book.answered(out, Repeated(1), now_ms, 1)
    client.send(b"b", now_ms)
    (out,) = client.book.take(now_ms)
    client.book.answered(out, LOST, now_ms, 1)
    assert client.book.next_ms() == now_ms + 50


def test_one_outage_counts_once_and_comes_back_one_at_a_time() -> None:
    client, outs = owned(b"a", b"b", b"c", in_flight=3)
    for out in outs:
        client.book.answered(out, LOST, 0, 1)
    assert client.book.next_ms() == 50
    (again,) = client.book.take(50)
    client.book.answered(again, Accepted(), 50, 1)
    assert seqs(client.book.take(50)) == [2, 3]


def test_a_repeat_of_a_request_sent_once_belongs_to_another_producer() -> None:
    client, (out,) = owned(b"a")
    client.book.answered(out, Repeated(1), 0, 1)
    assert isinstance(failure(client), Fenced)
    assert isinstance(fate := client.fates[b"a"], Undelivered)
    assert not fate.in_doubt


def test_a_repeat_beyond_the_sent_requests_belongs_to_another_producer() -> None:
    client, (out,) = owned(b"a")
    client.book.answered(out, LOST, 0, 1)
    (again,) = client.book.take(50)
    client.book.answered(again, Repeated(2), 50, 1)
    assert isinstance(failure(client), Fenced)
    assert isinstance(fate := client.fates[b"a"], Undelivered)
    assert fate.in_doubt


def test_going_on_in_an_epoch_takes_its_repeats_until_something_is_new() -> None:
    client = client_of(b"a", b"b", epoch=3, seq=5)
    (out,) = client.book.take(0)
    assert (out.epoch, out.seq) == (3, 5)
    client.book.answered(out, Repeated(9), 0, 1)
    assert client.fates[b"a"] == Stored(3, 5, None, None, True)
    (out,) = client.book.take(0)
    client.book.answered(out, Accepted(), 0, 1)
    client.send(b"c", 0)
    (out,) = client.book.take(0)
    client.book.answered(out, Repeated(9), 0, 1)
    assert isinstance(failure(client), Fenced)


# -- gaps ------------------------------------------------------------------------------------------


def test_what_came_too_early_waits_for_what_is_before_it() -> None:
    client, (a, b, c) = owned(b"a", b"b", b"c", in_flight=3)
    client.book.answered(c, StampGap(1), 0, 1)
    client.book.answered(b, StampGap(1), 0, 1)
    assert client.book.take(0) == []
    assert client.book.next_ms() is None
    client.book.answered(a, Accepted(), 0, 1)
    (b,) = client.book.take(0)
    assert b.seq == 2
    client.book.answered(b, Accepted(), 0, 1)
    (c,) = client.book.take(0)
    client.book.answered(c, Accepted(), 0, 1)
    assert client.book.is_idle


def test_a_gap_whose_filling_was_told_before_is_no_loss() -> None:
    client, (a, b) = owned(b"a", b"b")
    client.book.answered(a, Accepted(), 0, 1)
    client.book.answered(b, StampGap(1), 0, 1)
    assert seqs(client.book.take(0)) == [2]


@pytest.mark.parametrize("expected", [0, 5])
def test_a_server_that_forgot_what_it_acknowledged_ends_the_producer(expected: int) -> None:
    client, (out,) = owned(b"a", claim=True)
    client.book.answered(out, StampGap(expected), 0, 1)
    assert isinstance(error := failure(client), Forgotten)
    assert error.expected_seq == expected
    with pytest.raises(Undelivered):
        client.send(b"b", 0)


# -- fencing ---------------------------------------------------------------------------------------


def test_a_later_epoch_ends_a_producer_that_does_not_claim() -> None:
    client, (a, b) = owned(b"a", b"b")
    client.send(b"c", 0)
    client.book.answered(a, LOST, 0, 1)
    client.book.answered(b, Beaten(7), 0, 1)
    assert isinstance(error := failure(client), Fenced)
    assert error.epoch == 7
    fates = [client.fates[record] for record in (b"a", b"b", b"c")]
    assert [isinstance(fate, Undelivered) and fate.in_doubt for fate in fates] == [
        True,
        False,
        False,
    ]
    assert client.book.is_idle


def test_a_claim_waits_for_what_is_under_way_then_sends_the_rest_anew() -> None:
    client, (a, b) = owned(b"a", b"b", claim=True)
    client.book.answered(b, Beaten(7), 0, 1)
    assert client.book.take(0) == []
    client.book.answered(a, Accepted(), 0, 1)
    (again,) = client.book.take(0)
    assert (again.epoch, again.seq, again.batch) == (8, 0, b.batch)
    client.book.answered(again, Accepted(), 0, 1)
    client.send(b"c", 0)
    assert seqs(client.book.take(0)) == [1]
    assert client.book.epoch == 8


def test_a_claim_in_doubt_needs_a_key() -> None:
    for is_keyed, now_ms in ((False, 0.0), (True, KEY_MS + 1.0), (True, 0.0)):
        client, (a, b) = owned(b"a", b"b", claim=True, is_keyed=is_keyed, patience_ms=None)
        client.book.answered(a, LOST, 0, 1)
        client.book.answered(b, Beaten(1), now_ms, 1)
        if is_keyed and not now_ms:
            assert client.book.epoch == 2
            (again,) = client.book.take(50)
            # This request is certainly refused now, but it is still unknown what the previous epoch
            # stored.
            client.book.answered(again, Beaten(5), 50, 1)
            assert client.book.epoch == 6
            (again,) = client.book.take(50)
            client.book.answered(again, Beaten(9), KEY_MS + 1, 1)
        assert isinstance(failure(client), InDoubt)
        doubts = [client.fates[record] for record in (b"a", b"b")]
        assert [isinstance(fate, Undelivered) and fate.in_doubt for fate in doubts] == [True, False]


def test_the_place_is_asked_for_without_storing_anything() -> None:
    for answer, epoch in ((StampGap(0), 0), (StampGap(4), 1), (Beaten(6), 7)):
        client = client_of(b"a", epoch=None)
        (probe,) = client.book.take(0)
        assert (probe.epoch, probe.seq, probe.is_probe) == (0, NUMBER_MAX, True)
        assert client.book.take(0) == []
        client.book.answered(probe, LOST, 0, 1)
        (probe,) = client.book.take(50)
        client.book.answered(probe, answer, 50, 1)
        (out,) = client.book.take(50)
        assert (out.epoch, out.seq) == (epoch, 0)


def test_a_probe_lingers_too_and_may_be_refused() -> None:
    client = client_of(epoch=None, linger_ms=5, batch_records=9)
    assert client.book.take(0) == []
    assert client.book.next_ms() is None
    client.send(b"a", 0)
    assert client.book.take(0) == []
    assert client.book.next_ms() == 5
    (probe,) = client.book.take(5)
    assert client.book.next_ms() is None
    client.book.answered(probe, InvalidRequest(404, "topic_not_found", "m"), 5, 1)
    assert isinstance(client.fates[b"a"], Undelivered)
    client = client_of(b"a", epoch=None)
    client.book.answered(client.book.take(0)[0], Accepted(), 0, 1)
    assert isinstance(failure(client), BadAnswer)


def test_the_loser_of_a_race_for_an_epoch_claims_the_next() -> None:
    client = client_of(b"a", epoch=None)
    client.book.answered(client.book.take(0)[0], StampGap(4), 0, 1)
    (out,) = client.book.take(0)
    client.book.answered(out, Repeated(0), 0, 1)
    assert client.book.epoch == 2


@pytest.mark.parametrize("is_keyed", [True, False])
def test_whose_claim_won_is_not_guessed(is_keyed: bool) -> None:
    client = client_of(b"a", epoch=None, is_keyed=is_keyed)
    client.book.answered(client.book.take(0)[0], StampGap(4), 0, 1)
    client.book.answered(client.book.take(0)[0], LOST, 0, 1)
    client.book.answered(client.book.take(50)[0], Repeated(0), 50, 1)
    if is_keyed:
        assert client.book.epoch == 2
    else:
        assert isinstance(failure(client), InDoubt)


def test_there_is_a_last_epoch() -> None:
    client = client_of(b"a", epoch=None)
    client.book.answered(client.book.take(0)[0], Beaten(NUMBER_MAX), 0, 1)
    assert isinstance(failure(client), Fenced)


# -- the end ---------------------------------------------------------------------------------------


def test_what_is_refused_for_good_ends_the_producer_in_order() -> None:
    client, (a, b) = owned(b"a", b"b")
    client.book.answered(a, InvalidRequest(400, "invalid_request", "m"), 0, 1)
    assert client.book.failure is None  # this does not happen before all answers are back
    client.book.answered(b, StampGap(1), 0, 1)
    assert isinstance(failure(client), InvalidRequest)
    for record in (b"a", b"b"):
        assert isinstance(fate := client.fates[record], Undelivered)
        assert not fate.in_doubt
        assert fate.reason is fate.__cause__ is client.book.failure
    assert client.book.take(0) == []
    assert client.book.next_ms() is None


def test_patience_ends_with_the_failures_in_a_row() -> None:
    client, (out,) = owned(b"a", patience_ms=120)
    client.book.answered(out, Unavailable(503, "u", "m"), 0, 1)
    (out,) = client.book.take(50)
    client.book.answered(out, Unavailable(503, "u", "m"), 50, 1)
    assert isinstance(failure(client), Unavailable)
    assert isinstance(fate := client.fates[b"a"], Undelivered)
    assert fate.in_doubt


@pytest.mark.parametrize(
    ("error", "in_doubt"),
    [
        (Unreachable("m", sent=False), False),
        (Throttled(429, "throttled", "m"), False),
        (Unavailable(500, "internal", "m"), True),
        (BadAnswer("m"), True),
    ],
)
def test_possibly_stored_records_are_reported(error: ClientError, in_doubt: bool) -> None:
    client, (out,) = owned(b"a", patience_ms=0)
    client.book.answered(out, error, 0, 1)
    assert isinstance(fate := client.fates[b"a"], Undelivered)
    assert fate.in_doubt is in_doubt
    assert fate.reason is error


def test_failing_from_outside_settles_everything_at_once() -> None:
    client, (a,) = owned(b"a", in_flight=1)
    client.send(b"b", 0)
    client.book.fail(Unreachable("m", sent=False))
    client.book.fail(Unreachable("again", sent=False))
    doubts = [client.fates[record] for record in (b"a", b"b")]
    assert [isinstance(fate, Undelivered) and fate.in_doubt for fate in doubts] == [True, False]
    client.book.answered(a, Accepted(), 0, 1)  # in vain
    assert client.book.held_records == client.book.held_bytes == 0


# -- against a model -------------------------------------------------------------------------------


def run(
    chance: Random, *, rivals: int, knows_keys: bool, claim: bool, epoch: int | None, life: int = 0
) -> Network:
    """Send 1 to 60 records through a bad network, then let all arrive."""
    terms = SendTerms(
        linger_ms=chance.choice([0, 3, 20]),
        batch_records=chance.choice([1, 2, 5]),
        in_flight=chance.choice([1, 2, 5]),
        patience_ms=None,
        claim=claim,
        is_keyed=knows_keys and (claim or epoch is None),
        pauses=Backoff(base_ms=10, cap_ms=50),
    )
    server = ModelServer(knows_keys)
    for _ in range(life):
        server.rival()
    network = Network(Client(terms, epoch), server, chance)
    for number in range(chance.randrange(1, 60)):
        if network.client.book.failure is None:
            network.client.send(b"%d" % number, network.now_ms)
        for _ in range(chance.randrange(6)):
            network.take()
            network.step()
        if rivals and chance.random() < 0.05:
            rivals -= 1
            server.rival()
    network.heal()
    # Messages that no caller waits for any more arrive after everything else.
    while network.strays:
        network.arrive(network.strays.pop())
    assert network.most_flying <= terms.in_flight
    network.check()
    return network


@given(st.randoms(use_true_random=False), st.booleans())
@settings(max_examples=150)
def test_alone_everything_is_stored_once_and_in_order(chance: Random, knows_keys: bool) -> None:
    network = run(chance, rivals=0, knows_keys=knows_keys, claim=False, epoch=0)
    assert network.client.book.failure is None
    assert network.server.log == network.client.sent


@given(st.randoms(use_true_random=False), st.integers(0, 3))
@settings(max_examples=150)
def test_claiming_with_keys_stores_everything_once_and_in_order(chance: Random, life: int) -> None:
    network = run(chance, rivals=4, knows_keys=True, claim=True, epoch=None, life=life)
    assert network.client.book.failure is None
    ours = [record for record in network.server.log if record != b"rival"]
    assert ours == network.client.sent


@given(st.randoms(use_true_random=False), st.booleans(), st.integers(0, 3))
@settings(max_examples=150)
def test_without_keys_a_claim_reports_its_doubt(chance: Random, claim: bool, life: int) -> None:
    network = run(chance, rivals=4, knows_keys=False, claim=claim, epoch=None, life=life)
    assert isinstance(network.client.book.failure, Fenced | InDoubt | None)
