"""How long-running verbs end: by Ctrl-C, or because their output is closed.

Both count as success. The verbs that use this module only read, so they may end at any point.
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

# The longest time that Ctrl-C may take, in seconds.
_END_S: Final = 1.0


@contextlib.contextmanager
def stopped_by_user() -> Iterator[None]:
    """Ctrl-C ends the verb with success."""
    late = threading.Timer(_END_S, os._exit, (0,))
    late.daemon = True

    def interrupt(_number: int, _frame: Any) -> None:
        # If the exception is raised in a clean-up, Python only prints it and continues.
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
    """Ctrl-C, or the end of the process that reads the output, ends the verb with success."""
    ended = threading.Event()
    _watch_output(ended)
    try:
        with stopped_by_user():
            yield
            sys.stdout.flush()
    except BrokenPipeError:
        # The buffered output has no reader; the interpreter's own flush must print no error.
        sys.stdout = None
    finally:
        ended.set()


def _watch_output(ended: threading.Event) -> None:
    """Detect that a pipe's reader has ended even without output to write, like `tail -f`."""
    try:
        descriptor = sys.stdout.fileno()
        mode = Path(f"/dev/fd/{descriptor}").stat().st_mode
    except (OSError, ValueError):
        return
    if not (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)):
        return
    poll = select.poll()
    poll.register(descriptor, 0)  # poll for errors only: the reader has gone

    def wait() -> None:
        poll.poll()
        if not ended.is_set():
            os._exit(0)  # end at once, also in a blocking read, and without any clean-up

    threading.Thread(target=wait, daemon=True).start()
