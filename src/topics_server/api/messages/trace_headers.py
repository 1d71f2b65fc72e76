"""Reads the trace of a request: its `traceparent`, as the W3C recommendation *Trace Context* says.

A header that is not valid is ignored, never refused: a trace is for people who look for a fault,
and must not be one. Of the recommendation's versions this is 00: 55 characters in lower case. A
header that is sent twice never comes here (`http/request_head`). A publish over WebSocket has the
same value as a field. Pure. Called by `api/records/handlers`, `api/streams/request_headers` and
`api/websocket/commands`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from topics_server.values.limits import TRACEPARENT_BYTES

TRACEPARENT: Final = b"traceparent"
# For the description.
TRACE_PATTERN: Final = "^00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}$"
TRACE_ABOUT: Final = "The `traceparent` of the append, if it had one."
# Version, trace id, parent id, flags; ids of zeros are invalid.
_VALID: Final = re.compile(rb"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
# A valid value with as many blanks around it as any client sends.
_SENT_BYTES_MAX: Final = TRACEPARENT_BYTES + 8


def trace_of(headers: Mapping[bytes, bytes]) -> bytes:
    """The request's `traceparent`; empty if it has none, or one that is not valid."""
    return checked_trace(headers.get(TRACEPARENT, b""))


def checked_trace(sent: bytes) -> bytes:
    """A `traceparent` as it was sent; empty if it is not valid."""
    if len(sent) > _SENT_BYTES_MAX:
        return b""
    value = sent.strip(b" \t")
    return value if _VALID.fullmatch(value) is not None else b""
