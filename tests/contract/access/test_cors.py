"""Pages of other origins may call only if their exact origin is listed; none
is listed by default.

`TOPICS_CORS_ORIGINS` for HTTP, preflights and event streams; the `Origin` rule of `/v0/ws`.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.contract.conftest import URL, new_name
from tests.contract.driver import Api, RawResponse, Server, eventually, refused
from tests.contract.streams.streams import RawWs, connected, gauges
from tests.contract.watch.subscriptions import Clients

LISTED = ["http://pages.example", "https://app.example:8443"]
OTHERS = [
    "http://other.example",
    "https://pages.example",
    "http://pages.example:8080",
    "http://pages.example.evil",
    "http://evil-pages.example",
    "http://sub.pages.example",
    "http://pages.example/",
    "http://pages.example, https://app.example:8443",
    "https://app.example",
    "null",
    "*",
    "",
    "pages.example",
    "file://",
]
MEDIA = "Content-Type: application/json"


@pytest.fixture(scope="module")
def open_api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    """A server that lists two origins."""
    if URL:
        pytest.skip("needs a server of its own; TOPICS_CONTRACT_URL names a shared one")
    env = {"TOPICS_CORS_ORIGINS": ",".join(LISTED)}
    server = Server(tmp_path_factory.mktemp("cors"), env)
    yield server.start()
    server.stop()


def _cors(answer: RawResponse) -> dict[str, str]:
    return {k: v for k, v in answer.headers.items() if k.startswith("access-control-")}


def _preflight(api: Api, target: str, origin: str, method: str, *headers: str) -> RawResponse:
    asked = [f"Origin: {origin}", f"Access-Control-Request-Method: {method}"]
    if headers:
        asked.append(f"Access-Control-Request-Headers: {', '.join(headers)}")
    return api.raw("OPTIONS", target, headers=asked)


def _words(text: str) -> set[str]:
    return {word.strip().lower() for word in text.split(",")}


@pytest.mark.parametrize("origin", LISTED)
def test_a_listed_origin_may_read_answers_and_errors(open_api: Api, origin: str) -> None:
    """A page may read errors as well as successes, so that it can see the reason. [S-87]"""
    name = new_name("cors")
    body = b'{"records":[{"data":1}]}'
    asked = [
        open_api.raw("POST", f"/v0/topics/{name}", body, [MEDIA, f"Origin: {origin}"]),
        open_api.raw("GET", f"/v0/topics/{name}", headers=[f"Origin: {origin}"]),
        open_api.raw("GET", "/v0/topics/never-made", headers=[f"Origin: {origin}"]),
        open_api.raw("POST", f"/v0/topics/{name}", b"{", [MEDIA, f"Origin: {origin}"]),
        open_api.raw("GET", "/v0/nothing", headers=[f"Origin: {origin}"]),
        open_api.raw("TRACE", f"/v0/topics/{name}", b"", [f"Origin: {origin}"]),
        open_api.raw("GET", "/v0/health", headers=[f"Origin: {origin}"]),
        open_api.raw("GET", "/v0/watch/wid_none", headers=[f"Origin: {origin}"]),
    ]
    assert [answer.status for answer in asked] == [201, 200, 404, 400, 404, 405, 200, 404]
    for answer in asked:
        assert answer.headers["access-control-allow-origin"] == origin
        assert "origin" in _words(answer.headers["vary"])
        assert "access-control-allow-credentials" not in answer.headers


@pytest.mark.parametrize("origin", OTHERS)
def test_any_other_origin_gets_no_leave(open_api: Api, origin: str) -> None:
    """Origins must match exactly; a read gets the usual answer, and the browser withholds it
    from the page. [S-87]

    Requests that change something are refused: `test_callers.py`.
    """
    answer = open_api.raw("GET", "/v0/topics", headers=[f"Origin: {origin}"])
    assert answer.status == 200
    assert _cors(answer) == {}
    preflight = _preflight(open_api, "/v0/topics/x", origin, "POST", "content-type")
    assert _cors(preflight) == {}


def test_without_an_origin_nothing_is_added(open_api: Api) -> None:
    """Settled rules of the contract [S-87]"""
    assert _cors(open_api.raw("GET", "/v0/topics")) == {}


@pytest.mark.parametrize(
    ("target", "method", "headers"),
    [
        ("/v0/topics/t", "POST", ("content-type",)),
        ("/v0/topics/t", "POST", ("content-type", "idempotency-key")),
        ("/v0/topics/t", "PUT", ("Content-Type",)),
        ("/v0/topics/t", "DELETE", ()),
        ("/v0/topics/t/diff", "POST", ("content-type",)),
        ("/v0/watch", "POST", ("content-type",)),
        ("/v0/watch/wid_x", "GET", ("last-event-id",)),
    ],
)
def test_a_preflight_of_a_listed_origin_is_answered(
    open_api: Api, target: str, method: str, headers: tuple[str, ...]
) -> None:
    """Settled rules of the contract [S-87]"""
    answer = _preflight(open_api, target, LISTED[0], method, *headers)
    assert answer.status in (200, 204)
    assert answer.headers["access-control-allow-origin"] == LISTED[0]
    assert method.lower() in _words(answer.headers["access-control-allow-methods"])
    assert {h.lower() for h in headers} <= _words(
        answer.headers.get("access-control-allow-headers", "")
    )
    assert "origin" in _words(answer.headers["vary"])
    assert answer.body == b""


def test_a_listed_origin_may_read_a_stream(open_api: Api, clients: Clients) -> None:
    """The head and every header of the stream stay as they are. [S-87, 7.3-01]"""
    name = new_name("cors")
    open_api.add(name, 1)
    session = clients.session(open_api, {name: {}})
    url = session.answer["stream_url"]
    stream = clients.get(open_api, url, [f"Origin: {LISTED[1]}"])
    assert stream.status == 200
    assert stream.headers["access-control-allow-origin"] == LISTED[1]
    assert "origin" in _words(stream.headers["vary"])
    assert stream.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert stream.headers["cache-control"] == "no-store"
    assert stream.event().name == "record"
    other = clients.get(open_api, url, ["Origin: http://other.example"])
    assert other.status == 200
    assert "access-control-allow-origin" not in other.headers


def test_it_is_off_by_default(api: Api, topic: str, clients: Clients) -> None:
    """Settled rules of the contract [S-87]"""
    api.put(topic)
    origin = LISTED[0]
    assert _cors(api.raw("GET", f"/v0/topics/{topic}", headers=[f"Origin: {origin}"])) == {}
    assert _cors(_preflight(api, f"/v0/topics/{topic}", origin, "POST", "content-type")) == {}
    url = clients.session(api, {topic: {}}).answer["stream_url"]
    stream = clients.get(api, url, [f"Origin: {origin}"])
    assert stream.status == 200
    assert not [name for name in stream.headers if name.startswith("access-control")]


def _shake(api: Api, *headers: str) -> bytes:
    raw = RawWs(connected(api.url))
    try:
        return raw.shake_hands(headers)
    finally:
        raw.close()


@pytest.mark.parametrize("origin", LISTED)
def test_a_socket_of_a_listed_origin_opens(open_api: Api, origin: str) -> None:
    """Settled rules of the contract [S-88]"""
    assert _shake(open_api, f"Origin: {origin}").startswith(b"HTTP/1.1 101 ")


@pytest.mark.parametrize("origin", OTHERS)
def test_a_socket_of_another_origin_is_403(open_api: Api, origin: str) -> None:
    """The server refuses the socket before it opens, with the error envelope. [S-88]"""
    eventually(lambda: gauges(open_api)[0] == 0, "the streams of other tests are gone")
    before = gauges(open_api)
    answer = open_api.raw(
        "GET",
        "/v0/ws",
        headers=[
            "Upgrade: websocket",
            "Connection: Upgrade",
            "Sec-WebSocket-Version: 13",
            "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==",
            f"Origin: {origin}",
        ],
    )
    refused(answer, 403, "forbidden")
    # There may be fewer connections than before, because those of earlier tests were closed.
    now = gauges(open_api)
    assert all(n <= b for n, b in zip(now, before, strict=True)), f"{before} -> {now}"


def test_a_socket_of_the_same_origin_or_of_none_opens(
    api: Api, open_api: Api, clients: Clients
) -> None:
    """Scripts send no origin; a page of this very host has the same origin. [S-88]"""
    for server in (api, open_api):
        assert _shake(server).startswith(b"HTTP/1.1 101 ")
        assert _shake(server, "Origin: http://localhost").startswith(b"HTTP/1.1 101 ")
        ws = clients.ws(server, origin=server.url)
        assert ws.ask(op="ping")["op"] == "pong"
        for other in ("http://localhost:81", "http://localhost.evil", LISTED[0] + "x", "null"):
            assert _shake(server, f"Origin: {other}").startswith(b"HTTP/1.1 403 ")


@pytest.mark.parametrize(
    "value", ["*", "pages.example", "http://a.example/path", "http://", "a b", "http://a.example,*"]
)
def test_an_origin_that_is_none_refuses_the_start(
    tmp_path_factory: pytest.TempPathFactory, value: str
) -> None:
    """A mistake here would open the server to no page or to every page. [S-87]"""
    if URL:
        pytest.skip("needs a server of its own")
    server = Server(tmp_path_factory.mktemp("refused"), {"TOPICS_CORS_ORIGINS": value})
    assert "TOPICS_CORS_ORIGINS" in server.refusal()
