"""Repeats a request that may be sent again: after 429, restarts and broken connections.

Used by `load` and `import`. Each kind of failure is reported once, when it happens.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final, TypeVar

from topics_server.cli.connection import CallRefused, ServerUnreachable
from topics_server.runtime.clock import monotonic_ms

T = TypeVar("T")
RETRY_PAUSE_S: Final = 0.5
RETRY_PAUSE_MAX_S: Final = 5.0

Tell = Callable[[str], None]  # one line for the user


def is_passing(error: CallRefused | ServerUnreachable) -> bool:
    """Whether the same request may succeed later: the server is busy, away or restarting."""
    if isinstance(error, ServerUnreachable):
        return True
    return error.status in {429, 503} and error.code != "storage_read_only"


def repeated(
    attempt: Callable[[], T],
    may_repeat: Callable[[CallRefused | ServerUnreachable], bool],
    retry_s: float,
    what: str,
    tell: Tell,
) -> tuple[T, bool]:
    """The result of the first attempt that succeeds, and whether a failure was reported before.

    Raises the last `CallRefused` or `ServerUnreachable` if it may not be repeated, or after
    `retry_s` seconds. `what` names the request in the report: "trying `what` again".
    """
    deadline_ms = monotonic_ms() + retry_s * 1000
    pause_s = RETRY_PAUSE_S
    reported: set[str] = set()
    while True:
        try:
            return attempt(), bool(reported)
        except (CallRefused, ServerUnreachable) as error:
            if not may_repeat(error) or monotonic_ms() >= deadline_ms:
                raise
            if isinstance(error, CallRefused) and error.retry_after_s is not None:
                pause_s = max(RETRY_PAUSE_S, error.retry_after_s)
            kind = error.code if isinstance(error, CallRefused) else ""
            if kind not in reported:
                reported.add(kind)
                tell(f"{error.message} (trying {what} again for up to {retry_s:g} s)")
        threading.Event().wait(min(pause_s, RETRY_PAUSE_MAX_S))
