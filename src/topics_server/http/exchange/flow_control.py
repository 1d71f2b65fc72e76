"""Controls when a connection reads, and tracks whether its write buffer has room.

A connection reads except while the application has not taken the received bytes, while it waits for
its turn among large uploads, or while received bytes wait to be parsed. Used by `http/connection`;
`http/sockets` writes directly to a connection's transport until `let_go` is called.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import Any

from topics_server.runtime.metrics import log


def read_past(transport: Any, count: int, receive: Callable[[bytes], None]) -> bool | None:
    """Read up to `count` bytes from the socket of a paused transport, and pass them to `receive`.

    Returns whether bytes had arrived. None: the client sends no more or is gone, which the
    transport finds out when it reads.
    """
    sock = transport.get_extra_info("socket")
    if sock is None:
        return None
    try:
        share = os.read(sock.fileno(), count)
    except BlockingIOError:
        return False
    except OSError:
        return None
    if not share:
        return None
    try:
        receive(share)
    except Exception:
        log.exception("defect while reading a request")
        transport.abort()
    return True


class Flow:
    """The flow control of one connection.

    `let_go` is called once, when the buffer is full or the connection is lost: a stream that writes
    directly to the transport must stop.
    """

    __slots__ = (
        "_is_writable",
        "_transport",
        "is_behind",
        "is_stalled",
        "let_go",
        "read_paused",
        "turns",
        "waits_turn",
        "write_paused",
    )

    def __init__(self, transport: Any) -> None:
        self._transport = transport
        self._is_writable: asyncio.Event | None = None
        self.let_go: Callable[[], None] | None = None
        self.write_paused = False
        # Whether reading is paused because the application has not taken the received bytes.
        self.read_paused = False
        # Whether the connection waits for its turn among large uploads (`http/upload_turns`).
        self.waits_turn = False
        # Whether the last read of a share found no bytes.
        self.is_stalled = False
        # The number of ended turns plus the number of read shares.
        self.turns = 0
        # Whether reading is paused until the received bytes are parsed.
        self.is_behind = False

    async def drain(self) -> None:
        """Return when the buffer has room, or when the connection is lost."""
        while self.write_paused:
            if self._is_writable is None:
                self._is_writable = asyncio.Event()
            await self._is_writable.wait()

    def pause_reading(self) -> None:
        """Stop reading until the application takes the received bytes."""
        if not self.read_paused:
            self.read_paused = True
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        """Resume reading, unless the connection waits for its turn or is behind."""
        if self.read_paused:
            self.read_paused = False
            self._resume()

    def fall_behind(self) -> None:
        """Stop reading until `catch_up` is called."""
        self.is_behind = True
        self._transport.pause_reading()

    def catch_up(self) -> None:
        """Resume reading, unless reading is paused for another reason."""
        self.is_behind = False
        self._resume()

    @property
    def is_closing(self) -> bool:
        """Whether the connection is ending."""
        closing: bool = self._transport.is_closing()
        return closing

    @property
    def is_kept_waiting(self) -> bool:
        """Whether the connection waits for its turn while unread bytes may be in the socket."""
        return self.waits_turn and not self.is_stalled

    def end_turn(self) -> None:
        """Stop reading until `begin_turn`, except for shares."""
        self.turns += 1
        self.waits_turn = True
        self._transport.pause_reading()

    def begin_turn(self) -> None:
        """Resume reading, unless reading is paused for another reason."""
        self.waits_turn = self.is_stalled = False
        self._resume()

    def read_share(self, count: int, receive: Callable[[bytes], None]) -> bool | None:
        """See `read_past`. Reads nothing if reading is paused for another reason than the turn."""
        if self.read_paused or self.is_behind:
            return False
        found = read_past(self._transport, count, receive)
        self.turns += 1
        self.is_stalled = found is False
        return found

    def _resume(self) -> None:
        if not (self.read_paused or self.waits_turn or self.is_behind):
            self._transport.resume_reading()

    def pause_writing(self) -> None:
        """The buffer is full."""
        self.write_paused = True
        self._let_go()

    def resume_writing(self) -> None:
        """The buffer has room again, or the connection is lost."""
        self.write_paused = False
        if self._is_writable is not None:
            self._is_writable.set()
            self._is_writable = None
        self._let_go()

    def _let_go(self) -> None:
        callback, self.let_go = self.let_go, None
        if callback is not None:
            callback()
