"""Jobs that are gone, freed a few at a time. Pure.

A purge takes all jobs out of a book in one step. To free a hundred thousand of them takes longer
than a turn of the loop may, so later calls do it. Used by `lease_book` and `lease_table`.
"""

from __future__ import annotations

from typing import Final

from topics_server.queue.leases.jobs import HeldJob

# Jobs that one call frees.
FREED_JOBS: Final = 1_000


class Rubbish:
    """What nothing refers to any more."""

    __slots__ = ("_jobs",)

    def __init__(self) -> None:
        self._jobs: list[dict[int, HeldJob]] = []

    def __len__(self) -> int:
        return sum(map(len, self._jobs))

    def add(self, jobs: dict[int, HeldJob]) -> None:
        """Free these jobs later."""
        if jobs:
            self._jobs.append(jobs)

    def free_some(self) -> None:
        """Free some of the jobs."""
        if self._jobs:
            jobs = self._jobs[-1]
            for _ in range(min(len(jobs), FREED_JOBS)):
                jobs.popitem()
            if not jobs:
                self._jobs.pop()
