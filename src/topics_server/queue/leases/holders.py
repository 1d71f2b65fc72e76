"""Finds the jobs that a node holds, by lease ids (§10.4 to §10.6). Pure.

A node holds a job while it has the job's lease, even beyond the deadline, but not while the lease
is ending or the job is moving to another topic. Called by `queue/leases/lease_book`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import repeat

from topics_server.queue.leases.held_jobs import HeldJobs, LeasedTogether
from topics_server.queue.leases.jobs import (
    ACKING,
    LEAVING,
    MOVING,
    HeldJob,
    LeaseView,
    Matched,
    view_of,
)

Jobs = Mapping[int, HeldJob]


def matched(
    jobs: HeldJobs, node: str, seqs: Sequence[int], lease_ids: Sequence[int] | None
) -> Matched:
    """Sort the seqs of an ack; each counts once."""
    if _holds_all(jobs, node, seqs, lease_ids):
        return Matched(list(seqs), [], [])
    hit: dict[int, None] = {}
    missed: dict[int, None] = {}
    joining: dict[int, None] = {}
    for seq, job in _held(jobs, node, seqs, lease_ids):
        if job is None:
            missed[seq] = None
        elif job.flags & ACKING:
            joining[seq] = None
        else:
            hit[seq] = None
    skipped = [seq for seq in missed if seq not in hit and seq not in joining]
    return Matched(list(hit), skipped, list(joining))


def leased(
    jobs: Jobs, node: str, seqs: Sequence[int], lease_ids: Sequence[int] | None
) -> tuple[list[int], list[int]]:
    """The jobs that the node holds, and the other seqs; each once."""
    hit: dict[int, None] = {}
    missed: dict[int, None] = {}
    for seq, job in _held(jobs, node, seqs, lease_ids):
        if job is None or job.flags & ACKING:
            missed[seq] = None
        else:
            hit[seq] = None
    return list(hit), [seq for seq in missed if seq not in hit]


def holds_together(together: LeasedTogether, node: str, lease_ids: Sequence[int] | None) -> bool:
    """Whether the node holds jobs of one claim, by these leases, and none of them is ending."""
    if together.flags or together.node != node:
        return False
    first_id = together.lease_id
    return lease_ids is None or lease_ids == [*range(first_id, first_id + len(together.seqs))]


def _holds_all(
    jobs: HeldJobs, node: str, seqs: Sequence[int], lease_ids: Sequence[int] | None
) -> bool:
    """Whether the node holds all of these jobs (ascending), and none of their leases is ending."""
    before = 0
    fences = repeat(0) if lease_ids is None else lease_ids
    for seq, fence, job in zip(seqs, fences, jobs.each(seqs), strict=False):
        if (
            seq <= before
            or job is None
            or job.flags
            or not job.lease_id
            or job.node != node
            or (lease_ids is not None and fence != job.lease_id)
        ):
            return False
        before = seq
    return True


def _held(
    jobs: Jobs, node: str, seqs: Sequence[int], lease_ids: Sequence[int] | None
) -> Iterator[tuple[int, HeldJob | None]]:
    """Each seq, with its job if the node holds it by this lease, else with None."""
    assert lease_ids is None or len(lease_ids) == len(seqs)
    for index, seq in enumerate(seqs):
        job = jobs.get(seq)
        if job is not None and (
            job.lease_id == 0
            or job.node != node
            or job.flags & (LEAVING | MOVING)
            or (lease_ids is not None and lease_ids[index] != job.lease_id)
        ):
            job = None
        yield seq, job


def views_after(
    jobs: HeldJobs, is_gone: Callable[[int], bool], now_ms: int, after_seq: int, limit: int
) -> list[LeaseView]:
    """Leases that have not expired, by seq."""
    seqs = sorted(jobs)
    found: list[LeaseView] = []
    for index in range(bisect_right(seqs, after_seq), len(seqs)):
        if len(found) >= limit:
            break
        job = jobs.look(seqs[index])
        if job is not None and job.lease_id and job.at_ms > now_ms and not is_gone(seqs[index]):
            found.append(view_of(seqs[index], job))
    return found
