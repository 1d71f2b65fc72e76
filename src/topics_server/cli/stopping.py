"""How long-running verbs end: Ctrl-C, or a closed output.

Both are a success. What is called here only reads, so nothing is half done wherever it ends.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import stat
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

# How long Ctrl-C takes at most.
_END_S: Final = 1.0


@contextlib.contextmanager
def stopped_by_user() -> Iterator[None]:
    """Ctrl-C ends the verb as a success."""
    late = threading.Timer(_END_S, os._exit, (0,))
    late.daemon = True

    def interrupt(_number: int, _frame: Any) -> None:
        # Where it lands in a clean-up, Python only prints the exception and goes on.
        if late.ident is None:
            late.start()
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    except KeyboardInterrupt:
        pass
    finally:
        signal.signal(signal.SIGINT, before)
        late.cancel()


@contextlib.contextmanager
def stopped_by_reader() -> Iterator[None]:
    """Ctrl-C, and the end of whoever reads our output, end the verb as a success."""
    ended = threading.Event()
    _watch_output(ended)
    try:
        with stopped_by_user():
            yield
            sys.stdout.flush()
    except BrokenPipeError:
        # What is still buffered has no reader; the interpreter's own flush must not complain.
        sys.stdout = None
    finally:
        ended.set()


def _watch_output(ended: threading.Event) -> None:
    """Notice the end of a pipe also while there is nothing to write, as `tail -f` does."""
    try:
        descriptor = sys.stdout.fileno()
        mode = Path(f"/dev/fd/{descriptor}").stat().st_mode
    except (OSError, ValueError):
        return
    if not (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)):
        return
    poll = select.poll()
    poll.register(descriptor, 0)  # errors only: the reader is gone

    def wait() -> None:
        poll.poll()
        if not ended.is_set():
            os._exit(0)  # at once, also out of a blocking read, and in no clean-up

    threading.Thread(target=wait, daemon=True).start()
