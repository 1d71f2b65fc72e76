"""The store as an ASGI application, for a server or an application of your own.

    app = create_app()                             # uvicorn --factory topics_server.app:create_app
    host.mount("/events", create_app(Settings()))  # in a Starlette or FastAPI application

The store is opened when the application's lifespan begins and closed when it ends. A server runs
the lifespan of the application it is given, and of no mounted one: a host runs `lifespan(events)`
within its own. Recovery is a task behind the lifespan's start, so that probes tell its progress. A
host that needs the store in its own start awaits `ready(events)`. A signal that stops the server
ends the streams first: a server waits for open responses before it
ends the lifespan, and a stream has no end of its own. `topics serve` (`server.py`) runs the same
application on a connection of its own, which is faster and bounds slow clients; both hold an
`OpenedStore`.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import signal
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Final, Self

from starlette.applications import Starlette

from topics_server.api.application import Application, build_app
from topics_server.api.context import ServerState
from topics_server.api.front_door import FrontDoor
from topics_server.api.routes import build_routes
from topics_server.node.boot import Boot
from topics_server.node.ground import Ground
from topics_server.node.node import Node
from topics_server.settings import Settings, load

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


class OpenedStore:
    """The store of one process, from its opening to its end; `state` is what an application serves.

    `lifespan` holds one for another server's process, and `server.run` one for its own.
    """

    def __init__(self, boot: Boot) -> None:
        self.state = boot.state
        self._boot = boot

    @classmethod
    def open(cls, settings: Settings, open_files: int) -> Self:
        """*Blocking.* Lock the data directory. Raises `StartRefused`."""
        boot = Boot(Ground.open(settings, open_files))
        boot.state.uploads.max_bytes = settings.max_receiving_bytes
        return cls(boot)

    def application(self) -> Application:
        """An application that serves this store, and does not close it."""
        return build_app(self.state)

    async def start(self) -> str | None:
        """Recover, and take requests; returns why the store cannot be served, if it cannot."""
        return await self._boot.try_start()

    @property
    def report(self) -> str:
        """The findings of recovery, in one line; the store is ready."""
        return self._node.report

    def on_snapshot(self, taken: Callable[[], None]) -> None:
        """Have `taken` called after each snapshot; the store is ready."""
        self._node.checkpointer.on_taken.append(taken)

    async def reload_keys(self) -> None:
        """Read the key file again."""
        await self._boot.ground.reload_keys()

    def begin_drain(self) -> None:
        """Take no new requests; end every stream; answer every request that waits."""
        self._boot.begin_drain()

    async def close(self) -> None:
        """Take the final snapshot, if the store was ready, and release the data directory."""
        await self._boot.close()

    def abandon(self) -> None:
        """Release the data directory without having started."""
        self._boot.abandon()

    @property
    def _node(self) -> Node:
        assert self._boot.node is not None, "the start succeeded"
        return self._boot.node


@asynccontextmanager
async def lifespan(app: Starlette) -> AsyncIterator[None]:
    """Open the store of an application that `create_app` made; close it at the end.

    Raises `StartRefused` where the data directory cannot be opened. What recovery finds wrong is
    logged, and answers say that the store cannot be served.
    """
    assert isinstance(app, Application), "create_app made it"
    settings: Any = app.door.state.settings
    open_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    store = await asyncio.to_thread(OpenedStore.open, settings, open_files)
    app.door.open_for(store.state)
    starting = asyncio.create_task(_start(store))
    loop = asyncio.get_running_loop()
    try:
        with _on_stop(lambda: loop.call_soon_threadsafe(store.begin_drain)):
            yield
    finally:
        store.begin_drain()
        await _streams_ended(store.state, settings.shutdown_grace_ms / 1000)
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        await store.close()


async def ready(app: Starlette) -> None:
    """Return once the store takes requests; `lifespan` must have begun.

    Raises `StartRefused` where it never will.
    """
    assert isinstance(app, Application), "create_app made it"
    await app.door.state.until_ready()


async def _start(store: OpenedStore) -> None:
    failure = await store.start()
    if failure is None:
        log.info("ready: %s", store.report)
    else:
        log.error("cannot start: %s", failure)
        if store.state.phase == "replaying":
            store.state.enter("failed")


async def _streams_ended(state: ServerState, within_s: float) -> None:
    """Return when no stream is open, or after so long."""
    for _ in range(int(within_s / _LOOK_S)):
        if not state.connections:
            return
        await asyncio.sleep(_LOOK_S)


@contextmanager
def _on_stop(callback: Callable[[], object]) -> Iterator[None]:
    """Call `callback` on the signals that stop a server, before the server's own handlers.

    Does nothing outside the main thread, or where no such handlers are set.
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
