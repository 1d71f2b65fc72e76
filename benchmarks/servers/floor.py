"""The floor: a bare ASGI application that reads a request and sends a fixed answer.

It runs in its own process, under uvicorn with the flags of `topics_server/server.py`. It gets the
same request bytes as our server, and sends the response bytes (status, headers, body) that our
server once sent. It does no other work: `ours / floor` shows the current cost of the server's work
on this machine.

A storing floor also does the least that any store of JSON does with a body, so that the speed of
the machine's memory and files counts for both sides.

Started by `start_floor`; run as `python -m benchmarks.servers.floor ANSWER PORT_FILE [STORE_FILE]`.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from collections import deque
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any

import orjson
import uvicorn

from benchmarks.servers.process import Reply, ServerProcess

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Message, Receive, Send], Awaitable[None]]
Store = Callable[[bytes], None]

KEPT_BYTES = 512 << 20
FILE_BYTES = 2 * KEPT_BYTES


def store_in(path: Path) -> Store:
    """The least work of a store: parse the JSON, write it to a new file, keep it in memory.

    Writes each body twice, as a server does that fills the room in its journal before it writes
    there. Keeps the last 512 MiB in memory and the last GiB in the file.
    """
    file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    kept: deque[bytes] = deque()
    kept_bytes = offset = 0

    def store(body: bytes) -> None:
        nonlocal kept_bytes, offset
        orjson.loads(body)
        for _ in range(2):
            offset += os.pwrite(file, body, offset % FILE_BYTES)
        kept.append(body)
        kept_bytes += len(body)
        while kept_bytes > KEPT_BYTES:
            kept_bytes -= len(kept.popleft())

    return store


def bare_application(
    status: int, headers: list[tuple[bytes, bytes]], body: bytes, store: Store | None = None
) -> Application:
    """Reads whole request bodies, stores each one if `store` is given, and always sends the same
    answer.
    """
    start = {"type": "http.response.start", "status": status, "headers": headers}
    rest = {"type": "http.response.body", "body": body}

    async def application(scope: Message, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http"
        chunks = []
        while True:
            message = await receive()
            chunks.append(message.get("body", b""))
            if not message.get("more_body"):
                break
        whole = b"".join(chunks)  # the body in one piece, as a handler needs it
        if store is not None and whole:
            store(whole)
        await send(start)
        await send(rest)

    return application


def start_floor(folder: Path, name: str, reply: Reply, *, stores: bool = False) -> ServerProcess:
    """Start a floor that answers with the bytes of `reply`, and wait until it is ready.

    `stores`: it also stores each body.
    """
    answer = folder / f"floor-{name}.answer"
    about = {"status": reply.status, "headers": reply.headers}
    answer.write_bytes(json.dumps(about).encode() + b"\n" + reply.body)
    port_file = folder / f"floor-{name}.port"
    command = [sys.executable, "-m", "benchmarks.servers.floor", str(answer), str(port_file)]
    if stores:
        command.append(str(folder / f"floor-{name}.bodies"))
    log = folder / f"floor-{name}.log"
    floor = ServerProcess(command, dict(os.environ), port_file, log)
    with floor.starting():
        floor.wait_ready("/")
    return floor


def main(answer: str, port_file: str, store_file: str | None = None) -> None:
    """Serve the answer until SIGTERM; with `store_file`, store each body."""
    store = None if store_file is None else store_in(Path(store_file))
    first, _, body = Path(answer).read_bytes().partition(b"\n")
    about = json.loads(first)
    headers = [(k.lower().encode(), v.encode()) for k, v in about["headers"]]
    listener = socket.create_server(("127.0.0.1", 0), backlog=2048)
    config = uvicorn.Config(
        bare_application(int(about["status"]), headers, body, store),
        loop="uvloop",
        http="httptools",
        ws="none",
        lifespan="off",
        access_log=False,
        log_config=None,
        date_header=False,
        server_header=False,
        proxy_headers=False,
        backlog=2048,
        timeout_keep_alive=75,
    )
    Path(port_file).write_text(str(listener.getsockname()[1]))
    uvicorn.Server(config).run(sockets=[listener])


if __name__ == "__main__":
    main(*sys.argv[1:])
