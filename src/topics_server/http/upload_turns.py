"""Reads connections with large uploads in turns, a few at a time.

The loop delivers the input of all sockets before anything else runs, up to 256 KiB each. While
hundreds of clients send large bodies, every other client would wait for all of them. So a
connection with a large upload stops reading and joins a line. Of all lines, `READING_MAX`
connections read at a time. A connection that receives `LARGE_BYTES` at once goes back to the end of
its line. So does a connection that has read for `READING_MS` while others wait, so that stalled
uploads do not block others. Each key has its own line, and lines are served in turn, so that the
uploads of one key do not keep others waiting.

While the budget is nearly used up, reading a greedy key fast would only refuse more of its uploads
(`http/upload_budget`). Then its connections do not read by themselves: one of them at a time is
read for a share of `SHARE_BYTES`, followed by a rest of `REST_S`, which leaves most of the loop to
all other clients. Connections that have sent nothing are skipped, up to `ASKED_MAX` at a time, at
the cost of a system call each. Held by `api/context`; called by `http/exchange/body_uploads` and
`http/websocket`. Loop thread only.

Invariant: a reader is in one line and does not read, or in `_reading` and reads, or in `_sharing`
and is read in the current call, or in none of these. No line is empty.
"""

from __future__ import annotations

import asyncio
from typing import Final, Protocol

from topics_server.http.upload_budget import UploadBudget
from topics_server.values.limits import KIB

# A connection that receives or announces so many bytes at once is read in turns.
LARGE_BYTES: Final = 64 * KIB
# How many connections of all lines read at a time.
READING_MAX: Final = 2
# How long a connection reads while others wait, ms.
READING_MS: Final = 3.0
# Bytes read at a time from a connection of a greedy key, and the most connections tried in a row.
SHARE_BYTES: Final = 64 * KIB
ASKED_MAX: Final = 8
# Seconds without reads of a greedy key: after one of its shares, and after a read without data.
REST_S: Final = 0.001
VAIN_REST_S: Final = 0.005


class UploadReader(Protocol):
    """A connection whose reading can be stopped."""

    @property
    def upload_key(self) -> object:
        """The key of the connection's upload; None without a key."""
        ...

    def begin_turn(self) -> None:
        """Read again, if the connection is still there."""
        ...

    def end_turn(self) -> None:
        """Stop reading until the next turn."""
        ...

    def read_share(self, count: int) -> bool | None:
        """Read up to `count` bytes, then stop again. Returns whether bytes had arrived.

        None: the client sends no more.
        """
        ...


class UploadTurns:
    """The connections that wait in lines, in order of arrival, and the connections that read."""

    def __init__(self, budget: UploadBudget | None = None) -> None:
        self._budget = budget or UploadBudget()
        # The lines by key. The key whose line was served longest ago comes first.
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
        """How many connections wait in a line."""
        return len(self._key_of)

    def wait(self, reader: UploadReader) -> None:
        """Stop a reader and put it at the end of its key's line."""
        if reader in self._sharing:
            # After its share, the reader goes to the end of its line.
            return
        if reader in self._reading:
            self._end_turn(reader)
        if reader not in self._key_of:
            self._append(reader)
        self._fill_soon()

    def leave(self, reader: UploadReader) -> None:
        """A reader has finished its upload, or is gone: let it read without turns."""
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
        """The key of the line to serve; None if only greedy keys wait and must rest.

        A tuple, as a key may be None.
        """
        is_greedy = self._budget.is_greedy
        is_resting = now_s < self._greedy_at or any(
            is_greedy(it.upload_key) for it in self._reading
        )
        for key in self._lines:
            if not (is_resting and is_greedy(key)):
                return (key,)
        return None

    def _pop(self, key: object) -> UploadReader:
        """Take the first reader of a line. The line becomes the last of the lines."""
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
        """Let readers at the front of the lines read, up to `READING_MAX` at a time."""
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
        """Read a share of a greedy key's line: of its first connection that has received bytes."""
        rest_s = VAIN_REST_S
        for _ in range(min(ASKED_MAX, len(self._lines[key]))):
            reader = self._pop(key)
            self._sharing.add(reader)
            found = reader.read_share(SHARE_BYTES)
            if reader not in self._sharing:
                # The upload is complete, and the reader has left.
                rest_s = REST_S
                break
            self._sharing.remove(reader)
            if found is None:
                # The transport reads, and so finds the end of the connection.
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
