"""Decodes the topic, router or stream name in a request path. Pure.

A stream's path is what stands behind the mount, percent-decoded. Whatever two servers in a row
might read differently is refused: segments that are empty (so also a slash at the end), `.` or `..`
in any spelling, a slash that is escaped (`%2F`; it would be a separator here and none there), `%`
that escapes nothing, what is not UTF-8, and control characters. Called by `api/application`,
`api/streams/request_headers`.
"""

from __future__ import annotations

import re
from typing import Final
from urllib.parse import quote, unquote_to_bytes

from topics_server.values.errors import TopicsError, invalid
from topics_server.values.limits import STREAM_PATH_BYTES_MAX
from topics_server.values.model import is_router_name, is_topic_name

_STRAY_PERCENT: Final = re.compile(rb"%(?![0-9A-Fa-f]{2})")
_ESCAPED_SLASH: Final = re.compile(rb"%2[Ff]")
_CONTROL: Final = re.compile("[\\x00-\\x1f\\x7f-\\x9f]")
# What may stand in a path as it is (RFC 3986, 3.3), the separators included.
_PLAIN_CHARS: Final = "/!$&'()*+,;=:@"


def name_of(segment: bytes) -> str:
    """A topic name from its decoded path segment; raises `invalid_request`."""
    name = segment.decode("latin-1")
    if not is_topic_name(name):
        raise invalid(
            "a topic name has 1 to 255 characters of A-Z a-z 0-9 . _ : - and starts with a letter "
            "or digit",
            "topic",
        )
    return name


def router_name_of(segment: bytes) -> str:
    """A router's name from its decoded path segment; raises `invalid_request`."""
    name = segment.decode("latin-1")
    if not is_router_name(name):
        raise invalid(
            "a router name has 1 to 255 characters of A-Z a-z 0-9 . _ : - > and starts with a "
            "letter or digit",
            "router",
        )
    return name


def stream_path_of(escaped: bytes, field: str = "path") -> str:
    """A stream's path from what was sent behind the mount; raises `invalid_request`.

    `field` says where it was sent.
    """
    if _STRAY_PERCENT.search(escaped) is not None:
        raise _no_path("has a % that escapes nothing", field)
    if _ESCAPED_SLASH.search(escaped) is not None:
        raise _no_path("has no escaped slash (%2F) within a segment", field)
    decoded = unquote_to_bytes(escaped)
    if len(decoded) > STREAM_PATH_BYTES_MAX:
        raise _no_path(f"has at most {STREAM_PATH_BYTES_MAX} bytes", field)
    try:
        path = decoded.decode()
    except UnicodeDecodeError:
        raise _no_path("is percent-encoded UTF-8", field) from None
    if _CONTROL.search(path) is not None:
        raise _no_path("has no control characters", field)
    for segment in path.split("/"):
        if segment in ("", ".", ".."):
            raise _no_path("has no segment that is empty, . or ..", field)
    return path


def stream_source_of(sent: bytes, mount: str, field: str) -> str:
    """The path of a stream that a header names by its URL's path; raises `invalid_request`."""
    prefix = mount.encode("ascii") + b"/"
    if not sent.startswith(prefix) or b"?" in sent or b"#" in sent:
        raise invalid(f"{field} is the path of a stream's URL: {mount}/...", field)
    return stream_path_of(sent[len(prefix) :], field)


def stream_url_path(mount: str, path: str) -> str:
    """The path of a stream's URL, escaped where it has to be."""
    return f"{mount}/{quote(path, safe=_PLAIN_CHARS)}"


def _no_path(rule: str, field: str) -> TopicsError:
    return invalid(f"the path of a stream {rule}", field)
