"""The process: listening sockets, the event loop, signals and the exit code.

`run` refuses invalid settings and data with one line and exit code 1, listens while recovery runs
(so that probes report its progress), and on SIGTERM or SIGINT stops accepting, finishes requests in
flight and takes the final snapshot. `app.OpenedStore` is the store; uvicorn serves HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import importlib
import resource
import signal
import socket
import sys
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any, Final, cast

import uvicorn

from topics_server.app import OpenedStore
from topics_server.http.connection import HttpConnection
from topics_server.http.request_head import Bounds
from topics_server.http.timeouts import ConnectionTimeouts, TimeoutSettings
from topics_server.runtime import garbage_collector, logging
from topics_server.runtime.clock import monotonic_ms
from topics_server.runtime.metrics import log
from topics_server.runtime.open_files import connection_files
from topics_server.settings import Settings
from topics_server.values.errors import StartRefused, StorageError
from topics_server.values.limits import SEND_BUFFER_BYTES

# How long a worker thread may hold the interpreter against the loop (5 ms by default).
_SWITCH_INTERVAL_S: Final = 0.0005
_BACKLOG: Final = 2048
# How often the date of the answers is set, seconds.
_DATE_S: Final = 1.0
# The time between the beginning of a stop and the end of idle connections, seconds. In it the
# handlers of WebSockets answer the publishes that are under way, and then close.
_DRAIN_S: Final = 0.1
# How often a WebSocket is pinged, and how long the peer has to answer.
_PING_S: Final = 20
# Modules that are imported once the server is ready (docs/decisions/0260, 0319): for the first
# WebSocket, for scrapes, and for the first SQL of a view.
LATE_MODULES: Final = (
    "topics_server.http.websocket",
    "topics_server.runtime.prometheus",
    "sqlite3",
)


class HttpServer(uvicorn.Server):
    """uvicorn's server without its signal handling: `run` calls `stop`."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._stopping = asyncio.Event()

    def stop(self) -> None:
        """Accept no more connections, finish the requests, and end."""
        self.should_exit = True
        self._stopping.set()

    async def main_loop(self) -> None:
        """Let uvicorn set its date once a second, until `stop` was called.

        Its own loop looks ten times a second: half of what an idle server does.
        """
        await self.on_tick(0)
        while not self._stopping.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_DATE_S):
                    await self._stopping.wait()
            await self.on_tick(0)
        await asyncio.sleep(_DRAIN_S)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to `run`, which drains the store first."""
        yield


def websocket_connection(**options: Any) -> asyncio.Protocol:
    """Make a WebSocket connection: the callable for uvicorn's public parameter `ws=`.

    Only clients that open a WebSocket need its modules, so `import_late` imports them after the
    start.
    """
    from topics_server.http.websocket import WebSocketConnection

    return WebSocketConnection(**options)


def import_late() -> None:
    """*Blocking.* Import modules that the start does not need, so that no first request waits for
    them. The server runs this on a thread when it is ready; other threads get their turns
    meanwhile. A module that cannot be imported now, for lack of file descriptors, is imported at
    its first use.
    """
    for name in LATE_MODULES:
        try:
            importlib.import_module(name)
        except OSError as error:
            log.warning("%s cannot be imported yet: %s", name, error)


def bind(settings: Settings, port: int | None = None) -> socket.socket:
    """A listening socket, on `settings.port` unless another port is given. Raises `OSError`."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Connections inherit the options of their listener.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        listener.bind((settings.host, settings.port if port is None else port))
        listener.listen(_BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def bind_all(settings: Settings) -> list[socket.socket]:
    """The listening sockets; the socket of `settings.port` comes first. Raises `StartRefused`."""
    listeners: list[socket.socket] = []
    for port in (settings.port, settings.streams_port):
        if listeners and not port:
            break
        try:
            listeners.append(bind(settings, port))
        except OSError as error:
            for listener in listeners:
                listener.close()
            where = f"{settings.host} port {port}"
            option = "--streams-port" if listeners else "--port"
            hint = f"; {option} takes another one" if error.errno == errno.EADDRINUSE else ""
            raise StartRefused(f"cannot listen on {where}: {error.strerror}{hint}") from None
    return listeners


def raise_open_files() -> int:
    """Raise the soft limit of open files to the hard one; returns the new limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def timeouts_with(settings: Settings, open_files: int) -> ConnectionTimeouts:
    """The connection timeouts and the cap on connections, which leaves file descriptors to the
    store.
    """
    most = settings.max_connections
    if most is None:
        most = connection_files(open_files)
    return ConnectionTimeouts(
        Bounds(
            url_bytes=settings.max_url_bytes,
            header_count=settings.max_headers,
            header_bytes=settings.max_header_bytes,
        ),
        TimeoutSettings(
            header_s=settings.header_timeout_ms / 1000,
            body_s=settings.body_timeout_ms / 1000,
            keep_alive_s=settings.keep_alive_ms / 1000,
            write_s=settings.write_timeout_ms / 1000,
        ),
        most,
    )


def write_port_file(path: Path, port: int) -> None:
    """Write the bound port, atomically: a reader of the file always gets the whole number."""
    beside = path.with_name(path.name + ".tmp")
    beside.write_text(f"{port}\n")
    beside.replace(path)


def port_file_problem(path: Path) -> str | None:
    """Why the port cannot be written to the file; None if it can."""
    try:
        beside = path.with_name(path.name + ".tmp")
        beside.write_text("")
        beside.unlink()
    except (OSError, ValueError) as error:
        return getattr(error, "strerror", None) or "no name of a file"
    return "a folder" if path.is_dir() else None


def run(settings: Settings) -> int:
    """Serve until a signal; returns the exit code."""
    output = logging.set_up(settings)
    try:
        return _run(settings, output)
    finally:
        output.close()


def _run(settings: Settings, output: logging.LogOutput) -> int:
    if settings.port_file and (problem := port_file_problem(settings.port_file)):
        log.error("cannot start: TOPICS_PORT_FILE=%s: %s", settings.port_file, problem)
        return 1
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    open_files = raise_open_files()
    try:
        store = OpenedStore.open(settings, open_files)
    except StorageError as error:
        log.error("cannot start: %s", error)
        return 1
    try:
        listeners = bind_all(settings)
    except StartRefused as error:
        log.error("%s", error)
        store.abandon()
        return 1
    state = store.state
    app = store.application()
    if (access := logging.access_log(settings, output)) is not None:
        app.door.observer.access = access.note
    state.log_lines_dropped = lambda: output.dropped
    state.timeouts = timeouts_with(settings, open_files)
    config = uvicorn.Config(
        app,
        loop="uvloop",
        http=HttpConnection,
        ws=cast(Any, websocket_connection),
        ws_max_size=settings.max_ws_message_bytes,
        ws_ping_interval=_PING_S,
        ws_ping_timeout=_PING_S,
        # Many sockets get the same frames; compression would compress each copy.
        ws_per_message_deflate=False,
        lifespan="off",
        access_log=False,
        log_config=None,
        date_header=True,
        server_header=False,
        proxy_headers=False,
        backlog=_BACKLOG,
        timeout_graceful_shutdown=max(1, settings.shutdown_grace_ms // 1000),
    )
    new_loop = config.get_loop_factory()
    assert new_loop is not None, "uvicorn has one for uvloop"
    return run_once(new_loop(), _serve(settings, store, HttpServer(config), listeners))


def run_once(loop: asyncio.AbstractEventLoop, main: Coroutine[Any, Any, int]) -> int:
    """Run `main` and shut its event loop down within one run of the loop.

    `asyncio.Runner` starts the loop again for the shutdown. Each start of uvloop opens a pair of
    sockets: without free file descriptors the process would end with an error after a clean stop.
    """

    async def whole() -> int:
        try:
            return await main
        finally:
            await _end_tasks()
            await loop.shutdown_asyncgens()
            await loop.shutdown_default_executor()

    try:
        return loop.run_until_complete(whole())
    finally:
        loop.close()


async def _end_tasks() -> None:
    """Cancel every other task, wait for all to end, and report the failed ones."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    for result in results:
        if isinstance(result, Exception):
            log.error("a task failed at the end", exc_info=result)


async def _serve(
    settings: Settings, store: OpenedStore, server: HttpServer, listeners: list[socket.socket]
) -> int:
    loop, state = asyncio.get_running_loop(), store.state

    def stop() -> None:
        if state.phase == "ready":
            log.info("stopping: no new connections, finishing what is in flight")
        store.begin_drain()
        server.stop()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    reloading: set[asyncio.Task[None]] = set()

    def reload() -> None:
        task = loop.create_task(store.reload_keys())
        reloading.add(task)
        task.add_done_callback(reloading.discard)

    loop.add_signal_handler(signal.SIGHUP, reload)
    host, port = listeners[0].getsockname()[:2]
    began_ms = monotonic_ms()
    serving = asyncio.create_task(server.serve(sockets=listeners))
    looking = asyncio.create_task(state.timeouts.run(server.server_state.connections))
    if settings.port_file is not None:
        write_port_file(settings.port_file, port)
    failure = await _start(store, serving)
    if failure is not None:
        log.error("cannot start: %s", failure)
        stop()
    elif state.phase == "ready":
        store.on_snapshot(garbage_collector.freeze)
        state.throttle.on_change.append(garbage_collector.Collections(loop).on_pressure)
        took_ms = monotonic_ms() - began_ms
        shown = f"[{host}]" if ":" in host else host
        log.info("ready on http://%s:%d after %.0f ms: %s", shown, port, took_ms, store.report)
        importing = asyncio.create_task(asyncio.to_thread(import_late))
        importing.add_done_callback(logging.log_defect)
        if not state.keys.is_on:
            log.warning(
                "NO KEYS: every client that reaches this server may do everything (TOPICS_API_KEYS)"
            )
    await serving
    looking.cancel()
    await store.close()
    if failure is None:
        log.info("stopped")
    return 0 if failure is None else 1


async def _start(store: OpenedStore, serving: asyncio.Task[None]) -> str | None:
    """Recover while the socket answers probes. Returns the reason if the store cannot be served.

    A signal during recovery ends `serving` and cancels recovery, which loses nothing.
    """
    garbage_collector.rest()
    starting = asyncio.create_task(store.start())
    await asyncio.wait((starting, serving), return_when=asyncio.FIRST_COMPLETED)
    if not starting.done():
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        return None
    try:
        return starting.result()
    finally:
        garbage_collector.begin()
