"""Other servers for comparison: started on a free port, called in their own protocol.

A peer that is not installed raises `NotInstalled` with the line that installs it; the cases put
that line into their result instead of leaving the peer out. Used by `cases/compared/redis`,
`cases/fanout`, `cases/queues` and `cases/streams`.
"""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.clients.loader import BenchmarkError
from benchmarks.servers.process import ServerProcess
from tests.streams import node

NATS_HELLO = b'CONNECT {"verbose":false}\r\nPING\r\n'
START_TURNS, START_STEP_SECONDS = 500, 0.01


class NotInstalled(Exception):
    """The case needs a program that is not installed; the message says how to install it."""


def program(name: str) -> str:
    """The path of an installed program."""
    found = shutil.which(name)
    if found is None:
        raise NotInstalled(f"{name} not found: apt-get install {name}")
    return found


def command(*words: bytes) -> bytes:
    """A command in redis's protocol."""
    parts = b"".join(b"$%d\r\n%s\r\n" % (len(word), word) for word in words)
    return b"*%d\r\n" % len(words) + parts


class Peer:
    """A process on its own port; `close` ends it."""

    def __init__(self, arguments: Sequence[str], port: int, folder: Path, probe: bytes) -> None:
        self.port = port
        with (folder / "log").open("wb") as log:
            self._process = subprocess.Popen(arguments, stdout=log, stderr=log)
        for _ in range(START_TURNS):
            try:
                with socket.create_connection(("127.0.0.1", port), timeout=1) as link:
                    link.sendall(probe)
                    text = b""
                    while piece := link.recv(4096):
                        text += piece
                        if b"PONG" in text:
                            return
            except OSError:
                pass
            time.sleep(START_STEP_SECONDS)
        self.close()
        raise BenchmarkError(f"{arguments[0]} did not come up")

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def close(self) -> None:
        """End the process."""
        self._process.terminate()
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(timeout=5)


def free_port() -> int:
    """A port on which no process listens now."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


class Redis(Peer):
    """A redis server; it syncs its log as `fsync` says (`everysec`, `always`)."""

    def __init__(self, folder: Path, fsync: str) -> None:
        path = program("redis-server")
        folder.mkdir()
        port = free_port()
        arguments = [path, *f"--port {port} --bind 127.0.0.1 --appendonly yes".split()]
        arguments += ["--save", "", "--appendfsync", fsync, "--dir", str(folder)]
        arguments += ["--daemonize", "no"]
        super().__init__(arguments, port, folder, command(b"PING"))


class Nats(Peer):
    """A NATS server: core only, which stores nothing; or with JetStream and its files."""

    def __init__(self, folder: Path, *, jetstream: bool = False) -> None:
        path = program("nats-server")
        folder.mkdir()
        port = free_port()
        # No liveness probes between the counted messages.
        conf = 'ping_interval: "1h"\n'
        if jetstream:
            conf += f'jetstream {{ store_dir: "{folder / "store"}" }}\n'
        (folder / "conf").write_text(conf)
        arguments = [path, "-a", "127.0.0.1", "-p", str(port), "-c", str(folder / "conf")]
        super().__init__(arguments, port, folder, NATS_HELLO)


def durable_streams(folder: Path) -> ServerProcess:
    """The official Durable Streams server under Node, with synced streams in files."""
    try:
        found = node.find()
        packages = node.installed(found, Path(__file__).parents[1] / "streams_peer")
    except node.Missing as missing:
        raise NotInstalled(str(missing)) from None
    folder.mkdir()
    port_file = folder / "port"
    script = str(packages / "serve.mjs")
    command = (found.path, script, str(folder / "data"), str(free_port()), str(port_file))
    server = ServerProcess(command, found.environment(), port_file, folder / "log")
    server.wait_port()
    return server
