"""The store as an ASGI application, for a server or an application of your own.

    app = create_app()                             # uvicorn --factory topics_server.app:create_app
    host.mount("/events", create_app(Settings()))  # in a Starlette or FastAPI application

The store is opened when the application's lifespan begins and closed when it ends. An ASGI server
runs only the lifespan of its own application, not that of a mounted one. So a host application runs
`lifespan(events)` within its own lifespan. Recovery is a task that continues after the lifespan's
start, so that probes report its progress. A host that needs the store during its own start awaits
`ready(events)`. A signal that stops the server first ends the streams: the server waits for open
responses before it ends the lifespan, and a stream does not end by itself. `topics serve`
(`server.py`) runs the same application with its own class for connections, which is faster and
limits slow clients. Both use an `OpenedStore`.
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
    """Make the application; without `settings`, use those of the environment.

    This opens no file. Every route answers 503 `not_ready` until `lifespan` has begun.
    Raises `SettingsError`.
    """
    settings = settings or load().settings
    state = ServerState(settings=settings, progress=lambda: 0.0, phase="closed")
    door = FrontDoor(state, build_routes(settings.streams_path))
    return Application(door, lifespan)


class OpenedStore:
    """The store of one process, from its opening to its end. Applications serve its `state`.

    `lifespan` makes one under another ASGI server, and `server.run` makes one for `topics serve`.
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
        """An application that serves this store but does not close it."""
        return build_app(self.state)

    async def start(self) -> str | None:
        """Recover, and take requests. Returns the reason if the store cannot be served."""
        return await self._boot.try_start()

    @property
    def report(self) -> str:
        """The findings of recovery, in one line. The store must be ready."""
        return self._node.report

    def on_snapshot(self, taken: Callable[[], None]) -> None:
        """Call `taken` after each snapshot from now on. The store must be ready."""
        self._node.checkpointer.on_taken.append(taken)

    async def reload_keys(self) -> None:
        """Read the key file again."""
        await self._boot.ground.reload_keys()

    def begin_drain(self) -> None:
        """Take no new requests, end every stream, and answer every waiting request."""
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

    Raises `StartRefused` if the data directory cannot be opened. If recovery fails, the reason is
    logged, and answers report that the store cannot be served.
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
    """Return once the store takes requests. `lifespan` must have begun.

    Raises `StartRefused` if the store cannot be served.
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
    """Return when no stream is open, or after the time limit."""
    for _ in range(int(within_s / _LOOK_S)):
        if not state.connections:
            return
        await asyncio.sleep(_LOOK_S)


@contextmanager
def _on_stop(callback: Callable[[], object]) -> Iterator[None]:
    """Call `callback` on the signals that stop a server, before the server's own handlers.

    Does nothing outside the main thread, or if no such handlers are set.
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
