"""The ways to wait for a ticket: a future, a task and a callback are notified at the same
moment.
"""

from __future__ import annotations

import asyncio

import pytest

from tests.unit.engine.rig import ListJournal, body_of
from topics_server.engine.commit.notifier import Notifier
from topics_server.engine.commit.pipeline import DISK_FULL, CommitPipeline, Ticket
from topics_server.engine.commit.ticket_waits import (
    applied,
    call_when_resolved,
    check_applied,
    resolved,
)
from topics_server.engine.topic.registry import Registry
from topics_server.engine.topic.writes.append import decide_append
from topics_server.values.appends import AppendLimits
from topics_server.values.entries import RecordsAppended
from topics_server.values.errors import Code, TopicsError
from topics_server.values.model import Gate, TopicConfig

pytestmark = pytest.mark.anyio


class Desk:
    """One topic, and a journal that the test drives."""

    def __init__(self) -> None:
        registry = Registry()
        self.journal = ListJournal()
        self.commits = CommitPipeline(registry, self.journal, Notifier(), 1)
        self.topic, creation = registry.decide_create("t", TopicConfig(), 1)
        self.commits.submit(creation, Gate.SYNCED, self.topic)
        self.shard = self.journal.shard_of(self.topic.topic_id)
        self.journal.sync(self.shard)

    def append(self) -> Ticket:
        body, decoded = body_of(1)
        entry = decide_append(self.topic, decoded, body, None, 1, AppendLimits())
        assert isinstance(entry, RecordsAppended)
        return self.commits.submit(entry, Gate.WRITTEN, self.topic)

    def refuse(self, ticket: Ticket) -> None:
        self.journal.fail(self.shard, ticket.lsn, DISK_FULL)


async def test_a_future_a_task_and_a_callback_hear_of_the_write() -> None:
    desk = Desk()
    ticket, heard = desk.append(), list[str]()
    future, task = resolved(ticket), asyncio.ensure_future(applied(ticket))
    call_when_resolved(ticket, lambda: heard.append("callback"))
    await asyncio.sleep(0)
    assert (future.done(), task.done(), heard) == (False, False, [])
    desk.journal.write(desk.shard)
    assert (future.done(), heard) == (True, ["callback"])
    await task


async def test_what_is_resolved_already_is_heard_of_at_once() -> None:
    desk = Desk()
    ticket, heard = desk.append(), list[str]()
    desk.journal.write(desk.shard)
    call_when_resolved(ticket, lambda: heard.append("callback"))
    assert heard == ["callback"]
    assert resolved(ticket).done()
    await applied(ticket)


async def test_a_cancelled_wait_changes_nothing() -> None:
    desk = Desk()
    ticket = desk.append()
    task = asyncio.ensure_future(applied(ticket))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    desk.journal.write(desk.shard)
    assert ticket.applied is not None


async def test_each_that_waits_gets_an_error_of_its_own() -> None:
    desk = Desk()
    ticket = desk.append()
    tasks = [asyncio.ensure_future(applied(ticket)) for _ in range(2)]
    await asyncio.sleep(0)
    desk.refuse(ticket)
    first, second = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(first, TopicsError)
    assert isinstance(second, TopicsError)
    assert first is not second
    assert first.code is second.code is Code.THROTTLED
    with pytest.raises(TopicsError, match="nothing was stored"):
        check_applied(ticket)


async def test_a_future_of_a_refused_write_resolves_without_an_error() -> None:
    desk = Desk()
    ticket = desk.append()
    future = resolved(ticket)
    desk.refuse(ticket)
    await future
    assert ticket.error is not None
