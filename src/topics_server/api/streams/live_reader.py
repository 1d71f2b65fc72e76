"""One live reader of a stream, from its first event to its end.

It reads a page, sends it together with its control event, and only then reads the next page: a slow
reader holds at most one page, and a reader that takes no bytes for the write timeout is
disconnected. Comments keep the connection alive between pages.

The response ends when the stream is closed (the last event reports it), is deleted or no longer
holds the reader's position (the next request reports it), when its time is up (so that a cache can
join the readers of a stream again), when the key is revoked, or when the server shuts down. It
always ends with the last chunk, so that the client gets a complete response. Used by
`api/streams/handlers`.
"""

from __future__ import annotations

import asyncio
from typing import Final

from topics_server.api.context import ServerState
from topics_server.api.request import Receive, Send
from topics_server.api.streams.frames import control_frame, data_frame
from topics_server.api.streams.pages import cursor_after
from topics_server.api.watch.sse import SSE
from topics_server.auth.api_keys import Caller
from topics_server.http.sockets import Socket
from topics_server.runtime.clock import monotonic_ms, now_ms, random_u64
from topics_server.runtime.metrics import log
from topics_server.streams.service import Streams
from topics_server.streams.values import Position, StreamPage
from topics_server.values.errors import StorageError, TopicsError

_HEARTBEAT_MS: Final = 15_000


class StalledError(Exception):
    """The reader took no bytes for the write timeout."""


class Follower:
    """One reader. Its first page was read before."""

    __slots__ = (
        "_caller",
        "_cursor",
        "_ended",
        "_heartbeat_ms",
        "_page",
        "_path",
        "_send",
        "_socket",
        "_state",
        "_streams",
    )

    def __init__(
        self,
        state: ServerState,
        streams: Streams,
        path: str,
        page: StreamPage,
        cursor: int | None,
        caller: Caller,
        *,
        heartbeat_ms: int = _HEARTBEAT_MS,
    ) -> None:
        self._state = state
        self._streams = streams
        self._path = path
        self._page: StreamPage | None = page
        self._cursor = cursor_after(cursor, now_ms(), random_u64())
        self._caller = caller
        self._heartbeat_ms = heartbeat_ms
        # Set by `run`.
        self._ended: asyncio.Event
        self._send: Send
        self._socket: Socket

    async def run(self, receive: Receive, send: Send) -> None:
        """Send events until the client disconnects or the stream ends."""
        self._send, self._socket = send, Socket(send)
        self._ended = asyncio.Event()
        telling = asyncio.ensure_future(self._tell())
        leaving = asyncio.ensure_future(left(receive))
        ending = asyncio.ensure_future(self._ended.wait())
        moving = self._state.next_phase()
        # Sending the head may have waited for the socket. Meanwhile the phase or the key may have
        # changed.
        if self._state.phase != "ready" or not self._caller.until_revoked(self._ended.set):
            self._ended.set()
        try:
            await asyncio.wait(
                (telling, leaving, ending, moving), return_when=asyncio.FIRST_COMPLETED
            )
            if telling.done():
                telling.result()
            if not leaving.done():
                # Every started frame is complete: data and control are one piece.
                telling.cancel()
                await asyncio.wait((telling,))
                self._socket.let_through()
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        except StalledError:
            self._socket.abort()
        finally:
            self._caller.forget(self._ended.set)
            for waiting in (telling, leaving, ending, moving):
                waiting.cancel()
            # An error of `telling` refers to this frame, so the frame must not refer to the task.
            del telling

    async def _tell(self) -> None:
        """Send pages as they arrive, until the stream is closed or the time is up."""
        until_ms = monotonic_ms() + self._state.settings.streams_sse_ms
        page, self._page = self._page, None
        try:
            while page is not None:
                self._cursor = max(self._cursor, cursor_after(None, now_ms(), 0))
                await self._put(events_of(page, self._cursor))
                if page.is_closed:
                    return
                at, is_up_to_date = page.next, page.is_up_to_date
                # Free the page while waiting for the next one.
                page = None
                if monotonic_ms() < until_ms:
                    page = await self._next(at, until_ms, is_up_to_date=is_up_to_date)
        except TopicsError as error:
            log.debug("the events of a stream end: %s", error.message)
        except StorageError as error:
            log.error("storage refused the events of a stream: %s", error)

    async def _next(
        self, at: Position, until_ms: float, *, is_up_to_date: bool
    ) -> StreamPage | None:
        """The next page; None when the time is up."""
        most = self._state.settings.streams_page_bytes
        if not is_up_to_date:
            return await self._streams.read(self._path, at, most, explicit=True)
        while not self._streams.is_draining:
            left_ms = until_ms - monotonic_ms()
            if left_ms <= 0:
                break
            page = await self._streams.wait(self._path, at, most, min(left_ms, self._heartbeat_ms))
            if page.datas or page.is_closed or page.next != at:
                return page
            if left_ms > self._heartbeat_ms:
                await self._put(SSE.heartbeat(now_ms()))
        return None

    async def _put(self, payload: bytes) -> None:
        """Send bytes once the socket takes them. Raises `StalledError`."""
        sending = self._send({"type": "http.response.body", "body": payload, "more_body": True})
        if not self._socket.is_full:
            await sending
            return
        waiting = asyncio.ensure_future(sending)
        buffered = self._socket.buffered_bytes()
        try:
            while not waiting.done():
                await asyncio.wait((waiting,), timeout=self._state.timeouts.limits.write_s)
                left, buffered = buffered, self._socket.buffered_bytes()
                if not waiting.done() and buffered >= left:
                    raise StalledError
            waiting.result()
        finally:
            waiting.cancel()
            # An error of `waiting` refers to this frame.
            del waiting


def events_of(page: StreamPage, cursor: int) -> bytes:
    """The events of a page: its messages, and where the reader is.

    Readers that waited for the same messages have the same page, and most have the same cursor.
    The page keeps the events of one cursor; the others copy the messages from there.
    """
    if not page.encoded:
        page.encoded.append((cursor, data_frame(page) + control_frame(page, cursor)))
    kept, events = page.encoded[0]
    if kept == cursor:
        return events
    end = len(events) - len(control_frame(page, kept))
    return b"".join((memoryview(events)[:end], control_frame(page, cursor)))


async def left(receive: Receive) -> None:
    """Return when the client has disconnected."""
    while (await receive())["type"] != "http.disconnect":
        pass
