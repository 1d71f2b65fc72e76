"""Checks tokens, URLs, and names that become part of a URL, when a program gives them. Pure.

Messages never repeat a refused token or credentials in a URL, because they are secrets. Called by
every client that takes a token or a URL, and by the command line.
"""

from __future__ import annotations

from typing import Final
from urllib.parse import SplitResult, quote, urlsplit

_DOTS: Final = frozenset({".", ".."})


def checked_token(token: str | None) -> str | None:
    """The token without the white space that a file or a shell leaves around it; `None` for no
    token.

    Raises `ValueError` for a token that no HTTP header can carry. The message names the position of
    the character, never the token.
    """
    if not token:
        return None
    stripped = token.strip()
    if not stripped:
        raise ValueError("the token is only white space; leave it out, or give a key")
    for position, character in enumerate(stripped, 1):
        if not "!" <= character <= "~":
            kind = "white space" if character.isspace() else "not a visible ASCII character"
            raise ValueError(
                f"character {position} of the token is {kind}; a key cannot contain one"
            )
    return stripped


def checked_url(url: str, example: str) -> SplitResult:
    """The parts of an `http` or `https` URL with a host that can be looked up.

    Raises `ValueError` with one sentence, which repeats the URL unless it holds credentials.
    """
    try:
        parts = urlsplit(url)
        has_credentials = "@" in parts.netloc
    except ValueError:
        raise ValueError(
            f"{_shown(url)} is not the URL of a server; one looks like {example}"
        ) from None
    if has_credentials:
        raise ValueError("the URL must not contain credentials; give the key as the token")
    problem = _problem(url, parts)
    if problem is not None:
        raise ValueError(
            f"{_shown(url)} is not the URL of a server{problem}; one looks like {example}"
        )
    return parts


def segment(name: str) -> str:
    """A name as one segment of a path. Raises `ValueError` for `.` and `..`.

    HTTP libraries resolve a URL before they send it: `topics/orders/views/..` becomes the topic
    itself, so that a request to delete a view would delete the topic.
    """
    if name in _DOTS:
        raise ValueError(f"{name!r} is not a name: a URL cannot have it as a segment")
    return quote(name, safe="")


def checked_path(path: str) -> str:
    """A path without the segments `.` and `..`. Raises `ValueError` for a path with one of them."""
    found = path.partition("?")[0].split("/")
    if any(part.lower().replace("%2e", ".") in _DOTS for part in found):
        raise ValueError("a path must not have the segment . or ..: a URL cannot have it")
    return path


def checked_header(value: str, what: str) -> str:
    """A value that an HTTP header can carry. Raises `ValueError`, which names `what`."""
    if not (value.isascii() and value.isprintable()) or value != value.strip():
        raise ValueError(f"{what} must be printable ASCII characters without spaces around them")
    return value


def _shown(url: str) -> str:
    return "this" if "@" in url else repr(url)


def _problem(url: str, parts: SplitResult) -> str | None:
    """What is wrong with a URL, as the end of a sentence; `None` for a valid URL."""
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        return ""
    if not url.isprintable() or " " in url:
        return " (it holds white space or control characters)"
    try:
        port = parts.port
    except ValueError:
        return " (a port is a number from 1 to 65535)"
    if port == 0:
        return " (a port is a number from 1 to 65535)"
    try:
        if ":" not in parts.hostname:
            parts.hostname.encode("idna")
    except UnicodeError:
        return " (its host is not a valid name)"
    return None
