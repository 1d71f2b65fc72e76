"""Transfers of records between topics: second half and crash recovery.

A transfer is an append at the destination, synced, that carries a source mark, followed by a delete
at the source. Here a mark is *open* from the submit of its append until no record of its source is
live: the delete follows the append in the same turn and is retried until it is done, even if no
task waits for it. Replay must read an open mark, so no snapshot starts after it (`commits.hold`);
recovery completes the marks that it found, before requests are served (ARCHITECTURE, Moves between
topics). Called by the store (transfers) and by the wiring (recovery). Loop thread only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Final

from topics_server.engine.commit.gates import gate_of
from topics_server.engine.commit.pipeline import CommitPipeline, Ticket
from topics_server.engine.commit.ticket_waits import check_applied, resolve_future, resolved
from topics_server.engine.ports import Clock
from topics_server.engine.read.exact_read import decide_delete_seqs, deletable, is_live
from topics_server.engine.topic.registry import Registry
from topics_server.engine.topic.topic import Topic
from topics_server.runtime.metrics import log
from topics_server.values.entries import RecordsAppended, Source
from topics_server.values.errors import Code, StartRefused, TopicsError

_RETRY_S: Final = 0.25


class OutcomeUnknown(TopicsError):
    """A sync failed during a transfer: only a restart can find out which half is durable.

    Until then the record may or may not be deleted at its source: no claimer may get it.
    """

    def __init__(self, cause: TopicsError) -> None:
        super().__init__(cause.code, cause.message, cause.detail)


class SourceGone(TopicsError):
    """Some of the records were deleted meanwhile, so nothing was transferred: read them again."""

    def __init__(self) -> None:
        super().__init__(
            Code.THROTTLED, "records were deleted while they were moved", {"limit": "source"}
        )


class Transfer:
    """One mark, from the time when its append is submitted."""

    __slots__ = ("error", "is_done", "lsn", "source", "waiters")

    def __init__(self, lsn: int, source: Source) -> None:
        self.lsn = lsn
        self.source = source
        self.is_done = False
        self.error: TopicsError | None = None
        self.waiters: list[asyncio.Future[None]] = []

    def resolve(self) -> None:
        """Resolve every waiter, once."""
        waiters, self.waiters = self.waiters, []
        for waiter in waiters:
            resolve_future(waiter)

    async def finished(self) -> None:
        """Return when the source is deleted.

        Raises `OutcomeUnknown`, or the error that prevented the transfer.
        """
        if not self.is_done and self.error is None:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self.waiters.append(waiter)
            await waiter
        error = self.error
        if error is not None:
            # Make a new error for each waiter: a raised error refers to the frames that it passed,
            # and they refer to this object.
            if isinstance(error, OutcomeUnknown):
                raise OutcomeUnknown(error)
            raise TopicsError(error.code, error.message, error.detail)


class Transfers:
    """The open marks of one server."""

    def __init__(self, registry: Registry, commits: CommitPipeline, clock: Clock) -> None:
        self._registry = registry
        self._commits = commits
        self._clock = clock
        self.open_count = 0

    def check(self, source: Source) -> None:
        """Check that every source record is live; call it in the append's loop turn.

        Raises `SourceGone`.
        """
        topic = self._registry.get(source.topic_id)
        if topic is None or topic.staging.has_drop:
            raise SourceGone
        if len(deletable(topic, source.seqs)) < len(source.seqs):
            raise SourceGone

    def follow(self, ticket: Ticket) -> Transfer:
        """Follow the transfer of this submitted append until it is complete."""
        entry = ticket.entry
        assert isinstance(entry, RecordsAppended)
        assert entry.source is not None
        transfer = Transfer(ticket.lsn, entry.source)
        self.open_count += 1
        self._commits.hold(ticket.lsn)
        if ticket.is_done:
            self._appended(ticket, transfer)
        else:
            ticket.waiters.append(partial(self._appended, ticket, transfer))
        return transfer

    def _appended(self, ticket: Ticket, transfer: Transfer) -> None:
        if ticket.error is None:
            self._delete(transfer)
        elif ticket.error.code is Code.STORAGE_READ_ONLY:
            self._give_up(transfer, ticket.error)
        else:
            transfer.error = ticket.error
            self._close(transfer)

    def _delete(self, transfer: Transfer) -> None:
        """Delete the remaining records at the source, now or after its entries in flight."""
        source = transfer.source
        topic = self._registry.get(source.topic_id)
        left = [] if topic is None else [s for s in source.seqs if is_live(topic.log, s)]
        if topic is None or not left:
            transfer.is_done = True
            self._close(transfer)
            return
        seqs = [] if topic.staging.has_control else deletable(topic, left)
        try:
            ticket = self._submit(topic, seqs) if seqs else self._commits.newest(topic.topic_id)
        except TopicsError as error:
            self._failed(transfer, error)
            return
        assert ticket is not None, "a live seq that cannot be deleted is being deleted"
        if ticket.is_done:
            self._deleted(ticket, transfer)
        else:
            ticket.waiters.append(partial(self._deleted, ticket, transfer))

    def _submit(self, topic: Topic, seqs: Sequence[int]) -> Ticket:
        entry = decide_delete_seqs(topic, seqs, self._clock.now_ms())
        return self._commits.submit(entry, gate_of(entry, topic), topic, urgent=True)

    def _deleted(self, ticket: Ticket, transfer: Transfer) -> None:
        if ticket.error is None:
            self._delete(transfer)
        else:
            self._failed(transfer, ticket.error)

    def _failed(self, transfer: Transfer, error: TopicsError) -> None:
        if error.code in (Code.STORAGE_READ_ONLY, Code.INTERNAL):
            self._give_up(transfer, error)
        else:
            asyncio.get_running_loop().call_later(_RETRY_S, self._delete, transfer)

    def _give_up(self, transfer: Transfer, error: TopicsError) -> None:
        """Leave the mark open for the next start; its lsn stays held."""
        log.error(
            "a move of %d records from topic %d waits for a restart: %s",
            len(transfer.source.seqs),
            transfer.source.topic_id,
            error.message,
        )
        transfer.error = OutcomeUnknown(error)
        transfer.resolve()

    def _close(self, transfer: Transfer) -> None:
        self.open_count -= 1
        self._commits.release(transfer.lsn)
        transfer.resolve()

    async def complete(self, sources: Sequence[Source]) -> int:
        """Delete transferred records that still exist at their source; returns how many.

        Called before requests are served. Raises `StartRefused` if the journal refuses an entry.
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
                await resolved(ticket)
                check_applied(ticket)
            except TopicsError as error:
                raise StartRefused(
                    f"{len(seqs)} records of topic {topic.name} were moved and cannot be deleted "
                    f"there: {error.message}"
                ) from None
            count += len(seqs)
        return count
