"""Waiting requests under pressure: which are served first, which are refused, and their total
size.
"""

from __future__ import annotations

import random

from topics_server.engine.pressure.wait_queue import FAIR_EVERY, WaitingRequest, WaitQueue
from topics_server.values.limits import MIB


def wait_queue(**bounds: int) -> WaitQueue:
    return WaitQueue(
        max_bytes=bounds.get("max_bytes", 1000),
        max_waiting=bounds.get("max_waiting", 100),
        max_wait_ms=250.0,
    )


def put(
    lot: WaitQueue,
    priority: int,
    size: int = 1,
    *,
    at_ms: float = 0.0,
    must_run: bool = False,
    topic: str = "",
) -> WaitingRequest:
    """Add a request for a topic; without a name, for the common topic of this priority."""
    place = WaitingRequest(priority, size, must_run=must_run, topic=topic or f"of-{priority}")
    lot.add(place, at_ms)
    return place


def test_the_most_urgent_is_first_and_of_equals_the_oldest() -> None:
    lot = wait_queue()
    places = [put(lot, priority) for priority in (0, 500, -5, 500, 0)]
    served = [lot.pop(10.0) for _ in places]
    assert served == [places[1], places[3], places[0], places[4], places[2]]
    assert lot.pop(10.0) is None
    assert {place.waited_ms for place in places} == {10.0}
    assert (lot.held_bytes, lot.waiting, len(lot)) == (0, 0, 0)


def test_small_requests_go_before_a_large_one_of_their_priority_that_came_just_before() -> None:
    lot = wait_queue(max_bytes=100 * MIB)
    large, huge = put(lot, 0, MIB, at_ms=0.0), put(lot, 0, 60 * MIB, at_ms=0.0)
    small = put(lot, 0, 100, at_ms=15.0)
    late = put(lot, 0, 100, at_ms=22.0)
    later = put(lot, 0, 100, at_ms=26.0)
    least = put(lot, -1, 100, at_ms=0.0)
    served = [lot.pop(30.0) for _ in range(6)]
    assert served == [small, large, late, huge, later, least]


def test_of_any_sizes_the_one_that_is_due_first_is_served_first() -> None:
    """Requests that arrive in the order in which they are due stand apart from the others."""
    chance = random.Random(3)
    lot = wait_queue(max_bytes=10**9, max_waiting=10**6)
    live: list[WaitingRequest] = []
    now = 0.0
    early = 0
    for turn in range(4000):
        now += chance.random()
        if turn % 800 < 500:
            size = chance.choice((100, 100, 100, 200_000, 2 * MIB))
            live.append(put(lot, chance.randrange(3), size, at_ms=now, topic="t"))
        elif live:
            # All are of one topic, so a fair turn goes to the oldest.
            if (lot._served + 1) % FAIR_EVERY:
                due = min(live, key=lambda p: (-p.priority, p.due_ms, p.number))
                early += due is not min(live, key=lambda p: (-p.priority, p.number))
            else:
                due = min(live, key=lambda p: p.number)
            assert lot.pop(now) is due
            live.remove(due)
    assert early > 100


def test_the_newest_that_need_not_run_is_shed_before_those_that_must() -> None:
    lot = wait_queue(max_bytes=100)
    first = put(lot, 0, 20, topic="loader")
    insisting = [put(lot, 0, 20, must_run=True, topic="loader") for _ in range(2)]
    second = put(lot, 0, 20, topic="loader")
    last = put(lot, 0, 20, must_run=True, topic="loader")
    assert not second.is_shed
    put(lot, 0, 20, must_run=True, topic="loader")
    assert (first.is_shed, second.is_shed) == (False, True)
    put(lot, 0, 20, must_run=True, topic="loader")
    assert first.is_shed
    assert not any(place.is_shed for place in (*insisting, last))


def test_requests_are_shed_in_the_same_order_before_and_after_a_sweep() -> None:
    """The heap of the requests to shed exists only while some are shed."""
    lot = wait_queue(max_bytes=10**9, max_waiting=40)
    live: list[WaitingRequest] = []
    chance = random.Random(5)
    for number in range(6000):
        place = put(lot, chance.randrange(-9, 9), topic=f"t{number}")
        live.append(place)
        if len(live) > 40:
            least = min(live, key=lambda p: (p.priority, -p.number))
            assert least.is_shed
            live.remove(least)
        elif chance.random() < 0.4:
            taken = lot.pop(0.0)
            assert taken is not None
            live.remove(taken)
    assert lot.waiting == len(live)
    assert not any(place.is_shed for place in live)


def test_requests_that_waited_too_long_are_refused_oldest_first() -> None:
    lot = wait_queue()
    first = put(lot, 900, at_ms=0.0)
    second = put(lot, 0, at_ms=100.0)
    assert lot.pop_late(249.0) is None
    assert lot.pop_late(250.0) is first
    assert first.is_refused
    assert lot.pop_late(349.0) is None
    assert lot.pop_late(350.0) is second
    assert lot.pop_late(9999.0) is None


def test_a_served_request_is_not_refused() -> None:
    lot = wait_queue()
    place = put(lot, 0)
    assert lot.pop(1.0) is place
    assert lot.pop_late(9999.0) is None
    assert not place.is_refused


def test_a_request_that_must_run_is_never_refused() -> None:
    lot = wait_queue(max_bytes=10)
    place = put(lot, -1000, 50, must_run=True)
    assert lot.pop_late(9999.0) is None
    assert len(lot) == 1
    assert lot.pop(9999.0) is place
    assert not place.is_refused


def test_over_budget_the_newest_of_the_least_urgent_is_shed() -> None:
    lot = wait_queue(max_bytes=100)
    places = [put(lot, priority, 40) for priority in (0, 7, 0)]
    assert [place.is_shed for place in places] == [False, False, True]
    assert (lot.held_bytes, lot.waiting, len(lot)) == (80, 2, 3)
    urgent = put(lot, 900, 90)
    assert [place.is_shed for place in (*places, urgent)] == [True, True, True, False]
    assert lot.held_bytes == 90
    assert lot.pop(1.0) is urgent
    assert lot.pop(1.0) is None
    assert [lot.pop_late(250.0) for _ in range(4)] == [*places, None]
    assert len(lot) == 0


def test_places_are_counted_too() -> None:
    lot = wait_queue(max_waiting=2)
    assert [put(lot, 0).is_shed for _ in range(3)] == [False, False, True]


def test_the_top_is_served_next() -> None:
    lot = wait_queue(max_waiting=1)
    tops = [lot.top_priority]
    put(lot, 5)
    put(lot, 3)
    tops.append(lot.top_priority)
    lot.pop(0.0)
    assert [*tops, lot.top_priority] == [None, 5, None]
    assert lot.oldest_ms(40.0) == 40.0


def test_nothing_of_a_finished_request_is_kept() -> None:
    lot = wait_queue(max_bytes=10**9, max_waiting=10**9)
    for number in range(5000):
        put(lot, 1001)
        put(lot, -1, topic=f"t{number}")
        assert lot.pop(0.0) is not None
    while lot.pop_late(250.0) is not None:
        pass
    keeper = put(lot, 1000, must_run=True, at_ms=250.0)
    assert len(lot) == 1
    assert lot._priorities == [keeper.priority]
    level = lot._levels[keeper.priority]
    assert len(lot._by_age) + len(level.in_order) + len(level.early) < 3 * 1100
    assert lot._least is None or len(lot._least) < 1100
    assert list(lot._topic_queues) == [keeper.topic]
    assert not lot._large
    assert len(lot._fair) == 1
    assert len(lot._fair._order) < 5000


def test_counts_are_right_whatever_happens() -> None:
    chance = random.Random(8)
    lot = wait_queue(max_bytes=500, max_waiting=30)
    live: list[WaitingRequest] = []
    now = 0.0
    served = fair = 0
    for _ in range(20_000):
        now += chance.random() * 10
        match chance.randrange(3):
            case 0 | 1 if chance.random() < 0.7:
                priority = chance.randrange(-5, 5)
                live.append(
                    put(
                        lot,
                        priority,
                        chance.randrange(60),
                        at_ms=now,
                        must_run=chance.random() < 0.1,
                        topic=f"{priority}-{chance.randrange(3)}",
                    )
                )
            case 2:
                taken = lot.pop(now)
                if taken is not None:
                    served += 1
                    assert not taken.is_shed
                    rivals = [p for p in live if not (p.is_shed or p is taken)]
                    if any(rival.priority > taken.priority for rival in rivals):
                        assert served % FAIR_EVERY == 0
                        fair += 1
                        own = [p for p in rivals if p.topic == taken.topic]
                        assert all(p.number > taken.number for p in own)
                    live.remove(taken)
            case _:
                late = lot.pop_late(now)
                if late is not None:
                    assert not late.must_run
                    assert now - late.came_ms >= 250.0
                    live.remove(late)
        waiting = [place for place in live if not place.is_shed]
        assert len(lot) == len(live)
        assert lot.waiting == len(waiting)
        assert lot.held_bytes == sum(place.size for place in waiting)
        if lot.waiting > 30 or lot.held_bytes > 500:
            assert all(place.must_run for place in waiting)
        assert len(lot._fair) == len({place.topic for place in waiting}) == len(lot._topic_queues)
        assert sum(line.bytes for line in lot._topic_queues.values()) == lot.held_bytes
        assert {
            n for n, line in lot._topic_queues.items() if lot._is_large(line)
        } == lot._large.keys()
    assert lot.fair_total == fair > 100


def test_one_place_in_ten_is_of_the_topic_that_was_served_longest_ago() -> None:
    lot = wait_queue(max_waiting=10**6)
    for _ in range(100):
        put(lot, 500, topic="flood")
    quiet = [put(lot, -1000, topic=f"quiet-{number}") for number in range(3)]
    served = [lot.pop(float(number)) for number in range(40)]
    assert [served.index(place) for place in quiet] == [9, 19, 29]
    assert lot.fair_total == 3


def test_a_flood_sheds_its_own_requests_and_not_less_urgent_ones() -> None:
    """In an earlier build the least urgent requests of all topics were shed, so a flood caused
    refusals for others.
    """
    lot = wait_queue(max_bytes=1000)
    quiet = [put(lot, -1000, 10, topic=f"quiet-{number}") for number in range(20)]
    flood = [put(lot, 900, 100, topic="flood") for _ in range(20)]
    assert not any(place.is_shed for place in quiet)
    assert [place.is_shed for place in flood] == [False] * 8 + [True] * 12
    late = put(lot, -1000, 10, topic="late")
    assert not late.is_shed
    assert flood[7].is_shed


def test_where_no_topic_holds_a_large_part_the_least_urgent_are_doomed() -> None:
    lot = wait_queue(max_bytes=1000)
    places = [put(lot, priority, 20, topic=str(priority)) for priority in range(60)]
    assert [place.is_shed for place in places] == [True] * 10 + [False] * 50


def test_places_that_insist_are_not_doomed_however_much_their_topic_holds() -> None:
    lot = wait_queue(max_bytes=100)
    insisting = put(lot, -5, 90, must_run=True, topic="loader")
    other = put(lot, 900, 20, topic="other")
    assert (insisting.is_shed, other.is_shed) == (False, True)
