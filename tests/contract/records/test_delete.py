"""§5: permanent deletes by seq, by tag, by both."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.contract.driver import Api, Json, good, refused, seqs_of

TAGS = ["a", "ab", "abc", "b", "a*", "*", "", "ä", "A", None, "chat-4:1", "chat-42:1", "chat-42:2"]


@pytest.fixture
def tagged(api: Api, topic: str) -> str:
    """A topic with one record of each of `TAGS`, seqs from 1; `data` is the tag."""
    records: list[Json] = [
        {"data": tag} if tag is None else {"data": tag, "tag": tag} for tag in TAGS
    ]
    good(api.append(topic, records))
    return topic


def _left(api: Api, topic: str) -> list[object]:
    return [r["data"] for r in api.read_all(topic)]


@pytest.mark.parametrize(
    ("before_seq", "deleted", "earliest"),
    [(0, 0, 1), (1, 0, 1), (2, 1, 2), (5, 4, 5), (10, 9, 10), (11, 10, 11), (99, 10, 11)],
)
def test_before_seq_deletes_records_below_it(
    api: Api, topic: str, before_seq: int, deleted: int, earliest: int
) -> None:
    """Contract §5 [5-01, 5-12, 5-13, 5-15, 5-20, 5-21]"""
    api.add(topic, *range(1, 11))
    body = good(api.delete(topic, before_seq=before_seq))
    assert set(body) == {
        "topic",
        "deleted",
        "earliest_seq",
        "head_seq",
        "count",
        "bytes",
        "performance",
    }
    assert body["topic"] == topic
    assert (body["deleted"], body["earliest_seq"], body["head_seq"]) == (deleted, earliest, 10)
    assert body["count"] == 10 - deleted
    assert _left(api, topic) == list(range(earliest, 11))
    state = api.get_state(topic)
    assert (state["count"], state["bytes"]) == (body["count"], body["bytes"])


@pytest.mark.parametrize("before_seq", [2**53, 2**63 - 1, 2**63, 2**64 - 1])
def test_before_seq_does_not_reach_into_the_future(api: Api, topic: str, before_seq: int) -> None:
    """Contract §5, settled rules [5-20, S-24]"""
    api.add(topic, 1, 2)
    assert good(api.delete(topic, before_seq=before_seq))["deleted"] == 2
    assert api.add(topic, 3)["seqs"] == [3]
    assert _left(api, topic) == [3]


@pytest.mark.parametrize("match", [["tag", "Eq", "a"], "a"])
def test_an_exact_match_hits_that_tag_alone(api: Api, tagged: str, match: object) -> None:
    """Contract §5 [5-02, 5-05, 5-07, 5-10]"""
    assert good(api.delete(tagged, match=match))["deleted"] == 1
    assert _left(api, tagged) == [t for t in TAGS if t != "a"]


@pytest.mark.parametrize("tag", ["ab", "ä", "A", "chat-42:1", "*", "a*", ""])
def test_every_tag_can_be_matched_exactly(api: Api, tagged: str, tag: str) -> None:
    """§5, settled rules: in a bare string and in Eq a star is an ordinary character. [5-05, 5-07,
    S-43]
    """
    assert good(api.delete(tagged, match=["tag", "Eq", tag]))["deleted"] == 1
    assert _left(api, tagged) == [t for t in TAGS if t != tag]
    api.append(tagged, [{"data": "again", "tag": tag}])
    assert good(api.delete(tagged, match=tag))["deleted"] == 1
    assert _left(api, tagged) == [t for t in TAGS if t != tag]


@pytest.mark.parametrize("prefix", ["a", "ab", "abc", "chat-42:", "chat-", "b", "z", "ä"])
def test_a_glob_hits_what_starts_with_it(api: Api, tagged: str, prefix: str) -> None:
    """Contract §5 [5-06, 5-10]"""
    hit = [t for t in TAGS if t is not None and t.startswith(prefix)]
    assert good(api.delete(tagged, match=["tag", "Glob", f"{prefix}*"]))["deleted"] == len(hit)
    assert _left(api, tagged) == [t for t in TAGS if t not in hit]


def test_a_lone_star_hits_every_tagged_record(api: Api, tagged: str) -> None:
    """Settled rules of the contract [S-44, 5-10]"""
    assert good(api.delete(tagged, match=["tag", "Glob", "*"]))["deleted"] == len(TAGS) - 1
    assert _left(api, tagged) == [None]


def test_match_and_before_seq_must_both_hold(api: Api, topic: str) -> None:
    """Contract §5 [5-03]"""
    api.append(topic, [{"data": n, "tag": "odd" if n % 2 else "even"} for n in range(1, 11)])
    assert good(api.delete(topic, match="odd", before_seq=6))["deleted"] == 3
    assert _left(api, topic) == [2, 4, 6, 7, 8, 9, 10]
    assert good(api.delete(topic, match=["tag", "Glob", "e*"], before_seq=9))["deleted"] == 4
    assert _left(api, topic) == [7, 9, 10]
    assert good(api.delete(topic, match="odd", before_seq=0))["deleted"] == 0


def test_one_of_the_two_is_required(api: Api, tagged: str) -> None:
    """Contract §5 [5-04]"""
    refused(api.delete(tagged), 400, "invalid_request")
    refused(api.delete(tagged, before_seq=None, match=None), 400, "invalid_request")
    assert _left(api, tagged) == TAGS


BAD_MATCHES: list[object] = [
    ["tag", "eq", "a"],
    ["tag", "Regex", "a"],
    ["tag", "Like", "a%"],
    ["tag", "", "a"],
    ["node", "Eq", "a"],
    ["$tag", "Eq", "a"],
    ["Tag", "Eq", "a"],
    ["tag", "Eq"],
    ["tag"],
    [],
    ["tag", "Eq", "a", "b"],
    ["tag", "Eq", 1],
    ["tag", "Eq", None],
    ["tag", "Eq", ["a"]],
    [1, "Eq", "a"],
    ["tag", 1, "a"],
    ["tag", "Glob", "a"],
    ["tag", "Glob", ""],
    ["tag", "Glob", "*a"],
    ["tag", "Glob", "a*b"],
    ["tag", "Glob", "a*b*"],
    ["tag", "Glob", "**"],
    ["tag", "Glob", "a**"],
    1,
    True,
    {},
    {"tag": "a"},
]


@pytest.mark.parametrize("match", BAD_MATCHES)
def test_a_bad_match_is_400_and_deletes_nothing(api: Api, tagged: str, match: object) -> None:
    """Contract §5, settled rules [5-08, 5-09, S-45]"""
    for fields in ({"match": match}, {"match": match, "before_seq": 99}):
        where: str = refused(api.delete(tagged, **fields), 400, "invalid_request")["field"]
        assert where == "match" or where.startswith("match[")
    assert _left(api, tagged) == TAGS


BAD_SEQS: tuple[object, ...] = (-1, 1.0, 1.5, "1", True, 2**64, [], {})


@pytest.mark.parametrize("before_seq", BAD_SEQS)
def test_a_bad_before_seq_is_400_and_deletes_nothing(
    api: Api, tagged: str, before_seq: object
) -> None:
    """Contract §5, settled rules [5-04, S-21, S-24]"""
    for fields in ({"before_seq": before_seq}, {"before_seq": before_seq, "match": "a"}):
        detail = refused(api.delete(tagged, **fields), 400, "invalid_request")
        assert detail["field"] == "before_seq"
    assert _left(api, tagged) == TAGS


def test_later_records_with_the_tag_stay(api: Api, topic: str) -> None:
    """Contract §5 [5-11, 5-02]"""
    api.add(topic, "old", tag="t")
    api.delete(topic, match="t")
    api.add(topic, "new", tag="t")
    assert _left(api, topic) == ["new"]


def test_deleting_again_deletes_nothing(api: Api, tagged: str) -> None:
    """Contract §5 [5-13]"""
    for fields in ({"match": "a"}, {"before_seq": 4}, {"match": ["tag", "Glob", "chat*"]}):
        assert good(api.delete(tagged, **fields))["deleted"] > 0
        assert good(api.delete(tagged, **fields))["deleted"] == 0


def test_deleted_records_are_gone_for_every_reader_at_once(api: Api, topic: str) -> None:
    """Contract §5 [5-14]"""
    api.append(topic, [{"data": "x" * 50, "tag": f"t{n % 2}"} for n in range(10)])
    full = api.get_state(topic)
    body = good(api.delete(topic, match="t0"))
    assert seqs_of(api.read(topic)) == [2, 4, 6, 8, 10]
    assert seqs_of(api.read(topic, from_seq=3)) == [4, 6, 8, 10]
    state = api.get_state(topic)
    assert (state["count"], body["count"]) == (5, 5)
    assert state["bytes"] == body["bytes"] == full["bytes"] // 2


def test_deleting_in_the_middle_leaves_the_floor(api: Api, topic: str) -> None:
    """Contract §5 [5-15]"""
    api.append(topic, [{"data": n, "tag": f"t{n}"} for n in range(1, 7)])
    assert good(api.delete(topic, match="t3"))["earliest_seq"] == 1
    assert good(api.delete(topic, match="t1"))["earliest_seq"] == 2
    assert good(api.delete(topic, match="t2"))["earliest_seq"] == 4


def test_the_head_stays_and_no_seq_is_used_twice(api: Api, topic: str) -> None:
    """Contract §5 [5-16, 5-21]"""
    api.add(topic, 1, 2, 3, tag="t")
    body = good(api.delete(topic, match="t"))
    assert (body["head_seq"], body["earliest_seq"], body["count"], body["bytes"]) == (3, 4, 0, 0)
    assert api.read(topic)["tombstone"] is None
    assert api.add(topic, 4)["seqs"] == [4]


def test_deleting_in_an_absent_topic_is_404(api: Api, topic: str) -> None:
    """Contract §5 [5-19]"""
    refused(api.delete(topic, before_seq=5), 404, "topic_not_found")
    refused(api.delete(topic, match="t"), 404, "topic_not_found")
    refused(api.state(topic), 404, "topic_not_found")


def test_a_delete_stays_in_its_topic(api: Api, names: Callable[[str], str]) -> None:
    """Contract §5 [5-02]"""
    first, second = names("one"), names("two")
    for name in (first, second):
        api.add(name, 1, 2, tag="t")
    assert good(api.delete(first, match="t"))["deleted"] == 2
    assert _left(api, second) == [1, 2]


def test_thousands_of_matches_go_in_one_call(api: Api, topic: str) -> None:
    """Contract §5 [5-02, 5-06, 5-13]"""
    for start in range(0, 6000, 2000):
        good(
            api.append(
                topic,
                [{"data": n, "tag": f"{n % 7}:{n}"} for n in range(start, start + 2000)],
            )
        )
    expected = [n for n in range(6000) if n % 7 != 3]
    assert good(api.delete(topic, match=["tag", "Glob", "3:*"]))["deleted"] == 6000 - len(expected)
    assert _left(api, topic) == expected
    assert good(api.delete(topic, match="4:4"))["deleted"] == 1
