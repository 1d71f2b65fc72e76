"""Creates directories durably, parents included.

If a directory's name is durable in its parent, but the parent's name is not, a power cut loses the
parent with everything in it. Every folder of the data directory and of the cold folder is made
here. Called by the start and by code that makes a folder later.
"""

from __future__ import annotations

from topics_server.values.errors import StorageError
from topics_server.wal.fs import Fs
from topics_server.wal.layout import parent


def make_durable_dirs(fs: Fs, path: str, mode: int = 0o700) -> None:
    """Make a directory and its missing parents; each new name is synced.

    Not an error if it exists. Its own name is synced in any case: the process that made it may have
    died before its sync.
    """
    missing: list[str] = []
    at = path
    while at not in (".", "/") and not fs.exists(at):
        missing.append(at)
        at = parent(at)
    for folder in reversed(missing):
        fs.make_dir(folder, mode)
        fs.sync_dir(parent(folder))
    if not missing and path not in (".", "/"):
        fs.sync_dir(parent(path))


def sync_ancestors(fs: Fs, path: str) -> None:
    """Make the names of all readable parents of `path` durable.

    Used by the first start in a directory that exists: an earlier start may have made its parents
    and died before it synced them. A parent that cannot be opened was not made by this server.
    """
    at = parent(path)
    while True:
        try:
            fs.sync_dir(at)
        except StorageError:
            if at == parent(path):
                raise
        if at == parent(at):
            return
        at = parent(at)
