"""Decides conditional writes: waits for what a decision needs, then decides again.

A write whose condition is undecided (`topic/writes/condition`) has staged nothing. This module
waits until the staged entry that may conflict is applied, or searches sealed segments off the loop.
Then it attempts the whole write again, because the idempotency key, the topic and the list of
segments may have changed. Called through `store`; loop thread only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from topics_server.engine.commit.pipeline import CommitPipeline
from topics_server.engine.commit.ticket_waits import resolved
from topics_server.engine.read.filtered import Search
from topics_server.engine.read.segment_reader import Fetcher
from topics_server.engine.topic.writes.condition import (
    Condition,
    ConditionCheck,
    ConditionCounts,
    UndecidedError,
)
from topics_server.values.limits import SEARCHED_AT_ONCE

T = TypeVar("T")


class Conditions:
    """The conditional writes of all topics."""

    def __init__(self, commits: CommitPipeline, fetcher: Fetcher) -> None:
        self._commits = commits
        self._fetcher = fetcher
        self.counts = ConditionCounts()

    def check_of(self, condition: Condition) -> ConditionCheck:
        """The check of a write with this condition."""
        return ConditionCheck(condition, self.counts)

    async def decided(self, check: ConditionCheck | None, attempt: Callable[[], Awaitable[T]]) -> T:
        """Attempt a write until its condition is decided.

        Raises what the attempt raises, and the condition's error if the condition does not hold.
        """
        if check is None:
            return await attempt()
        while True:
            try:
                return await attempt()
            except UndecidedError as error:
                undecided = error.with_traceback(None)
            await self._progress(check, undecided)

    async def _progress(self, check: ConditionCheck, undecided: UndecidedError) -> None:
        topic, lsn = undecided.topic, undecided.lsn
        if lsn is not None:
            ticket = self._commits.find(topic.topic_id, lsn)
            if ticket is not None:
                await resolved(ticket)
            return
        wanted = check.segments_to_search(topic, SEARCHED_AT_ONCE)
        if wanted and check.condition.none_match is not None:
            search = Search(check.condition.none_match)
            await self._fetcher.search(topic, wanted, search)
            check.found.update(search.found)
        else:
            await _next_turn()


def _next_turn() -> asyncio.Future[None]:
    """A future that resolves in the next turn of the loop; sockets can only wait for futures."""
    loop = asyncio.get_running_loop()
    turn: asyncio.Future[None] = loop.create_future()
    loop.call_soon(_resolve, turn)
    return turn


def _resolve(turn: asyncio.Future[None]) -> None:
    if not turn.done():
        turn.set_result(None)
