"""The URL of an archive: which kind of store, and where in it.

A URL contains no user, no password and no option: credentials come from the environment variables
that the object store defines. Called by `settings`, the command line and
`archive/continuous/places/opening`.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

FILE: Final = "file"
_BUCKET: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,254}", re.ASCII)
# A part of a prefix; no part begins with a dot.
_PREFIX: Final = re.compile(r"[A-Za-z0-9_=-][A-Za-z0-9._=-]{0,254}", re.ASCII)


# The schemes of object stores: the first part of the path is the bucket, the rest is a prefix.
CLOUDS: Final = frozenset({"s3", "gs", "az"})


class ArchiveUrl(NamedTuple):
    """`path`: the folder's path; empty for an object store. `text`: the URL."""

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
    if found.scheme != FILE and found.scheme not in CLOUDS:
        raise ValueError("another scheme than file, s3, gs and az")
    if "@" in found.netloc or "?" in text or "#" in text:
        raise ValueError("a user, a query or a fragment: credentials belong in the environment")
    if found.scheme in CLOUDS:
        parts = found.path.strip("/").split("/") if found.path.strip("/") else []
        if not _BUCKET.fullmatch(found.netloc) or not all(map(_PREFIX.fullmatch, parts)):
            raise ValueError("not a bucket, and a prefix in plain characters")
        return ArchiveUrl(found.scheme, "", "/".join((f"{found.scheme}://{found.netloc}", *parts)))
    if found.netloc or not found.path.startswith("/") or "\0" in unquote(found.path):
        raise ValueError("not file:/// and an absolute path")
    path = unquote(found.path).rstrip("/")
    if not path:
        raise ValueError("the root folder")
    return ArchiveUrl(FILE, path, text)


def is_url(text: str) -> bool:
    """Whether a text is the URL of an archive, not a path."""
    return "://" in text
