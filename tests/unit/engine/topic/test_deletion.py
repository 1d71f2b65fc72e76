"""Seqs as runs, and tags found over sealed and unsealed records."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.engine.drive import Driver, seqs_of
from topics_server.engine.topic.deletion import columns_of, columns_of_seqs, seq_runs
from topics_server.engine.topic.writes.delete import decide_delete
from topics_server.values.model import TagMatch


@given(st.sets(st.integers(1, 200), min_size=1))
def test_runs_are_exact_sorted_and_disjoint(seqs: set[int]) -> None:
    firsts, lasts = columns_of(*seq_runs(np.array(sorted(seqs), np.int64)))
    found = [seq for a, b in zip(firsts, lasts, strict=True) for seq in range(a, b + 1)]
    assert found == sorted(seqs)
    assert all(b + 1 < a for a, b in zip(firsts[1:], lasts[:-1], strict=True))


def test_seqs_keep_their_width() -> None:
    firsts, lasts = columns_of(*seq_runs(np.array([2**62, 2**62 + 1, 2**63 - 1], np.int64)))
    assert (firsts.tolist(), lasts.tolist()) == ([2**62, 2**63 - 1], [2**62 + 1, 2**63 - 1])


def test_a_match_reaches_sealed_frozen_and_open_records() -> None:
    driver = Driver()
    for number in range(900):
        driver.append(number, tag=f"t{number % 3}:{number % 10}")
        if number == 400:
            driver.seal()
    assert driver.delete(match=TagMatch("t1:", is_prefix=True)) == 300
    assert driver.delete(match=TagMatch("t0:0")) == 30
    assert driver.delete(match=TagMatch("t0:0")) == 0
    expected = [n + 1 for n in range(900) if n % 3 != 1 and not (n % 3 == 0 and n % 10 == 0)]
    assert seqs_of(driver.read(0)) == expected


def test_before_seq_and_match_are_both_asked_for() -> None:
    driver = Driver()
    for number in range(600):
        driver.append(number, tag="t" if number % 2 else None)
        if number == 300:
            driver.seal()
    assert driver.delete(before_seq=500, match=TagMatch("t")) == 249
    assert driver.delete(before_seq=100, match=TagMatch("t")) == 0


def test_a_range_delete_is_one_run_over_what_lives() -> None:
    driver = Driver()
    driver.append(*range(1_000), tag="t")
    driver.delete(10)
    entry = decide_delete(driver.topic, 500, None, {}, driver.now_ms)
    assert entry is not None
    firsts, lasts = columns_of(entry.firsts, entry.lasts)
    assert (firsts.tolist(), lasts.tolist()) == ([10], [499])


def test_records_that_are_expired_are_not_deleted() -> None:
    driver = Driver()
    driver.append(1, tag="t")
    driver.now_ms += 100
    driver.append(2, tag="t")
    driver.topic.config = type(driver.topic.config)(ttl_ms=50)
    assert driver.delete(match=TagMatch("t")) == 1
    assert driver.read(0).gap is not None, "its expiry is told"


@pytest.mark.parametrize(
    "seqs",
    [
        [7],
        [1, 2, 3],
        [1, 3, 4, 9],
        [2**62, 2**62 + 1, 2**63 - 1],
        list(range(1, 65)),
        list(range(1, 400, 3)),
        [*range(1, 60), *range(61, 130)],
    ],
)
def test_a_list_of_seqs_has_the_columns_of_an_array(seqs: list[int]) -> None:
    assert columns_of_seqs(seqs) == seq_runs(np.array(seqs, np.int64))
