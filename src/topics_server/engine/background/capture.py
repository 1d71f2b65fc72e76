"""Encodes one topic as a snapshot part, and restores it. Pure.

A part holds the state that neither a segment nor a later journal entry has: configuration, head,
ceiling, floor, reasons of lost records, holes, idempotency keys, the applied lsn, the unsealed
tail, flips that are not synced yet, and the expectations about its files (`file_inventory.Anchor`).
The part of an ephemeral topic has no records: the restored topic has one hole over all its seqs.
`encode` of a `Captured` may run off the loop, since blocks never change. The version comes first.
Called by the checkpointer and by recovery.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Final

import msgspec
import numpy as np

from topics_server.engine.log.block_slices import slice_block
from topics_server.engine.log.log import Log
from topics_server.engine.log.losses import Losses, with_hole, without_damage
from topics_server.engine.log.runs import DAMAGED, DELETED, TailBlock
from topics_server.engine.ports import SealedIndex
from topics_server.engine.topic.applied import RouterCursor
from topics_server.engine.topic.consumers.positions import ConsumerAt
from topics_server.engine.topic.producers import StampAccepted
from topics_server.engine.topic.stream_facts import StreamState
from topics_server.engine.topic.topic import Topic
from topics_server.values.blocks import Block, decode_block, encode_block
from topics_server.values.file_inventory import anchor_of
from topics_server.values.limits import RECORD_FRAMING_BYTES
from topics_server.values.model import Hole, LossReason, StreamFacts
from topics_server.values.storage_types import TOPIC_PARTS, TailPart, TopicPart

_ENCODER: Final = msgspec.msgpack.Encoder()


class Captured:
    """A topic's state at one moment: mutable state is copied, blocks are shared."""

    __slots__ = ("_part", "_tail")

    def __init__(self, part: TopicPart, tail: list[tuple[Block, bytes, int]]) -> None:
        self._part = part
        self._tail = tail

    def encode(self) -> bytes:
        """The part's bytes; reads nothing that may change meanwhile."""
        tail = [
            TailPart(memoryview(encode_block(block)), dead, last_lsn)
            for block, dead, last_lsn in self._tail
        ]
        return _ENCODER.encode(msgspec.structs.replace(self._part, tail=tail))


def prepare(topic: Topic) -> Captured:
    """Capture the topic's state now; `encode` does the expensive work later."""
    log = topic.log
    tail: list[tuple[Block, bytes, int]] = []
    if not topic.is_ephemeral:
        tail = [(run.block, bytes(run.dead), run.last_lsn) for run in log.tail()]
        block = log.open
        if block is not None:
            view = block.block_of(0, block.count)
            tail.append((view, bytes(block.dead), block.last_lsn))
    part = TopicPart(
        version=TOPIC_PARTS.version,
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
        flips=_flips_of(topic),
        tail=[],
        cursors={router: (at.seq, at.copy_count) for router, at in topic.cursors.items()},
        producers=_producers_of(topic),
        stream=_stream_of(topic),
        manifest_generation=topic.files.generation,
        flags={
            segment_id: (digest.dead_count, digest.checksum)
            for segment_id, digest in topic.files.digests.items()
        },
        whole_flips=sorted(topic.files.fragile),
        consumers={
            name: (at.seq, at.created_ts, at.committed_ts)
            for name, at in topic.consumers.known.items()
        },
        holds={
            name: at.hold
            for name in topic.consumers.holding
            if (at := topic.consumers.known.get(name)) is not None and at.hold is not None
        },
    )
    return Captured(part, tail)


def _flips_of(topic: Topic) -> dict[int, bytes]:
    """Dead rows whose flags may not be set yet.

    For a fragile segment these are all its deleted rows; if it is also untrusted, the restore made
    all of them pending.
    """
    files = topic.files
    flips = {segment_id: rows.tobytes() for segment_id, rows in files.pending.items()}
    for run in topic.log.sealed() if files.fragile else ():
        if run.segment_id in files.fragile and run.segment_id not in files.untrusted:
            deleted = np.flatnonzero(np.frombuffer(run.dead, np.uint8) == DELETED)
            flips[run.segment_id] = deleted.astype(np.uint32).tobytes()
    return flips


def _producers_of(topic: Topic) -> dict[str, tuple[int, int, int, int, int]]:
    """The producers of the topic; empty if a restart loses their records."""
    if topic.is_ephemeral:
        return {}
    return {name: msgspec.structs.astuple(last) for name, last in topic.producers.known.items()}


def _stream_of(topic: Topic) -> StreamFacts | None:
    """The facts of a stream, with the time of its last use."""
    stream = topic.stream
    if stream is None:
        return None
    return msgspec.structs.replace(stream.facts, used_ms=stream.used_ms)


def capture(topic: Topic) -> bytes:
    """Capture and encode the topic's part in one step."""
    return prepare(topic).encode()


def restore(part: TopicPart, sealed: Sequence[SealedIndex]) -> Topic:
    """A topic from its part and the segments its manifest lists, in seq order."""
    topic = Topic(part.topic_id, part.name, part.epoch, part.config, part.created_ts)
    topic.applied_lsn = part.applied_lsn
    topic.ceiling_seq = part.ceiling_seq
    topic.journaled_seq = part.journaled_seq
    topic.last_write_ts = part.last_write_ts
    topic.last_read_ts = part.last_read_ts
    # These checks save time: most topics have none of these, and a store may have 100,000 topics.
    if part.manifest_generation or part.flags:
        topic.files.anchor = anchor_of(part)
    if part.whole_flips:
        topic.files.fragile = frozenset(part.whole_flips) & {index.segment_id for index in sealed}
    if part.keys:
        topic.own_keys().restore(part.keys)
    if part.producers:
        topic.own_producers().known.update(
            (producer, StampAccepted(*last)) for producer, last in part.producers.items()
        )
    if part.consumers:
        topic.own_consumers().known = {name: ConsumerAt(*at) for name, at in part.consumers.items()}
    for name, hold in part.holds.items():
        topic.consumers.known[name].hold = hold
        topic.consumers.note_hold(name)
    if part.stream is not None:
        topic.stream = StreamState(part.stream)
    if part.cursors:
        topic.cursors = {router: RouterCursor(*cursor) for router, cursor in part.cursors.items()}
    if not topic.is_ephemeral:
        _restore_log(topic, part, sealed)
        return topic
    next_id = part.next_segment_id
    _restore_log(topic, part, [index for index in sealed if index.segment_id < next_id])
    topic.log.lose_all(LossReason.RESTART)
    topic.log.replayed_seq = None
    _adopt_newer(topic, [index for index in sealed if index.segment_id >= next_id])
    return topic


def _adopt_newer(topic: Topic, sealed: Sequence[SealedIndex]) -> None:
    """Adopt segments sealed after the capture of an ephemeral topic: it has another class by now.

    All earlier records are lost: they were only in memory, or a start skipped their seqs without an
    entry in the journal.
    """
    log = topic.log
    if not sealed:
        return
    last_lost = sealed[0].first_seq - 1
    log.holes = [Hole(1, last_lost, LossReason.RESTART)] if last_lost else []
    for index in sealed:
        log.adopt_sealed(index, bytearray(index.flags()))
    log.replayed_seq = last_lost


def _restore_log(topic: Topic, part: TopicPart, sealed: Sequence[SealedIndex]) -> None:
    log = topic.log
    log.head_seq = part.head_seq
    log.evict_floor = part.evict_floor
    log.earliest_seq = part.head_seq + 1
    log.last_ts = part.last_ts
    if part.losses:
        log.losses = Losses(part.losses)
    log.next_segment_id = part.next_segment_id
    if part.holes:
        log.holes = without_damage(part.holes, [(i.first_seq, i.last_seq) for i in sealed])
    healed = 0
    for index in sealed:
        dead = bytearray(index.flags())
        pending = array("I", part.flips.get(index.segment_id, b""))
        if index.segment_id >= part.next_segment_id and not topic.is_ephemeral:
            pending.extend(_died_in_tail(part, index, dead))
        if pending:
            np.frombuffer(dead, np.uint8)[np.frombuffer(pending, np.uint32)] = 1
            topic.files.pending[index.segment_id] = pending
        healed += _look_again(log, dead, index, part.holes)
        if _has_damage_hole(part.holes, index):
            topic.files.healed |= {index.segment_id}
        log.adopt_sealed(index, dead)
    log.replayed_seq = part.head_seq if part.head_seq < log.head_seq else None
    log.damaged_records = max(0, part.damaged_records - healed)
    sealed_seq = log.sealed_seq
    for kept in part.tail:
        _restore_block(topic, kept, sealed_seq)
    assert log.evict_floor <= log.earliest_seq <= log.head_seq + 1


def _has_damage_hole(holes: list[Hole], index: SealedIndex) -> bool:
    """Whether the part has a damage hole in this segment."""
    return any(
        hole.reason is LossReason.DAMAGED
        and hole.first_seq <= index.last_seq
        and hole.last_seq >= index.first_seq
        for hole in holes
    )


def _look_again(log: Log, dead: bytearray, index: SealedIndex, holes: list[Hole]) -> int:
    """Count the rows of damage holes that are readable now; rows in other holes are lost.

    An undamaged file may have replaced that of a damaged segment since the capture.
    """
    healed = 0
    for hole in holes:
        start = max(0, max(hole.first_seq, log.evict_floor) - index.first_seq)
        end = min(len(dead), hole.last_seq - index.first_seq + 1)
        if start >= end:
            continue
        if hole.reason is not LossReason.DAMAGED:
            dead[start:end] = b"\x01" * (end - start)
            continue
        live = dead.count(0, start, end)
        for first, last in index.damaged_rows(start, end) if live else ():
            dead[first : last + 1] = dead[first : last + 1].replace(b"\0", bytes([DAMAGED]))
            lost = Hole(index.first_seq + first, index.first_seq + last, LossReason.DAMAGED)
            log.holes = with_hole(log.holes, lost)
        healed += dead.count(0, start, end)
    return healed


def _died_in_tail(part: TopicPart, index: SealedIndex, flags: bytearray) -> array[int]:
    """Dead rows of a segment whose flags say live; the capture had them in its tail.

    They died while the segment was being written. The entries that killed them are included in the
    part and are not replayed; rows that are missing in the part's tail, up to its head, are dead as
    well.
    """
    first = index.first_seq
    count = max(0, min(index.last_seq, part.head_seq) - first + 1)
    dead = bytearray(b"\x01") * count
    for kept in part.tail:
        block = decode_block(kept.block)
        start = max(block.first_seq, first)
        end = min(block.last_seq + 1, first + count)
        if start < end:
            offset = block.first_seq
            dead[start - first : end - first] = kept.dead[start - offset : end - offset]
    rows = np.flatnonzero(np.frombuffer(dead, np.uint8) > np.frombuffer(flags, np.uint8)[:count])
    rows = rows[rows >= part.evict_floor - first]
    return array("I", rows.astype(np.uint32).tobytes())


def _restore_block(topic: Topic, kept: TailPart, sealed_seq: int) -> None:
    """Restore a block of the captured tail, except for rows that were sealed since."""
    block = decode_block(kept.block)
    dead = bytearray(kept.dead)
    assert len(dead) == block.count
    if block.first_seq <= sealed_seq:
        if block.last_seq <= sealed_seq:
            return
        row = sealed_seq + 1 - block.first_seq
        block, dead = slice_block(block, row, block.count), dead[row:]
    live = dead.count(0)
    if live == 0 and topic.log.tail_count == 0:
        return
    run = TailBlock(block, dead, live, 0, kept.last_lsn)
    if live == len(dead):
        # Nearly every block; `live_bytes_between` says the same in more steps.
        run.live_bytes = block.ends[-1] + RECORD_FRAMING_BYTES * live + run.text_bytes
    elif live:
        run.live_bytes = run.live_bytes_between(0, len(dead))
    assert run.live_bytes >= RECORD_FRAMING_BYTES * live
    topic.log.adopt_tail(run)
