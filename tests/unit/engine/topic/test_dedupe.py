"""Idempotency keys: in flight, in the window, forgotten."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from topics_server.engine.topic import dedupe
from topics_server.engine.topic.dedupe import Duplicate, KeyMemory


def test_a_key_counts_until_its_window_has_passed() -> None:
    keys = KeyMemory()
    keys.remember("k", 5, 2, ts=1000, window_ms=100)
    assert keys.find("k", 100, 1099) == Duplicate(5, 2)
    assert keys.find("k", 100, 1100) is None
    assert keys.find("other", 100, 1000) is None


def test_a_key_in_flight_never_expires() -> None:
    keys = KeyMemory()
    keys.stage("k", 5, 2, lsn=9)
    assert keys.find("k", 1, 10**9) == Duplicate(5, 2, 9)


def test_a_window_of_zero_remembers_nothing_but_what_is_in_flight() -> None:
    keys = KeyMemory()
    keys.stage("k", 1, 1, lsn=1)
    assert keys.find("k", 0, 5) is not None
    keys.remember("k", 1, 1, ts=5, window_ms=0)
    assert keys.find("k", 0, 5) is None


def test_an_undone_key_is_free_again() -> None:
    keys = KeyMemory()
    keys.remember("k", 1, 1, ts=0, window_ms=10)
    keys.stage("k", 5, 2, lsn=9)
    keys.undo("k")
    assert keys.find("k", 10, 5) == Duplicate(1, 1)
    assert keys.find("k", 10, 500) is None


def test_keys_whose_window_has_passed_are_let_go() -> None:
    keys = KeyMemory()
    for number in range(10):
        keys.remember(f"k{number}", number, 1, ts=number * 10, window_ms=30)
    assert list(keys.remembered) == ["k7", "k8", "k9"]


def test_a_key_that_comes_again_is_remembered_anew() -> None:
    keys = KeyMemory()
    keys.remember("a", 1, 1, ts=0, window_ms=50)
    keys.remember("b", 2, 1, ts=10, window_ms=50)
    keys.remember("a", 3, 1, ts=55, window_ms=50)
    assert list(keys.remembered) == ["b", "a"]
    assert keys.find("a", 50, 60) == Duplicate(3, 1)


def test_beyond_the_bound_the_oldest_key_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dedupe, "DEDUPE_KEYS_PER_TOPIC_MAX", 3)
    keys = KeyMemory()
    for number in range(5):
        keys.remember(f"k{number}", number, 1, ts=0, window_ms=1000)
    assert list(keys.remembered) == ["k2", "k3", "k4"]


def test_keys_of_records_are_found_as_keys_of_calls_are() -> None:
    keys = KeyMemory()
    keys.remember("call", 5, 3, ts=0, window_ms=100)
    keys.remember_each(["b:0", "b:1"], 8, ts=50, window_ms=100)
    keys.stage("b:3", 10, 1, lsn=7)
    keys.stage("b:4", 11, 1, lsn=9)
    names = ["b:1", "b:2", "b:3", "call", "b:4", "b:0"]
    assert keys.find_each(names, 100, 60) == ([9, 0, 10, 5, 11, 8], 9)
    # The call's window ends at 100, the first batch's at 150; keys in flight stay.
    assert keys.find_each(names, 100, 100) == ([9, 0, 10, 0, 11, 8], 9)
    assert keys.find_each(names, 100, 150) == ([0, 0, 10, 0, 11, 0], 9)
    assert keys.find("b:1", 100, 60) == Duplicate(9, 1)
    assert keys.find_each([], 100, 60) == ([], 0)


def test_keys_of_records_move_to_the_end_and_replace_those_in_flight() -> None:
    keys = KeyMemory()
    keys.remember_each(["b:0", "b:1", "b:2"], 1, ts=0, window_ms=50)
    keys.stage("b:1", 7, 1, lsn=3)
    keys.remember_each(["b:1", "b:3"], 7, ts=40, window_ms=50)
    assert list(keys.remembered) == ["b:0", "b:2", "b:1", "b:3"]
    assert keys.in_flight == {}
    keys.remember_each(["c:0"], 9, ts=60, window_ms=50)
    assert list(keys.remembered) == ["b:1", "b:3", "c:0"]


def test_a_batch_may_have_more_keys_than_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dedupe, "DEDUPE_KEYS_PER_TOPIC_MAX", 3)
    keys = KeyMemory()
    keys.remember("old", 1, 1, ts=0, window_ms=1000)
    keys.remember_each([f"b:{index}" for index in range(5)], 2, ts=0, window_ms=1000)
    assert list(keys.remembered) == ["b:2", "b:3", "b:4"]


class _Visited(dict[str, tuple[int, int, int]]):
    """Counts iterators, because an iterator passes the places of all removed items."""

    iterators = 0

    def __iter__(self) -> Iterator[str]:
        self.iterators += 1
        return super().__iter__()


@pytest.mark.parametrize("is_restored", [False, True])
def test_a_call_after_a_pause_lets_go_a_bounded_number_of_keys(*, is_restored: bool) -> None:
    """Later calls remove the other keys, which no longer count meanwhile; no key is removed too
    early.
    """
    keys = KeyMemory()
    names = [f"k{number}" for number in range(2_000)]
    if is_restored:
        keys.restore({name: (number, 1, 0) for number, name in enumerate(names)})
    else:
        keys.remember_each(names, 1, ts=0, window_ms=10)
    keys.remembered = visited = _Visited(keys.remembered)
    keys.remember("new", 9_000, 1, ts=1_000, window_ms=10)
    assert len(keys.remembered) == 2_001 - 257
    assert not any(keys.find_each(names, 10, 1_000)[0])
    keys.remember_each(["a", "b"], 9_001, ts=1_005, window_ms=10)
    assert len(keys.remembered) == 2_003 - 257 - 258
    for number in range(10):
        keys.remember(f"later {number}", 9_100 + number, 1, ts=1_006, window_ms=10)
    assert len(keys.remembered) == 13
    assert keys.find("new", 10, 1_006) == Duplicate(9_000, 1)
    assert visited.iterators == 0


def test_places_of_keys_that_are_gone_are_given_back() -> None:
    """A topic that uses keys for years keeps places for the keys in the window, and for few
    others.
    """
    keys = KeyMemory()
    for number in range(20_000):
        keys.remember(f"k{number}", number, 1, ts=number, window_ms=100)
    assert len(keys.remembered) == 100
    assert keys._order is not None
    assert len(keys._order._keys) <= 100 + dedupe._GONE_MAX + 1


def test_a_key_that_is_used_again_and_again_is_let_go_at_its_last_use() -> None:
    keys = KeyMemory()
    for ts in range(0, 50, 10):
        keys.remember("a", ts, 1, ts=ts, window_ms=5)
        keys.remember("b", ts, 1, ts=ts + 1, window_ms=100)
    assert list(keys.remembered) == ["a", "b"]
    keys.remember("c", 60, 1, ts=60, window_ms=30)
    assert list(keys.remembered) == ["a", "b", "c"]
    keys.remember("d", 70, 1, ts=70, window_ms=30)
    assert list(keys.remembered) == ["b", "c", "d"]
    keys.remember("e", 71, 1, ts=71, window_ms=30)
    assert list(keys.remembered) == ["c", "d", "e"]
    assert keys._order is not None
    assert keys._order._moved == {}
