"""Producers of one topic: next, repeated and fenced requests, gaps; and when a producer is
forgotten.
"""

from __future__ import annotations

import random
import time

import pytest

from topics_server.engine.topic import producers as module
from topics_server.engine.topic.producers import Producers, StampAccepted, StampRepeated
from topics_server.values.errors import Code, TopicsError
from topics_server.values.limits import PRODUCER_KEPT_MS
from topics_server.values.model import ProducerStamp


def stamp(epoch: int, seq: int, producer_id: str = "p") -> ProducerStamp:
    return ProducerStamp(producer_id, epoch, seq)


def refusal(producers: Producers, asked: ProducerStamp, now_ms: int = 0) -> TopicsError:
    with pytest.raises(TopicsError) as caught:
        producers.check(asked, now_ms)
    return caught.value


def test_a_producer_begins_with_seq_0_of_any_epoch() -> None:
    producers = Producers()
    assert producers.check(stamp(0, 0), 0) is None
    assert producers.check(stamp(7, 0), 0) is None
    error = refusal(producers, stamp(0, 1))
    assert error.code is Code.PRODUCER_SEQ_CONFLICT
    assert error.detail == {"expected_seq": 0, "received_seq": 1}


def test_each_request_is_the_next_a_repeat_or_too_far_ahead() -> None:
    producers = Producers()
    for seq in range(3):
        producers.accept(stamp(2, seq), 10 + seq, 1, 5)
    last = StampAccepted(2, 2, 12, 1, 5)
    assert producers.check(stamp(2, 2), 9) == StampRepeated(last, True, None)
    assert producers.check(stamp(2, 0), 9) == StampRepeated(last, False, None)
    assert producers.check(stamp(2, 3), 9) is None
    assert refusal(producers, stamp(2, 4)).detail == {"expected_seq": 3, "received_seq": 4}


def test_an_older_epoch_is_fenced_and_a_newer_one_begins_at_0() -> None:
    producers = Producers()
    producers.accept(stamp(2, 0), 1, 1, 0)
    error = refusal(producers, stamp(1, 1))
    assert (error.code, error.detail) == (Code.PRODUCER_FENCED, {"epoch": 2})
    error = refusal(producers, stamp(3, 1))
    assert (error.code, error.detail) == (Code.INVALID_REQUEST, {"field": "Producer-Seq"})
    assert producers.check(stamp(9, 0), 0) is None


def test_what_is_on_its_way_counts_until_it_fails() -> None:
    producers = Producers()
    producers.stage(1, stamp(0, 0), 1, 2, 5)
    producers.stage(2, stamp(0, 1), 3, 1, 6)
    assert producers.check(stamp(0, 2), 6) is None
    repeated = StampRepeated(StampAccepted(0, 1, 3, 1, 6), False, 2)
    assert producers.check(stamp(0, 0), 6) == repeated
    producers.undo("p")
    assert producers.check(stamp(0, 1), 6) is None
    producers.accept(stamp(0, 0), 1, 2, 5)
    assert producers.check(stamp(0, 0), 6) == StampRepeated(
        StampAccepted(0, 0, 1, 2, 5), True, None
    )
    assert producers.check(stamp(0, 1), 6) is None


def test_who_appends_nothing_for_long_is_forgotten() -> None:
    producers = Producers()
    producers.accept(stamp(5, 0, "old"), 1, 1, 0)
    producers.accept(stamp(5, 0, "young"), 2, 1, 10)
    assert isinstance(producers.check(stamp(5, 0, "old"), PRODUCER_KEPT_MS - 1), StampRepeated)
    assert producers.check(stamp(0, 0, "old"), PRODUCER_KEPT_MS) is None
    producers.accept(stamp(5, 1, "young"), 3, 1, PRODUCER_KEPT_MS)
    assert list(producers.known) == ["young"]


def test_beyond_the_bound_a_new_producer_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PRODUCERS_PER_TOPIC_MAX", 2)
    producers = Producers()
    producers.accept(stamp(0, 0, "a"), 1, 1, 0)
    producers.stage(1, stamp(0, 0, "b"), 2, 1, 0)
    error = refusal(producers, stamp(0, 0, "c"))
    assert error.code is Code.THROTTLED
    assert error.detail == {"limit": "producers_per_topic", "max": 2}
    assert producers.check(stamp(0, 1, "a"), 0) is None, "who is known goes on"
    assert producers.check(stamp(0, 0, "c"), PRODUCER_KEPT_MS) is None, "one is forgotten by then"


@pytest.mark.parametrize("seed", range(20))
def test_every_answer_is_that_of_a_plain_list_of_requests(seed: int) -> None:
    """Requests are in flight, applied in order, or undone as a suffix; a plain list decides which
    of them count.
    """
    chance = random.Random(seed)
    producers = Producers()
    applied: list[ProducerStamp] = []
    staged: list[ProducerStamp] = []
    for turn in range(500):
        asked = stamp(chance.randrange(4), chance.randrange(6), chance.choice("abc"))
        ours = [one for one in applied + staged if one.producer_id == asked.producer_id]
        last = ours[-1] if ours else None
        expected: object
        if last is None:
            expected = None if asked.seq == 0 else Code.PRODUCER_SEQ_CONFLICT
        elif asked.epoch != last.epoch:
            if asked.epoch < last.epoch:
                expected = Code.PRODUCER_FENCED
            else:
                expected = None if asked.seq == 0 else Code.INVALID_REQUEST
        elif asked.seq <= last.seq:
            expected = StampRepeated
        else:
            expected = None if asked.seq == last.seq + 1 else Code.PRODUCER_SEQ_CONFLICT
        try:
            found: object = producers.check(asked, 0)
        except TopicsError as error:
            found = error.code
        assert (StampRepeated if isinstance(found, StampRepeated) else found) == expected
        if found is None:
            producers.stage(turn, asked, turn + 1, 1, 0)
            staged.append(asked)
        for _ in range(chance.randrange(3)):
            if staged and chance.random() < 0.2:
                producers.undo(staged.pop().producer_id)
            elif staged:
                done = staged.pop(0)
                producers.accept(done, 1, 1, 0)
                applied.append(done)


@pytest.mark.parametrize("seed", range(20))
def test_who_is_known_is_who_came_within_the_time(seed: int) -> None:
    chance = random.Random(seed)
    producers = Producers()
    came: dict[str, int] = {}
    now = 0
    for turn in range(300):
        now += chance.choice((0, 1, PRODUCER_KEPT_MS // 50, PRODUCER_KEPT_MS // 3))
        who = chance.choice("abcdefgh")
        producers.accept(stamp(turn, 0, who), 1, 1, now)
        came[who] = now
        kept = {name: ts for name, ts in came.items() if now - ts < PRODUCER_KEPT_MS}
        assert {name: last.ts for name, last in producers.known.items()} == kept
        assert [last.ts for last in producers.known.values()] == sorted(kept.values())


def test_many_producers_in_turn_cost_no_more_than_few() -> None:
    """100,000 producers one after another: the oldest is found without a search.

    With a dict the search passed every producer that had moved to the end: 20 times the time and
    more.
    """

    def best_of(count: int, turns: int) -> float:
        producers = Producers()
        names = [f"p-{number}" for number in range(count)]
        for name in names:
            producers.accept(ProducerStamp(name, 0, 0), 1, 1, 0)
        times = []
        for first in range(0, turns, 1000):
            stamps = [
                ProducerStamp(names[number % count], 0, 1) for number in range(first, first + 1000)
            ]
            began = time.perf_counter()
            for stamp in stamps:
                producers.accept(stamp, 1, 1, 0)
            times.append(time.perf_counter() - began)
        # The last producers, after most have moved to the end.
        return min(times[-5:])

    assert best_of(100_000, 70_000) < 10 * best_of(16, 10_000)
