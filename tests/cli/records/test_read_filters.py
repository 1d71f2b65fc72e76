"""`topics read` with filters and a start in time."""

from __future__ import annotations

import pytest

from tests.cli.conftest import Topics


@pytest.fixture
def orders(topics: Topics, topic: str) -> str:
    """Six records: tags paid, new and none in turn."""
    for number, tag in enumerate(("paid", "new", None, "paid", "new:late", None)):
        marks = [] if tag is None else ["--tag", tag]
        topics.good("append", topic, str(number + 1), *marks)
    return topic


def seqs(topics: Topics, *words: str) -> list[int]:
    return [record["$seq"] for record in topics.good("read", *words).lines]


def test_filters(topics: Topics, orders: str) -> None:
    assert seqs(topics, orders, "--tag", "paid") == [1, 4]
    assert seqs(topics, orders, "--tag", "paid", "--tag", "new") == [1, 2, 4]
    assert seqs(topics, orders, "--tag-prefix", "new") == [2, 5]
    assert seqs(topics, orders, "--filter", '["Not", ["tag", "Glob", "*"]]') == [3, 6]
    assert seqs(topics, orders, "--tag-prefix", "new", "--filter", '["Not", "new"]') == [5]
    assert seqs(topics, orders, "--tag", "paid", "--last", "1") == [4]


def test_a_start_in_time(topics: Topics, orders: str) -> None:
    assert seqs(topics, orders, "--since", "1h") == [1, 2, 3, 4, 5, 6]
    assert seqs(topics, orders, "--since", "1h", "--tag", "paid", "--limit", "1") == [1]
    assert seqs(topics, orders, "--since", "9999-01-01T00:00:00Z") == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--since", "noon"), "since must be milliseconds since 1970"),
        (("--filter", "paid"), "--filter is not JSON"),
        (("--filter", '["Xor"]'), "filter must be a tag"),
        (("--since", "1h", "--last", "2"), "--last and --since: give one of them"),
        (("--since", "1h", "--from", "2"), "--since and --from: give one of them"),
    ],
)
def test_wrong_words(topics: Topics, orders: str, words: tuple[str, ...], said: str) -> None:
    done = topics("read", orders, *words)
    assert done.code != 0
    assert said in done.err
