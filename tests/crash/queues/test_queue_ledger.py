"""Tests of the queue ledger: it notices every kind of broken promise, and reports no kept one.

Each test plays a small run by hand, on a server that lives from 0 to 10,000 ms and, after a kill,
from 11,000 to 20,000 ms; `Bench` writes the notes of the workers.
"""

from __future__ import annotations

from typing import Literal

import pytest

from tests.crash.queues.queue_ledger import (
    Call,
    Effect,
    End,
    Grant,
    Job,
    Ledger,
    Letter,
    Life,
    Queue,
)

KINDS: tuple[Literal["ack", "nack", "extend"], ...] = ("ack", "nack", "extend")
LEASE_MS = 1000


class Bench:
    """One queue `q` with one job `j` at seq 7, unless said otherwise."""

    def __init__(
        self, *, durable: bool = False, most: int = 0, clean: bool = False, delay_ms: int = 0
    ) -> None:
        self.ledger = Ledger([Queue("q", durable, most)])
        self.ledger.jobs["j"] = Job("j", "q", 7, delay_ms)
        self.ledger.lives = [Life(0, 9_900, 10_000, clean), Life(11_000, 19_900, 20_000, True)]
        self.end = End("q", 0, 0, 0, 0, 0)
        self.leases = 0

    def claim(
        self, at_ms: int, deliveries: int = 1, node: str = "a", stream: str = "", seq: int = 7
    ) -> Grant:
        self.leases += 1
        lease = f"lease_{self.leases}"
        grant = Grant("q", "j", seq, lease, node, deliveries, at_ms, at_ms + LEASE_MS, 50, stream)
        self.ledger.grants.append(grant)
        return grant

    def do(self, grant: Grant) -> None:
        self.ledger.effects.append(
            Effect("q", grant.id, grant.seq, grant.lease_id, grant.node, grant.deliveries, 0.0)
        )

    def call(
        self,
        kind: Literal["ack", "nack", "extend"],
        grant: Grant,
        at_ms: float,
        outcome: str = "done",
        *,
        fenced: bool = True,
        value_ms: int = 0,
    ) -> Call:
        """Note a call. `outcome`: done, skipped, or unknown. The answer came 5 ms after the
        request.
        """
        leases = [grant.lease_id] if fenced else None
        call = Call(kind, "q", grant.node, [grant.seq], leases, at_ms, value_ms)
        if outcome != "unknown":
            call.got_ms = at_ms + 5
            call.done = int(outcome == "done")
            call.skipped = [] if call.done else [grant.seq]
        self.ledger.calls.append(call)
        return call

    def ack(self, grant: Grant, at_ms: float, outcome: str = "done", fenced: bool = True) -> Call:
        self.do(grant)
        return self.call("ack", grant, at_ms, outcome, fenced=fenced)

    def bury(self, at_ms: int, deliveries: int, seq: int = 7) -> None:
        self.ledger.letters.append(Letter("j", "q", seq, deliveries, at_ms))
        self.end = End("q", 0, 0, 0, 0, self.end.dead_lettered + 1)

    def check(self) -> list[str]:
        self.ledger.ends = [self.end]
        return self.ledger.check()


def is_noticed(bench: Bench, what: str) -> bool:
    wrong = bench.check()
    return any(what in line for line in wrong)


# --- kept promises --------------------------------------------------------------------------------
def test_a_plain_run_is_not_blamed() -> None:
    bench = Bench(durable=True)
    bench.ack(bench.claim(100), 200)
    assert bench.check() == []


@pytest.mark.parametrize("fenced", [True, False])
def test_a_lease_that_ran_out_is_anothers(fenced: bool) -> None:
    bench = Bench(durable=True)
    late = bench.claim(100)
    bench.ack(bench.claim(1200, 2, "b"), 1300)
    bench.ack(late, 1250, "skipped", fenced)
    assert bench.check() == []


def test_a_late_ack_counts_while_no_other_worker_has_the_job() -> None:
    bench = Bench()
    bench.ack(bench.claim(100), 5000)
    assert bench.check() == []


def test_a_crash_ends_soft_leases_and_no_durable_ones() -> None:
    soft = Bench()
    before = soft.claim(9800)
    soft.ack(before, 11_100, "skipped")
    soft.ack(soft.claim(11_050, 1, "b"), 11_200)
    assert soft.check() == []
    hard = Bench(durable=True)
    grant = hard.claim(9800)
    hard.ack(grant, 11_100)
    assert hard.check() == []


def test_unknown_outcomes_may_be_either() -> None:
    bench = Bench()
    bench.ack(bench.claim(100), 200, "unknown")
    assert bench.check() == []
    bench = Bench()
    first = bench.claim(9800)
    bench.ack(first, 9_950, "unknown")
    bench.ack(bench.claim(11_500), 11_600)
    assert bench.check() == []


def test_a_nack_and_a_closed_stream_end_a_lease() -> None:
    bench = Bench(durable=True)
    first = bench.claim(100, stream="s")
    bench.ledger.closed["s"] = 150.0
    second = bench.claim(160, 2)
    bench.call("nack", second, 200, value_ms=300)
    bench.ack(bench.claim(600, 3), 700)
    bench.ack(first, 800, "skipped")
    assert bench.check() == []


def test_a_dead_letter_is_an_outcome() -> None:
    bench = Bench(durable=True, most=2)
    bench.call("nack", bench.claim(100), 200)
    bench.call("nack", bench.claim(300, 2), 400)
    bench.bury(500, 2)
    assert bench.check() == []


# --- planted faults: jobs -------------------------------------------------------------------------
def test_a_lost_job_is_noticed() -> None:
    assert is_noticed(Bench(), "nothing was done")
    bench = Bench()
    bench.do(bench.claim(100))
    assert is_noticed(bench, "nobody acked it")


def test_a_job_acked_twice_is_noticed() -> None:
    bench = Bench()
    bench.ack(bench.claim(100), 200)
    bench.ack(bench.claim(1200, 2), 1300)
    assert is_noticed(bench, "acked 2 times")
    assert is_noticed(bench, "given away after it")


@pytest.mark.parametrize("at_ms", [150, 190, 202, 11_100])
def test_a_job_that_is_back_after_its_ack_is_noticed(at_ms: int) -> None:
    bench = Bench()
    bench.ack(bench.claim(100), 200)
    bench.claim(at_ms, 2, "b")
    assert is_noticed(bench, "given away after it")


def test_a_dead_letter_that_was_acked_is_noticed() -> None:
    bench = Bench(most=1)
    bench.ack(bench.claim(100), 200)
    bench.bury(1200, 1)
    assert is_noticed(bench, "acked and is a dead letter")


def test_two_dead_letters_of_a_job_are_noticed() -> None:
    bench = Bench(most=1)
    bench.claim(100)
    bench.bury(1200, 1)
    bench.bury(1300, 1)
    assert is_noticed(bench, "is 2 dead letters")


def test_a_job_delivered_as_a_dead_letter_is_noticed() -> None:
    bench = Bench(most=2)
    bench.claim(100)
    bench.bury(1200, 2)
    bench.claim(1300, 2)
    assert is_noticed(bench, "after it had become")


@pytest.mark.parametrize("deliveries", [1, 3])
def test_a_dead_letter_at_the_wrong_count_is_noticed(deliveries: int) -> None:
    bench = Bench(most=2)
    bench.claim(100)
    bench.bury(1200, deliveries)
    assert is_noticed(bench, "deliveries, not 2")


def test_a_dead_letter_of_another_seq_is_noticed() -> None:
    bench = Bench(most=1)
    bench.claim(100)
    bench.bury(1200, 1, seq=8)
    assert is_noticed(bench, "not from where")


def test_a_job_under_anothers_seq_is_noticed() -> None:
    bench = Bench()
    bench.ack(bench.claim(100, seq=8), 200)
    assert is_noticed(bench, "is not the job enqueued")


# --- planted faults: leases -----------------------------------------------------------------------
@pytest.mark.parametrize("at_ms", [101, 600, 1098])
@pytest.mark.parametrize("durable", [True, False])
def test_two_leases_at_once_are_noticed(at_ms: int, durable: bool) -> None:
    bench = Bench(durable=durable)
    bench.claim(100)
    bench.ack(bench.claim(at_ms, 2, "b"), 1200)
    assert is_noticed(bench, "two leases at once")


def test_a_durable_lease_that_a_crash_took_is_noticed() -> None:
    bench = Bench(durable=True)
    bench.ledger.lives = [Life(0, 900, 950, False), Life(960, 19_900, 20_000, True)]
    bench.claim(800)
    bench.ack(bench.claim(1000, 2, "b"), 1100)
    assert is_noticed(bench, "two leases at once")


def test_a_soft_lease_that_a_clean_stop_took_is_noticed() -> None:
    bench = Bench()
    bench.ledger.lives = [Life(0, 900, 950, True), Life(960, 19_900, 20_000, True)]
    bench.claim(800)
    bench.ack(bench.claim(1000, 2, "b"), 1100)
    assert is_noticed(bench, "two leases at once")


def test_an_extension_is_held_against_the_next() -> None:
    bench = Bench()
    bench.call("extend", bench.claim(100), 900, value_ms=3000)
    bench.ack(bench.claim(2000, 2, "b"), 2100)
    assert is_noticed(bench, "two leases at once")


@pytest.mark.parametrize(("durable", "clean"), [(True, False), (False, True)])
@pytest.mark.parametrize("deliveries", [1, 2])
def test_counts_that_go_down_are_noticed(durable: bool, clean: bool, deliveries: int) -> None:
    bench = Bench(durable=durable, clean=clean)
    bench.claim(100, 2)
    bench.ack(bench.claim(12_000, deliveries), 12_100)
    assert is_noticed(bench, "deliveries went")


def test_soft_counts_may_go_down_over_a_crash_only() -> None:
    bench = Bench()
    bench.claim(100, 2)
    bench.ack(bench.claim(12_000, 1), 12_100)
    assert bench.check() == []
    bench = Bench()
    bench.claim(100, 2)
    bench.ack(bench.claim(3000, 1), 3100)
    assert is_noticed(bench, "deliveries went")


def test_a_delivery_over_the_limit_is_noticed() -> None:
    bench = Bench(most=2)
    bench.ack(bench.claim(100, 3), 200)
    assert is_noticed(bench, "more than 2 times")


def test_a_job_before_its_time_is_noticed() -> None:
    bench = Bench(delay_ms=500)
    bench.ack(bench.claim(549), 600)
    assert is_noticed(bench, "before its 500 ms")


def test_a_nacked_job_before_its_time_is_noticed() -> None:
    bench = Bench()
    bench.call("nack", bench.claim(100), 200, value_ms=500)
    bench.ack(bench.claim(600, 2), 700)
    assert is_noticed(bench, "before the delay")


def test_a_lease_id_given_twice_is_noticed() -> None:
    bench = Bench()
    bench.ack(bench.claim(100), 200)
    bench.ledger.grants.append(bench.ledger.grants[0])
    assert is_noticed(bench, "given 2 times")


def test_a_job_given_by_a_dead_server_is_noticed() -> None:
    bench = Bench()
    bench.ack(bench.claim(10_500), 11_100)
    assert is_noticed(bench, "no server ran")


# --- planted faults: fences -----------------------------------------------------------------------
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fenced", [True, False])
def test_a_stale_call_that_counts_is_noticed(
    kind: Literal["ack", "nack", "extend"], fenced: bool
) -> None:
    bench = Bench()
    late = bench.claim(100)
    bench.do(late)
    bench.ack(bench.claim(1200, 2, "b"), 1400)
    bench.call(kind, late, 1300, fenced=fenced)
    assert is_noticed(bench, "under a lease that is over")


@pytest.mark.parametrize("kind", KINDS)
def test_a_soft_lease_that_outlives_a_crash_is_noticed(
    kind: Literal["ack", "nack", "extend"],
) -> None:
    bench = Bench()
    late = bench.claim(9800)
    bench.do(late)
    bench.call(kind, late, 11_300)
    assert is_noticed(bench, "under a lease that is over")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fenced", [True, False])
def test_a_good_call_that_is_skipped_is_noticed(
    kind: Literal["ack", "nack", "extend"], fenced: bool
) -> None:
    bench = Bench()
    grant = bench.claim(100)
    bench.do(grant)
    bench.call(kind, grant, 300, "skipped", fenced=fenced)
    assert is_noticed(bench, "under a lease that holds")


def test_a_durable_lease_that_is_not_known_after_a_crash_is_noticed() -> None:
    bench = Bench(durable=True)
    bench.ledger.lives = [Life(0, 900, 950, False), Life(960, 19_900, 20_000, True)]
    bench.ack(bench.claim(800), 1000, "skipped")
    assert is_noticed(bench, "under a lease that holds")


def test_the_next_lease_decides_the_result_of_an_unknown_ack() -> None:
    bench = Bench(durable=True)
    bench.ledger.lives = [Life(0, 900, 950, False), Life(960, 19_900, 20_000, True)]
    first = bench.claim(800)
    bench.ack(first, 890, "unknown")
    bench.ack(first, 1000, "skipped")
    assert bench.check() == []
    bench.ack(bench.claim(990, 2, "b"), 1100)
    assert is_noticed(bench, "under a lease that holds")
    assert is_noticed(bench, "two leases at once")


def test_an_ack_after_a_nack_of_the_same_lease_is_noticed() -> None:
    bench = Bench()
    grant = bench.claim(100)
    bench.call("nack", grant, 200)
    bench.ack(grant, 300)
    assert is_noticed(bench, "under a lease that is over")


def test_a_count_that_does_not_add_up_is_noticed() -> None:
    bench = Bench()
    bench.ack(bench.claim(100), 200).done = 2
    assert is_noticed(bench, "counts 2 of 1")


def test_an_ack_of_a_lease_that_was_never_granted_is_noticed() -> None:
    bench = Bench()
    grant = bench.claim(100)
    bench.ack(grant, 200)
    bench.ledger.grants.clear()
    assert is_noticed(bench, "without a lease")


# --- planted faults: workers and the end ----------------------------------------------------------
def test_an_ack_before_its_effect_is_noticed() -> None:
    bench = Bench()
    bench.call("ack", bench.claim(100), 200)
    assert is_noticed(bench, "an ack without an effect")


@pytest.mark.parametrize("what", ["count", "ready", "in_flight", "delayed"])
def test_a_queue_that_is_not_empty_is_noticed(what: str) -> None:
    bench = Bench()
    bench.ack(bench.claim(100), 200)
    left = dict.fromkeys(("count", "ready", "in_flight", "delayed"), 0)
    bench.end = End("q", **{**left, what: 1}, dead_lettered=0)
    assert is_noticed(bench, "is not empty")


@pytest.mark.parametrize("counted", [0, 2])
def test_dead_letters_that_are_counted_wrong_are_noticed(counted: int) -> None:
    bench = Bench(most=1)
    bench.claim(100)
    bench.bury(1200, 1)
    bench.end = End("q", 0, 0, 0, 0, counted)
    assert is_noticed(bench, "counts other than")


def test_an_unexamined_queue_is_noticed() -> None:
    bench = Bench()
    bench.ack(bench.claim(100), 200)
    assert any("not every queue" in line for line in bench.ledger.check())
