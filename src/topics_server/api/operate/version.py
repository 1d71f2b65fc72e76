"""The installed version, for probes, metrics and pages.

Read when it is first asked for: a start does not need it, and the module that reads it takes
milliseconds to import.
"""

from __future__ import annotations

from functools import cache


@cache
def server_version() -> str:
    """The installed version; a tree that was never installed reports that."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("topics-server")
    except PackageNotFoundError:
        return "0+unknown"
