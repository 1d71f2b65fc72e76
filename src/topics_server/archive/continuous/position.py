"""The file `ARCHIVE_POSITION` in the data directory: how far the archive of this store is.

Before a part is put, the part's checksum is stored in this file. So after a kill at any point the
next start can tell whether this store wrote the newest part of the archive. A server on a copy of
the data directory finds a part that it did not write, and stops, so the archive stays one history.
`is_gap`: since the newest part the journal was not kept for the archive, so the next stretch begins
from a new base. Called by `shipper` and `node/archiver`.
"""

from __future__ import annotations

from typing import Final

import msgspec

from topics_server.values.errors import Corrupt, StartRefused
from topics_server.wal import layout
from topics_server.wal.atomic_write import rename_temp, write_temp
from topics_server.wal.format.checked_json import encode_checked, is_checked
from topics_server.wal.fs import Fs

_FORMAT: Final = 1
# A put that timed out may still arrive: this many checksums of one number are remembered.
_INTENTS_MAX: Final = 64


class ArchivePosition(msgspec.Struct, frozen=True, kw_only=True):
    """The newest part that is known to be in the archive, and the attempts after it.

    `number` 0: there is none. `digest`: its XXH3-64. `intents`: the digests of parts that were put
    under the next number. `base_lsn`, `base_ts_ms`: those of the newest base that counts.
    """

    format: int = _FORMAT
    url: str
    archive_id: str
    number: int = 0
    digest: str = ""
    last_lsn: int = 0
    ts_ms: int = 0
    stretch: int = 0
    base_part: int = 0
    base_lsn: int = 0
    base_ts_ms: int = 0
    intents: list[str] = []
    is_gap: bool = False

    def intending(self, digest: str) -> ArchivePosition:
        """The position before a part with this checksum is put."""
        intents = [*self.intents, digest][-_INTENTS_MAX:]
        return msgspec.structs.replace(self, intents=intents)


_DECODER: Final = msgspec.json.Decoder(ArchivePosition)


def read_position(fs: Fs, root: str) -> ArchivePosition | None:
    """*Blocking.* The file's content; None if there is none. Raises `Corrupt`, `StartRefused`."""
    path = layout.join(root, layout.ARCHIVE_POSITION)
    if not fs.exists(path):
        return None
    file = fs.open(path)
    try:
        content = file.pread(file.size(), 0)
    finally:
        file.close()
    if not is_checked(content):
        raise Corrupt("fails its check; remove it, and name an empty archive", path)
    try:
        found = _DECODER.decode(content)
    except msgspec.DecodeError as error:
        raise Corrupt(f"{error}; remove it, and name an empty archive", path) from None
    if found.format > _FORMAT:
        raise StartRefused(f"format {found.format} is newer than {_FORMAT}", path)
    return found


def write_position(fs: Fs, root: str, position: ArchivePosition) -> None:
    """*Blocking.* Write the file; durable when this returns."""
    path = layout.join(root, layout.ARCHIVE_POSITION)
    write_temp(fs, path, [encode_checked(position)])
    rename_temp(fs, path)
    fs.sync_dir(root)


def note_gap(fs: Fs, root: str) -> None:
    """*Blocking.* Note that the journal is not kept for the archive; nothing without a file."""
    position = read_position(fs, root)
    if position is not None and not position.is_gap:
        write_position(fs, root, msgspec.structs.replace(position, is_gap=True))
