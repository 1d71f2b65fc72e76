"""§1: create, configure, state, list, delete."""

from __future__ import annotations

import time
from collections.abc import Callable
from urllib.parse import quote

import pytest

from tests.contract.driver import CONFIG_DEFAULTS, Api, Json, good, refused

Names = Callable[[str], str]


@pytest.mark.parametrize("tail", ["a", "A.b_c:d-e", "0", "9..", "x::", "----"])
def test_names_of_the_charset_are_taken(api: Api, topic: str, tail: str) -> None:
    """Contract §1 [1-01]"""
    name = f"{topic}{tail}"
    assert good(api.put(name))["topic"] == name
    assert good(api.state(name))["topic"] == name


@pytest.mark.parametrize("name", ["x", "0", "Z9"])
def test_a_single_character_is_a_name(api: Api, name: str) -> None:
    """Contract §1 [1-01]"""
    api.drop(name)
    assert api.put(name).status_code == 201
    assert api.drop(name).json()["deleted"] is True


def test_a_name_has_at_most_255_characters(api: Api, topic: str) -> None:
    """Contract §1 [1-01]"""
    longest = topic + "n" * (255 - len(topic))
    assert api.put(longest).status_code == 201
    api.add(longest, 1)
    assert api.get_state(longest)["topic"] == longest
    refused(api.put(longest + "n"), 400, "invalid_request")


def test_case_matters(api: Api, topic: str) -> None:
    """Contract §1 [1-02]"""
    api.add(f"{topic}:Case", 1)
    refused(api.state(f"{topic}:case"), 404, "topic_not_found")
    assert api.put(f"{topic}:case").status_code == 201


BAD_NAMES = [
    "-a",
    ".a",
    "_a",
    ":a",
    "a b",
    "a>b",
    "a/b",
    "a\\b",
    "a?b",
    "a#b",
    "a%b",
    "a+b",
    "a*",
    "a~",
    "a@b",
    "a,b",
    "a;b",
    "a'b",
    'a"b',
    "ä",
    "水",
    "a\x00b",
    "a\nb",
    "a\n",
    "a\x7f",
    "..",
    "a" * 256,
    "a" * 5000,
]


_UNMATCHED = pytest.mark.connection(
    "mounted", reason="a mount of Starlette matches no path with a line break"
)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=_UNMATCHED) if "\n" in name else name for name in BAD_NAMES],
)
@pytest.mark.parametrize(
    ("method", "suffix", "body"),
    [
        ("PUT", "", b"{}"),
        ("GET", "", b""),
        ("DELETE", "", b""),
        ("POST", "", b'{"records":[{"data":1}]}'),
        ("POST", "/diff", b"{}"),
        ("POST", "/delete", b'{"before_seq":1}'),
    ],
)
def test_a_name_outside_the_charset_is_400_everywhere(
    api: Api, method: str, suffix: str, body: bytes, name: str
) -> None:
    """Contract §1, settled rules [1-03, S-35]"""
    target = f"/v0/topics/{quote(name, safe='')}{suffix}"
    if name == "..":
        target = f"/v0/topics/%2E%2E{suffix}"
    answer = api.raw(method, target, body, ["Content-Type: application/json"])
    refused(answer, 400, "invalid_request")


def test_put_creates_over_the_defaults(api: Api, topic: str) -> None:
    """Contract §1.1 [1.1-01, 1.1-07]"""
    answer = api.put(topic, {"ttl_ms": 60000, "durable": True, "priority": 10})
    assert answer.status_code == 201
    body = answer.json()
    assert set(body) == {"topic", "created", "config", "performance"}
    assert body["topic"] == topic
    assert body["created"] is True
    assert body["config"] == CONFIG_DEFAULTS | {
        "ttl_ms": 60000,
        "durable": True,
        "durability": "fsync",
        "priority": 10,
    }


def test_a_fresh_topic_is_empty(api: Api, topic: str) -> None:
    """Contract §1.2 [1.2-01, 1.2-02, 1.2-03, 1.2-06, 1.2-11]"""
    api.put(topic)
    state = api.get_state(topic)
    expected: Json = {
        "topic": topic,
        "type": "log",
        "head_seq": 0,
        "earliest_seq": 1,
        "next_seq": 1,
        "count": 0,
        "bytes": 0,
        "config": CONFIG_DEFAULTS,
        "effective_priority": 0,
        "last_write_ts": None,
        "last_read_ts": None,
    }
    assert {key: state[key] for key in expected} == expected
    assert "performance" in state


def test_state_follows_writes_and_reads(api: Api, topic: str) -> None:
    """Contract §1.2 [1.2-01, 1.2-03, 1.2-06]"""
    api.add(topic, "a", "b", "c")
    state = api.get_state(topic)
    assert (state["head_seq"], state["earliest_seq"], state["next_seq"]) == (3, 1, 4)
    assert state["count"] == 3
    assert state["bytes"] >= 9
    assert state["last_read_ts"] is None
    written = state["last_write_ts"]
    assert type(written) is int
    api.read(topic)
    after = api.get_state(topic)
    assert after["last_write_ts"] == written
    assert type(after["last_read_ts"]) is int
    assert after["last_read_ts"] >= written


def test_reading_from_the_tail_yields_only_later_records(api: Api, topic: str) -> None:
    """Contract §1.2 [1.2-04]"""
    api.add(topic, 1, 2, 3)
    tail = api.get_state(topic)["next_seq"] - 1
    assert api.read(topic, from_seq=tail)["records"] == []
    api.add(topic, 4)
    assert [r["data"] for r in api.read(topic, from_seq=tail)["records"]] == [4]


def test_count_and_bytes_leave_out_deleted_records_at_once(api: Api, topic: str) -> None:
    """Contract §1.2 [1.2-05]"""
    api.add(topic, *["x" * 100] * 10)
    full = api.get_state(topic)
    api.delete(topic, before_seq=6)
    half = api.get_state(topic)
    assert half["count"] == 5
    assert half["bytes"] * 2 == full["bytes"]
    api.delete(topic, before_seq=11)
    none = api.get_state(topic)
    assert (none["count"], none["bytes"]) == (0, 0)


def test_reading_the_state_counts_as_interest_unless_untouched(api: Api, topic: str) -> None:
    """Contract §1.2 [1.2-07, 1.2-08]"""
    api.put(topic)
    good(api.state(topic, touch=False))
    assert api.get_state(topic)["effective_priority"] == 0
    good(api.http.get(f"/v0/topics/{topic}"))
    assert api.get_state(topic)["effective_priority"] > 400


def test_touching_by_name_is_touching(api: Api, topic: str) -> None:
    """Contract §1.2 [1.2-08]"""
    api.put(topic)
    good(api.state(topic, touch=True))
    assert api.get_state(topic)["effective_priority"] > 400


def test_the_state_of_an_absent_topic_creates_nothing(api: Api, topic: str) -> None:
    """Contract §1.2 [1.2-09]"""
    refused(api.state(topic, touch=True), 404, "topic_not_found")
    assert good(api.topics(prefix=topic))["topics"] == []


def test_state_has_the_bytes_it_uses_on_disk(api: Api, topic: str) -> None:
    """Settled rules of the contract [S-77]"""
    api.add(topic, 1)
    disk = api.get_state(topic)["disk_bytes"]
    assert type(disk) is int
    assert disk >= 0


def test_the_list_shows_a_summary_of_each_topic(api: Api, topic: str) -> None:
    """Contract §1.3 [1.3-01, 1.3-02]"""
    api.put(topic, {"durability": "fsync", "priority": 7})
    api.add(topic, "a", "b")
    api.delete(topic, before_seq=2)
    state = api.get_state(topic)
    rows = good(api.topics(prefix=topic))["topics"]
    assert [row["topic"] for row in rows] == [topic]
    row = rows[0]
    assert (row["head_seq"], row["earliest_seq"], row["count"]) == (2, 2, 1)
    assert (row["durable"], row["effective_priority"]) == (True, 7)
    assert row["bytes"] == state["bytes"]


def _walk(api: Api, prefix: str, page_size: int) -> tuple[list[str], int]:
    seen: list[str] = []
    query: dict[str, object] = {"prefix": prefix, "page_size": page_size}
    for pages in range(1, 1000):
        body = good(api.topics(**query))
        rows = [row["topic"] for row in body["topics"]]
        assert len(rows) <= page_size
        seen += rows
        if "next_cursor" not in body:
            return seen, pages
        assert isinstance(body["next_cursor"], str)
        query["cursor"] = body["next_cursor"]
    raise AssertionError("the list does not end")


@pytest.mark.parametrize(("page_size", "pages"), [(1, 7), (2, 4), (3, 3), (7, 1), (100, 1)])
def test_following_the_cursor_visits_each_topic_once(
    api: Api, names: Names, page_size: int, pages: int
) -> None:
    """Contract §1.3, §0.7 [1.3-03, 1.3-04, 0.7-03]"""
    prefix = names("walk")
    made = [f"{prefix}.{n}" for n in ("a", "B", "c", "0", "_", "a:b", "a.b")]
    for name in made:
        api.put(name)
    seen, count = _walk(api, prefix, page_size)
    assert sorted(seen) == sorted(made)
    assert count == pages


def test_the_last_page_has_no_cursor_even_when_it_is_full(api: Api, names: Names) -> None:
    """Contract §1.3, §0.7 [0.7-03, 1.3-04]"""
    prefix = names("full")
    for number in range(4):
        api.put(f"{prefix}.{number}")
    assert "next_cursor" in good(api.topics(prefix=prefix, page_size=3))
    assert "next_cursor" not in good(api.topics(prefix=prefix, page_size=4))


def test_paging_goes_on_over_topics_made_and_dropped_meanwhile(api: Api, names: Names) -> None:
    """§1.3: a topic that stays is seen exactly once. [1.3-04]"""
    prefix = names("busy")
    for number in range(6):
        api.put(f"{prefix}.{number}")
    first = good(api.topics(prefix=prefix, page_size=3))
    api.drop(first["topics"][-1]["topic"])
    api.put(f"{prefix}.zz")
    rest = good(api.topics(prefix=prefix, page_size=100, cursor=first["next_cursor"]))
    seen = [row["topic"] for row in first["topics"] + rest["topics"]]
    assert len(seen) == len(set(seen))
    assert {f"{prefix}.{n}" for n in range(6)} <= set(seen)


def test_a_page_has_100_topics_by_default(api: Api, names: Names) -> None:
    """Contract §1.3, §0.7 [0.7-04, 1.3-03]"""
    prefix = names("many")
    for number in range(103):
        api.put(f"{prefix}.{number:03}", {"durability": "ephemeral"})
    body = good(api.topics(prefix=prefix))
    assert len(body["topics"]) == 100
    rest = good(api.topics(prefix=prefix, cursor=body["next_cursor"]))
    assert len(rest["topics"]) == 3
    assert len(good(api.topics(prefix=prefix, page_size=1000))["topics"]) == 103
    for number in range(103):
        api.drop(f"{prefix}.{number:03}")


def test_a_page_size_beyond_the_maximum_yields_no_more_than_1000(api: Api) -> None:
    """Contract §1.3 [1.3-03, 0.7-04]"""
    answer = api.topics(page_size=1001)
    if answer.status_code != 200:
        refused(answer, 400, "invalid_request")
    else:
        assert len(answer.json()["topics"]) <= 1000


@pytest.mark.parametrize(
    "cursor", ["x", "!!!", "e30=", "bnVsbA==", "W10=", "%00", "eyJhZnRlciI6MX0=", "a" * 5000, ""]
)
def test_a_corrupt_cursor_is_400(api: Api, cursor: str) -> None:
    """Contract §1.3 [1.3-05, S-84]"""
    refused(api.raw("GET", f"/v0/topics?cursor={cursor}"), 400, "invalid_request")


def test_a_prefix_that_matches_nothing_gives_an_empty_page(api: Api, names: Names) -> None:
    """Contract §1.3 [1.3-07]"""
    body = good(api.topics(prefix=names("nobody-has-this")))
    assert body["topics"] == []
    assert "next_cursor" not in body


def test_listing_counts_as_interest_only_when_asked(api: Api, topic: str) -> None:
    """Contract §1.3, settled rules [1.3-06, S-83]"""
    api.put(topic)
    api.topics(prefix=topic)
    api.topics(prefix=topic, touch="false")
    assert api.get_state(topic)["effective_priority"] == 0
    good(api.topics(prefix=topic, touch="true"))
    assert api.get_state(topic)["effective_priority"] > 400


def test_deleting_a_topic_removes_it_with_its_records(api: Api, topic: str) -> None:
    """Contract §1.4 [1.4-01]"""
    api.add(topic, 1, 2, tag="t")
    answer = api.drop(topic)
    assert answer.status_code == 200
    body = answer.json()
    assert set(body) == {"topic", "deleted", "routers_removed", "performance"}
    assert (body["topic"], body["deleted"], body["routers_removed"]) == (topic, True, [])
    refused(api.state(topic), 404, "topic_not_found")
    refused(api.diff(topic), 404, "topic_not_found")
    refused(api.delete(topic, match="t"), 404, "topic_not_found")
    assert good(api.topics(prefix=topic))["topics"] == []
    api.add(topic, 3)
    assert good(api.delete(topic, match="t"))["deleted"] == 0


def test_a_topic_with_records_survives_if_empty(api: Api, topic: str) -> None:
    """Contract §1.4 [1.4-03]"""
    api.add(topic, 1)
    refused(api.drop(topic, if_empty=True), 409, "topic_not_empty")
    assert [r["data"] for r in api.read_all(topic)] == [1]


def test_an_emptied_topic_goes_with_if_empty(api: Api, names: Names) -> None:
    """Contract §1.4 [1.4-04]"""
    fresh, emptied = names("fresh"), names("emptied")
    api.put(fresh)
    api.add(emptied, 1, 2)
    api.delete(emptied, before_seq=3)
    for name in (fresh, emptied):
        assert good(api.drop(name, if_empty=True))["deleted"] is True
        refused(api.state(name), 404, "topic_not_found")
    assert good(api.drop(fresh, if_empty=True))["deleted"] is False


def test_if_empty_false_deletes_anyway(api: Api, topic: str) -> None:
    """Contract §1.4 [1.4-08]"""
    api.add(topic, 1)
    assert good(api.drop(topic, if_empty=False))["deleted"] is True


def test_a_topic_made_again_starts_over(api: Api, topic: str) -> None:
    """Contract §1.4 [1.4-05]"""
    api.put(topic, {"cap_records": 5, "type": "queue"})
    api.add(topic, *range(9))
    api.drop(topic)
    api.add(topic, "first")
    state = api.get_state(topic)
    assert (state["head_seq"], state["earliest_seq"], state["count"]) == (1, 1, 1)
    assert state["config"] == CONFIG_DEFAULTS
    page = api.read(topic)
    assert page["tombstone"] is None
    assert [r["data"] for r in page["records"]] == ["first"]


def test_an_old_cursor_meets_a_recreated_tombstone(api: Api, topic: str) -> None:
    """Contract §1.4, §3.3, settled rules [1.4-06, 3.3-08, S-39]"""
    api.add(topic, *range(10))
    api.drop(topic)
    api.add(topic, "new-1", "new-2")
    page = api.read(topic, from_seq=10)
    assert page["tombstone"]["reason"] == "recreated"
    assert page["tombstone"]["gap_from"] == 1
    assert page["head_seq"] == 2
    assert [r["data"] for r in page["records"]] == ["new-1", "new-2"]
    assert page["next_from_seq"] == 2
    assert page["caught_up"] is True
    assert api.read(topic, from_seq=2)["tombstone"] is None


def test_last_write_time_is_the_commit_time_of_the_last_record(api: Api, topic: str) -> None:
    """Contract §1.2 [1.2-06]"""
    api.add(topic, 1)
    time.sleep(0.02)
    api.add(topic, 2)
    stamps = [r["$ts"] for r in api.read_all(topic)]
    assert abs(api.get_state(topic)["last_write_ts"] - stamps[-1]) <= 1000
    assert stamps[1] > stamps[0]
