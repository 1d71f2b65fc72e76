"""Parses a connection's bytes into requests, and refuses ambiguous framing.

Owns the parser (httptools) and the head of the newest request. The parser refuses most bytes that
could be read in two ways; `http/request_head` refuses the rest. The reader calls the connection for
each whole head, each piece of a body and each end of a request. `http/connection` makes one
instance for each connection, and calls `close` at the end, because parser and reader refer to each
other.
"""

from __future__ import annotations

from typing import Any, Final, Protocol

import httptools

from topics_server.http.error_responses import internal
from topics_server.http.exchange.response_head import Header
from topics_server.http.request_head import (
    Bounds,
    check_fields,
    check_opening,
    check_size,
    check_target,
    is_host,
    is_plain_target,
    size_of,
    too_large_fields,
    upgrade_of,
)
from topics_server.runtime.metrics import log
from topics_server.values.errors import TopicsError, invalid
from topics_server.values.limits import KIB

# The most bytes of chunk framing in a body: this number, plus this many times the bytes of the
# body.
_FRAMING_BYTES_MAX: Final = 64 * KIB
_FRAMING_SHARE_MAX: Final = 8


class ReaderOwner(Protocol):
    """The connection of a reader."""

    # Whether all further bytes are dropped.
    is_over: bool
    bounds: Bounds
    # Whether the server supports WebSockets.
    has_websockets: bool

    @property
    def is_answered(self) -> bool:
        """Whether no request is being answered."""
        ...

    def check_pipeline(self) -> None:
        """Raise `throttled` if too many requests wait."""
        ...

    def on_head(self, *, is_plain: bool) -> None:
        """A head was read.

        `is_plain`: the head has no unusual fields, and no other request is unanswered.
        """
        ...

    def on_body(self, body: bytes) -> None:
        """A piece of a body was read."""
        ...

    def on_message(self, *, was_partial: bool) -> None:
        """A request is complete. `was_partial`: it did not arrive in one piece."""
        ...


class RefusedError(Exception):
    """Stops the parser. The reader holds the error to answer with."""


class RequestReader:
    """The newest request of a connection, as far as it was read.

    `is_partial`: the request is incomplete, since `partial_since` on the loop's clock (0: not
    measured yet). `has_head`: its head is complete. `is_last`: the connection ends with this
    request.
    """

    __slots__ = (
        "_framing_bytes",
        "_head_bytes",
        "_measured_bytes",
        "_owner",
        "_parser",
        "_raised",
        "body_bytes",
        "fields",
        "has_head",
        "headers",
        "is_expecting",
        "is_large",
        "is_last",
        "is_partial",
        "partial_since",
        "url",
    )

    def __init__(self, owner: ReaderOwner) -> None:
        self._owner: Any = owner
        self._parser: Any = httptools.HttpRequestParser(self)
        # Let the parser accept bytes after the last request of a connection. The reader drops them.
        if hasattr(self._parser, "set_dangerous_leniencies"):
            self._parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self.is_partial = self.has_head = self.is_last = self.is_expecting = False
        self.partial_since = 0.0
        # Whether so many bytes were received that a head may exceed its bounds.
        self.is_large = False
        self.url = b""
        self.headers: list[Header] = []
        self.fields: dict[bytes, bytes] = {}
        self.body_bytes = 0
        self._head_bytes = self._measured_bytes = self._framing_bytes = 0
        self._raised: TopicsError | None = None

    def close(self) -> None:
        """Read no more."""
        self._owner = self._parser = None

    def feed(self, data: bytes | memoryview) -> None:
        """Read bytes. Raises the exceptions of httptools."""
        self._parser.feed_data(data)

    @property
    def method(self) -> bytes:
        """The method of the head."""
        method: bytes = self._parser.get_method()
        return method

    @property
    def version(self) -> str:
        """The version of HTTP."""
        version: str = self._parser.get_http_version()
        return version

    @property
    def is_kept(self) -> bool:
        """Whether the connection stays open after the answer."""
        parser = self._parser
        return bool(
            self.version != "1.0" and parser.should_keep_alive() and not parser.should_upgrade()
        )

    @property
    def is_websocket(self) -> bool:
        """Whether the head requests a WebSocket and the server supports them."""
        return bool(
            self._parser.should_upgrade()
            and self._owner.has_websockets
            and upgrade_of(self.fields) == b"websocket"
        )

    def may_be_chunked(self, data: bytes) -> bool:
        """Whether `data` may hold chunks, of which even the smallest costs a callback."""
        begins = 0
        if self.has_head and self.is_partial:
            if b"transfer-encoding" in self.fields:
                return True
            begins = int(self.fields.get(b"content-length", b"0")) - self.body_bytes
        elif self.partial_since:
            # `data` begins in the middle of a head.
            return True
        else:
            begins = data.find(b"\r\n\r\n")
            if begins < 0 or b"transfer-encoding" in data[:begins].lower():
                return True
        # Whether another head may follow this body.
        return data.find(b"HTTP/1.", begins) >= 0

    def opening(self) -> bytes:
        """The head of a WebSocket's opening, as bytes."""
        lines = [b"GET %b HTTP/1.1\r\n" % self.url]
        lines += [b"%b: %b\r\n" % header for header in self.headers]
        return b"".join((*lines, b"\r\n"))

    def measure(self, count: int, now: float) -> TopicsError | None:
        """Measure an incomplete request. Returns an error if it exceeds a bound.

        `count`: the bytes of the last `feed`.
        """
        is_first = not self.partial_since
        if is_first:
            self.partial_since = now
        if not self.has_head:
            # Count only the parsed part of the first piece: the rest may belong to earlier
            # requests.
            known = len(self.url) + size_of(self.headers)
            self._head_bytes = known if is_first else self._head_bytes + count
            bounds = self._owner.bounds
            if self._head_bytes > bounds.header_bytes + bounds.url_bytes:
                return too_large_fields("max_header_bytes", bounds.header_bytes)
            return None
        came = self.body_bytes - self._measured_bytes
        self._measured_bytes = self.body_bytes
        if not is_first:
            self._framing_bytes += max(0, count - came)
        if self._framing_bytes > _FRAMING_BYTES_MAX + _FRAMING_SHARE_MAX * self.body_bytes:
            return invalid("the body's chunks are too small", "Transfer-Encoding")
        return None

    def cause_of(self, error: httptools.HttpParserError) -> TopicsError | None:
        """The error for bytes that the parser, or a callback of this class, refuses.

        None: the connection ends without an error.
        """
        raised, self._raised = self._raised, None
        if raised is not None:
            return raised
        cause = error.__context__
        if isinstance(cause, RefusedError):
            return None
        unclear = (UnicodeDecodeError, httptools.HttpParserInvalidURLError)
        if isinstance(error, httptools.HttpParserCallbackError) and not isinstance(cause, unclear):
            log.error("defect while reading a request", exc_info=cause)
            return internal()
        return invalid("this is not an HTTP/1.1 request")

    # --- callbacks of the parser ------------------------------------------------------------

    def on_message_begin(self) -> None:
        """A request begins, unless the request before it was the last."""
        if self.is_last:
            self._owner.is_over = True
            raise RefusedError
        self.is_partial = True
        self.has_head = self.is_expecting = False
        self.url = b""
        self.headers = []

    def on_url(self, url: bytes) -> None:
        """Take a piece of the target."""
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a field of the head. A field after the body (a trailer) is dropped."""
        if self.has_head:
            return
        name = name.lower()
        if name == b"expect" and value.lower() == b"100-continue":
            self.is_expecting = True
        self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        """Check the head."""
        self.has_head = True
        self.body_bytes = self._measured_bytes = 0
        self._owner.on_head(is_plain=self._check_head())

    def on_body(self, body: bytes) -> None:
        """Take a piece of the body."""
        self.body_bytes += len(body)
        self._owner.on_body(body)

    def on_message_complete(self) -> None:
        """The request is complete."""
        self.is_partial = self.is_large = False
        was_partial = self.partial_since != 0.0
        self.partial_since = 0.0
        self._head_bytes = self._framing_bytes = 0
        self._owner.on_message(was_partial=was_partial)

    def _check_head(self) -> bool:
        """Refuse an ambiguous head. Returns whether the head has no unusual fields.

        Raises an exception that stops the parser.
        """
        headers, owner, parser = self.headers, self._owner, self._parser
        fields = self.fields = dict(headers)
        is_plain = bool(
            is_plain_target(self.url)
            and owner.is_answered
            and not parser.should_upgrade()
            and parser.get_http_version() == "1.1"
        )
        if (
            is_plain
            and not self.is_large
            and parser.should_keep_alive()
            and len(headers) == len(fields) <= owner.bounds.header_count
            and b"transfer-encoding" not in fields
            and is_host(fields.get(b"host", b""))
        ):
            return True
        try:
            self._check_unusual_head()
        except TopicsError as error:
            self._raised = error
            raise RefusedError from None
        return is_plain

    def _check_unusual_head(self) -> None:
        parser, fields, owner = self._parser, self.fields, self._owner
        check_size(self.url, self.headers, owner.bounds)
        version = self.version
        check_fields(self.headers, fields, version)
        self.url = check_target(self.url, version, fields.get(b"host"))
        owner.check_pipeline()
        if parser.should_upgrade():
            if self.is_websocket:
                check_opening(self.method, version, fields)
                if not owner.is_answered:
                    raise invalid("a WebSocket needs a connection of its own")
            self.is_last = True
        elif version != "1.1" or not parser.should_keep_alive():
            self.is_last = True
