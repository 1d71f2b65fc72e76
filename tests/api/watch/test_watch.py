"""`/v0/watch` over a real node: sessions, streams, reconnects, and freed resources."""

from __future__ import annotations

import asyncio
import base64
import gc
import gzip
import re
from collections.abc import AsyncIterator
from typing import Any

import httpx
import msgspec
import pytest

from tests.api.watch.streams import Live, id_of, kinds, last_id
from tests.storage.fake_disk import FakeDisk
from topics_server.api.watch.cursor_ids import CursorPosition, decode_id
from topics_server.values.limits import U64_MAX

pytestmark = pytest.mark.anyio


@pytest.fixture
async def live(disk: FakeDisk) -> AsyncIterator[Live]:
    server = await Live.start(disk)
    yield server
    await server.stop()


def code_of(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


# -- POST ------------------------------------------------------------------------------------


async def test_a_session_answers_the_start_of_each_topic(live: Live) -> None:
    await live.append("jobs", *range(5))
    await live.append("events", *range(3))
    answer = await live.post(
        topics={"jobs": {"from_seq": 2}, "events": {"tail": True, "from_seq": 1}}
    )
    told = answer.json()
    wid = told["wid"]
    assert answer.status_code == 200
    assert set(told.pop("performance")) == {"server_total_ms"}
    assert told == {
        "wid": wid,
        "stream_url": f"/v0/watch/{wid}",
        "session_ttl_ms": 300_000,
        "topics": {
            "jobs": {"from_seq": 2, "head_seq": 5, "earliest_seq": 1},
            "events": {"from_seq": 3, "head_seq": 3, "earliest_seq": 1},
        },
    }
    assert list(told["topics"]) == ["jobs", "events"]
    assert wid.startswith("wid_")
    assert len(wid) == 4 + 22, "128 bits"


async def test_an_unknown_topic_is_404_and_makes_no_session(live: Live) -> None:
    await live.append("jobs", 1)
    answer = await live.post(topics={"jobs": {}, "absent": {}})
    assert code_of(answer) == (404, "topic_not_found")
    assert answer.json()["error"]["detail"] == {"topic": "absent"}
    assert len(live.node.sessions) == 0


async def test_a_lenient_session_leaves_unknown_topics_out(live: Live) -> None:
    await live.append("jobs", 1)
    answer = await live.post(query="?lenient=true", topics={"absent": {}, "jobs": {}})
    assert list(answer.json()["topics"]) == ["jobs"]
    assert code_of(await live.post(query="?lenient=yes", topics={"jobs": {}})) == (
        400,
        "invalid_request",
    )
    assert code_of(await live.post(query="?lenient=false", topics={"absent": {}}))[0] == 404


async def test_a_lenient_session_may_have_no_topic_at_all(live: Live) -> None:
    answer = await live.post(query="?lenient=true", topics={"absent": {}})
    assert (answer.status_code, answer.json()["topics"]) == (200, {})
    reader = live.get(answer.json()["wid"])
    await reader.begun()
    await live.append("absent", 1)
    await asyncio.sleep(0.01)
    await reader.left()
    assert reader.received == b"retry: 2000\n\n"


async def test_a_wrong_body_is_400_with_the_path_of_the_value(live: Live) -> None:
    answer = await live.post(topics={"jobs": {"from_seq": -1}})
    assert code_of(answer) == (400, "invalid_request")
    assert answer.json()["error"]["detail"]["field"] == "topics.jobs.from_seq"


async def test_topics_are_capped(disk: FakeDisk) -> None:
    live = await Live.start(disk, max_watch_topics=2)
    names: dict[str, object] = {name: {} for name in ("a", "b", "c")}
    assert code_of(await live.post(topics=names)) == (400, "invalid_request")
    await live.stop()


async def test_sessions_are_capped_and_expired_ones_make_room(disk: FakeDisk) -> None:
    live = await Live.start(disk, max_watch_sessions=2, session_ttl_ms=1_000)
    await live.append("jobs", 1)
    wids = [await live.session("jobs") for _ in range(2)]
    answer = await live.post(topics={"jobs": {}})
    assert code_of(answer) == (429, "throttled")
    assert answer.json()["error"]["detail"] == {"limit": "max_watch_sessions", "max": 2}
    assert int(answer.headers["retry-after"]) >= 1
    reader = live.get(wids[0])
    await reader.begun()
    live.clock.move(1_000)
    await live.session("jobs")
    late = live.get(wids[1])
    await late.ended()
    assert late.status == 404
    await reader.left()
    await live.stop()


async def test_requested_limits_and_fields_apply_to_the_frames(live: Live) -> None:
    await live.http.post(
        "/v0/topics/jobs",
        json={
            "records": [
                {"data": 1, "node": "a", "tag": "x", "meta": {"m": 1}},
                {"data": 2, "node": "b"},
                {"data": 3, "node": "c"},
                {"data": 4},
            ]
        },
    )
    wid = await live.session(
        "jobs", node=["b"], limit=2, include_tags=True, include_meta=False, include_data=False
    )
    reader = live.get(wid)
    first, second = await reader.take(2)
    await reader.left()
    assert [set(record) for record in first.data["records"]] == [
        {"$seq", "$ts", "$node", "$tag"},
        {"$seq", "$ts", "$node"},
    ]
    assert [record["$seq"] for record in first.data["records"]] == [1, 3]
    assert [record["$seq"] for record in second.data["records"]] == [4]


# -- GET -------------------------------------------------------------------------------------


async def test_a_stream_has_the_contract_s_head_and_begins_with_retry(live: Live) -> None:
    await live.append("jobs", 1, 2)
    reader = live.get(await live.session("jobs"), (b"accept-encoding", b"gzip"))
    record, caught_up = await reader.take(2)
    assert reader.status == 200
    headers = reader.headers
    assert re.fullmatch(rb"r[\w-]+\.[0-9a-f]+", headers.pop(b"x-request-id"))
    assert headers == {
        b"content-type": b"text/event-stream; charset=utf-8",
        b"cache-control": b"no-store",
        b"connection": b"keep-alive",
        b"content-security-policy": b"sandbox; default-src 'none'",
        b"x-accel-buffering": b"no",
        b"x-content-type-options": b"nosniff",
    }
    assert reader.received.startswith(b"retry: 2000\n\nid: ")
    assert record.event == "record"
    assert {name: record.data[name] for name in ("topic", "from_seq", "to_seq", "head_seq")} == {
        "topic": "jobs",
        "from_seq": 0,
        "to_seq": 2,
        "head_seq": 2,
    }
    assert record.id == id_of(jobs=2).decode()
    assert (caught_up.event, caught_up.data) == ("caught-up", {"topic": "jobs", "head_seq": 2})
    await live.append("jobs", 3)
    assert await reader.records(1) == [3]
    await reader.left()


async def test_ids_name_every_topic_of_the_session_in_its_order(live: Live) -> None:
    for name in ("b", "a"):
        await live.append(name, 1)
    reader = live.get(await live.session("b", "a"))
    frames = await reader.take(4)
    await reader.left()
    found = decode_id(frames[-1].id.encode() if frames[-1].id else b"")
    assert found == {"b": 1, "a": 1}
    assert list(found) == ["b", "a"]


@pytest.mark.parametrize(
    "wid", ["wid_x", "x", "wid_AAAAAAAAAAAAAAAAAAAAAA", "%2e%2e", "%ff%00", "a%2Fb", "w" * 5000]
)
async def test_a_wid_that_is_unknown_or_none_is_404(live: Live, wid: str) -> None:
    answer = await live.http.get(f"http://topics/v0/watch/{wid}")
    assert code_of(answer) == (404, "not_found")


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE"])
async def test_a_stream_is_only_read(live: Live, method: str) -> None:
    answer = await live.http.request(method, "/v0/watch/wid_x")
    assert answer.status_code == 405
    assert answer.headers["allow"] == "GET, HEAD, OPTIONS"
    assert (await live.http.get("/v0/watch")).status_code == 405
    assert (await live.http.get("/v0/watch/")).status_code == 404


async def test_a_client_that_takes_no_event_stream_is_406(live: Live) -> None:
    await live.append("jobs", 1)
    wid = await live.session("jobs")
    answer = await live.http.get(f"/v0/watch/{wid}", headers={"accept": "application/json"})
    assert code_of(answer) == (406, "not_acceptable")


async def test_head_returns_the_head_alone_and_disturbs_no_stream(live: Live) -> None:
    await live.append("jobs", 1)
    wid = await live.session("jobs")
    reader = live.get(wid)
    await reader.take(2)
    head = await live.http.head(f"/v0/watch/{wid}")
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert "content-length" not in head.headers
    assert (await live.http.head("/v0/watch/wid_x")).status_code == 404
    assert live.node.state.connections == 1
    await live.append("jobs", 2)
    assert await reader.records(1) == [2]
    await reader.left()


async def test_a_body_of_a_get_is_of_no_interest(live: Live) -> None:
    await live.append("jobs", 1)
    reader = live.get(await live.session("jobs"))
    await reader.begun()
    for _ in range(10):
        reader._incoming.put_nowait({"type": "http.request", "body": b"x", "more_body": True})
    assert await reader.records(1) == [1]
    await reader.left()


# -- caps, taking over -----------------------------------------------------------------------


async def test_open_streams_are_capped_and_free_their_place(disk: FakeDisk) -> None:
    live = await Live.start(disk, max_sse_connections=1)
    await live.append("jobs", 1)
    first = live.get(await live.session("jobs"))
    await first.begun()
    other = await live.session("jobs")
    answer = await live.http.get(f"/v0/watch/{other}")
    assert code_of(answer) == (429, "throttled")
    assert answer.json()["error"]["detail"] == {"limit": "max_sse_connections", "max": 1}
    assert int(answer.headers["retry-after"]) >= 1
    assert (await live.http.head(f"/v0/watch/{other}")).status_code == 429
    assert live.node.state.connections == 1
    await first.left()
    assert live.node.state.connections == 0
    second = live.get(other)
    await second.begun()
    assert second.status == 200
    await second.left()
    await live.stop()


async def test_no_cap_is_no_cap(disk: FakeDisk) -> None:
    live = await Live.start(disk, max_sse_connections=0)
    await live.append("jobs", 1)
    readers = [live.get(await live.session("jobs")) for _ in range(5)]
    for reader in readers:
        await reader.begun()
        assert reader.status == 200
    assert live.node.state.connections == 5
    await live.stop()


async def test_a_second_get_takes_over_also_where_every_place_is_taken(disk: FakeDisk) -> None:
    live = await Live.start(disk, max_sse_connections=1)
    await live.append("jobs", 1)
    wid = await live.session("jobs")
    first = live.get(wid)
    await first.take(2)
    second = live.get(wid)
    await first.ended()
    error = first.frames()[-1]
    assert (error.event, error.data["code"], error.id) == ("error", 409, None)
    (caught_up,) = await second.take(1)
    assert caught_up.event == "caught-up", "what the first one was told is not told again"
    await live.append("jobs", 2)
    assert await second.records(1) == [2]
    assert live.node.state.connections == 1
    await second.left()
    assert live.node.state.connections == 0
    await live.stop()


async def test_of_two_gets_at_once_the_later_one_has_the_session(live: Live) -> None:
    """That also holds while the head of the earlier answer still waits for its socket."""
    await live.append("jobs", 1)
    wid = await live.session("jobs")
    first = live.get(wid, room=False)
    await asyncio.sleep(0)
    second = live.get(wid)
    assert await second.records(1) == [1]
    first.room.set()
    await first.ended()
    assert [frame.data["code"] for frame in first.frames()] == [409]
    await live.append("jobs", 2)
    assert await second.records(1) == [2]
    await second.left()
    assert live.node.state.connections == 0


async def test_a_session_whose_stream_ended_lives_for_its_ttl(disk: FakeDisk) -> None:
    live = await Live.start(disk, session_ttl_ms=1_000)
    await live.append("jobs", 1)
    wid = await live.session("jobs")
    reader = live.get(wid)
    await reader.take(2)
    live.clock.move(5_000)
    await reader.left()
    live.clock.move(999)
    again = live.get(wid)
    assert kinds(await again.take(1)) == ["caught-up"]
    await again.left()
    live.clock.move(1_000)
    assert (await live.http.get(f"/v0/watch/{wid}")).status_code == 404
    assert len(live.node.sessions) == 0
    await live.stop()


# -- reconnecting ----------------------------------------------------------------------------


async def test_a_client_comes_back_to_where_it_was(live: Live) -> None:
    await live.append("jobs", *range(1, 4))
    wid = await live.session("jobs")
    reader = live.get(wid)
    assert await reader.records(3) == [1, 2, 3]
    await reader.left()
    await live.append("jobs", 4)
    again = live.get(wid)
    assert await again.records(1) == [4]
    await again.left()


@pytest.mark.parametrize(
    ("text", "first"),
    [
        (id_of(jobs=1), 2),
        (id_of(jobs=0), 1),
        (id_of(jobs=3), 4),
        (id_of(jobs=99), 4),
        (id_of(jobs=U64_MAX), 4),
        (id_of(other=0), 4),
        (id_of(), 4),
        (b"garbage", 4),
        (b"", 4),
        (b"c1.", 4),
        (b"\xff\xfe", 4),
        (b" " + id_of(jobs=1) + b" ", 2),
    ],
)
async def test_an_id_goes_back_and_never_forward(live: Live, text: bytes, first: int) -> None:
    await live.append("jobs", *range(1, 4))
    wid = await live.session("jobs")
    reader = live.get(wid)
    await reader.records(3)
    await reader.left()
    await live.append("jobs", 4)
    again = live.get(wid, last_id(text))
    assert await again.records(5 - first) == list(range(first, 5))
    await again.left()


async def test_an_id_goes_back_topic_by_topic(live: Live) -> None:
    for name in ("a", "b"):
        await live.append(name, *range(1, 4))
    wid = await live.session("a", "b")
    reader = live.get(wid)
    await reader.take(4)
    await reader.left()
    again = live.get(wid, last_id(id_of(a=2, b=9)))
    frames = await again.take(3)
    await again.left()
    records = [frame.data for frame in frames if frame.event == "record"]
    assert [(data["topic"], data["from_seq"], data["to_seq"]) for data in records] == [("a", 2, 3)]


async def test_many_topics_have_a_token_that_goes_back(live: Live) -> None:
    names = [f"t{number}" for number in range(65)]
    for name in names:
        await live.append(name, 1)
    wid = await live.session(*names)
    reader = live.get(wid)
    frames = await reader.take(130)
    await reader.left()
    ids = [frame.id for frame in frames if frame.event == "record"]
    assert all(text is not None and text.startswith("c1.") for text in ids)
    again = live.get(wid, last_id(ids[63]))
    told = await again.take(66)
    await again.left()
    assert [frame.data["topic"] for frame in told if frame.event == "record"] == [names[64]]


async def test_a_token_of_another_session_changes_nothing(live: Live) -> None:
    names = [f"t{number}" for number in range(65)]
    for name in names:
        await live.append(name, 1)
    other = live.get(await live.session(*reversed(names)))
    text = (await other.take(1))[0].id
    await other.left()
    wid = await live.session(*names)
    reader = live.get(wid)
    await reader.take(130)
    await reader.left()
    again = live.get(wid, last_id(text))
    assert kinds(await again.take(65)) == ["caught-up"] * 65
    await again.left()
    few = live.get(await live.session("t0"), last_id(text))
    assert kinds(await few.take(1)) == ["record"]
    await few.left()


async def recreated(live: Live, name: str, *datas: object) -> None:
    assert (await live.http.delete(f"/v0/topics/{name}")).status_code == 200
    await live.append(name, *datas)


async def test_an_id_of_a_topic_that_was_recreated_loses_nothing(live: Live) -> None:
    """The id holds the client's position in the old topic; the client has seen no record of the new
    topic.
    """
    await live.append("jobs", *range(100))
    wid = await live.session("jobs")
    reader = live.get(wid)
    text = (await reader.take(1))[0].id
    await reader.left()
    await recreated(live, "jobs", *range(150))
    # The next stream sends everything, but its client disconnects before it reads.
    lost = live.get(wid)
    frames = await lost.take(2)
    assert kinds(frames) == ["tombstone", "record"]
    await lost.left()
    again = live.get(wid, last_id(text))
    tombstone = (await again.take(1))[0]
    assert (tombstone.event, tombstone.data["reason"]) == ("tombstone", "recreated")
    assert tombstone.data["gap_from"] == 1
    assert await again.records(150) == list(range(150))
    newer = again.frames()[-2].id
    await again.left()
    # The next id is a position in the new topic.
    assert newer is not None
    assert newer.startswith("c1.")
    await live.append("jobs", 150)
    last = live.get(wid, last_id(newer))
    assert await last.records(1) == [150]
    await last.left()


async def test_a_topic_recreated_without_a_stream_is_reported_first(live: Live) -> None:
    await live.append("jobs", 1, 2)
    wid = await live.session("jobs")
    reader = live.get(wid)
    await reader.records(2)
    await reader.left()
    await recreated(live, "jobs", "a", "b", "c")
    again = live.get(wid)
    tombstone, record, _ = await again.take(3)
    assert (tombstone.data["reason"], tombstone.data["gap_from"]) == ("recreated", 1)
    assert record.data["from_seq"] == 0
    await again.left()


async def test_a_dropped_topic_is_reported_on_connect(live: Live) -> None:
    await live.append("jobs", 1, 2)
    wid = await live.session("jobs")
    await live.http.delete("/v0/topics/jobs")
    reader = live.get(wid)
    (frame,) = await reader.take(1)
    assert frame.event == "topic-deleted"
    await reader.left()


async def test_a_cursor_starts_a_new_session_where_an_old_one_was(live: Live) -> None:
    await live.append("jobs", *range(1, 6))
    await live.append("more", 1)
    answer = await live.post(
        topics={"jobs": {"tail": True}, "more": {"tail": True}}, cursor=id_of(jobs=3).decode()
    )
    told = answer.json()
    assert [told["topics"][name]["from_seq"] for name in ("jobs", "more")] == [3, 1]
    reader = live.get(told["wid"])
    assert await reader.records(2) == [4, 5]
    await reader.left()
    assert code_of(await live.post(topics={"jobs": {}}, cursor="?")) == (400, "invalid_request")


async def test_a_cursor_from_before_a_recreation_gets_recreated(live: Live) -> None:
    await live.append("jobs", *range(5))
    await recreated(live, "jobs", *range(9))
    wid = await live.session("jobs", cursor=id_of(jobs=3).decode())
    reader = live.get(wid)
    tombstone = (await reader.take(1))[0]
    assert tombstone.data["reason"] == "recreated"
    assert await reader.records(9) == list(range(9))
    text = reader.frames()[-2].id
    await reader.left()
    assert text is not None
    assert isinstance(decode_id(text.encode()), tuple)
    await live.append("jobs", 9)
    newer = await live.post(topics={"jobs": {"from_seq": 0}}, cursor=text)
    assert newer.json()["topics"]["jobs"]["from_seq"] == 9
    # The token refers to a dropped topic by its id, without a name, and yet no record is lost.
    await recreated(live, "jobs", 1, 2)
    await live.append("first", "a", "b")
    last = await live.session_of({"jobs": {"tail": True}, "first": {"from_seq": 1}}, cursor=text)
    reader = live.get(last)
    tombstone = (await reader.take(1))[0]
    assert (tombstone.data["topic"], tombstone.data["reason"]) == ("jobs", "recreated")
    assert await reader.records(3) == [1, 2, "b"]
    await reader.left()


async def test_a_cursor_keeps_the_places_of_topics_that_are_still_there(live: Live) -> None:
    await live.append("gone", 1)
    await live.append("kept", 1)
    await recreated(live, "kept", *range(5))
    reader = live.get(await live.session("gone", "kept"))
    frames = await reader.take(4)
    await reader.left()
    await recreated(live, "gone", "new")
    await live.append("kept", 5)
    topics: dict[str, Any] = {"kept": {}, "gone": {"tail": True}}
    again = live.get(await live.session_of(topics, cursor=frames[-1].id))
    assert await again.records(2) == [5, "new"]
    assert "kept" not in [
        frame.data["topic"] for frame in again.frames() if frame.event == "tombstone"
    ]
    await again.left()


# -- restarts, phases ------------------------------------------------------------------------


async def restarted(live: Live, disk: FakeDisk) -> Live:
    await live.stop()
    return await Live.start(disk)


async def test_after_a_restart_an_id_may_lead_forward_once_and_to_the_head_at_most(
    disk: FakeDisk,
) -> None:
    live = await Live.start(disk)
    await live.append("jobs", *range(1, 6))
    wid = await live.session("jobs")
    live = await restarted(live, disk)
    ahead = live.get(wid, last_id(id_of(jobs=3)))
    assert await ahead.records(2) == [4, 5]
    await ahead.left()
    live = await restarted(live, disk)
    beyond = live.get(wid, last_id(id_of(jobs=99)))
    assert kinds(await beyond.take(1)) == ["caught-up"]
    await live.append("jobs", 6)
    assert await beyond.records(1) == [6]
    await beyond.left()
    await live.append("jobs", 7)
    second = live.get(wid, last_id(id_of(jobs=7)))
    assert await second.records(1) == [7], "only the first stream after a restart"
    await second.left()
    await live.stop()


async def test_after_a_restart_an_id_of_the_topic_before_leads_nowhere_in_the_new_one(
    disk: FakeDisk,
) -> None:
    live = await Live.start(disk)
    await live.append("jobs", *range(1, 101))
    wid = await live.session("jobs")
    await recreated(live, "jobs", *range(1, 151))
    reader = live.get(wid)
    await reader.records(150)
    await reader.left()
    live = await restarted(live, disk)
    again = live.get(wid, last_id(id_of(jobs=100)))
    assert (await again.take(1))[0].data["reason"] == "recreated"
    assert await again.records(150) == list(range(1, 151))
    await again.left()
    await live.stop()


async def test_after_a_restart_a_token_may_lead_into_the_topic_there_is_now(
    disk: FakeDisk,
) -> None:
    live = await Live.start(disk)
    await live.append("jobs", 1, 2)
    behind = await live.session("jobs")
    await recreated(live, "jobs", *range(1, 6))
    ahead = live.get(await live.session("jobs"))
    text = (await ahead.take(1))[0].id
    await ahead.left()
    assert text is not None
    (place,) = decode_id(text.encode())
    assert isinstance(place, CursorPosition)
    assert place.seq == 5
    live = await restarted(live, disk)
    await live.append("jobs", 6)
    reader = live.get(behind, last_id(text))
    assert await reader.records(1) == [6]
    await reader.left()
    await live.stop()


async def test_a_get_waits_while_the_journal_is_replayed(live: Live) -> None:
    await live.append("jobs", 1)
    wid = await live.session("jobs")
    live.node.state.phase = "replaying"
    reader = live.get(wid)
    await asyncio.sleep(0.01)
    assert (reader.head, live.node.state.waiting) == (None, 1)
    live.node.state.enter("ready")
    assert await reader.records(1) == [1]
    assert live.node.state.waiting == 0
    await reader.left()


async def test_a_client_that_disconnects_during_replay_leaves_nothing_behind(live: Live) -> None:
    live.node.state.phase = "replaying"
    before = len(asyncio.all_tasks())
    reader = live.get("wid_x")
    await asyncio.sleep(0.01)
    await reader.left()
    await asyncio.sleep(0.01)
    assert (reader.head, live.node.state.waiting) == (None, 0)
    assert len(asyncio.all_tasks()) == before
    live.node.state.enter("ready")


async def test_a_waiting_client_is_disconnected_when_the_server_stops(live: Live) -> None:
    live.node.state.phase = "replaying"
    reader = live.get("wid_x")
    await asyncio.sleep(0.01)
    live.node.state.enter("draining")
    await asyncio.sleep(0.01)
    assert not reader.serving.done(), "it waits for the connection to be closed"
    await reader.left()
    assert (reader.head, reader.received) == (None, b"")


async def test_a_stop_ends_streams_and_answers_no_others(live: Live) -> None:
    await live.append("jobs", 1)
    wid = await live.session("jobs")
    reader = live.get(wid)
    await reader.take(2)
    slow_to_begin = live.get(await live.session("jobs"), room=False)
    await asyncio.sleep(0)
    live.node.begin_drain()
    await reader.ended()
    assert reader.received.endswith(b"\n\n")
    slow_to_begin.room.set()
    await slow_to_begin.ended()
    assert slow_to_begin.received == b""
    late = live.get(wid)
    await asyncio.sleep(0.01)
    await late.left()
    assert late.head is None
    assert code_of(await live.post(topics={"jobs": {}})) == (503, "shutting_down")
    assert live.node.state.connections == 0


# -- freed resources -------------------------------------------------------------------------


def held(live: Live) -> dict[str, int]:
    """The resources that a stream takes."""
    node = live.node
    return {
        "tasks": len(asyncio.all_tasks()),
        "connections": node.state.connections,
        "streams": node.fanout.stream_count,
        "bells": node.notifier.listener_count,
        "sessions": len(node.sessions),
        "of streams": sum(session.stream is not None for session in node.ground.session_table),
        "counted": sum(session.stream_count for session in node.ground.session_table),
    }


async def test_streams_that_are_cut_leave_nothing_behind(live: Live) -> None:
    await live.append("jobs", *range(50))
    wids = [await live.session("jobs") for _ in range(20)]
    before = held(live)
    for round_ in range(10):
        readers = [
            live.get(wid, last_id(id_of(jobs=0)), room=(index + round_) % 3 > 0)
            for index, wid in enumerate(wids)
        ]
        for _ in range(round_ % 4):
            await asyncio.sleep(0)
        await live.append("jobs", round_)
        for reader in readers:
            reader.leave()
            reader.room.set()
        for reader in readers:
            await asyncio.wait_for(reader.serving, 10)
    await asyncio.sleep(0.01)
    gc.collect()
    assert held(live) == before


async def test_a_stream_that_fails_frees_its_place(live: Live) -> None:
    await live.append("jobs", 1)
    wid = await live.session("jobs")
    before = held(live)

    async def receive() -> dict[str, Any]:
        raise ArithmeticError("a defect below us")

    async def send(message: Any) -> None:
        pass

    async def gone(message: Any) -> None:
        raise ConnectionResetError

    path = f"/v0/watch/{wid}"
    scope = {"type": "http", "method": "GET", "path": path, "query_string": b"", "headers": []}
    with pytest.raises(ArithmeticError):
        await live.app(dict(scope), receive, send)
    with pytest.raises(ConnectionResetError):
        await live.app(dict(scope), receive, gone)
    await asyncio.sleep(0.01)
    assert held(live) == before


async def test_a_stream_that_is_cancelled_frees_its_place(live: Live) -> None:
    await live.append("jobs", 1)
    wid = await live.session("jobs")
    before = held(live)
    for room in (True, False):
        reader = live.get(wid, room=room)
        await asyncio.sleep(0.01)
        reader.serving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader.serving
    await asyncio.sleep(0.01)
    assert held(live) == before


async def test_figures_count_streams_and_sessions(live: Live) -> None:
    await live.append("jobs", 1)
    wid = await live.session("jobs")
    await live.session("jobs")
    reader = live.get(wid)
    await reader.begun()
    text = (await live.http.get("/v0/metrics")).text
    assert "\ntopics_sse_connections 1.0\n" in text
    assert "\ntopics_watch_sessions 2.0\n" in text
    told = (await live.http.get("/v0/metrics", headers={"accept": "application/json"})).json()
    assert (told["topics_sse_connections"], told["topics_watch_sessions"]) == (1, 2)
    await reader.left()


async def test_a_gzip_body_opens_a_session_too(live: Live) -> None:
    await live.append("jobs", 1)
    answer = await live.http.post(
        "/v0/watch",
        content=gzip.compress(b'{"topics":{"jobs":{}}}'),
        headers={"content-type": "application/json", "content-encoding": "gzip"},
    )
    assert answer.status_code == 200


async def test_a_session_that_was_streamed_when_the_server_stopped_was_used_until_the_next_start(
    disk: FakeDisk,
) -> None:
    live = await Live.start(disk, session_ttl_ms=1_000)
    await live.append("jobs", 1)
    streamed, idle = [await live.session("jobs") for _ in range(2)]
    # The next start has a clock of its own, five seconds ahead of this one.
    live.clock.wall_ms -= 5_000
    for wid in (streamed, idle):
        reader = live.get(wid)
        await reader.take(2)
        if wid is idle:
            await reader.left()
    await live.stop()
    live = await Live.start(disk, session_ttl_ms=1_000)
    again = live.get(streamed)
    assert kinds(await again.take(1)) == ["caught-up"]
    await again.left()
    late = live.get(idle)
    await late.begun()
    assert late.status == 404
    await live.stop()


async def test_a_stream_that_ends_behind_the_journal_s_end_is_let_go_of(disk: FakeDisk) -> None:
    live = await Live.start(disk)
    await live.append("jobs", 1)
    reader = live.get(await live.session("jobs"), room=False)
    await asyncio.sleep(0)
    await live.stop()
    reader.room.set()
    await reader.ended()
    assert live.node.state.connections == 0


async def test_streams_that_are_over_refer_to_nothing_that_refers_to_them(live: Live) -> None:
    """The garbage collector never examines old objects again (see `server`)."""
    await live.append("jobs", 1)
    wids = [await live.session("jobs") for _ in range(10)]
    gc.collect()
    gc.disable()
    try:
        for wid in wids:
            reader = live.get(wid)
            await reader.take(2)
            await reader.left()
        del reader
        left = {type(o).__name__ for o in gc.get_objects()} & {"Stream", "Outbox", "Watcher"}
    finally:
        gc.enable()
    assert left == set()


async def test_an_id_from_before_two_recreations_counts_after_one_was_reported(
    live: Live,
) -> None:
    """A token does not distinguish two topics without an id of their own."""
    for name in ("kept", "one", "two"):
        await live.append(name, *range(3))
    for name in ("one", "two"):
        await recreated(live, name, *range(5))
    wid = await live.session("kept", "one", "two", cursor=id_of(one=2, two=1).decode())
    session = live.node.sessions.find(wid)
    assert session is not None
    before = [(at.topic_id, at.epoch, at.seq) for at in session.cursors.values()]
    assert [topic_id for topic_id, _, _ in before[1:]] == [0, 0]
    token = cursor_token(before)
    # A stream reported one recreation, and broke before its client read the report.
    view = live.node.state.watching()[0].dispatcher.resolve("one")
    assert view is not None
    told = session.cursors["one"]
    told.topic_id, told.epoch, told.seq = view.topic_id, view.epoch, 5
    reader = live.get(wid, last_id(token))
    reasons = [f.data["topic"] for f in await reader.take(8) if f.event == "tombstone"]
    assert reasons == ["one", "two"]
    await reader.left()


def cursor_token(places: list[tuple[int, int, int]]) -> str:
    """A checkpoint token in the server's form."""
    packed = base64.urlsafe_b64encode(msgspec.msgpack.encode(places))
    return "c1." + packed.rstrip(b"=").decode()
