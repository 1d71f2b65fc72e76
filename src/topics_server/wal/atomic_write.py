"""Publishes a file atomically: write beside, sync, rename, sync the directory.

Used for segments, manifests and snapshots. Invariant: a name without the temp suffix always holds
a complete, synced file. A failed sync is never tried again on the same bytes: the temp file is
removed.
"""

from __future__ import annotations

from collections.abc import Iterable

from topics_server.values.errors import StorageError
from topics_server.wal.fs import Buffer, Fs
from topics_server.wal.layout import temp


def write_temp(fs: Fs, path: str, pieces: Iterable[Buffer]) -> int:
    """Write and sync `path`'s temp file; return its length. A failure removes the temp file."""
    try:
        file = fs.open(temp(path), create=True)
        try:
            offset = 0
            for piece in pieces:
                file.pwrite(piece, offset)
                offset += len(piece)
            file.sync()
        finally:
            file.close()
    except StorageError:
        remove_quietly(fs, temp(path))
        raise
    return offset


def rename_temp(fs: Fs, path: str) -> None:
    """Rename the temp file to `path`; durable once the directory is synced."""
    fs.rename(temp(path), path)


def remove_quietly(fs: Fs, path: str) -> None:
    """Remove a file that nothing relies on; if that fails, the file stays."""
    try:
        fs.unlink(path, missing_ok=True)
    except StorageError:
        pass
