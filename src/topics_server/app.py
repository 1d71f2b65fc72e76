"""The store as an ASGI application, for a server or an application of your own.

    app = create_app()                             # uvicorn --factory topics_server.app:create_app
    host.mount("/events", create_app(Settings()))  # in a Starlette or FastAPI application

The store is opened when the application's lifespan begins and closed when it ends. A server runs
the lifespan of the application it is given, and of no mounted one: a host runs `lifespan(events)`
within its own. Recovery is a task behind the lifespan's start, so that probes tell its progress. A
host that needs the store in its own start awaits `ready(events)`. A signal that stops the server
ends the streams first: a server waits for open responses before it
ends the lifespan, and a stream has no end of its own. `topics serve` (`server.py`) runs the same
application on a connection of its own, which is faster and bounds slow clients.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import signal
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Final

from starlette.applications import Starlette

from topics_server.api.application import Application
from topics_server.api.context import ServerState
from topics_server.api.front_door import FrontDoor
from topics_server.api.routes import build_routes
from topics_server.node.boot import Boot
from topics_server.node.ground import Ground
from topics_server.settings import Settings, load
from topics_server.values.errors import StartRefused, StorageError

log: Final = logging.getLogger(__name__)

_LOOK_S: Final = 0.02


def create_app(settings: Settings | None = None) -> Starlette:
    """Make the application; without `settings` the environment's count.

    Nothing is opened yet, and every route answers 503 `not_ready` until `lifespan` has begun.
    Raises `SettingsError`.
    """
    settings = settings or load().settings
    state = ServerState(settings=settings, progress=lambda: 0.0, phase="closed")
    door = FrontDoor(state, build_routes(settings.streams_path))
    return Application(door, lifespan)


@asynccontextmanager
async def lifespan(app: Starlette) -> AsyncIterator[None]:
    """Open the store of an application that `create_app` made; close it at the end.

    Raises `StartRefused` where the data directory cannot be opened. What recovery finds wrong is
    logged, and answers say that the store cannot be served.
    """
    assert isinstance(app, Application), "create_app made it"
    settings: Any = app.door.state.settings
    open_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    boot = Boot(await asyncio.to_thread(Ground.open, settings, open_files))
    boot.state.uploads.max_bytes = settings.max_receiving_bytes
    app.door.open_for(boot.state)
    starting = asyncio.create_task(_start(boot))
    loop = asyncio.get_running_loop()
    try:
        with _on_stop(lambda: loop.call_soon_threadsafe(boot.begin_drain)):
            yield
    finally:
        boot.begin_drain()
        await _streams_ended(boot.state, settings.shutdown_grace_ms / 1000)
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        await boot.close()


async def ready(app: Starlette) -> None:
    """Return once the store takes requests; `lifespan` must have begun.

    Raises `StartRefused` where it never will.
    """
    assert isinstance(app, Application), "create_app made it"
    state = app.door.state
    while state.phase == "replaying":
        await state.next_phase()
    if state.phase != "ready":
        raise StartRefused(f"the store is {state.phase}")


async def _start(boot: Boot) -> None:
    try:
        node = await boot.start()
    except StorageError as error:
        log.error("cannot start: %s", error)
        if boot.state.phase == "replaying":
            boot.state.enter("failed")
    else:
        log.info("ready: %s", node.report)


async def _streams_ended(state: ServerState, within_s: float) -> None:
    """Return when no stream is open, or after so long."""
    for _ in range(int(within_s / _LOOK_S)):
        if not state.connections:
            return
        await asyncio.sleep(_LOOK_S)


@contextmanager
def _on_stop(callback: Callable[[], object]) -> Iterator[None]:
    """Call `callback` on the signals that stop a server, before the server's own handlers.

    Only where there are such handlers, and in the main thread, which alone can have any.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before: dict[signal.Signals, Any] = {}

    def handle(number: int, frame: Any) -> None:
        callback()
        before[signal.Signals(number)](number, frame)

    for number in (signal.SIGTERM, signal.SIGINT):
        found = signal.getsignal(number)
        if callable(found) and found is not signal.default_int_handler:
            before[number] = found
            signal.signal(number, handle)
    try:
        yield
    finally:
        for number, found in before.items():
            if signal.getsignal(number) is handle:
                signal.signal(number, found)
