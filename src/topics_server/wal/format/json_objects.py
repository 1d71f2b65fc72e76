"""Records of a segment of JSON objects: the objects, tags, stamps and checksums. Pure.

A record is the object that a diff returns for it if the reader does not ask for tags, and a comma:
records that follow each other are served as they are stored. All tags stand before the records.
Checksums of records and groups include the commas. Needs only numpy and xxhash, like `segment`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import xxhash

Array = npt.NDArray[Any]

# What is stored of a record beside its object and its tag. `sum`: XXH3-64 of the record, of its
# tag, and of the other 20 bytes of the stamp, combined by xor. Offsets are those in `.data`.
STAMP: Final = np.dtype(
    [
        ("sum", "<u8"),
        ("offset", "<u4"),
        ("data_bytes", "<u4"),
        ("meta_bytes", "<u4"),
        ("tag_offset", "<u4"),
        ("tag_bytes", "<u2"),
        ("hop", "u1"),
        ("marks", "u1"),
    ]
)
STAMP_BYTES: Final = STAMP.itemsize
# Bytes of the text around `data` and `meta` of an object: `,"data":`, `,"meta":`.
MEMBER_BYTES: Final = 8
# The records of a group. Its objects have one checksum, and its rows of the index another.
GROUP_RECORDS: Final = 256
_SUM_BYTES: Final = 8
_HEADER_BYTES: Final = 64  # of `.data`

assert STAMP_BYTES == 28


def stamps_of(rows: Array, names: Sequence[bytes], tags_offset: int) -> Array:
    """The stamps of records with these rows of the index, which have their checksums.

    `names`: the tags by their number in the index; `tags_offset`: where the tags of all rows begin
    in `.data`.
    """
    stamps = np.zeros(len(rows), STAMP)
    for name in ("offset", "data_bytes", "meta_bytes", "tag_bytes", "hop", "marks"):
        stamps[name] = rows[name]
    ends = np.cumsum(rows["tag_bytes"], dtype="<i8")
    stamps["tag_offset"] = tags_offset + ends - rows["tag_bytes"]
    # The last one is that of an absent tag, whose number is larger than all others.
    tag_sums = np.fromiter(map(xxhash.xxh3_64_intdigest, [*names, b""]), "<u8", len(names) + 1)
    stamps["sum"] = rows["xxh3"] ^ tag_sums[np.minimum(rows["tag_id"], len(names))]
    stamps["sum"] ^= hashes_beside_sums(stamps)
    return stamps


def hashes_beside_sums(stamps: Array) -> Array:
    """XXH3-64 of each stamp without its `sum`; shape (count,)."""
    every = np.ascontiguousarray(stamps).view("u1").reshape(-1, STAMP_BYTES)
    rest = np.ascontiguousarray(every[:, _SUM_BYTES:]).view(f"V{STAMP_BYTES - _SUM_BYTES}")
    return np.fromiter(map(xxhash.xxh3_64_intdigest, rest.ravel().tolist()), "<u8", len(rest))


def group_sums(objects: bytes | memoryview, offsets: Array, end: int) -> list[int]:
    """The checksum of each group of records.

    `objects`: bytes of `.data` that begin with the first group; `offsets`: where each record begins
    in `.data`; `end`: where the last one ends there.
    """
    view, base = memoryview(objects), int(offsets[0])
    starts = offsets[::GROUP_RECORDS].tolist()
    ends = [*starts[1:], end]
    return _hashes([view[a - base : b - base] for a, b in zip(starts, ends, strict=True)])


def row_sums(rows: Array) -> list[int]:
    """The checksum of the rows of the index of each group; `rows` begin with a group."""
    encoded, size = rows.view("u1").data, GROUP_RECORDS * rows.itemsize
    return _hashes([encoded[at : at + size] for at in range(0, len(encoded), size)])


def sums_of(data: bytes | memoryview, rows: Array, end: int) -> Array:
    """The checksums of an index: of each group, of its rows, and of all tags and stamps together.

    `data`: the whole `.data` up to its flags, whose records end at `end`; `rows`: the whole index.
    """
    view, start = memoryview(data), int(rows["offset"][0])
    beside = beside_sum(view[_HEADER_BYTES:start], view[end:])
    groups = group_sums(view[start:end], rows["offset"], end)
    return np.array([*groups, *row_sums(rows), beside], "<u8")


def _hashes(pieces: Sequence[bytes | memoryview]) -> list[int]:
    return list(map(xxhash.xxh3_64_intdigest, pieces))


def beside_sum(tags: bytes | memoryview, stamps: bytes | memoryview) -> int:
    """The checksum of all tags and stamps."""
    digest = xxhash.xxh3_64(tags)
    digest.update(stamps)
    return digest.intdigest()


def differing_objects(
    objects: bytes, starts: Array, stops: Array, rows: Array, seqs: Array
) -> Array:
    """The places of JSON objects that are not those of their rows of the index.

    `starts`, `stops`: each object with its comma in `objects`. Seq, time and lengths are compared.
    """
    found = []
    fields = rows[["ts", "data_bytes", "meta_bytes"]].tolist()
    columns = zip(starts.tolist(), stops.tolist(), seqs.tolist(), fields, strict=True)
    for place, (start, stop, seq, (ts, data_bytes, meta_bytes)) in enumerate(columns):
        head, text = b'{"$seq":%d,"$ts":%d' % (seq, ts), objects[start : stop - 1]
        meta_start = len(text) - 1 - meta_bytes
        data_end = meta_start - (MEMBER_BYTES if meta_bytes else 0)
        data_start = data_end - data_bytes
        is_same = (
            text.startswith((head + b",", head + b"}"))
            and text.endswith(b"}")
            and (not meta_bytes or text[data_end:meta_start] == b',"meta":')
            and (not data_bytes or text[data_start - MEMBER_BYTES : data_start] == b',"data":')
        )
        if not is_same:
            found.append(place)
    return np.array(found, "<i8")
