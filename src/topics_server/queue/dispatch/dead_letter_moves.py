"""Moves jobs to the dead-letter topic and back (§10.6, redrive).

A move is two entries. The store submits one after the other, and a restart completes an open move
(ARCHITECTURE, Moves between topics). This module decides which records move; no claimer gets a
moving job. Dead jobs move in the background: a dead job is claimable again only once it is certain
that its move failed. A redrive takes the dead letters of one queue, a bounded number per call.
Called by `queue/service` and `api/queues/handlers`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

import msgspec

from topics_server.engine.answers import ReadRequest
from topics_server.engine.commit.transfers import OutcomeUnknown
from topics_server.engine.ports import Clock
from topics_server.engine.read.exact_read import deletable
from topics_server.engine.store import Store
from topics_server.engine.topic.topic import Topic
from topics_server.queue.answers import Redriven
from topics_server.queue.dead_letter import Letter, Stamps, dead_body, redriven_body, stamps_of
from topics_server.queue.leases.jobs import DeadJob
from topics_server.queue.leases.lease_book import LeaseBook
from topics_server.queue.leases.lease_log import LeaseLogs, lease_event
from topics_server.queue.leases.lease_table import LeaseTable
from topics_server.values.blocks import Block
from topics_server.values.entries import Source
from topics_server.values.errors import Code, StorageError, TopicsError
from topics_server.values.limits import MIB, MOVE_RECORDS_MAX, PAGE_BYTES_MAX
from topics_server.values.model import TagMatch, TopicType

log: Final = logging.getLogger(__name__)

# Pause before a dead job is moved again after its dead-letter topic refused it.
_RETRY_MS: Final = 1_000
# Bytes of one append of a move, unless one record is larger.
_MOVE_BYTES_MAX: Final = 4 * MIB
# The maximum of dead-letter moves under way at the same time.
_BURIALS_MAX: Final = 2
# The maximum of pages that a redrive examines; then it reports that there may be more.
_PAGES_MAX: Final = 16
_PAGE_RECORDS: Final = 1_000


class _Moving(msgspec.Struct, frozen=True, gc=False):
    """A moving record; `deliveries` and `error` are set for a dead job."""

    seq: int
    letter: Letter
    deliveries: int = 0
    error: str = ""


class Mover:
    """Moves between queues and dead-letter topics. `stir` is called when jobs may be claimable."""

    def __init__(
        self,
        store: Store,
        lease_table: LeaseTable,
        clock: Clock,
        stir: Callable[[int], None],
        logs: LeaseLogs,
    ) -> None:
        self._store = store
        self._lease_table = lease_table
        self._clock = clock
        self._stir = stir
        self._logs = logs
        self._tasks: set[asyncio.Task[None]] = set()
        # Limits concurrent moves, because their steps share the turns of the loop.
        self._burying = asyncio.Semaphore(_BURIALS_MAX)
        # Dead letters in flight from topics that are not queues, by topic id.
        self._leaving: dict[int, set[int]] = {}
        # Queues whose dead letters were refused; reset when one is accepted.
        self._is_refused: set[int] = set()

    async def finish(self) -> None:
        """Return when no move is in flight."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    # -- dead letters ----------------------------------------------------------------------

    def bury(self, topic: Topic, book: LeaseBook, dead: Sequence[DeadJob]) -> None:
        """Move jobs that were delivered too often; from now on no claimer gets them."""
        begun = set(book.begin_move([job.seq for job in dead]))
        dying = {job.seq: job for job in dead if job.seq in begun}
        name = topic.config.dead_letter
        assert name is not None, "without a dead-letter topic no job dies"
        task = asyncio.get_running_loop().create_task(self._bury_soon(topic, book, name, dying))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _bury_soon(
        self, topic: Topic, book: LeaseBook, name: str, dying: dict[int, DeadJob]
    ) -> None:
        async with self._burying:
            await self._bury(topic, book, name, dying)

    async def _bury(
        self, topic: Topic, book: LeaseBook, name: str, dying: dict[int, DeadJob]
    ) -> None:
        try:
            rows = await self._store.read_rows(topic, sorted(dying))
        except (StorageError, TopicsError) as error:
            log.warning("jobs of %s cannot be read for their dead letters: %s", topic.name, error)
            self._revive(topic, book, dying)
            return
        found = [
            _Moving(m.seq, m.letter, dying[m.seq].deliveries, dying[m.seq].error)
            for m in map(_moving, rows)
        ]
        # A job that no longer exists has no letter either.
        self._revive(topic, book, set(dying).difference(m.seq for m in found))
        for chunk in _chunks(found):
            await self._bury_chunk(topic, book, name, chunk)

    async def _bury_chunk(
        self, topic: Topic, book: LeaseBook, name: str, chunk: Sequence[_Moving]
    ) -> None:
        stamped = [(m.letter, Stamps(topic.name, m.deliveries, m.seq, m.error)) for m in chunk]
        seqs = [m.seq for m in chunk]
        source = Source(topic.topic_id, seqs)
        create = topic.config.auto_create
        try:
            await self._store.append_derived(name, dead_body(stamped), source, create=create)
        except OutcomeUnknown as error:
            log.error("%d jobs of %s wait for a restart: %s", len(seqs), topic.name, error.message)
            return
        except TopicsError as error:
            if error.code is Code.TOPIC_FULL and len(chunk) > 1:
                # Continue: other destinations may have room.
                for moving in chunk:
                    await self._bury_chunk(topic, book, name, [moving])
                return
            if topic.topic_id not in self._is_refused:
                self._is_refused.add(topic.topic_id)
                log.warning(
                    "dead letters of %s are not taken by %s: %s", topic.name, name, error.message
                )
            self._revive(topic, book, seqs)
            return
        self._is_refused.discard(topic.topic_id)
        self._note(topic, chunk)
        self._stir(topic.topic_id)

    def _revive(self, topic: Topic, book: LeaseBook, seqs: Iterable[int]) -> None:
        """Make jobs that did not move claimable; a later claim finds them dead again."""
        book.cancel_move(seqs, self._clock.now_ms() + _RETRY_MS)
        self._stir(topic.topic_id)

    def _note(self, topic: Topic, moved: Sequence[_Moving]) -> None:
        name = topic.config.lease_log
        if isinstance(name, str):
            now_ms, epoch = self._clock.now_ms(), topic.epoch
            self._logs.note(
                name,
                [
                    lease_event(
                        "dead_lettered",
                        topic.name,
                        epoch,
                        m.seq,
                        now_ms,
                        deliveries=m.deliveries,
                        error=m.error,
                    )
                    for m in moved
                ],
            )

    # -- redrive ---------------------------------------------------------------------------

    async def redrive(
        self,
        queue: Topic,
        source: Topic,
        *,
        seqs: Sequence[int] | None,
        match: TagMatch | None,
        after_seq: int,
        max_jobs: int,
    ) -> Redriven:
        """Turn dead letters of `queue` into jobs again: all letters in `source`, or some of them.

        Some: those of `seqs`, or those that match `match`.

        Raises `TopicsError` if it prevented every move.
        """
        if seqs is None:
            found, next_after_seq, more = await self._search(
                queue.name, source, match, after_seq, max_jobs
            )
            skipped: list[int] = []
        else:
            # Take at most as many as may move now; the next call takes the rest.
            asked = [seq for seq in seqs if seq > after_seq]
            more, asked = len(asked) > max_jobs, asked[:max_jobs]
            next_after_seq = asked[-1] if asked else after_seq
            rows = map(_moving, await self._store.read_rows(source, asked))
            found = [m for m in rows if _is_letter_of(m.letter, queue.name)]
            skipped = sorted(set(asked).difference(m.seq for m in found))
            if 0 in seqs and not after_seq:
                # Seq 0 has no record, and no `after_seq` is below it: only the first call reports
                # it.
                skipped.insert(0, 0)
        taken = set(self._take(source, [m.seq for m in found]))
        skipped += [m.seq for m in found if m.seq not in taken]
        redriven, stopped_at = await self._redrive(
            queue, source, [m for m in found if m.seq in taken]
        )
        if stopped_at is not None:
            more, next_after_seq = True, stopped_at - 1
        return Redriven(source.name, redriven, sorted(skipped), more, next_after_seq)

    async def _search(
        self, name: str, source: Topic, match: TagMatch | None, after_seq: int, max_jobs: int
    ) -> tuple[list[_Moving], int, bool]:
        """Dead letters of a queue, the seq where the search ended, and whether more may follow."""
        found: list[_Moving] = []
        cursor = min(after_seq, source.log.head_seq)
        for _ in range(_PAGES_MAX):
            request = ReadRequest(cursor, _PAGE_RECORDS, PAGE_BYTES_MAX)
            page = await self._store.read(source.name, request)
            for piece in page.pieces:
                block = piece.block
                for row in piece.rows:
                    if match is not None and not match.matches(block.tags[row]):
                        continue
                    moving = _moving((block, row))
                    if not _is_letter_of(moving.letter, name):
                        continue
                    if len(found) == max_jobs:
                        return found, found[-1].seq, True
                    found.append(moving)
            cursor = page.next_from_seq
            if page.caught_up:
                return found, cursor, False
        return found, cursor, True

    async def _redrive(
        self, queue: Topic, source: Topic, letters: Sequence[_Moving]
    ) -> tuple[int, int | None]:
        """Move them in order; returns how many moved, and the first one that did not."""
        redriven = 0
        chunks = list(_chunks(letters))
        for index, chunk in enumerate(chunks):
            seqs = [m.seq for m in chunk]
            body = redriven_body(m.letter for m in chunk)
            try:
                await self._store.append_derived(
                    queue.name, body, Source(source.topic_id, seqs, is_redrive=True), create=False
                )
            except TopicsError as error:
                left = [m.seq for later in chunks[index + 1 :] for m in later]
                # Only a restart can find out the outcome of these moves.
                left += [] if isinstance(error, OutcomeUnknown) else seqs
                self._release(source, left)
                if redriven == 0:
                    raise
                return redriven, seqs[0]
            self._forget(source, seqs)
            redriven += len(seqs)
        return redriven, None

    def _take(self, source: Topic, seqs: Sequence[int]) -> list[int]:
        """Reserve and return the seqs that no other operation has reserved."""
        seqs = deletable(source, seqs)
        if source.config.type is TopicType.QUEUE:
            book = self._lease_table.find(source.topic_id)
            if book is None:
                return []
            return book.begin_move(book.movable(self._clock.now_ms(), seqs))
        leaving = self._leaving.setdefault(source.topic_id, set())
        taken = [seq for seq in seqs if seq not in leaving]
        leaving.update(taken)
        return taken

    def _release(self, source: Topic, seqs: Iterable[int]) -> None:
        """Release the reservation of records that did not move."""
        book = self._lease_table.find(source.topic_id)
        if book is not None:
            book.cancel_move(seqs, self._clock.now_ms())
            self._stir(source.topic_id)
        self._forget(source, seqs)

    def _forget(self, source: Topic, seqs: Iterable[int]) -> None:
        leaving = self._leaving.get(source.topic_id)
        if leaving is not None:
            leaving.difference_update(seqs)
            if not leaving:
                del self._leaving[source.topic_id]


def _moving(place: tuple[Block, int]) -> _Moving:
    block, row = place
    letter = Letter(block.data(row), block.tags[row], block.nodes[row], block.meta(row))
    return _Moving(block.first_seq + row, letter)


def _is_letter_of(letter: Letter, name: str) -> bool:
    stamps = stamps_of(letter.meta)
    return stamps is not None and stamps.from_topic == name


def _chunks(found: Sequence[_Moving]) -> Iterator[list[_Moving]]:
    """Split records into groups of which each fits one append."""
    chunk: list[_Moving] = []
    size = 0
    for moving in found:
        weight = len(moving.letter.data) + len(moving.letter.meta)
        if chunk and (size + weight > _MOVE_BYTES_MAX or len(chunk) == MOVE_RECORDS_MAX):
            yield chunk
            chunk, size = [], 0
        chunk.append(moving)
        size += weight
    if chunk:
        yield chunk
