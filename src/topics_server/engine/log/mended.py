"""Takes the rows of a mended segment back into its log. Pure.

Called by `Topic.note_mended`, once the segment's files are mended in a running server. A start does
the same in `engine/background/capture`.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from topics_server.engine.log.log import Log
from topics_server.engine.log.losses import without_damage
from topics_server.engine.log.runs import DAMAGED, DELETED, SealedRun
from topics_server.engine.ports import SealedIndex

_LIVE: Final = 0


def readmit(log: Log, index: SealedIndex, flags: bytes) -> int:
    """Make the damaged rows of a segment live again, and remove its damage holes.

    Rows that are dead by `flags` (1: dead) or lie below the floor stay dead, and so do rows that
    were deleted while they were damaged. Returns how many records came back.
    """
    runs = log.runs[: log.sealed_count]
    at = next(
        number
        for number, run in enumerate(runs)
        if isinstance(run, SealedRun) and run.segment_id == index.segment_id
    )
    old = log.runs[at]
    assert len(flags) == old.count
    dead = np.frombuffer(old.dead, np.uint8).copy()
    was_damaged = dead == DAMAGED
    stays = np.frombuffer(flags, np.uint8) != 0
    stays[: max(0, log.evict_floor - old.first_seq)] = True
    dead[was_damaged] = np.where(stays[was_damaged], DELETED, _LIVE)
    run = SealedRun(index, bytearray(dead.tobytes()))
    came = run.live_count - old.live_count
    assert came >= 0
    log.runs[at] = run
    log.live_count += came
    log.live_bytes += run.live_bytes - old.live_bytes
    log.damaged_records = max(0, log.damaged_records - int(was_damaged.sum()))
    log.holes = without_damage(log.holes, [(run.first_seq, run.last_seq)])
    log.earliest_seq = log.next_live(log.evict_floor)
    return came
