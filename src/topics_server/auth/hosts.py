"""Decides which `Host` names a request may use (DNS rebinding rule). Pure.

Any web page can point its own name to 127.0.0.1 and then call, as a page of the same origin, a
local server without keys. Its `Host` header reveals this: it is not a name of this server. A client
that sends no `Host` is not a browser. Ports are ignored. Called by `api/application`.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from typing import Final

from topics_server.values.errors import Code, TopicsError

LOOPBACK_NAMES: Final = ("localhost", "127.0.0.1", "::1")
_HOST: Final = re.compile(r"\[([0-9a-f:.]+)\]|([a-z0-9._-]+)")
_PORT: Final = re.compile(rb":[0-9]*\Z")
# Spellings that were accepted before.
_KNOWN_MAX: Final = 256


class Hosts:
    """The accepted names; None: any."""

    def __init__(self, names: Iterable[str] | None = None) -> None:
        self.takes_any = names is None
        self._names = frozenset(names or ())
        self._known: set[bytes] = set()

    def check(self, host: bytes | None) -> None:
        """Raise `forbidden` for a `Host` that is not in the list."""
        if self.takes_any or host is None or host in self._known:
            return
        name = _PORT.sub(b"", host).decode("latin-1").lower().removesuffix(".")
        if normal_host(name) not in self._names:
            raise TopicsError(
                Code.FORBIDDEN,
                "this server does not have that name; TOPICS_ALLOWED_HOSTS lists its names",
                {"host": host[:256].decode("latin-1")},
            )
        if len(self._known) < _KNOWN_MAX:
            self._known.add(host)


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
