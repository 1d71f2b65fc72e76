"""Reads and inflates request bodies within their limits.

If the head declares a type other than JSON, an unknown coding or too many bytes, the request is
refused before its body is read. A compressed body is inflated, off the loop if it is large. Called
by `api/front_door`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any, Final

from topics_server.http.content_encoding import (
    JSON_TYPE,
    inflate,
    inflate_some,
    is_json_type,
    joined,
)
from topics_server.http.error_responses import no_json, too_large, unknown_encoding
from topics_server.values.errors import invalid
from topics_server.values.limits import CONTROL_BODY_BYTES_MAX, KIB, LARGE_APPEND_BYTES_MIN

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]

# Bodies larger than this are inflated and deflated off the event loop.
OFF_LOOP_BYTES: Final = 64 * KIB
# The most digits of a Content-Length that `is_plain` accepts.
_LENGTH_DIGITS_MAX: Final = 15
# Chunks of an unfinished body that are freed in one turn of the loop.
_FREED_AT_ONCE: Final = 4


class ClientGoneError(Exception):
    """The client disconnected while its handler waited; no answer is sent."""


async def whole_body(
    headers: Mapping[bytes, bytes],
    receive: Receive,
    max_bytes: int,
    *,
    is_json: bool,
    take_slot: Callable[[], Awaitable[None]] | None = None,
) -> bytes:
    """The result of `read_body`, in one step if the head needs no further check."""
    if not is_plain(headers, max_bytes):
        return await read_body(headers, receive, max_bytes, is_json=is_json, take_slot=take_slot)
    # The common case: a JSON body that arrived together with its head.
    message = await receive()
    if message["type"] == "http.request" and not message.get("more_body", False):
        body: bytes = message["body"]
        return body
    return await receive_all(receive, max_bytes, message)


async def read_body(
    headers: Mapping[bytes, bytes],
    receive: Receive,
    max_bytes: int,
    *,
    is_json: bool = True,
    take_slot: Callable[[], Awaitable[None]] | None = None,
) -> bytes:
    """The whole body, inflated. `max_bytes` bounds the sent and the inflated body.

    Errors that the headers show are raised before a byte is read; with `is_json`, another content
    type is one of them. `take_slot` is awaited before a body is inflated to more bytes than the
    control plane allows.
    """
    declared = headers.get(b"content-length")
    if declared is not None:
        check_declared_length(declared, max_bytes)
    is_packed = False
    is_announced = declared != b"0" if declared is not None else b"transfer-encoding" in headers
    if is_announced:
        is_packed = _check_types(headers, is_json=is_json)
    body = await receive_all(receive, max_bytes)
    if not body:
        return body
    if not is_announced:
        is_packed = _check_types(headers, is_json=is_json)
    if not is_packed:
        return body
    # A few bytes may inflate to many. The loop inflates only up to this bound.
    whole = inflate_some(body, min(max_bytes, OFF_LOOP_BYTES))
    if whole is not None:
        return whole
    if take_slot is not None:
        some_bytes = min(max_bytes, CONTROL_BODY_BYTES_MAX)
        whole = await asyncio.to_thread(inflate_some, body, some_bytes)
        if whole is not None:
            return whole
        await take_slot()
    return await asyncio.to_thread(inflate, body, max_bytes)


def check_declared_length(declared: bytes, max_bytes: int) -> None:
    """Refuse a body by its Content-Length, before a byte of it is read."""
    if not declared.isdigit():
        raise invalid("Content-Length must be a number", "Content-Length")
    if len(declared) > 18 or int(declared) > max_bytes:
        raise too_large(max_bytes)


def _check_types(headers: Mapping[bytes, bytes], *, is_json: bool) -> bool:
    """Refuse a type other than JSON or an unknown encoding; returns whether the body is gzip."""
    if is_json and not is_json_type(headers.get(b"content-type")):
        raise no_json()
    encoding = headers.get(b"content-encoding")
    if encoding is None:
        return False
    encoding = encoding.strip().lower()
    if encoding in (b"", b"identity"):
        return False
    if encoding not in (b"gzip", b"x-gzip"):
        raise unknown_encoding(encoding.decode("latin-1"))
    return True


def is_plain(headers: Mapping[bytes, bytes], max_bytes: int, *, is_json: bool = True) -> bool:
    """Whether the head alone shows that the body needs no further check."""
    declared = headers.get(b"content-length", b"")
    return (
        (not is_json or headers.get(b"content-type") == JSON_TYPE)
        and b"content-encoding" not in headers
        and len(declared) <= _LENGTH_DIGITS_MAX
        and declared.isdigit()
        and int(declared) <= max_bytes
    )


def is_bodiless(headers: Mapping[bytes, bytes]) -> bool:
    """Whether the head says that there is no body."""
    return b"content-length" not in headers and b"transfer-encoding" not in headers


async def receive_all(
    receive: Receive, max_bytes: int, message: MutableMapping[str, Any] | None = None
) -> bytes:
    """The whole body, joined; `message` is its first part if that was received already."""
    chunks: list[bytes] = []
    size = 0
    more = True
    while more:
        if message is None:
            message = await receive()
        if message["type"] == "http.disconnect":
            await _free(chunks)
            raise ClientGoneError
        chunk: bytes = message.get("body", b"")
        chunks.append(chunk)
        size += len(chunk)
        if size > max_bytes:
            raise too_large(max_bytes)
        more = message.get("more_body", False)
        message = None
    if len(chunks) == 1:
        return chunks[0]
    if size > LARGE_APPEND_BYTES_MIN:
        # In a thread: copying large pieces of bytes does not hold the interpreter's lock.
        return await asyncio.to_thread(joined, chunks)
    return b"".join(chunks)


async def _free(chunks: list[bytes]) -> None:
    """Free the chunks a few at a time: freeing 60 MB at once blocks the loop for milliseconds."""
    while len(chunks) > _FREED_AT_ONCE:
        del chunks[-_FREED_AT_ONCE:]
        await asyncio.sleep(0)
