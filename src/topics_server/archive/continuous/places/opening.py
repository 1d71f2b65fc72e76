"""Opens the place of an archive's URL.

Called by `node/archiver`, `node/ground` and the command line.
"""

from __future__ import annotations

from collections.abc import Callable

from topics_server.archive.continuous.places.cloud import open_cloud
from topics_server.archive.continuous.places.ranges import PACKAGE, is_installed
from topics_server.archive.continuous.places.retrying import RetryingStore
from topics_server.archive.continuous.places.shared_folder import ArchiveStore, SharedFolder
from topics_server.archive.folder_owner import refuse_same_place
from topics_server.values.errors import StartRefused
from topics_server.values.texts.archive_url import FILE, parse_archive_url
from topics_server.wal.fs import Fs


def open_archive(
    fs: Fs,
    url: str,
    *,
    bytes_per_s: int = 0,
    holder: str = "",
    is_ending: Callable[[], bool] = lambda: False,
) -> ArchiveStore:
    """*Blocking.* The store of an archive. `bytes_per_s`: the maximum rate of writes; 0: no limit.

    `holder`: the id of the server's store; empty for other programs. `is_ending`: once it returns
    true, no call is repeated. Raises `StorageError` if the archive cannot be reached.
    """
    parsed = parse_archive_url(url)
    if parsed.scheme != FILE:
        return RetryingStore(open_cloud(parsed.text, holder, bytes_per_s), is_ending=is_ending)
    store = SharedFolder.open(fs, parsed.path)
    store.bytes_per_s = bytes_per_s
    return store


def refuse_place(fs: Fs, url: str, data_dir: str, cold_dir: str | None) -> None:
    """*Blocking.* Refuse an archive inside a folder of the store, or one without its obstore."""
    parsed = parse_archive_url(url)
    if parsed.scheme == FILE:
        refuse_same_place(fs, parsed.path, data_dir, cold_dir, "archive")
    elif not is_installed():
        raise StartRefused(
            f"an archive in {parsed.scheme}:// needs the package {PACKAGE}: pip install {PACKAGE}"
        )
