"""Deterministic blocks, plans and facts for storage tests and golden vectors."""

from __future__ import annotations

from array import array

import msgspec

from topics_server.values.blocks import Block, make_block
from topics_server.values.model import PayloadKind, SeqRun, TopicConfig
from topics_server.values.storage_types import SegmentPlan, TopicFacts

TOPIC = 7


def sample_block(first_seq: int, count: int) -> Block:
    """Records of every form: tags and nodes present, absent, empty, not ASCII; meta or none."""
    rows = range(first_seq, first_seq + count)
    block = make_block(
        first_seq,
        array("q", [1_700_000_000_000 + seq // 3 for seq in rows]),
        [b'{"n":%d,"pad":"%s"}' % (seq, b"x" * (seq % 40)) for seq in rows],
        [b'{"m":%d}' % seq if seq % 3 == 0 else b"" for seq in rows],
        [("", "ähre", f"room:{seq % 5}", None)[seq % 4] for seq in rows],
        [(f"u{seq % 3}", None, "")[seq % 3] for seq in rows],
    )
    return msgspec.structs.replace(block, hops=bytes(seq % 3 for seq in rows))


def sample_blocks(first_seq: int, count: int, step: int = 16) -> list[Block]:
    """A run cut into blocks."""
    end = first_seq + count
    return [sample_block(seq, min(step, end - seq)) for seq in range(first_seq, end, step)]


def with_bytes(blocks: list[Block]) -> list[Block]:
    """The run with a bytes record at its end: it is not stored as JSON objects."""
    *others, last = blocks
    kinds = last.kinds[:-1] + bytes((PayloadKind.BYTES,))
    return [*others, msgspec.structs.replace(last, kinds=kinds)]


def sample_plan(segment_id: int, first_seq: int, count: int, dead: bytes = b"") -> SegmentPlan:
    """A run to be sealed."""
    return SegmentPlan(TOPIC, segment_id, sample_blocks(first_seq, count), dead or bytes(count))


def sample_facts(head_seq: int = 1000) -> TopicFacts:
    """A topic's side of the manifest."""
    return TopicFacts(
        topic_id=TOPIC,
        name="orders.eu:42",
        epoch=3,
        config=TopicConfig(ttl_ms=1000, cap_records=5, dead_letter="dead"),
        head_seq=head_seq,
        evict_floor=4,
        holes=[SeqRun(11, 12)],
    )
