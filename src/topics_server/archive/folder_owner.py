"""Which store a backup folder belongs to, and whether it is still the same folder.

`STORE` in the folder names the store. `BACKUP_FOLDER` in the data directory names the folder that
was used last, with the random id of its `STORE`: if that path no longer has a `STORE`, its disk is
not mounted, and nothing is written to the empty mount point. Called by `backup`.
"""

from __future__ import annotations

from typing import Final

import msgspec

from topics_server.archive.format import OWNER, VERSION, Owner, decode_owner, encode_json
from topics_server.archive.object_store import FolderStore, read_whole
from topics_server.runtime.clock import random_hex
from topics_server.values.errors import Corrupt, StartRefused
from topics_server.wal import layout
from topics_server.wal.atomic_write import rename_temp, write_temp
from topics_server.wal.cold_folder import lies_in
from topics_server.wal.format.checked_json import encode_checked, is_checked
from topics_server.wal.fs import Fs

_ID_BYTES: Final = 16
# Names that a folder without backups may contain.
_IGNORED: Final = frozenset({"LOCK", "lost+found"})


class _KnownFolder(msgspec.Struct, frozen=True):
    """The content of `BACKUP_FOLDER`."""

    format: int
    path: str
    folder_id: str


_DECODER: Final = msgspec.json.Decoder(_KnownFolder)


def refuse_same_place(
    fs: Fs, folder: str, data_dir: str, cold_dir: str | None, what: str = "backup folder"
) -> None:
    """Refuse a folder that is inside the data or the cold folder, or contains one of them."""
    for other in (data_dir, cold_dir):
        if other is not None and (lies_in(fs, folder, other) or lies_in(fs, other, folder)):
            raise StartRefused(
                f"the {what} and {other} are one, or one lies inside the other: name a "
                "folder beside it",
                folder,
            )


def own_folder(fs: Fs, store: FolderStore, data_dir: str, store_id: str) -> Owner:
    """The folder's `STORE`, which is created in an empty folder. Raises `StartRefused`."""
    owner, is_noted = judge_folder(fs, store, data_dir, store_id)
    if owner is None:
        owner = Owner(VERSION, store_id, random_hex(_ID_BYTES))
        store.put_if_absent(OWNER, [encode_json(owner)])
    if not is_noted:
        mark = layout.join(data_dir, layout.BACKUP_FOLDER)
        _write_known_folder(fs, mark, _KnownFolder(VERSION, store.root, owner.folder_id))
    return owner


def judge_folder(
    fs: Fs, store: FolderStore, data_dir: str, store_id: str
) -> tuple[Owner | None, bool]:
    """The folder's `STORE` (None in an empty folder), and whether `BACKUP_FOLDER` names the folder.

    Changes nothing. A folder that this store used before under the same path must have a `STORE`:
    an empty one is the mount point of an unmounted disk. Raises `StartRefused`.
    """
    mark = layout.join(data_dir, layout.BACKUP_FOLDER)
    path = store.path_of(OWNER)
    known = _read_known_folder(fs, mark)
    is_known = known is not None and known.path == store.root
    if store.size(OWNER) is None:
        if is_known:
            raise StartRefused(
                "is missing, and this store has backups in this folder: is its disk mounted? If "
                f"the backups are gone for good, remove {mark}",
                path,
            )
        others = [name for name in store.names("") if name not in _IGNORED]
        if others:
            raise StartRefused(
                f"this folder holds other files ({others[0]}): name an empty one", store.root
            )
        return None, False
    owner = _read_owner(store, path)
    if owner.store_id != store_id:
        raise StartRefused(
            f"belongs to store {owner.store_id}, and this is store {store_id}: name another folder",
            path,
        )
    if is_known and known is not None and known.folder_id != owner.folder_id:
        raise StartRefused(
            "is another backup folder than the one that this store used here before: remove "
            f"{mark} to use it",
            path,
        )
    return owner, is_known


def _read_owner(store: FolderStore, path: str) -> Owner:
    try:
        return decode_owner(read_whole(store, OWNER), path)
    except Corrupt:
        raise Corrupt(
            "is damaged, so new backups need another, empty folder; 'topics restore' still takes "
            "those that are here",
            path,
        ) from None


def _read_known_folder(fs: Fs, path: str) -> _KnownFolder | None:
    if not fs.exists(path):
        return None
    file = fs.open(path)
    try:
        content = file.pread(file.size(), 0)
    finally:
        file.close()
    if not is_checked(content):
        raise Corrupt("fails its check; remove it if the backup folder is the right one", path)
    try:
        return _DECODER.decode(content)
    except msgspec.MsgspecError as error:
        raise Corrupt(f"{error}; remove it if the backup folder is the right one", path) from None


def _write_known_folder(fs: Fs, path: str, known: _KnownFolder) -> None:
    write_temp(fs, path, [encode_checked(known)])
    rename_temp(fs, path)
    fs.sync_dir(layout.parent(path))
