"""Responses leave in one piece: a head waits for the body that is sent right behind it.

uvicorn writes head and body apart, and the event loop hands each to the kernel at once: two system
calls, two packets, and a client that wakes up for half an answer. `JoinedHttp` is uvicorn's own
protocol with a transport in between that holds a head until the next write, or until the end of the
loop's turn if none comes (a stream that has nothing to say yet). Used by `server`.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_HEAD: Final = b"HTTP/1.1 "
# Up to this, putting two pieces together is cheaper than telling the kernel of both.
_COPIED_BYTES_MAX: Final = 16_384


class JoinedWrites:
    """The transport of one connection, but for `write`, `close` and `abort`."""

    __slots__ = ("_held", "_loop", "_transport")

    def __init__(self, transport: Any, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._held: bytes | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        """Send `data`, behind a head that was held back, or hold it back if it is a head."""
        held = self._held
        if held is not None:
            self._held = None
            if len(data) <= _COPIED_BYTES_MAX:
                self._transport.write(held + data)
            else:
                self._transport.writelines((held, data))
        elif data[:9] == _HEAD:
            self._held = data
            self._loop.call_soon(self._flush)
        else:
            self._transport.write(data)

    def _flush(self) -> None:
        held = self._held
        if held is not None:
            self._held = None
            self._transport.write(held)

    def close(self) -> None:
        """Send what is held back, then close."""
        self._flush()
        self._transport.close()

    def abort(self) -> None:
        """Close at once; what is held back is dropped."""
        self._held = None
        self._transport.abort()


class JoinedHttp(HttpToolsProtocol):
    """uvicorn's protocol over `JoinedWrites`."""

    def connection_made(self, transport: Any) -> None:
        """See `asyncio.Protocol`."""
        super().connection_made(JoinedWrites(transport, self.loop))  # type: ignore[arg-type]
