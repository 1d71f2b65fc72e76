"""Values that the engine and the storage hand to each other, beside entries and blocks.

`engine` and `wal` do not import each other; both know these. A leaf, pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from topics_server.blocks import Block
from topics_server.model import SeqRun, TopicConfig


class ShardProgress(msgspec.Struct, frozen=True):
    """One post of a shard to the loop: how far it got, in lsn.

    `failed_from` is the lsn of the first entry of a failed group: it and everything later on the
    shard is undone. `error` says why: `disk_full` (the shard goes on once `reopen` is called) or
    `read_only` (a sync failed; the shard takes nothing until a restart).
    """

    shard: int
    written_lsn: int
    synced_lsn: int
    failed_from: int | None = None
    error: str | None = None
    write_ms: float = 0.0
    sync_ms: float = 0.0


class SegmentPlan(msgspec.Struct, frozen=True):
    """A run to be sealed: consecutive blocks and, one byte a record, which are dead already."""

    topic_id: int
    segment_id: int
    blocks: list[Block]
    dead: bytes


class TopicFacts(msgspec.Struct, frozen=True):
    """What the manifest says of a topic beside its segments."""

    topic_id: int
    name: str
    epoch: int
    config: TopicConfig
    head_seq: int
    evict_floor: int
    holes: list[SeqRun]


# The part of a snapshot that is no topic's (topics count from 1): epochs of dropped names.
EPOCHS_PART: Final = 0


class SnapshotImage(msgspec.Struct, frozen=True):
    """A whole snapshot in memory: opaque parts, each `(topic id, bytes)`, and where replay starts.

    `start_lsn`: replay needs every entry from this lsn on. `last_lsn`: the highest lsn any part
    has applied. `next_topic_id`: ids below it may have been used.
    """

    start_lsn: int
    last_lsn: int
    next_topic_id: int
    parts: Sequence[tuple[int, bytes]]
