"""The life of a helper process: start, requests, time limit, end.

A helper is one of our modules, run as a child process. It takes requests from its standard input,
answers on its standard output, and ends when its input ends, so a killed server leaves no helper
behind. Called by `append_decoder` and `wal/segments/packing_process`.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Final

# Of the buffered files on both ends of a pipe. With a small buffer each part of a request is a call
# to the system of its own, and a thread that makes one gives up the interpreter's lock.
BUFFER_BYTES: Final = 1 << 18
_PIPE_BYTES: Final = 1 << 20
_END_WAIT_S: Final = 5.0


def start_helper(module: str) -> subprocess.Popen[bytes]:
    """A child that runs a module. Raises `OSError`."""
    # -P: do not import from the caller's directory.
    command = [sys.executable, "-P", "-m", module]
    return subprocess.Popen(
        command,
        bufsize=BUFFER_BYTES,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        pipesize=_PIPE_BYTES,
    )


def end_helper(child: subprocess.Popen[bytes]) -> None:
    """*Blocking.* Close its pipes and wait for its end; kill it if it does not end."""
    for pipe in (child.stdin, child.stdout):
        try:
            if pipe is not None:
                pipe.close()
        except OSError:
            pass  # bytes that a dead child did not read
    try:
        child.wait(_END_WAIT_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


@contextmanager
def killed_after(child: subprocess.Popen[bytes], seconds: float) -> Iterator[None]:
    """Kill the child if the `with` block takes longer; its closed pipes end the block's wait."""
    timer = threading.Timer(seconds, child.kill)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def read_exactly(pipe: IO[bytes], length: int) -> bytes:
    """Read exactly `size` bytes. Raises `EOFError` if there are fewer."""
    found = pipe.read(length)
    if len(found) != length:
        raise EOFError(f"{len(found)} of {length} bytes")
    return found
