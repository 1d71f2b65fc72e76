"""A block: an immutable run of consecutive records, stored in columns.

Records are always stored and passed on as blocks: the tail of a log is a list of blocks, a segment
is packed from blocks and read back as blocks, and a snapshot keeps the encoded blocks of unsealed
records. A block does not say which records are deleted; its owner keeps the dead flags. A leaf: it
imports only msgspec beside the standard library, so that the helper process can load it.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from io import BytesIO
from itertools import accumulate, chain, repeat
from typing import Final

import msgspec

from topics_server.values.limits import (
    BLOCK_BYTES_MAX,
    BLOCK_RECORDS_MAX,
    MIB,
    RECORD_FRAMING_BYTES,
    TRACE_BYTES,
    TRACED_KIND,
)

_VERSION: Final = 1
# The version of a block that has a record with a trace; older servers refuse it.
_TRACED_VERSION: Final = 2
# The first byte of the `meta` of a bytes record (`record_codecs`). A `meta` without a mark begins
# with a brace.
BYTES_MARK: Final = b" "
# The first byte of the `meta` of a record with a trace; the `traceparent` follows, then the `meta`
# that the record would have without it.
TRACE_MARK: Final = b"\t"
MARKS: Final = frozenset((BYTES_MARK, TRACE_MARK))
# The maximum of bytes that one step copies.
_STEP_BYTES: Final = MIB
_BYTES_KIND: Final = 2  # PayloadKind.BYTES; the helper process loads no model
_WITHOUT_TRACE: Final = bytes(kind & ~TRACED_KIND for kind in range(256))


class Block(msgspec.Struct, frozen=True, gc=False):
    """Records `first_seq .. first_seq + count - 1`; every column has shape (count,).

    `times`: commit times in ms, `array('q')`. `ends`: `array('I')` of 2 x count byte offsets into
    `body`; each record has the end of its `data` and the end of its `meta`. `data` of record i
    starts where `meta` of record i - 1 ends. An absent `meta` is empty. `kinds`: one byte a record
    (`PayloadKind`, plus `TRACED_KIND` where `meta` begins with a trace). `hops`: one byte a record,
    the number of routers it passed.
    """

    first_seq: int
    times: array[int]
    ends: array[int]
    body: bytes
    tags: Sequence[str | None]
    nodes: Sequence[str | None]
    kinds: bytes
    hops: bytes

    @property
    def count(self) -> int:
        """The number of records in the block."""
        return len(self.times)

    @property
    def last_seq(self) -> int:
        """The seq of the last record; `first_seq - 1` if the block is empty."""
        return self.first_seq + len(self.times) - 1

    def data(self, row: int) -> bytes:
        """The payload of one row, verbatim."""
        return self.body[self.ends[2 * row - 1] if row else 0 : self.ends[2 * row]]

    def datas(self, rows: Sequence[int]) -> list[bytes]:
        """The payloads of ascending rows, verbatim; for consecutive rows this only makes slices."""
        first, last = rows[0], rows[-1]
        if last - first + 1 != len(rows):
            return [self.data(row) for row in rows]
        body, ends = self.body, self.ends
        starts = [ends[2 * first - 1] if first else 0, *ends[2 * first + 1 : 2 * last : 2]]
        stops = ends[2 * first : 2 * last + 1 : 2]
        return [body[start:stop] for start, stop in zip(starts, stops, strict=True)]

    def meta(self, row: int) -> bytes:
        """The `meta` object of one row, verbatim; empty where absent."""
        return self.body[self.ends[2 * row] : self.ends[2 * row + 1]]

    def payload_bytes(self, row: int) -> int:
        """Length of `data` plus `meta` of one row."""
        return self.ends[2 * row + 1] - (self.ends[2 * row - 1] if row else 0)


class Payloads(msgspec.Struct, frozen=True, gc=False):
    """The payload columns of one block, made before its seqs and times are known; see `Block`."""

    ends: array[int]
    body: bytes
    kinds: bytes

    @property
    def count(self) -> int:
        """The number of records in the columns."""
        return len(self.kinds)


def record_bytes(data: bytes, meta: bytes, tag: str | None, node: str | None) -> int:
    """A record's share of `bytes` and `cap_bytes`: data + meta + framing (§0.10)."""
    # Tags and nodes count in characters, which for ASCII are bytes.
    framing = RECORD_FRAMING_BYTES + (len(tag) if tag else 0) + (len(node) if node else 0)
    return len(data) + len(meta) + framing


def make_block(
    first_seq: int,
    times: array[int],
    datas: list[bytes],
    metas: list[bytes] | None,
    tags: Sequence[str | None],
    nodes: Sequence[str | None],
    hops: bytes = b"",
) -> Block:
    """Make a block of parallel columns of records; the block keeps the lists `tags` and `nodes`.

    `metas` is None if no record has one; `hops` is empty if no record passed a router.
    """
    count = len(datas)
    assert count == len(tags) == len(nodes) == len(times) > 0
    return block_of(first_seq, times, payloads_of(datas, metas), tags, nodes, hops)


def payloads_of(datas: list[bytes], metas: list[bytes] | None) -> Payloads:
    """The payload columns of these records; `metas` is None if no record has one."""
    count = len(datas)
    kinds = bytes(count)
    ends: array[int]
    if metas is None:
        body = b"".join(datas) if len(datas[0]) <= _STEP_BYTES else _joined(datas)
        ends = array("I", bytes(8 * count))
        if count == 1:
            ends[0] = ends[1] = len(body)
        else:
            ends[::2] = ends[1::2] = array("I", accumulate(map(len, datas)))
    else:
        pieces = list(chain.from_iterable(zip(datas, metas, strict=True)))
        body = _joined(pieces)
        ends = array("I", accumulate(map(len, pieces)))
        if any(meta[:1] in MARKS for meta in metas):
            kinds = bytes(map(_kind_of, metas))
    assert ends[-1] == len(body)
    return Payloads(ends, body, kinds)


def _joined(pieces: Sequence[bytes | memoryview]) -> bytes:
    """Join the pieces. Joining bytes releases the interpreter's lock, joining views does not."""
    first = pieces[0]
    if isinstance(first, bytes) or len(first) <= _STEP_BYTES:
        return b"".join(pieces)
    made = BytesIO()
    for piece in pieces:
        _write_in_steps(made, piece, 0, len(piece))
    return made.getvalue()


def _kind_of(meta: bytes) -> int:
    if meta[:1] == TRACE_MARK:
        return TRACED_KIND + _BYTES_KIND * (meta[TRACE_BYTES : TRACE_BYTES + 1] == BYTES_MARK)
    return _BYTES_KIND * (meta[:1] == BYTES_MARK)


def split_trace(meta: bytes) -> tuple[bytes, bytes]:
    """Split a stored `meta` into its trace (with the mark) and the rest; either may be empty."""
    if meta[:1] != TRACE_MARK:
        return b"", meta
    return meta[:TRACE_BYTES], meta[TRACE_BYTES:]


def has_traces(kinds: bytes) -> bool:
    """Whether any record of a column `kinds` has a trace."""
    return max(kinds, default=0) >= TRACED_KIND


def payload_kinds(kinds: bytes) -> bytes:
    """The column `kinds` without the bit for traces."""
    return kinds.translate(_WITHOUT_TRACE)


def block_of(
    first_seq: int,
    times: array[int],
    payloads: Payloads,
    tags: Sequence[str | None],
    nodes: Sequence[str | None],
    hops: bytes = b"",
) -> Block:
    """Make a block of these columns without copying them."""
    return Block(
        first_seq=first_seq,
        times=times,
        ends=payloads.ends,
        body=payloads.body,
        tags=tags,
        nodes=nodes,
        kinds=payloads.kinds,
        hops=hops or bytes(payloads.count),
    )


def ends_in_blocks(datas: list[bytes], metas: list[bytes] | None) -> list[array[int]]:
    """The column `ends` of each block of many records; every block stays within both bounds."""
    found: list[array[int]] = []
    ends: array[int] = array("I")
    total = 0
    absent = repeat(b"", len(datas)) if metas is None else metas
    for data, meta in zip(datas, absent, strict=True):
        size = len(data) + len(meta)
        if len(ends) == 2 * BLOCK_RECORDS_MAX or (ends and total + size > BLOCK_BYTES_MAX):
            found.append(ends)
            ends, total = array("I"), 0
        ends.append(total + len(data))
        total += size
        ends.append(total)
    if ends:
        found.append(ends)
    return found


def encode_block(block: Block) -> bytes:
    """Encode a block as self-contained bytes in one C call; `decode_block` is the inverse.

    The version comes first.
    """
    return msgspec.msgpack.encode(
        (
            _TRACED_VERSION if has_traces(block.kinds) else _VERSION,
            block.first_seq,
            block.times.tobytes(),
            block.ends.tobytes(),
            block.body,
            block.tags,
            block.nodes,
            block.kinds,
            block.hops,
        )
    )


def copy_in_steps(buffer: bytes | memoryview, start: int, end: int) -> bytes:
    """Copy a range of a buffer in steps: each step holds the interpreter's lock only briefly."""
    if end - start <= _STEP_BYTES:
        return bytes(buffer[start:end])
    made = BytesIO()
    _write_in_steps(made, buffer, start, end)
    return made.getvalue()


def _write_in_steps(made: BytesIO, buffer: bytes | memoryview, start: int, end: int) -> None:
    view = memoryview(buffer)
    for at in range(start, end, _STEP_BYTES):
        made.write(view[at : min(end, at + _STEP_BYTES)])


_Names = list[str | None]
_Encoded = tuple[int, int, bytes, bytes, bytes, _Names, _Names, bytes, bytes]
_DECODER: Final[msgspec.msgpack.Decoder[_Encoded]] = msgspec.msgpack.Decoder(_Encoded)
# The same, but the body is a view of the encoded bytes.
_LongEncoded = tuple[int, int, bytes, bytes, memoryview, _Names, _Names, bytes, bytes]
_LONG_DECODER: Final[msgspec.msgpack.Decoder[_LongEncoded]] = msgspec.msgpack.Decoder(_LongEncoded)


def _decode_long(encoded: bytes | memoryview) -> _Encoded:
    long = _LONG_DECODER.decode(encoded)
    return (*long[:4], copy_in_steps(long[4], 0, len(long[4])), *long[5:])


def decode_block(encoded: bytes | memoryview) -> Block:
    """The block of bytes from `encode_block`. Raises `ValueError` for anything else."""
    try:
        decode = _DECODER.decode if len(encoded) <= _STEP_BYTES else _decode_long
        version, first_seq, times, ends, body, tags, nodes, kinds, hops = decode(encoded)
    except msgspec.DecodeError as error:
        raise ValueError(f"not an encoded block: {error}") from None
    if not _VERSION <= version <= _TRACED_VERSION:
        raise ValueError(f"block version {version} is newer than {_TRACED_VERSION}")
    count = len(tags)
    if len(times) != 8 * count or len(ends) != 8 * count or len(nodes) != count:
        raise ValueError("columns of an encoded block differ in length")
    return Block(first_seq, array("q", times), array("I", ends), body, tags, nodes, kinds, hops)
