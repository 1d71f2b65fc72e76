"""Sizes for this machine: journal files, free-space floor, ballast.

Pure arithmetic over the size of the file system. Called by `node`.
"""

from __future__ import annotations

from typing import Final

from topics_server.values.limits import KIB, MIB
from topics_server.wal.journal.wal_file import Sizes

# Between two checkpoints the journal may take this fraction (1/n) of the file system.
WAL_SHARE: Final = 8
_MIN_FREE_BYTES_MAX: Final = 256 * MIB
_STEP_BYTES_MIN: Final = 128 * KIB
_PAGE_BYTES: Final = 4 * KIB
# The minimum ballast takes at most this fraction (1/n) of the file system.
_BALLAST_SHARE: Final = 64


def min_free_bytes(total_bytes: int) -> int:
    """The default of the free bytes below which appends are refused (contract README)."""
    return min(_MIN_FREE_BYTES_MAX, total_bytes // 100)


def journal_sizes(total_bytes: int, shard_count: int) -> Sizes:
    """Journal file sizes for this file system: preallocated files must not fill a small disk.

    A file is removed only as a whole, so on a small disk files are small too. The space that all
    shards fill ahead and keep in reserve is at most a sixteenth of the file system.
    """
    whole = Sizes()
    share = total_bytes // (4 * WAL_SHARE * shard_count)
    ahead = total_bytes // (2 * WAL_SHARE * shard_count)
    # Sizes are multiples of a page, with room for at least a few requests.
    step_bytes = _within(_STEP_BYTES_MIN, ahead * 3 // 4, whole.fill_step_bytes)
    reserve_bytes = _within(_STEP_BYTES_MIN // 4, ahead // 4, whole.reserve_bytes)
    file_bytes = _within(2 * step_bytes, share, whole.file_bytes)
    return Sizes(file_bytes, step_bytes, reserve_bytes)


def ballast_bytes(snapshot_bytes: int, total_bytes: int, sizes: Sizes) -> int:
    """The size of the ballast: the next snapshot, some growth, some manifests.

    Two snapshots are kept while a third is written. Never more than a sixteenth of the disk.
    """
    least = min(sizes.reserve_bytes, total_bytes // _BALLAST_SHARE)
    return max(least, min(snapshot_bytes + snapshot_bytes // 4 + least, total_bytes // 16))


def _within(least: int, value: int, most: int) -> int:
    """`value` in whole pages, within the bounds."""
    return max(least, min(most, value // _PAGE_BYTES * _PAGE_BYTES))
