"""§11, §12: the limits of a client or a key, the answer at the limit, and how resources are
freed.
"""

from __future__ import annotations

import contextlib
import json
import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from tests.contract.conftest import NewServer
from tests.contract.driver import Api, Json, eventually, good, refused

WITHIN_S = 30.0
GET = b"GET /v0/health HTTP/1.1\r\nHost: localhost\r\n\r\n"
ALPHA, BETA = {"Authorization": "Bearer alpha"}, {"Authorization": "Bearer beta"}


@contextlib.contextmanager
def connected(api: Api, sent: bytes = b"", *, small: bool = False) -> Iterator[socket.socket]:
    """A new socket on which these bytes were sent; `small`: the kernel buffers little for it."""
    parts = urlsplit(api.url)
    with socket.socket() as sock:
        sock.settimeout(WITHIN_S)
        if small:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect((parts.hostname, parts.port or 0))
        if sent:
            sock.sendall(sent)
        yield sock


def rest_of(sock: socket.socket) -> bytes:
    """All bytes until the other side closes."""
    got = b""
    for _ in range(100_000):
        try:
            piece = sock.recv(65536)
        except ConnectionResetError:
            break
        if not piece:
            break
        got += piece
    return got


def is_ended(sock: socket.socket) -> bool:
    """Whether the other side has closed the connection and there is nothing more to read."""
    sock.setblocking(False)
    try:
        return sock.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionResetError:
        return True


def whole_answer(sock: socket.socket) -> bytes:
    """An answer of known length, in however many pieces it comes."""
    got = b""
    while b"\r\n\r\n" not in got:
        got += sock.recv(65536)
    length = re.search(rb"content-length: ([0-9]+)", got)
    assert length is not None
    while len(got.partition(b"\r\n\r\n")[2]) < int(length[1]):
        got += sock.recv(65536)
    return got


def told(got: bytes) -> tuple[int, str]:
    """Status and code of the only answer."""
    head, _, body = got.partition(b"\r\n\r\n")
    assert b"\r\ncontent-type: application/json" in head
    return int(head.split()[1]), json.loads(body)["error"]["code"]


# --- connections --------------------------------------------------------------------------------


@pytest.mark.connection(reason="the bounds of a head")
def test_the_head_of_a_request_is_bounded(own: NewServer) -> None:
    """§12: a head at the limit is accepted; a larger one gets 414 or 431 with the limit."""
    api = own(
        TOPICS_MAX_URL_BYTES="1024", TOPICS_MAX_HEADERS="16", TOPICS_MAX_HEADER_BYTES="1024"
    ).start()
    url, fields = b"/v0/health?".ljust(1024, b"a"), b"Host: localhost\r\n" + b"A: b\r\n" * 15
    full = b"Host: localhost\r\nA: ".ljust(1022, b"b") + b"\r\n"
    for target, lines, status in (
        (url, b"Host: localhost\r\n", 200),
        (url + b"a", b"Host: localhost\r\n", 414),
        (b"/v0/health", fields, 200),
        (b"/v0/health", fields + b"A: b\r\n", 431),
        (b"/v0/health", full, 200),
        (b"/v0/health", full.replace(b"A: ", b"A: b"), 431),
    ):
        raw = b"GET %b HTTP/1.1\r\n%b\r\n" % (target, lines)
        with connected(api, raw) as sock:
            if status == 200:
                assert sock.recv(65536).startswith(b"HTTP/1.1 200 ")
            else:
                got = rest_of(sock)
                assert told(got)[0] == status
                assert b'"limit":"max_' in got


@pytest.mark.connection(reason="time-outs")
def test_a_head_that_comes_too_slowly_is_408(own: NewServer) -> None:
    """Contract §12: a connection that sends no byte is closed without an answer."""
    api = own(TOPICS_HEADER_TIMEOUT_MS="200").start()
    with connected(api, GET[:30]) as slow, connected(api) as silent:
        assert told(rest_of(slow)) == (408, "request_timeout")
        assert rest_of(silent) == b""
    assert good(api.http.get("/v0/health"))["status"] == "ok"


@pytest.mark.connection(reason="time-outs")
def test_a_body_that_comes_too_slowly_is_408(own: NewServer, topic: str) -> None:
    """Contract §12: nothing of the request is stored."""
    api = own(TOPICS_BODY_TIMEOUT_MS="200").start()
    head = (
        f"POST /v0/topics/{topic} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        "Content-Length: 1000\r\n\r\n{"
    )
    with connected(api, head.encode()) as slow:
        assert told(rest_of(slow)) == (408, "request_timeout")
    refused(api.state(topic), 404, "topic_not_found")


@pytest.mark.connection(reason="time-outs")
def test_an_idle_connection_is_closed(own: NewServer) -> None:
    """Contract §12: the server closes a connection some time after its last answer."""
    api = own(TOPICS_KEEP_ALIVE_MS="300").start()
    with connected(api, GET) as sock:
        assert rest_of(sock).startswith(b"HTTP/1.1 200 ")


@pytest.mark.connection(reason="time-outs")
def test_an_unread_answer_times_out(own: NewServer, topic: str) -> None:
    """Contract §12: the server closes the connection of a client that stops reading."""
    api = own(TOPICS_WRITE_TIMEOUT_MS="300").start()
    api.add(topic, *["x" * 900_000] * 7)
    body = b'{"max_batch_bytes":8388608}'
    ask = (
        b"POST /v0/topics/%b/diff HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n" % (topic.encode(), len(body))
    ) + body
    with connected(api, ask * 4, small=True) as sock:
        assert sock.recv(100).startswith(b"HTTP/1.1 200 ")
        eventually(lambda: not _is_known(sock, api), "it is closed", 60)


def _is_known(sock: socket.socket, api: Api) -> bool:
    """Whether the kernel still has the server's side of a connection."""
    own_port = sock.getsockname()[1]
    port = urlsplit(api.url).port
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        local, remote = (field.split(":")[1] for field in line.split()[1:3])
        if (int(local, 16), int(remote, 16)) == (port, own_port):
            return line.split()[3] == "01"
    return False


@pytest.mark.connection(reason="the cap of connections")
def test_connections_are_capped_and_the_idle_make_room(own: NewServer) -> None:
    """§11: the answer is that of a resource cap."""
    api = own(TOPICS_MAX_CONNECTIONS="4").start()
    api.http.close()
    api = Api(api.url)
    with contextlib.ExitStack() as stack:
        busy = [stack.enter_context(connected(api, GET[:20])) for _ in range(4)]
        eventually(lambda: _told_full(api), "a fifth is refused")
        for sock in busy[:2]:
            sock.sendall(GET[20:])
            assert sock.recv(65536).startswith(b"HTTP/1.1 200 ")
        time.sleep(0.2)
        late = stack.enter_context(connected(api, GET))
        assert late.recv(65536).startswith(b"HTTP/1.1 200 ")
        eventually(lambda: any(map(is_ended, busy[:2])), "an idle one made room")
        assert not any(map(is_ended, busy[2:]))


def _told_full(api: Api) -> bool:
    with connected(api) as sock:
        sock.settimeout(1.0)
        try:
            got = rest_of(sock)
        except TimeoutError:
            return False
    assert told(got) == (429, "throttled")
    assert b"\r\nretry-after: 1\r\n" in got
    assert b'"detail":{"limit":"max_connections","max":4}' in got
    return True


# --- keys ---------------------------------------------------------------------------------------


def capped(answer: httpx.Response, limit: str, most: int) -> None:
    detail = refused(answer, 429, "throttled")
    assert detail == {"limit": limit, "max": most}
    assert int(answer.headers["retry-after"]) >= 1


def poll(api: Api, topic: str, key: bytes = b"alpha", wait_ms: int = 30_000) -> bytes:
    """The bytes of a long-poll."""
    body = b'{"from_seq":1,"wait_ms":%d}' % wait_ms
    return (
        b"POST /v0/topics/%b/diff HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Authorization: Bearer %b\r\nContent-Length: %d\r\n\r\n" % (topic.encode(), key, len(body))
    ) + body


def state_of(api: Api, topic: str, key: dict[str, str]) -> httpx.Response:
    return api.http.get(f"/v0/topics/{topic}", headers=key)


def append(api: Api, topic: str, key: dict[str, str], body: object = None) -> httpx.Response:
    sent = {"records": [{"data": 1}]} if body is None else body
    return api.http.post(f"/v0/topics/{topic}", json=sent, headers=key)


@pytest.mark.parametrize("ending", ["answer", "reset", "close", "drain"])
def test_requests_of_one_key_are_capped(own: NewServer, topic: str, ending: str) -> None:
    """§11: a request's slot is free again, however it ends. [11-07, 11-12, 11-15, 11-16]"""
    server = own(TOPICS_API_KEYS="alpha,beta", TOPICS_MAX_INFLIGHT_PER_KEY="2")
    api = server.start()
    good(append(api, topic, ALPHA))
    with contextlib.ExitStack() as stack:
        held = [stack.enter_context(connected(api, poll(api, topic))) for _ in range(2)]
        eventually(lambda: state_of(api, topic, ALPHA).status_code == 429, "two are served")
        capped(state_of(api, topic, ALPHA), "max_inflight_per_key", 2)
        capped(append(api, topic, ALPHA), "max_inflight_per_key", 2)
        capped(api.http.get("/v0/topics", headers=ALPHA), "max_inflight_per_key", 2)
        good(state_of(api, topic, BETA))
        if ending == "drain":
            server.stop()
            assert all(sock.recv(65536).startswith(b"HTTP/1.1 200 ") for sock in held)
            return
        if ending == "answer":
            good(append(api, topic, BETA))
            assert all(sock.recv(65536).startswith(b"HTTP/1.1 200 ") for sock in held)
        for sock in held:
            if ending == "reset":
                linger = b"\1\0\0\0\0\0\0\0"
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            if ending != "answer":
                sock.close()
        eventually(lambda: state_of(api, topic, ALPHA).status_code == 200, "their places are free")
    for _ in range(5):
        good(state_of(api, topic, ALPHA))
        good(append(api, topic, ALPHA))


def test_refused_requests_give_their_places_back(own: NewServer, topic: str) -> None:
    """§11: a slot is free again also when a handler raises or the client disconnects. [11-15]"""
    api = own(TOPICS_API_KEYS="alpha", TOPICS_MAX_INFLIGHT_PER_KEY="1").start()
    good(append(api, topic, ALPHA))
    for _ in range(5):
        refused(append(api, topic, ALPHA, {"records": []}), 400, "invalid_request")
        refused(append(api, topic, ALPHA, {"records": 1}), 400, "invalid_request")
        refused(state_of(api, "absent", ALPHA), 404, "topic_not_found")
        refused(api.http.get(f"/v0/topics/{topic}/work", headers=ALPHA), 400, "invalid_request")
        with connected(api, poll(api, topic)[:-5]):
            eventually(lambda: state_of(api, topic, ALPHA).status_code == 429, "it has a place")
        eventually(lambda: state_of(api, topic, ALPHA).status_code == 200, "its place is free")
    good(append(api, topic, ALPHA, {"records": [{"data": 1}], "config": {}}))
    good(state_of(api, topic, ALPHA))


def test_no_cap_is_no_cap(own: NewServer, topic: str) -> None:
    """Contract §11: a limit of 0 is no limit. [11-01]"""
    api = own(
        TOPICS_API_KEYS="alpha",
        TOPICS_MAX_INFLIGHT_PER_KEY="0",
        TOPICS_MAX_SSE_CONNECTIONS_PER_KEY="0",
        TOPICS_MAX_CONNECTIONS="0",
    ).start()
    good(append(api, topic, ALPHA))
    with contextlib.ExitStack() as stack:
        for _ in range(20):
            stack.enter_context(connected(api, poll(api, topic)))
        good(state_of(api, topic, ALPHA))


def stream(wid: str, key: bytes = b"alpha") -> bytes:
    return (b"GET /v0/watch/%b HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer %b\r\n\r\n") % (
        wid.encode(),
        key,
    )


def session(api: Api, topic: str, key: dict[str, str]) -> str:
    answer = good(api.http.post("/v0/watch", json={"topics": {topic: {}}}, headers=key))
    return str(answer["wid"])


def opened(sock: socket.socket) -> bool:
    return sock.recv(15).startswith(b"HTTP/1.1 200 OK")


def test_streams_of_one_key_are_capped(own: NewServer, topic: str) -> None:
    """§11: streams take no slot of the key's requests, and free their own. [11-06, 11-15, 11-16]"""
    api = own(
        TOPICS_API_KEYS="alpha,beta",
        TOPICS_MAX_SSE_CONNECTIONS_PER_KEY="2",
        TOPICS_MAX_INFLIGHT_PER_KEY="1",
    ).start()
    good(append(api, topic, ALPHA))
    wids = [session(api, topic, ALPHA) for _ in range(3)]
    other = session(api, topic, BETA)
    with contextlib.ExitStack() as stack:
        held = [stack.enter_context(connected(api, stream(wid))) for wid in wids[:2]]
        assert all(map(opened, held))
        with connected(api, stream(wids[2])) as third:
            got = whole_answer(third)
            assert told(got) == (429, "throttled")
            assert b"\r\nretry-after: 1\r\n" in got
            assert b'"detail":{"limit":"max_sse_connections_per_key","max":2}' in got
        good(state_of(api, topic, ALPHA))
        with connected(api, stream(other, b"beta")) as theirs:
            assert opened(theirs)
        with connected(api, stream(wids[0])) as again:
            assert opened(again), "who takes a session over takes its place over"
            held[1].close()
            eventually(lambda: _opens(api, wids[2]), "a place is free")


def _opens(api: Api, wid: str) -> bool:
    with connected(api, stream(wid)) as sock:
        return opened(sock)


def test_without_keys_nothing_is_counted_by_key(own: NewServer, topic: str) -> None:
    """Contract §11 [11-16]"""
    api = own(TOPICS_MAX_INFLIGHT_PER_KEY="1", TOPICS_MAX_SSE_CONNECTIONS_PER_KEY="1").start()
    api.add(topic, 1)
    wids = [session(api, topic, {}) for _ in range(3)]
    with contextlib.ExitStack() as stack:
        for wid in wids:
            assert opened(stack.enter_context(connected(api, stream(wid))))
        for _ in range(3):
            stack.enter_context(connected(api, poll(api, topic)))
        good(api.state(topic))


def test_topics_and_sessions_of_a_prefix_can_be_capped(own: NewServer) -> None:
    """Ours: the cap holds for each prefix of a key, whoever creates the topics, and over restarts;
    deleted topics make room.
    """
    server = own(
        TOPICS_API_KEYS="alpha::one.|two.,beta::one.,root",
        TOPICS_MAX_TOPICS_PER_PREFIX="2",
        TOPICS_MAX_WATCH_SESSIONS_PER_PREFIX="2",
    )
    api = server.start()
    root = {"Authorization": "Bearer root"}

    def put(name: str, key: dict[str, str], **config: object) -> httpx.Response:
        return api.http.put(f"/v0/topics/{name}", json=config, headers=key)

    def watch(name: str, key: dict[str, str]) -> httpx.Response:
        return api.http.post("/v0/watch", json={"topics": {name: {}}}, headers=key)

    def capped_by_prefix(answer: httpx.Response, limit: str) -> None:
        error = refused(answer, 429, "throttled")
        assert error == {"limit": limit, "max": 2, "prefix": "one."}
        assert "retry-after" in answer.headers

    assert put("one.a", ALPHA).status_code == 201
    assert append(api, "one.b", BETA).status_code == 201
    for answer in (
        put("one.c", ALPHA),
        append(api, "one.c", BETA),
        put("one.c", root),
        api.http.put("/v0/routers/one.r", json={"source": "one.a", "dest": "one.c"}, headers=BETA),
    ):
        capped_by_prefix(answer, "max_topics_per_prefix")
    assert put("one.a", ALPHA, priority=5).status_code == 200, "it is there already"
    for name in ("two.a", "two.b"):
        assert put(name, ALPHA).status_code == 201
    for name in ("free.a", "free.b", "free.c"):
        assert put(name, root).status_code == 201
    good(watch("one.a", ALPHA))
    good(watch("one.a", BETA))
    capped_by_prefix(watch("one.a", BETA), "max_watch_sessions_per_prefix")
    for _ in range(3):
        good(watch("one.a", root))
    server.stop()
    api = server.start()
    capped_by_prefix(put("one.c", ALPHA), "max_topics_per_prefix")
    capped_by_prefix(watch("one.a", ALPHA), "max_watch_sessions_per_prefix")
    good(api.http.delete("/v0/topics/one.a", headers=ALPHA))
    assert put("one.c", BETA).status_code == 201


def test_a_dead_letter_topic_that_may_not_be_made_keeps_its_jobs(own: NewServer) -> None:
    """Ours: topics that the server creates itself count for a prefix, too; no job is lost."""
    server = own(TOPICS_API_KEYS="alpha::one.", TOPICS_MAX_TOPICS_PER_PREFIX="2")
    api = server.start()
    config = {"type": "queue", "dead_letter": "one.dead", "max_deliveries": 1}
    for name, wanted in (("one.jobs", config), ("one.other", {})):
        put = api.http.put(f"/v0/topics/{name}", json=wanted, headers=ALPHA)
        assert put.status_code == 201

    def post(path: str, **body: object) -> Json:
        answer: Json = good(api.http.post(f"/v0/topics/{path}", json=body, headers=ALPHA))
        return answer

    post("one.jobs", records=[{"data": "kept", "tag": "t"}])
    assert len(post("one.jobs/claim", node="n")["claimed"]) == 1
    post("one.jobs/nack", node="n", seqs=[1])
    for _ in range(2):
        # A waiting claim makes the server try the move again each second, and does not get the job.
        assert post("one.jobs/claim", node="n", wait_ms=1500)["claimed"] == []
    topics = good(api.http.get("/v0/topics", headers=ALPHA))["topics"]
    assert {topic["topic"]: topic["count"] for topic in topics} == {"one.jobs": 1, "one.other": 0}
    assert server.log.read_text().count('the prefix "one." has reached its limit of topics') == 1
    # A restart changes nothing, and freed room is used.
    server.stop()
    api = server.start()
    assert post("one.jobs/claim", node="n", wait_ms=500)["claimed"] == []
    good(api.http.delete("/v0/topics/one.other", headers=ALPHA))
    for _ in range(100):
        assert post("one.jobs/claim", node="n")["claimed"] == []
        dead = api.http.post("/v0/topics/one.dead/diff", json={}, headers=ALPHA)
        if dead.status_code == 200 and dead.json()["records"]:
            break
        time.sleep(0.1)
    (record,) = good(dead)["records"]
    assert record["data"] == "kept"
    assert good(api.http.get("/v0/topics/one.jobs", headers=ALPHA))["count"] == 0
