"""The installed version, for probes, metrics and pages. Read at the first call."""

from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError, version


@cache
def server_version() -> str:
    """The installed version, or `0+unknown` in a source tree that was never installed."""
    try:
        return version("topics-server")
    except PackageNotFoundError:
        return "0+unknown"
