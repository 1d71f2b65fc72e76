"""Our server without the parts that operation adds to an append, for `operate-cost`.

No keys, no request ids, no security headers, no `Host` check, no request metrics. Parts without a
switch, because nobody should switch them off, are replaced here before the server starts. Only for
benchmarks: `python -m benchmarks.plain_server serve`.
"""

from __future__ import annotations

from typing import Any

from topics_server.api import access_log, application, direct
from topics_server.auth import api_keys, hosts

_ID = b"r"


def _nothing(*_: Any, **__: Any) -> None:
    """A replacement that neither checks nor counts."""


def _everybody(*_: Any) -> api_keys.Caller:
    return api_keys.EVERYBODY


def _one_id(_headers: Any) -> bytes:
    return _ID


def strip() -> None:
    """Remove the parts; every replaced name must still exist."""
    replaced: tuple[tuple[Any, str, Any], ...] = (
        (access_log.Observer, "answered", _nothing),
        (hosts.Hosts, "check", _nothing),
        (application, "authorized", _everybody),
        (application, "request_id_of", _one_id),
        (application, "_GUARDS", ()),
        (direct, "request_id", _one_id),
    )
    for owner, name, value in replaced:
        assert hasattr(owner, name), f"{owner} has no {name} any more"
        setattr(owner, name, value)


if __name__ == "__main__":
    strip()
    from topics_server.cli import main

    main()
