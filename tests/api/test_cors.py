"""Pages of other origins: compared exactly, on every answer; off by default."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx
import pytest

from tests.api.watch.streams import Live
from tests.storage.fake_disk import FakeDisk
from topics_server.values.errors import DiskFull

pytestmark = pytest.mark.anyio

PAGE = "http://localhost:8000"
OTHERS = [
    *(
        "http://localhost",
        "http://localhost:8001",
        "https://localhost:8000",
        "http://LOCALHOST:8000",
    ),
    *("http://localhost:8000/", "http://localhost:8000.evil", "null", "*", "", "localhost:8000"),
]
ORIGIN = {"origin": PAGE}


@pytest.fixture
async def live() -> AsyncIterator[Live]:
    server = await Live.start(FakeDisk(1), cors_origins=f"https://other.example,{PAGE}")
    await server.append("jobs", 1)
    yield server
    await server.stop()


def told(answer: httpx.Response) -> dict[str, str]:
    return {
        name: value
        for name, value in answer.headers.items()
        if name.startswith("access-control-") or name == "vary"
    }


READABLE = {
    "access-control-allow-origin": PAGE,
    "access-control-expose-headers": "allow, retry-after, x-request-id, producer-epoch, "
    "producer-seq, producer-expected-seq, producer-received-seq, topic-first-seq, topic-last-seq, "
    "stream-next-offset, stream-cursor, stream-up-to-date, stream-closed, stream-ttl, "
    "stream-expires-at, stream-sse-data-encoding, topics-page, topics-tombstone, etag, "
    "location, content-encoding",
    "vary": "origin",
}


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v0/topics/jobs", 200),
        ("POST", "/v0/topics/jobs/diff", 200),
        ("POST", "/v0/topics/jobs", 400),
        ("GET", "/v0/topics/absent", 404),
        ("GET", "/v0/nothing", 404),
        ("DELETE", "/v0/watch", 405),
        ("GET", "/v0/watch/wid_x", 404),
        ("GET", "/v0/ws", 400),
        ("GET", "/v0/health", 200),
        ("HEAD", "/v0/topics/jobs", 200),
        ("OPTIONS", "/v0/topics/jobs", 204),
    ],
)
async def test_a_listed_page_may_read_every_answer(
    live: Live, method: str, path: str, status: int
) -> None:
    body = {"content": b"{}"} if method == "POST" else {}
    headers = ORIGIN | ({"content-type": "application/json"} if body else {})
    answer = await live.http.request(method, path, headers=headers, **body)  # type: ignore[arg-type]
    assert answer.status_code == status
    assert told(answer) == READABLE


async def test_a_listed_page_may_read_refusals_of_the_server(
    live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise DiskFull("no room")

    def fail(*_: object, **__: object) -> None:
        raise ArithmeticError("a defect")

    for broken, status in ((refuse, 429), (fail, 500)):
        monkeypatch.setattr(live.node.store, "state", broken)
        answer = await live.http.get("/v0/topics/jobs", headers=ORIGIN)
        assert answer.status_code == status
        assert told(answer) == READABLE


async def test_a_listed_page_may_read_streams(live: Live) -> None:
    reader = live.get(await live.session("jobs"), (b"origin", PAGE.encode()))
    await reader.begun()
    for name, value in READABLE.items():
        assert reader.headers[name.encode()] == value.encode()
    await reader.left()


async def test_the_second_listed_page_may_too(live: Live) -> None:
    answer = await live.http.get("/v0/health", headers={"origin": "https://other.example"})
    assert told(answer)["access-control-allow-origin"] == "https://other.example"


async def test_compressed_answers_vary_by_both_headers(live: Live) -> None:
    await live.append("jobs", "x" * 1_000)
    answer = await live.http.post(
        "/v0/topics/jobs/diff", json={}, headers=ORIGIN | {"accept-encoding": "gzip"}
    )
    assert answer.headers.get_list("vary") == ["origin", "accept-encoding"]


@pytest.mark.parametrize(
    ("path", "methods"),
    [
        ("/v0/topics/jobs", "DELETE, GET, HEAD, OPTIONS, PATCH, POST, PUT"),
        ("/v0/watch", "OPTIONS, POST"),
        ("/v0/watch/wid_x", "GET, HEAD, OPTIONS"),
    ],
)
async def test_a_preflight_names_methods_and_headers(live: Live, path: str, methods: str) -> None:
    headers = ORIGIN | {
        "access-control-request-method": "POST",
        "access-control-request-headers": "content-type,idempotency-key",
    }
    answer = await live.http.options(path, headers=headers)
    assert (answer.status_code, answer.content) == (204, b"")
    assert told(answer) == {
        "access-control-allow-origin": PAGE,
        "access-control-allow-methods": methods,
        "access-control-allow-headers": (
            "content-type, authorization, idempotency-key, last-event-id, x-request-id, "
            "producer-id, producer-epoch, producer-seq, "
            "if-match, if-none-match, stream-seq, stream-ttl, stream-expires-at, stream-closed, "
            "stream-forked-from, stream-fork-offset, stream-fork-sub-offset, traceparent"
        ),
        "access-control-max-age": "600",
        "vary": "origin",
    }
    assert answer.headers["allow"] == methods


async def test_a_preflight_of_no_endpoint_is_404_that_can_be_read(live: Live) -> None:
    headers = ORIGIN | {"access-control-request-method": "POST"}
    answer = await live.http.options("/v0/nothing", headers=headers)
    assert answer.status_code == 404
    assert set(told(answer)) == {"access-control-allow-origin", "vary"}


@pytest.mark.parametrize("origin", OTHERS)
@pytest.mark.parametrize("method", ["GET", "OPTIONS"])
async def test_other_origins_get_no_headers(live: Live, origin: str, method: str) -> None:
    headers = {"origin": origin, "access-control-request-method": "GET"}
    answer = await live.http.request(method, "/v0/topics/jobs", headers=headers)
    assert answer.is_success
    assert told(answer) == {}


async def test_without_an_origin_there_are_no_headers(live: Live) -> None:
    assert told(await live.http.get("/v0/topics/jobs")) == {}


async def test_it_is_off_by_default() -> None:
    live = await Live.start(FakeDisk(1))
    headers = ORIGIN | {"access-control-request-method": "GET"}
    assert told(await live.http.options("/v0/topics/jobs", headers=headers)) == {}
    assert told(await live.http.get("/v0/health", headers={"origin": ""})) == {}
    await live.stop()
