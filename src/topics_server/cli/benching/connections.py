"""One HTTP connection of `topics bench`: prepared bytes out, whole answers in.

Cheaper than the Python client, so that the result is the server's. At most one request is in
flight; a load is the connection's owner and gets every answer, and the end of the connection.
"""

from __future__ import annotations

import asyncio
from typing import Protocol, cast
from urllib.parse import urlsplit

import httptools

from topics_server.cli.connection import CONNECT_S, ServerUnreachable, reason_of, refused
from topics_server.client.exchange import verified
from topics_server.runtime.clock import monotonic_s


class LinkOwner(Protocol):
    """Gets what comes over a connection."""

    def answered(self, link: Link, status: int, body: bytes) -> None:
        """An answer is complete."""

    def received(self, link: Link, piece: bytes) -> None:
        """A piece of a stream's body has come."""

    def failed(self, error: Exception) -> None:
        """The connection cannot go on."""


class Link(asyncio.Protocol):
    """A connection; `keeps_bodies`: pass on the bodies of successful answers too.

    A `streaming` connection passes on each piece of a body instead.
    """

    def __init__(
        self, url: str, owner: LinkOwner, *, keeps_bodies: bool = False, streaming: bool = False
    ) -> None:
        self.sent_s = 0.0
        self.is_retired = False
        self.stays_open = True  # whether the last answer lets the connection be used again
        self._url = url
        self._owner = owner
        self._keeps_bodies = keeps_bodies
        self._streaming = streaming
        self._body: list[bytes] = []
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the way out."""
        self._transport = cast(asyncio.Transport, transport)

    def send(self, request: bytes) -> None:
        """Send a request; its answer goes to the owner."""
        assert self._transport is not None, "the connection is made"
        self.sent_s = monotonic_s()
        self._transport.write(request)

    def data_received(self, data: bytes) -> None:
        """Parse; the parser calls the methods below."""
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            if not self.is_retired:
                why = f"{self._url}: the answer is not HTTP"
                self._owner.failed(refused(200, "bad_answer", why))

    def on_body(self, body: bytes) -> None:
        """Keep a part of a body where somebody wants it."""
        is_good = self._parser.get_status_code() < 300
        if is_good and self._streaming:
            self._owner.received(self, body)
        elif self._keeps_bodies or not is_good:
            self._body.append(body)

    def on_message_complete(self) -> None:
        """Pass the answer on."""
        if self.is_retired:
            return
        body = b"".join(self._body)
        self._body.clear()
        self.stays_open = bool(self._parser.should_keep_alive())
        self._owner.answered(self, self._parser.get_status_code(), body)

    def retire(self) -> None:
        """Close the connection; its end is no error."""
        self.is_retired = True
        if self._transport is not None:
            self._transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        """Report that the connection ended although the load still needs it."""
        if not self.is_retired and self.stays_open:
            self.is_retired = True
            why = "the server closed it" if error is None else reason_of(error)
            broke = f"the connection to {self._url} broke: {why}"
            self._owner.failed(ServerUnreachable(broke, sent=True))


async def opened(url: str, link: Link) -> Link:
    """Connect. Raises `ServerUnreachable`."""
    parts = urlsplit(url)
    is_tls = parts.scheme == "https"
    assert parts.hostname is not None, "the URL is checked"
    port = parts.port or (443 if is_tls else 80)
    try:
        async with asyncio.timeout(CONNECT_S):
            await asyncio.get_running_loop().create_connection(
                lambda: link, parts.hostname, port, ssl=verified(url) if is_tls else None
            )
    except TimeoutError:
        why = f"cannot connect to {url}: no answer within {CONNECT_S:g} s"
        raise ServerUnreachable(why, sent=False) from None
    except OSError as error:
        why = f"cannot connect to {url}: {reason_of(error)}"
        raise ServerUnreachable(why, sent=False) from None
    return link
