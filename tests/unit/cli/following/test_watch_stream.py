"""`cli.following.watch_stream` against a server that sends exactly what a case needs: every end of
a stream.

The tests check the client's requests (paths, `Last-Event-ID`, bodies) and the yielded frames.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.unit.cli.scripted import RETRY, Script, frame, id_of, page, refusal, session
from topics_server.cli.connection import CallRefused, ServerConnection, ServerUnreachable
from topics_server.cli.following import watch_stream
from topics_server.cli.following.watch_stream import (
    CaughtUpFrame,
    Frame,
    Positions,
    RecordsFrame,
    TombstoneFrame,
    TopicDeletedFrame,
    Trouble,
    WatchFollower,
    seq_of,
)


def follow(client: ServerConnection, *topics: str, **options: object) -> Iterator[Frame]:
    """Frames of these topics from the start."""
    return WatchFollower(client, {t: {"from_seq": 0} for t in topics or ("t",)}, options).frames()


def seqs(frames: Iterator[Frame], until: int) -> list[int]:
    """The seqs of the records, up to and including `until`."""
    found: list[int] = []
    for item in frames:
        if isinstance(item.body, RecordsFrame):
            found += [seq_of(record) for record in item.body.records]
            if found and found[-1] == until:
                return found
    raise AssertionError(f"the frames ended: {found}")


def gets(script: Script) -> list[tuple[str, Any]]:
    """Path and Last-Event-ID of every GET."""
    return [(path, value) for method, path, value in script.asked if method == "GET"]


def test_an_ended_stream_is_resumed_with_the_id_of_its_last_frame(
    script: Script, client: ServerConnection
) -> None:
    script.posts = [session("wid_a", t=0)]
    script.streams = [[RETRY, page(1, 3), page(4, 5)], [RETRY, page(6, 9)]]
    assert seqs(follow(client), 9) == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert gets(script) == [("/v0/watch/wid_a", None), ("/v0/watch/wid_a", id_of(t=5))]
    assert script.tokens == {"Bearer secret"}


def test_a_position_without_records_is_where_the_next_stream_begins(
    script: Script, client: ServerConnection
) -> None:
    script.posts = [session("wid_a", t=0), session("wid_b", t=90)]
    alone = f"id: {id_of(t=90)}\n: hb 1\n\n".encode()
    script.streams = [[RETRY, page(1, 3), alone], [RETRY, page(91, 91)]]
    assert seqs(follow(client, filter="rare"), 91) == [1, 2, 3, 91]
    assert gets(script)[-1] == ("/v0/watch/wid_a", id_of(t=90))
    assert script.asked[0][2]["filter"] == "rare"


def test_a_frame_that_was_cut_off_is_none(script: Script, client: ServerConnection) -> None:
    script.posts = [session("wid_a", t=0)]
    whole = page(3, 4)
    cuts = range(1, len(whole) - 1, 7)
    script.streams = [[RETRY, page(1, 2), whole[:cut]] for cut in cuts]
    script.streams.append([RETRY, whole])
    assert seqs(follow(client), 4) == [1, 2, 3, 4]
    assert [value for _, value in gets(script)[1:]] == [id_of(t=2)] * len(cuts)


def test_what_comes_twice_is_handed_out_once(script: Script, client: ServerConnection) -> None:
    script.posts = [session("wid_a", t=0)]
    script.streams = [[RETRY, page(1, 5), page(3, 7), page(1, 4), page(8, 8)]]
    assert seqs(follow(client), 8) == [1, 2, 3, 4, 5, 6, 7, 8]


@pytest.mark.parametrize("status", [404, 410])
def test_a_session_that_is_gone_is_made_again_from_the_last_id(
    script: Script, client: ServerConnection, status: int
) -> None:
    script.posts = [session("wid_a", t=0, u=4), session("wid_b", t=3, u=4)]
    last = id_of(t=3, u=4)
    script.streams = [[RETRY, page(1, 3, t=3, u=4)], refusal(status), [RETRY, page(4, 4)]]
    assert seqs(follow(client, "t", "u", include_tags=True), 4) == [1, 2, 3, 4]
    method, path, body = script.asked[3]
    assert (method, path) == ("POST", "/v0/watch?lenient=true")
    assert body["cursor"] == last
    assert body["include_tags"] is True
    # A server that has forgotten the session would still find the position.
    assert body["topics"] == {"t": {"from_seq": 3}, "u": {"from_seq": 4}}
    # The new stream gets the id, too: it can only go back to this position.
    assert gets(script)[-1] == ("/v0/watch/wid_b", last)


def test_a_tail_that_saw_nothing_yet_begins_where_it_was_opened(
    script: Script, client: ServerConnection
) -> None:
    script.posts = [session("wid_a", t=41), session("wid_b", t=41)]
    script.streams = [[RETRY], refusal(404), [RETRY, page(42, 42)]]
    found = WatchFollower(client, {"t": {"tail": True}}, {}).frames()
    assert seqs(found, 42) == [42]
    assert script.asked[0][2]["topics"] == {"t": {"tail": True}}
    # The request does not repeat `tail`, because that would skip records that arrived meanwhile.
    assert script.asked[3][2]["topics"] == {"t": {"from_seq": 41}}
    assert "cursor" not in script.asked[3][2]


@pytest.mark.parametrize("code", [409, 410])
def test_an_error_frame_that_ends_the_session_makes_a_new_one(
    script: Script, client: ServerConnection, code: int
) -> None:
    script.posts = [session("wid_a", t=0), session("wid_b", t=1)]
    error = frame("error", "", code=code, error="over")
    script.streams = [[RETRY, page(1, 1), error], [RETRY, page(2, 2)]]
    assert seqs(follow(client), 2) == [1, 2]
    assert gets(script)[1] == ("/v0/watch/wid_b", id_of(t=1))


def test_a_slow_consumer_comes_back_to_its_session(
    script: Script, client: ServerConnection
) -> None:
    script.posts = [session("wid_a", t=0)]
    error = frame("error", "", code=408, error="too slow", retry_after_ms=0)
    script.streams = [[RETRY, page(1, 1), error], [RETRY, page(2, 2)]]
    assert seqs(follow(client), 2) == [1, 2]
    assert gets(script)[1] == ("/v0/watch/wid_a", id_of(t=1))


def test_advice_leaves_the_stream_open(script: Script, client: ServerConnection) -> None:
    script.posts = [session("wid_a", t=0)]
    advice = frame("error", "", code=429, error="slower", retry_after_ms=1500)
    script.streams = [[RETRY, page(1, 1), advice, page(2, 2)]]
    found = list(itertools.islice(follow(client), 3))
    assert [type(item.body) for item in found] == [RecordsFrame, Trouble, RecordsFrame]
    assert len(gets(script)) == 1


def test_a_silent_server_is_left_after_two_heartbeats(
    script: Script, client: ServerConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch_stream, "SLACK_S", -1.9)  # 2 x 1 s - 1.9 s
    script.posts = [session("wid_a", t=0)]
    script.streams = [[RETRY, page(1, 1), b""], [RETRY, page(2, 2)]]
    assert seqs(follow(client, heartbeat_ms=1000), 2) == [1, 2]
    assert gets(script)[1] == ("/v0/watch/wid_a", id_of(t=1))


def test_busy_answers_are_waited_out(script: Script, client: ServerConnection) -> None:
    script.posts = [session("wid_a", t=0), refusal(503), refusal(429), session("wid_b", t=1)]
    script.streams = [
        [RETRY, page(1, 1)],
        refusal(503),
        refusal(404),
        [RETRY, page(2, 2)],
    ]
    assert seqs(follow(client), 2) == [1, 2]


@pytest.mark.parametrize("status", [400, 401, 403])
def test_what_is_refused_for_good_ends_it(
    script: Script, client: ServerConnection, status: int
) -> None:
    script.posts = [session("wid_a", t=0)]
    script.streams = [refusal(status, "no")]
    with pytest.raises(CallRefused, match="no: m"):
        list(follow(client))


def test_what_is_wrong_at_first_is_the_callers(script: Script, client: ServerConnection) -> None:
    script.posts = [refusal(404, "topic_not_found"), refusal(503, "not_ready")]
    for code in ("topic_not_found", "not_ready"):
        with pytest.raises(CallRefused, match=code):
            next(follow(client))
    with pytest.raises(ServerUnreachable):
        next(follow(ServerConnection("http://127.0.0.1:1")))


def test_it_ends_when_every_topic_is_deleted(script: Script, client: ServerConnection) -> None:
    script.posts = [session("wid_a", t=0, u=0)]
    gone_t = frame("topic-deleted", id_of(t=1, u=0), topic="t", head_seq=1, reason="deleted")
    gone_u = frame("topic-deleted", id_of(t=1, u=0), topic="u", head_seq=0, reason="deleted")
    # The second stream reports again that t is deleted; that is not new. Nothing after u is read.
    script.streams = [[RETRY, page(1, 1, t=1, u=0), gone_t], [RETRY, gone_t, gone_u, b""]]
    bodies = [item.body for item in follow(client, "t", "u")]
    assert bodies[1:] == [TopicDeletedFrame("t"), TopicDeletedFrame("u")]


def test_topics_that_a_new_session_does_not_find_are_deleted(
    script: Script, client: ServerConnection
) -> None:
    script.posts = [session("wid_a", t=0, u=0), session("wid_b", u=0), refusal(404)]
    script.streams = [
        refusal(404),
        [RETRY, page(1, 1, "u", t=0, u=1)],
        refusal(404),
    ]
    bodies = [item.body for item in follow(client, "t", "u")]
    assert bodies[0] == TopicDeletedFrame("t")
    assert isinstance(bodies[1], RecordsFrame)
    assert bodies[2:] == [TopicDeletedFrame("u")]


def test_a_recreated_topic_is_read_from_its_start(script: Script, client: ServerConnection) -> None:
    script.posts = [session("wid_a", t=0, u=0)]
    gone = frame("topic-deleted", id_of(t=5, u=0), topic="t", head_seq=5, reason="deleted")
    place = {"gap_from": 1, "gap_to": 0, "earliest_seq": 1, "head_seq": 2}
    again = frame("tombstone", id_of(t=0, u=0), topic="t", reason="recreated", **place)
    script.streams = [[RETRY, page(1, 5), gone], [RETRY, gone, again, page(1, 2), page(3, 6)]]
    assert seqs(follow(client, "t", "u"), 6) == [1, 2, 3, 4, 5, 1, 2, 3, 4, 5, 6]


def test_the_answer_of_another_server_is_told(script: Script, client: ServerConnection) -> None:
    script.posts = [(200, {"hello": 1})]
    with pytest.raises(CallRefused, match="the answer is not from a topics server"):
        next(follow(client))


@pytest.mark.parametrize("data", ["{", '{"topic":1}', "[]"])
def test_a_frame_that_is_no_frame_is_told(
    script: Script, client: ServerConnection, data: str
) -> None:
    script.posts = [session("wid_a", t=0)]
    script.streams = [[RETRY, f"event: record\ndata: {data}\n\n".encode()]]
    with pytest.raises(CallRefused, match="a record frame"):
        next(follow(client))


def test_frames_of_later_versions_pass(script: Script, client: ServerConnection) -> None:
    script.posts = [session("wid_a", t=0)]
    script.streams = [[RETRY, frame("news", id_of(t=7), any=1), page(8, 8)]]
    news = next(follow(client))
    assert (news.event, news.body, json.loads(news.payload)) == ("news", None, {"any": 1})


def test_data_over_several_lines_is_one_value(script: Script, client: ServerConnection) -> None:
    script.posts = [session("wid_a", t=0)]
    text = b'event: record\ndata: {"topic":"t","from_seq":0,"to_seq":1,"records":[{"$seq":1,\n'
    script.streams = [[RETRY, text + b'data: "$ts":0,"data":"\xe2\x80\xa8\xc3\xa9"}]}\n\n']]
    found = next(follow(client))
    assert isinstance(found.body, RecordsFrame)
    assert bytes(found.body.records[0]) == (b'{"$seq":1,\n"$ts":0,"data":"\xe2\x80\xa8\xc3\xa9"}')


# -- positions -----------------------------------------------------------------------------------


def test_positions_move_forward_only() -> None:
    positions = Positions({"t": 5})
    for body, expected in (
        (TombstoneFrame("t", "cap", 1, 3), 5),
        (CaughtUpFrame("t", 9), 9),
        (RecordsFrame("t", [], 7, 8), 9),
        (TombstoneFrame("t", "ttl", 10, 12), 12),
        (TombstoneFrame("t", "recreated", 1, 2), 2),
    ):
        assert positions.take(body)
        assert positions.live == {"t": expected}


def test_a_deletion_is_news_once() -> None:
    positions = Positions({"t": 5, "u": 0})
    assert positions.take(TopicDeletedFrame("t"))
    assert not positions.take(TopicDeletedFrame("t"))
    assert positions.live == {"u": 0}
    assert positions.lost(set()) == ["u"]
    assert positions.lost(set()) == []
