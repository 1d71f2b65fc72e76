"""The bytes of a topic's manifest.

Pure, and needs only xxhash beside the standard library: a reader without the server starts here.
`wal/segments/store.py` writes it (the whole file, temp and rename). docs/FORMATS.md shows its full
layout.

    magic 8 | version u16 | 0 u16 | body bytes u32 | topic id u64 | XXH3-64 of header and body
    | body: one JSON object, UTF-8 (fields of `Manifest` and `SegmentEntry`, by name)

Invariants: segments ascend by seq and do not overlap; ids of segments are below `next_segment_id`;
of two manifests of a topic the one with the higher `generation` was published later. Version 1 has
neither generation nor store id. Readers ignore unknown fields; a changed meaning gets a new
version.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import struct
from typing import Any, Final

import xxhash

from topics_server.values.errors import Corrupt, StartRefused

VERSION: Final = 2
# Version 1 has the same layout, but no `generation` and no `store_id` in its body.
_OLDEST_VERSION: Final = 1
MAGIC: Final = b"topicsMF"
HOT: Final = "hot"
COLD: Final = "cold"
_HEADER: Final = struct.Struct("<8sHHIQ")
_HASH: Final = struct.Struct("<Q")
HEADER_BYTES: Final = _HEADER.size + _HASH.size

assert HEADER_BYTES == 32


@dataclasses.dataclass(frozen=True, slots=True)
class SegmentEntry:
    """One listed segment. `data_checksum`: of `.data` up to its flags (also in its `.idx`)."""

    segment_id: int
    tier: str
    first_seq: int
    last_seq: int
    first_ts: int
    last_ts: int
    data_bytes: int
    idx_bytes: int
    data_checksum: int

    @property
    def record_count(self) -> int:
        """The number of rows."""
        return self.last_seq - self.first_seq + 1


@dataclasses.dataclass(frozen=True, slots=True)
class Manifest:
    """A topic and its segments. `config` holds the configuration's fields as plain JSON values.

    `head_seq` is a lower bound (the journal may know more); `holes` are `(first, last)` seqs.
    `generation` rises with every published manifest of the topic, also over restarts; `store_id` is
    the id of the store that wrote it (empty: the store had no id yet).
    """

    topic_id: int
    name: str
    epoch: int
    config: dict[str, Any]
    head_seq: int
    evict_floor: int
    holes: tuple[tuple[int, int], ...]
    next_segment_id: int
    segments: tuple[SegmentEntry, ...]
    generation: int = 1
    store_id: str = ""


def encode_manifest(manifest: Manifest) -> bytes:
    """The whole file; `decode_manifest` is the inverse."""
    assert (objection := _objection(manifest)) is None, objection
    fields = {**dataclasses.asdict(manifest)}
    del fields["topic_id"]
    body = json.dumps(fields, ensure_ascii=False, separators=(",", ":")).encode()
    header = _HEADER.pack(MAGIC, VERSION, 0, len(body), manifest.topic_id)
    return header + _HASH.pack(_checksum(header, body)) + body


def _checksum(header: bytes, body: bytes) -> int:
    return xxhash.xxh3_64_intdigest(header + body)


def decode_manifest(encoded: bytes) -> Manifest:
    """Decode a manifest. Raises `Corrupt` for damage, `StartRefused` for a newer version."""
    if len(encoded) < HEADER_BYTES:
        raise Corrupt("shorter than a manifest's header")
    magic, version, _, body_bytes, topic_id = _HEADER.unpack_from(encoded)
    if magic != MAGIC:
        raise Corrupt(f"does not start with {MAGIC!r}")
    if version > VERSION:
        raise StartRefused(f"manifest format {version} is newer than {VERSION}")
    header, body = encoded[: _HEADER.size], encoded[HEADER_BYTES:]
    if version < _OLDEST_VERSION or len(body) != body_bytes:
        raise Corrupt("version or size of the manifest do not fit")
    if _checksum(header, body) != _HASH.unpack_from(encoded, _HEADER.size)[0]:
        raise Corrupt("checksum of the manifest fails")
    fields = json.loads(body)
    segments = tuple(_known(SegmentEntry, entry) for entry in fields.pop("segments"))
    holes = tuple((first, last) for first, last in fields.pop("holes"))
    manifest: Manifest = _known(Manifest, fields, topic_id=topic_id, segments=segments, holes=holes)
    objection = _objection(manifest)
    if objection is not None:
        raise Corrupt(objection)
    return manifest


@functools.cache
def _names_of(kind: Any) -> frozenset[str]:
    """The fields of a dataclass, computed once instead of for each of ten thousand segments."""
    return frozenset(field.name for field in dataclasses.fields(kind))


def _known(kind: Any, fields: dict[str, Any], **given: Any) -> Any:
    """A dataclass value from its known fields; later versions may have added others."""
    names = _names_of(kind)
    return kind(**{name: value for name, value in fields.items() if name in names}, **given)


def _objection(manifest: Manifest) -> str | None:
    """Why the manifest is impossible; None if it is possible."""
    if manifest.generation < 1:
        return f"its generation is {manifest.generation}"
    last_seq = 0
    for entry in manifest.segments:
        if entry.tier not in (HOT, COLD):
            return f"segment {entry.segment_id} lies in an unknown tier {entry.tier!r}"
        if not last_seq < entry.first_seq <= entry.last_seq:
            return f"seqs of segment {entry.segment_id} do not follow"
        if not entry.segment_id < manifest.next_segment_id:
            return f"segment {entry.segment_id} has an id that was not assigned yet"
        last_seq = entry.last_seq
    return None
