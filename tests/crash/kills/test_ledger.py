"""Tests of the ledger: it notices every kind of broken promise, and reports no kept one."""

from __future__ import annotations

import random

import pytest

from tests.crash.kills.ledger import Delete, Json, TopicLedger, View
from tests.crash.kills.turnover import Turnover
from tests.crash.kills.writers import Moments, make_call


class Bench:
    """A ledger and the reader's view of a topic, built call by call."""

    def __init__(self, cap_records: int = 0) -> None:
        self.ledger = TopicLedger("t", cap_records=cap_records)
        self.moments = Moments()
        self.records: list[Json] = []
        self.stones: list[Json] = []
        self.head_seq = 0

    def append(self, count: int, *, acked: bool = True, stored: bool = True, tag: str = "g") -> int:
        tags: list[str | None] = [tag] * count
        call = make_call(self.moments, random.Random(1), tags, "", None)
        self.ledger.calls.append(call)
        first_seq = self.head_seq + 1
        if acked:
            call.first_seq, call.acked = first_seq, self.moments.next()
        if stored:
            self.head_seq += count
            for index in range(count):
                data = {"id": call.id_of(index)}
                self.records.append({"$seq": first_seq + index, "$tag": tag, "data": data})
        return first_seq

    def delete(self, tag: str, *, acked: bool = True, done: bool = True) -> None:
        sent = self.moments.next()
        self.ledger.deletes.append(Delete(None, tag, None, sent))
        if acked:
            self.ledger.deletes[-1].acked = self.moments.next()
        if done:
            self.records = [r for r in self.records if r["$tag"] != tag]

    def check(self) -> list[str]:
        earliest = min((r["$seq"] for r in self.records), default=self.head_seq + 1)
        view = View(self.records, self.stones, self.head_seq, earliest, len(self.records))
        return self.ledger.check(view, self.moments.next())


def test_kept_promises_are_not_blamed() -> None:
    bench = Bench()
    bench.append(3)
    bench.append(2, tag="h")
    bench.delete("g")
    bench.append(2, acked=False)
    bench.append(4, acked=False, stored=False)
    assert bench.check() == []
    bench.append(1)
    bench.delete("g", acked=False, done=False)
    assert bench.check() == []


@pytest.mark.parametrize("index", [0, 1, 2])
def test_a_lost_record_is_noticed(index: int) -> None:
    bench = Bench()
    bench.append(3)
    del bench.records[index]
    assert "lost" in bench.check()[0]


def test_a_lost_tail_is_noticed() -> None:
    bench = Bench()
    bench.append(3)
    bench.append(2, stored=False)
    assert any("lost" in line for line in bench.check())


def test_half_a_call_is_noticed() -> None:
    bench = Bench()
    bench.append(3, acked=False)
    bench.records.pop()
    assert any("lost" in line for line in bench.check())


def test_a_record_that_is_back_is_noticed() -> None:
    bench = Bench()
    bench.append(3)
    kept = list(bench.records)
    bench.delete("g")
    bench.records = kept
    assert any("back after its delete" in line for line in bench.check())
    bench.delete("g")
    assert bench.check() == []
    bench.records = kept
    assert any("is back" in line for line in bench.check())


def test_a_doubled_record_is_noticed() -> None:
    bench = Bench()
    bench.append(1)
    bench.records.append({**bench.records[0], "$seq": 2})
    bench.head_seq = 2
    assert any("twice" in line for line in bench.check())


def test_a_seq_used_twice_is_noticed() -> None:
    bench = Bench()
    bench.append(2)
    assert bench.check() == []
    bench.records.pop()
    bench.head_seq = 1
    bench.ledger.head_seq = 2
    bench.append(1)
    assert bench.check() != []


def test_an_eviction_needs_its_tombstone_and_a_full_topic() -> None:
    for told, count in ((True, 5), (False, 5), (True, 3)):
        bench = Bench(cap_records=3)
        bench.append(count)
        bench.records = bench.records[2:] if count == 5 else bench.records[1:]
        lost = count - len(bench.records)
        if told:
            bench.stones = [{"gap_from": 1, "gap_to": lost, "reason": "cap"}]
        assert bool(bench.check()) != (told and count == 5)


def test_the_writer_of_a_turnover_asks_again_while_it_is_refused_for_load() -> None:
    topic = Turnover("t", Moments())
    writer = topic.writer(port=1, seed="s")
    busy: Json = {"error": {"code": "throttled"}}
    answers: list[tuple[int, Json]] = [(429, busy), (429, busy), (201, {})]

    class Answering:
        def ask(self, method: str, target: str, body: object) -> tuple[int, Json]:
            if len(answers) == 1:
                writer.stop.set()
            return answers.pop(0)

        def close(self) -> None:
            pass

    writer._connection = Answering()  # type: ignore[assignment]
    writer.run()
    assert (writer.problems, answers) == ([], [])
    assert topic.state is not None
