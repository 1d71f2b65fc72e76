"""The load of one writer and one reader that waits: how soon an appended record is with a reader.

The reader holds a live stream. The writer appends a record; the latency ends when the reader has
its frame. The next append follows the frame and the answer.
"""

from __future__ import annotations

import asyncio
from typing import Final

from topics_server.cli.benching.connections import Link
from topics_server.cli.benching.loads import Load
from topics_server.cli.benching.measured import Sample
from topics_server.cli.benching.requests import Script
from topics_server.cli.connection import ServerUnreachable
from topics_server.runtime.clock import monotonic_s

READY_S: Final = 15.0
READY: Final = b"event: caught-up"
RECORD: Final = b"event: record"


class FollowLoad(Load):
    """One writer and one reader."""

    def __init__(self, url: str, script: Script, stream: bytes, seconds: float) -> None:
        super().__init__(url, seconds)
        self._script = script
        self._request = stream
        self._reader = Link(url, self, streaming=True)
        self._writer = Link(url, self)
        self._ready = asyncio.Event()
        self._buffer = b""
        self._has_answer = self._has_frame = False

    async def run(self) -> Sample:
        """Wait until the reader is live, then write until the time is over."""
        try:
            await self.open(self._reader)
            await self.open(self._writer)
            self._reader.send(self._request)
            async with asyncio.timeout(READY_S):
                await self._ready.wait()
        except TimeoutError:
            self.close()
            why = f"{self.url} did not begin a live stream within {READY_S:g} s"
            raise ServerUnreachable(why, sent=True) from None
        except BaseException:
            self.close()
            raise
        self.begin()
        if self.fatal is None:
            self._write()
        return await self.result()

    def failed(self, error: Exception) -> None:
        """End the load, and the wait for the reader too."""
        super().failed(error)
        self._ready.set()

    def answered(self, link: Link, status: int, body: bytes) -> None:
        """The writer's answer, or the end of the reader's stream."""
        if status >= 300:
            pause_s = self.refuse(status, body, may_pause=link is self._writer)
            if pause_s is None:
                return
            if monotonic_s() + pause_s >= self.end_s:
                self.end()
            else:
                self.later(pause_s, self._write)
        elif link is self._reader:
            self.failed(ServerUnreachable(f"{self.url} ended the live stream", sent=True))
        else:
            self._has_answer = True
            self._go_on()

    def received(self, link: Link, piece: bytes) -> None:
        """Take the frames that are complete."""
        *frames, self._buffer = (self._buffer + piece).split(b"\n\n")
        for frame in frames:
            if READY in frame:
                self._ready.set()
            elif RECORD in frame and not self._has_frame:
                self._has_frame = True
                now_s = monotonic_s()
                self.count(now_s - self._writer.sent_s, 1, now_s)
                self._go_on()

    def _go_on(self) -> None:
        if not (self._has_answer and self._has_frame):
            return
        if monotonic_s() < self.end_s:
            self._write()
        else:
            self.end()

    def _write(self) -> None:
        request = self._script.next()
        assert request is not None, "an append is repeated without an end"
        self._has_answer = self._has_frame = False
        if self._writer.stays_open:
            self._writer.send(request)
            return
        # The last answer ended the connection.
        old, self._writer = self._writer, Link(self.url, self)
        self.retire(old)
        self.spawn(self._writer, lambda opened: opened.send(request))
