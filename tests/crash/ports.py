"""Ports for servers that are killed and come back to the same one. Used by the two chaos runs."""

from __future__ import annotations

import os
import random
import socket


def quiet_port() -> int:
    """A free port that nobody is given who asks for any: it stays ours while the server is down.

    Those lie in the range of the system's ephemeral ports, which begins at 32768 (Linux) or above.
    """
    for port in random.Random(os.getpid()).sample(range(20_000, 32_000), 100):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise AssertionError("a hundred ports and none is free")
