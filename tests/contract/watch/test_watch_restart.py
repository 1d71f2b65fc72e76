"""§7.1, settled rules: sessions, ids and streams over a clean stop and over `kill -9`."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import pytest

from tests.contract.conftest import URL, NewServer, new_name
from tests.contract.driver import Api, Server, refused
from tests.contract.streams.streams import SseStream, StreamEnded, gauges
from tests.contract.watch.subscriptions import (
    Clients,
    Gap,
    Records,
    Session,
    Trouble,
    hang_up,
    id_of,
    map_of,
)

Names = Callable[[str], str]
HOWS = ["clean stop", "kill -9"]


@dataclass(frozen=True, slots=True)
class Later:
    """A server after its restart: its client, and the sessions from before the restart."""

    how: str
    api: Api
    topic: dict[str, str]
    session: dict[str, Session]
    last: dict[str, str]
    read: dict[str, list[int]]


def _prepared(api: Api, clients: Clients) -> Later:
    """Sessions in every state that is possible at a stop."""
    topic = {key: new_name("r") for key in ("a", "b", "still", "gone", "trimmed", "volatile")}
    many = [new_name("k") for _ in range(70)]
    for key in ("a", "b", "still", "gone"):
        api.add(topic[key], *range(10))
    api.put(topic["trimmed"], {"cap_records": 3})
    api.put(topic["volatile"], {"durability": "ephemeral"})
    api.add(topic["trimmed"], 1)
    api.add(topic["volatile"], 1, 2)
    for name in many:
        api.add(name, 1, 2)

    session = {
        "plain": clients.session(
            api,
            {topic["a"]: {}, topic["b"]: {"from_seq": 3}},
            node="me",
            limit=4,
            include_tags=True,
        ),
        "unused": clients.session(api, {topic["still"]: {"from_seq": 5}}),
        "forward": clients.session(api, {topic["still"]: {"from_seq": 2}}),
        "beyond": clients.session(api, {topic["still"]: {"from_seq": 2}}),
        "back": clients.session(api, {topic["still"]: {"from_seq": 2}}),
        "own cursors": clients.session(api, {topic["still"]: {}}),
        "changed": clients.session(
            api, {topic["gone"]: {}, topic["trimmed"]: {}, topic["volatile"]: {}}
        ),
        "many": clients.session(api, {name: {} for name in many}, limit=1),
    }
    last: dict[str, str] = {}
    read: dict[str, list[int]] = {}

    changed = session["changed"].stream(api)
    changed.drained()
    last["changed"] = changed.ids[-1]
    hang_up(api, changed)
    api.drop(topic["gone"])
    api.add(topic["gone"], "new")
    for number in range(10):
        api.add(topic["trimmed"], number)
    api.add(topic["volatile"], 3, 4)

    token = session["many"].stream(api)
    token.until(lambda _: len(token.ids) == 50)
    last["many"] = token.ids[-1]
    read |= {name: token.seqs(name) for name in many}

    session["own cursors"].stream(api).drained()

    plain = session["plain"].stream(api)
    plain.drained()
    for number in range(5):
        api.add(topic["a"], f"more {number}", tag="t")
        plain.reads(topic["a"], 11 + number)
    last["plain"] = plain.ids[-1]
    return Later("", api, topic, session, last, read)


@pytest.fixture(scope="module", params=HOWS)
def later(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Later]:
    """The prepared sessions after a clean stop or a crash; most streams were open at that time."""
    if URL:
        pytest.skip("needs a server of its own; TOPICS_CONTRACT_URL names a shared one")
    server = Server(tmp_path_factory.mktemp("life"))
    with Clients() as clients:
        before = _prepared(server.start(), clients)
        api = server.restart() if request.param == "clean stop" else server.crash()
        yield replace(before, how=request.param, api=api)
    server.signal(signal.SIGKILL)


def test_sessions_come_back_without_their_streams(later: Later) -> None:
    """Contract §8.3, settled rules [S-64, 8.3-06, 7.1-01]"""
    assert gauges(later.api) == (0, len(later.session))


def test_a_plain_event_source_goes_on_exactly(later: Later, clients: Clients) -> None:
    """Settled rules: the client sends the last id that it saw; after a restart an id may move the
    session forward once. [S-64, S-65, 7.1-01, 7.4-03]
    """
    api, first, second = later.api, later.topic["a"], later.topic["b"]
    assert map_of(later.last["plain"]) == {first: 15, second: 10}
    api.append(first, [{"data": "after", "tag": "t"}, {"data": "mine", "node": "me"}])
    session = later.session["plain"].of(clients)
    resumed = session.stream(api, later.last["plain"])
    resumed.drained()
    assert resumed.seqs(first) == [16], "exactly what had not come; own records are still hidden"
    assert resumed.seqs(second) == []
    assert resumed.seen[first][0]["$tag"] == "t", "the definition survived"
    hang_up(api, resumed)
    # From now on an id can only move the session back.
    again = session.stream(api, id_of({first: 2**40, second: 9}))
    again.drained()
    assert again.seqs(first) == []
    assert again.seqs(second) == [10]


def test_a_session_that_never_streamed_starts_where_it_said(later: Later, clients: Clients) -> None:
    """Contract §7.4, settled rules [S-64, 7.4-04]"""
    follower = later.session["unused"].of(clients).stream(later.api)
    follower.drained()
    assert follower.seqs(later.topic["still"]) == [6, 7, 8, 9, 10]


@pytest.mark.parametrize(
    ("which", "seq", "first"), [("forward", 7, 8), ("beyond", 1000, 11), ("back", 1, 2)]
)
def test_an_id_goes_forward_up_to_the_head_and_back(
    later: Later, clients: Clients, which: str, seq: int, first: int
) -> None:
    """A seq beyond the head is the head, no gap is invented. [S-65]"""
    name = later.topic["still"]
    follower = later.session[which].of(clients).stream(later.api, id_of({name: seq}))
    follower.drained()
    assert follower.seqs(name) == list(range(first, 11))
    assert follower.gaps[name] == []
    assert follower.positions[name] == 10


def test_without_an_id_the_last_cursors_hold_at_least(later: Later, clients: Clients) -> None:
    """A clean stop keeps the cursors of the stream's end; after a crash records may repeat, but
    none is skipped. [S-64, 7.4-03]
    """
    name = later.topic["still"]
    follower = later.session["own cursors"].of(clients).stream(later.api)
    follower.drained()
    seqs = follower.seqs(name)
    assert seqs == list(range(11 - len(seqs), 11))
    if later.how == "clean stop":
        assert seqs == []


def test_changes_during_the_downtime_are_reported(later: Later, clients: Clients) -> None:
    """Contract §7.5: topics were recreated or trimmed meanwhile, or lost records with the process.

    [S-52, 7.5-04, S-64]
    """
    api, topic = later.api, later.topic
    earliest = api.get_state(topic["trimmed"])["earliest_seq"]
    resumed = later.session["changed"].of(clients).stream(api, later.last["changed"])
    resumed.drained()
    assert resumed.gaps[topic["gone"]] == [Gap(topic["gone"], "recreated", 1, 0, 1, 1)]
    assert resumed.seqs(topic["gone"]) == [1]
    assert [(g.gap_from, g.gap_to) for g in resumed.gaps[topic["trimmed"]]] == [(2, earliest - 1)]
    assert resumed.seqs(topic["trimmed"]) == list(range(earliest, 12))
    (lost,) = resumed.gaps[topic["volatile"]]
    assert (lost.reason, lost.gap_to) == ("restart", api.get_state(topic["volatile"])["head_seq"])
    assert lost.gap_from == 3
    assert resumed.seqs(topic["volatile"]) == []


def test_a_token_is_good_in_another_life(later: Later, clients: Clients) -> None:
    """A token is self-contained and works in a header and in a new session. [S-67, S-66]"""
    api, token = later.api, later.last["many"]
    assert map_of(token) is None
    session = later.session["many"].of(clients)
    fresh = clients.session(api, {name: {} for name in later.read}, cursor=token)
    for resumed in (session.stream(api, token), fresh.stream(api)):
        resumed.drained()
        for name, seqs in later.read.items():
            assert seqs + resumed.seqs(name) == [1, 2]


def test_sessions_expire_over_a_restart_too(own: NewServer, names: Names, clients: Clients) -> None:
    """Sessions survive within their TTL, but not beyond it. [S-64, 7.7-03, 7.1-02]"""
    server = own(TOPICS_SESSION_TTL_MS="500")
    api = server.start()
    topic = names("r")
    api.add(topic, 1)
    session = clients.session(api, {topic: {}})
    api = server.crash()
    time.sleep(0.6)
    refused(api.http.get(session.answer["stream_url"]), 404, "not_found")
    assert gauges(api)[1] == 0


def test_a_clean_stop_ends_streams_at_once_and_closes_sockets(
    own: NewServer, names: Names, clients: Clients
) -> None:
    """§7, settled rules: clients then reconnect by themselves. A WebSocket gets code 1001.
    [S-56, 7.3-03]
    """
    server = own()
    api = server.start()
    topic = names("d")
    api.add(topic, *range(3))
    followers = [clients.session(api, {topic: {}}).stream(api) for _ in range(5)]
    for follower in followers:
        follower.drained()
    sockets = [clients.ws(api) for _ in range(3)]
    for number, ws in enumerate(sockets):
        if number:
            ws.send(op="subscribe", topic=topic)
            ws.frame_of("caught_up")
    assert server.process is not None
    started = time.monotonic()
    server.process.send_signal(signal.SIGTERM)
    for follower in followers:
        frames = follower.rest(within_s=5)
        assert not any(isinstance(frame, Trouble) for frame in frames)
        assert follower.stream.is_whole, "the response was ended, not broken"
    for ws in sockets:
        assert ws.closed_with(within_s=5) == 1001
    assert server.process.wait(10) == 0
    assert time.monotonic() - started < 5
    server.process = None


def test_publishes_under_way_at_a_stop_are_answered_before_the_close(
    own: NewServer, names: Names, clients: Clients
) -> None:
    """Settled rules: code 1001, after the answers. A publish that is stored and not answered would
    be sent again. [S-56]
    """
    server = own()
    api = server.start()
    topic = names("d")
    api.put(topic, {"durability": "fsync"})
    stored = 0
    for _ in range(8):
        ws = clients.ws(api)
        for number in range(40):
            ws.send(op="publish", topic=topic, records=[{"data": number}], request_id=f"{number}")
        ops: list[str] = []
        assert server.process is not None
        server.process.send_signal(signal.SIGTERM)
        with contextlib.suppress(StreamEnded):
            while True:
                ops.append(ws.frame_of("ack", "error")["op"])
        assert ws.closed_with(within_s=5) == 1001
        assert server.process.wait(10) == 0
        server.process = None
        api = server.start()
        stored += ops.count("ack")
        assert api.state(topic).json()["head_seq"] == stored


def test_records_appended_before_the_stop_arrive_after_it(
    own: NewServer, names: Names, clients: Clients
) -> None:
    """§7: nothing in flight is lost. [7.3-03, S-65]"""
    server = own()
    api = server.start()
    topic = names("d")
    api.put(topic)
    session = clients.session(api, {topic: {}})
    follower = session.stream(api)
    follower.drained()
    read: list[int] = []
    last = follower.ids[-1]
    for number in range(1, 51):
        api.append(topic, [{"data": number}])
    assert server.process is not None
    server.process.send_signal(signal.SIGTERM)
    for frame in follower.rest():
        if isinstance(frame, Records):
            read += frame.seqs
    last = follower.ids[-1]
    assert server.process.wait(20) == 0
    server.process = None
    api = server.start()
    resumed = session.stream(api, last)
    resumed.drained()
    assert read + resumed.seqs(topic) == list(range(1, 51))


def test_a_stream_requested_during_replay_is_never_refused(
    own: NewServer, names: Names, clients: Clients
) -> None:
    """§7, §8.2: the request waits, because a browser gives up for ever after a 503. [7.3-04]"""
    server = own()
    api = server.start()
    topic = names("w")
    for _ in range(6):
        api.append(topic, [{"data": "x" * 100}] * 5000)
    session = clients.session(api, {topic: {"tail": True}})
    server.signal(signal.SIGKILL)
    process = server.process = server.spawn()
    port_file = server.directory / "port"
    deadline = time.monotonic() + 30
    stream: SseStream | None = None
    while stream is None:
        assert time.monotonic() < deadline
        assert process.poll() is None
        try:
            port = int(port_file.read_text()) if port_file.exists() else 0
            if port:
                stream = SseStream(f"http://127.0.0.1:{port}", session.answer["stream_url"])
        except (ConnectionRefusedError, ValueError):
            continue
    try:
        assert stream.status == 200
        assert stream.event(20).name == "caught-up"
    finally:
        stream.close()


def test_a_stream_broken_by_a_crash_is_seen_as_broken(
    own: NewServer, names: Names, clients: Clients
) -> None:
    """§7: a crash cuts the response, so that a client notices it and reconnects. [S-64]"""
    server = own()
    api = server.start()
    topic = names("c")
    api.put(topic)
    follower = clients.session(api, {topic: {}}).stream(api)
    follower.drained()
    raw = clients.raw_ws(api)
    server.signal(signal.SIGKILL)
    with pytest.raises(StreamEnded):
        follower.frame(5)
    assert not follower.stream.is_whole
    assert raw.closed_with(5) is None
