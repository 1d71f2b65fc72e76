"""Our server without the parts of an append that serve only operation, for `operate-cost`.

Settings switch off keys and the `Host` check (`cases/operating`). Request ids, security headers and
request metrics cannot be switched off, because no installation should do that. So this module
replaces them before the server starts. Only for benchmarks:
`python -m benchmarks.servers.plain_server serve`.
"""

from __future__ import annotations

from typing import Any

from topics_server.api import access_log, direct, front_door
from topics_server.cli import main

_ID = b"r"


def _nothing(*_: Any, **__: Any) -> None:
    """A replacement that counts nothing."""


def _one_id(_headers: Any) -> bytes:
    return _ID


def _one_number() -> int:
    return 1


def strip() -> None:
    """Remove the parts; every replaced name must still exist."""
    replaced: tuple[tuple[Any, str, Any], ...] = (
        (access_log.Observer, "answered", _nothing),
        (front_door, "_GUARDS", ()),
        (front_door, "request_id_of", _one_id),
        (direct, "request_id", _one_id),
        (direct, "next_number", _one_number),
    )
    for owner, name, value in replaced:
        assert hasattr(owner, name), f"{owner} has no {name} any more"
        setattr(owner, name, value)


if __name__ == "__main__":
    strip()
    main()
