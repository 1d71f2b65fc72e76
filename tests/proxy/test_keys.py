"""Through nginx with keys on: a client without a key gets nothing, and no log contains a key."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import httpx
import pytest
import websockets.sync.client

from tests.browser.chromium import Browser, Page
from tests.contract.driver import Server, eventually, good, refused
from tests.ports import lasting_port
from tests.proxy import nginx
from tests.proxy.nginx import Proxy

KEY: Final = "k3y-of-somebody-0123456789"
READER: Final = "r3ader-0123456789abcdef"
BEARER: Final = {"Authorization": f"Bearer {KEY}"}
FOLLOW: Final = """(() => {
    window.seen = [];
    window.source = new EventSource(%s);
    source.addEventListener("record", (event) => {
        for (const record of JSON.parse(event.data).records) seen.push(record.$seq);
    });
})()"""

SPEAK: Final = """(() => {
    window.heard = [];
    window.socket = new WebSocket(%s, ["topics.v0", %s]);
    socket.onopen = () => socket.send('{"op":"subscribe","topic":"b","from_seq":0}');
    socket.onmessage = (event) => heard.push(JSON.parse(event.data).op);
})()"""


@pytest.fixture(scope="module")
def guarded(
    nginx_path: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Server, Proxy]]:
    """A server with keys that logs each request, and the nginx before it."""
    folder: Path = tmp_path_factory.mktemp("keys")
    env = {
        "TOPICS_PORT": str(lasting_port()),
        "TOPICS_API_KEYS": f"{KEY},{READER}:read",
        "TOPICS_ACCESS_LOG": "full",
        "TOPICS_LOG_LEVEL": "debug",
    }
    server = Server(folder / "server", env)
    url = server.start().url
    port = urlsplit(url).port
    assert port is not None
    try:
        with nginx.running(nginx_path, folder / "nginx", port) as proxy:
            yield server, proxy
        server.stop()
    finally:
        if server.process is not None:
            server.process.kill()
            server.process.wait()


def let_call(page: Page) -> None:
    """The page's own policy forbids calls; allow them, as for a page of the operator's."""
    page.call("Page.setBypassCSP", enabled=True)
    page.call("Page.reload")
    page.wait('document.readyState === "complete"', "the page is loaded again")


def is_logged(proxy: Proxy, paths: set[str]) -> bool:
    """Whether nginx has logged each request; it logs streams when they end."""
    lines = proxy.access_log.read_text().splitlines()
    return {json.loads(line)["path"] for line in lines} >= paths


def test_keys_open_what_they_grant_and_are_logged_nowhere(
    guarded: tuple[Server, Proxy], browser: Browser
) -> None:
    server, proxy = guarded
    with httpx.Client(base_url=proxy.url, verify=proxy.context(), trust_env=False) as client:
        refused(client.get("/v0/topics"), 401, "unauthorized")
        refused(
            client.put("/v0/topics/a", json={}, headers={"Authorization": "Bearer x"}),
            401,
            "unauthorized",
        )
        reader = {"Authorization": f"Bearer {READER}"}
        refused(client.put("/v0/topics/a", json={}, headers=reader), 403, "forbidden")
        good(client.put("/v0/topics/a", json={}, headers=BEARER))
        body = {"records": [{"data": 1}]}
        good(client.post("/v0/topics/a", json=body, headers=BEARER))

        topics = {"topics": {"a": {"from_seq": 0}}}
        session = good(client.post("/v0/watch", json=topics, headers=BEARER))
        stream = f"{session['stream_url']}?token={KEY}"
        with browser.page(f"{proxy.url}/") as page:
            let_call(page)
            page.evaluate(FOLLOW % json.dumps(stream))
            page.wait("seen.length === 1", "the first record")
            good(client.post("/v0/topics/a", json=body, headers=BEARER))
            page.wait("seen.length === 2", "a record appended meanwhile")
            page.evaluate("source.close()")

        url = f"wss://localhost:{proxy.port}/v0/ws"
        with pytest.raises(websockets.exceptions.InvalidStatus, match="401"):
            websockets.sync.client.connect(url, ssl=proxy.context(), proxy=None)
        with websockets.sync.client.connect(
            url, ssl=proxy.context(), proxy=None, additional_headers=BEARER
        ) as ws:
            ws.send(json.dumps({"op": "ping", "request_id": "p"}))
            assert json.loads(ws.recv(timeout=20))["op"] == "pong"

    hidden = base64.urlsafe_b64encode(KEY.encode()).rstrip(b"=").decode()
    expected = {"/v0/topics/a", "/v0/ws", session["stream_url"]}
    eventually(lambda: is_logged(proxy, expected), "each of them is logged", 30)
    for secret in (KEY, READER, hidden):
        assert secret not in proxy.logged
        assert secret not in server.log.read_text()
    assert "/v0/topics/a" in server.log.read_text()


def test_a_page_uses_tickets_and_subprotocols_through_tls_and_neither_is_logged(
    guarded: tuple[Server, Proxy], browser: Browser
) -> None:
    server, proxy = guarded
    hidden = base64.urlsafe_b64encode(KEY.encode()).rstrip(b"=").decode()
    with httpx.Client(base_url=proxy.url, verify=proxy.context(), trust_env=False) as client:
        good(client.put("/v0/topics/b", json={}, headers=BEARER))
        body = {"records": [{"data": 1}]}
        good(client.post("/v0/topics/b", json=body, headers=BEARER))
        topics = {"topics": {"b": {"from_seq": 0}}}
        session = good(client.post("/v0/watch?ticket=true", json=topics, headers=BEARER))
        ticket = session["ticket"]
        stream = f"{session['stream_url']}?ticket={ticket}"
        with browser.page(f"{proxy.url}/") as page:
            let_call(page)
            page.evaluate(FOLLOW % json.dumps(stream))
            page.wait("seen.length === 1", "the record, by a ticket")
            # The ticket works once only.
            refused(client.get(stream), 401, "unauthorized")
            url = f"wss://localhost:{proxy.port}/v0/ws"
            page.evaluate(SPEAK % (json.dumps(url), json.dumps(f"topics.bearer.{hidden}")))
            page.wait('heard.includes("record")', "the record, by a key in a subprotocol")
            assert page.evaluate("socket.protocol") == "topics.v0"
            good(client.post("/v0/topics/b", json=body, headers=BEARER))
            page.wait("seen.length === 2", "both are still told")
            page.evaluate("source.close(); socket.close()")

    expected = {"/v0/ws", session["stream_url"]}
    eventually(lambda: is_logged(proxy, expected), "both are logged when they end", 30)
    for secret in (KEY, hidden, ticket):
        assert secret not in proxy.logged
        assert secret not in server.log.read_text()
