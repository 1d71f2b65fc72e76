"""Brings one file of a view up to the head of its topic, and keeps it there.

A build reads pages of the topic like any reader and sends them to the apply process, one batch at a
time; records that arrive meanwhile are the next batch. Rows and position are committed together, so
a batch that is sent twice is applied once. At the head, and without a waiting query, batches are a
few milliseconds apart (`pacing`). A record at which `apply` fails stops the build until the
definition is corrected or the record is skipped; after a full disk or the death of the process the
build tries again. Loop thread only; called by `view`.
"""

from __future__ import annotations

import asyncio
from typing import Final, NoReturn, Protocol

import msgspec

from topics_server.engine.answers import Page, ReadRequest
from topics_server.engine.commit.notifier import Notifier
from topics_server.engine.store import Store
from topics_server.engine.topic.topic import Topic
from topics_server.runtime.metrics import log
from topics_server.values.errors import Code, StorageError, TopicsError
from topics_server.values.limits import MIB
from topics_server.values.model import LossReason, ViewDefinition
from topics_server.values.storage_types import Offload
from topics_server.views.answers import ViewFailure
from topics_server.views.feed import Feed, SharedDeath, SharedPage
from topics_server.views.messages import (
    Answer,
    Batch,
    Create,
    DiskTrouble,
    Done,
    FailedAt,
    FileFacts,
    MarkReady,
    MarkStale,
    Moved,
    Open,
    Remove,
    Skip,
    SqlRefused,
    Unreadable,
)
from topics_server.views.pacing import BatchSize
from topics_server.views.processes import Applying, ProcessDied

_PAGE_BYTES: Final = 2 * MIB
_RETRY_S: Final = 1.0
_ANSWER_SECONDS: Final = 30.0
# The maximum of records of a batch that is sent together with those of other views.
_JOINED_MAX: Final = 1_000
# After this many deaths of the process the batch counts as their cause. Killing a process that does
# not answer counts as `_LATE_DEATHS`.
_DEATHS_MAX: Final = 6
_LATE_DEATHS: Final = 3
_TRIES_MAX: Final = 3
# Reasons of holes in a log: seqs without a record that could ever be read.
_HOLES: Final = frozenset({LossReason.RESTART, LossReason.DAMAGED, LossReason.SOURCE_TRIM})


class ViewContext(msgspec.Struct, frozen=True):
    """The services that all views of a server use. `max_bytes`: the limit of one view's file."""

    store: Store
    notifier: Notifier
    process: Applying
    offload: Offload
    max_bytes: int
    feed: Feed


class BuildEvents(Protocol):
    """The callbacks of a build to its view; `View` satisfies it."""

    def opened(self, build: Build) -> None:
        """The file of the build exists."""
        ...

    def moved(self, build: Build) -> None:
        """The build processed more records."""
        ...

    def caught_up(self, build: Build) -> None:
        """The build reached the head for the first time; its file is marked as ready."""
        ...

    def lost_topic(self, build: Build) -> None:
        """The topic that the build reads was dropped, or created again."""
        ...

    def unusable(self, build: Build) -> None:
        """The file is damaged or missing, and must be rebuilt."""
        ...

    @property
    def is_awaited(self) -> bool:
        """Whether a query waits for a record to be processed."""
        ...


class Build:
    """One file of a view. `processed_seq`: the position that the file has committed.

    `is_open`: whether the file exists. `is_ready`: whether it has reached the head once. `failure`:
    why the build is stopped, if it is. `deletes_seen`: the view's count of deletes when the build
    began.
    """

    def __init__(
        self,
        path: str,
        context: ViewContext,
        events: BuildEvents,
        *,
        topic: Topic,
        definition: ViewDefinition,
        deletes_seen: int,
    ) -> None:
        self.path = path
        self.deletes_seen = deletes_seen
        self.definition = definition
        self.topic_id = topic.topic_id
        self.processed_seq = 0
        self.known_from_seq = 1
        self.is_ready = False
        self.is_open = False
        self.failure: ViewFailure | None = None
        self.bytes = 0
        self.applied_total = 0
        self._epoch = topic.epoch
        self._name = topic.name
        self._context = context
        self._store = context.store
        self._process = context.process
        self._events = events
        self._max_bytes = context.max_bytes
        self._changed = asyncio.Event()
        self._rest: asyncio.Future[None] | None = None
        self._mended = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._is_over = False
        self._lsn = 0
        self._size = BatchSize()
        # How often the process died with a batch of this view, since it last applied one.
        self._deaths = 0
        # Whether the process died with batches of several views: then this view's batch is sent
        # alone.
        self._is_suspect = False
        self._needs_payloads = True

    # -- its life --------------------------------------------------------------------------

    def start(self, facts: FileFacts | None) -> None:
        """Continue a file that is already open, or make a new one."""
        if facts is not None:
            self._note(facts)
        self._context.notifier.add(self.topic_id, self._changed.set)
        self._task = asyncio.get_running_loop().create_task(self._run(is_new=facts is None))

    async def stop(self) -> None:
        """Stop reading and applying; return when nothing is under way."""
        self._is_over = True
        task, self._task = self._task, None
        if task is not None:
            self._context.notifier.remove(self.topic_id, self._changed.set)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def remove(self) -> None:
        """Stop, and remove the file."""
        await self.stop()
        try:
            await self._process.ask(Remove(self.path), seconds=_ANSWER_SECONDS)
        except ProcessDied:
            pass  # the next start removes the remaining files

    async def mark_stale(self) -> None:
        """Note in the file that its view is to be rebuilt at the next start."""
        for _ in range(_TRIES_MAX if self.is_open else 0):
            try:
                # The process may have been replaced; the new one has no file open.
                await self._process.ask(
                    Open(self.path, self._context.max_bytes), seconds=_ANSWER_SECONDS
                )
                answer = await self._process.ask(MarkStale(self.path), seconds=_ANSWER_SECONDS)
            except ProcessDied:
                continue
            if isinstance(answer, Done):
                return
        log.warning("a view of %s may show deleted records until it is rebuilt", self._name)

    def want(self) -> None:
        """Apply the next records without a pause: a query waits for them."""
        rest = self._rest
        if rest is not None and not rest.done():
            rest.set_result(None)

    def mend(self) -> None:
        """Try the failed step again."""
        self._mended.set()

    def _note(self, facts: FileFacts) -> None:
        self.processed_seq = facts.processed_seq
        self.known_from_seq = facts.known_from_seq
        self.is_ready = facts.is_ready
        self._needs_payloads = facts.needs_payloads
        self._forget_trouble()
        if not self.is_open:
            self.is_open = True
            self._events.opened(self)
        self.bytes = facts.bytes

    def _forget_trouble(self) -> None:
        """Clear a failure of the disk. A failure at a record stays until the record is passed."""
        if self.failure is not None and self.failure.seq == 0:
            self.failure = None

    # -- at work ---------------------------------------------------------------------------

    async def _run(self, *, is_new: bool) -> None:
        try:
            if is_new:
                await self._create()
            while not self._is_over:
                await self._advance()
        except asyncio.CancelledError:
            raise
        except _Over:
            pass
        except Exception:
            log.exception("defect while building a view of %s", self._name)
            self.failure = ViewFailure(self.processed_seq, "", "an internal error, see the log")

    async def _create(self) -> None:
        request = Create(
            self.path, self.definition, str(self.topic_id), self._epoch, self._max_bytes
        )
        while True:
            answer = await self._ask(request)
            if isinstance(answer, FileFacts):
                self._note(answer)
                return
            if isinstance(answer, SqlRefused):
                self.failure = ViewFailure(0, answer.statement, answer.message)
                raise _Over
            await self._rest_before(answer)

    async def _advance(self) -> None:
        """Apply the next page; wait for the topic to change if there is none."""
        self._changed.clear()
        if self._store.is_disk_low:
            # The last of the space is for the journal, which deletes and checkpoints need.
            self.failure = self.failure or ViewFailure(0, "", "the disk is nearly full")
            await asyncio.sleep(_RETRY_S)
            return
        shared = await self._read()
        if shared is None:
            return
        page = shared.page
        has_more = page.next_from_seq > self.processed_seq
        if has_more:
            await self._apply(shared)
        # A batch that must be sent again is not applied yet.
        is_at_head = page.caught_up and self.processed_seq >= page.next_from_seq
        if not self.is_ready and is_at_head:
            await self._mark_ready()
        elif not has_more:
            await self._changed.wait()
        elif is_at_head and not self._events.is_awaited:
            await self._pause()

    async def _mark_ready(self) -> None:
        answer = await self._ask(MarkReady(self.path))
        if isinstance(answer, Done):
            self.is_ready = True
        elif isinstance(answer, Moved):
            # The process was replaced. The earlier one may have marked the file.
            await self._open()
        else:
            await self._rest_before(answer)
        if self.is_ready:
            self._events.caught_up(self)

    async def _pause(self) -> None:
        self._rest = self._context.feed.rest()
        try:
            await self._rest
        finally:
            self._rest = None

    async def _read(self) -> SharedPage | None:
        topic = self._store.topic_of(self.topic_id)
        if topic is None or topic.staging.has_drop:
            return self._lose_topic()
        # Do not wait in the read: a waiting read would pass deleted records without returning.
        request = ReadRequest(self.processed_seq, self._size.records, _PAGE_BYTES)
        try:
            shared = await self._context.feed.read(topic, request)
        except TopicsError as error:
            if error.code is Code.TOPIC_NOT_FOUND:
                self._lose_topic()
            await asyncio.sleep(_RETRY_S)
            return None
        except StorageError as error:
            self.failure = ViewFailure(0, "", str(error))
            await asyncio.sleep(_RETRY_S)
            return None
        if shared.page.epoch != self._epoch:
            self._lose_topic()
        self._forget_trouble()
        # This lsn is read after the page, so the file may claim a higher lsn than it reflects,
        # never a lower one.
        self._lsn = topic.applied_lsn
        return shared

    def _lose_topic(self) -> NoReturn:
        self._is_over = True
        self._events.lost_topic(self)
        raise _Over

    async def _apply(self, shared: SharedPage) -> None:
        batch = self._batch(shared)
        is_small = shared.page.caught_up and batch.count <= _JOINED_MAX
        while True:
            alone = not is_small or self._is_suspect or self._events.is_awaited
            try:
                answer = await self._context.feed.apply(self.path, batch, alone=alone)
            except SharedDeath:
                self._is_suspect = True
                answer = Moved()
            except ProcessDied as died:
                await self._note_death(died, shared.page)
                answer = Moved()
            if isinstance(answer, Done):
                self.failure = None
                self.bytes = answer.bytes
                self.applied_total += batch.count
                self._size.note(batch.count, answer.ms)
                self._is_suspect, self._deaths = False, 0
                self._move(answer.processed_seq, batch.known_from_seq)
                return
            if isinstance(answer, FailedAt):
                # Records before the failed one are committed.
                self._move(answer.seq - 1, batch.known_from_seq)
                await self._fail(answer.seq, answer.statement, answer.message)
                return
            if isinstance(answer, Moved):
                # The process was replaced, or the file has another position: read the position
                # again.
                await self._open()
                return
            await self._rest_before(answer)

    async def _note_death(self, died: ProcessDied, page: Page) -> None:
        """Note that the process died with only this view's batch; stop after repeated deaths."""
        self._deaths += _LATE_DEATHS if died.was_late else 1
        if self._deaths >= _DEATHS_MAX and page.pieces:
            message = f"{died}: the records from here on made it fail repeatedly"
            self._deaths = 0
            first = page.pieces[0]
            await self._fail(first.block.first_seq + first.rows[0], "", message)

    async def _fail(self, seq: int, statement: str, message: str) -> None:
        """Stop until a client corrects the view."""
        self.failure = ViewFailure(seq, statement, message)
        log.warning("a view of %s stopped at record %d: %s", self._name, seq, message)
        self._mended.clear()
        await self._mended.wait()

    async def skip(self, seq: int) -> bool:
        """Skip the record at which the build failed; returns whether it is this record."""
        failure = self.failure
        if failure is None or failure.seq != seq or seq == 0:
            return False
        try:
            await self._open()
            if self.processed_seq == seq - 1:
                answer = await self._ask(Skip(self.path, seq))
                if not isinstance(answer, Done):
                    return False
                self._move(seq, self.known_from_seq)
        except _Over:
            # The build ended meanwhile; the build that replaces it has not failed at this record.
            return False
        self.failure = None
        self.mend()
        return True

    async def _open(self) -> None:
        while True:
            answer = await self._ask(Open(self.path, self._max_bytes))
            if isinstance(answer, FileFacts):
                self._note(answer)
                return
            await self._rest_before(answer)

    async def _rest_before(self, answer: Answer) -> None:
        """Wait before the next try; an unusable file ends the build."""
        if isinstance(answer, Unreadable):
            self._is_over = True
            self._events.unusable(self)
            raise _Over
        if isinstance(answer, DiskTrouble):
            self.failure = ViewFailure(0, "", answer.message)
        await asyncio.sleep(_RETRY_S)

    async def _ask(self, request: Create | Open | Skip | MarkReady) -> Answer:
        while True:
            try:
                return await self._process.ask(request, seconds=_ANSWER_SECONDS)
            except ProcessDied:
                if self._is_over:
                    raise _Over from None
                await asyncio.sleep(_RETRY_S)

    def _move(self, seq: int, known_from_seq: int) -> None:
        self.known_from_seq = max(self.known_from_seq, min(known_from_seq, seq + 1))
        if seq > self.processed_seq:
            self.processed_seq = seq
            self._events.moved(self)

    def _batch(self, shared: SharedPage) -> Batch:
        """The records of a page, and the holes that it reports."""
        page = shared.page
        gaps: list[tuple[int, int]] = []
        known_from_seq = 1
        if page.gap is not None:
            if page.gap.reason in _HOLES:
                gaps.append((page.gap.gap_from, page.gap.gap_to))
            else:
                known_from_seq = page.gap.gap_to + 1
        return Batch(
            from_seq=self.processed_seq,
            upto_seq=page.next_from_seq,
            lsn=self._lsn,
            known_from_seq=known_from_seq,
            gaps=gaps,
            count=sum(len(piece.rows) for piece in page.pieces),
            pieces=shared.pieces(with_payloads=self._needs_payloads),
        )


class _Over(Exception):
    """The build has ended, and its view was notified."""
