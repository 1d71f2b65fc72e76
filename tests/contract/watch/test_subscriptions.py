"""§7: the promises to a reader of many topics, over an event stream and over a WebSocket alike.

Every case runs over both carriers. `subscriptions.Follower` checks every single frame (its fields,
its order, its id) when it reads it.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.contract.conftest import NewServer
from tests.contract.driver import Api, Json, eventually, good
from tests.contract.records.test_verbatim import VALUES
from tests.contract.watch.subscriptions import (
    CaughtUp,
    Clients,
    Deleted,
    Follower,
    Frame,
    Gap,
    Records,
    Topics,
)

Follow = Callable[..., Follower]
Names = Callable[[str], str]
KIB = 1024
# How long a test waits to see that nothing comes.
QUIET_S = 0.4


@pytest.fixture(params=["sse", "ws"])
def carrier(request: pytest.FixtureRequest) -> str:
    """The carrier of the frames."""
    return str(request.param)


@pytest.fixture
def follow(carrier: str, clients: Clients, api: Api) -> Follow:
    """Follow topics of the shared server over the carrier."""

    def start(topics: Topics, **options: Any) -> Follower:
        return clients.follow(carrier, api, topics, **options)

    return start


def _evicted(api: Api, topic: str, count: int = 20, cap: int = 5) -> int:
    """A topic that evicted records: its `earliest_seq` once the cap holds."""
    api.put(topic, {"cap_records": cap})
    for number in range(1, count + 1):
        api.add(topic, number)
    eventually(lambda: bool(api.get_state(topic)["count"] <= cap), "count within the cap")
    return int(api.get_state(topic)["earliest_seq"])


def _pages(frames: list[Frame]) -> list[Records]:
    return [frame for frame in frames if isinstance(frame, Records)]


# --- where it starts, what comes ------------------------------------------------------------------


def test_from_the_start_everything_comes_and_then_caught_up(
    api: Api, topic: str, follow: Follow
) -> None:
    """Contract §7.2, §7.5 [7.2-03, 7.5-02, 7.5-06, 7-ws-10, 7-ws-11]"""
    api.add(topic, *range(10))
    follower = follow({topic: {}})
    assert follower.answered == {topic: {"from_seq": 0, "head_seq": 10, "earliest_seq": 1}}
    page, caught_up = follower.drained()
    assert isinstance(page, Records)
    assert page.seqs == list(range(1, 11))
    assert (page.from_seq, page.to_seq, page.head_seq) == (0, 10, 10)
    assert [record["data"] for record in page.records] == list(range(10))
    assert caught_up == CaughtUp(topic, 10)
    follower.quiet(QUIET_S)


@pytest.mark.parametrize(("from_seq", "first"), [(0, 1), (1, 2), (7, 8), (9, 10)])
def test_from_a_seq_only_later_records_come(
    api: Api, topic: str, follow: Follow, from_seq: int, first: int
) -> None:
    """Contract §7.2 [7.2-03, 7-ws-04, 7-ws-05]"""
    api.add(topic, *range(10))
    follower = follow({topic: {"from_seq": from_seq}})
    assert follower.answered[topic]["from_seq"] == from_seq
    follower.drained()
    assert follower.seqs(topic) == list(range(first, 11))


def test_at_the_head_nothing_comes_but_caught_up(api: Api, topic: str, follow: Follow) -> None:
    """Contract §7.2, §7.5 [7.2-03, 7.5-06]"""
    api.add(topic, *range(10))
    follower = follow({topic: {"from_seq": 10}})
    assert follower.frame() == CaughtUp(topic, 10)
    follower.quiet(QUIET_S)


@pytest.mark.parametrize("options", [{"tail": True}, {"tail": True, "from_seq": 3}])
def test_tail_starts_at_the_head(api: Api, topic: str, follow: Follow, options: Json) -> None:
    """Contract §7.2 [7.2-04, 7.2-12]"""
    api.add(topic, *range(10))
    follower = follow({topic: options})
    assert follower.answered[topic] == {"from_seq": 10, "head_seq": 10, "earliest_seq": 1}
    follower.drained()
    api.add(topic, "new")
    follower.reads(topic, 11)
    assert follower.seqs(topic) == [11]


def test_an_empty_topic_is_caught_up_at_once(api: Api, topic: str, follow: Follow) -> None:
    """Contract §7.5 [7.5-06]"""
    api.put(topic)
    follower = follow({topic: {}})
    assert follower.answered[topic]["head_seq"] == 0
    assert follower.frame() == CaughtUp(topic, 0)
    api.add(topic, "first")
    follower.reads(topic, 1)


def test_live_records_come_without_another_caught_up(api: Api, topic: str, follow: Follow) -> None:
    """§7.5: the reader was live already; caught-up marks the change. [7.5-06, 7.3-02]"""
    api.add(topic, 0)
    follower = follow({topic: {}})
    follower.drained()
    for number in range(1, 6):
        api.add(topic, number)
        page = follower.frame(within_s=5)
        assert isinstance(page, Records)
        assert [record["data"] for record in page.records] == [number]
        assert (page.from_seq, page.to_seq, page.head_seq) == (number, number + 1, number + 1)
    follower.quiet(QUIET_S)


def test_caught_up_comes_again_after_a_backlog(api: Api, topic: str, follow: Follow) -> None:
    """§7.5: a live reader that fell behind gets it when it is live again. [7.5-06]"""
    api.add(topic, 0)
    follower = follow({topic: {}}, limit=10)
    follower.drained()
    api.append(topic, [{"data": n} for n in range(100)])
    frames = follower.until(lambda f: isinstance(f, CaughtUp), "the second caught-up")
    assert frames[-1] == CaughtUp(topic, 101)
    assert len(_pages(frames)) == 10
    follower.quiet(QUIET_S)


def test_concurrent_writers_are_read_in_order_and_whole(
    api: Api, topic: str, follow: Follow
) -> None:
    """§7: each record once, in the order of the log, while it is being written. [7-01]"""
    api.put(topic)
    follower = follow({topic: {}})

    def write(name: int) -> None:
        for number in range(40):
            api.append(topic, [{"data": [name, number, part]} for part in range(5)])

    writers = [threading.Thread(target=write, args=(name,)) for name in range(4)]
    for writer in writers:
        writer.start()
    follower.reads(topic, 800)
    for writer in writers:
        writer.join()
    assert follower.seen[topic] == api.read_all(topic, limit=1000)
    assert follower.seqs(topic) == list(range(1, 801))


def test_many_topics_come_on_one_connection(api: Api, names: Names, follow: Follow) -> None:
    """§7: each topic begins at its own position and has its own caught-up. [7-01, 7.5-06]"""
    topics = [names("many") for _ in range(20)]
    for number, name in enumerate(topics):
        api.append(name, [{"data": f"{number}.{n}"} for n in range(30)])
    starts: dict[str, Json] = {
        name: {"tail": True} if number % 3 == 2 else {"from_seq": number % 3 * 10}
        for number, name in enumerate(topics)
    }
    follower = follow(starts)
    frames = follower.drained()
    assert len([f for f in frames if isinstance(f, CaughtUp)]) == 20
    for number, name in enumerate(topics):
        first = [1, 11, 31][number % 3]
        assert follower.seqs(name) == list(range(first, 31))
    for name in reversed(topics):
        api.add(name, "live")
        follower.reads(name, 31)
        assert follower.seen[name][-1]["data"] == "live"


def test_two_readers_do_not_disturb_each_other(api: Api, topic: str, follow: Follow) -> None:
    """§7: each has its own cursor and options. [7-01]"""
    api.append(topic, [{"data": n, "tag": "t", "node": f"n{n % 2}"} for n in range(50)])
    plain = follow({topic: {}})
    other = follow({topic: {"from_seq": 20}}, limit=7, node="n0", include_tags=True)
    plain.drained()
    other.drained()
    assert plain.seqs(topic) == list(range(1, 51))
    assert other.seqs(topic) == list(range(22, 51, 2))
    assert "$tag" in other.seen[topic][0]
    assert "$tag" not in plain.seen[topic][0]


# --- how frames are cut ---------------------------------------------------------------------------


def test_limit_bounds_the_records_of_a_frame(api: Api, topic: str, follow: Follow) -> None:
    """Contract §7.2 [7.2-05]"""
    api.append(topic, [{"data": n} for n in range(600)])
    plain = follow({topic: {}})
    pages = _pages(plain.drained())
    assert [len(page.records) for page in pages] == [256, 256, 88]
    few = follow({topic: {}}, limit=7)
    pages = _pages(few.drained())
    assert max(len(page.records) for page in pages) == 7
    assert [page.to_seq for page in pages[:2]] == [7, 14]
    assert few.seqs(topic) == list(range(1, 601))
    one = follow({topic: {"from_seq": 590}}, limit=1)
    assert [page.seqs for page in _pages(one.drained())] == [[n] for n in range(591, 601)]


def test_a_frame_is_bounded_whatever_the_limit(api: Api, topic: str, follow: Follow) -> None:
    """§7.2, §11: the limit of a read holds here too. [7.2-05]"""
    api.append(topic, [{"data": n} for n in range(2500)])
    follower = follow({topic: {}}, limit=2**31)
    pages = _pages(follower.drained())
    assert max(len(page.records) for page in pages) <= 1000
    assert follower.seqs(topic) == list(range(1, 2501))


def test_the_budget_bounds_the_bytes_of_a_frame(api: Api, topic: str, follow: Follow) -> None:
    """§7.2: a frame has at least one record, whatever the budget. [7.2-06]"""
    api.append(topic, [{"data": "x" * 1000} for _ in range(20)])
    small = _pages(follow({topic: {}}, max_batch_bytes=3500).drained())
    assert 2 <= max(len(page.records) for page in small) <= 4
    tiny = follow({topic: {}}, max_batch_bytes=1)
    assert [page.seqs for page in _pages(tiny.drained())] == [[n] for n in range(1, 21)]


@pytest.mark.parametrize(
    ("budget", "least", "most"),
    [(None, 150, 360), (262_144, 150, 360), (0, 900, 1150), (2**40, 8000, 8300)],
)
def test_the_budget_has_a_default_and_a_ceiling(
    api: Api, follow: Follow, large_topic: str, budget: int | None, least: int, most: int
) -> None:
    """§7.2: the default is 256 KiB, 0 means 1 MiB, and the ceiling is 8 MiB. Sizes in KiB.
    [7.2-06]
    """
    options = {} if budget is None else {"max_batch_bytes": budget}
    follower = follow({large_topic: {}}, limit=1000, **options)
    first = follower.frame()
    assert isinstance(first, Records)
    assert least * KIB <= len(first.text) <= most * KIB
    follower.close()


@pytest.fixture(scope="module")
def large_topic(api: Api) -> Iterator[str]:
    """A topic of 9 MiB in records of 90 KiB."""
    from tests.contract.conftest import new_name

    name = new_name("large")
    for _ in range(4):
        api.append(name, [{"data": "x" * (90 * KIB)}] * 26)
    yield name
    api.drop(name)


# # --- fields of a record that are shown
# ------------------------------------------------------------


@pytest.mark.parametrize("tags", [None, False, True])
@pytest.mark.parametrize("meta", [None, False, True])
@pytest.mark.parametrize("data", [None, False, True])
def test_the_answer_has_the_requested_fields(
    api: Api, topic: str, follow: Follow, tags: bool | None, meta: bool | None, data: bool | None
) -> None:
    """Contract §7.2, §7.5 [7.2-08, 7.2-09, 7.5-03]"""
    api.append(
        topic,
        [
            {"data": {"a": 1}, "tag": "t", "node": "n", "meta": {"m": 1}},
            {"data": None},
            {"data": 0, "meta": {"m": 2}},
        ],
    )
    asked = {"include_tags": tags, "include_meta": meta, "include_data": data}
    follower = follow({topic: {}}, **{k: v for k, v in asked.items() if v is not None})
    follower.drained()
    keys = ["$seq", "$ts", "$node", *(["$tag"] if tags else [])]
    keys += ["data"] if data is not False else []
    # Without `data` there are `$` fields only.
    keys += ["meta"] if meta is not False and data is not False else []
    full, bare, with_meta = follower.seen[topic]
    assert list(full) == keys
    assert list(bare) == [key for key in keys if key in ("$seq", "$ts", "data")]
    assert list(with_meta) == [key for key in keys if key not in ("$node", "$tag")]
    stored = {r["$seq"]: r for r in api.read_all(topic, include_tags=True)}
    for record in follower.seen[topic]:
        assert record.items() <= stored[record["$seq"]].items()


def test_values_come_byte_for_byte(api: Api, topic: str, carrier: str, follow: Follow) -> None:
    """§0.3, §7.5, settled rules: white space and line ends inside a value stay, too. [S-01, S-02,
    S-03, 7.5-10]

    An event stream has no carriage returns in its data: its reader gets a line feed for each line
    end, so between the parts of a value (nowhere else can one stand) CR LF arrives as LF.
    """
    values = list(VALUES.values())
    values += [b"{\n\n}", b"[\r1\r,\r\n2\n\r]", b"[1\n]", b'{"id":\n"x"}', b"[\n\n\n\r\r]"]
    records = b",".join(b'{"data":' + value + b"}" for value in values)
    body = b'{"records":[' + records + b"]}"
    answer = api.raw("POST", f"/v0/topics/{topic}", body, ["Content-Type: application/json"])
    assert answer.status == 201
    follower = follow({topic: {}}, max_batch_bytes=8 * 1024 * KIB)
    frames = _pages(follower.drained())
    text = b"".join(frame.text for frame in frames)
    if carrier == "sse":
        values = [re.sub(rb"\r\n|\r", b"\n", value) for value in values]
    at = 0
    for value in values:
        wanted = b'"data":' + value + b"}"
        found = text.find(wanted, at)
        assert found >= 0, f"not as it was sent: {value[:200]!r}"
        at = found + len(wanted)
    assert len(follower.seqs(topic)) == len(values)


def test_meta_tag_and_node_come_as_the_same_text(api: Api, topic: str, follow: Follow) -> None:
    """Contract §0.4, settled rules [S-01]"""
    texts = ("a", "ä水😀", 'quote"\\', "tab\t", "\u2028", "</x>", " ")
    api.append(
        topic, [{"data": text, "tag": text, "node": text, "meta": {text: text}} for text in texts]
    )
    follower = follow({topic: {}}, include_tags=True)
    follower.drained()
    for record, text in zip(follower.seen[topic], texts, strict=True):
        assert (record["$tag"], record["$node"], record["data"]) == (text, text, text)
        assert record["meta"] == {text: text}


# # --- records of a reader's own node
# ---------------------------------------------------------------


def test_a_node_never_hears_itself(api: Api, names: Names, follow: Follow) -> None:
    """§4, §7.2: no topic of the connection shows a node its own records. [7.2-02]"""
    first, second = names("n"), names("n")
    for name in (first, second):
        api.append(name, [{"data": n, "node": ["me", "you"][n % 2]} for n in range(10)])
        api.add(name, "nobody's")
    follower = follow({first: {}, second: {}}, node="me")
    follower.drained()
    for name in (first, second):
        assert follower.seqs(name) == [2, 4, 6, 8, 10, 11]


def test_a_page_of_own_records_gives_no_frame(api: Api, topic: str, follow: Follow) -> None:
    """§4, §7.5: the position moves without a frame. [7.2-02]"""
    api.append(topic, [{"data": n, "node": "me"} for n in range(600)])
    follower = follow({topic: {}}, node="me", limit=100)
    assert follower.frame() == CaughtUp(topic, 600)
    api.add(topic, "mine", node="me")
    follower.quiet(QUIET_S)
    api.add(topic, "yours", node="you")
    page = follower.frame()
    assert isinstance(page, Records)
    assert page.seqs == [602]
    assert page.to_seq == 602


def test_several_nodes_can_be_left_out(api: Api, topic: str, follow: Follow) -> None:
    """§4, §7.2: `node` may be a list, as in a diff. [7.2-02]"""
    api.append(topic, [{"data": n, "node": f"n{n % 3}"} for n in range(9)])
    follower = follow({topic: {}}, node=["n0", "n1"])
    follower.drained()
    assert follower.seqs(topic) == [3, 6, 9]


# --- losses are reported, deletes are not ---------------------------------------------------------


def test_a_cursor_below_the_floor_gets_a_tombstone_on_connect(
    api: Api, topic: str, follow: Follow
) -> None:
    """Contract §7.5 [7.5-04, 7.5-05, S-48, S-37]"""
    earliest = _evicted(api, topic)
    follower = follow({topic: {}})
    assert follower.answered[topic] == {"from_seq": 0, "head_seq": 20, "earliest_seq": earliest}
    gap, page, caught_up = follower.drained()
    assert gap == Gap(topic, "from_seq_too_old", 1, earliest - 1, earliest, 20)
    assert isinstance(page, Records)
    assert page.seqs == list(range(earliest, 21))
    assert page.from_seq == earliest - 1
    assert caught_up == CaughtUp(topic, 20)


def test_the_gap_starts_after_the_cursor(api: Api, topic: str, follow: Follow) -> None:
    """Contract §7.5 [7.5-04, 7.5-05]"""
    earliest = _evicted(api, topic)
    for cursor in (3, earliest - 2):
        follower = follow({topic: {"from_seq": cursor}})
        follower.drained()
        (gap,) = follower.gaps[topic]
        assert (gap.gap_from, gap.gap_to) == (cursor + 1, earliest - 1)
        assert follower.seqs(topic) == list(range(earliest, 21))
    at_the_floor = follow({topic: {"from_seq": earliest - 1}})
    at_the_floor.drained()
    assert at_the_floor.gaps[topic] == []


def test_expired_records_give_a_tombstone_on_connect(api: Api, topic: str, follow: Follow) -> None:
    """Contract §7.5 [7.5-04, 7.5-05]"""
    api.put(topic, {"ttl_ms": 300})
    api.add(topic, 1, 2, 3)
    eventually(lambda: bool(api.get_state(topic)["earliest_seq"] == 4), "they expired")
    api.put(topic, {"ttl_ms": 0})
    api.add(topic, 4)
    follower = follow({topic: {"from_seq": 1}})
    gap, page, _ = follower.drained()
    assert isinstance(gap, Gap)
    assert (gap.reason, gap.gap_from, gap.gap_to, gap.earliest_seq) == ("from_seq_too_old", 2, 3, 4)
    assert isinstance(page, Records)
    assert page.seqs == [4]


def test_a_loss_by_cap_and_by_age_is_one_gap(api: Api, topic: str, follow: Follow) -> None:
    """Contract §7.5, settled rules [7.5-04, 7.5-05, S-37]"""
    api.put(topic, {"cap_records": 5, "ttl_ms": 400})
    api.add(topic, *range(5))
    api.add(topic, *range(5))
    eventually(lambda: bool(api.get_state(topic)["earliest_seq"] == 11), "all are gone")
    follower = follow({topic: {}})
    gap, caught_up = follower.drained()
    assert gap == Gap(topic, "from_seq_too_old", 1, 10, 11, 10)
    assert caught_up == CaughtUp(topic, 10)


def test_records_that_expire_behind_a_live_reader_are_no_loss(
    api: Api, topic: str, follow: Follow
) -> None:
    """§7.5: readers get a tombstone when a gap crosses their cursor. [7.5-04]"""
    api.put(topic, {"ttl_ms": 200, "cap_records": 3})
    follower = follow({topic: {}})
    for number in range(1, 9):
        api.add(topic, number)
        follower.reads(topic, number)
    eventually(lambda: bool(api.get_state(topic)["count"] == 0), "all expired")
    follower.quiet(QUIET_S)
    api.put(topic)
    api.add(topic, "after")
    follower.reads(topic, 9)
    assert follower.gaps[topic] == []


def test_a_reader_that_lags_hears_of_each_loss_in_its_place(
    api: Api, topic: str, follow: Follow
) -> None:
    """§7.5, §7.6: records trimmed while its socket was full give a tombstone, all others arrive.
    [7.5-04, 7.6-01, 7.5-11]
    """
    api.put(topic, {"cap_records": 200, "durability": "memory"})
    follower = follow({topic: {}}, receive_buffer_bytes=16 * KIB)
    follower.drained()
    started = time.monotonic()
    for _ in range(30):
        api.append(topic, [{"data": "x" * 10_000}] * 100)
    took_s = time.monotonic() - started
    follower.until(lambda f: getattr(f, "head_seq", 0) == 3000 and f == CaughtUp(topic, 3000))
    assert follower.accounted(topic) == list(range(1, 3001))
    assert follower.gaps[topic], "30 MB were written past a reader that read nothing"
    if took_s < 4:
        # Within the grace of a full buffer the reason is the real one.
        assert {gap.reason for gap in follower.gaps[topic]} == {"cap"}


def test_deletes_are_silent(api: Api, topic: str, follow: Follow) -> None:
    """Contract §5, §7.5, settled rules [7.5-05, S-48]"""
    api.append(topic, [{"data": n, "tag": f"t{n % 2}"} for n in range(10)])
    api.delete(topic, before_seq=4)
    api.delete(topic, match="t1")
    follower = follow({topic: {}})
    page, caught_up = follower.drained()
    assert isinstance(page, Records)
    assert page.seqs == [5, 7, 9]
    assert page.to_seq == page.head_seq == 10
    assert caught_up == CaughtUp(topic, 10)
    api.delete(topic, before_seq=100)
    follower.quiet(QUIET_S)
    api.add(topic, "after")
    follower.reads(topic, 11)
    assert follower.gaps[topic] == []


def test_a_topic_emptied_by_deletes_is_caught_up_in_silence(
    api: Api, topic: str, follow: Follow
) -> None:
    """Contract §5, settled rules [S-48]"""
    api.add(topic, *range(10))
    api.delete(topic, before_seq=11)
    assert follow({topic: {}}).frame() == CaughtUp(topic, 10)


def test_the_gap_reaches_the_first_live_record_over_deletes(
    api: Api, topic: str, follow: Follow
) -> None:
    """The gap is the same as in a diff. [S-37, 7.5-04]"""
    earliest = _evicted(api, topic)
    api.delete(topic, before_seq=earliest + 2)
    follower = follow({topic: {}})
    follower.drained()
    (gap,) = follower.gaps[topic]
    assert (gap.gap_from, gap.gap_to, gap.earliest_seq) == (1, earliest + 1, earliest + 2)
    assert follower.seqs(topic) == list(range(earliest + 2, 21))


def test_a_cursor_above_the_head_is_of_a_topic_that_was_recreated(
    api: Api, topic: str, follow: Follow
) -> None:
    """§7.5, settled rules: the reader gets the new log from its start. [7.5-04, S-39]"""
    api.add(topic, *range(20))
    api.drop(topic)
    api.add(topic, "a", "b")
    follower = follow({topic: {"from_seq": 20}})
    gap, page, caught_up = follower.drained()
    assert gap == Gap(topic, "recreated", 1, 0, 1, 2)
    assert isinstance(page, Records)
    assert [record["data"] for record in page.records] == ["a", "b"]
    assert (page.from_seq, page.to_seq) == (0, 2)
    assert caught_up == CaughtUp(topic, 2)


# --- topics that go, come, change -----------------------------------------------------------------


def test_an_idle_reader_hears_at_once_that_a_topic_is_gone(
    api: Api, names: Names, follow: Follow
) -> None:
    """§7.5, settled rules: the reader continues with the other topics. [7.5-08, S-50, 7-ws-11]"""
    gone, stays = names("gone"), names("stays")
    api.add(gone, *range(12))
    api.add(stays, 1)
    follower = follow({gone: {"tail": True}, stays: {"tail": True}})
    follower.drained()
    started = time.monotonic()
    api.drop(gone)
    assert follower.frame(within_s=3) == Deleted(gone, 12, "deleted")
    assert time.monotonic() - started < 2
    api.add(stays, 2)
    follower.reads(stays, 2)


def test_a_topic_that_comes_back_is_not_followed_on_the_same_connection(
    api: Api, names: Names, follow: Follow
) -> None:
    """§7.5: after topic-deleted no frame of that name comes on this connection. [7.5-08]"""
    gone, stays = names("gone"), names("stays")
    api.add(gone, 1)
    api.put(stays)
    follower = follow({gone: {}, stays: {}})
    follower.drained()
    api.drop(gone)
    follower.until(lambda f: isinstance(f, Deleted), "topic-deleted")
    api.add(gone, "another log")
    api.add(stays, 1)
    follower.reads(stays, 1)
    follower.quiet(QUIET_S)


def test_a_topic_deleted_in_the_middle_of_its_backlog_ends_there(
    api: Api, names: Names, follow: Follow
) -> None:
    """Contract §7.5 [7.5-08]"""
    gone, stays = names("gone"), names("stays")
    for _ in range(10):
        api.append(gone, [{"data": "x" * 2000}] * 1000)
    api.put(stays)
    follower = follow({gone: {}, stays: {}}, limit=10, receive_buffer_bytes=16 * KIB)
    follower.frame()
    api.drop(gone)
    api.add(stays, "goes on")
    follower.until(lambda _: gone in follower.deleted and bool(follower.seen[stays]), "both")
    seqs = follower.seqs(gone)
    assert seqs == list(range(1, len(seqs) + 1))
    assert len(seqs) < 10_000


def test_a_new_configuration_ends_nothing(api: Api, topic: str, follow: Follow) -> None:
    """§1.1, §7: a cap does not affect a caught-up reader. [7.5-04]"""
    api.add(topic, *range(10))
    follower = follow({topic: {}})
    follower.drained()
    api.put(topic, {"cap_records": 2, "durability": "fsync"})
    follower.quiet(QUIET_S)
    api.add(topic, "after")
    follower.reads(topic, 11)
    assert follower.gaps[topic] == []


@pytest.mark.parametrize("durability", ["ephemeral", "memory", "disk", "fsync"])
def test_topics_of_every_class_are_followed(
    api: Api, topic: str, follow: Follow, durability: str
) -> None:
    """Contract §0.10, §7 [7-01]"""
    api.put(topic, {"durability": durability})
    api.add(topic, 1)
    follower = follow({topic: {}})
    follower.drained()
    api.add(topic, 2)
    follower.reads(topic, 2, within_s=5)
    assert follower.seqs(topic) == [1, 2]


# --- fairness, strong -----------------------------------------------------------------------------


def test_a_long_backlog_does_not_starve_a_live_topic(
    api: Api, names: Names, follow: Follow
) -> None:
    """§7: the topics of one connection take turns. [7-03]"""
    backlog, live = names("backlog"), names("live")
    for _ in range(10):
        api.append(backlog, [{"data": "x" * 400}] * 5000)
    api.add(live, "old")
    follower = follow({backlog: {}, live: {"tail": True}}, limit=16, receive_buffer_bytes=16 * KIB)
    follower.until(lambda f: isinstance(f, Records), "the backlog began")
    api.add(live, "new")
    follower.reads(live, 2)
    assert len(follower.seen[backlog]) < 25_000, "half of the backlog came first"
    follower.reads(backlog, 50_000, within_s=30)
    assert follower.seqs(backlog) == list(range(1, 50_001))


def test_strong_waits_for_the_sync_and_eventual_does_not(
    own: NewServer, names: Names, carrier: str, clients: Clients
) -> None:
    """Contract §7.2, settled rules [7.2-10, S-18]"""
    api = own(TOPICS_WAL_FSYNC_INTERVAL_MS="1000").start()
    disk, ephemeral = names("disk"), names("ephemeral")
    api.put(disk)
    api.put(ephemeral, {"durability": "ephemeral"})
    topics: Topics = {disk: {}, ephemeral: {}}
    strong = clients.follow(carrier, api, topics, consistency="strong")
    eventual = clients.follow(carrier, api, topics, consistency="eventual")
    strong.drained()
    eventual.drained()
    api.add(disk, "synced some time")
    strong.reads(disk, 1)
    # A sync has just been: the next is an interval away.
    api.add(disk, "not yet synced")
    api.add(ephemeral, "never synced")
    started = time.monotonic()
    eventual.reads(disk, 2, within_s=5)
    strong.reads(ephemeral, 1, within_s=5)
    if time.monotonic() - started < 0.5:
        strong.quiet(0.5)
        assert strong.seqs(disk) == [1]
    strong.reads(disk, 2)
    assert strong.seqs(disk) == eventual.seqs(disk) == [1, 2]


def test_strong_delivers_synced_records_and_those_a_durable_append_syncs(
    api: Api, topic: str, follow: Follow
) -> None:
    """Contract §7.2, settled rules [S-18, 7.2-10]"""
    api.put(topic, {"durability": "fsync"})
    api.add(topic, *range(10))
    follower = follow({topic: {}}, consistency="strong")
    follower.drained()
    assert follower.seqs(topic) == list(range(1, 11))
    api.add(topic, "more")
    follower.reads(topic, 11, within_s=5)
    assert good(api.state(topic))["head_seq"] == 11


def test_the_received_records_equal_a_fold_over_diffs(api: Api, topic: str, follow: Follow) -> None:
    """§3, §7: one log, two ways to read it. [7-04, 7-ws-01]"""
    api.put(topic, {"cap_records": 700})
    for start in range(0, 1000, 100):
        records = [
            {"data": {"n": n}, "tag": f"t{n % 5}", "node": f"n{n % 3}", "meta": {"k": n}}
            for n in range(start, start + 100)
        ]
        good(api.append(topic, records))
    eventually(lambda: bool(api.get_state(topic)["count"] <= 700), "count within the cap")
    api.delete(topic, match="t3")
    follower = follow({topic: {}}, node="n1", include_tags=True, limit=50)
    follower.drained()
    assert follower.seen[topic] == api.read_all(topic, node="n1", include_tags=True, limit=1000)
    tombstone = api.read(topic, node="n1")["tombstone"]
    (gap,) = follower.gaps[topic]
    assert (gap.gap_from, gap.gap_to) == (tombstone["gap_from"], tombstone["gap_to"])
