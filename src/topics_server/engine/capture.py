"""One topic as a part of a snapshot: `capture` to bytes, `restore` on its sealed segments.

A part holds what no segment and no later journal entry has: configuration, head, ceiling, floor,
why records are lost, holes, idempotency keys, the lsn applied, the unsealed tail, and flips that
are not synced yet. Of an ephemeral topic no record: it comes back as a hole over all its seqs.
`encode` of a `Captured` may run off the loop, since blocks never change. Version in front. Called
by the checkpointer and by recovery.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Final

import msgspec
import numpy as np

from topics_server.blocks import Block, decode_block, encode_block
from topics_server.engine.losses import Hole, Losses
from topics_server.engine.ports import SealedIndex
from topics_server.engine.runs import TailBlock, slice_block
from topics_server.engine.topic import Topic
from topics_server.limits import RECORD_FRAMING_BYTES
from topics_server.model import LossReason, TopicConfig

_VERSION: Final = 1


class _TailPart(msgspec.Struct, frozen=True, array_like=True, gc=False):
    block: bytes
    dead: bytes
    last_lsn: int


class _Part(msgspec.Struct, frozen=True, array_like=True, gc=False):
    version: int
    topic_id: int
    name: str
    epoch: int
    config: TopicConfig
    created_ts: int
    applied_lsn: int
    head_seq: int
    ceiling_seq: int
    journaled_seq: int
    evict_floor: int
    last_ts: int
    last_write_ts: int | None
    last_read_ts: int | None
    damaged_records: int
    next_segment_id: int
    holes: list[Hole]
    losses: list[Hole]
    keys: dict[str, tuple[int, int, int]]
    flips: dict[int, bytes]
    tail: list[_TailPart]


_ENCODER: Final = msgspec.msgpack.Encoder()
_DECODER: Final = msgspec.msgpack.Decoder(_Part)


class Captured:
    """A topic at one moment: what can change is copied, blocks are only referred to."""

    __slots__ = ("_part", "_tail")

    def __init__(self, part: _Part, tail: list[tuple[Block, bytes, int]]) -> None:
        self._part = part
        self._tail = tail

    def encode(self) -> bytes:
        """The part's bytes; touches nothing that changes."""
        tail = [_TailPart(encode_block(block), dead, lsn) for block, dead, lsn in self._tail]
        return _ENCODER.encode(msgspec.structs.replace(self._part, tail=tail))


def prepare(topic: Topic) -> Captured:
    """Note the topic as it is now; the costly part is `encode`."""
    log = topic.log
    tail: list[tuple[Block, bytes, int]] = []
    if not topic.is_ephemeral:
        tail = [(run.block, bytes(run.dead), run.last_lsn) for run in log.tail()]
        block = log.open
        if block is not None:
            view = block.block_of(0, block.count)
            tail.append((view, bytes(block.dead), block.last_lsn))
    part = _Part(
        version=_VERSION,
        topic_id=topic.topic_id,
        name=topic.name,
        epoch=topic.epoch,
        config=topic.config,
        created_ts=topic.created_ts,
        applied_lsn=topic.applied_lsn,
        head_seq=log.head_seq,
        ceiling_seq=topic.ceiling_seq,
        journaled_seq=topic.journaled_seq,
        evict_floor=log.evict_floor,
        last_ts=log.last_ts,
        last_write_ts=topic.last_write_ts,
        last_read_ts=topic.last_read_ts,
        damaged_records=log.damaged_records,
        next_segment_id=log.next_segment_id,
        holes=list(log.holes),
        losses=list(log.losses.ranges),
        keys=dict(topic.keys.remembered),
        flips={segment_id: rows.tobytes() for segment_id, rows in topic.pending_flips.items()},
        tail=[],
    )
    return Captured(part, tail)


def capture(topic: Topic) -> bytes:
    """The topic's part at once."""
    return prepare(topic).encode()


def restore(encoded: bytes, sealed: Sequence[SealedIndex]) -> Topic:
    """A topic from its part and the segments its manifest lists, in seq order.

    Raises `ValueError` for bytes that are no part.
    """
    try:
        part = _DECODER.decode(encoded)
    except msgspec.DecodeError as error:
        raise ValueError(f"not a captured topic: {error}") from None
    if part.version != _VERSION:
        raise ValueError(f"captured topic has version {part.version}, not {_VERSION}")
    topic = Topic(part.topic_id, part.name, part.epoch, part.config, part.created_ts)
    topic.applied_lsn = part.applied_lsn
    topic.ceiling_seq = part.ceiling_seq
    topic.journaled_seq = part.journaled_seq
    topic.last_write_ts = part.last_write_ts
    topic.last_read_ts = part.last_read_ts
    topic.keys.remembered.update(part.keys)
    _restore_log(topic, part, sealed)
    if topic.is_ephemeral:
        topic.log.lose_all(LossReason.RESTART)
    return topic


def _restore_log(topic: Topic, part: _Part, sealed: Sequence[SealedIndex]) -> None:
    log = topic.log
    log.head_seq = part.head_seq
    log.evict_floor = part.evict_floor
    log.earliest_seq = part.head_seq + 1
    log.last_ts = part.last_ts
    log.damaged_records = part.damaged_records
    log.holes = list(part.holes)
    log.losses = Losses(part.losses)
    log.next_segment_id = part.next_segment_id
    for index in sealed:
        dead = bytearray(index.flags())
        pending = part.flips.get(index.segment_id)
        if pending is not None:
            rows = array("I", pending)
            np.frombuffer(dead, np.uint8)[np.frombuffer(rows, np.uint32)] = 1
            topic.pending_flips[index.segment_id] = rows
        _kill_holes(dead, index.first_seq, log.holes)
        log.adopt_sealed(index, dead)
    sealed_seq = log.sealed_seq
    for kept in part.tail:
        _restore_block(topic, kept, sealed_seq)
    assert log.evict_floor <= log.earliest_seq <= log.head_seq + 1


def _kill_holes(dead: bytearray, first_seq: int, holes: list[Hole]) -> None:
    """Damage that was found before is not read again."""
    for hole in holes:
        start = max(0, hole.first_seq - first_seq)
        end = min(len(dead), hole.last_seq - first_seq + 1)
        if start < end:
            dead[start:end] = b"\x01" * (end - start)


def _restore_block(topic: Topic, kept: _TailPart, sealed_seq: int) -> None:
    """A block of the captured tail, but for what was sealed since."""
    block = decode_block(kept.block)
    dead = bytearray(kept.dead)
    assert len(dead) == block.count
    if block.last_seq <= sealed_seq:
        return
    if block.first_seq <= sealed_seq:
        row = sealed_seq + 1 - block.first_seq
        block, dead = slice_block(block, row, block.count), dead[row:]
    live = dead.count(0)
    if live == 0 and topic.log.tail_count == 0:
        return
    run = TailBlock(block, dead, live, 0, kept.last_lsn)
    if live:
        # All of it weighs no more than a slice, so only a block with dead rows is walked.
        run.live_bytes = run.live_bytes_between(0, block.count)
        assert run.live_bytes >= RECORD_FRAMING_BYTES * live
    topic.log.adopt_tail(run)
