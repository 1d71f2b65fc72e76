"""Deletes and moved floors of one topic: decides and applies them. Pure.

The entry of a delete, by range or by tag, has the exact seqs. A floor moves by TTL, or by a cap
that was tightened. Called by `engine/deletes`, `engine/background/sealer` (expiry) and `apply`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final

from topics_server.engine.log.runs import Rows, TailBlock
from topics_server.engine.topic import deletion, retention
from topics_server.engine.topic.applied import NOTIFY, Applied
from topics_server.engine.topic.topic import Topic
from topics_server.values.entries import Floor, FloorMoved, RecordsDeleted
from topics_server.values.model import LossReason, TagMatch

_NO_BLOCKS: Final[Mapping[TailBlock, Rows]] = MappingProxyType({})


def segments_to_search(topic: Topic, before_seq: int | None, now_ms: int) -> list[int]:
    """Segments that a delete by tag must search, off the loop."""
    first, last = _delete_range(topic, before_seq, now_ms)
    return deletion.segments_to_search(topic.log, first, last)


def blocks_to_search(topic: Topic, before_seq: int | None, now_ms: int) -> list[TailBlock]:
    """Unsealed blocks that a delete by tag must search; there may be thousands."""
    first, last = _delete_range(topic, before_seq, now_ms)
    return deletion.blocks_to_search(topic.log, first, last)


def decide_delete(
    topic: Topic,
    before_seq: int | None,
    match: TagMatch | None,
    hits: Mapping[int, Sequence[int]],
    now_ms: int,
    block_hits: Mapping[TailBlock, Rows] = _NO_BLOCKS,
) -> RecordsDeleted | None:
    """A delete with the exact seqs as of now; None if it deletes nothing.

    `hits`: the matching rows of every segment that `segments_to_search` returns *now*; unused
    without a `match`. `block_hits`: rows of the unsealed blocks that were searched before.
    """
    assert before_seq is not None or match is not None
    first, last = _delete_range(topic, before_seq, now_ms)
    if match is None:
        runs = deletion.runs_of_range(topic.log, first, last)
    else:
        runs = deletion.runs_of_match(topic.log, first, last, match, hits, block_hits)
    if runs is None:
        return None
    return RecordsDeleted(topic.topic_id, now_ms, runs[0], runs[1])


def decide_expiry(topic: Topic, now_ms: int) -> FloorMoved | None:
    """The floor that is due by TTL, or by a tightened cap; None if none is."""
    config, log = topic.config, topic.log
    if log.live_count == 0 or not (config.ttl_ms or config.cap_records or config.cap_bytes):
        return None
    holds = topic.consumers.holds()
    floor = retention.standing_floor(log, topic.staging, config, now_ms, holds)
    return None if floor is None else FloorMoved(topic.topic_id, now_ms, floor)


def _delete_range(topic: Topic, before_seq: int | None, now_ms: int) -> tuple[int, int]:
    head = topic.log.head_seq
    last = head if before_seq is None else min(head, before_seq - 1)
    return topic.earliest_seq(now_ms), last


def apply_delete(topic: Topic, entry: RecordsDeleted) -> Applied:
    """Remove the records from the log; rows of sealed files become pending flips."""
    log, seqs = topic.log, entry.seqs
    if seqs is not None:
        assert seqs[-1] <= log.head_seq, "seqs of a live delete exist"
        deleted, flips = log.delete_seqs(seqs)
        if not flips:
            return Applied(notify=True, deleted=deleted)
        topic.files.add_pending(flips)
        return Applied(True, deleted, flips, log.dead_segments())
    firsts, lasts = deletion.columns_of(entry.firsts, entry.lasts)
    if len(lasts) and int(lasts[-1]) > log.head_seq:
        # The seqs were assigned, even if their records have no frame (class ephemeral).
        log.jump_head(int(lasts[-1]), LossReason.RESTART)
    deleted, flips = log.delete(firsts, lasts)
    topic.files.add_pending(flips)
    dead = log.dead_segments() if flips else ()
    return Applied(notify=True, deleted=deleted, flips=flips, dead_segments=dead)


def apply_floor(topic: Topic, floor: Floor) -> Applied:
    """Raise the floor; segments without a live record must be dropped."""
    log = topic.log
    log.raise_floor(floor)
    # Only records at the front can have died.
    if log.sealed_count and log.runs[0].live_count == 0:
        return Applied(notify=True, dead_segments=log.dead_segments())
    return NOTIFY
