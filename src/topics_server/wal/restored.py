"""The file `RESTORED`: what the first start of a restored store must not use again.

`archive/restore` writes it before `FORMAT`; the first start skips the heads, ids and epochs that it
names, publishes a snapshot with the result, and removes the file. If a start is killed before that,
the next start does the same again. Called by `archive/restore` and `node/boot`.
"""

from __future__ import annotations

import msgspec

from topics_server.values.errors import Corrupt, StartRefused
from topics_server.values.storage_types import KnownPositions
from topics_server.wal import layout
from topics_server.wal.atomic_write import rename_temp, write_temp
from topics_server.wal.format.checked_json import encode_checked, is_checked
from topics_server.wal.fs import Fs

_FORMAT = 1


class _Restored(msgspec.Struct, frozen=True):
    """`heads`: pairs of topic id and seq."""

    format: int
    next_topic_id: int
    epoch: int
    heads: list[tuple[int, int]]


_DECODER = msgspec.json.Decoder(_Restored)


def write_restored(fs: Fs, root: str, known: KnownPositions) -> None:
    """*Blocking.* Write the file durably, except its name, which the caller syncs."""
    path = layout.join(root, layout.RESTORED)
    heads = sorted(known.heads.items())
    content = encode_checked(_Restored(_FORMAT, known.next_topic_id, known.epoch, heads))
    write_temp(fs, path, [content])
    rename_temp(fs, path)


def read_restored(fs: Fs, root: str) -> KnownPositions | None:
    """*Blocking.* The file's content; `None` if there is none. Raises `Corrupt`, `StartRefused`."""
    path = layout.join(root, layout.RESTORED)
    if not fs.exists(path):
        return None
    file = fs.open(path)
    try:
        content = file.pread(file.size(), 0)
    finally:
        file.close()
    if not is_checked(content):
        raise Corrupt("fails its check: restore the backup again", path)
    found = _DECODER.decode(content)
    if found.format > _FORMAT:
        raise StartRefused(f"format {found.format} is newer than {_FORMAT}", path)
    return KnownPositions(found.next_topic_id, found.epoch, dict(found.heads))


def remove_restored(fs: Fs, root: str) -> None:
    """*Blocking.* Remove the file; a published snapshot holds all its facts."""
    fs.unlink(layout.join(root, layout.RESTORED), missing_ok=True)
    fs.sync_dir(root)
