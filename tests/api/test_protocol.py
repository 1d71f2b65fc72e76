"""The ASGI adapter: routes, methods, names, media types, encodings, sizes, and clients that
disconnect.
"""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import json
import re
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.api.conftest import Api
from topics_server.api import request_body
from topics_server.api.routes import build_routes
from topics_server.api.routing import Route
from topics_server.http import content_encoding
from topics_server.values.errors import Code, DiskFull, ReadOnly, TopicsError
from topics_server.values.limits import CONTROL_BODY_BYTES_MAX, INFLATED_APPENDS_MAX

pytestmark = pytest.mark.anyio

JSON = {"content-type": "application/json"}
ONE = b'{"records":[{"data":1}]}'
APPENDS = [
    ("POST", "/v0/topics/{topic}"),
    ("POST", "/v1/stream/{path}"),
    ("PUT", "/v1/stream/{path}"),
]
CONTROL_AND_DATA = [
    ("PUT", "/v0/topics/jobs", b"{}"),
    ("GET", "/v0/topics/jobs", b""),
    ("DELETE", "/v0/topics/jobs", b""),
    ("POST", "/v0/topics/jobs", ONE),
    ("POST", "/v0/topics/jobs/diff", b"{}"),
    ("POST", "/v0/topics/jobs/delete", b'{"before_seq":1}'),
    ("GET", "/v0/topics", b""),
]


def code_of(answer: Any) -> str:
    error = answer.json()["error"]
    assert set(error) <= {"code", "message", "detail"}
    assert isinstance(error["message"], str)
    assert set(answer.json()) <= {"error", "performance"}
    return str(error["code"])


# --- routes and names ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "path",
    [
        *(
            "/index.html",
            "/v0",
            "/v0/",
            "/v0/nothing",
            "/v0/topics/",
            "/v0/topics/a/",
            "/v0/topics/a/b",
        ),
        *("/v0/topics/a/diff/", "/v0/topics/a/diff/x", "/v1/topics/a", "/v0%2Ftopics"),
        *("/v0/topics/a%2Fdiff/x", "/healthz/", "/v0/health/x", "//v0/topics"),
    ],
)
@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "DELETE", "OPTIONS", "BREW"])
async def test_an_unknown_path_is_404_whatever_the_method(api: Api, path: str, method: str) -> None:
    answer = await api.http.request(method, f"http://topics{path}")
    assert answer.status_code == 404
    assert code_of(answer) == "not_found"


@pytest.mark.parametrize(("method", "path", "body"), CONTROL_AND_DATA[:-1])
@pytest.mark.parametrize(
    "name", ["a%2Fb", "%2e%2e", "-a", "a%20b", "a+b", "%C3%A4", "%ff", "a%00", "a%0A", "a" * 256]
)
async def test_a_name_outside_the_charset_is_400_on_every_endpoint(
    api: Api, method: str, path: str, body: bytes, name: str
) -> None:
    target = f"http://topics{path.replace('jobs', name)}"
    answer = await api.http.request(method, target, content=body, headers=JSON)
    assert answer.status_code == 400
    assert code_of(answer) == "invalid_request"
    assert api.store.topics == {}


async def test_an_escaped_name_is_the_name(api: Api) -> None:
    assert (await api.http.put("http://topics/v0/topics/render%3At%2e1")).status_code == 201
    assert set(api.store.topics) == {"render:t.1"}


@pytest.mark.parametrize("method", ["LINK", "TRACE", "BREW", "get"])
async def test_a_known_path_with_another_method_is_405_with_allow(api: Api, method: str) -> None:
    scope = {"type": "http", "method": method, "path": "/v0/topics/a", "headers": []}
    started, body = await speak(api, scope | {"raw_path": b"/v0/topics/a", "query_string": b""})
    assert started["status"] == 405
    headers = dict(started["headers"])
    assert headers[b"allow"] == b"DELETE, GET, HEAD, OPTIONS, PATCH, POST, PUT"
    assert json.loads(body)["error"]["code"] == "method_not_allowed"


async def test_options_is_204_with_allow(api: Api) -> None:
    answer = await api.http.options("/v0/topics/a/diff")
    assert (answer.status_code, answer.content) == (204, b"")
    assert answer.headers["allow"] == "OPTIONS, POST"
    assert "content-length" not in answer.headers


async def test_head_has_get_s_headers_and_no_body(api: Api) -> None:
    await api.append("jobs", 1)
    got = await api.http.get("/v0/topics/jobs?touch=false")
    head = await api.http.head("/v0/topics/jobs?touch=false")
    assert head.content == b""
    assert head.status_code == 200
    assert head.headers["content-type"] == got.headers["content-type"]
    assert int(head.headers["content-length"]) > 100
    assert (await api.http.head("/v0/topics/absent")).status_code == 404


# --- media types, encodings, sizes --------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "path", "body"), [row for row in CONTROL_AND_DATA if row[0][0] == "P"]
)
@pytest.mark.parametrize("media", [None, "text/plain", "application/x-www-form-urlencoded", ""])
async def test_a_body_that_is_not_declared_json_is_415_and_changes_nothing(
    api: Api, method: str, path: str, body: bytes, media: str | None
) -> None:
    headers = {} if media is None else {"content-type": media}
    answer = await api.http.request(method, path, content=body, headers=headers)
    assert answer.status_code == 415
    assert code_of(answer) == "unsupported_media_type"
    assert "-H 'content-type: application/json'" in answer.json()["error"]["message"]
    assert api.store.topics == {}


async def test_a_body_of_unannounced_length_needs_its_type_too(api: Api) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        yield ONE[:10]
        yield ONE[10:]

    refused = await api.http.post("/v0/topics/jobs", content=chunks())
    assert refused.status_code == 415
    taken = await api.http.post("/v0/topics/jobs", content=chunks(), headers=JSON)
    assert taken.status_code == 201


async def test_a_body_without_any_announcement_needs_its_type_too(api: Api) -> None:
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v0/topics/jobs",
        "raw_path": b"/v0/topics/jobs",
        "query_string": b"",
        "headers": [],
    }
    started, _ = await speak(api, scope, ONE)
    assert started["status"] == 415


@pytest.mark.parametrize("encoding", ["gzip", "GZIP", "x-gzip"])
async def test_a_gzip_body_is_read(api: Api, encoding: str) -> None:
    headers = JSON | {"content-encoding": encoding}
    answer = await api.http.post("/v0/topics/jobs", content=gzip.compress(ONE), headers=headers)
    assert answer.status_code == 201
    assert api.store.topics["jobs"].records[0].data == b"1"


async def test_an_identity_encoding_is_none(api: Api) -> None:
    headers = JSON | {"content-encoding": "identity"}
    answer = await api.http.post("/v0/topics/jobs", content=ONE, headers=headers)
    assert answer.status_code == 201


async def test_a_large_response_is_packed_whole(api: Api) -> None:
    api.settings.max_body_bytes = 10_000_000
    data = ["x" * 10_000 + str(number) for number in range(50)]
    await api.append("jobs", *data)
    answer = await api.http.post(
        "/v0/topics/jobs/diff", json={}, headers={"accept-encoding": "gzip"}
    )
    assert int(answer.headers["content-length"]) < 100_000
    assert [record["data"] for record in answer.json()["records"]] == data


async def test_a_large_gzip_body_is_read_off_the_loop(api: Api) -> None:
    api.settings.max_body_bytes = 10_000_000
    datas = [hashlib.sha256(b"%d" % number).hexdigest() for number in range(9_000)]
    body = json.dumps({"records": [{"data": data} for data in datas]}).encode()
    packed = gzip.compress(body, 1)
    assert len(packed) > 65_536
    headers = JSON | {"content-encoding": "gzip"}
    answer = await api.http.post("/v0/topics/jobs", content=packed, headers=headers)
    assert answer.json()["count"] == len(datas)


@pytest.mark.parametrize("encoding", ["br", "deflate", "gzip, gzip", "zstd"])
async def test_another_encoding_is_415(api: Api, encoding: str) -> None:
    headers = JSON | {"content-encoding": encoding}
    answer = await api.http.post("/v0/topics/jobs", content=ONE, headers=headers)
    assert answer.status_code == 415
    assert code_of(answer) == "unsupported_media_type"


async def test_bytes_that_are_not_gzip_are_400(api: Api) -> None:
    headers = JSON | {"content-encoding": "gzip"}
    answer = await api.http.post("/v0/topics/jobs", content=ONE, headers=headers)
    assert answer.status_code == 400
    assert code_of(answer) == "invalid_request"


async def test_a_small_gzip_body_is_inflated_off_the_loop_if_it_is_large_then(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    api.settings.max_body_bytes = 10_000_000
    on_loop: list[int] = []

    def inflated(packed: bytes, max_bytes: int) -> bytes:
        whole = content_encoding.inflate(packed, max_bytes)
        if threading.current_thread() is threading.main_thread():
            on_loop.append(len(whole))
        return whole

    monkeypatch.setattr(request_body, "inflate", inflated)
    headers = JSON | {"content-encoding": "gzip"}
    body = b'{"records":[{"data":"%b"}]}' % (b"a" * 900_000)
    packed = gzip.compress(body)
    assert len(packed) < 4_096
    answer = await api.http.post("/v0/topics/jobs", content=packed, headers=headers)
    assert answer.status_code == 201
    assert not on_loop
    assert content_encoding.inflate_some(packed, 65_536) is None
    assert content_encoding.inflate_some(gzip.compress(ONE), 65_536) == ONE


async def test_few_bodies_that_inflate_to_much_are_held_at_once(api: Api) -> None:
    api.settings.max_body_bytes = 10_000_000
    body = b'{"records":[{"data":1}]}'.ljust(CONTROL_BODY_BYTES_MAX + 1)
    packed = gzip.compress(body)
    headers = JSON | {"content-encoding": "gzip"}
    for _ in range(INFLATED_APPENDS_MAX):
        await api.state.inflated.acquire()
    waiting = asyncio.ensure_future(
        api.http.post("/v0/topics/jobs", content=packed, headers=headers)
    )
    # A body does not wait if it inflates to no more bytes than other requests may have, or if it is
    # no append.
    small = gzip.compress(ONE.ljust(CONTROL_BODY_BYTES_MAX))
    answer = await api.http.post("/v0/topics/jobs", content=small, headers=headers)
    assert answer.status_code == 201
    answer = await api.http.post("/v0/topics/jobs/diff", content=packed, headers=headers)
    assert answer.status_code == 413
    assert not waiting.done()
    api.state.inflated.release()
    assert (await waiting).status_code in (200, 201)
    # Its slot is free again: the next request gets it.
    for _ in range(2):
        answer = await api.http.post("/v0/topics/jobs", content=packed, headers=headers)
        assert answer.status_code in (200, 201)


async def test_a_gzip_bomb_is_413(api: Api) -> None:
    headers = JSON | {"content-encoding": "gzip"}
    bomb = gzip.compress(b" " * 50_000_000)
    assert len(bomb) < api.settings.max_body_bytes
    answer = await api.http.post("/v0/topics/jobs", content=bomb, headers=headers)
    assert answer.status_code == 413
    assert code_of(answer) == "payload_too_large"


async def test_a_declared_length_over_the_limit_is_413_without_reading(api: Api) -> None:
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v0/topics/jobs",
        "raw_path": b"/v0/topics/jobs",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json"), (b"content-length", b"100001")],
    }
    started, _ = await speak(api, scope, None)
    assert started["status"] == 413


@pytest.mark.parametrize(("length", "status"), [(b"9" * 5000, 413), (b"-1", 400), (b"x", 400)])
async def test_an_absurd_declared_length_is_refused(api: Api, length: bytes, status: int) -> None:
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v0/topics/jobs",
        "raw_path": b"/v0/topics/jobs",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json"), (b"content-length", length)],
    }
    started, _ = await speak(api, scope, ONE)
    assert started["status"] == status


async def test_a_streamed_body_is_counted_and_cut(api: Api) -> None:
    sent = 0

    async def chunks() -> AsyncIterator[bytes]:
        nonlocal sent
        for _ in range(1000):
            sent += 10_000
            yield b" " * 10_000

    answer = await api.http.post("/v0/topics/jobs", content=chunks(), headers=JSON)
    assert answer.status_code == 413
    assert sent < 200_000


async def test_a_body_of_exactly_the_limit_is_taken(api: Api) -> None:
    body = ONE.ljust(api.settings.max_body_bytes)
    assert (await api.http.post("/v0/topics/a", content=body, headers=JSON)).status_code == 201
    body = ONE.ljust(api.settings.max_body_bytes + 1)
    assert (await api.http.post("/v0/topics/a", content=body, headers=JSON)).status_code == 413


BODIED = [
    pytest.param(method, route, id=f"{method} {route.template}")
    for route in build_routes().table
    for method in route.handlers
    if method in ("POST", "PUT", "PATCH")
]


@pytest.mark.parametrize(("method", "route"), BODIED)
async def test_only_appends_accept_a_large_body(api: Api, method: str, route: Route) -> None:
    api.settings.max_body_bytes = 10_000_000
    path = re.sub(r"\{\w+\}", "jobs", route.template)
    is_append = (method, route.template) in APPENDS
    assert (method in route.appends) == is_append

    async def status_of(most: int, body: bytes | None) -> object:
        length = b"%d" % (most if body is None else len(body))
        headers = [(b"content-type", b"application/json"), (b"content-length", length)]
        if body is not None and body[:2] == b"\x1f\x8b":
            headers.append((b"content-encoding", b"gzip"))
        scope = {
            "type": "http",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "headers": headers,
        }
        started, _ = await speak(api, scope, body)
        return started["status"]

    most = api.settings.max_body_bytes if is_append else CONTROL_BODY_BYTES_MAX
    # The server refuses the first body by its declared length before it reads a byte, and the
    # second after inflation, whatever length was declared.
    assert await status_of(most + 1, None) == 413
    assert await status_of(most, gzip.compress(b" " * (most + 1))) == 413
    assert await status_of(most, b"[".ljust(most)) != 413


@pytest.mark.parametrize("count", [10, 5000])
async def test_a_response_is_gzip_only_on_request(api: Api, count: int) -> None:
    await api.append("jobs", *["x" * 15] * (count // 10))
    plain = await api.diff("jobs")
    assert "content-encoding" not in plain.headers
    await api.append("jobs", *["y" * 15] * 10)
    for accept, packed in (("gzip", True), ("br, GZIP;q=0.5", True), ("gzip;q=0", False)):
        answer = await api.http.post(
            "/v0/topics/jobs/diff", json={"limit": 1000}, headers={"accept-encoding": accept}
        )
        assert (answer.headers.get("content-encoding") == "gzip") is packed
        assert ("vary" in answer.headers) is packed
        assert answer.json()["caught_up"] is True


# --- phases and failures ------------------------------------------------------------------


@pytest.mark.parametrize(("method", "path", "body"), CONTROL_AND_DATA)
async def test_while_replaying_every_call_is_503_with_progress(
    api: Api, method: str, path: str, body: bytes
) -> None:
    api.state.phase = "replaying"
    api.state.store = None
    answer = await api.http.request(method, path, content=body, headers=JSON)
    assert answer.status_code == 503
    assert code_of(answer) == "not_ready"
    assert answer.json()["error"]["detail"] == {"replay_progress": 0.5}
    assert int(answer.headers["retry-after"]) >= 1


@pytest.mark.parametrize(("method", "path", "body"), CONTROL_AND_DATA)
async def test_while_draining_every_call_is_503(
    api: Api, method: str, path: str, body: bytes
) -> None:
    api.state.phase = "draining"
    answer = await api.http.request(method, path, content=body, headers=JSON)
    assert answer.status_code == 503
    assert code_of(answer) == "shutting_down"
    assert int(answer.headers["retry-after"]) >= 1


@pytest.mark.parametrize(
    ("trouble", "status", "code", "detail"),
    [
        (ReadOnly("sync failed"), 503, "storage_read_only", None),
        (DiskFull("ENOSPC"), 429, "throttled", {"limit": "disk"}),
        (
            TopicsError(Code.THROTTLED, "full", {"limit": "max_topics", "max": 5}),
            *(429, "throttled", {"limit": "max_topics", "max": 5}),
        ),
        (TopicsError(Code.TOPIC_FULL, "full"), 422, "topic_full", None),
    ],
)
async def test_refusals_of_the_store_become_their_status(
    api: Api, trouble: Exception, status: int, code: str, detail: object
) -> None:
    api.store.trouble = trouble
    answer = await api.append("jobs", 1)
    assert answer.status_code == status
    assert code_of(answer) == code
    assert answer.json()["error"].get("detail") == detail
    assert ("retry-after" in answer.headers) == (status in (429, 503))


async def test_a_defect_is_500_in_the_envelope_and_its_trace_is_logged(
    api: Api, caplog: pytest.LogCaptureFixture
) -> None:
    api.store.trouble = ZeroDivisionError("secret of the inside")
    answer = await api.append("jobs", 1)
    assert answer.status_code == 500
    assert code_of(answer) == "internal"
    assert "secret" not in answer.text
    assert "ZeroDivisionError" in caplog.text
    assert (await api.append("jobs", 1)).status_code == 201


# --- clients that disconnect --------------------------------------------------------------


async def speak(
    api: Api, scope: dict[str, Any], body: bytes | None = b""
) -> tuple[dict[str, Any], bytes]:
    """Send one request as ASGI messages; a body of None fails the test when it is read."""
    sent: list[dict[str, Any]] = []
    messages: list[dict[str, Any]] = []
    if body is not None:
        messages.append({"type": "http.request", "body": body, "more_body": False})

    async def receive() -> dict[str, Any]:
        assert messages, "nothing more to read"
        return messages.pop(0)

    async def send(message: Any) -> None:
        sent.append(dict(message))

    await api.app(scope, receive, send)
    assert [message["type"] for message in sent] == ["http.response.start", "http.response.body"]
    return sent[0], sent[1]["body"]


class LeavingClient:
    """Sends one request and disconnects on command."""

    def __init__(self, api: Api, path: str, body: bytes, more_body: bool = False) -> None:
        self.leave = asyncio.Event()
        self.sent: list[Any] = []
        self._first: dict[str, Any] | None = {
            "type": "http.request",
            "body": body,
            "more_body": more_body,
        }
        scope = {
            "type": "http",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "headers": [(b"content-type", b"application/json"), (b"transfer-encoding", b"chunked")],
        }
        self.serving = asyncio.ensure_future(self._serve(api, scope))

    async def _serve(self, api: Api, scope: dict[str, Any]) -> None:
        await api.app(scope, self._receive, self._send)

    async def _receive(self) -> dict[str, Any]:
        if self._first is not None:
            first, self._first = self._first, None
            return first
        await self.leave.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        self.sent.append(message)


async def test_an_append_goes_on_when_its_client_leaves(api: Api) -> None:
    api.store.gate.clear()
    client = LeavingClient(api, "/v0/topics/jobs", ONE)
    await asyncio.sleep(0.01)
    client.leave.set()
    await asyncio.sleep(0.01)
    assert not client.serving.done()
    api.store.gate.set()
    await asyncio.wait_for(client.serving, 10)
    assert api.store.topics["jobs"].head_seq == 1


async def test_a_long_poll_ends_quietly_when_its_client_leaves(api: Api) -> None:
    await api.append("jobs", 1)
    client = LeavingClient(api, "/v0/topics/jobs/diff", b'{"from_seq":1,"wait_ms":30000}')
    await asyncio.sleep(0.01)
    assert not client.serving.done()
    client.leave.set()
    await asyncio.wait_for(client.serving, 10)
    await asyncio.sleep(0.01)
    assert client.sent == []
    assert api.store.reads_cancelled == 1


async def test_a_client_that_leaves_in_its_body_appends_nothing(api: Api) -> None:
    client = LeavingClient(api, "/v0/topics/jobs", ONE, more_body=True)
    client.leave.set()
    await asyncio.wait_for(client.serving, 10)
    assert client.sent == []
    assert api.store.topics == {}


@pytest.mark.parametrize("path", ["/v0/wss", "/", "/v0/topics/jobs", "/v0/ws/"])
async def test_a_websocket_elsewhere_is_turned_away(api: Api, path: str) -> None:
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        return {"type": "websocket.connect"}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "websocket", "path": path, "headers": []}
    await api.app(scope, receive, send)
    assert [message["type"] for message in sent] == ["websocket.close"]
    sent.clear()
    await api.app(scope | {"extensions": {"websocket.http.response": {}}}, receive, send)
    start, body = sent
    assert (start["type"], start["status"]) == ("websocket.http.response.start", 404)
    assert dict(start["headers"])[b"content-length"] == b"%d" % len(body["body"])
    assert json.loads(body["body"])["error"]["code"] == "not_found"


async def test_the_lifespan_is_acknowledged(api: Api) -> None:
    messages = [{"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}]
    sent: list[str] = []

    async def receive() -> dict[str, Any]:
        return messages.pop(0)

    async def send(message: Any) -> None:
        sent.append(message["type"])

    await api.app({"type": "lifespan"}, receive, send)
    assert sent == ["lifespan.startup.complete", "lifespan.shutdown.complete"]
