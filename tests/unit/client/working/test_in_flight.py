"""`client.working.in_flight`: when leases are extended, and which jobs are lost. Times are
arguments.
"""

from __future__ import annotations

from topics_server.client.errors import InvalidRequest
from topics_server.client.values import Job
from topics_server.client.working.in_flight import InFlight


def job(seq: int, lease: str = "lease_1") -> Job:
    """A delivery."""
    return Job(
        queue="q", seq=seq, lease_id=lease, deadline_ms=0, ts_ms=0, deliveries=1, raw=b"null"
    )


def test_extending_begins_a_third_into_the_lease() -> None:
    flight = InFlight(300)
    held = flight.take(job(1), 1000)
    assert flight.next_ms() == 1100
    assert flight.due(1099) == []
    assert flight.due(1100) == [held]


def test_what_is_due_soon_comes_along() -> None:
    flight = InFlight(1200)
    first, second = flight.take(job(1), 0), flight.take(job(2), 100)
    third = flight.take(job(3), 101)
    assert flight.due(399) == []
    assert flight.due(400) == [first, second]
    assert third in flight


def test_an_extended_lease_counts_from_when_it_was_asked_for() -> None:
    flight = InFlight(300)
    held = flight.take(job(1), 0)
    assert flight.extended([held], [], 150) == []
    assert flight.next_ms() == 250
    assert flight.due(249) == []


def test_a_failed_extend_stays_due() -> None:
    flight = InFlight(300)
    held = flight.take(job(1), 0)
    assert flight.due(100) == flight.due(200) == [held]


def test_a_skipped_extend_is_a_lost_lease() -> None:
    flight = InFlight(300)
    held, kept = flight.take(job(1), 0), flight.take(job(2), 0)
    assert flight.extended([held, kept], [1], 100) == [held]
    assert held.job.lost.is_set()
    assert not kept.job.lost.is_set()
    assert flight.all == [kept]
    assert flight.lost == 1


def test_a_lease_that_ran_out_by_our_clock_is_told_but_stays_held() -> None:
    flight = InFlight(300)
    held = flight.take(job(1), 0)
    flight.warn(299)
    assert not held.job.lost.is_set()
    flight.warn(300)
    assert held.job.lost.is_set()
    assert held in flight
    assert flight.lost == 0


def test_a_newer_delivery_of_the_same_job_ends_the_older_one() -> None:
    flight = InFlight(300)
    older = flight.take(job(1, "lease_1"), 0)
    newer = flight.take(job(1, "lease_2"), 10)
    assert older.job.lost.is_set()
    assert (older in flight, newer in flight, flight.lost) == (False, True, 1)
    flight.lose(older)
    assert flight.lost == 1
    assert newer in flight


def test_doubt_makes_everything_due_at_once() -> None:
    flight = InFlight(30_000)
    first, second = flight.take(job(1), 0), flight.take(job(2), 5)
    flight.doubt(20)
    assert flight.due(20) == [first, second]


def test_an_ack_that_crossed_an_extend_is_no_loss() -> None:
    flight = InFlight(300)
    held = flight.take(job(1), 0)
    flight.extended([held], [1], 100)  # because the ack arrived first
    flight.ended(held)
    assert flight.lost == 0


def test_what_is_settled_is_not_extended_any_more() -> None:
    flight = InFlight(300)
    held = flight.take(job(1), 0)
    flight.ended(held)
    assert (len(flight), flight.due(1000), flight.next_ms()) == (0, [], None)
    assert flight.extended([held], [1], 100) == []
    assert flight.lost == 0


def test_batches_shrink_to_what_the_server_takes() -> None:
    flight = InFlight(300)
    refused = InvalidRequest(400, "batch_too_large", "m", {"max_claim": 10})
    assert flight.shrink(refused, 100)
    assert flight.batch_max == 10
    assert flight.shrink(InvalidRequest(400, "batch_too_large", "m"), 8)
    assert flight.batch_max == 4
    assert not flight.shrink(refused, 1)
    assert not flight.shrink(InvalidRequest(400, "invalid_request", "m"), 100)
