"""Deleted jobs that are still in a book, until later calls forget them. Pure.

A delete of a part of a queue may include more jobs than a turn of the loop can remove from the
book's tables. Their seqs are collected at once, by numpy; a caller must check a job with `has`
first. Used by `kept_jobs`.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from topics_server.queue.leases.unclaimed import Seqs


def among(seqs: Seqs, known: Seqs) -> npt.NDArray[np.bool_]:
    """The seqs that are in `known`, which may have any order."""
    if not len(known):
        return np.zeros(len(seqs), np.bool_)
    known = np.sort(known)
    at = np.minimum(np.searchsorted(known, seqs), len(known) - 1)
    found: npt.NDArray[np.bool_] = known[at] == seqs
    return found


class Gone:
    """Seqs in ascending order; those before `_at` and those in `_early` are forgotten.

    `count`: the number of deleted jobs that are still in the book. It is stored, not computed,
    because each call on a queue needs it, and it is mostly 0.
    """

    __slots__ = ("_at", "_early", "_seqs", "count")

    def __init__(self) -> None:
        self._seqs = array("Q")
        self._at = 0
        self._early: set[int] = set()
        self.count = 0

    def __bool__(self) -> bool:
        """Whether there may be any."""
        return self._at < len(self._seqs)

    def add(self, seqs: Seqs) -> None:
        """Add distinct deleted jobs of the book; they may be included already."""
        if self:
            left = np.frombuffer(self._seqs, np.uint64)[self._at :]
            left = left[~among(left, np.fromiter(self._early, np.uint64, len(self._early)))]
            seqs = np.concatenate([left, seqs[~among(seqs, left)]])
        seqs = np.sort(seqs)
        self.clear()
        self._seqs.frombytes(seqs.tobytes())
        self._recount()

    def _recount(self) -> None:
        self.count = len(self._seqs) - self._at - len(self._early)

    def has(self, seq: int) -> bool:
        """Whether the job is deleted."""
        at = bisect_left(self._seqs, seq, self._at)
        return at < len(self._seqs) and self._seqs[at] == seq

    def note(self, seqs: Iterable[int]) -> None:
        """Note that the book forgets these jobs now."""
        self._early.update(seq for seq in seqs if self.has(seq))
        self._recount()

    def take(self, limit: int) -> list[int]:
        """The next jobs that the book must forget."""
        seqs = self._seqs[self._at : self._at + limit].tolist()
        self._at += len(seqs)
        if self:
            self._early.difference_update(seqs)
            self._recount()
        else:
            self.clear()
        return seqs

    def clear(self) -> None:
        """Remove all seqs: the book has none of these jobs any more."""
        self._seqs, self._at = array("Q"), 0
        self._early = set()
        self.count = 0
