"""Transfers of records between topics: second half and crash recovery.

A move is an append at the destination, synced, that carries a source mark, and after it a delete at
the source. Here a mark is *open* from the moment its append is submitted until nothing of its
source lives: the delete follows the append in the same turn and is tried again until it is done,
whoever waits for it. While a mark is open, replay must meet it, so snapshots start no later
(`commits.hold`); recovery completes what it met before anything is served (ARCHITECTURE, Two
topics). Called by the store (moves) and by the wiring (recovery). Loop thread only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Final

from topics_server.engine.commit.pipeline import CommitPipeline, Ticket
from topics_server.engine.ports import Clock
from topics_server.engine.read.exact_read import decide_delete_seqs, deletable, is_live
from topics_server.engine.topic.registry import Registry
from topics_server.engine.topic.topic import Topic
from topics_server.runtime.metrics import log
from topics_server.values.entries import RecordsAppended, Source
from topics_server.values.errors import Code, StartRefused, TopicsError

_RETRY_S: Final = 0.25


def settled(ticket: Ticket) -> asyncio.Future[None]:
    """Done once the ticket is applied or has failed. Going away changes nothing."""
    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    if ticket.is_done:
        done.set_result(None)
    else:
        ticket.waiters.append(partial(_resolve, done))
    return done


def _resolve(future: asyncio.Future[None]) -> None:
    """Unless its task was cancelled, which cancels the future."""
    if not future.done():
        future.set_result(None)


class OutcomeUnknown(TopicsError):
    """A sync failed in the middle of a move: only a restart tells which half of it happened.

    Until then the record is neither at its source nor free of it: it must not be handed out.
    """

    def __init__(self, cause: TopicsError) -> None:
        super().__init__(cause.code, cause.message, cause.detail)


class SourceGone(TopicsError):
    """Some of the records to be moved were deleted meanwhile: nothing was moved. Look again."""

    def __init__(self) -> None:
        super().__init__(
            Code.THROTTLED, "records were deleted while they were moved", {"limit": "source"}
        )


class Transfer:
    """One mark from the submit of its append on."""

    __slots__ = ("error", "is_done", "lsn", "source", "waiters")

    def __init__(self, lsn: int, source: Source) -> None:
        self.lsn = lsn
        self.source = source
        self.is_done = False
        self.error: TopicsError | None = None
        self.waiters: list[asyncio.Future[None]] = []

    def settle(self) -> None:
        """Tell everybody who waits, once."""
        waiters, self.waiters = self.waiters, []
        for waiter in waiters:
            _resolve(waiter)

    async def finished(self) -> None:
        """Return when the source is deleted. Raises `OutcomeUnknown`, or why nothing was moved."""
        if not self.is_done and self.error is None:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self.waiters.append(waiter)
            await waiter
        if self.error is not None:
            raise self.error


class Transfers:
    """The open marks of one server."""

    def __init__(self, registry: Registry, commits: CommitPipeline, clock: Clock) -> None:
        self._registry = registry
        self._commits = commits
        self._clock = clock
        self.open_count = 0

    def check(self, source: Source) -> None:
        """In the turn of the append: all of it lives. Raises `SourceGone`."""
        topic = self._registry.get(source.topic_id)
        if topic is None or topic.staging.has_drop:
            raise SourceGone
        if len(deletable(topic, source.seqs)) < len(source.seqs):
            raise SourceGone

    def follow(self, ticket: Ticket) -> Transfer:
        """The append of this ticket, just submitted, moves records: see it through."""
        entry = ticket.entry
        assert isinstance(entry, RecordsAppended)
        assert entry.source is not None
        move = Transfer(ticket.lsn, entry.source)
        self.open_count += 1
        self._commits.hold(ticket.lsn)
        if ticket.is_done:
            self._appended(ticket, move)
        else:
            ticket.waiters.append(partial(self._appended, ticket, move))
        return move

    def _appended(self, ticket: Ticket, move: Transfer) -> None:
        if ticket.error is None:
            self._delete(move)
        elif ticket.error.code is Code.STORAGE_READ_ONLY:
            self._give_up(move, ticket.error)
        else:
            move.error = ticket.error
            self._close(move)

    def _delete(self, move: Transfer) -> None:
        """Delete what is left of the source, now or when what is under way there is settled."""
        source = move.source
        topic = self._registry.get(source.topic_id)
        left = [] if topic is None else [s for s in source.seqs if is_live(topic.log, s)]
        if topic is None or not left:
            move.is_done = True
            self._close(move)
            return
        seqs = [] if topic.staging.has_control else deletable(topic, left)
        try:
            ticket = self._submit(topic, seqs) if seqs else self._commits.newest(topic.topic_id)
        except TopicsError as error:
            self._failed(move, error)
            return
        assert ticket is not None, "a live seq that cannot be deleted is being deleted"
        if ticket.is_done:
            self._deleted(ticket, move)
        else:
            ticket.waiters.append(partial(self._deleted, ticket, move))

    def _submit(self, topic: Topic, seqs: Sequence[int]) -> Ticket:
        entry = decide_delete_seqs(topic, seqs, self._clock.now_ms())
        return self._commits.submit(entry, topic.delete_gate, topic, urgent=True)

    def _deleted(self, ticket: Ticket, move: Transfer) -> None:
        if ticket.error is None:
            self._delete(move)
        else:
            self._failed(move, ticket.error)

    def _failed(self, move: Transfer, error: TopicsError) -> None:
        if error.code in (Code.STORAGE_READ_ONLY, Code.INTERNAL):
            self._give_up(move, error)
        else:
            asyncio.get_running_loop().call_later(_RETRY_S, self._delete, move)

    def _give_up(self, move: Transfer, error: TopicsError) -> None:
        """Leave the mark open for the next start: its lsn stays held."""
        log.error(
            "a move of %d records from topic %d waits for a restart: %s",
            len(move.source.seqs),
            move.source.topic_id,
            error.message,
        )
        move.error = OutcomeUnknown(error)
        move.settle()

    def _close(self, move: Transfer) -> None:
        self.open_count -= 1
        self._commits.release(move.lsn)
        move.settle()

    async def complete(self, sources: Sequence[Source]) -> int:
        """Before anything is served: delete what was moved and is still there; how many.

        Raises `StartRefused` if the journal does not take it.
        """
        count = 0
        moved: dict[int, set[int]] = {}
        for source in sources:
            moved.setdefault(source.topic_id, set()).update(source.seqs)
        for topic_id, marked in moved.items():
            topic = self._registry.get(topic_id)
            seqs = [] if topic is None else deletable(topic, sorted(marked))
            if topic is None or not seqs:
                continue
            try:
                ticket = self._submit(topic, seqs)
                await settled(ticket)
                if ticket.error is not None:
                    raise ticket.error
            except TopicsError as error:
                raise StartRefused(
                    f"{len(seqs)} records of topic {topic.name} were moved and cannot be deleted "
                    f"there: {error.message}"
                ) from None
            count += len(seqs)
        return count
