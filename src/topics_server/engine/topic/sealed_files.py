"""The facts about a topic's sealed files: flips, digests, generation.

A delete of sealed rows is *pending* until their flags are synced; until then snapshots include it.
Snapshots also include the generation of the last published manifest and a digest of each segment's
last synced flags; the next start compares both with the files (`file_inventory`). The flags of an
`untrusted` segment differ from the synced ones: they are neither changed nor accepted, and flips of
its rows stay pending, until the undamaged file is put back. A `fragile` segment was found damaged
once: an older copy of its file may be put back, so snapshots keep all its deleted rows. A `healed`
segment has a damage hole in the snapshot that this start used, or was mended in this run: it stays
until no kept snapshot has that hole, because a start from such a snapshot needs the segment to
remove the hole. Pure; owned by `Topic`, changed on the loop by the topic, by recovery, by the
sealer and by mends.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Mapping, Sequence
from typing import Final

import numpy as np

from topics_server.engine.topic.applied import Flips
from topics_server.values.file_inventory import Anchor, FlagsDigest

# Nearly every topic shares this one; each call of `frozenset` would make another.
_NO_SEGMENTS: Final[frozenset[int]] = frozenset()


class SealedFiles:
    """See the module. `pending`: by segment, dead rows whose flag may not be on disk yet."""

    __slots__ = (
        "anchor",
        "digests",
        "first_free_id",
        "fragile",
        "generation",
        "healed",
        "pending",
        "untrusted",
    )

    def __init__(self) -> None:
        self.pending: Flips = {}
        self.digests: dict[int, FlagsDigest] = {}
        # Replaced, not changed, so that topics may share the empty one.
        self.untrusted = self.fragile = self.healed = _NO_SEGMENTS
        # The generation of the last manifest that is known to be published; 0: there was none.
        self.generation = 0
        # No file on disk has this segment id or a higher one.
        self.first_free_id = 1
        # The snapshot's expectations about the files; set in recovery only.
        self.anchor: Anchor | None = None

    def add_pending(self, flips: Flips) -> None:
        """Note dead sealed rows whose flag on disk is not synced."""
        for segment_id, rows in flips.items():
            self.pending.setdefault(segment_id, array("I")).extend(rows)

    def due_flips(self) -> dict[int, Sequence[int]]:
        """The pending flips that can be made now."""
        return {
            segment_id: array("I", rows)
            for segment_id, rows in self.pending.items()
            if segment_id not in self.untrusted
        }

    def flips_done(
        self, flips: Mapping[int, Sequence[int]], digests: Mapping[int, FlagsDigest]
    ) -> None:
        """Note that flags were synced; `digests` has the segments for which the sync succeeded.

        A segment that is not in `digests` is damaged: its flips stay pending.
        """
        for segment_id, rows in flips.items():
            if segment_id not in self.pending:
                continue  # dropped meanwhile
            if segment_id not in digests:
                self.untrusted |= {segment_id}
                continue
            self.digests[segment_id] = digests[segment_id]
            pending = np.asarray(self.pending.pop(segment_id), np.int64)
            done = np.sort(np.asarray(rows, np.int64))
            # Do not use `np.setdiff1d`: it imports a module when it first runs.
            at = np.minimum(np.searchsorted(done, pending), len(done) - 1)
            left = pending[done[at] != pending] if len(done) else pending
            if len(left):
                self.pending[segment_id] = array("I", left.astype(np.uint32).tobytes())

    def mended(self, segment_id: int) -> None:
        """Note that the segment's files were mended, with the flags that were synced last.

        A kept snapshot may have the segment's damage hole; a start from it needs the segment.
        """
        self.untrusted -= {segment_id}
        self.healed |= {segment_id}

    def drop(self, segment_ids: Collection[int]) -> None:
        """Forget segments that the topic no longer has."""
        for segment_id in segment_ids:
            self.pending.pop(segment_id, None)
            self.digests.pop(segment_id, None)
        self.untrusted -= set(segment_ids)
        self.fragile -= set(segment_ids)
        self.healed -= set(segment_ids)
