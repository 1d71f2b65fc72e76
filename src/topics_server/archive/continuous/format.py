"""The bytes of a part and of the other objects of an archive, and their names. Pure.

    ARCHIVE                      JSON with checksum: whose archive this is
    parts/GROUP/NUMBER           entries by lsn, of all shards; GROUP: the number without 4 digits
    bases/NUMBER-WRITER/...      a backup, as in the backup folder
    segments/TOPIC/...           segments, as in the backup folder; all bases share them
    pruned/NUMBER                what a prune removed, and which older bases it kept

    part: magic "topicsAP" | version u16 | 0 u16 | bytes of the facts u32 | XXH3-64 of the facts u64
          | facts (MessagePack of `PartFacts`) | zlib of the frames

Drawn in full in docs/FORMATS.md.
"""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Iterable
from typing import Final

import msgspec
import xxhash

from topics_server.archive.format import newer
from topics_server.values.entries import Entry
from topics_server.values.errors import Corrupt
from topics_server.values.limits import MIB
from topics_server.values.storage_types import KnownPositions
from topics_server.wal.format.checked_json import is_checked
from topics_server.wal.format.frames import decode_frames

ARCHIVE_VERSION: Final = 1
ARCHIVE: Final = "ARCHIVE"
PARTS: Final = "parts"
BASES: Final = "bases"
PRUNED: Final = "pruned"
# A part ends when its frames reach this size; a single frame may be larger.
PART_BYTES: Final = MIB
# The same size while the archiver catches up: it makes fewer, larger objects.
CATCH_UP_BYTES: Final = 4 * MIB

_PART: Final = struct.Struct("<8sHHIQ")
_PART_MAGIC: Final = b"topicsAP"
_GROUP_PARTS: Final = 10_000
_PART_NUMBER_MAX: Final = 10**12 - 1
_NUMBER: Final = re.compile(r"(?!0{12})[0-9]{12}", re.ASCII)
_GROUP: Final = re.compile(r"[0-9]{8}", re.ASCII)
_BASE: Final = re.compile(r"(?!0{12})([0-9]{12})-[0-9a-f]{32}", re.ASCII)


class ArchiveMark(msgspec.Struct, frozen=True):
    """The content of `ARCHIVE`. `archive_id`: random, created with the archive."""

    format: int
    store_id: str
    archive_id: str


class PartFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The facts of a part.

    `previous`: XXH3-64 of the part before it, in 16 digits; empty in the first part. `writer`: a
    random id of the process that made the part. `ts_ms`: the server's time, never lower than in the
    part before; every entry in this part and before it was accepted by then. `first_lsn`: the lsn
    after the last one of the part before it, or of the base from which a stretch begins. `stretch`:
    the number of the part that began the stretch; between parts of one stretch no entry is missing.
    `base`: the base that counts from this part on, with the checksum of its `backup.json`.
    `base_part`: the newest part with a base, up to this part; `base_before`: in a part with a base,
    the part with the base before.
    """

    store_id: str
    archive_id: str
    number: int
    previous: str
    writer: str
    run: int
    ts_ms: int
    first_lsn: int
    last_lsn: int
    frames: int
    frames_bytes: int
    body_xxh3: str
    stretch: int
    base_part: int
    base_before: int = 0
    base: str = ""
    base_xxh3: str = ""
    known: KnownPositions = KnownPositions()
    created: list[tuple[int, str]] = []

    @property
    def begins_stretch(self) -> bool:
        """Whether entries may be missing before this part; its base includes them."""
        return self.number == self.stretch


class KeptBase(msgspec.Struct, frozen=True):
    """A base that a prune kept: its folder, checksum, announcing part and stretch."""

    name: str
    xxh3: str
    part: int
    stretch: int


class PrunedFacts(msgspec.Struct, frozen=True):
    """The content of `pruned/NUMBER`.

    Of the bases that parts up to `judged_part` name, only `bases` are kept. Parts below
    `first_part` are removed; `known` has the positions in removed objects that clients may have
    seen.
    """

    format: int
    judged_part: int
    first_part: int
    bases: list[KeptBase]
    known: KnownPositions


_MARK: Final = msgspec.json.Decoder(ArchiveMark)
_FACTS: Final = msgspec.msgpack.Decoder(PartFacts)
_PRUNED: Final = msgspec.json.Decoder(PrunedFacts)
_packed: Final = msgspec.msgpack.Encoder().encode


# -- names -----------------------------------------------------------------------------------------


def part_group(number: int) -> str:
    """The folder of a part."""
    assert 0 < number <= _PART_NUMBER_MAX
    return f"{PARTS}/{number // _GROUP_PARTS:08d}"


def part_name(number: int) -> str:
    """The object of a part."""
    return f"{part_group(number)}/{number:012d}"


def is_part_group(name: str) -> bool:
    """Whether a folder in `parts` has a name that `part_group` makes."""
    return _GROUP.fullmatch(name) is not None


def parse_part(name: str) -> int | None:
    """The number of a part or of a prune, from the last component of its name."""
    return int(name) if _NUMBER.fullmatch(name) else None


def base_name(number: int, writer: str) -> str:
    """The name of a base that is begun before the part of this number."""
    return f"{number:012d}-{writer}"


def parse_base(name: str) -> int | None:
    """The number in the name of a base; None for another name."""
    found = _BASE.fullmatch(name)
    return None if found is None else int(found[1])


def base_folder(name: str) -> str:
    """The folder of a base."""
    return f"{BASES}/{name}"


def pruned_name(number: int) -> str:
    """The object of a prune that examined all bases up to this part."""
    return f"{PRUNED}/{number:012d}"


# -- parts -----------------------------------------------------------------------------------------


def digest_of(content: bytes) -> str:
    """The digest of a part, which the next part repeats as `previous`."""
    return xxhash.xxh3_64_hexdigest(content)


def encode_part(facts: PartFacts, frames: Iterable[bytes | memoryview]) -> bytes:
    """Encode a part; fills in the fields of `facts` about the frames' bytes.

    `frames`: their bytes in pieces; each piece is compressed without the interpreter's lock.
    """
    deflate, size, pieces = zlib.compressobj(1), 0, []
    for piece in frames:
        pieces.append(deflate.compress(piece))
        size += len(piece)
    body = b"".join((*pieces, deflate.flush()))
    facts = msgspec.structs.replace(
        facts, frames_bytes=size, body_xxh3=xxhash.xxh3_64_hexdigest(body)
    )
    head = _packed(facts)
    digest = xxhash.xxh3_64_intdigest(head)
    return _PART.pack(_PART_MAGIC, ARCHIVE_VERSION, 0, len(head), digest) + head + body


def decode_part_facts(content: bytes, path: str) -> tuple[PartFacts, int]:
    """The facts of a part, and where its frames begin; `content` may end anywhere after the facts.

    Raises `Corrupt`, `StartRefused` for a newer version.
    """
    if len(content) < _PART.size:
        raise Corrupt("shorter than its header", path)
    magic, version, _, length, digest = _PART.unpack_from(content)
    if magic != _PART_MAGIC:
        raise Corrupt("is no part of an archive", path)
    if version > ARCHIVE_VERSION:
        raise newer(version, path)
    head = content[_PART.size : _PART.size + length]
    if len(head) != length or xxhash.xxh3_64_intdigest(head) != digest:
        raise Corrupt("fails its check", path)
    try:
        return _FACTS.decode(head), _PART.size + length
    except msgspec.DecodeError as error:
        raise Corrupt(str(error), path) from None


def decode_part(content: bytes, path: str) -> tuple[PartFacts, list[tuple[int, Entry]]]:
    """A part and its entries. Raises `Corrupt`, `StartRefused` for a newer version."""
    facts, at = decode_part_facts(content, path)
    body = content[at:]
    if xxhash.xxh3_64_hexdigest(body) != facts.body_xxh3:
        raise Corrupt("fails its check", path)
    inflate = zlib.decompressobj()
    try:
        frames = inflate.decompress(body, facts.frames_bytes + 1)
    except zlib.error as error:
        raise Corrupt(str(error), path) from None
    if not inflate.eof or len(frames) != facts.frames_bytes:
        raise Corrupt("its length does not fit its facts", path)
    try:
        _, entries = decode_frames(frames, 0, len(frames), facts.frames, 0)
    except Corrupt as error:
        raise Corrupt(str(error), path) from None
    lsns = [lsn for lsn, _ in entries]
    within = not lsns or facts.first_lsn <= lsns[0] <= lsns[-1] <= facts.last_lsn
    if not within or lsns != sorted(set(lsns)):
        raise Corrupt("its entries do not fit its facts", path)
    return facts, entries


# -- JSON ------------------------------------------------------------------------------------------


def decode_mark(content: bytes, path: str) -> ArchiveMark:
    """Decode `ARCHIVE`. Raises `Corrupt`, `StartRefused` for a newer format."""
    if not is_checked(content):
        raise Corrupt("fails its check", path)
    try:
        found = _MARK.decode(content)
    except msgspec.DecodeError as error:
        raise Corrupt(str(error), path) from None
    if found.format > ARCHIVE_VERSION:
        raise newer(found.format, path)
    return found


def encode_pruned(facts: PrunedFacts) -> bytes:
    """The content of `pruned/NUMBER`: a checksum in 16 digits, and compressed JSON."""
    body = zlib.compress(msgspec.json.encode(facts), 1)
    return xxhash.xxh3_64_hexdigest(body).encode() + body


def decode_pruned(content: bytes, path: str) -> PrunedFacts:
    """The reverse of `encode_pruned`. Raises `Corrupt`, `StartRefused` for a newer format."""
    body = content[16:]
    if xxhash.xxh3_64_hexdigest(body).encode() != content[:16]:
        raise Corrupt("fails its check", path)
    try:
        found = _PRUNED.decode(zlib.decompress(body))
    except (zlib.error, msgspec.DecodeError) as error:
        raise Corrupt(str(error), path) from None
    if found.format > ARCHIVE_VERSION:
        raise newer(found.format, path)
    return found
