"""The messages between the server and its view processes. Pure.

A frame is a length (u32, little-endian) and that many bytes of msgpack: a request or an answer.
Each process answers one request at a time. Used by `processes`, `apply_worker` and `query_worker`.
"""

from __future__ import annotations

import struct
from typing import Any, Final

import msgspec

from topics_server.values.model import ViewDefinition

LENGTH: Final = struct.Struct("<I")
FRAME_BYTES_MAX: Final = 2**31


class FileFacts(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The facts stored in a view's file. `gaps`: first and last seq of each hole that it passed.

    `topic_id` is text: the ids of topics do not all fit the database's integers. `lsn`: the file
    may reflect entries of its topic up to this lsn. `is_stale`: records that it applied were
    deleted, so its view must be rebuilt. `needs_payloads`: whether `apply` uses `:data` or `:meta`.
    """

    topic_id: str
    epoch: int
    processed_seq: int
    known_from_seq: int
    is_ready: bool
    gaps: list[tuple[int, int]]
    definition: ViewDefinition
    lsn: int = 0
    is_stale: bool = False
    bytes: int = 0
    needs_payloads: bool = True


class BlockRows(msgspec.Struct, frozen=True, array_like=True):
    """Records of one encoded block. `rows`: the rows of the records; None: all."""

    block: bytes
    rows: list[int] | None


class Batch(msgspec.Struct, frozen=True, array_like=True):
    """Records in seq order, and other facts that change with them.

    `upto_seq`: every slot up to this seq was examined; `from_seq`: the required position of the
    file. `gaps`: newly passed holes; `known_from_seq`: raised if records were evicted before the
    view read them. `lsn`: the topic's last entry when the records were read. `count`: the number of
    records in `pieces`, which `views/pieces` makes and `workers/records` reads.
    """

    from_seq: int
    upto_seq: int
    lsn: int
    known_from_seq: int
    gaps: list[tuple[int, int]]
    count: int
    pieces: list[BlockRows]


class Check(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Try a definition in memory."""

    definition: ViewDefinition


class Create(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Make a file with empty tables and keep it open; a file of that path is replaced."""

    path: str
    definition: ViewDefinition
    topic_id: str
    epoch: int
    max_bytes: int


class Open(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Open an existing file."""

    path: str
    max_bytes: int


class Apply(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Apply records to an open file, in one transaction."""

    path: str
    batch: Batch


class BatchPart(msgspec.Struct, frozen=True, array_like=True):
    """One file's part of `ApplyAll`. `pieces`: the index of its batch's pieces in the message."""

    path: str
    batch: Batch
    pieces: int


class ApplyAll(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Apply records to several open files, in one transaction each.

    Views that read the same page share its pieces; the batches in `parts` have no pieces.
    """

    pieces: list[list[BlockRows]]
    parts: list[BatchPart]


class Skip(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Pass the next record without applying it."""

    path: str
    seq: int


class MarkReady(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Mark the file: it answers queries from now on, also after a restart."""

    path: str


class MarkStale(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Mark the file: records that it applied were deleted, so the next start rebuilds its view."""

    path: str


class Remove(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Close the file and remove it; durable before the answer."""

    path: str


class ViewQuery(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Run a query on a file, with bounds on time, rows and bytes of its answer."""

    path: str
    sql: str
    params: dict[str, Any] | list[Any]
    max_ms: int
    max_rows: int
    max_bytes: int


class Nothing(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Answer at once, to show that the process runs."""


Request = (
    Nothing
    | Check
    | Create
    | Open
    | Apply
    | ApplyAll
    | Skip
    | MarkReady
    | MarkStale
    | Remove
    | ViewQuery
)


class Done(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Done. `processed_seq`: the file's position; `bytes`: its size; `ms`: the time taken."""

    processed_seq: int = 0
    bytes: int = 0
    ms: float = 0.0


class SqlRefused(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A statement is wrong, not allowed, or exceeds a limit. `reason`: see `view_file`."""

    message: str
    statement: str
    reason: str


class FailedAt(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """`apply` failed at a record; the records before it are committed."""

    seq: int
    statement: str
    message: str


class Moved(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The file has another position than the request expects, or is not open."""


class Unreadable(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The file does not exist, or is not a file of a view."""

    message: str


class DiskTrouble(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The disk is full or has failed; nothing was changed."""

    message: str


class QueryRows(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The rows of a query. `rows`: a JSON array of arrays."""

    columns: list[str]
    rows: bytes
    row_count: int
    processed_seq: int
    is_cut: bool


PartAnswer = Done | SqlRefused | FailedAt | Moved | Unreadable | DiskTrouble


class AllApplied(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The answer of each part of an `ApplyAll`, in their order."""

    answers: list[PartAnswer]


Answer = PartAnswer | QueryRows | FileFacts | AllApplied

encode: Final = msgspec.msgpack.Encoder().encode
REQUESTS: Final[msgspec.msgpack.Decoder[Request]] = msgspec.msgpack.Decoder(Request)
ANSWERS: Final[msgspec.msgpack.Decoder[Answer]] = msgspec.msgpack.Decoder(Answer)


def frame(message: msgspec.Struct) -> bytes:
    """A message, preceded by its length."""
    body = encode(message)
    assert len(body) < FRAME_BYTES_MAX
    return LENGTH.pack(len(body)) + body
