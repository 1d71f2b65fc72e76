"""`cli.data.resume`: how much of a file a topic holds, decided from its last records."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from topics_server.cli.data.resume import (
    CLEAR_RECORDS,
    Mismatch,
    PrefixCheck,
    TailRecord,
    TailSearch,
    TopicTail,
    Unclear,
)


def prints(words: str | Sequence[object]) -> list[bytes]:
    """A fingerprint for each word; equal words are equal lines."""
    words = words.split() if isinstance(words, str) else words
    return [str(word).encode() for word in words]


def tail(records: Sequence[bytes], *, window: int = 1000, dead: Sequence[int] = ()) -> TopicTail:
    """The tail of a topic with these records from seq 1 on, without those of `dead`."""
    first = max(1, len(records) - window + 1)
    return TopicTail(
        len(records),
        tuple(
            TailRecord(seq, print_)
            for seq, print_ in enumerate(records, 1)
            if seq >= first and seq not in dead
        ),
    )


def check(found: TopicTail, lines: Sequence[bytes], batch: int = 3) -> int:
    """The answer of `PrefixCheck`, with only the fingerprints that it wants."""
    checked = PrefixCheck(found)
    for start in range(0, len(lines), batch):
        part = lines[start : start + batch]
        if checked.wants(start + 1, len(part)):
            checked.feed(start + 1, part)
    return checked.stored(len(lines))


def search(found: TopicTail, lines: Sequence[bytes], batch: int = 3) -> int:
    """The answer of `TailSearch`."""
    searched = TailSearch(found)
    for start in range(0, len(lines), batch):
        searched.feed(lines[start : start + batch])
    return searched.stored()


# -- check 1: is the topic a beginning of the file? --------------------------------------------


@given(
    lines=st.lists(st.sampled_from("abc"), max_size=40),
    share=st.floats(0, 1),
    window=st.integers(1, 50),
    batch=st.integers(1, 10),
)
def test_a_beginning_is_recognised_whatever_repeats(
    lines: list[str], share: float, window: int, batch: int
) -> None:
    file = prints(lines)
    stored = int(len(file) * share)
    assert check(tail(file[:stored], window=window), file, batch) == stored


@given(
    lines=st.lists(st.integers(0, 5), min_size=1, max_size=40),
    place=st.integers(0, 39),
    batch=st.integers(1, 10),
)
def test_one_other_record_in_the_window_is_a_mismatch(
    lines: list[int], place: int, batch: int
) -> None:
    file = prints(lines)
    records = list(file)
    records[place % len(records)] = b"other"
    with pytest.raises(Mismatch):
        check(tail(records), file, batch)


def test_deleted_records_leave_their_place() -> None:
    file = prints("a b c d e f")
    assert check(tail(file[:5], dead=[1, 2, 5]), file) == 5


def test_a_record_in_front_moves_every_place() -> None:
    file = prints("a b c d e f")
    with pytest.raises(Mismatch, match="record 1 of the topic is not line 1"):
        check(tail([b"x", *file[:3]]), file)


def test_a_longer_topic_is_no_beginning() -> None:
    file = prints("a b c")
    with pytest.raises(Mismatch, match="4 records, the file has 3 lines"):
        check(tail([*file, b"d"], window=1), file)


def test_without_a_record_left_there_is_nothing_to_tell_from() -> None:
    with pytest.raises(Mismatch, match="none is left"):
        check(tail(prints("a b"), dead=[1, 2]), prints("a b c"))


def test_lines_outside_the_window_need_no_print() -> None:
    checked = PrefixCheck(tail(prints(range(100)), window=10))
    assert not checked.wants(1, 90)
    assert checked.wants(1, 91)
    assert checked.wants(100, 50)
    assert not checked.wants(101, 50)


# -- check 2: where does the file stop in a topic that holds more? -----------------------------


def test_the_end_of_the_topic_is_found_in_the_file() -> None:
    file = prints(range(30))
    assert search(tail([*prints("x y z"), *file[:12]]), file) == 12
    assert search(tail([*prints("x y z"), *file]), file) == 30


def test_the_window_may_end_before_the_file_began() -> None:
    file = prints(range(30))
    assert search(tail([*prints("x y z"), *file[:21]], window=5), file) == 21


def test_an_end_that_is_not_from_the_file_means_all_of_it() -> None:
    assert search(tail(prints("x y z")), prints("a b c")) == 0
    assert search(tail(prints("a b x")), prints("a b c")) == 0
    assert search(TopicTail(5), prints("a b c")) == 0


def test_dead_records_neither_help_nor_hurt() -> None:
    file = prints(range(30))
    assert search(tail([b"x", *file[:12]], dead=[13, 5]), file) == 12


def test_a_file_that_repeats_itself_is_unclear() -> None:
    with pytest.raises(Unclear, match=r"line 3 and like line 6"):
        search(tail([b"x", *prints("a b c")], window=3), prints("a b c a b c"))


def test_a_few_records_in_the_middle_of_a_batch_are_unclear() -> None:
    file = prints(range(30))
    with pytest.raises(Unclear, match="few records"):
        search(tail([*prints("x y"), file[0]]), file)


def test_many_records_in_the_middle_of_a_batch_are_clear() -> None:
    file = prints(range(3 * CLEAR_RECORDS))
    stored = CLEAR_RECORDS + 1
    assert search(tail([b"x", *file[:stored]]), file, batch=3 * CLEAR_RECORDS) == stored


@given(
    foreign=st.lists(st.just("x"), min_size=1, max_size=5),
    batches=st.integers(1, 6),
    batch=st.integers(1, 5),
    window=st.integers(1, 40),
)
def test_a_stopped_load_is_found_behind_what_was_there(
    foreign: list[str], batches: int, batch: int, window: int
) -> None:
    file = prints(range(30))
    stored = batches * batch
    found = tail([*prints(foreign), *file[:stored]], window=window)
    assert search(found, file, batch) == stored
