"""Requests to one Durable Stream, and their responses.

Resolves the names of streams on the command line: a path below `/v1/stream/` of the server, or a
whole URL. Errors are those of `cli`: `CallRefused` and `ServerUnreachable`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Final
from urllib.parse import quote, urlsplit

import click
import httpx
import msgspec

from topics_server.cli.connection import (
    CONNECT_S,
    CallRefused,
    Failure,
    ServerConnection,
    refusal,
    refused,
    verb_error,
)
from topics_server.client.addresses import checked_path, checked_url
from topics_server.client.exchange import failure, headers, verified

STREAM_ROOT: Final = "/v1/stream/"
START: Final = "-1"
NOW: Final = "now"
JSON: Final = "application/json"
# A server ends a long-poll or a stream without data within a minute.
TIMEOUT: Final = httpx.Timeout(60.0, connect=CONNECT_S, read=90.0)


class StreamReadPage(msgspec.Struct, frozen=True):
    """The data of one read, and the offset where the next one continues."""

    body: bytes
    is_json: bool
    next_offset: str
    cursor: str
    is_up_to_date: bool
    is_closed: bool

    def values(self) -> list[bytes]:
        """The messages of a JSON stream, byte for byte."""
        if not self.body:
            return []
        try:
            return [
                bytes(value) for value in msgspec.json.decode(self.body, type=list[msgspec.Raw])
            ]
        except msgspec.DecodeError as error:
            raise Failure(
                f"bad_answer: the answer is not a page of a JSON stream: {error}"
            ) from None


class StreamClient:
    """One stream; closes its connections when its `with` block ends."""

    def __init__(self, client: ServerConnection, place: str) -> None:
        self.url = url_of(client, place)
        self.path = urlsplit(self.url).path
        self._server = client.url
        self._http = httpx.Client(
            timeout=TIMEOUT,
            trust_env=False,
            verify=verified(self.url),
            headers={**headers(client.token), "Accept": "*/*"},
        )

    def __enter__(self) -> StreamClient:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def ask(
        self,
        method: str,
        headers: Mapping[str, str] | None = None,
        body: bytes | None = None,
        query: Mapping[str, str] | None = None,
    ) -> httpx.Response:
        """Send one request; raises `CallRefused` and `ServerUnreachable`."""
        for name, value in (headers or {}).items():
            if not (value.isascii() and value.isprintable()):
                raise click.UsageError(f"{name} must be plain ASCII text")
        try:
            found = self._http.request(
                method, self.url, params=query, headers=headers, content=body
            )
        except httpx.RequestError as error:
            raise verb_error(failure(error, self.url)) from None
        check(found)
        return found

    def read(self, query: Mapping[str, str]) -> StreamReadPage:
        """Send one GET."""
        found = self.ask("GET", query=query)
        return page_of(found, found.content)

    def content_type(self) -> str:
        """The content type of the stream."""
        try:
            found: str = self.ask("HEAD").headers.get("Content-Type", "")
        except CallRefused as error:
            if error.status != 404:
                raise
            # The answer to HEAD has no body with an error code.
            raise refused(404, "stream_not_found", f"there is no stream {self.url}") from None
        return found

    @contextlib.contextmanager
    def events(self, query: Mapping[str, str]) -> Iterator[httpx.Response]:
        """Open a stream of events and check its head."""
        headers = {"Accept": "text/event-stream"}
        try:
            with self._http.stream("GET", self.url, params=query, headers=headers) as found:
                if found.status_code >= 300:
                    found.read()
                    check(found)
                yield found
        except httpx.RequestError as error:
            raise verb_error(failure(error, self.url)) from None


def url_of(client: ServerConnection, place: str) -> str:
    """The URL of a stream; each segment of the path is escaped."""
    if "://" in place:
        try:
            parts = checked_url(place, client.url + STREAM_ROOT + "NAME")
            checked_path(parts.path)
        except ValueError as error:
            raise click.UsageError(str(error)) from None
        if parts.query:
            raise click.UsageError(f"{place!r} is not the URL of a stream: it has a query")
        return place
    path = place.removeprefix(STREAM_ROOT).lstrip("/")
    if not path:
        raise click.UsageError("the path of the stream is missing")
    try:
        return client.url + checked_path(STREAM_ROOT + quote(path, safe="/"))
    except UnicodeEncodeError:
        raise  # `main` reports it, as for all verbs
    except ValueError as error:
        raise click.UsageError(str(error)) from None


def check(found: httpx.Response) -> None:
    """Raise the error of an answer without success."""
    if found.status_code < 300:
        return
    if found.status_code == 409 and is_true(found.headers, "Stream-Closed"):
        raise refused(409, "stream_closed", "the stream is closed")
    raise refusal(found.status_code, found.headers.get("Retry-After"), found.content)


def is_true(headers: Mapping[str, str], name: str) -> bool:
    """Whether a header has the value true."""
    return headers.get(name, "").lower() == "true"


def is_json(content_type: str) -> bool:
    """Whether a stream of this type holds JSON messages."""
    return content_type.partition(";")[0].strip().lower() == JSON


def page_of(found: httpx.Response, body: bytes) -> StreamReadPage:
    """Parse a read's answer."""
    headers = found.headers
    next_offset = headers.get("Stream-Next-Offset")
    if next_offset is None:
        raise refused(found.status_code, "bad_answer", "the answer is not from a Durable Stream")
    is_closed = is_true(headers, "Stream-Closed")
    return StreamReadPage(
        body,
        is_json(headers.get("Content-Type", "")),
        next_offset,
        headers.get("Stream-Cursor", ""),
        is_true(headers, "Stream-Up-To-Date") or is_closed or found.status_code == 204,
        is_closed,
    )
