"""Packs segments into partitions by the bytes that they cost: small segments together, large ones
in pieces. One task for each file would make many small segments slow, because even a small task
costs milliseconds. Pure. Segments keep their order, so a partition is a range of one topic, or of
several topics.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

from spark_jobs.reader.places.segment import Segment

# The cost of opening and checking a segment, in bytes.
_SEGMENT_COST: Final = 256 * 1024
_SMALLEST: Final = 4 * 2**20


def pack(
    segments: Sequence[Segment], target_bytes: int, min_partitions: int, *, payload: bool
) -> list[list[Segment]]:
    """Partitions of about `target_bytes`, or smaller if that gives fewer partitions than
    requested.
    """
    assert target_bytes > 0
    assert min_partitions > 0
    total = sum(cost(segment, payload=payload) for segment in segments)
    target = min(target_bytes, max(total // min_partitions, min(_SMALLEST, target_bytes)))
    partitions: list[list[Segment]] = []
    size = 0
    for piece in _pieces(segments, target, payload=payload):
        piece_cost = cost(piece, payload=payload)
        if not partitions or size + piece_cost // 2 > target:
            partitions.append([])
            size = 0
        partitions[-1].append(piece)
        size += piece_cost
    return partitions


def cost(segment: Segment, *, payload: bool) -> int:
    """The cost of reading a segment, in bytes."""
    entry = segment.entry
    size = entry.idx_bytes + (entry.data_bytes if payload else entry.record_count)
    share = (segment.end_row - segment.first_row) / entry.record_count
    return _SEGMENT_COST + int(size * share)


def _pieces(segments: Sequence[Segment], target: int, *, payload: bool) -> Iterator[Segment]:
    """Segments; those larger than two targets are cut by rows."""
    for segment in segments:
        count = segment.end_row - segment.first_row
        parts = min(cost(segment, payload=payload) // target, count)
        if parts < 2 or not payload:
            yield segment
            continue
        for part in range(parts):
            first = segment.first_row + count * part // parts
            end = segment.first_row + count * (part + 1) // parts
            yield replace(segment, first_row=first, end_row=end)
