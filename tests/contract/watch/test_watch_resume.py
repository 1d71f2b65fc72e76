"""§7.4, §7.7: reconnecting: by the session, by an id in the header, by an id in a new session."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Callable

import pytest

from tests.contract.driver import Api, Json, eventually, good
from tests.contract.watch.subscriptions import (
    CaughtUp,
    Clients,
    Deleted,
    Gap,
    Records,
    SseFollower,
    hang_up,
    id_of,
    map_of,
)

Names = Callable[[str], str]


def _b64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


def test_the_session_remembers_where_it_was(api: Api, topic: str, clients: Clients) -> None:
    """§7.1, §7.4: records appended while no stream was open come too. [7.4-03, 7.1-01]"""
    api.add(topic, *range(10))
    session = clients.session(api, {topic: {"from_seq": 4}})
    first = session.stream(api)
    first.drained()
    assert first.seqs(topic) == [5, 6, 7, 8, 9, 10]
    hang_up(api, first)
    api.add(topic, "meanwhile")
    second = session.stream(api)
    second.drained()
    assert second.seqs(topic) == [11]
    hang_up(api, second)
    third = session.stream(api)
    assert third.frame() == CaughtUp(topic, 11)


def test_the_first_stream_starts_where_the_session_said(
    api: Api, names: Names, clients: Clients
) -> None:
    """§7.4: tail is the head at the time of the POST, not of the GET. [7.4-04, 7.2-12]"""
    start, tail = names("start"), names("tail")
    api.add(start, *range(5))
    api.add(tail, *range(5))
    session = clients.session(api, {start: {"from_seq": 2}, tail: {"tail": True}})
    api.add(tail, "between")
    follower = session.stream(api)
    follower.drained()
    assert follower.seqs(start) == [3, 4, 5]
    assert follower.seqs(tail) == [6]


def test_an_id_takes_the_session_back(api: Api, topic: str, clients: Clients) -> None:
    """§7.4: the session goes back to exactly that position: records that the client had not
    processed come again. [7.4-03]
    """
    api.add(topic, *range(20))
    session = clients.session(api, {topic: {}}, limit=5)
    first = session.stream(api)
    first.drained()
    assert [map_of(id_) for id_ in first.ids] == [{topic: n} for n in (5, 10, 15, 20, 20)]
    for id_, start in ((first.ids[1], 11), (first.ids[0], 6), (id_of({topic: 0}), 1)):
        again = session.stream(api, id_)
        again.drained()
        assert again.seqs(topic) == list(range(start, 21))


def test_an_id_never_takes_the_session_forward(api: Api, names: Names, clients: Clients) -> None:
    """§7.4: an id moves no topic forward, even if it moves another topic back. [7.4-03]"""
    first, second, third = names("f"), names("f"), names("f")
    for name in (first, second, third):
        api.add(name, *range(10))
    topics: dict[str, Json] = {first: {"from_seq": 4}, second: {"from_seq": 4}, third: {}}
    for ahead in (9, 10, 1000, 2**64 - 1):
        session = clients.session(api, topics)
        follower = session.stream(api, id_of({first: ahead, second: 2, third: 0}))
        follower.drained()
        assert follower.seqs(first) == [5, 6, 7, 8, 9, 10]
        assert follower.seqs(second) == list(range(3, 11))
        assert follower.seqs(third) == list(range(1, 11))
        assert not any(follower.gaps.values())


def test_an_id_counts_for_the_topics_it_names(api: Api, names: Names, clients: Clients) -> None:
    """§7.4: other topics keep their position; names that the session does not watch have no effect.
    [7.4-03]
    """
    first, second = names("p"), names("p")
    for name in (first, second):
        api.add(name, *range(5))
    session = clients.session(api, {first: {}, second: {}})
    session.stream(api).drained()
    again = session.stream(api, id_of({first: 3, "somebody-elses": 1}))
    again.drained()
    assert again.seqs(first) == [4, 5]
    assert again.seqs(second) == []


# The bytes are encoded like an id, with `{t}` for the topic's name.
GARBAGE: dict[str, str | bytes] = {
    "nothing": "",
    "a word": "x",
    "a number": "5",
    "spaces": "   ",
    "base64 of nothing": "====",
    "not base64": "!!!!",
    "standard base64": base64.b64encode(b'{"a":1,"\xff\xfe\xfb":1}').decode(),
    "base64 of a word": _b64(b"word"),
    "base64 of a list": _b64(b"[1]"),
    "base64 of a number": _b64(b"5"),
    "base64 of null": _b64(b"null"),
    "invalid UTF-8": _b64(b'{"\xff":1}'),
    "half an object": b'{"{t}":1',
    "a string position": b'{"{t}":"1"}',
    "a negative position": b'{"{t}":-1}',
    "a fraction": b'{"{t}":1.5}',
    "a null position": b'{"{t}":null}',
    "a list position": b'{"{t}":[1]}',
    "a position above u64": b'{"{t}":18446744073709551616}',
    "deep nesting": b'{"{t}":' + b"[" * 3000 + b"]" * 3000 + b"}",
    "ten kilobytes": "A" * 10_000,
    "a cut token": "c1.",
    "a token of no text": "c1.!!!",
    "a token of noise": "c1." + _b64(bytes(range(200))),
    "a token of an unknown version": "c9." + _b64(b"\x90"),
    "a token of nothing": "c1." + _b64(b"\x90"),
    "a token of wrong rows": "c1." + _b64(b"\x91\x91\x01"),
    "a token of a huge array": "c1." + _b64(b"\xdd\xff\xff\xff\xff"),
}


@pytest.mark.parametrize("garbage", GARBAGE.values(), ids=list(GARBAGE))
def test_garbage_is_ignored(api: Api, topic: str, clients: Clients, garbage: str | bytes) -> None:
    """The session's own positions hold. [S-49]"""
    if isinstance(garbage, bytes):
        garbage = _b64(garbage.replace(b"{t}", topic.encode()))
    api.add(topic, *range(5))
    session = clients.session(api, {topic: {"from_seq": 3}})
    follower = session.stream(api, garbage)
    follower.drained()
    assert follower.seqs(topic) == [4, 5]
    hang_up(api, follower)
    assert session.stream(api).frame() == CaughtUp(topic, 5)


def test_a_padded_or_spaced_id_is_garbage_or_an_id_but_loses_nothing(
    api: Api, topic: str, clients: Clients
) -> None:
    """§7.4: whatever a client makes of an id, no record is passed over. [S-49, 7.4-03]"""
    api.add(topic, *range(5))
    id_ = id_of({topic: 2})
    for form in (id_ + "=" * (-len(id_) % 4), f" {id_} ", json.dumps({topic: 2}).replace(" ", "")):
        session = clients.session(api, {topic: {"from_seq": 3}})
        follower = session.stream(api, form)
        follower.positions[topic] = 2
        follower.drained()
        assert follower.seqs(topic) in ([3, 4, 5], [4, 5])


def test_a_second_session_from_the_last_id_loses_and_repeats_nothing(
    api: Api, names: Names, clients: Clients
) -> None:
    """§7.7, settled rules: the id of any frame is a cursor, also while records arrive.
    [7.7-01, S-66, 0.7-05]
    """
    first, second = names("s"), names("s")
    for name in (first, second):
        api.put(name)
    stop = threading.Event()

    def write() -> None:
        for number in range(300):
            api.append((first, second)[number % 2], [{"data": number}])
            if stop.is_set():
                return

    writer = threading.Thread(target=write)
    writer.start()
    read: dict[str, list[int]] = {first: [], second: []}
    cursor: str | None = None
    try:
        for _ in range(40):
            fields = {} if cursor is None else {"cursor": cursor}
            session = clients.session(api, {first: {}, second: {}}, limit=5, **fields)
            follower = session.stream(api)
            follower.until(lambda f: isinstance(f, Records | CaughtUp))
            cursor = follower.ids[-1]
            for name, seqs in read.items():
                seqs += follower.seqs(name)
            follower.close()
        writer.join()
    finally:
        stop.set()
        writer.join()
    follower = clients.session(api, {first: {}, second: {}}, cursor=cursor).stream(api)
    follower.drained()
    for name, seqs in read.items():
        assert seqs + follower.seqs(name) == list(range(1, 151))


def test_an_event_source_that_is_cut_off_again_and_again_misses_nothing(
    api: Api, topic: str, clients: Clients
) -> None:
    """§7.4: such a client sends only the last id that it received. [7.4-03, 7.4-01]"""
    api.append(topic, [{"data": n} for n in range(500)])
    session = clients.session(api, {topic: {}}, limit=7)
    read: list[int] = []
    last: str | None = None
    for turn in range(200):
        follower = session.stream(api, last)
        for _ in range(turn % 5 + 1):
            frame = follower.frame()
            if isinstance(frame, Records):
                read += frame.seqs
            elif isinstance(frame, CaughtUp):
                break
        last = follower.ids[-1]
        # Bytes that the client never examined may be on the way: they are not lost.
        follower.stream.vanish() if turn % 2 else follower.close()
        if map_of(last) == {topic: 500}:
            break
    assert read == list(range(1, 501))


def test_a_topic_recreated_between_streams_is_reported(
    api: Api, names: Names, clients: Clients
) -> None:
    """Settled rules: the loss is reported even if the new head is above the old cursor. [S-52,
    7.5-04]
    """
    short, long, stays = names("short"), names("long"), names("stays")
    for name in (short, long, stays):
        api.add(name, *range(10))
    session = clients.session(api, {short: {}, long: {}, stays: {}})
    first = session.stream(api)
    first.drained()
    hang_up(api, first)
    for name, count in ((short, 3), (long, 30)):
        api.drop(name)
        api.add(name, *[f"new {n}" for n in range(count)])
    second = session.resumed(api, first)
    second.drained()
    assert second.gaps[short] == [Gap(short, "recreated", 1, 0, 1, 3)]
    assert second.gaps[long] == [Gap(long, "recreated", 1, 0, 1, 30)]
    assert second.gaps[stays] == []
    assert second.seqs(short) == [1, 2, 3]
    assert second.seqs(long) == list(range(1, 31))
    assert second.seqs(stays) == []
    assert second.seen[long][0]["data"] == "new 0"
    hang_up(api, second)
    third = session.resumed(api, second)
    assert [third.frame() for _ in range(3)] == [
        CaughtUp(name, seq) for name, seq in ((short, 3), (long, 30), (stays, 10))
    ]


def test_a_topic_recreated_after_its_reported_end_is_reported(
    api: Api, topic: str, clients: Clients
) -> None:
    """Contract §7.5, settled rules [S-52, 7.5-08]"""
    api.add(topic, *range(10))
    session = clients.session(api, {topic: {}})
    first = session.stream(api)
    first.drained()
    api.drop(topic)
    assert first.frame() == Deleted(topic, 10, "deleted")
    api.add(topic, "a", "b")
    hang_up(api, first)
    second = session.stream(api)
    second.drained()
    assert second.gaps[topic] == [Gap(topic, "recreated", 1, 0, 1, 2)]
    assert [record["data"] for record in second.seen[topic]] == ["a", "b"]


def test_an_id_from_before_a_recreation_gets_recreated(
    api: Api, names: Names, clients: Clients
) -> None:
    """In a header or in a new session, such an id is never mistaken for a position in the new
    log. [S-52, S-66, 7.7-01]
    """
    gone, stays = names("gone"), names("stays")
    for name in (gone, stays):
        api.add(name, *range(10))
    session = clients.session(api, {gone: {}, stays: {}}, limit=5)
    first = session.stream(api)
    first.drained()
    old = first.ids[-1]
    hang_up(api, first)
    for turn in range(1, 3):
        api.drop(gone)
        api.add(gone, *[f"life {turn}"] * 30)
        fresh = clients.session(api, {gone: {}, stays: {}}, cursor=old)
        followers = [session.stream(api, old), fresh.stream(api)]
        for follower in followers:
            follower.drained()
            assert [gap.reason for gap in follower.gaps[gone]] == ["recreated"]
            assert follower.seqs(gone) == list(range(1, 31))
            assert follower.seen[gone][0]["data"] == f"life {turn}"
            assert follower.seqs(stays) == []
        # The client of the next round reconnects with an id of this incarnation.
        old = followers[0].ids[-1]
        again = clients.session(api, {gone: {}, stays: {}}, cursor=old).stream(api)
        again.drained()
        assert again.gaps[gone] == []
        assert again.seqs(gone) == again.seqs(stays) == []
        for follower in [*followers, again]:
            hang_up(api, follower)


def test_a_recreated_topic_that_lost_records_says_where_it_starts(
    api: Api, topic: str, clients: Clients
) -> None:
    """There is one gap, from 1 to the first existing record. [S-52, S-39, 7.5-04]"""
    api.add(topic, *range(10))
    session = clients.session(api, {topic: {}})
    first = session.stream(api)
    first.drained()
    hang_up(api, first)
    api.drop(topic)
    api.put(topic, {"cap_records": 5})
    for number in range(20):
        api.add(topic, number)
    eventually(lambda: bool(api.get_state(topic)["count"] <= 5), "count within the cap")
    earliest = api.get_state(topic)["earliest_seq"]
    second = session.stream(api)
    second.drained()
    assert second.gaps[topic] == [Gap(topic, "recreated", 1, earliest - 1, earliest, 20)]
    assert second.seqs(topic) == list(range(earliest, 21))


def test_a_topic_deleted_between_streams_is_reported_at_once(
    api: Api, names: Names, clients: Clients
) -> None:
    """§7.5, settled rules: each stream reports it as long as the topic is missing; the other topics
    continue. [7.5-08, S-50]
    """
    gone, stays = names("gone"), names("stays")
    api.add(gone, *range(10))
    api.add(stays, 1)
    session = clients.session(api, {gone: {}, stays: {}})
    follower = session.stream(api)
    follower.drained()
    hang_up(api, follower)
    api.drop(gone)
    for number in range(2, 4):
        api.add(stays, number)
        follower = session.stream(api)
        follower.reads(stays, number)
        if gone not in follower.deleted:
            follower.until(lambda f: isinstance(f, Deleted), "topic-deleted")
        assert follower.seqs(stays) == [number]
        assert follower.seqs(gone) == []
        hang_up(api, follower)


def test_records_trimmed_between_streams_are_from_seq_too_old(
    api: Api, topic: str, clients: Clients
) -> None:
    """§7.5, §7.6: the session kept the position, but the records are gone. [7.5-05, 7.6-02]"""
    api.put(topic, {"cap_records": 5})
    api.add(topic, 1, 2)
    session = clients.session(api, {topic: {}})
    first = session.stream(api)
    first.drained()
    hang_up(api, first)
    for number in range(20):
        api.add(topic, number)
    eventually(lambda: bool(api.get_state(topic)["count"] <= 5), "count within the cap")
    earliest = api.get_state(topic)["earliest_seq"]
    second = session.stream(api)
    second.drained()
    assert second.gaps[topic] == [Gap(topic, "from_seq_too_old", 3, earliest - 1, earliest, 22)]
    assert second.seqs(topic) == list(range(earliest, 23))
    # The id of the tombstone is after the gap: a reconnect with it alone repeats nothing of it.
    third = session.stream(api, second.ids[0])
    third.drained()
    assert third.gaps[topic] == []
    assert third.seqs(topic) == list(range(earliest, 23))
    # An id from before the gap goes back, and gets the tombstone again.
    fourth = session.stream(api, id_of({topic: 1}))
    fourth.drained()
    assert [(gap.gap_from, gap.gap_to) for gap in fourth.gaps[topic]] == [(2, earliest - 1)]


def test_two_sessions_of_one_client_are_two(api: Api, topic: str, clients: Clients) -> None:
    """§7.1: two sessions with the same definition have two cursors. [7.1-01]"""
    api.add(topic, 1)
    one, two = clients.session(api, {topic: {}}), clients.session(api, {topic: {}})
    assert one.wid != two.wid
    followers: list[SseFollower] = [one.stream(api), two.stream(api)]
    for follower in followers:
        follower.drained()
        assert follower.seqs(topic) == [1]
    good(api.append(topic, [{"data": 2}]))
    for follower in followers:
        follower.reads(topic, 2)
