"""Tests of the checker of watch histories: it notices every planted fault and reports no correct
history.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.crash.kills.ledger import Delete
from tests.crash.watch.watch_history import (
    CaughtUp,
    Gap,
    Gone,
    History,
    Loose,
    Records,
    Resume,
    Seen,
    Shown,
    Start,
    bind_sightings,
    check,
    compare_with_diff,
    read_record,
)
from tests.crash.watch.watch_ledger import Caps, Incarnation, Ledger, Written

TOPIC = "t"


class Bench:
    """A ledger, and one watcher of one topic that starts at 0."""

    def __init__(self, *, is_ephemeral: bool = False, nodes: tuple[str, ...] = ()) -> None:
        self.ledger = Ledger()
        self.is_ephemeral = is_ephemeral
        self.history = History(TOPIC, frozenset(nodes))
        self.calls = 0
        self.life = self.create()
        self.start()

    def create(self) -> Incarnation:
        self.life = self.ledger.create(TOPIC, is_ephemeral=self.is_ephemeral, record_bytes_max=100)
        return self.life

    def append(
        self, count: int, node: str | None = None, tag: str | None = None, *, acked: bool = True
    ) -> list[Written]:
        self.calls += 1
        records = [(node, tag, 3, False)] * count
        made = self.ledger.compose(self.life, self.calls, *records)
        for written in made:
            if acked:
                assert self.life.bind(self.life.head_seq + 1, written) is None
                written.acked = self.ledger.moment()
            else:
                self.life.floating[written.id] = written
        return made

    def delete(self, tag: str) -> None:
        made = Delete(None, tag, None, self.ledger.moment())
        self.life.deletes.append(made)
        made.acked = self.ledger.moment()

    def cap(self, cap_records: int) -> None:
        if self.life.caps:
            self.life.caps[-1].head_end = self.life.head_seq
        self.life.caps.append(Caps(cap_records, 0, self.ledger.moment()))

    def drop(self) -> None:
        self.life.dropped_sent = self.ledger.moment()
        self.life.dropped_acked = self.ledger.moment()

    def stop(self) -> None:
        self.ledger.stops.append(self.ledger.moment())

    # -- the watcher's events --

    def start(self, seq: int = 0) -> None:
        self.history.add(Start(self.ledger.moment(), seq))

    def frame(
        self, *seqs: int, from_seq: int | None = None, to_seq: int | None = None, data: bool = True
    ) -> None:
        seen = []
        for seq in seqs:
            written = self.life.records.get(seq)
            seen.append(
                Seen(
                    seq, written.id if written and data else None, written.node if written else None
                )
            )
        first = self.history.position if from_seq is None else from_seq
        last = seqs[-1] if to_seq is None else to_seq
        self.history.add(
            Records(self.ledger.moment(), first, last, self.life.head_seq, tuple(seen))
        )

    def gap(self, gap_from: int, gap_to: int, reason: str = "cap") -> None:
        self.history.add(
            Gap(self.ledger.moment(), reason, gap_from, gap_to, gap_to + 1, self.life.head_seq)
        )

    def caught_up(self) -> None:
        self.history.add(CaughtUp(self.ledger.moment(), self.life.head_seq))

    def gone(self) -> None:
        self.history.add(Gone(self.ledger.moment(), self.life.head_seq))

    def resume(self, mark: int | None = None) -> None:
        self.history.add(Resume(self.ledger.moment(), mark))

    def loose(self, *, cut: int | None = None, is_restored: bool = False) -> None:
        at = self.ledger.moment()
        self.history.add(Loose(at, at if cut is None else cut, is_restored))

    def problems(self) -> list[str]:
        return bind_sightings([self.history], self.ledger) or check(self.history, self.ledger)


def expect(bench: Bench, *words: str) -> None:
    """Check for exactly these problems, each named by a word; none without words."""
    problems = bench.problems()
    assert len(problems) >= bool(words), f"nothing noticed, {words} planted"
    assert bool(problems) == bool(words), problems
    for word in words:
        assert any(word in line for line in problems), problems


def test_a_plain_history_is_not_blamed() -> None:
    bench = Bench()
    bench.append(5)
    bench.frame(1, 2)
    bench.frame(3, 4, 5)
    bench.caught_up()
    bench.append(1)
    bench.frame(6)
    expect(bench)


@pytest.mark.parametrize("missing", [1, 2, 3])
def test_a_missing_record_is_noticed(missing: int) -> None:
    bench = Bench()
    bench.append(3)
    bench.frame(*[seq for seq in (1, 2, 3) if seq != missing], to_seq=3)
    expect(bench, "missing")


def test_a_record_missing_between_frames_is_noticed() -> None:
    bench = Bench()
    bench.append(3)
    bench.frame(1)
    bench.frame(3, from_seq=2)
    expect(bench, "missing")


def test_a_record_missing_before_caught_up_is_noticed() -> None:
    bench = Bench()
    bench.append(3)
    bench.frame(1, 2)
    bench.caught_up()
    expect(bench, "missing")


def test_a_history_that_ends_before_the_head_is_noticed() -> None:
    bench = Bench()
    bench.append(3)
    bench.frame(1, 2)
    expect(bench, "not at the head")


def test_a_doubled_record_is_noticed() -> None:
    bench = Bench()
    bench.append(3)
    bench.frame(1, 2)
    bench.frame(2, 3, from_seq=1)
    expect(bench, "told twice")


def test_wrong_order_is_noticed() -> None:
    bench = Bench()
    bench.append(3)
    bench.frame(2, 1, 3)
    expect(bench, "order")


def test_a_record_twice_in_one_frame_is_noticed() -> None:
    bench = Bench()
    bench.append(2)
    bench.frame(1, 1, 2)
    expect(bench, "order")


def test_a_silent_gap_of_unassigned_seqs_is_noticed() -> None:
    bench = Bench()
    bench.append(2)
    bench.life.head_seq = 4
    bench.append(1)
    bench.frame(1, 2)
    bench.frame(5, from_seq=4)
    expect(bench, "silent gap")


def test_an_unexplained_tombstone_is_noticed() -> None:
    bench = Bench()
    bench.append(10)
    bench.gap(1, 3)
    bench.frame(4, 5, 6, 7, 8, 9, 10)
    expect(bench, "unexplained tombstone")


@pytest.mark.parametrize(("last", "fits"), [(6, True), (7, False)])
def test_a_tombstone_reaches_as_far_as_the_cap_evicts(last: int, fits: bool) -> None:
    bench = Bench()
    bench.append(10)
    bench.cap(4)
    bench.gap(1, last, "from_seq_too_old")
    bench.frame(*range(last + 1, 11))
    expect(bench, *(() if fits else ("cannot be evicted",)))


def test_a_cap_that_came_later_explains_nothing() -> None:
    bench = Bench()
    bench.append(10)
    bench.gap(1, 6)
    bench.cap(4)
    bench.frame(7, 8, 9, 10)
    expect(bench, "cannot be evicted")


def test_a_cap_that_was_lifted_explains_no_more_than_it_did() -> None:
    bench = Bench()
    bench.append(10)
    bench.cap(4)
    bench.cap(0)
    bench.append(10)
    bench.gap(1, 7)
    bench.frame(*range(8, 21))
    expect(bench, "cannot be evicted")


def test_a_delete_is_silent_and_a_tombstone_for_it_is_noticed() -> None:
    for told in (False, True):
        bench = Bench()
        bench.append(2, tag="x")
        bench.append(1)
        bench.delete("x")
        if told:
            bench.gap(1, 2)
        bench.frame(3)
        expect(bench, *(("tombstone",) if told else ()))


def test_a_delete_that_came_later_explains_nothing() -> None:
    bench = Bench()
    bench.append(2, tag="x")
    bench.append(1)
    bench.frame(3, from_seq=2)
    bench.delete("x")
    expect(bench, "missing")


def test_a_delete_does_not_reach_what_was_sent_after_it() -> None:
    bench = Bench()
    bench.append(1, tag="x")
    bench.delete("x")
    bench.append(1, tag="x")
    bench.append(1)
    bench.frame(3)
    expect(bench, "missing")


def test_a_deleted_record_on_a_later_connection_is_noticed() -> None:
    bench = Bench()
    bench.append(2, tag="x")
    bench.delete("x")
    bench.frame(1, 2)
    expect(bench)  # the frame may have been in the buffers
    bench.resume(mark=1)
    bench.frame(1, 2)
    expect(bench, "is back after its delete")


def test_the_watchers_own_node_is_silent_and_its_delivery_is_noticed() -> None:
    bench = Bench(nodes=("me",))
    bench.append(2, "me")
    bench.append(1, "you")
    bench.frame(3)
    expect(bench)
    bench.append(1, "me")
    bench.frame(4)
    expect(bench, "filtered out")


def test_an_older_id_restarts_the_history_there() -> None:
    bench = Bench()
    bench.append(5)
    bench.frame(1, 2)
    mark = len(bench.history.events)
    bench.frame(3, 4)
    bench.resume(mark)
    assert bench.history.position == 2
    bench.frame(3, 4, 5)
    expect(bench)


@pytest.mark.parametrize(("first", "word"), [(2, "told twice"), (4, "missing")])
def test_an_older_id_restarts_exactly_there(first: int, word: str) -> None:
    bench = Bench()
    bench.append(5)
    bench.frame(1, 2)
    mark = len(bench.history.events)
    bench.frame(3, 4)
    bench.resume(mark)
    bench.frame(*range(first, 6), from_seq=first - 1)
    expect(bench, word)


def test_a_resume_neither_doubles_nor_loses() -> None:
    for first, words in ((4, ()), (3, ("told twice",)), (5, ("missing",))):
        bench = Bench()
        bench.append(5)
        bench.frame(1, 2, 3)
        bench.resume()
        bench.frame(*range(first, 6), from_seq=first - 1)
        expect(bench, *words)


def test_a_resume_without_an_id_may_lose_only_delivered_records() -> None:
    bench = Bench()
    bench.append(3)
    bench.frame(1)
    bench.loose()
    bench.append(2)
    bench.frame(4, 5, from_seq=3)
    expect(bench)
    bench = Bench()
    bench.append(3)
    bench.frame(1)
    bench.loose()
    bench.append(2)
    bench.frame(5, from_seq=4)
    expect(bench, "missing")


def test_only_a_restored_session_may_go_back_without_an_id() -> None:
    for is_restored in (True, False):
        bench = Bench()
        bench.append(3)
        bench.frame(1, 2)
        bench.loose(is_restored=is_restored)
        bench.frame(1, 2, 3, from_seq=0)
        expect(bench, *(() if is_restored else ("told twice",)))


def test_a_recreated_topic_is_told_and_begins_anew() -> None:
    bench = Bench()
    bench.append(3)
    bench.frame(1, 2)
    bench.drop()
    bench.create()
    bench.append(2)
    bench.resume()
    bench.gap(1, 0, "recreated")
    bench.frame(1, 2)
    expect(bench)


def test_topic_deleted_ends_the_topic_until_a_recreated_tombstone() -> None:
    for told in (True, False):
        bench = Bench()
        bench.append(3)
        bench.frame(1)
        bench.drop()
        bench.gone()
        bench.create()
        bench.append(2)
        bench.resume()
        if told:
            bench.gap(1, 0, "recreated")
        bench.frame(1, 2, from_seq=0)
        expect(bench, *(() if told else ("after topic-deleted",)))


def test_a_change_of_incarnation_in_silence_is_noticed() -> None:
    for data in (True, False):
        bench = Bench()
        bench.append(3)
        bench.frame(1)
        bench.drop()
        bench.create()
        bench.append(4)
        bench.resume()
        bench.frame(2, 3, 4, data=data)
        words = ("is 1.1" if data else "dropped before",)
        expect(bench, *words)


def test_records_skipped_by_a_late_resume_of_a_new_incarnation_are_noticed() -> None:
    bench = Bench()
    bench.append(3)
    bench.frame(1)
    bench.drop()
    bench.create()
    bench.append(4)
    bench.resume()
    bench.gap(1, 0, "recreated")
    bench.frame(3, 4, from_seq=2)
    expect(bench, "missing")


def test_topic_deleted_without_a_drop_is_noticed() -> None:
    bench = Bench()
    bench.append(1)
    bench.gone()
    expect(bench, "nobody deleted it")


def test_a_dropped_topic_on_a_later_connection_is_noticed() -> None:
    bench = Bench()
    bench.append(3)
    bench.frame(1)
    bench.drop()
    bench.resume()
    bench.frame(2, 3)
    expect(bench, "dropped before")


def test_an_end_in_an_older_incarnation_is_noticed() -> None:
    bench = Bench()
    bench.append(3)
    bench.frame(1, 2, 3)
    bench.drop()
    bench.gone()
    bench.create()
    expect(bench, "not in 2")


def test_a_restart_of_an_ephemeral_topic_gives_a_tombstone() -> None:
    bench = Bench(is_ephemeral=True)
    bench.append(3)
    bench.frame(1)
    bench.stop()
    bench.life.head_seq = 100
    bench.append(1)
    bench.resume()
    bench.gap(2, 100, "restart")
    bench.frame(101)
    expect(bench)


@pytest.mark.parametrize(("is_ephemeral", "gap_to"), [(True, 5), (False, 3)])
def test_a_restart_tombstone_over_existing_records_is_noticed(
    is_ephemeral: bool, gap_to: int
) -> None:
    bench = Bench(is_ephemeral=is_ephemeral)
    bench.append(3)
    bench.frame(1)
    bench.stop()
    bench.append(3)
    bench.resume()
    bench.gap(2, gap_to, "restart")
    bench.frame(*range(gap_to + 1, 7))
    expect(bench, "unexplained tombstone")


def test_a_floating_record_is_bound_where_it_was_seen_and_nowhere_else() -> None:
    bench = Bench(is_ephemeral=True)
    floating = bench.append(1, acked=False)[0]
    other = bench.append(1, acked=False)[0]
    bench.life.head_seq = 1

    def see(written: Written) -> History:
        history = History(TOPIC, frozenset())
        history.add(Start(bench.ledger.moment(), 0))
        seen = Seen(1, written.id, None)
        history.add(Records(bench.ledger.moment(), 0, 1, 1, (seen,)))
        return history

    one, two = see(floating), see(other)
    assert bind_sightings([one], bench.ledger) == []
    assert check(one, bench.ledger) == []
    assert "for another" in bind_sightings([one, two], bench.ledger)[0]


def test_a_damaged_tombstone_is_noticed() -> None:
    bench = Bench()
    bench.append(3)
    bench.gap(1, 2, "damaged")
    bench.frame(3)
    expect(bench, "unexplained tombstone")


def test_an_unreached_head_is_noticed() -> None:
    bench = Bench()
    bench.append(1)
    bench.frame(1)
    bench.history.add(CaughtUp(bench.ledger.moment(), 2))
    expect(bench, "given to nobody", "the head is 1")


def test_a_diff_that_has_more_is_noticed() -> None:
    bench = Bench(nodes=("me",))
    bench.append(2)
    bench.append(1, "me")
    bench.frame(1)
    live = {seq: written.id for seq, written in bench.life.records.items()}
    (problem,) = compare_with_diff(bench.history, live, bench.ledger)
    assert "a diff gives seq 2" in problem
    bench.start(2)
    assert compare_with_diff(bench.history, live, bench.ledger) == []


def _with_meta(record: dict[str, object]) -> None:
    record["meta"] = {"of": "1.0"}


def _other_data(record: dict[str, object]) -> None:
    record["data"] = {"id": "1.0", "pad": "12"}


def _unknown(record: dict[str, object]) -> None:
    record["data"] = {"id": "9.9", "pad": "012"}


def _without_node(record: dict[str, object]) -> None:
    del record["$node"]


@pytest.mark.parametrize("spoil", [_with_meta, _other_data, _unknown, _without_node])
def test_a_record_that_is_not_as_written_is_noticed(
    spoil: Callable[[dict[str, object]], None],
) -> None:
    bench = Bench()
    bench.append(1, "n", "tag")
    record = {"$seq": 1, "$ts": 5, "$node": "n", "data": {"id": "1.0", "pad": "012"}}
    seen, problem = read_record(record, Shown(), bench.ledger)
    assert (seen, problem) == (Seen(1, "1.0", "n"), None)
    spoil(record)
    _, problem = read_record(record, Shown(), bench.ledger)
    assert problem is not None
