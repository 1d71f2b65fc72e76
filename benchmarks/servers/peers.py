"""Other servers for comparison: started on a free port, called in their own protocol.

A peer that is not installed raises `NotInstalled` with the command that installs it. The cases put
this command into their result, so that the missing peer is visible. Used by `cases/compared/`,
`cases/watch/` and `cases/queues`.
"""

from __future__ import annotations

import os
import pwd
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.clients import postgres
from benchmarks.clients.loader import BenchmarkError
from benchmarks.servers.cpu_time import cpu_seconds
from benchmarks.servers.process import ServerProcess
from tests.streams import node

NATS_HELLO = b'CONNECT {"verbose":false}\r\nPING\r\n'
# Debian's packages install each version into its own folder, which is not in PATH.
POSTGRES_VERSIONS = Path("/usr/lib/postgresql")
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
    """A process on its own port; `close` ends it.

    The peer is ready when it answers `probe` with bytes that contain `ready`. `account` is the name
    of the user that the process runs as; None: the caller's.
    """

    END = signal.SIGTERM

    def __init__(
        self,
        arguments: Sequence[str],
        port: int,
        folder: Path,
        probe: bytes,
        *,
        ready: bytes = b"PONG",
        account: str | None = None,
    ) -> None:
        self.port = port
        with (folder / "log").open("wb") as log:
            self._process = subprocess.Popen(arguments, stdout=log, stderr=log, **identity(account))
        for _ in range(START_TURNS):
            try:
                with socket.create_connection(("127.0.0.1", port), timeout=1) as link:
                    link.sendall(probe)
                    text = b""
                    while piece := link.recv(4096):
                        text += piece
                        if ready in text:
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

    def cpu_seconds(self) -> float:
        """CPU time so far of the process and its children, user and system."""
        return cpu_seconds(self.pid)

    def close(self) -> None:
        """End the process."""
        self._process.send_signal(self.END)
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(timeout=5)


def identity(account: str | None) -> dict[str, Any]:
    """The arguments of `subprocess` that start a program as this user, without our groups."""
    if account is None:
        return {}
    entry = pwd.getpwnam(account)
    return {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": []}


def free_port() -> int:
    """A port on which no process listens now."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


class Redis(Peer):
    """A redis server. `fsync` sets when it syncs its log (`everysec`, `always`)."""

    def __init__(self, folder: Path, fsync: str) -> None:
        path = program("redis-server")
        folder.mkdir()
        port = free_port()
        arguments = [path, *f"--port {port} --bind 127.0.0.1 --appendonly yes".split()]
        arguments += ["--save", "", "--appendfsync", fsync, "--dir", str(folder)]
        arguments += ["--daemonize", "no"]
        super().__init__(arguments, port, folder, command(b"PING"))


class Nats(Peer):
    """A NATS server: only core NATS, which stores nothing, or with JetStream and its files."""

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


def postgres_program() -> Path:
    """The path of `postgres`; if several versions are installed outside PATH, that of the
    newest.
    """
    found = shutil.which("postgres")
    paths = [Path(found)] if found else list(POSTGRES_VERSIONS.glob("*/bin/postgres"))
    if not paths:
        raise NotInstalled("postgres not found: apt-get install postgresql")

    def version(path: Path) -> list[int]:
        return [int(part) for part in re.findall(r"\d+", path.parts[-3])]

    return max(paths, key=version).resolve()


def unprivileged() -> str | None:
    """The user that PostgreSQL runs as, because it refuses to run as root; None: the caller's."""
    if os.geteuid() != 0:
        return None
    names = {entry.pw_name for entry in pwd.getpwall()}
    for name in ("postgres", "nobody"):
        if name in names:
            return name
    raise BenchmarkError("postgres refuses to run as root, and there is no user to run it as")


class Postgres(Peer):
    """A PostgreSQL server with a fresh cluster; durability is a setting of each connection."""

    END = signal.SIGINT  # ends the server even if clients are connected
    # Checkpoints start by time, not in the middle of each load, and there is room for all
    # connections. By default fsync is on, and the log writer's delay is 200 ms.
    SETTINGS = ("shared_buffers=512MB", "max_wal_size=4GB", "max_connections=200")

    def __init__(self, folder: Path) -> None:
        path = postgres_program()
        account = unprivileged()
        folder.mkdir()
        data = folder / "data"
        data.mkdir(mode=0o700)
        if account is not None:
            # Only this user can list the scratch folder; the other user may only pass through it.
            folder.parent.chmod(0o711)
            shutil.chown(data, account)
        initdb = [str(path.parent / "initdb"), "-D", str(data), "-U", postgres.USER]
        initdb += "-A trust -E UTF8 --no-locale --no-sync".split()
        made = subprocess.run(initdb, capture_output=True, text=True, **identity(account))
        if made.returncode:
            raise BenchmarkError(f"initdb: {made.stderr.strip() or made.stdout.strip()}")
        port = free_port()
        arguments = [str(path), "-D", str(data), "-p", str(port)]
        for setting in ("listen_addresses=127.0.0.1", "unix_socket_directories=", *self.SETTINGS):
            arguments += ["-c", setting]
        super().__init__(
            arguments, port, folder, postgres.startup(), ready=postgres.READY, account=account
        )

    def run(self, sql: str) -> list[list[bytes]]:
        """Run statements over a new session."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=60) as sock:
            return postgres.Session(sock).run(sql)


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
    with server.starting():
        server.wait_port()
    return server


def rust_streams(folder: Path) -> ServerProcess:
    """The Durable Streams server of the crate `durable-streams`, which syncs groups of appends.

    Raises `NotInstalled`: `cargo install durable-streams` builds `durable-streams-server`.
    """
    path = program("durable-streams-server")
    folder.mkdir()
    port = free_port()
    command = (path, "--port", str(port), "--data-dir", str(folder / "data"))
    port_file = folder / "port"
    server = ServerProcess(command, dict(os.environ), port_file, folder / "log")
    with server.starting():
        for _ in range(START_TURNS):
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
            except OSError:
                time.sleep(START_STEP_SECONDS)
            else:
                break
        # The server writes no file with its port.
        port_file.write_text(str(port))
        server.wait_port()
    return server
