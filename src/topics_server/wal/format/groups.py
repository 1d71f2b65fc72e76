r"""The bytes around frames: journal file header, groups, and their scan.

`docs/FORMATS.md` shows the full layout. Little-endian. After its header a file has only groups,
each at a multiple of 8; bytes that are not written yet are zero.

    file header, 64 bytes                       group header, 32 bytes
    +0  magic "\xfftopics\n"                    +0  magic "\xffGR\0"
    +8  u32 version   +12 u32 wal set           +4  u32 length, header and padding included
    +16 u32 shard     +20 u32 distance          +8  u32 frame count   +12 u32 zero
    +24 u64 number    +32 u64 file id           +16 u64 synced bytes
    +40 u64 after lsn +48 u32 run               +24 u64 XXH3-64 of +0..+24 and all that
    +52 u32 declared bytes                              follows, seeded by `group_seed`
    +56 u64 XXH3-64 of +0..+56
                                                then frames, then zeros up to a multiple of 8

`distance` is the file's number minus that of the file before it (0: there is none). `run` and
`declared bytes` are the run that made the file and its length when the header was synced. A header
of version 1 has zeros in these three places.

The checksum is seeded with the file's id and the group's position, so bytes of another file or
place never pass. The magic of a group cannot occur in a request body (it is not UTF-8), so a search
for groups behind a damaged one finds no bytes of users. Called by `wal_file` (encode), and by
`file_chain` and the archive (decode).
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Sequence
from typing import Final, NamedTuple

import xxhash

from topics_server.values.entries import Entry
from topics_server.values.errors import StartRefused
from topics_server.values.limits import FRAME_BYTES_MAX, GROUP_BYTES_MAX, KIB, MIB
from topics_server.wal.format.frames import (
    FRAME_HEADER_BYTES,
    Opening,
    RawFrame,
    decode_frames,
    lsns_below,
    raw_frames,
)

VERSION: Final = 2
# Headers of this version have no predecessor, no run and no declared length.
_VERSION_WITHOUT_RUN: Final = 1
FILE_HEADER_BYTES: Final = 64
GROUP_HEADER_BYTES: Final = 32
ALIGNMENT: Final = 8
# A group holds at most GROUP_BYTES_MAX of frames, or one frame and the opening frame of its file.
GROUP_LENGTH_MAX: Final = FRAME_BYTES_MAX + GROUP_BYTES_MAX
GROUP_MAGIC: Final = b"\xffGR\x00"

_FILE_MAGIC: Final = b"\xfftopics\n"
_FILE: Final = struct.Struct("<8sIIIIQQQII")
_GROUP: Final = struct.Struct("<4sIIIQ")
_GROUP_FULL: Final = struct.Struct("<4sIIIQQ")
_U64: Final = struct.Struct("<Q")
# The offset of `synced bytes` in a group's header.
_SYNCED_AT: Final = 16
_MASK: Final = 2**64 - 1
_HASHED_BYTES: Final = 4 * MIB
# Up to this length, copying a group twice is cheaper than hashing and writing it in pieces.
_COPIED_BYTES_MAX: Final = 4 * KIB
# An odd constant spreads positions over the seed.
_SPREAD: Final = 0x9E3779B97F4A7C15

assert _FILE.size + _U64.size == FILE_HEADER_BYTES
assert _GROUP_FULL.size == GROUP_HEADER_BYTES
assert GROUP_LENGTH_MAX < 2**32
assert len(_FILE_MAGIC) == 8


class FileHeader(NamedTuple):
    """The header of a journal file. Every entry in the file has an lsn above `after_lsn`.

    `predecessor`: the number of the file before it, 0 if there is none. `run`: the run that made
    it. `declared_bytes`: its length when this header was synced. All three are 0 in version 1.
    """

    wal_set: int
    shard: int
    number: int
    file_id: int
    after_lsn: int
    predecessor: int = 0
    run: int = 0
    declared_bytes: int = 0


class Group(NamedTuple):
    """A group whose checksum holds.

    `synced_bytes`: the synced end of the file when it was written. `passed`: the first and the last
    lsn of a group that was not decoded because its lsns are below the wanted ones.
    """

    position: int
    length: int
    synced_bytes: int
    opening: Opening | None
    entries: list[tuple[int, Entry]]
    passed: tuple[int, int] | None = None

    @property
    def end(self) -> int:
        """The position after the group."""
        return self.position + self.length


class RawGroup(NamedTuple):
    """A group whose checksum holds, with the raw bytes of its frames, without an opening."""

    end: int
    frames: list[RawFrame]


class Ending(enum.Enum):
    """Why a scan ended: only zeros follow the last group, bytes are missing, or damage."""

    ZEROS = "zeros"
    MORE = "more"
    FAILED = "failed"


class Scan(NamedTuple):
    """The groups found, the file position after them, and why the scan ended there.

    `needed_bytes` (MORE): the minimum of bytes from `position` on for the next try.
    """

    groups: list[Group]
    position: int
    ending: Ending
    needed_bytes: int = 0
    reason: str = ""


# -- encode --------------------------------------------------------------------------------------


def encode_file_header(header: FileHeader) -> bytes:
    """The first 64 bytes of a file."""
    distance = header.number - header.predecessor if header.predecessor else 0
    assert 0 <= distance < 2**32
    head = _FILE.pack(
        _FILE_MAGIC,
        VERSION,
        header.wal_set,
        header.shard,
        distance,
        header.number,
        header.file_id,
        header.after_lsn,
        header.run,
        header.declared_bytes,
    )
    return head + _U64.pack(xxhash.xxh3_64_intdigest(head))


def group_length(frames_bytes: int) -> int:
    """The length of a group whose frames have this many bytes; a multiple of 8."""
    return (GROUP_HEADER_BYTES + frames_bytes + 7) & ~7


def group_seed(file_id: int, position: int) -> int:
    """Seed of a group's checksum: a group is valid in one file at one position only."""
    return (file_id ^ (position * _SPREAD)) & _MASK


def encode_group(
    buffers: Sequence[bytes],
    frames_bytes: int,
    frame_count: int,
    *,
    file_id: int,
    position: int,
    synced_bytes: int,
) -> list[bytes]:
    """Header, frames and padding as buffers for one write at `position`; one buffer if small."""
    assert position % ALIGNMENT == 0
    assert synced_bytes <= position
    length = (GROUP_HEADER_BYTES + frames_bytes + 7) & ~7
    head = _GROUP.pack(GROUP_MAGIC, length, frame_count, 0, synced_bytes)
    seed = (file_id ^ (position * _SPREAD)) & _MASK
    padding = bytes(length - GROUP_HEADER_BYTES - frames_bytes)
    if length <= _COPIED_BYTES_MAX:
        checksum = xxhash.xxh3_64_intdigest(b"".join((head, *buffers, padding)), seed)
        return [b"".join((head, _U64.pack(checksum), *buffers, padding))]
    hasher = xxhash.xxh3_64(head, seed=seed)
    for buffer in buffers:
        hasher.update(buffer)
    hasher.update(padding)
    return [head + _U64.pack(hasher.intdigest()), *buffers, padding]


# -- decode --------------------------------------------------------------------------------------


def decode_file_header(data: bytes) -> FileHeader | None:
    """The header of a file; `None` if it fails its check.

    Raises `StartRefused` for an unknown version.
    """
    if len(data) < FILE_HEADER_BYTES:
        return None
    (checksum,) = _U64.unpack_from(data, _FILE.size)
    if checksum != xxhash.xxh3_64_intdigest(data[: _FILE.size]):
        return None
    magic, version, wal_set, shard, distance, number, file_id, after_lsn, run, declared = (
        _FILE.unpack_from(data)
    )
    if magic != _FILE_MAGIC:
        return None
    if version not in (VERSION, _VERSION_WITHOUT_RUN):
        raise StartRefused(f"journal file of version {version}; this server reads {VERSION}")
    predecessor = number - distance if distance else 0
    return FileHeader(wal_set, shard, number, file_id, after_lsn, predecessor, run, declared)


def scan(buffer: bytes, base: int, file_id: int, file_bytes: int, from_lsn: int = 0) -> Scan:
    """Decode the groups in `buffer`, which starts at position `base` of a file of `file_bytes`.

    Groups whose lsns are all below `from_lsn` are verified but not decoded. The file bounds every
    length before it is used. Raises `Corrupt` for an unreadable frame inside a group whose checksum
    holds (another program made it, or a defect).
    """
    assert base % ALIGNMENT == 0
    groups: list[Group] = []
    offset = 0
    while True:
        position = base + offset
        length, ended = _whole_length(buffer, offset, position, file_bytes)
        if ended is not None:
            return ended._replace(groups=groups)
        group = _checked_group(buffer, offset, length, position, file_id, from_lsn)
        if group is None:
            return Scan(groups, position, Ending.FAILED, 0, "checksum does not match")
        groups.append(group)
        offset += length


def raw_group(
    buffer: bytes, offset: int, position: int, file_id: int, file_bytes: int
) -> RawGroup | Scan:
    """The group at `offset` of `buffer`, which is `position` of a file of `file_bytes`.

    If there is none, an empty `Scan` has the reason. Raises `Corrupt`, like `scan`.
    """
    count = None
    if len(buffer) - offset >= GROUP_HEADER_BYTES:
        magic, length, held, _, _, checksum = _GROUP_FULL.unpack_from(buffer, offset)
        # Most groups are small and valid: for them the checksum is the only check.
        if magic == GROUP_MAGIC and GROUP_HEADER_BYTES <= length <= _COPIED_BYTES_MAX:
            seed = (file_id ^ (position * _SPREAD)) & _MASK
            if checksum == _digest_of(buffer, offset, offset + length, seed):
                count = held
    if count is None:
        length, ended = _whole_length(buffer, offset, position, file_bytes)
        if ended is not None:
            return ended
        count = _holding(buffer, offset, length, position, file_id)
        if count is None:
            return Scan([], position, Ending.FAILED, 0, "checksum does not match")
    frames = raw_frames(buffer, offset + GROUP_HEADER_BYTES, offset + length, count, position)
    return RawGroup(position + length, frames)


def _whole_length(
    buffer: bytes, offset: int, position: int, file_bytes: int
) -> tuple[int, Scan | None]:
    """(length, None) of a group that is complete in the buffer, else (0, the end of the scan)."""
    if file_bytes - position < GROUP_HEADER_BYTES:
        return 0, Scan([], position, Ending.ZEROS)
    if len(buffer) - offset < GROUP_HEADER_BYTES:
        return 0, Scan([], position, Ending.MORE, GROUP_HEADER_BYTES)
    length, reason = _group_length_at(buffer, offset, position, file_bytes)
    if reason == "zeros":
        return 0, Scan([], position, Ending.ZEROS)
    if reason:
        return 0, Scan([], position, Ending.FAILED, 0, reason)
    if len(buffer) - offset < length:
        return 0, Scan([], position, Ending.MORE, length)
    return length, None


def _group_length_at(buffer: bytes, offset: int, position: int, file_bytes: int) -> tuple[int, str]:
    """(length, "") of a plausible header, else (0, the reason); "zeros" for untouched space."""
    magic, length, count, zero, synced, checksum = _GROUP_FULL.unpack_from(buffer, offset)
    if magic != GROUP_MAGIC:
        untouched = not (any(magic) or length or count or zero or synced or checksum)
        return 0, "zeros" if untouched else "no group header"
    if not GROUP_HEADER_BYTES <= length <= GROUP_LENGTH_MAX or length % ALIGNMENT:
        return 0, "impossible length"
    if length > file_bytes - position:
        return 0, "length beyond the end of the file"
    if count * FRAME_HEADER_BYTES > length - GROUP_HEADER_BYTES or zero or synced > position:
        return 0, "impossible header"
    return length, ""


def group_bounds(
    buffer: bytes, offset: int, position: int, file_bytes: int
) -> tuple[int, int] | None:
    """(length, frame count) of a plausible header, whatever its checksum; None otherwise."""
    if len(buffer) - offset < GROUP_HEADER_BYTES:
        return None
    length, _ = _group_length_at(buffer, offset, position, file_bytes)
    return (length, _GROUP_FULL.unpack_from(buffer, offset)[2]) if length else None


def _checked_group(
    buffer: bytes, offset: int, length: int, position: int, file_id: int, from_lsn: int
) -> Group | None:
    count = _holding(buffer, offset, length, position, file_id)
    if count is None:
        return None
    (synced,) = _U64.unpack_from(buffer, offset + _SYNCED_AT)
    start, end = offset + GROUP_HEADER_BYTES, offset + length
    passed = lsns_below(buffer, start, end, count, from_lsn) if from_lsn else None
    if passed is not None:
        return Group(position, length, synced, None, [], passed)
    opening, entries = decode_frames(buffer, start, end, count, position)
    return Group(position, length, synced, opening, entries)


def _digest_of(buffer: bytes, offset: int, end: int, seed: int) -> int:
    """The checksum of a small group."""
    head, rest = buffer[offset : offset + _GROUP.size], buffer[offset + GROUP_HEADER_BYTES : end]
    return xxhash.xxh3_64_intdigest(head + rest, seed)


def _holding(buffer: bytes, offset: int, length: int, position: int, file_id: int) -> int | None:
    """The number of frames in a group; None if the group's checksum does not hold."""
    _, _, count, _, _, checksum = _GROUP_FULL.unpack_from(buffer, offset)
    seed, head_end = group_seed(file_id, position), offset + _GROUP.size
    start, end = offset + GROUP_HEADER_BYTES, offset + length
    if length <= _COPIED_BYTES_MAX:
        return count if _digest_of(buffer, offset, end, seed) == checksum else None
    view = memoryview(buffer)
    hasher = xxhash.xxh3_64(view[offset:head_end], seed=seed)
    # Hash in steps: each step holds the interpreter's lock.
    for at in range(start, end, _HASHED_BYTES):
        hasher.update(view[at : min(end, at + _HASHED_BYTES)])
    return count if hasher.intdigest() == checksum else None


def find_group(buffer: bytes, start: int, end: int, base: int, file_bytes: int) -> int:
    """Offset in `start..end` of the first possible group header; -1 if there is none.

    `buffer` starts at position `base` of its file. A `scan` from there verifies it.
    """
    while True:
        start = buffer.find(GROUP_MAGIC, start, end)
        if start < 0:
            return -1
        position = base + start
        if position % ALIGNMENT == 0 and len(buffer) - start >= GROUP_HEADER_BYTES:
            length, _ = _group_length_at(buffer, start, position, file_bytes)
            if length:
                return start
        start += 1
