"""`topics append --if-…`: stored only if the condition holds."""

from __future__ import annotations

from tests.cli.conftest import Topics


def test_an_append_at_the_expected_head(topics: Topics, topic: str) -> None:
    assert topics.good("append", topic, "1", "--if-absent").value["condition"] == "met"
    assert topics.good("append", topic, "2", "--if-head", "1").value["first_seq"] == 2
    ran = topics("append", topic, "3", "--if-head", "1")
    assert (ran.code, ran.out) == (1, b"")
    assert ran.message.startswith("condition_failed: the topic's head is 2, not 1")
    assert len(topics.good("read", topic).lines) == 2


def test_an_append_that_must_find_no_match(topics: Topics, topic: str) -> None:
    seat = ("append", topic, "1", "--tag", "seat:7", "--if-none-match", "seat:7")
    assert topics.good(*seat).value["condition"] == "met"
    assert topics(*seat).message.startswith("condition_failed: record 1 matches")
    assert topics.good(*seat, "--if-after", "1", "--if-exists").value["first_seq"] == 2
    glob = '["tag", "Glob", "seat:*"]'
    assert topics("append", topic, "1", "--if-none-match", glob).code == 1


def test_options_that_ask_for_nothing_are_refused(topics: Topics, topic: str) -> None:
    for words in (
        ["1", "--if-after", "3"],
        ["1", "--if-none-match", "[1"],
        ["1", "--if-head", "-1"],
        ["-", "--if-head", "1"],
    ):
        assert topics("append", topic, *words, stdin=b"1\n").code == 2
    assert topics("read", topic).code == 1
