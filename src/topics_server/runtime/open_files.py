"""How the process divides the files that it may have open. Pure.

Called by `node/ground` for the segments and by `server` for the connections.
"""

from __future__ import annotations

from typing import Final

# The store's part of the open files that the process may have; connections get the rest.
_STORE_FILES_SHARE: Final = 4
_STORE_FILES_MAX: Final = 4096
# Files that are neither connections nor segments: journal, snapshots, pipes, the listener.
_OTHER_FILES: Final = 128
# A server with fewer connections would refuse its own health checks.
_CONNECTIONS_MIN: Final = 16


def store_files(open_files: int) -> int:
    """How many of the process's open files the segments may use."""
    return max(16, min(_STORE_FILES_MAX, open_files // _STORE_FILES_SHARE))


def connection_files(open_files: int) -> int:
    """How many of the process's open files connections may use; 0, unlimited, for 0 or -1."""
    if open_files <= 0:
        return 0
    return max(_CONNECTIONS_MIN, open_files - store_files(open_files) - _OTHER_FILES)
