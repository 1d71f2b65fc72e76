"""Reads connections with large uploads in turns, a few at a time.

The loop delivers the input of all sockets before anything else runs, up to 256 KiB each. While
hundreds of clients send large bodies, every other client would wait for all of them. So a
connection with a large upload stops reading and joins a line; `READING_MAX` connections of the
lines read at a time. One that brings `LARGE_BYTES` at once goes back to the end of its line; so
does one that was read for `READING_MS` while others wait, so that stalled uploads hold none up.
Each key has its own line, and lines are served in turn, so that the uploads of one key do not keep
others waiting. In `api/context`; called by `http/exchange/body_uploads` and `http/websocket`. Loop
thread only.

Invariant: a reader is in one line and does not read, or in `_reading` and reads, or in neither. No
line is empty.
"""

from __future__ import annotations

import asyncio
from typing import Final, Protocol

from topics_server.values.limits import KIB

# Input that arrives at once, or is announced, from which a connection is read in turns.
LARGE_BYTES: Final = 64 * KIB
# Connections of the lines that read at a time.
READING_MAX: Final = 2
# How long one of them reads while others wait, ms.
READING_MS: Final = 3.0


class UploadReader(Protocol):
    """A connection; `upload_key` is the key of its upload, as far as it is known."""

    @property
    def upload_key(self) -> object:
        """The key of its upload; None without a key."""
        ...

    def begin_turn(self) -> None:
        """Read again, if the connection is still there."""
        ...

    def end_turn(self) -> None:
        """Stop reading until the next turn."""
        ...


class UploadTurns:
    """Connections in line, in order of arrival, and those that read."""

    def __init__(self) -> None:
        # By key; the key whose line was served the longest ago is the first.
        self._lines: dict[object, dict[UploadReader, None]] = {}
        self._key_of: dict[UploadReader, object] = {}
        self._reading: dict[UploadReader, None] = {}
        self._filling: asyncio.Handle | None = None
        self._rotating: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        """How many stand in line."""
        return len(self._key_of)

    def wait(self, reader: UploadReader) -> None:
        """Stop a reader and put it at the end of its key's line."""
        self._reading.pop(reader, None)
        if reader not in self._key_of:
            self._append(reader)
        self._fill_soon()

    def leave(self, reader: UploadReader) -> None:
        """A reader has finished its upload, or is gone: it reads freely."""
        if reader in self._key_of:
            self._remove(reader)
            reader.begin_turn()
        elif reader in self._reading:
            del self._reading[reader]
            self._fill_soon()

    def _append(self, reader: UploadReader) -> None:
        key = reader.upload_key
        self._key_of[reader] = key
        self._lines.setdefault(key, {})[reader] = None
        reader.end_turn()

    def _remove(self, reader: UploadReader) -> None:
        key = self._key_of.pop(reader)
        line = self._lines[key]
        del line[reader]
        if not line:
            del self._lines[key]

    def _pop(self) -> UploadReader:
        """The first reader of the line that was served the longest ago."""
        key, line = next(iter(self._lines.items()))
        reader = next(iter(line))
        self._remove(reader)
        if line:
            del self._lines[key]
            self._lines[key] = line
        return reader

    def _fill_soon(self) -> None:
        if self._filling is None and self._lines:
            self._filling = asyncio.get_running_loop().call_soon(self._fill)

    def _fill(self) -> None:
        """Let the first of the lines read, in place of those that have had their turn."""
        self._filling = None
        while self._lines and len(self._reading) < READING_MAX:
            reader = self._pop()
            self._reading[reader] = None
            reader.begin_turn()
        if self._lines and self._rotating is None:
            loop = asyncio.get_running_loop()
            self._rotating = loop.call_later(READING_MS / 1000, self._rotate)

    def _rotate(self) -> None:
        """Move readers to the end of their lines, if others wait."""
        self._rotating = None
        if self._lines:
            for reader in tuple(self._reading):
                del self._reading[reader]
                self._append(reader)
            self._fill()
