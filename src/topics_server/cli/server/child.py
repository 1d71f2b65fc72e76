"""A server as a child process, over one folder, until a block ends.

The child does not inherit this environment's settings, which belong to another server. Used by
`demo`, `torture`, `backups drill` and by the fixtures of `topics_server.testing`.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from topics_server.cli.connection import CallRefused, Failure, ServerConnection, ServerUnreachable
from topics_server.runtime.clock import monotonic_ms
from topics_server.settings import Settings, variable

START_WITHIN_MS: Final = 60_000
STOP_WITHIN_S: Final = 30.0


def spawned_server(folder: Path, port: int, options: Sequence[str] = ()) -> subprocess.Popen[bytes]:
    """The process of a starting server on 127.0.0.1; `options` are further options of `serve`."""
    port_file = folder / "port"
    port_file.unlink(missing_ok=True)
    words = ["serve", "--host", "127.0.0.1", "--port", str(port), *options]
    words += ["--data-dir", str(folder / "data"), "--port-file", str(port_file)]
    without = [word for name in Settings.model_fields for word in ("-u", variable(name))]
    with (folder / "server.log").open("wb") as output:
        return subprocess.Popen(
            ["env", *without, sys.executable, "-m", "topics_server", *words],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            # Only the parent handles Ctrl-C: it finishes its own work, then stops the server.
            start_new_session=True,
        )


@contextlib.contextmanager
def child_server(
    folder: Path,
    port: int,
    stop: threading.Event,
    options: Sequence[str] = (),
    *,
    start_within_ms: int = START_WITHIN_MS,
) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """A server on 127.0.0.1 and its URL.

    The server is ready unless `stop` was set, and is stopped at the end of the block. Port 0 means
    any free port. Raises `Failure` with the end of the log if the server does not start.
    """
    process = spawned_server(folder, port, options)
    try:
        yield process, _url_of(process, folder, stop, start_within_ms)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_WITHIN_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _url_of(
    process: subprocess.Popen[bytes], folder: Path, stop: threading.Event, start_within_ms: int
) -> str:
    """The URL of the server once it is ready."""
    port_file, log = folder / "port", folder / "server.log"
    deadline_ms = monotonic_ms() + start_within_ms
    url = ""
    while not stop.wait(0.05):
        if process.poll() is not None or monotonic_ms() > deadline_ms:
            log_end = log.read_text(errors="replace")[-2000:].strip()
            raise Failure(f"the server did not start:\n{log_end}")
        if not url and port_file.exists():
            url = f"http://127.0.0.1:{port_file.read_text().strip()}"
        if url:
            client = ServerConnection(url)
            try:
                client.call("GET", "/v0/ready")
                break
            except (CallRefused, ServerUnreachable):
                continue  # it still starts
            finally:
                client.close()
    return url
