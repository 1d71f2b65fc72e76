"""The table from error codes to HTTP status, headers and envelope (§0.5, §0.6).

Pure. Every error answer of the server is made here. Called by `api/front_door` for errors that
handlers raise.
"""

from __future__ import annotations

from typing import Final

import msgspec

from topics_server.values.errors import (
    Code,
    DiskFull,
    ReadOnly,
    StorageError,
    TopicsError,
    clipped,
)

Headers = tuple[tuple[bytes, bytes], ...]

STATUS_OF: Final[dict[Code, int]] = {
    Code.INVALID_REQUEST: 400,
    Code.BATCH_TOO_LARGE: 400,
    Code.RECORD_TOO_LARGE: 400,
    Code.UNAUTHORIZED: 401,
    Code.FORBIDDEN: 403,
    Code.NOT_FOUND: 404,
    Code.TOPIC_NOT_FOUND: 404,
    Code.ROUTER_NOT_FOUND: 404,
    Code.RECORD_NOT_FOUND: 404,
    Code.CONSUMER_NOT_FOUND: 404,
    Code.VIEW_NOT_FOUND: 404,
    Code.QUERY_FAILED: 400,
    Code.VIEW_TIMEOUT: 504,
    Code.METHOD_NOT_ALLOWED: 405,
    Code.NOT_ACCEPTABLE: 406,
    Code.TOPIC_EXISTS_INCOMPATIBLE: 409,
    Code.TOPIC_NOT_EMPTY: 409,
    Code.NOT_A_QUEUE: 409,
    Code.ROUTER_CYCLE: 409,
    Code.CONDITION_FAILED: 409,
    Code.PRECONDITION_FAILED: 412,
    Code.PAYLOAD_TOO_LARGE: 413,
    Code.UNSUPPORTED_MEDIA_TYPE: 415,
    Code.STREAM_NOT_FOUND: 404,
    Code.STREAM_GONE: 410,
    Code.STREAM_CONFLICT: 409,
    Code.STREAM_CLOSED: 409,
    Code.PRODUCER_FENCED: 403,
    Code.PRODUCER_SEQ_CONFLICT: 409,
    Code.TOPIC_FULL: 422,
    Code.THROTTLED: 429,
    Code.INTERNAL: 500,
    Code.NOT_READY: 503,
    Code.SHUTTING_DOWN: 503,
    Code.STORAGE_READ_ONLY: 503,
    Code.REQUEST_TIMEOUT: 408,
    Code.URI_TOO_LONG: 414,
    Code.HEADERS_TOO_LARGE: 431,
}

# Headers of producer errors, and the fields of `detail` whose values they repeat.
PRODUCER_HEADERS: Final[dict[Code, tuple[tuple[bytes, str], ...]]] = {
    Code.PRODUCER_FENCED: ((b"producer-epoch", "epoch"),),
    Code.PRODUCER_SEQ_CONFLICT: (
        (b"producer-expected-seq", "expected_seq"),
        (b"producer-received-seq", "received_seq"),
    ),
}

# Seconds of `Retry-After`, if the error has none of its own.
RETRY_AFTER_S: Final[dict[Code, int]] = {
    Code.THROTTLED: 1,
    Code.NOT_READY: 1,
    Code.SHUTTING_DOWN: 2,
    Code.STORAGE_READ_ONLY: 30,
}

_CHALLENGE: Final = ((b"www-authenticate", b"Bearer"),)

_encode: Final = msgspec.json.Encoder().encode

assert set(STATUS_OF) == set(Code), "every code has its status"
assert {code for code, status in STATUS_OF.items() if status in (429, 503)} == set(RETRY_AFTER_S)


def status_of(error: TopicsError) -> int:
    """The HTTP status of an error."""
    return STATUS_OF[error.code]


def headers_of(error: TopicsError) -> Headers:
    """The headers of an error.

    They tell a client how to authenticate, when to try again, from which number a producer
    continues, and where a closed stream ends.
    """
    if error.code is Code.UNAUTHORIZED:
        return _CHALLENGE
    if error.code is Code.STREAM_CLOSED:
        return _end_of_stream(error)
    if error.code in PRODUCER_HEADERS:
        fields = PRODUCER_HEADERS[error.code]
        return tuple((name, b"%d" % error.detail[field]) for name, field in fields)
    seconds = RETRY_AFTER_S.get(error.code)
    if seconds is None:
        return ()
    retry_after_ms = error.detail.get("retry_after_ms")
    if isinstance(retry_after_ms, int):
        seconds = max(1, -(-retry_after_ms // 1000))
    return ((b"retry-after", b"%d" % seconds),)


def _end_of_stream(error: TopicsError) -> Headers:
    """Headers that report a closed stream and its end.

    Errors of appends under `/v0` do not have them.
    """
    next_offset = error.detail.get("next_offset")
    fields: Headers = ((b"stream-closed", b"true"),)
    if isinstance(next_offset, str):
        fields += ((b"stream-next-offset", next_offset.encode("ascii")),)
    return fields


def envelope(error: TopicsError, total_ms: float | None = None) -> bytes:
    """The body of an error. `total_ms`: the time since the request arrived, if there was one."""
    fields: dict[str, object] = {"error": described(error)}
    if total_ms is not None:
        fields["performance"] = {"server_total_ms": round(total_ms, 3)}
    return _encode(fields)


def described(error: TopicsError) -> dict[str, object]:
    """An error as JSON values; `detail` is absent when it is empty.

    Texts in `detail` come from the request, so they are clipped here. Messages clip the texts that
    they repeat.
    """
    fields: dict[str, object] = {"code": error.code.value, "message": error.message}
    if error.detail:
        fields["detail"] = {
            name: clipped(value) if isinstance(value, str) else value
            for name, value in error.detail.items()
        }
    return fields


def from_storage(error: StorageError) -> TopicsError:
    """The client's error for an error of the disk. File names appear only in the log."""
    match error:
        case ReadOnly():
            return TopicsError(
                Code.STORAGE_READ_ONLY,
                "a sync failed: this part of the storage takes no writes until a restart",
            )
        case DiskFull():
            return TopicsError(Code.THROTTLED, "the disk refused the write", {"limit": "disk"})
        case _:
            return internal()


def internal() -> TopicsError:
    """The error for a defect of the server. The details are in the log."""
    return TopicsError(Code.INTERNAL, "an internal error; the server's log has the details")


def method_not_allowed(method: str, allow: str) -> TopicsError:
    """405 for a known path; the caller adds the `Allow` header."""
    return TopicsError(
        Code.METHOD_NOT_ALLOWED, f"{method} is not possible here; use {allow}", {"allow": allow}
    )


def not_found(path: str) -> TopicsError:
    """404 for a path without an endpoint."""
    return TopicsError(Code.NOT_FOUND, "no such endpoint", {"path": path[:256]})


def too_large(max_bytes: int) -> TopicsError:
    """413 for a body over the limit, as sent or inflated."""
    return TopicsError(
        Code.PAYLOAD_TOO_LARGE,
        f"the body is larger than {max_bytes} bytes",
        {"limit": "max_body_bytes", "max": max_bytes},
    )


def no_json() -> TopicsError:
    """415 for a body without the JSON media type; the message names the header to add."""
    return TopicsError(
        Code.UNSUPPORTED_MEDIA_TYPE,
        "the body's Content-Type must be application/json; with curl, "
        "add -H 'content-type: application/json'",
    )


def unknown_encoding(encoding: str) -> TopicsError:
    """415 for a Content-Encoding other than gzip."""
    return TopicsError(
        Code.UNSUPPORTED_MEDIA_TYPE,
        "Content-Encoding must be gzip or absent",
        {"content_encoding": encoding[:256]},
    )
