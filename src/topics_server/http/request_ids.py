"""The request id: the client's own, or a new unique one.

A client may send an id (`X-Request-Id`), so that one id follows the request through proxies and
programs. An invalid id is replaced. Every answer holds the id, errors and streams included, and so
does every log line about a request. Used by `api/front_door`, `api/direct`,
`api/websocket/handlers`.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from typing import Final

from topics_server.runtime.clock import random_id
from topics_server.values.limits import REQUEST_ID_BYTES_MAX

NAME: Final = b"x-request-id"
_WELL_FORMED: Final = re.compile(
    rb"[A-Za-z0-9][A-Za-z0-9._:+/=@-]{0,%d}" % (REQUEST_ID_BYTES_MAX - 1)
).fullmatch
# `NEW_ID % next_number()` is a new id. It starts with a value of this process, so that ids differ
# across restarts, too.
NEW_ID: Final = f"r{random_id(8)}.%x".encode("ascii")
next_number: Final = itertools.count(1).__next__


def request_id(headers: Mapping[bytes, bytes]) -> bytes:
    """The id of the request with these headers."""
    given = headers.get(NAME)
    if given is not None and _WELL_FORMED(given):
        return given
    return NEW_ID % next_number()
