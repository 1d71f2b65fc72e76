"""Encodes one queue's leases as snapshot parts, and back. Pure.

A piece holds as many jobs as can be encoded in one slice; entries may be applied between two
pieces. So each piece is as new as the lsn of its part. The cursor, the delays and the list of jobs
are those at the moment of the first piece; from its lsn on the journal supplies the rest. Pending
entries are not included. Called by `queue/leases/lease_table`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from topics_server.queue.leases.jobs import HeldJob
from topics_server.queue.leases.lease_book import LeaseBook
from topics_server.values.storage_types import LeaseImage, QueueImage

# Jobs in one piece: about as many as one slice encodes.
PIECE_JOBS: Final = 1_000


def pieces_of(book: LeaseBook) -> Iterator[QueueImage]:
    """The book in pieces, at least one."""
    seqs = list(book.jobs)
    next_unclaimed_seq, delayed_seqs, delayed_times = _unclaimed_position(book)
    timed = book.unclaimed.timed | {seq for seq in book.taking if book.jobs[seq].is_timed}
    heard_lsn, dead_lettered = book.topic_lsn, book.dead_lettered
    for start in range(0, max(1, len(seqs), len(delayed_seqs)), PIECE_JOBS):
        end = start + PIECE_JOBS
        leases: list[LeaseImage] = []
        returned: list[tuple[int, int]] = []
        deliveries: list[tuple[int, int]] = []
        errors: list[tuple[int, str]] = []
        for seq in seqs[start:end]:
            job = book.jobs.look(seq)
            if job is None or job.is_unclaimed or book.is_gone(seq):
                continue  # deleted, maybe while others were captured, or not leased yet
            if job.error:
                errors.append((seq, job.error))
            if job.lease_id:
                leases.append(_image_of(seq, job))
            else:
                returned.append((seq, job.at_ms))
                deliveries.append((seq, job.deliveries))
        yield QueueImage(
            queue_id=book.queue_id,
            heard_lsn=heard_lsn,
            next_unclaimed_seq=next_unclaimed_seq,
            dead_lettered=dead_lettered,
            leases=leases,
            returned=returned,
            delayed=[
                (seq, at_ms, 1) if seq in timed else (seq, at_ms)
                for seq, at_ms in zip(
                    delayed_seqs[start:end], delayed_times[start:end], strict=True
                )
            ],
            deliveries=deliveries,
            moved=[],
            errors=errors,
        )


def _unclaimed_position(book: LeaseBook) -> tuple[int, list[int], list[int]]:
    """The cursor for unclaimed jobs of a restored book, and the delayed seqs with their times.

    Seqs from the cursor on that were leased are in `jobs` or are dead.
    """
    delayed_until = book.unclaimed.delayed_until
    taken = [seq for seq in book.taking if book.jobs[seq].at_ms]
    return (
        min([book.unclaimed.lowest_seq(), *book.taking]),
        [*delayed_until, *taken],
        [*delayed_until.values(), *[book.jobs[seq].at_ms for seq in taken]],
    )


def restore_piece(book: LeaseBook, image: QueueImage, applied_lsn: int) -> None:
    """Add a piece to the book. Raises `ValueError` if it contradicts the book."""
    book.topic_lsn = image.heard_lsn
    book.dead_lettered = image.dead_lettered
    book.unclaimed.next_seq = image.next_unclaimed_seq
    for delayed in image.delayed:
        if len(delayed) not in (2, 3):
            raise ValueError(f"a delay of {len(delayed)} numbers in queue {book.queue_id}")
        book.delay(delayed[0], delayed[1], is_time=len(delayed) == 3)
    errors = dict(image.errors)
    for lease in image.leases:
        job = HeldJob(
            lease_id=lease.lease_id,
            node=lease.node,
            at_ms=lease.deadline_ms + 1,
            deliveries=lease.deliveries,
            claimed_ts=lease.claimed_ts,
            connection=lease.connection,
            lsn=applied_lsn,
            error=errors.get(lease.seq, ""),
        )
        _adopt(book, lease.seq, job)
    counts = dict(image.deliveries)
    for seq, at_ms in image.returned:
        job = HeldJob(
            at_ms=at_ms,
            deliveries=counts.get(seq, 1),
            lsn=applied_lsn,
            error=errors.get(seq, ""),
        )
        _adopt(book, seq, job)


def _adopt(book: LeaseBook, seq: int, job: HeldJob) -> None:
    if seq in book.jobs or job.deliveries < 1:
        raise ValueError(
            f"seq {seq} of queue {book.queue_id} is captured twice, or was never assigned"
        )
    book.adopt(seq, job)


def _image_of(seq: int, job: HeldJob) -> LeaseImage:
    return LeaseImage(
        seq,
        job.lease_id,
        job.node,
        job.at_ms - 1,
        job.deliveries,
        job.claimed_ts,
        job.connection,
    )
