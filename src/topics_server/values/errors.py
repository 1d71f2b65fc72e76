"""The two families of errors: errors of requests and damage of storage.

The code that owns a rule raises `TopicsError`; only `http/error_responses.py` turns it into HTTP.
`StorageError` and its kinds are raised in `wal/` (the only place that catches `OSError`).
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any

from topics_server.values.limits import ECHO_BYTES_MAX


class Code(enum.Enum):
    """Stable machine-readable codes of the contract (§0.6); the value is what clients see."""

    INVALID_REQUEST = "invalid_request"
    BATCH_TOO_LARGE = "batch_too_large"
    RECORD_TOO_LARGE = "record_too_large"
    UNAUTHORIZED = "unauthorized"
    FORBIDDEN = "forbidden"
    NOT_FOUND = "not_found"
    TOPIC_NOT_FOUND = "topic_not_found"
    ROUTER_NOT_FOUND = "router_not_found"
    # Errors of a single record.
    RECORD_NOT_FOUND = "record_not_found"
    CONSUMER_NOT_FOUND = "consumer_not_found"
    # Errors of views.
    VIEW_NOT_FOUND = "view_not_found"
    QUERY_FAILED = "query_failed"
    VIEW_TIMEOUT = "view_timeout"
    METHOD_NOT_ALLOWED = "method_not_allowed"
    NOT_ACCEPTABLE = "not_acceptable"
    TOPIC_EXISTS_INCOMPATIBLE = "topic_exists_incompatible"
    TOPIC_NOT_EMPTY = "topic_not_empty"
    NOT_A_QUEUE = "not_a_queue"
    ROUTER_CYCLE = "router_cycle"
    PAYLOAD_TOO_LARGE = "payload_too_large"
    UNSUPPORTED_MEDIA_TYPE = "unsupported_media_type"
    # Errors of conditional writes: `if` of a body, and `If-Match`.
    CONDITION_FAILED = "condition_failed"
    PRECONDITION_FAILED = "precondition_failed"
    # Errors of streams (Durable Streams).
    STREAM_NOT_FOUND = "stream_not_found"
    STREAM_GONE = "stream_gone"
    STREAM_CONFLICT = "stream_conflict"
    STREAM_CLOSED = "stream_closed"
    TOPIC_FULL = "topic_full"
    PRODUCER_FENCED = "producer_fenced"
    PRODUCER_SEQ_CONFLICT = "producer_seq_conflict"
    THROTTLED = "throttled"
    INTERNAL = "internal"
    NOT_READY = "not_ready"
    SHUTTING_DOWN = "shutting_down"
    STORAGE_READ_ONLY = "storage_read_only"
    # Not in the contract: this code is about the connection, not the request's content.
    REQUEST_TIMEOUT = "request_timeout"
    URI_TOO_LONG = "uri_too_long"
    HEADERS_TOO_LARGE = "headers_too_large"


class TopicsError(Exception):
    """An error of the contract: `code`, a human `message`, optional `detail`."""

    def __init__(self, code: Code, message: str, detail: Mapping[str, Any] | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.detail: dict[str, Any] = dict(detail or {})


def invalid(message: str, field: str | None = None) -> TopicsError:
    """A 400 `invalid_request`; `field` is the path of the value, e.g. `records[3].tag`."""
    return TopicsError(Code.INVALID_REQUEST, message, {"field": field} if field else None)


def topic_not_found(name: str) -> TopicsError:
    """The contract's 404."""
    return TopicsError(Code.TOPIC_NOT_FOUND, f'topic "{name}" does not exist', {"topic": name})


def clipped(text: str) -> str:
    """The part of a client's text that an error message repeats: at most `ECHO_BYTES_MAX` bytes."""
    if len(text) * 4 <= ECHO_BYTES_MAX:
        return text
    encoded = text.encode("utf-8", "replace")
    if len(encoded) <= ECHO_BYTES_MAX:
        return text
    return encoded[:ECHO_BYTES_MAX].decode("utf-8", "ignore")


class StorageError(Exception):
    """Damaged storage or a refused operation. `path` names the file if there is one.

    The text is valid UTF-8 even if a file's name is not, because answers and logs repeat it.
    """

    def __init__(self, message: str, path: str | None = None) -> None:
        text = f"{path}: {message}" if path else message
        super().__init__(text.encode("utf-8", "backslashreplace").decode())
        self.path = path


class Torn(StorageError):
    """A checksum fails above the last synced byte: an unfinished write."""


class Corrupt(StorageError):
    """A checksum fails below the last synced byte: damage, never repaired automatically."""


class ReadOnly(StorageError):
    """A sync failed and its outcome is unknown; the shard accepts no writes until a restart."""


class DiskFull(StorageError):
    """The disk refused a write (ENOSPC, EDQUOT, EFBIG, EIO on write, too many open files)."""


class SyncFailed(StorageError):
    """A sync failed: the covered bytes may be durable or not, and no later sync shows which."""


class NotThere(StorageError):
    """The path certainly does not exist. Any other failure is another error."""


class StartRefused(StorageError):
    """The data directory cannot be served: it is locked, newer or foreign, or a file is missing."""


class Damaged(StorageError):
    """Rows of a sealed segment with failing checksums: `ranges` of (first, last), ascending."""

    def __init__(self, *ranges: tuple[int, int]) -> None:
        self.ranges = ranges
        self.first_row = ranges[0][0]
        self.last_row = ranges[-1][1]
        super().__init__(f"rows {self.first_row}..{self.last_row} are damaged")


def forget_frames(error: BaseException) -> None:
    """Drop the tracebacks of a handled error, and of the errors that preceded it.

    The frames of a traceback and their callers may refer to the error, as a task does that a
    variable names. Only a collection of old objects, which never runs, would free such a cycle.
    """
    found: BaseException | None = error
    while found is not None:
        found.__traceback__ = None
        found = found.__context__
