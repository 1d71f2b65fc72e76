"""The floor of fan-out: a bare asyncio loop that writes given bytes to every watching socket.

Without a watcher it is the floor of sockets: it answers requests of one size with given bytes.

It runs in its own process, on the event loop of our server (uvloop). A connection that begins with
`GET` watches: it gets a greeting once and then the frame, with exactly the bytes that our server
sent. Any other connection writes: when the bytes of one append have arrived, the loop writes the
frame to each watcher with `transport.write`, and then our server's answer to the writer. The floor
has no HTTP, no JSON, no log and no cursor: `ours / floor` shows their cost.

Started by `start_fanout_floor`; run as a module with FRAME, ANSWER, SIZE and PORT_FILE.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from pathlib import Path
from typing import cast

import uvloop

from benchmarks.servers.process import ServerProcess

GREETING = b"live\n"


class Peer(asyncio.Protocol):
    """One connection, which watches or writes, depending on its first bytes."""

    def __init__(self, watching: set[asyncio.Transport], frame: bytes, answer: bytes, size: int):
        self._watching = watching
        self._frame = frame
        self._answer = answer
        self._size = size
        self._missing = size
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports do not inherit from asyncio's
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        assert self._transport is not None
        if data.startswith(b"GET"):
            self._watching.add(self._transport)
            self._transport.write(GREETING)
            return
        self._missing -= len(data)
        assert self._missing >= 0, "more bytes than one append has"
        if self._missing:
            return
        self._missing = self._size
        frame = self._frame
        for transport in self._watching:
            transport.write(frame)
        self._transport.write(self._answer)

    def connection_lost(self, error: Exception | None) -> None:
        if self._transport is not None:
            self._watching.discard(self._transport)


def start_fanout_floor(
    folder: Path, name: str, frame: bytes, answer: bytes, size: int
) -> ServerProcess:
    """Start a floor that sends `frame` and `answer` for every `size` bytes, and wait until it
    serves.
    """
    frame_file, answer_file = folder / f"{name}.frame", folder / f"{name}.answer"
    frame_file.write_bytes(frame)
    answer_file.write_bytes(answer)
    port_file = folder / f"{name}.port"
    module = [sys.executable, "-m", "benchmarks.servers.fanout_floor"]
    command = [*module, str(frame_file), str(answer_file), str(size), str(port_file)]
    floor = ServerProcess(command, dict(os.environ), port_file, folder / f"{name}.log")
    with floor.starting():
        floor.wait_port()
    return floor


async def serve(frame: bytes, answer: bytes, size: int, listener: socket.socket) -> None:
    """Serve until SIGTERM."""
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, ended.set)
    watching: set[asyncio.Transport] = set()
    server = await loop.create_server(
        lambda: Peer(watching, frame, answer, size), sock=listener, backlog=2048
    )
    await ended.wait()
    server.close()


def main(frame: str, answer: str, size: str, port_file: str) -> None:
    """Read frame and answer, listen, serve."""
    frame_bytes, answer_bytes = Path(frame).read_bytes(), Path(answer).read_bytes()
    listener = socket.create_server(("127.0.0.1", 0), backlog=2048)
    Path(port_file).write_text(str(listener.getsockname()[1]))
    uvloop.run(serve(frame_bytes, answer_bytes, int(size), listener))


if __name__ == "__main__":
    main(*sys.argv[1:])
