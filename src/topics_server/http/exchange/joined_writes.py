"""A transport that sends head and body in one piece.

A head that is written alone costs a system call and a packet, and wakes the client for half an
answer. `JoinedWrites` holds a head until the next write, or until the end of the loop turn if no
write follows (a stream without events yet). While other connections are answered too, an answer is
sent after all other work of this turn (`write_soon`, `is_put_off`): clients that wake up one by one
in between would take the processor, and send their next requests one by one. Used by
`http/connection`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Final

_HEAD: Final = b"HTTP/1.1 "
# Up to this size, joining two pieces is cheaper than passing both to the kernel.
COPIED_BYTES_MAX: Final = 16_384


class JoinedWrites:
    """The transport of one connection, with its own `write`, `close` and `abort`."""

    __slots__ = (
        "_held",
        "_loop",
        "_past",
        "_transport",
        "answer_bytes",
        "is_closing",
        "is_put_off",
    )

    def __init__(self, transport: Any, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        # Bytes of a large answer that is being sent. It stays in memory until its last byte is
        # sent.
        self.answer_bytes = 0
        # Whether the next small answer is sent after all other work of its loop turn.
        self.is_put_off = False
        self._loop = loop
        self._held: bytes | None = None
        self._past = transport.write
        self.is_closing: Callable[[], bool] = transport.is_closing

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def get_write_buffer_size(self) -> int:
        """Bytes handed over that the kernel has not taken."""
        size: int = self._transport.get_write_buffer_size()
        return size

    def write(self, data: bytes) -> None:
        """Send `data` after a held head; hold `data` back if it is a head."""
        held = self._held
        if held is not None:
            self._held = None
            self.write_joined(held, data)
        elif data[:9] == _HEAD:
            self._held = data
            self._loop.call_soon(self.flush)
        else:
            self._transport.write(data)

    def past(self) -> Any:
        """The transport's `write`, for bytes that are no head; None while a head is held back."""
        return self._past if self._held is None else None

    def write_soon(self, head: bytes, body: bytes) -> None:
        """Send two pieces as one, after all other work of this loop turn."""
        self.flush()
        self._held = head + body
        self._loop.call_soon(self.flush)

    def write_joined(self, head: bytes, body: bytes) -> None:
        """Send two pieces as one, after a held head."""
        self.write_pieces(head, (body,), len(body))

    def write_pieces(self, head: bytes, pieces: Sequence[bytes | memoryview], size: int) -> None:
        """Send a head and a body in pieces, of `size` bytes together, as one."""
        if self._held is not None:
            self.flush()
        is_put_off, self.is_put_off = self.is_put_off, False
        if size <= COPIED_BYTES_MAX:
            data = b"".join((head, *pieces))
            if is_put_off:
                self._held = data
                self._loop.call_soon(self.flush)
            else:
                self._transport.write(data)
        else:
            self.answer_bytes = size
            self._transport.writelines((head, *pieces))
            self.answer_bytes = 0

    def flush(self) -> None:
        """Send what is held back."""
        held = self._held
        if held is not None:
            self._held = None
            if not self._transport.is_closing():
                self._transport.write(held)

    def finish(self) -> None:
        """Send a held head, then end the sending side."""
        self.flush()
        self._transport.write_eof()

    def close(self) -> None:
        """Send a held head, then close."""
        self.flush()
        self._transport.close()

    def abort(self) -> None:
        """Close at once, and drop a held head."""
        self._held = None
        self._transport.abort()
