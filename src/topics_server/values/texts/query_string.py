"""Decodes the query string of a request.

Raises `invalid_request` for a query that is not percent-encoded UTF-8.
"""

from __future__ import annotations

import re
from typing import Final
from urllib.parse import parse_qsl

from topics_server.values.errors import invalid

_STRAY_PERCENT: Final = re.compile(rb"%(?![0-9A-Fa-f]{2})")


def parse_query(query: bytes) -> dict[str, str]:
    """The query's parameters, decoded; of repeated parameters the first one counts."""
    if not query:
        return {}
    return dict(reversed(query_pairs(query)))


def query_pairs(query: bytes) -> list[tuple[str, str]]:
    """The query's parameters, decoded, in order. Raises `invalid_request` for bad escapes."""
    stray = _STRAY_PERCENT.search(query)
    if stray is not None:
        start = query.rfind(b"&", 0, stray.start()) + 1
        name = query[start : stray.start()].partition(b"=")[0].decode("latin-1")
        raise invalid("the query has a % without two hexadecimal digits after it", name or None)
    try:
        return parse_qsl(query.decode("ascii"), keep_blank_values=True, errors="strict")
    except UnicodeDecodeError:
        raise invalid("the query is not percent-encoded UTF-8") from None
