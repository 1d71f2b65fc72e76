"""Other ways to run the server: by plain uvicorn, and mounted in another application.

`python -m tests.contract.doors uvicorn|mounted` serves what `topics serve` serves, by the same
variables. `uvicorn` is uvicorn's own protocol over `create_app`. `mounted` mounts it in another
Starlette application below a path with a blank, behind a middleware that sees every message; it
adds the prefix to paths without it, so that the tests need no other paths.
"""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import AsyncIterator, MutableMapping
from pathlib import Path
from typing import Any, Final

import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.routing import Mount

from topics_server.app import create_app, lifespan
from topics_server.runtime import logging
from topics_server.server import bind, write_port_file
from topics_server.settings import SettingsError, load, refusal

DOORS: Final = ("connection", "uvicorn", "mounted")
PREFIX: Final = "/my app"
_RAW_PREFIX: Final = b"/my%20app"


class Watching:
    """A middleware such as hosts use: every message passes through it."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def receiving() -> Any:
            return await receive()

        async def sending(message: Any) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], (b"x-host", b"seen")]}
            await send(message)

        await self._app(scope, receiving, sending)


class Prefixed:
    """Adds the prefix to paths that lack it, and removes it from the `Location` of an answer."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan" or scope["path"].startswith(PREFIX):
            await self._app(scope, receive, send)
            return

        async def sending(message: Any) -> None:
            if message["type"] == "http.response.start":
                headers = [(name, _without(name, value)) for name, value in message["headers"]]
                message = {**message, "headers": headers}
            await send(message)

        path, raw_path = PREFIX + scope["path"], _RAW_PREFIX + scope["raw_path"]
        headers = [(name, _with(name, value)) for name, value in scope["headers"]]
        scope = {**scope, "path": path, "raw_path": raw_path, "headers": headers}
        await self._app(scope, receive, sending)


def _with(name: bytes, value: bytes) -> bytes:
    """A header of a request; the source of a fork is the path of its URL."""
    return _RAW_PREFIX + value if name == b"stream-forked-from" and value[:1] == b"/" else value


def _without(name: bytes, value: bytes) -> bytes:
    """A header of an answer; the location is a URL."""
    return value.replace(_RAW_PREFIX, b"", 1) if name == b"location" else value


def application(door: str, settings: Any) -> Any:
    """The application of a door."""
    events = create_app(settings)
    if door == "uvicorn":
        return events

    @contextlib.asynccontextmanager
    async def living(_host: Starlette) -> AsyncIterator[None]:
        async with lifespan(events):
            yield

    middleware = [Middleware(Watching)]
    return Prefixed(
        Starlette(routes=[Mount(PREFIX, events)], lifespan=living, middleware=middleware)
    )


def main(door: str) -> None:
    """Serve until a signal."""
    try:
        settings = load().settings
    except SettingsError as error:
        sys.exit(str(error))
    if (reason := refusal(settings)) is not None:
        sys.exit(reason)
    logging.set_up(settings)
    listener = bind(settings)
    # uvicorn raises the signal that ended it once more.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    config = uvicorn.Config(
        application(door, settings),
        http="httptools",
        ws="websockets-sansio",
        ws_max_size=settings.max_ws_message_bytes,
        lifespan="on",
        log_config=None,
        server_header=False,
        timeout_graceful_shutdown=10,
    )
    if settings.port_file is not None:
        write_port_file(Path(settings.port_file), listener.getsockname()[1])
    uvicorn.Server(config).run([listener])


if __name__ == "__main__":
    main(sys.argv[1])
