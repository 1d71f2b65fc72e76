"""The bytes of a backup, and the names of its files. Pure.

    STORE                                      JSON with checksum: whose backups these are
    segments/TOPIC/SEGMENT-CHECKSUM.data       header and records of a segment, without its flags
    segments/TOPIC/SEGMENT-CHECKSUM.idx        its columns
    backups/NUMBER/unfinished                  empty: a backup that is being made, or removed
    backups/NUMBER/backup.json                 JSON with checksum: the backup exists from here on
    backups/NUMBER/snapshot                    the snapshot, as in the data directory
    backups/NUMBER/sealed-N                    manifests and delete flags of topics
    backups/NUMBER/journal-N                   entries by lsn, as frames
    backups/NUMBER/known                       seqs, ids and epochs that may have been handed out

CHECKSUM are 16 digits: XXH3-64 of the object, for an undamaged `.idx` that of its `.data`. Drawn in
full in docs/FORMATS.md.

    journal-N: magic "topicsBJ" | version u16 | 0 u16 | frames u32 | first lsn u64 | last lsn u64
               | bytes of the frames u64 | frames
    sealed-N:  magic "topicsBS" | version u16 | 0 u16 | zlib of one msgpack array of `SealedTopic`
"""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Sequence
from typing import Final, Protocol, TypeVar

import msgspec

from topics_server.values.entries import Entry
from topics_server.values.errors import Corrupt, StartRefused, StorageError
from topics_server.values.limits import MIB
from topics_server.values.storage_types import KnownPositions
from topics_server.wal.format.checked_json import encode_checked, is_checked
from topics_server.wal.format.frames import decode_frames

VERSION: Final = 1
OWNER: Final = "STORE"
SEGMENTS: Final = "segments"
BACKUPS: Final = "backups"
FACTS: Final = "backup.json"
UNFINISHED: Final = "unfinished"
SNAPSHOT: Final = "snapshot"
KNOWN: Final = "known"
# A piece of the journal or of the manifests ends when it reaches this size.
PIECE_BYTES: Final = 4 * MIB

_JOURNAL: Final = struct.Struct("<8sHHIQQQ")
_JOURNAL_MAGIC: Final = b"topicsBJ"
_SEALED: Final = struct.Struct("<8sHH")
_SEALED_MAGIC: Final = b"topicsBS"
NUMBER_MAX: Final = 10**10 - 1
_NUMBER: Final = re.compile(r"(?!0{10})[0-9]{10}", re.ASCII)
_SEGMENT_OBJECT: Final = re.compile(r"[0-9]{10}-[0-9a-f]{16}(?:\.damaged)?\.(?:data|idx)", re.ASCII)
# The maximum size of all manifests and flags of one piece, decompressed.
_SEALED_BYTES_MAX: Final = 2**31


class _Formatted(Protocol):
    @property
    def format(self) -> int: ...


_T = TypeVar("_T", bound=_Formatted)


class Owner(msgspec.Struct, frozen=True):
    """The content of `STORE`. `folder_id`: random, created with the folder."""

    format: int
    store_id: str
    folder_id: str


class StoredPiece(msgspec.Struct, frozen=True):
    """An object of one backup: its name, length, and XXH3-64 in 16 digits."""

    name: str
    bytes: int
    xxh3: str


class BackupFacts(msgspec.Struct, frozen=True):
    """The content of `backup.json`.

    `last_lsn`: the backup has every entry up to this lsn and none after it. `start_lsn`: the first
    entry that the pieces of the journal may have. `ts_ms`: the server's time when the backup was
    complete up to `last_lsn`. `topics`: the number of all topics, including those without segments.
    `damaged_segments`: the number of segments that were copied with damage.
    """

    format: int
    number: int
    store_id: str
    run: int
    ts_ms: int
    start_lsn: int
    last_lsn: int
    topics: int
    segments: int
    segment_bytes: int
    copied_bytes: int
    damaged_segments: list[str]
    snapshot: StoredPiece | None
    sealed: list[StoredPiece]
    journal: list[StoredPiece]
    known: StoredPiece


class SealedSegment(msgspec.Struct, frozen=True, array_like=True):
    """A segment of a topic: its objects and delete flags.

    `flags` is None for a damaged `.data`, whose object is the whole file.
    """

    segment_id: int
    data: str
    idx: str
    flags: bytes | None


class SealedTopic(msgspec.Struct, frozen=True, array_like=True):
    """A topic's manifest, byte for byte, and its segments."""

    topic_id: int
    manifest: bytes
    segments: list[SealedSegment]


_FACTS: Final = msgspec.json.Decoder(BackupFacts)
_OWNER: Final = msgspec.json.Decoder(Owner)
_TOPICS: Final = msgspec.msgpack.Decoder(list[SealedTopic])
_KNOWN: Final = msgspec.msgpack.Decoder(KnownPositions)


# -- names -----------------------------------------------------------------------------------------


def folder_of(number: int) -> str:
    """The folder of a backup."""
    assert 0 < number <= NUMBER_MAX
    return f"{BACKUPS}/{number:010d}"


def parse_folder(name: str) -> int | None:
    """The number of a backup's folder; None for another name."""
    return int(name) if _NUMBER.fullmatch(name) else None


def segment_object(topic_id: int, segment_id: int, checksum: int, suffix: str) -> str:
    """The name of a segment's object; `suffix` is `.data` or `.idx`, or that of a damaged file."""
    return f"{SEGMENTS}/{topic_id}/{segment_id:010d}-{checksum:016x}{suffix}"


def is_segment_object(name: str) -> bool:
    """Whether an object in a topic's folder has a name that `segment_object` makes."""
    return _SEGMENT_OBJECT.fullmatch(name) is not None


# -- JSON ------------------------------------------------------------------------------------------


def decode_owner(content: bytes, path: str) -> Owner:
    """Decode `STORE`. Raises `Corrupt`, `StartRefused` for a newer format."""
    return _checked(_OWNER, content, path)


def decode_facts(content: bytes, path: str) -> BackupFacts:
    """Decode `backup.json`. Raises `Corrupt`, `StartRefused` for a newer format."""
    return _checked(_FACTS, content, path)


def encode_json(value: msgspec.Struct) -> bytes:
    """The content of a JSON file with its checksum."""
    return encode_checked(value)


def _checked(decoder: msgspec.json.Decoder[_T], content: bytes, path: str) -> _T:
    if not is_checked(content):
        raise Corrupt("fails its check", path)
    try:
        found = decoder.decode(content)
    except msgspec.DecodeError as error:
        raise Corrupt(str(error), path) from None
    if found.format > VERSION:
        raise newer(found.format, path)
    return found


def newer(version: int, path: str) -> StartRefused:
    """The error for an object of a later version."""
    return StartRefused(
        f"has format {version}, and this version knows up to {VERSION}: use a newer one", path
    )


# -- pieces ----------------------------------------------------------------------------------------


def encode_journal(frames: bytes, count: int, first_lsn: int, last_lsn: int) -> bytes:
    """A piece of the journal: frames that follow each other, by lsn."""
    head = _JOURNAL.pack(_JOURNAL_MAGIC, VERSION, 0, count, first_lsn, last_lsn, len(frames))
    return head + frames


def decode_journal(content: bytes, path: str) -> list[tuple[int, Entry]]:
    """The entries of a piece. Raises `Corrupt`, `StartRefused` for a newer version."""
    if len(content) < _JOURNAL.size:
        raise Corrupt("shorter than its header", path)
    magic, version, _, count, first, last, length = _JOURNAL.unpack_from(content)
    if magic != _JOURNAL_MAGIC:
        raise Corrupt("is no piece of a journal", path)
    if version > VERSION:
        raise newer(version, path)
    if length != len(content) - _JOURNAL.size:
        raise Corrupt("its length does not fit its header", path)
    try:
        _, entries = decode_frames(content, _JOURNAL.size, len(content), count, 0)
    except Corrupt as error:
        raise Corrupt(str(error), path) from None
    lsns = [lsn for lsn, _ in entries]
    if not lsns or (lsns[0], lsns[-1]) != (first, last) or lsns != sorted(set(lsns)):
        raise Corrupt("its entries do not fit its header", path)
    return entries


def encode_sealed(topics: Sequence[SealedTopic]) -> bytes:
    """A piece with the manifests and flags of some topics.

    Raises `StorageError` for more than `decode_sealed` accepts: a backup that cannot be restored
    must not succeed.
    """
    packed = msgspec.msgpack.encode(topics)
    if len(packed) > _SEALED_BYTES_MAX:
        raise StorageError(
            f"the manifests and delete flags of topics {topics[0].topic_id} to "
            f"{topics[-1].topic_id} have {len(packed)} bytes, and a backup takes "
            f"{_SEALED_BYTES_MAX} at once"
        )
    return _SEALED.pack(_SEALED_MAGIC, VERSION, 0) + zlib.compress(packed, 1)


def decode_sealed(content: bytes, path: str) -> list[SealedTopic]:
    """The topics of a piece. Raises `Corrupt`, `StartRefused` for a newer version."""
    if len(content) < _SEALED.size:
        raise Corrupt("shorter than its header", path)
    magic, version, _ = _SEALED.unpack_from(content)
    if magic != _SEALED_MAGIC:
        raise Corrupt("is no piece of manifests", path)
    if version > VERSION:
        raise newer(version, path)
    try:
        packed = zlib.decompressobj()
        body = packed.decompress(content[_SEALED.size :], _SEALED_BYTES_MAX)
        return _TOPICS.decode(body)
    except (zlib.error, msgspec.DecodeError) as error:
        raise Corrupt(str(error), path) from None


def encode_known(known: KnownPositions) -> bytes:
    """The object `known`."""
    return msgspec.msgpack.encode(known)


def decode_known(content: bytes, path: str) -> KnownPositions:
    """The reverse of `encode_known`. Raises `Corrupt`."""
    try:
        return _KNOWN.decode(content)
    except msgspec.DecodeError as error:
        raise Corrupt(str(error), path) from None
