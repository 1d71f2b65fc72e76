"""How much of the machine the store takes: open files, journal files, free space it leaves.

Pure arithmetic over the size of the file system and the process's limits. Called by `node` and
`server`.
"""

from __future__ import annotations

from typing import Final

from topics_server.limits import MIB
from topics_server.wal.tail import Sizes

# Of the open files the process may have, the store's share; the rest is for connections.
_STORE_FILES_SHARE: Final = 4
_STORE_FILES_MAX: Final = 4096
# The journal may take one part in so many of the file system between two checkpoints.
WAL_SHARE: Final = 8
_MIN_FREE_BYTES_MAX: Final = 256 * MIB


def store_files(open_files: int) -> int:
    """How many of the files that the process may have open are the segments'."""
    return max(16, min(_STORE_FILES_MAX, open_files // _STORE_FILES_SHARE))


def min_free_bytes(total_bytes: int) -> int:
    """Below how many free bytes appends are refused, where no setting says (contract README)."""
    return min(_MIN_FREE_BYTES_MAX, total_bytes // 100)


def journal_sizes(total_bytes: int, shard_count: int) -> Sizes:
    """Journal files that fit the file system: a small disk is not all preallocated files.

    A file is let go only as a whole, so on a small disk files are small too.
    """
    share = total_bytes // (4 * WAL_SHARE * shard_count)
    whole = Sizes()
    file_bytes = max(whole.fill_step_bytes, min(whole.file_bytes, share // MIB * MIB))
    return whole._replace(file_bytes=file_bytes)
