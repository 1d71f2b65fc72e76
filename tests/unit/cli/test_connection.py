"""`cli.connection`: one connection, and the message of every kind of failure."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator

import click
import pytest

from topics_server.cli.connection import (
    CallRefused,
    ServerConnection,
    ServerUnreachable,
    router_path,
    topic_path,
)

ANSWERS = {
    "/good": (200, {}, b"{}"),
    "/envelope": (400, {}, b'{"error":{"code":"c","message":"m","detail":{"field":"a.b"}}}'),
    "/said": (400, {}, b'{"error":{"code":"c","message":"a.b is","detail":{"field":"a.b"}}}'),
    "/busy": (429, {"Retry-After": "2"}, b'{"error":{"code":"throttled","message":"m"}}'),
    "/html": (502, {}, b"<html>"),
    "/elsewhere": (302, {"Location": "/good"}, b""),
    "/once": (200, {"Connection": "close"}, b"{}"),
}


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers by path; `/drop` closes the connection instead."""

    protocol_version = "HTTP/1.1"
    seen: list[tuple[str, str | None]]

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""

    def do_GET(self) -> None:
        """Answer."""
        self.server.seen.append((self.path, self.headers["Authorization"]))  # type: ignore[attr-defined]
        if self.path == "/drop":
            self.close_connection = True
            return
        status, headers, body = ANSWERS[self.path]
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)
        if self.path == "/good" and len(self.server.seen) == 1:  # type: ignore[attr-defined]
            self.close_connection = True  # without notice, like an idle server


@pytest.fixture
def server() -> Iterator[http.server.ThreadingHTTPServer]:
    """A server that is not a topics server."""
    found = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    found.seen = []  # type: ignore[attr-defined]
    thread = threading.Thread(target=found.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield found
    found.shutdown()
    thread.join()
    found.server_close()


@pytest.fixture
def client(server: http.server.ThreadingHTTPServer) -> Iterator[ServerConnection]:
    """A client with a token."""
    found = ServerConnection(f"http://127.0.0.1:{server.server_port}", "secret")
    yield found
    found.close()


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/envelope", "c: m (a.b)"),
        ("/said", "c: a.b is"),
        ("/html", "http_502: Bad Gateway"),
        ("/elsewhere", "http_302: Found"),
    ],
)
def test_a_refusal_is_code_and_message(client: ServerConnection, path: str, message: str) -> None:
    with pytest.raises(CallRefused) as caught:
        client.call("GET", path)
    assert caught.value.message == message
    assert caught.value.exit_code == 1


def test_how_long_to_wait_is_read(client: ServerConnection) -> None:
    with pytest.raises(CallRefused) as caught:
        client.call("GET", "/busy")
    assert (caught.value.status, caught.value.retry_after_s) == (429, 2.0)


def test_the_token_is_sent(
    client: ServerConnection, server: http.server.ThreadingHTTPServer
) -> None:
    client.call("GET", "/once")
    assert server.seen == [("/once", "Bearer secret")]  # type: ignore[attr-defined]


def test_a_connection_closed_while_idle_is_made_again_for_what_may_be_repeated(
    client: ServerConnection,
) -> None:
    assert client.call("GET", "/good") == b"{}"
    assert client.call("GET", "/once", repeatable=True) == b"{}"


def test_a_broken_connection_is_exit_code_2_and_may_have_been_heard(
    client: ServerConnection,
) -> None:
    with pytest.raises(ServerUnreachable) as caught:
        client.call("GET", "/drop", repeatable=True)
    assert caught.value.exit_code == 2
    assert caught.value.sent
    assert "secret" not in caught.value.message


def test_an_unreachable_server_is_exit_code_2_and_got_no_request() -> None:
    with pytest.raises(ServerUnreachable, match="cannot connect") as caught:
        ServerConnection("http://127.0.0.1:1").call("GET", "/")
    assert (caught.value.exit_code, caught.value.sent) == (2, False)


def test_an_address_in_brackets_is_a_url() -> None:
    with pytest.raises(ServerUnreachable, match="cannot connect"):
        ServerConnection("http://[::1]:1/base/").call("GET", "/")


@pytest.mark.parametrize("url", ["localhost:4000", "", "http://", "http://a:b", "file:///x"])
def test_an_invalid_url_is_wrong_usage(url: str) -> None:
    with pytest.raises(click.UsageError, match="not the URL of a server"):
        ServerConnection(url)


@pytest.mark.parametrize("name", ["a/b", "...", "a?b", "a#b", "a b", "é", "%2F"])
def test_a_topic_name_stays_in_its_segment(name: str) -> None:
    path = topic_path(name, "/diff")
    assert path.startswith("/v0/topics/")
    assert path.endswith("/diff")
    middle = path.removeprefix("/v0/topics/").removesuffix("/diff")
    assert not set(middle) & set("/?# é")


@pytest.mark.parametrize("name", [".", ".."])
def test_dots_are_no_name_of_a_topic_or_router(name: str) -> None:
    """A URL resolves dots: the request would go to the parent path."""
    for path_of in (topic_path, router_path):
        with pytest.raises(click.UsageError, match="is not a name"):
            path_of(name)
    with pytest.raises(click.UsageError, match="segment"):
        ServerConnection("http://127.0.0.1:1").call("DELETE", f"/v0/topics/orders/{name}")


def test_a_closed_connection_is_made_again(client: ServerConnection) -> None:
    """A stream follows a request and may last for days, so the request's connection is closed
    first.
    """
    for _ in range(2):
        assert client.call("GET", "/once") == b"{}"
        client.close()
