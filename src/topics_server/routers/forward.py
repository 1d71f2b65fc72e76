"""Computes one router's copies of a source page: filter, hops, dedupe. Pure.

The copies do not depend on the destination, so routers with the same definition share them. Called
by `routers/pump`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final

from topics_server.engine.answers import Gap, Page
from topics_server.values.appends import DecodedAppend
from topics_server.values.blocks import Block
from topics_server.values.copies import CopyColumns, copies_of
from topics_server.values.entries import RouterStamp
from topics_server.values.model import LossReason, RouterDefinition
from topics_server.values.record_codecs import body_of, with_grammar

# How often a record may be copied in a cycle of routers (contract README, Auto-priority).
HOPS_MAX: Final = 8
_HOPS_COUNTED_MAX: Final = 255


class Copies:
    """A router's result for one page: the copies and the seqs of their originals."""

    __slots__ = ("_body", "cursor_seq", "decoded", "firsts", "hops", "lasts", "lost", "stamp")

    def __init__(
        self,
        decoded: DecodedAppend,
        firsts: list[int],
        lasts: list[int],
        hops: bytes,
        stamp: RouterStamp | None,
        lost: int,
        cursor_seq: int,
    ) -> None:
        self.decoded = decoded
        self.firsts = firsts
        self.lasts = lasts
        self.hops = hops
        self.stamp = stamp
        self.lost = lost
        self.cursor_seq = cursor_seq
        self._body: bytes | None = None

    @property
    def is_empty(self) -> bool:
        """Whether the page has neither copies nor lost records."""
        return not self.firsts and not self.lost

    def body(self) -> bytes:
        """The body for a frame that carries these records; made once."""
        if self._body is None:
            self._body = body_of(self.decoded)
        return self._body


def copy_page(
    page: Page, definition: RouterDefinition, stamp: RouterStamp | None, known: Collection[int]
) -> Copies:
    """The copies of a page. `known`: seqs whose copies the destination already holds."""
    columns = CopyColumns([], [], [], [], [])
    hops = bytearray()
    for piece in page.pieces:
        _take(piece.block, _wanted(piece.block, piece.rows, definition, known), columns, hops)
    firsts, lasts = _runs(columns.seqs)
    far = bytes(hops) if any(hops) else b""
    gone = bytes(min(hop + 1, _HOPS_COUNTED_MAX) for hop in far) if far else b"\x01" * len(hops)
    copies = copies_of(
        columns,
        preserve_node=definition.preserve_node,
        preserve_tag=definition.preserve_tag,
        stamp=stamp,
        hops=gone,
    )
    decoded = with_grammar(copies)
    lost = 0 if page.gap is None else _lost(page.gap, definition)
    return Copies(decoded, firsts, lasts, gone if far else b"", stamp, lost, page.next_from_seq)


def _lost(gap: Gap, definition: RouterDefinition) -> int:
    """How many lost records a gap reports to the destination.

    In a possible cycle, losses that the source received from a router are not reported: they carry
    no hop count and would circulate for ever.
    """
    if gap.reason is LossReason.RECREATED:
        return 0
    if gap.reason is LossReason.SOURCE_TRIM and definition.allow_cycle:
        return 0
    return gap.missed_estimate


def _wanted(
    block: Block, rows: Sequence[int], definition: RouterDefinition, known: Collection[int]
) -> list[int]:
    wanted = list(rows)
    match = definition.filter
    if match is not None:
        tags = block.tags
        wanted = [row for row in wanted if match.matches(tags[row])]
    if definition.allow_cycle:
        hops = block.hops
        wanted = [row for row in wanted if hops[row] < HOPS_MAX]
    if known:
        first = block.first_seq
        wanted = [row for row in wanted if first + row not in known]
    return wanted


def _take(block: Block, rows: list[int], columns: CopyColumns, hops: bytearray) -> None:
    if not rows:
        return
    first_seq, ends, body = block.first_seq, block.ends, block.body
    seqs = columns.seqs
    for row in rows:
        data_end = ends[2 * row]
        columns.datas.append(body[ends[2 * row - 1] if row else 0 : data_end])
        columns.metas.append(body[data_end : ends[2 * row + 1]])
        columns.tags.append(block.tags[row])
        columns.nodes.append(block.nodes[row])
        hops.append(block.hops[row])
        seqs.append(first_seq + row)


def _runs(seqs: list[int]) -> tuple[list[int], list[int]]:
    """Ascending seqs as inclusive runs."""
    firsts: list[int] = []
    lasts: list[int] = []
    for seq in seqs:
        if lasts and seq == lasts[-1] + 1:
            lasts[-1] = seq
        else:
            firsts.append(seq)
            lasts.append(seq)
    return firsts, lasts
