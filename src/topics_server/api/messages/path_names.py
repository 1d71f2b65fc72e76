"""Decodes the topic, router or stream name in a request path. Pure.

A stream's path is the part behind the mount, percent-decoded. Paths that a proxy and this server
might read differently are refused: empty segments (so also a slash at the end), `.` or `..` in any
spelling, an escaped slash (`%2F`; a separator for one server and not for the other), `%` without
two hexadecimal digits, invalid UTF-8, and control characters. Called by `api/routing`,
`api/front_door` and `api/streams/`.
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
# The characters that a path may hold unescaped (RFC 3986, 3.3), the separators included.
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
    """A stream's path from the part of the URL behind the mount; raises `invalid_request`.

    `field` names the source of the path.
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
    """The path of a stream from a header that holds its URL's path; raises `invalid_request`."""
    prefix = mount.encode("ascii") + b"/"
    if not sent.startswith(prefix) or b"?" in sent or b"#" in sent:
        raise invalid(f"{field} must be the path of a stream's URL: {mount}/...", field)
    return stream_path_of(sent[len(prefix) :], field)


def stream_url_path(mount: str, path: str) -> str:
    """The path of a stream's URL, escaped where necessary."""
    return f"{mount}/{quote(path, safe=_PLAIN_CHARS)}"


def _no_path(rule: str, field: str) -> TopicsError:
    return invalid(f"the path of a stream {rule}", field)


def names_below(raw_path: bytes) -> tuple[str, ...]:
    """The names behind the topic in a view's path: the view, and its query if the path has one."""
    return tuple(
        unquote_to_bytes(part).decode("utf-8", "replace") for part in raw_path.split(b"/")[5::2]
    )
