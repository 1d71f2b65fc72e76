"""The fair share: the topic that was served longest ago comes first, however often it is
refused.
"""

from __future__ import annotations

import random

from topics_server.engine.pressure import fair_share
from topics_server.engine.pressure.fair_share import KEPT_MS, FairShare
from topics_server.engine.pressure.wait_queue import FAIR_EVERY, WaitingRequest, WaitQueue


def test_topics_are_first_in_the_order_in_which_they_began_to_wait() -> None:
    share = FairShare()
    for name in ("a", "b", "a", "c"):
        share.join(name, 0.0)
    seen = []
    while (first := share.first()) is not None:
        seen.append(first)
        share.serve(first)
    assert seen == ["a", "b", "c", "a"]
    assert len(share) == 0


def test_a_topic_that_is_served_by_priority_goes_behind_the_others() -> None:
    share = FairShare()
    for name in ("urgent", "urgent", "quiet"):
        share.join(name, 0.0)
    share.serve("urgent")
    assert share.first() == "quiet"


def test_a_refused_topic_goes_on_from_where_it_was() -> None:
    share = FairShare()
    share.join("quiet", 0.0)
    for name in ("a", "b"):
        share.join(name, 0.0)
    share.refuse("quiet", 250.0)
    assert share.first() == "a"
    share.join("quiet", 2250.0)
    assert share.first() == "quiet"


def test_a_ticket_is_kept_for_so_long_and_no_longer() -> None:
    share = FairShare()
    share.join("quiet", 0.0)
    share.join("a", 0.0)
    share.refuse("quiet", 0.0)
    share.join("quiet", KEPT_MS)
    assert share.first() == "a"


def test_a_topic_with_others_waiting_keeps_its_ticket_whatever_is_refused() -> None:
    share = FairShare()
    for name in ("a", "a", "b"):
        share.join(name, 0.0)
    share.refuse("a", 0.0)
    assert share.first() == "a"
    share.serve("a")
    assert share.first() == "b"


def test_no_more_tickets_are_kept_than_there_is_room_for() -> None:
    share = FairShare()
    for number in range(2 * fair_share.KEPT_MAX):
        share.join(str(number), 0.0)
        share.refuse(str(number), 0.0)
    assert len(share._kept) == fair_share.KEPT_MAX
    assert len(share._order) <= fair_share.KEPT_MAX + 1


def test_the_order_is_that_of_a_naive_model() -> None:
    chance = random.Random(21)
    share = FairShare()
    tickets: dict[str, int] = {}
    waiting: dict[str, int] = {}
    kept: dict[str, tuple[int, float]] = {}
    last, now = 0, 0.0
    for _ in range(20_000):
        now += chance.random() * 100
        name = str(chance.randrange(12))
        match chance.randrange(4):
            case 0 | 1:
                if not waiting.get(name):
                    ticket, until = kept.pop(name, (0, -1.0))
                    if now >= until:
                        last += 1
                        ticket = last
                    tickets[name] = ticket
                waiting[name] = waiting.get(name, 0) + 1
                share.join(name, now)
            case 2 if waiting.get(name):
                last += 1
                tickets[name] = last
                waiting[name] -= 1
                share.serve(name)
            case 3 if waiting.get(name):
                waiting[name] -= 1
                if not waiting[name]:
                    kept[name] = (tickets[name], now + KEPT_MS)
                share.refuse(name, now)
            case _:
                pass
        live = [name for name, count in waiting.items() if count]
        assert share.first() == min(live, key=lambda name: tickets[name], default=None)


class Client:
    """A closed-loop client of the model: it retries at once, or after `retry_ms` if refused."""

    def __init__(self, topic: str, priority: int, retry_ms: float) -> None:
        self.topic = topic
        self.priority = priority
        self.retry_ms = retry_ms
        self.due_ms = 0.0
        self.tries = 0
        self.most_tries = 0
        self.served = 0


def simulate(clients: list[Client], *, per_ms: float, for_ms: float) -> None:
    """Serve these clients' requests at a fixed rate, with a clock of its own."""
    lot = WaitQueue(max_bytes=10**9, max_waiting=10**6, max_wait_ms=250.0)
    waiting: dict[WaitingRequest, Client] = {}
    now, budget = 0.0, 0.0
    while now < for_ms:
        for client in clients:
            if client.due_ms <= now:
                client.due_ms = float("inf")
                client.tries += 1
                asked = WaitingRequest(client.priority, 1, must_run=False, topic=client.topic)
                lot.add(asked, now)
                waiting[asked] = client
        while (late := lot.pop_late(now)) is not None:
            client = waiting.pop(late)
            client.due_ms = now + client.retry_ms
        budget += per_ms
        while budget >= 1 and (place := lot.pop(now)) is not None:
            budget -= 1
            client = waiting.pop(place)
            client.served += 1
            client.most_tries = max(client.most_tries, client.tries)
            client.tries = 0
            client.due_ms = now
        now += 1.0


def test_whoever_honours_retry_after_is_served_within_a_bounded_number_of_tries() -> None:
    """600 urgent clients retry at once all the time; the server serves one request a ms."""
    flood = [Client("flood", 1000, 1000.0) for _ in range(600)]
    honest = [Client(f"honest-{n}", 1000 - 100 * n, 1000.0) for n in range(21)]
    simulate([*flood, *honest], per_ms=1.0, for_ms=10_000.0)
    # In 250 ms the fair share serves 25 requests, and there are 22 topics.
    assert max(client.most_tries + client.tries for client in honest) <= 3
    assert min(client.served for client in honest) >= 10_000 // FAIR_EVERY // 30
    taken = sum(client.served for client in (*flood, *honest))
    assert taken > 0.99 * 10_000, "the share costs no throughput"
    assert sum(client.served for client in flood) > 0.85 * taken


def test_tickets_that_are_kept_bound_the_tries_where_there_are_more_topics_than_turns() -> None:
    """There are ten times as many topics as the fair share serves within the longest wait of one
    request.
    """
    flood = [Client("flood", 1000, 0.0) for _ in range(300)]
    honest = [Client(f"honest-{n}", 0, 1000.0) for n in range(250)]
    simulate([*flood, *honest], per_ms=1.0, for_ms=20_000.0)
    assert max(client.most_tries + client.tries for client in honest) <= 12
    assert min(client.served for client in honest) >= 1
