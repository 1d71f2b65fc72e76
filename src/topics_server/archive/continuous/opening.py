"""Opens the store that the URL of an archive names.

Called by `node/archiver` and the command line.
"""

from __future__ import annotations

from topics_server.archive.continuous.shared_folder import ArchiveStore, SharedFolder
from topics_server.archive.folder_owner import refuse_same_place
from topics_server.runtime.archive_url import parse_archive_url
from topics_server.wal.fs import Fs


def open_archive(fs: Fs, url: str, *, bytes_per_s: int = 0) -> ArchiveStore:
    """*Blocking.* The store of an archive. `bytes_per_s`: how fast it is written; 0: at any rate.

    Raises `StorageError` if it cannot be reached.
    """
    store = SharedFolder.open(fs, parse_archive_url(url).path)
    store.bytes_per_s = bytes_per_s
    return store


def refuse_place(fs: Fs, url: str, data_dir: str, cold_dir: str | None) -> None:
    """*Blocking.* Refuse an archive in the data directory or the cold folder, or around them."""
    refuse_same_place(fs, parse_archive_url(url).path, data_dir, cold_dir, "archive")
