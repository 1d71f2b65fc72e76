"""`client.exchange`: answers that no topics server gives, a fork, many threads; both clients.

Whatever answer comes, a program gets an error of the client, and its key goes to no other server.
"""

from __future__ import annotations

import asyncio
import http.server
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.contract.driver import ROOT
from tests.unit.client.conftest import Chance
from topics_server.client import (
    AsyncClient,
    BadAnswer,
    Client,
    ClientError,
    NotFound,
    Refused,
    Throttled,
)
from topics_server.client.errors import RETRY_AFTER_MS_MAX
from topics_server.client.producing.transport import TransportPlan

Answer = tuple[int, dict[str, str], bytes]
GOOD: Answer = (200, {}, b"{}")
ABSENT: Answer = (404, {}, b'{"error":{"code":"topic_not_found","message":"m"}}')
THREADS = 101


class Handler(http.server.BaseHTTPRequestHandler):
    """Gives the answers of `script` in order; None closes the connection in place of one."""

    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""

    def do_GET(self) -> None:
        """Answer."""
        server: Any = self.server
        self.rfile.read(int(self.headers["Content-Length"] or 0))
        server.asked.append((self.client_address[1], self.headers["Authorization"]))
        if self.path == "/hold":
            server.together.wait(30)
        answer = server.script.pop(0) if server.script else GOOD
        if answer is None:
            self.close_connection = True
            return
        status, headers, body = answer
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    do_DELETE = do_POST = do_GET


class Foreign(http.server.ThreadingHTTPServer):
    """A server that is not a topics server."""

    request_queue_size = 256

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.script: list[Answer | None] = []
        self.asked: list[tuple[int, str | None]] = []
        self.together = threading.Barrier(THREADS)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


@pytest.fixture
def foreign() -> Iterator[Foreign]:
    """A running server that is not a topics server."""
    with Foreign() as found:
        thread = threading.Thread(target=found.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield found
        found.shutdown()
        thread.join()


Ask = Callable[..., Any]


@pytest.fixture(params=["blocking", "async"])
def ask(request: pytest.FixtureRequest) -> Ask:
    """Call a method of a fresh client by name: `ask(url, "call", "GET", "/x", token=...)`."""

    def blocking(url: str, name: str, *words: Any, **options: Any) -> Any:
        with Client(url, effects=Chance(0.0), **options) as client:
            return getattr(client, name)(*words)

    def on_loop(url: str, name: str, *words: Any, **options: Any) -> Any:
        async def script() -> Any:
            async with AsyncClient(url, effects=Chance(0.0), **options) as client:
                return await getattr(client, name)(*words)

        return asyncio.run(script())

    return blocking if request.param == "blocking" else on_loop


@pytest.mark.parametrize("wait", ["9" * 6000, "9" * 30, "1e9", "-5", "soon", ""])
def test_a_foreign_retry_after_is_an_hour_at_most(foreign: Foreign, ask: Ask, wait: str) -> None:
    foreign.script = [(429, {"Retry-After": wait}, b"<html>")] * 2
    with pytest.raises(Throttled) as caught:
        ask(foreign.url, "call", "GET", "/x", patience_ms=0)
    assert caught.value.retry_after_ms == (RETRY_AFTER_MS_MAX if wait[:1] == "9" else None)


@pytest.mark.parametrize("asked", ["1" + "0" * 400, "-7"])
def test_a_foreign_detail_is_an_hour_at_most(foreign: Foreign, ask: Ask, asked: str) -> None:
    error = f'{{"error":{{"code":"c","message":"m","detail":{{"retry_after_ms":{asked}}}}}}}'
    foreign.script = [(429, {}, error.encode())]
    with pytest.raises(Throttled) as caught:
        ask(foreign.url, "call", "GET", "/x", patience_ms=0)
    assert caught.value.retry_after_ms in {0, RETRY_AFTER_MS_MAX, None}


@pytest.mark.parametrize(
    "answer",
    [
        (200, {"Content-Encoding": "gzip"}, b"no gzip"),
        (200, {}, b"<html>"),
        (200, {}, b"[" * 100_000),
        (200, {}, b"\xff"),
    ],
    ids=["encoding", "page", "deep", "bytes"],
)
def test_an_answer_that_cannot_be_read_is_a_bad_answer(
    foreign: Foreign, ask: Ask, answer: Answer
) -> None:
    for call in (("call", "GET", "/x"), ("topic", "t"), ("append", "t", 1)):
        foreign.script = [answer]
        with pytest.raises(BadAnswer):
            ask(foreign.url, *call)


def test_a_refusal_may_be_deep(foreign: Foreign, ask: Ask) -> None:
    foreign.script = [(400, {}, b'{"error":' + b"[" * 100_000)]
    with pytest.raises(Refused, match="http_400"):
        ask(foreign.url, "topic", "t")


def test_a_redirect_is_not_followed_with_the_key(foreign: Foreign, ask: Ask) -> None:
    with Foreign() as other:
        for status in (301, 302, 307, 308):
            foreign.script = [(status, {"Location": f"{other.url}/v0/topics/t"}, b"")]
            with pytest.raises(Refused) as caught:
                ask(foreign.url, "append", "t", 1, token="secret")
            assert caught.value.status == status
            assert "secret" not in str(caught.value)
        assert other.asked == []
    assert {token for _, token in foreign.asked} == {"Bearer secret"}


def test_proxies_of_the_environment_get_nothing(
    foreign: Foreign, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Foreign() as proxy:
        for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
            monkeypatch.setenv(name, proxy.url)
        assert ask(foreign.url, "call", "GET", "/x", token="secret") == {}
        assert proxy.asked == []


def test_a_request_that_came_too_slowly_is_sent_again(foreign: Foreign, ask: Ask) -> None:
    late = b'{"error":{"code":"request_timeout","message":"m"}}'
    foreign.script = [(408, {"Connection": "close"}, late), GOOD]
    assert ask(foreign.url, "call", "GET", "/x") == {}


@pytest.mark.parametrize("breaks", [1, 2, 3])
def test_a_topic_that_is_dropped_without_an_answer_was_dropped(
    foreign: Foreign, ask: Ask, breaks: int
) -> None:
    foreign.script = [*[None] * breaks, ABSENT]
    ask(foreign.url, "drop_topic", "t")
    foreign.script = [ABSENT]
    with pytest.raises(NotFound):
        ask(foreign.url, "drop_topic", "t")
    foreign.script = [None, ABSENT]
    with pytest.raises(NotFound):
        ask(foreign.url, "topic", "t")


def test_threads_that_wait_do_not_keep_others_from_the_server(foreign: Foreign) -> None:
    errors: list[ClientError] = []
    with Client(foreign.url, timeout_ms=20_000, patience_ms=0) as client:

        def hold() -> None:
            try:
                client.call("GET", "/hold")
            except ClientError as error:
                errors.append(error)

        threads = [threading.Thread(target=hold) for _ in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert errors == []


FORKED = """
import asyncio, os, sys
from topics_server.client import AsyncClient, Client

url, kind = sys.argv[1:]

def blocking():
    client = Client(url)
    client.call("GET", "/x")
    if os.fork() == 0:
        client.call("GET", "/x")
        client.close()
        os._exit(0)
    assert os.wait()[1] == 0
    client.call("GET", "/x")
    client.close()

async def on_loop():
    client = AsyncClient(url)
    await client.call("GET", "/x")
    return client

async def in_child(client):
    await client.call("GET", "/x")
    await client.close()

if kind == "blocking":
    blocking()
else:
    client = asyncio.run(on_loop())
    if os.fork() == 0:
        asyncio.run(in_child(client))
        os._exit(0)
    assert os.wait()[1] == 0
"""


@pytest.mark.parametrize("kind", ["blocking", "async"])
def test_a_child_of_a_fork_has_connections_of_its_own(foreign: Foreign, kind: str) -> None:
    subprocess.run(
        [sys.executable, "-c", FORKED, foreign.url, kind], check=True, timeout=60, cwd=ROOT / "src"
    )
    ports = [port for port, _ in foreign.asked]
    assert ports[1] != ports[0]
    assert ports[2:] == [ports[0]] * (kind == "blocking")


def test_a_plan_of_a_producer_does_not_show_its_key() -> None:
    plan = TransportPlan.of("t", "p", {"token": "hush-hush"})
    assert plan.token == "hush-hush"
    assert "hush" not in repr(plan)


def test_an_error_with_a_key_in_its_body_is_the_servers(foreign: Foreign, ask: Ask) -> None:
    """The text that the client adds to an error names the server, never the key."""
    foreign.script = [(500, {}, json.dumps({"x": 1}).encode())]
    with pytest.raises(ClientError) as caught:
        ask(foreign.url, "topic", "t", token="hush-hush", patience_ms=0)
    assert "hush" not in f"{caught.value!r} {caught.value}"
