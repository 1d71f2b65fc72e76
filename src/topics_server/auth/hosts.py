"""Decides which `Host` names a request may use (DNS rebinding rule). Pure.

Any web page can point its own name to 127.0.0.1 and then call, as a page of the same origin, a
local server without keys. The `Host` header of such a request reveals this: it is not a name of
this server. A client that sends no `Host` is not a browser. Ports are ignored. Called by
`api/front_door` and `api/websocket/handlers`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

from topics_server.values.errors import Code, TopicsError
from topics_server.values.texts.host_names import normal_host

_PORT: Final = re.compile(rb":[0-9]*\Z")
# Cached spellings that passed the check.
_KNOWN_MAX: Final = 256


class Hosts:
    """The accepted host names; None accepts any."""

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
