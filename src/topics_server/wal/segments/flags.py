"""Delete flags of a segment: digest and repair of a damaged byte. Pure.

Flags lie outside every checksum of `.data`, because they change in place. A snapshot keeps their
digest (`file_inventory.FlagsDigest`). Pure; used by `wal/segments/topic_scan.py` and
`wal/segments/store.py`.
"""

from __future__ import annotations

from itertools import product
from typing import Final

import numpy as np
import xxhash

from topics_server.values.file_inventory import FlagsDigest
from topics_server.wal.format.segment import DEAD, LIVE, damaged_flags

# The digest restores at most this many damaged flags, by trying both values of each.
_GUESSED_MAX: Final = 8


def digest_of(flags: bytes) -> FlagsDigest:
    """The digest of a segment's flags; a damaged one counts as neither live nor dead."""
    return FlagsDigest(flags.count(DEAD), xxhash.xxh3_64_intdigest(flags))


def union_of(flags: bytes, others: bytes) -> bytes:
    """Merge two copies: rows dead in either are dead; ignores damaged flags of `others`."""
    ours, theirs = np.frombuffer(flags, "u1"), np.frombuffer(others, "u1")
    union: bytes = np.where(theirs == DEAD, DEAD, ours).astype("u1").tobytes()
    return union


def dead_with(flags: bytes, rows: bytes) -> int:
    """The number of rows that are dead by their flag or listed in `rows` (`<u4` row numbers)."""
    dead = np.frombuffer(flags, "u1") == DEAD
    dead[np.frombuffer(rows, "<u4")] = True
    return int(np.count_nonzero(dead))


def mended(flags: bytes, anchored: FlagsDigest) -> bytes | None:
    """The flags with damaged bytes set so that the anchored digest fits; None if none fits."""
    damaged = damaged_flags(flags).tolist()
    if not 0 < len(damaged) <= _GUESSED_MAX:
        return None
    column = bytearray(flags)
    for values in product((LIVE, DEAD), repeat=len(damaged)):
        for row, value in zip(damaged, values, strict=True):
            column[row] = value
        if digest_of(bytes(column)) == anchored:
            return bytes(column)
    return None
