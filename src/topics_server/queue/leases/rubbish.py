"""Frees deleted jobs a few at a time. Pure.

A purge removes all jobs from a book in one step, and other large deletes leave the jobs there
(`gone`). Freeing a hundred thousand jobs takes longer than a turn of the loop may last, so later
turns free them, and so do calls for any queue. Used by `lease_book` and `lease_table`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from topics_server.queue.leases.jobs import HeldJob

# The number of jobs that one call frees.
FREED_JOBS: Final = 1_000


class Rubbish:
    """Frees dropped jobs, and removes the deleted jobs of lease books, in bounded steps.

    `soon`: calls a function in a later turn of the loop; None: only other calls free memory.
    `has_any`: whether `free_some` has work; callers on the hot path check it first.
    """

    __slots__ = ("_forgetting", "_is_called_soon", "_jobs", "has_any", "soon")

    def __init__(self) -> None:
        self.soon: Callable[[Callable[[], None]], object] | None = None
        self.has_any = False
        self._is_called_soon = False
        self._jobs: list[dict[int, HeldJob]] = []
        self._forgetting: dict[Callable[[], bool], None] = {}

    def __len__(self) -> int:
        return sum(map(len, self._jobs))

    def add(self, jobs: dict[int, HeldJob]) -> None:
        """Free these jobs later."""
        if jobs:
            self._jobs.append(jobs)
            self.has_any = True
            self._call_soon()

    def later(self, forget: Callable[[], bool]) -> None:
        """Call `forget` once in each later call, until it returns that nothing is left."""
        self._forgetting[forget] = None
        self.has_any = True
        self._call_soon()

    def _call_soon(self) -> None:
        if self.soon is not None and not self._is_called_soon:
            self._is_called_soon = True
            self.soon(self._free_on)

    def _free_on(self) -> None:
        self._is_called_soon = False
        self.free_some()
        if self.has_any:
            self._call_soon()

    def free_some(self) -> None:
        """Free some of the jobs."""
        if self._forgetting:
            forget = next(iter(self._forgetting))
            if not forget():
                del self._forgetting[forget]
        if self._jobs:
            jobs = self._jobs[-1]
            for _ in range(min(len(jobs), FREED_JOBS)):
                jobs.popitem()
            if not jobs:
                self._jobs.pop()
        self.has_any = bool(self._jobs or self._forgetting)
