"""Brings host names, and lists of them, into one normal form. Pure.

Called by `settings`, for `TOPICS_ALLOWED_HOSTS`, and by `auth/hosts`, for the `Host` of a request.
"""

from __future__ import annotations

import ipaddress
import re
from typing import Final

LOOPBACK_NAMES: Final = ("localhost", "127.0.0.1", "::1")
_HOST: Final = re.compile(r"\[([0-9a-f:.]+)\]|([a-z0-9._-]+)")


def normal_host(text: str) -> str | None:
    """A host in normal form: lower case, one spelling per address; None if invalid."""
    match = _HOST.fullmatch(text)
    if match is None:
        return None
    name = match[1] or match[2]
    try:
        return ipaddress.ip_address(name).compressed
    except ValueError:
        return None if match[1] else name


def split_hosts(text: str) -> list[str]:
    """The normal names of a comma-separated list; ValueError if one is invalid."""
    found: list[str] = []
    for part in filter(None, (part.strip().lower() for part in text.split(","))):
        bracketed = f"[{part}]" if part.count(":") > 1 and not part.startswith("[") else part
        name = normal_host(bracketed)
        if name is None:
            raise ValueError(f"{part} is not a host name")
        found.append(name)
    return found
