"""Ports for servers that stop and start again on the same port."""

from __future__ import annotations

import fcntl
import os
import random
import socket
import tempfile
from pathlib import Path
from typing import IO, Final

# The system's ephemeral ports begin at 32768 (Linux) or above, so the system assigns none of these
# by itself.
RANGE: Final = range(20_000, 32_000)
_held: Final[list[IO[str]]] = []


def lasting_port() -> int:
    """A free port that stays reserved for this process while its server is down.

    The kernel's lock on a file keeps the port from other test processes until this one ends.
    """
    folder = Path(tempfile.gettempdir()) / f"topics-test-ports-{os.geteuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    for port in random.Random(os.urandom(8)).sample(RANGE, 100):
        lock = (folder / str(port)).open("w")
        with socket.socket() as probe:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                probe.bind(("127.0.0.1", port))
            except OSError:
                lock.close()
                continue
        _held.append(lock)
        return port
    raise AssertionError("a hundred ports and none is free")
