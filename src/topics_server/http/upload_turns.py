"""Reads connections with large uploads in turns, a few at a time.

The loop delivers the input of all sockets before anything else runs, up to 256 KiB each. While
hundreds of clients send large bodies, every other client would wait for all of them. So a
connection with a large upload stops reading and joins a line; `READING_MAX` connections of the
lines read at a time. One that brings `LARGE_BYTES` at once goes back to the end of its line; so
does one that was read for `READING_MS` while others wait, so that stalled uploads hold none up.
Each key has its own line, and lines are served in turn, so that the uploads of one key do not keep
others waiting.

While the budget is short, reading a greedy key fast only refuses more of its uploads
(`http/upload_budget`). Then its connections do not read by themselves: one of them at a time is
read for a share of `SHARE_BYTES`, with a rest of `REST_S` behind it, which leaves most of the loop
to all other clients. Those that have sent nothing are passed, `ASKED_MAX` at a time, and cost a
system call each. In `api/context`; called by `http/exchange/body_uploads` and `http/websocket`.
Loop thread only.

Invariant: a reader is in one line and does not read, or in `_reading` and reads, or is in
`_sharing` and is read in this very call, or in none of these. No line is empty.
"""

from __future__ import annotations

import asyncio
from typing import Final, Protocol

from topics_server.http.upload_budget import UploadBudget
from topics_server.values.limits import KIB

# Input that arrives at once, or is announced, from which a connection is read in turns.
LARGE_BYTES: Final = 64 * KIB
# Connections of the lines that read at a time.
READING_MAX: Final = 2
# How long one of them reads while others wait, ms.
READING_MS: Final = 3.0
# How much of a connection of a greedy key is read at a time, and how many are asked for it.
SHARE_BYTES: Final = 64 * KIB
ASKED_MAX: Final = 8
# Seconds without reads of a greedy key: after one of its shares, and after a read without data.
REST_S: Final = 0.001
VAIN_REST_S: Final = 0.005


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

    def read_share(self, count: int) -> bool | None:
        """Take up to `count` bytes without reading on; return whether bytes had arrived.

        None: the client sends no more.
        """
        ...


class UploadTurns:
    """Connections in line, in order of arrival, and those that read."""

    def __init__(self, budget: UploadBudget | None = None) -> None:
        self._budget = budget or UploadBudget()
        # By key; the key whose line was served the longest ago is the first.
        self._lines: dict[object, dict[UploadReader, None]] = {}
        self._key_of: dict[UploadReader, object] = {}
        self._reading: dict[UploadReader, None] = {}
        # The connection whose share is being read.
        self._sharing: set[UploadReader] = set()
        # When the next connection of a greedy key may read, on the loop's clock.
        self._greedy_at = 0.0
        self._filling: asyncio.Handle | None = None
        self._resting: asyncio.TimerHandle | None = None
        self._rotating: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        """How many stand in line."""
        return len(self._key_of)

    def wait(self, reader: UploadReader) -> None:
        """Stop a reader and put it at the end of its key's line."""
        if reader in self._sharing:
            # It goes to the end of its line behind its share.
            return
        if reader in self._reading:
            self._end_turn(reader)
        if reader not in self._key_of:
            self._append(reader)
        self._fill_soon()

    def leave(self, reader: UploadReader) -> None:
        """A reader has finished its upload, or is gone: it reads freely."""
        if reader in self._sharing:
            self._sharing.remove(reader)
            reader.begin_turn()
        elif reader in self._key_of:
            self._remove(reader)
            reader.begin_turn()
        elif reader in self._reading:
            self._end_turn(reader)
            self._fill_soon()

    def _end_turn(self, reader: UploadReader) -> None:
        del self._reading[reader]
        if self._budget.is_greedy(reader.upload_key):
            self._greedy_at = asyncio.get_running_loop().time() + REST_S

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

    def _next_key(self, now_s: float) -> tuple[object] | None:
        """The key of the line to serve; None if all wait for the rest of greedy ones."""
        is_greedy = self._budget.is_greedy
        is_resting = now_s < self._greedy_at or any(
            is_greedy(it.upload_key) for it in self._reading
        )
        for key in self._lines:
            if not (is_resting and is_greedy(key)):
                return (key,)
        return None

    def _pop(self, key: object) -> UploadReader:
        """The first reader of a line, which becomes the last of the lines."""
        line = self._lines[key]
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
        for handle in (self._filling, self._resting):
            if handle is not None:
                handle.cancel()
        self._filling = self._resting = None
        loop = asyncio.get_running_loop()
        while len(self._reading) < READING_MAX:
            found = self._next_key(loop.time())
            if found is None:
                break
            (key,) = found
            if self._budget.is_greedy(key):
                self._read_share(key)
                continue
            reader = self._pop(key)
            self._reading[reader] = None
            reader.begin_turn()
        if not self._lines:
            return
        if self._rotating is None and self._reading:
            self._rotating = loop.call_later(READING_MS / 1000, self._rotate)
        if len(self._reading) < READING_MAX:
            rest_s = max(REST_S, self._greedy_at - loop.time())
            self._resting = loop.call_later(rest_s, self._fill)

    def _read_share(self, key: object) -> None:
        """Read a share of the first connection of a greedy key's line that has something."""
        rest_s = VAIN_REST_S
        for _ in range(min(ASKED_MAX, len(self._lines[key]))):
            reader = self._pop(key)
            self._sharing.add(reader)
            found = reader.read_share(SHARE_BYTES)
            if reader not in self._sharing:
                # Its upload is whole: it has left.
                rest_s = REST_S
                break
            self._sharing.remove(reader)
            if found is None:
                # It reads on, and finds that there is nothing more.
                reader.begin_turn()
            else:
                self._append(reader)
            if found:
                rest_s = REST_S
                break
        self._greedy_at = asyncio.get_running_loop().time() + rest_s

    def _rotate(self) -> None:
        """Move readers to the end of their lines, if others wait."""
        self._rotating = None
        if self._lines:
            for reader in tuple(self._reading):
                self._end_turn(reader)
                self._append(reader)
            self._fill()
