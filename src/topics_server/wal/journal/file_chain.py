"""The journal files on disk and the chain they form.

Each file's first group names the file before it, the end of that file and its shard's last lsn. If
the chain does not reach back to the start of replay, or has a gap after it, the start is refused: a
missing file is not an empty one. Called by `replay`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from typing import Final, NoReturn

from topics_server.values.errors import Corrupt, StartRefused, StorageError
from topics_server.values.limits import MIB
from topics_server.wal import layout
from topics_server.wal.format.end_marks import EndMark
from topics_server.wal.format.frames import Opening
from topics_server.wal.format.groups import (
    ALIGNMENT,
    FILE_HEADER_BYTES,
    GROUP_HEADER_BYTES,
    Ending,
    FileHeader,
    Group,
    Scan,
    decode_file_header,
    find_group,
    scan,
)
from topics_server.wal.fs import File, Fs

CHUNK_BYTES: Final = MIB

assert CHUNK_BYTES % ALIGNMENT == 0

# (wal set, shard)
Key = tuple[int, int]


class JournalFile:
    """One file on disk. `first`: its first group; `None` if that is invalid or missing."""

    def __init__(self, path: str, file: File, size: int, header: FileHeader) -> None:
        self.path = path
        self.file = file
        self.size = size
        self.header = header
        self.first: Group | None = None
        # These fields are filled while the file is read.
        self.synced_bytes = FILE_HEADER_BYTES
        self.end = FILE_HEADER_BYTES

    @property
    def key(self) -> Key:
        """Wal set and shard of the file."""
        return self.header.wal_set, self.header.shard

    @property
    def name(self) -> layout.WalName:
        """The name of the file."""
        header = self.header
        return layout.WalName(header.wal_set, header.shard, header.number)

    @property
    def opening(self) -> Opening:
        """The file before this one; only for a file that has groups."""
        assert self.first is not None
        assert self.first.opening is not None
        return self.first.opening

    def scan(self, position: int, *, one: bool = False, from_lsn: int = 0) -> Scan:
        """Decode one chunk from a position on; reads more if one group is larger than the chunk.

        May skip the decoding of entries whose lsns are lower than `from_lsn`.
        """
        length = GROUP_HEADER_BYTES if one else CHUNK_BYTES
        while True:
            buffer = self.file.pread(min(length, self.size - position), position)
            try:
                result = scan(buffer, position, self.header.file_id, self.size, from_lsn)
            except Corrupt as error:
                raise Corrupt(str(error), self.path) from error
            if result.ending is not Ending.MORE or result.groups:
                return result
            if length >= result.needed_bytes:
                raise StorageError("the file became shorter while it was read", self.path)
            length = result.needed_bytes

    def groups_behind(self, position: int) -> Iterator[Group]:
        """Every valid group after a damaged one, at any position."""
        position += ALIGNMENT
        while self.size - position >= GROUP_HEADER_BYTES:
            length = min(CHUNK_BYTES + GROUP_HEADER_BYTES, self.size - position)
            buffer = self.file.pread(length, position)
            offset = find_group(buffer, 0, len(buffer), position, self.size)
            if offset < 0:
                position += CHUNK_BYTES
                continue
            result = self.scan(position + offset, one=True)
            yield from result.groups
            position = result.groups[-1].end if result.groups else position + offset + ALIGNMENT

    def every_group(self) -> list[Group]:
        """Every valid group of the file, at any position."""
        groups: list[Group] = []
        position = FILE_HEADER_BYTES
        while True:
            result = self.scan(position)
            groups += result.groups
            position = result.position
            if result.ending is Ending.MORE:
                continue
            behind = next(self.groups_behind(position), None)
            if behind is None:
                return groups
            position = behind.position

    def dirty_end(self, position: int) -> int:
        """The position after the last byte from `position` on that is not zero."""
        return max(_dirty_ends(self.file, position, self.size), default=position)


def open_files(
    fs: Fs,
    wal_dir: str,
    *,
    write: bool,
    is_whole: bool = True,
    behind: tuple[Key, int] | None = None,
) -> tuple[dict[Key, list[JournalFile]], list[layout.WalName]]:
    """Files by (set, shard), ascending by number, and the names of unfinished files.

    Checks every header and reads every first group; a valid first group is required only if
    `is_whole`: nothing is known to be damaged. `behind`: for each shard, open only the files above
    this number. Raises `Corrupt`, `StartRefused`.
    """
    shards: dict[Key, list[JournalFile]] = {}
    unfinished: list[layout.WalName] = []
    names = [layout.parse_wal_file(name) for name in fs.list_dir(wal_dir)]
    for name in sorted(name for name in names if name is not None):
        if behind is not None and not _is_behind(name, *behind):
            continue
        path = layout.join(wal_dir, layout.wal_file(name))
        file = fs.open(path, write=write)
        size = file.size()
        header = decode_file_header(file.pread(FILE_HEADER_BYTES, 0))
        if header is None:
            if any(_dirty_ends(file, FILE_HEADER_BYTES, size)):
                raise Corrupt("the file header fails its check", path)
            # The creation of this file was interrupted: it never got a group.
            file.close()
            unfinished.append(name)
            continue
        found = JournalFile(path, file, size, header)
        if found.name != name:
            raise Corrupt(f"the header says {layout.wal_file(found.name)}", path)
        first = found.scan(FILE_HEADER_BYTES, one=True)
        found.first = first.groups[0] if first.groups else None
        if is_whole and found.first is not None and found.first.opening is None:
            raise Corrupt("the first group does not say which file it continues", path)
        shards.setdefault((name.wal_set, name.shard), []).append(found)
    return shards, unfinished


def _is_behind(name: layout.WalName, key: Key, number: int) -> bool:
    return (name.wal_set, name.shard) == key and name.number > number


def check_sets(
    wal_dir: str,
    wal_sets: Sequence[tuple[int, int, int]],
    present: Set[Key],
    start_lsn: int,
) -> None:
    """Check that every shard of a required set has a file: a missing file is not an empty one."""
    for index, (wal_set, shard_count, _) in enumerate(wal_sets):
        is_last = index + 1 == len(wal_sets)
        if not is_last and wal_sets[index + 1][2] <= start_lsn:
            continue
        for shard in range(shard_count):
            if (wal_set, shard) not in present:
                raise StartRefused(
                    f"journal files of wal set {wal_set}, shard {shard} are missing",
                    wal_dir,
                )


def needed_files(
    wal_dir: str,
    key: Key,
    files: list[JournalFile],
    start_lsn: int,
    mark: EndMark | None = None,
) -> list[JournalFile]:
    """The files that hold groups and must be read: from the last one back to `start_lsn`.

    The file that the end mark names may have no groups yet; then its header names the last file
    that has groups.
    """
    used = [found for found in files if found.first is not None]
    needed: list[JournalFile] = []
    opening = Opening(0, 0, 0)
    if mark is not None and mark.synced_lsn >= start_lsn:
        live = next(found for found in files if found.header.number == mark.number)
        if live.first is None and mark.synced_end > FILE_HEADER_BYTES:
            raise Corrupt(
                "its first group fails its check, and the end mark says it was synced up to "
                f"{mark.synced_end}",
                live.path,
            )
        number = live.header.predecessor if live.first is None else 0
        if number and (not used or used[-1].header.number != number):
            _refuse_gap(wal_dir, key, files, Opening(number, 0, mark.synced_lsn), start_lsn)
    for found in reversed(used):
        if needed and opening.previous_lsn < start_lsn:
            break
        if needed and opening.previous_number != found.header.number:
            _refuse_gap(wal_dir, key, files, opening, start_lsn)
        needed.append(found)
        opening = found.opening
    after_lsn = opening.previous_lsn if needed else max(f.header.after_lsn for f in files)
    if after_lsn >= max(start_lsn, 1):
        raise StartRefused(
            f"the journal of wal set {key[0]}, shard {key[1]} begins after lsn {after_lsn}, "
            f"but replay starts at lsn {start_lsn}",
            _path(wal_dir, key, opening.previous_number),
        )
    needed.reverse()
    return needed


def _refuse_gap(
    wal_dir: str, key: Key, files: list[JournalFile], opening: Opening, start_lsn: int
) -> NoReturn:
    number = opening.previous_number
    for found in files:
        if found.header.number == number:
            raise Corrupt("no valid group, but a later file follows it", found.path)
    raise StartRefused(
        f"journal file {number} of wal set {key[0]}, shard {key[1]} is missing; replay starts "
        f"at lsn {start_lsn}",
        _path(wal_dir, key, number),
    )


def _path(wal_dir: str, key: Key, number: int) -> str:
    """The path of a journal file; without a number, the path of the folder."""
    return (
        layout.join(wal_dir, layout.wal_file(layout.WalName(*key, number))) if number else wal_dir
    )


def _dirty_ends(file: File, position: int, size: int) -> Iterator[int]:
    """For each chunk that has bytes other than zero: the position after the last one."""
    while position < size:
        data = file.pread(min(CHUNK_BYTES, size - position), position)
        if not data:
            return
        if data.count(0) != len(data):
            yield position + len(data.rstrip(b"\0"))
        position += len(data)
