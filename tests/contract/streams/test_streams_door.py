"""The streams API: the HTTP side of the Durable Streams protocol, below `/v1/stream`."""

from __future__ import annotations

import base64
import gzip
import json
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import httpx
import pytest

from tests.contract.access.callers import Guarded
from tests.contract.conftest import URL, NewServer, new_name
from tests.contract.driver import Api, Server, eventually, good, refused
from tests.contract.streams.streams import DEADLINE_S, Event, SseStream, gauges

MOUNT: Final = "/v1/stream"
BEGIN: Final = "0000000000000000_0000000000000000"
OFFSET: Final = re.compile(r"[0-9]{16}_[0-9]{16}")
Told = httpx.Response


class Events(SseStream):
    """The events of a stream of this protocol, which `docs/FRAMES.md` does not describe."""

    @staticmethod
    def check_event(name: str, data: str) -> None:
        """Accept: these events are not of `/v0`."""
        assert name == "data" or json.loads(data)

    def rest(self, within_s: float = DEADLINE_S) -> list[Event]:
        """Every event until the server ends the stream; then close the client's side."""
        left = super().rest(within_s)
        self.close()
        return left

    def pair(self) -> tuple[str | None, dict[str, Any]]:
        """The next data, if any, and the control event after it."""
        event, data = self.event(), None
        if event.name == "data":
            data, event = event.data, self.event()
        assert event.name == "control"
        return data, json.loads(event.data)


class Door:
    """The streams API of one server, with a default content type."""

    def __init__(self, api: Api, mount: str = MOUNT) -> None:
        self.api = api
        self.mount = mount

    def put(self, path: str, kind: str = "text/plain", body: Any = b"", **headers: str) -> Told:
        """PUT."""
        return self._send("PUT", path, kind, body, headers)

    def post(self, path: str, body: Any, kind: str = "text/plain", **headers: str) -> Told:
        """POST."""
        return self._send("POST", path, kind, body, headers)

    def close(self, path: str, **headers: str) -> Told:
        """POST that only closes."""
        return self._send("POST", path, "", b"", {"stream_closed": "true", **headers})

    def get(self, path: str, query: str = "", **headers: str) -> Told:
        """GET."""
        return self._send("GET", f"{path}{query and '?'}{query}", "", b"", headers)

    def head(self, path: str) -> Told:
        """HEAD."""
        return self._send("HEAD", path, "", b"", {})

    def delete(self, path: str) -> Told:
        """DELETE."""
        return self._send("DELETE", path, "", b"", {})

    def follow(self, path: str, offset: str = "-1", more: str = "") -> Events:
        """The events of a stream."""
        return Events(self.api.url, f"{self.mount}/{path}?offset={offset}&live=sse{more}")

    def _send(self, method: str, path: str, kind: str, body: Any, headers: dict[str, str]) -> Told:
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        if kind:
            sent["content-type"] = kind
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        url = f"{self.mount}/{path}"
        return self.api.http.request(method, url, headers=sent, content=content)


def told(answer: Told, status: int) -> str:
    """The offset of an answer of this status."""
    assert answer.status_code == status, answer.text
    offset = answer.headers["stream-next-offset"]
    assert OFFSET.fullmatch(offset)
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["cross-origin-resource-policy"] == "cross-origin"
    return str(offset)


@pytest.fixture
def door(api: Api) -> Door:
    """The streams API of the shared server."""
    return Door(api)


@pytest.fixture
def path() -> str:
    """A path without a stream; it is not a valid topic name."""
    return f"{new_name('door')}/of/its%20own"


# --- creating, appending, closing -----------------------------------------------------------------


def test_a_stream_is_made_once(door: Door, path: str) -> None:
    made = door.put(path, body=b"hello")
    end = told(made, 201)
    assert made.headers["location"] == f"{door.api.url}{MOUNT}/{path}"
    assert made.headers["content-type"] == "text/plain"
    assert made.headers["cache-control"] == "no-store"
    assert "stream-closed" not in made.headers
    again = door.put(path, body=b"other")
    assert told(again, 200) == end
    assert "location" not in again.headers
    assert door.get(path).content == b"hello"


def test_the_location_is_the_url_of_the_proxy(door: Door, path: str) -> None:
    made = door.put(path, x_forwarded_proto="https")
    assert made.headers["location"].startswith("https://127.0.0.1")


def test_no_type_and_a_type_that_is_none_are_bytes(door: Door, path: str) -> None:
    for number, kind in enumerate(("", "text", "text/", "text plain")):
        made = door.put(f"{path}/{number}", kind=kind)
        assert made.headers["content-type"] == "application/octet-stream"


def test_paths_are_taken_as_they_are_meant(door: Door, path: str) -> None:
    """Two escaped spellings of one path are one stream; paths that differ in case are two."""
    told(door.put(f"{path}/%7Ea%c3%a4", body=b"x"), 201)
    assert door.get(f"{path}/~a%C3%A4").content == b"x"
    assert door.get(f"{path}/~A%C3%A4").status_code == 404


def test_a_path_that_is_a_name_is_that_topic(door: Door, topic: str) -> None:
    """[S-74]"""
    told(door.put(topic, "application/json", [{"n": 1}]), 201)
    door.api.add(topic, {"n": 2})
    assert door.get(topic).json() == [{"n": 1}, {"n": 2}]
    assert [r["data"] for r in door.api.read_all(topic)] == [{"n": 1}, {"n": 2}]


def test_another_path_is_a_topic_of_its_own_name_and_keeps_its_path(door: Door, path: str) -> None:
    """[S-74]"""
    told(door.put(path, "text/plain", b"x", stream_ttl="3600"), 201)
    names = [row["topic"] for row in good(door.api.topics(prefix="ds:", page_size=1000))["topics"]]
    states = [door.api.get_state(name) for name in names]
    (state,) = [each for each in states if each["stream"]["path"] == path.replace("%20", " ")]
    assert re.fullmatch(r"ds:[0-9a-f]+", state["topic"])
    assert state["stream"] == {
        "path": path.replace("%20", " "),
        "content_type": "text/plain",
        "closed": False,
        "ttl_s": 3600,
    }
    door.close(path)
    assert door.api.get_state(state["topic"])["stream"]["closed"] is True
    assert "stream" not in door.api.get_state(_plain(door))


def _plain(door: Door) -> str:
    name = new_name("plain")
    door.api.add(name, 1)
    return name


def test_bytes_are_base64_for_readers_of_records(door: Door, topic: str) -> None:
    """[S-73] That holds in a diff and on a watch stream."""
    told(door.put(topic, "image/x-tiny", b"\x00\xff"), 201)
    shown = {"$encoding": "base64", "$content_type": "image/x-tiny", "data": "AP8="}

    def is_shown(record: dict[str, Any]) -> bool:
        return {key: record[key] for key in shown} == shown and "meta" not in record

    (record,) = door.api.read_all(topic)
    assert is_shown(record)
    session = good(door.api.http.post("/v0/watch", json={"topics": {topic: {"from_seq": 0}}}))
    stream = SseStream(door.api.url, session["stream_url"])
    try:
        event = stream.event()
        while event.name != "record":
            event = stream.event()
        assert is_shown(json.loads(event.data)["records"][0])
    finally:
        stream.close()


def test_appending_moves_the_end(door: Door, path: str) -> None:
    offsets = [told(door.put(path), 201)]
    for number in range(3):
        answer = door.post(path, f"{number}".encode(), stream_seq=f"{number}")
        offsets.append(told(answer, 204))
        assert "producer-seq" not in answer.headers
        assert "content-type" not in answer.headers
    assert offsets == sorted(set(offsets))
    assert door.get(path).content == b"012"
    answer = door.post(path, b"x", stream_seq="2")
    refused(answer, 409, "stream_conflict")
    assert answer.headers["cross-origin-resource-policy"] == "cross-origin"


def test_a_producer_gets_its_position(door: Door, path: str) -> None:
    door.put(path)

    def send(epoch: int, seq: int, **more: str) -> Told:
        numbers = {"producer_epoch": str(epoch), "producer_seq": str(seq)}
        return door.post(path, f"{epoch}.{seq} ".encode(), producer_id="p", **numbers, **more)

    for answer, status in ((send(0, 0), 200), (send(0, 1), 200), (send(0, 0), 204)):
        end = told(answer, status)
        assert answer.headers["producer-epoch"] == "0"
        assert OFFSET.fullmatch(end)
    assert send(0, 1).headers["producer-seq"] == "1"
    gap = send(0, 3)
    refused(gap, 409, "producer_seq_conflict")
    assert gap.headers["producer-expected-seq"] == "2"
    assert gap.headers["producer-received-seq"] == "3"
    told(send(1, 0), 200)
    fenced = send(0, 2)
    refused(fenced, 403, "producer_fenced")
    assert fenced.headers["producer-epoch"] == "1"
    last = send(1, 1, stream_closed="true")
    told(last, 200)
    assert last.headers["stream-closed"] == "true"
    repeated = send(1, 1, stream_closed="true")
    told(repeated, 204)
    assert repeated.headers["stream-closed"] == "true"
    assert door.get(path).content == b"0.0 0.1 1.0 1.1 "


def test_a_closed_stream_says_so_and_where_it_ends(door: Door, path: str) -> None:
    door.put(path, body=b"x")
    closed = door.close(path)
    end = told(closed, 204)
    assert closed.headers["stream-closed"] == "true"
    assert told(door.close(path), 204) == end
    late = door.post(path, b"y")
    assert refused(late, 409, "stream_closed")["next_offset"] == end
    assert late.headers["stream-closed"] == "true"
    assert late.headers["stream-next-offset"] == end
    for found in (door.get(path), door.head(path), door.get(path, "offset=now")):
        assert told(found, 200) == end
        assert found.headers["stream-closed"] == "true"
    other = f"{path}/other"
    door.put(other)
    last = door.post(other, b"z", stream_closed="TRUE")
    told(last, 204)
    assert last.headers["stream-closed"] == "true"


def test_packed_bodies_are_taken_and_given(door: Door, path: str) -> None:
    door.put(path)
    told(door.post(path, gzip.compress(b"x" * 5000), content_encoding="gzip"), 204)
    packed = door.get(path, accept_encoding="gzip")
    assert packed.content == b"x" * 5000
    assert packed.headers["content-encoding"] == "gzip"
    assert packed.headers["vary"] == "accept-encoding"
    assert door.get(path).headers["vary"] == "accept-encoding"


def test_a_deleted_stream_is_not_there(door: Door, path: str) -> None:
    door.put(path, body=b"x")
    gone = door.delete(path)
    assert (gone.status_code, gone.content) == (204, b"")
    refused(door.delete(path), 404, "stream_not_found")
    refused(door.get(path), 404, "stream_not_found")
    assert door.head(path).status_code == 404


def test_a_fork_begins_as_its_source(door: Door, path: str) -> None:
    door.put(path, body=b"ab")
    first = told(door.post(path, b"cd"), 204)
    door.post(path, b"ef")
    fork = f"{path}/fork"
    told(door.put(fork, "", stream_forked_from=f"{MOUNT}/{path}", stream_fork_offset=first), 201)
    assert door.get(fork).content == b"abcd"
    assert door.get(fork).headers["content-type"] == "text/plain"


def test_head_has_headers_that_get_lacks(door: Door, path: str) -> None:
    door.put(path, stream_ttl="3600")
    found = door.head(path)
    told(found, 200)
    assert found.content == b""
    assert found.headers["stream-ttl"] == "3600"
    assert found.headers["cache-control"] == "no-store"
    assert found.headers["content-type"] == "text/plain"
    # The length of a GET's body is unknown without making the body.
    assert "content-length" not in found.headers
    other = f"{path}/other"
    when = "2100-01-01T00:00:00.5+01:00"
    door.put(other, stream_expires_at=when)
    assert door.head(other).headers["stream-expires-at"] == when


def test_allowed_methods_are_listed(door: Door, path: str) -> None:
    answer = door.api.http.options(f"{MOUNT}/{path}")
    assert answer.status_code == 204
    assert answer.headers["allow"] == "DELETE, GET, HEAD, OPTIONS, POST, PUT"
    assert "if-none-match" in answer.headers["access-control-allow-headers"]
    assert "access-control-allow-origin" not in answer.headers
    refused(door.api.http.patch(f"{MOUNT}/{path}"), 405, "method_not_allowed")


# --- reading --------------------------------------------------------------------------------------


@pytest.mark.parametrize("page_bytes", ["1", "40", "1048576"])
@pytest.mark.parametrize("kind", ["application/json", "text/plain"])
def test_one_answer_goes_to_the_end(own: NewServer, path: str, page_bytes: str, kind: str) -> None:
    """That holds however many pages the answer needs: some clients ask only once."""
    door = Door(own(TOPICS_STREAMS_PAGE_BYTES=page_bytes).start())
    offsets = [told(door.put(path, kind), 201)]
    for number in range(20):
        offsets.append(told(door.post(path, b'{"n": %d}' % number, kind), 204))
    door.api.delete(path, before_seq=3)
    tags: set[str] = set()
    for first in (3, 7, 19, 20):
        page = door.get(path, f"offset={offsets[first]}")
        wanted = [b'{"n": %d}' % number for number in range(first, 20)]
        joined = b"[%b]" % b",".join(wanted) if kind != "text/plain" else b"".join(wanted)
        assert page.content == joined
        assert told(page, 200) == offsets[-1]
        assert page.headers["stream-up-to-date"] == "true"
        assert page.headers["content-type"] == kind
        assert page.headers["cache-control"] == "public, no-cache"
        tag = page.headers["etag"]
        known = door.get(path, f"offset={offsets[first]}", if_none_match=tag)
        assert (known.status_code, known.content) == (304, b"")
        tags.add(tag)
    assert len(tags) == 4
    door.close(path)
    page = door.get(path, f"offset={offsets[7]}")
    assert page.headers["stream-closed"] == "true"
    assert page.headers["etag"] not in tags
    assert "max-age=60" in page.headers["cache-control"]


def test_a_page_has_so_many_bytes(own: NewServer, path: str) -> None:
    """A live answer is one page with at least one message, however large."""
    door = Door(own(TOPICS_STREAMS_PAGE_BYTES="1").start())
    door.put(path, body=b"first message")
    door.post(path, b"second")
    page = door.get(path, "offset=-1&live=long-poll")
    assert page.content == b"first message"
    assert "stream-up-to-date" not in page.headers
    assert door.get(path, f"offset={told(page, 200)}&live=long-poll").content == b"second"


def test_half_an_answer_is_never_a_whole_one(own: NewServer, path: str) -> None:
    """If messages are lost while it is sent, the connection breaks off."""
    server = own(TOPICS_STREAMS_PAGE_BYTES="65536")
    door = Door(server.start())
    door.put(path)
    for _ in range(300):
        door.post(path, b"x" * 65_536)
    with (
        httpx.Client(base_url=door.api.url, trust_env=False, timeout=DEADLINE_S) as http,
        http.stream("GET", f"{MOUNT}/{path}") as answer,
    ):
        assert answer.status_code == 200
        chunks = answer.iter_raw()
        first = next(chunks)
        door.delete(path)
        with pytest.raises(httpx.RemoteProtocolError):
            sum(map(len, chunks))
    assert first


def test_a_page_that_is_known_is_not_sent_again(door: Door, path: str) -> None:
    door.put(path, body=b"x")
    page = door.get(path)
    tag = page.headers["etag"]
    for sent in (tag, tag.removeprefix("W/"), f'"other", {tag}', "*"):
        known = door.get(path, if_none_match=sent)
        assert (known.status_code, known.content) == (304, b"")
        assert known.headers["etag"] == tag
        assert known.headers["cache-control"] == page.headers["cache-control"]
        assert "content-length" not in known.headers
    for sent in ('"other"', tag[:-2]):
        assert door.get(path, if_none_match=sent).content == b"x"
    tags = [tag, door.get(path, f"offset={BEGIN}").headers["etag"]]
    door.post(path, b"y")
    tags.append(door.get(path).headers["etag"])
    door.close(path)
    tags.append(door.get(path).headers["etag"])
    door.delete(path)
    door.put(path, body=b"x")
    tags.append(door.get(path).headers["etag"])
    assert len(set(tags)) == len(tags)


def test_the_end_is_reported_without_earlier_messages(door: Door, path: str) -> None:
    for name, kind, body, empty in (
        ("text", "text/plain", b"x", b""),
        ("json", "application/json", [1], b"[]"),
    ):
        end = told(door.put(f"{path}/{name}", kind, body), 201)
        answer = door.get(f"{path}/{name}", "offset=now")
        assert (told(answer, 200), answer.content) == (end, empty)
        assert answer.headers["stream-up-to-date"] == "true"
        assert answer.headers["cache-control"] == "no-store"
        assert "etag" not in answer.headers


def test_a_long_poll_waits_for_data(door: Door, path: str) -> None:
    end = told(door.put(path), 201)
    later = threading.Timer(0.2, door.post, (path, b"late"))
    later.start()
    for offset in (end, "now"):
        if offset == "now":
            threading.Timer(0.2, door.post, (path, b"later")).start()
        answer = door.get(path, f"offset={offset}&live=long-poll")
        told(answer, 200)
        assert answer.content == (b"late" if offset == end else b"later")
        assert re.fullmatch(r"[0-9]+", answer.headers["stream-cursor"])
        assert answer.headers["cache-control"] == "no-store"
    there = door.get(path, "offset=-1&live=long-poll")
    assert there.content == b"latelater"


def test_a_long_poll_ends_in_time(own: NewServer, path: str) -> None:
    door = Door(own(TOPICS_STREAMS_LONG_POLL_MS="200").start())
    end = told(door.put(path), 201)
    for offset in (end, "-1", "now"):
        began = time.monotonic()
        answer = door.get(path, f"offset={offset}&live=long-poll")
        assert 0.15 < time.monotonic() - began < 5
        assert told(answer, 204) == end
        assert answer.headers["stream-up-to-date"] == "true"
        assert int(answer.headers["stream-cursor"]) > 0
        assert "stream-closed" not in answer.headers
    door.close(path)
    answer = door.get(path, f"offset={end}&live=long-poll")
    assert told(answer, 204) == end
    assert answer.headers["stream-closed"] == "true"


def test_closing_ends_a_long_poll(door: Door, path: str) -> None:
    end = told(door.put(path), 201)
    threading.Timer(0.2, door.close, (path,)).start()
    began = time.monotonic()
    answer = door.get(path, f"offset={end}&live=long-poll")
    assert time.monotonic() - began < 10
    assert told(answer, 204) == end
    assert answer.headers["stream-closed"] == "true"


def test_a_cursor_never_goes_back(door: Door, path: str) -> None:
    door.put(path, body=b"x")

    def cursor(sent: str) -> int:
        answer = door.get(path, f"offset=-1&live=long-poll&cursor={sent}")
        return int(answer.headers["stream-cursor"])

    current = cursor("")
    assert current == pytest.approx((time.time() - 1_728_432_000) // 20, abs=1)
    assert cursor(str(current - 10)) in (current, current + 1)
    assert current < cursor(str(current)) <= current + 182
    assert cursor(str(current + 1000)) > current + 1000
    for odd in ("abc", "-1", "1.5", "9" * 30):
        assert cursor(odd) in (current, current + 1)


# --- events ---------------------------------------------------------------------------------------


def test_events_of_text_keep_every_line(door: Door, path: str) -> None:
    body = b"one\n two\r\nthree\rfour\n\nevent: control\ndata: {}\n\n"
    door.put(path, "text/plain; charset=utf-8", body)
    with_events = door.follow(path)
    assert with_events.headers["content-type"] == "text/event-stream"
    assert with_events.headers["cache-control"] == "no-cache"
    assert with_events.headers["cross-origin-resource-policy"] == "cross-origin"
    assert "content-length" not in with_events.headers
    assert "stream-sse-data-encoding" not in with_events.headers
    data, control = with_events.pair()
    assert data == "one\n two\nthree\nfour\n\nevent: control\ndata: {}\n\n"
    assert control.keys() == {"streamNextOffset", "streamCursor", "upToDate"}
    assert control["upToDate"] is True
    assert b"data:one\n" in with_events.body
    end = told(door.post(path, b"\xffmore"), 204)
    data, control = with_events.pair()
    assert data == "\N{REPLACEMENT CHARACTER}more"
    assert control["streamNextOffset"] == end
    with_events.close()


def test_events_of_json_are_arrays(door: Door, path: str) -> None:
    door.put(path, "application/json", [{"a": "x\ny"}, [2]])
    events = door.follow(path)
    data, _ = events.pair()
    assert json.loads(data or "") == [{"a": "x\ny"}, [2]]
    door.post(path, b'{\n"b":\r\n3}', "application/json")
    data, _ = events.pair()
    assert json.loads(data or "") == [{"b": 3}]
    events.close()


def test_events_of_bytes_are_base64(door: Door, path: str) -> None:
    door.put(path, "application/x-protobuf", b"\0\xff\n")
    door.post(path, b"\r\n\r\n", "application/x-protobuf")
    events = door.follow(path)
    assert events.headers["stream-sse-data-encoding"] == "base64"
    data, control = events.pair()
    assert base64.b64decode(data or "", validate=True) == b"\0\xff\n\r\n\r\n"
    assert control["upToDate"] is True
    events.close()


def test_events_begin_at_the_end_on_request(door: Door, path: str) -> None:
    end = told(door.put(path, body=b"old"), 201)
    events = door.follow(path, "now", "&cursor=1")
    data, control = events.pair()
    assert (data, control["streamNextOffset"], control["upToDate"]) == (None, end, True)
    door.post(path, b"new")
    assert events.pair()[0] == "new"
    events.close()
    again = door.follow(path, end)
    assert again.pair()[0] == "new"
    again.close()


def resumed(door: Door, path: str, last_id: str | None, offset: str = "-1") -> Events:
    """The events after a browser's reconnect: its first URL again, and its last id."""
    headers = () if last_id is None else (f"Last-Event-ID: {last_id}",)
    return Events(door.api.url, f"{door.mount}/{path}?offset={offset}&live=sse", headers)


@pytest.mark.parametrize("after", ["data", "control"])
def test_a_browser_that_reconnects_hears_nothing_twice(door: Door, path: str, after: str) -> None:
    door.put(path, body=b"a")
    events = resumed(door, path, None)
    first = [events.event(), events.event()]
    assert [event.name for event in first] == ["data", "control"]
    last_id = first[after == "control"].id
    assert last_id == json.loads(first[1].data)["streamNextOffset"]
    events.close()
    door.post(path, b"b")
    events = resumed(door, path, last_id)
    assert events.pair()[0] == "b"
    events.close()


@pytest.mark.parametrize("last_id", ["", "garbage", "-1", "now", "1_2_3"])
def test_an_id_that_is_no_offset_is_ignored(door: Door, path: str, last_id: str) -> None:
    door.put(path, body=b"a")
    events = resumed(door, path, last_id)
    assert events.pair()[0] == "a"
    events.close()


def test_a_browser_that_has_read_a_closed_stream_gets_204(door: Door, path: str) -> None:
    tail = door.put(path, body=b"a", stream_closed="true").headers["stream-next-offset"]
    again = door.get(path, "offset=-1&live=sse", last_event_id=tail)
    assert (again.status_code, again.content) == (204, b"")
    assert again.headers["stream-closed"] == "true"
    # Without an id the request is not a browser's reconnect, so it gets the protocol's own answer.
    events = resumed(door, path, None, offset=tail)
    assert events.pair()[1]["streamClosed"] is True
    assert events.rest() == []


def test_closing_ends_the_events(door: Door, path: str) -> None:
    door.put(path, body=b"x")
    events = door.follow(path)
    events.pair()
    end = told(door.post(path, b"y", stream_closed="true"), 204)
    assert events.pair() == ("y", {"streamNextOffset": end, "streamClosed": True})
    assert events.rest() == []
    assert events.is_whole
    late = door.follow(path, end)
    assert late.pair() == (None, {"streamNextOffset": end, "streamClosed": True})
    assert late.rest() == []


def test_deleting_ends_the_events(door: Door, path: str) -> None:
    door.put(path, body=b"x")
    events = door.follow(path)
    events.pair()
    assert door.delete(path).status_code == 204
    assert events.rest() == []
    assert events.is_whole


def test_events_end_in_time(own: NewServer, path: str) -> None:
    door = Door(own(TOPICS_STREAMS_SSE_MS="300").start())
    door.put(path, body=b"x")
    began = time.monotonic()
    events = door.follow(path)
    assert events.pair()[0] == "x"
    assert events.rest() == []
    assert events.is_whole
    assert 0.25 < time.monotonic() - began < 5
    assert gauges(door.api)[0] == 0


def test_a_stop_ends_events_and_polls(own: NewServer, path: str) -> None:
    server = own()
    door = Door(server.start())
    end = told(door.put(path, body=b"x"), 201)
    events = door.follow(path)
    events.pair()
    answers: list[Told] = []
    sent = threading.Event()

    def note(step: str, _info: object) -> None:
        if step == "http11.send_request_headers.complete":
            sent.set()

    def poll() -> None:
        with httpx.Client(timeout=DEADLINE_S) as client:
            url = f"{door.api.url}{MOUNT}/{path}?offset={end}&live=long-poll"
            answers.append(client.get(url, extensions={"trace": note}))

    polling = threading.Thread(target=poll)
    polling.start()
    assert sent.wait(DEADLINE_S)
    time.sleep(0.3)
    began = time.monotonic()
    server.stop()
    assert time.monotonic() - began < 8
    assert events.rest() == []
    assert events.is_whole
    polling.join(10)
    assert [answer.status_code for answer in answers] == [204]


def test_events_are_counted_among_the_streams(own: NewServer, path: str) -> None:
    door = Door(own(TOPICS_MAX_SSE_CONNECTIONS="1").start())
    door.put(path, body=b"x")
    first = door.follow(path)
    first.pair()
    assert gauges(door.api)[0] == 1
    refused(door.get(path, "offset=-1&live=sse"), 429, "throttled")
    refused(door.get(f"{path}/absent", "offset=-1&live=sse"), 404, "stream_not_found")
    first.close()
    eventually(lambda: gauges(door.api)[0] == 0, "the place is free")
    second = door.follow(path)
    assert second.pair()[0] == "x"
    second.close()


def test_a_slow_reader_gets_everything(own: NewServer, path: str) -> None:
    """The server sends page by page and does not hold unread pages."""
    door = Door(own().start())
    door.put(path, "application/octet-stream")
    body = bytes(range(256)) * 4000
    for _ in range(8):
        told(door.post(path, body, "application/octet-stream"), 204)
    events = Events(door.api.url, f"{MOUNT}/{path}?offset=-1&live=sse", receive_buffer_bytes=4096)
    time.sleep(1)
    received = b""
    while len(received) < 8 * len(body):
        data, _ = events.pair()
        received += base64.b64decode(data or "")
    assert received == body * 8
    events.close()


@pytest.mark.connection(reason="other protocols do not notice clients that read nothing")
def test_a_reader_that_reads_nothing_is_disconnected(own: NewServer, path: str) -> None:
    door = Door(own(TOPICS_WRITE_TIMEOUT_MS="500").start())
    door.put(path, "application/octet-stream")
    for _ in range(12):
        door.post(path, b"x" * 1_000_000, "application/octet-stream")
    events = Events(door.api.url, f"{MOUNT}/{path}?offset=-1&live=sse", receive_buffer_bytes=4096)
    eventually(lambda: gauges(door.api)[0] == 0, "the stream is given up", within_s=20)
    events.close()


# # --- keys
# -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    if URL:
        pytest.skip("needs a server of its own; TOPICS_CONTRACT_URL names a shared one")
    server = Guarded(tmp_path_factory.mktemp("door"))
    yield server
    server.close()


def _ask(guarded: Guarded, caller: str) -> Callable[..., Any]:
    def ask(method: str, path: str, body: object = None, **headers: str) -> Any:
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        return guarded.ask(caller, method, f"{MOUNT}/{path}", body, headers=sent)

    return ask


def test_a_source_is_held_against_the_prefixes_and_has_to_be_readable(guarded: Guarded) -> None:
    everybody = _ask(guarded, "all")
    for name in ("t.source/1", "x.source/1"):
        assert everybody("PUT", name, [1]).status == 201
    inside = {"stream_forked_from": f"{MOUNT}/t.source/1"}
    outside = {"stream_forked_from": f"{MOUNT}/x.source/1"}
    limited = _ask(guarded, "prefix")
    for source in (outside, {"stream_forked_from": f"{MOUNT}/x.absent/1"}):
        refusal = limited("PUT", "t.fork/1", [], **source)
        assert (refusal.status, refusal.code) == (403, "forbidden")
        assert refusal.json()["error"]["detail"]["field"] == "Stream-Forked-From"
    assert limited("PUT", "t.fork/1", [], **inside).status == 201
    refusal = _ask(guarded, "write")("PUT", "t.fork/2", [], **inside)
    assert (refusal.status, refusal.code) == (403, "forbidden")
    assert refusal.json()["error"]["detail"] == {"scopes": ["read"]}
    assert everybody("GET", "t.fork/2").status == 404


def test_a_key_in_the_url_gives_no_access(guarded: Guarded) -> None:
    _ask(guarded, "all")("PUT", "t.token/1", [1])
    for query in ("", "&live=sse", "&live=long-poll"):
        answer = guarded.api.http.get(f"{MOUNT}/t.token/1?offset=-1{query}&token=secret-all")
        refused(answer, 401, "unauthorized")


@pytest.mark.connection(reason="`topics serve` reads its file of keys on SIGHUP")
def test_a_key_that_is_taken_away_ends_its_events(
    own: NewServer, path: str, tmp_path: Path
) -> None:
    file = tmp_path / "keys"
    file.write_text("stays-key\nleaves-key\n")
    file.chmod(0o600)
    server = own(TOPICS_API_KEYS_FILE=str(file))
    api = server.start()
    target = f"{MOUNT}/{path}"
    made = api.http.put(target, headers={"authorization": "Bearer stays-key"})
    assert made.status_code == 201
    stays, leaves = (
        Events(api.url, f"{target}?offset=-1&live=sse", (f"Authorization: Bearer {key}",))
        for key in ("stays-key", "leaves-key")
    )
    file.write_text("stays-key\n")
    assert server.process is not None
    server.process.send_signal(signal.SIGHUP)
    assert [event.name for event in leaves.rest()] == ["control"]
    assert leaves.is_whole
    stays.pair()
    stays.wait(0.3)
    assert not stays.is_whole
    stays.close()


@pytest.mark.connection(reason="`topics serve` reads its file of keys on SIGHUP")
def test_a_key_that_is_taken_away_ends_its_long_polls(own: NewServer, tmp_path: Path) -> None:
    """The key gets no record that comes afterwards, through either API."""
    file = tmp_path / "keys"
    file.write_text("stays-key\nleaves-key\n")
    file.chmod(0o600)
    server = own(TOPICS_API_KEYS_FILE=str(file), TOPICS_STREAMS_LONG_POLL_MS="20000")
    api = server.start()
    name = new_name("door")
    target = f"{MOUNT}/{name}"
    stays = {"authorization": "Bearer stays-key"}
    is_json = {"content-type": "application/json"}
    assert api.http.put(target, headers=stays | is_json).status_code == 201
    jobs = new_name("jobs")
    queue = api.http.put(f"/v0/topics/{jobs}", json={"type": "queue"}, headers=stays)
    assert queue.status_code == 201
    asked = {"from_seq": 0, "wait_ms": 20_000}
    claim = {"node": "w", "wait_ms": 20_000}

    def polls(headers: dict[str, str]) -> list[Future[httpx.Response]]:
        return [
            pool.submit(api.http.get, f"{target}?offset=-1&live=long-poll", headers=headers),
            pool.submit(api.http.post, f"/v0/topics/{name}/diff", json=asked, headers=headers),
            pool.submit(api.http.post, f"/v0/topics/{jobs}/claim", json=claim, headers=headers),
        ]

    with ThreadPoolExecutor(6) as pool:
        kept, ended = polls(stays), polls({"authorization": "Bearer leaves-key"})
        time.sleep(0.5)
        file.write_text("stays-key\n")
        assert server.process is not None
        server.process.send_signal(signal.SIGHUP)
        for poll in ended:
            refused(poll.result(10), 401, "unauthorized")
        for topic in (name, jobs):
            body = {"records": [{"data": 7}]}
            assert api.http.post(f"/v0/topics/{topic}", json=body, headers=stays).status_code == 200
        assert kept[0].result(10).status_code == 200
        assert [record["data"] for record in kept[1].result(10).json()["records"]] == [7]
        assert [job["data"] for job in kept[2].result(10).json()["claimed"]] == [7]


def test_where_there_are_keys_pages_are_kept_by_their_readers_only(guarded: Guarded) -> None:
    everybody = _ask(guarded, "all")
    everybody("PUT", "t.cached/1", [1])
    assert everybody("GET", "t.cached/1").headers["cache-control"] == "private, no-cache"


# # --- CORS, caches, metrics, limits
# ----------------------------------------------------------------


def test_pages_of_a_listed_origin_may_read_all_of_it(own: NewServer, path: str) -> None:
    door = Door(own(TOPICS_CORS_ORIGINS="https://example.com").start())
    door.put(path, body=b"x")
    origin = {"origin": "https://example.com"}
    preflight = door.api.http.options(
        f"{MOUNT}/{path}",
        headers={**origin, "access-control-request-method": "PUT"},
    )
    assert preflight.headers["access-control-allow-origin"] == "https://example.com"
    assert "PUT" in preflight.headers["access-control-allow-methods"]
    allowed = preflight.headers["access-control-allow-headers"].split(", ")
    assert {"if-none-match", "stream-seq", "stream-ttl", "producer-id"} <= set(allowed)
    page = door.get(path, **origin)
    exposed = page.headers["access-control-expose-headers"].split(", ")
    assert {"stream-next-offset", "stream-cursor", "stream-closed", "etag"} <= set(exposed)
    assert set(", ".join(page.headers.get_list("vary")).split(", ")) == {
        "accept-encoding",
        "origin",
    }
    # A cache must not give that origin's page the answer to another client.
    other = door.get(path)
    assert "access-control-allow-origin" not in other.headers
    assert other.headers["vary"] == "accept-encoding, origin"
    events = Events(
        door.api.url,
        f"{MOUNT}/{path}?offset=-1&live=sse",
        ("Origin: https://example.com",),
    )
    assert events.headers["access-control-allow-origin"] == "https://example.com"
    events.close()


def test_requests_are_counted_by_their_route(own: NewServer, path: str) -> None:
    door = Door(own().start())
    door.put(path)
    text = door.api.http.get("/v0/metrics").text
    assert re.search(r'route="/v1/stream/:path"[^\n]*method="PUT"|method="PUT"[^\n]*:path"', text)


def test_the_mount_is_a_setting(own: NewServer, topic: str) -> None:
    server = own(TOPICS_STREAMS_PATH="/streams/of-mine")
    door = Door(server.start(), "/streams/of-mine")
    # The key is not in the place that the description names.
    server.api.is_described = False
    client = httpx.Client(base_url=server.api.url, timeout=30)
    made = client.put(f"/streams/of-mine/{topic}/x", content=b"x")
    assert made.status_code == 201
    assert made.headers["location"] == f"{server.api.url}/streams/of-mine/{topic}/x"
    assert client.get(f"/streams/of-mine/{topic}/x").content == b"x"
    refused(client.get(f"{MOUNT}/{topic}/x"), 404, "not_found")
    assert door.mount == "/streams/of-mine"
    client.close()
    off = own(TOPICS_STREAMS_PATH="off").start()
    with httpx.Client(base_url=off.url, timeout=30) as client:
        refused(client.put(f"{MOUNT}/{topic}", content=b"x"), 404, "not_found")
        assert good(client.get("/v0/topics"))["topics"] == []


@pytest.mark.connection(reason="the second port is one of `topics serve`")
def test_a_second_port_serves_the_same(own: NewServer, path: str) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server: Server = own(TOPICS_STREAMS_PORT=str(port))
    door = Door(server.start())
    door.put(path, body=b"x")
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as client:
        assert client.get(f"{MOUNT}/{path}").content == b"x"
        assert client.get("/v0/ready").status_code == 200
    server.stop()


@pytest.mark.connection(reason="the second port is one of `topics serve`")
def test_a_second_port_that_is_taken_refuses_the_start(own: NewServer) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        said = own(TOPICS_STREAMS_PORT=str(port)).refusal()
    assert f"port {port}" in said
    assert "Traceback" not in said
    for env in ({"TOPICS_STREAMS_PATH": "off"}, {"TOPICS_PORT": str(port)}):
        said = own(TOPICS_STREAMS_PORT=str(port), **env).refusal()
        assert said.startswith(f"TOPICS_STREAMS_PORT={port}: allowed is ")
