"""Encodes one queue's leases as snapshot parts, and back. Pure.

A piece holds so many jobs that it is encoded in a slice; entries may be applied between two pieces.
So each is as new as the lsn of its part says, and the first one says from where on the journal
tells what no piece has: cursor, delays and the list of jobs are those of the moment it was made.
What is under way is captured as if it were not. Called by `queue/leases/lease_table`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from topics_server.queue.leases.jobs import HeldJob
from topics_server.queue.leases.lease_book import LeaseBook
from topics_server.values.storage_types import LeaseImage, QueueImage

# Jobs in one piece: about what is encoded in a slice.
PIECE_JOBS: Final = 1_000


def pieces_of(book: LeaseBook) -> Iterator[QueueImage]:
    """The book in pieces, at least one."""
    seqs = list(book.jobs)
    next_fresh_seq, delayed_seqs, delayed_times = book.fresh_position()
    timed = book.timed_seqs()
    heard_lsn, dead_lettered = book.topic_lsn, book.dead_lettered
    for start in range(0, max(1, len(seqs), len(delayed_seqs)), PIECE_JOBS):
        end = start + PIECE_JOBS
        leases: list[LeaseImage] = []
        returned: list[tuple[int, int]] = []
        deliveries: list[tuple[int, int]] = []
        errors: list[tuple[int, str]] = []
        for seq in seqs[start:end]:
            job = book.jobs.get(seq)
            if job is None or job.is_fresh:
                continue  # deleted while others were captured, or not given to anybody yet
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
            next_fresh_seq=next_fresh_seq,
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


def restore_piece(book: LeaseBook, image: QueueImage, applied_lsn: int) -> None:
    """Take a piece over. Raises `ValueError` if it contradicts what is there."""
    book.topic_lsn = image.heard_lsn
    book.dead_lettered = image.dead_lettered
    book.fresh.next_seq = image.next_fresh_seq
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
        raise ValueError(f"seq {seq} of queue {book.queue_id} is captured twice, or never given")
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
