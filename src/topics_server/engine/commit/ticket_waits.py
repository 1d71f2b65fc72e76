"""The ways to wait for a ticket: a future, a task that raises its error, a callback.

The write continues if its waiter is cancelled. Called by the calls of the engine, by `queue`,
`routers` and `streams`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from topics_server.engine.commit.pipeline import Ticket
from topics_server.values.errors import TopicsError


def resolved(ticket: Ticket) -> asyncio.Future[None]:
    """A future that resolves once the ticket is applied or has failed.

    Cancelling it does not cancel the write.
    """
    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    call_when_resolved(ticket, partial(resolve_future, done))
    return done


async def applied(ticket: Ticket) -> None:
    """Return when the ticket is applied; raise the ticket's error."""
    if not ticket.is_done:
        await resolved(ticket)
    check_applied(ticket)


def check_applied(ticket: Ticket) -> None:
    """Raise the error of a ticket that has failed."""
    error = ticket.error
    if error is not None:
        # Make a new error for each waiter: a raised error refers to the frames of its traceback.
        raise TopicsError(error.code, error.message, error.detail)


def call_when_resolved(ticket: Ticket, callback: Callable[[], object]) -> None:
    """Call `callback` once the ticket is applied or has failed; now if it already is.

    The call happens in the loop turn that commits the entry, before readers are notified.
    `callback` must not raise.
    """
    if ticket.applied is None is ticket.error:
        ticket.waiters.append(callback)
    else:
        callback()


def resolve_future(future: asyncio.Future[None]) -> None:
    """Resolve the future unless it was cancelled with its task."""
    if not future.done():
        future.set_result(None)
