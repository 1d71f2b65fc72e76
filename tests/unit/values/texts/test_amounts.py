"""`amounts`: durations and sizes as people write them."""

from __future__ import annotations

import pytest

from topics_server.values.texts.amounts import duration_text, parse_duration, parse_size, size_text


@pytest.mark.parametrize(
    ("text", "ms"),
    [
        ("0", 0),
        ("250", 250),
        ("250ms", 250),
        ("5s", 5000),
        ("1.5s", 1500),
        ("10m", 600_000),
        ("10 min", 600_000),
        ("1h30m", 5_400_000),
        ("2d", 172_800_000),
        ("1W", 604_800_000),
    ],
)
def test_durations(text: str, ms: int) -> None:
    assert parse_duration(text) == ms


def test_a_plain_number_may_count_seconds() -> None:
    assert parse_duration("30", plain_ms=1000) == 30_000
    assert parse_duration("0.5", plain_ms=1000) == 500
    assert parse_duration("5ms", plain_ms=1000) == 5


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("17", 17),
        ("17B", 17),
        ("64KB", 64_000),
        ("64kb", 64_000),
        ("64KiB", 65_536),
        ("64k", 65_536),
        ("1MiB", 1_048_576),
        ("1.5 MiB", 1_572_864),
        ("2GB", 2_000_000_000),
        ("1T", 1024**4),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


WRONG = [
    "",
    " ",
    "-5s",
    "5x",
    "s",
    "5s5s",
    "30m1h",
    "5 s 7",
    "1e3",
    "5.s",
    "\u0665s",
    "1_000",
    "nan",
]


@pytest.mark.parametrize("text", WRONG)
def test_an_invalid_duration_is_refused_with_examples(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not a duration: .*5s, 10m") as caught:
        parse_duration(text)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize("text", [*WRONG[:-1], "5s", "KB", "64 XB", "64KBB"])
def test_an_invalid_size_is_refused_with_examples(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not a size: .*64KB or 1MiB"):
        parse_size(text)


def test_a_part_of_the_smallest_unit_is_refused() -> None:
    with pytest.raises(ValueError, match="not a whole number of milliseconds"):
        parse_duration("1.5ms")
    with pytest.raises(ValueError, match="not a whole number of bytes"):
        parse_size("0.3KiB")


@pytest.mark.parametrize(
    ("ms", "text"),
    [
        (0, "0 ms"),
        (999, "999 ms"),
        (1500, "1.5 s"),
        (59_999, "59.999 s"),
        (60_000, "1 min"),
        (5_405_000, "1 h 30 min"),
        (90_061_000, "1 d 1 h"),
    ],
)
def test_durations_are_shown_in_their_largest_units(ms: int, text: str) -> None:
    assert duration_text(ms) == text


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (1_048_575, "1 MiB"), (64 << 20, "64 MiB")],
)
def test_sizes_are_shown_in_binary_units(size: int, text: str) -> None:
    assert size_text(size) == text
