"""The installed version, for probes, metrics and pages. Read when it is first asked for."""

from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError, version


@cache
def server_version() -> str:
    """The installed version; a tree that was never installed reports that."""
    try:
        return version("topics-server")
    except PackageNotFoundError:
        return "0+unknown"
