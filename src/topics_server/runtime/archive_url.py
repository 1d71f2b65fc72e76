"""The URL of an archive: which kind of store, and where in it.

A URL names no user, no password and no option: credentials come from the environment of the store's
own convention. Called by `settings`, the command line and `archive/continuous/opening`.
"""

from __future__ import annotations

from typing import Final, NamedTuple

FILE: Final = "file"


class ArchiveUrl(NamedTuple):
    """`path`: of a folder. `text`: the URL as it was given."""

    scheme: str
    path: str
    text: str


def parse_archive_url(text: str) -> ArchiveUrl:
    """The parts of a URL. Raises `ValueError`; the message does not repeat the text."""
    from urllib.parse import unquote, urlsplit

    try:
        found = urlsplit(text)
    except ValueError:
        raise ValueError("not a URL") from None
    if found.scheme != FILE:
        raise ValueError("another scheme than file")
    if "@" in found.netloc or found.query or found.fragment or "?" in text or "#" in text:
        raise ValueError("a user, a query or a fragment: credentials belong in the environment")
    if found.netloc or not found.path.startswith("/") or "\0" in unquote(found.path):
        raise ValueError("not file:/// and an absolute path")
    path = unquote(found.path).rstrip("/")
    if not path:
        raise ValueError("the root folder")
    return ArchiveUrl(FILE, path, text)


def is_url(text: str) -> bool:
    """Whether a text is meant as the URL of an archive, and not as a path."""
    return "://" in text


def archive_setting(given: object) -> object:
    """The value of the setting: a URL that can be used. Raises `ValueError`."""
    return parse_archive_url(given).text if isinstance(given, str) else given
