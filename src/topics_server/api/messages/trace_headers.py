"""Reads the trace of a request: the header `traceparent` of W3C *Trace Context*.

An invalid header is ignored, never refused: a trace helps to find faults, and must not cause one.
Only version 00 of the recommendation is read: 55 characters in lower case. `http/request_head`
drops a `traceparent` that is sent twice. A publish over WebSocket has the same value as a field.
Pure. Called by `api/records/handlers`, `api/streams/request_headers` and `api/websocket/commands`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from topics_server.values.limits import TRACEPARENT_BYTES

TRACEPARENT: Final = b"traceparent"
# For the OpenAPI document.
TRACE_PATTERN: Final = "^00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}$"
TRACE_ABOUT: Final = "The `traceparent` of the append, if it had one."
# Version, trace id, parent id, flags; ids of zeros are invalid.
_VALID: Final = re.compile(rb"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
# The length of a valid value with more blanks around it than any client sends.
_SENT_BYTES_MAX: Final = TRACEPARENT_BYTES + 8


def trace_of(headers: Mapping[bytes, bytes]) -> bytes:
    """The request's `traceparent`; empty if it is missing or invalid."""
    return checked_trace(headers.get(TRACEPARENT, b""))


def checked_trace(sent: bytes) -> bytes:
    """A sent `traceparent` without blanks around it; empty if it is not valid."""
    if len(sent) > _SENT_BYTES_MAX:
        return b""
    value = sent.strip(b" \t")
    return value if _VALID.fullmatch(value) is not None else b""
