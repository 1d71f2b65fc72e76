"""Repeats a request that may be sent again: after 429, restarts and broken connections.

Used by verbs that repeat requests. The client decides which errors are temporary, and how long the
pauses are.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from topics_server.cli.connection import CallRefused, ServerUnreachable
from topics_server.client.effects import Effects
from topics_server.client.errors import passes
from topics_server.client.retries import PAUSES, RetryPolicy

T = TypeVar("T")

Tell = Callable[[str], None]  # one line for the user


def is_passing(error: CallRefused | ServerUnreachable) -> bool:
    """Whether the same request may succeed later: the server is busy, away or restarting."""
    is_read_only = isinstance(error, CallRefused) and error.code == "storage_read_only"
    return passes(error.cause) and not is_read_only


def tried(
    attempt: Callable[[], T],
    may_repeat: Callable[[CallRefused | ServerUnreachable], bool],
    total_ms: int,
    on_failure: Callable[[CallRefused | ServerUnreachable], None],
) -> T:
    """The result of the first attempt that succeeds; calls `on_failure` before each pause.

    Raises the last error if the request may not be repeated, or once all pauses together would
    exceed `total_ms`. Pauses grow, are partly random, and are never shorter than the server asks
    for.
    """
    policy, effects = RetryPolicy(total_ms, PAUSES), Effects()
    while True:
        try:
            return attempt()
        except (CallRefused, ServerUnreachable) as error:
            pause_ms = policy.pause_ms(error.cause, effects.chance())
            if pause_ms is None or not may_repeat(error):
                raise
            on_failure(error)
        threading.Event().wait(pause_ms / 1000)


def repeated(
    attempt: Callable[[], T],
    may_repeat: Callable[[CallRefused | ServerUnreachable], bool],
    retry_s: float,
    what: str,
    tell: Tell,
) -> tuple[T, bool]:
    """The result of `tried`. Each kind of failure is reported once.

    `what` names the request in the report: "trying `what` again".
    """
    reported: set[str] = set()

    def report(error: CallRefused | ServerUnreachable) -> None:
        kind = error.code if isinstance(error, CallRefused) else ""
        if kind not in reported:
            reported.add(kind)
            tell(f"{error.message} (trying {what} again for up to {retry_s:g} s)")

    return tried(attempt, may_repeat, int(retry_s * 1000), report), bool(reported)


def is_lost(error: CallRefused | ServerUnreachable) -> bool:
    """Whether the request may have reached the server although no answer came.

    If no server answers the first try, a verb fails at once.
    """
    return isinstance(error, ServerUnreachable) and error.sent


def nothing(_error: CallRefused | ServerUnreachable) -> None:
    """Print nothing."""
