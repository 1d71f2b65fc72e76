"""A live query: an event stream that sends the rows again when they change.

The view notifies the stream of progress; the query then runs again, at most ten times a second, and
rows equal to the last ones are not sent. The id of an event is the last processed seq. The stream
ends when the client disconnects, the key is revoked, the view is deleted or the server stops. Used
by `api/views/handlers`.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

import xxhash

from topics_server.api.context import ServerState
from topics_server.api.request import Receive, Send
from topics_server.api.streams.live_reader import left
from topics_server.api.views.responses import rows_json
from topics_server.api.watch.sse import RETRY, REVOKED, error_frame, frame
from topics_server.auth.api_keys import Caller
from topics_server.http.error_responses import STATUS_OF
from topics_server.http.sockets import Socket
from topics_server.runtime.clock import now_ms
from topics_server.values.errors import TopicsError
from topics_server.views.answers import ViewRows
from topics_server.views.service import Views

_PERIOD_S: Final = 0.1
_HEARTBEAT_S: Final = 15.0


class LiveQuery:
    """One stream of one query."""

    def __init__(
        self,
        state: ServerState,
        views: Views,
        topic: str,
        view: str,
        query: str,
        params: dict[str, Any],
        caller: Caller,
    ) -> None:
        self._state = state
        self._views = views
        self._topic = topic
        self._view = view
        self._query = query
        self._params = params
        self._caller = caller

    async def rows(self) -> ViewRows:
        """The current rows. Raises `TopicsError`."""
        sql = self._views.named_query(self._topic, self._view, self._query)
        return await self._views.query(self._topic, self._view, sql, self._params)

    async def run(self, receive: Receive, send: Send) -> None:
        """Send events until the client leaves or the stream is ended."""
        moved = asyncio.Event()
        revoked = asyncio.Event()
        try:
            unlisten = self._views.listen(self._topic, self._view, moved.set)
        except TopicsError as error:
            await send(_body(_refusal(error), more=False))
            return
        telling = asyncio.ensure_future(self._tell(moved, send))
        leaving = asyncio.ensure_future(left(receive))
        ending = asyncio.ensure_future(revoked.wait())
        moving = self._state.next_phase()
        if self._state.phase != "ready" or not self._caller.until_revoked(revoked.set):
            revoked.set()
        try:
            await asyncio.wait(
                (telling, leaving, ending, moving), return_when=asyncio.FIRST_COMPLETED
            )
            if leaving.done():
                return
            last = telling.result() if telling.done() else b""
            if ending.done() and self._state.phase == "ready":
                last = REVOKED
            telling.cancel()
            await asyncio.wait((telling,))
            Socket(send).let_through()
            await send(_body(last, more=False))
        finally:
            unlisten()
            self._caller.forget(revoked.set)
            for waiting in (telling, leaving, ending, moving):
                waiting.cancel()
            # An error of `telling` refers to this frame, so the frame must not refer to the task.
            del telling

    async def _tell(self, moved: asyncio.Event, send: Send) -> bytes:
        """Send rows as they change; return the last message of the stream."""
        loop = asyncio.get_running_loop()
        await send(_body(RETRY))
        sent = b""
        while True:
            began = loop.time()
            moved.clear()
            try:
                rows = await self.rows()
            except TopicsError as error:
                return _refusal(error)
            digest = xxhash.xxh3_128_digest(rows.rows)
            if digest != sent:
                sent = digest
                event = frame(b"rows", rows_json(self._view, rows) + b"}")
                await send(_body(b"id: %d\n%b" % (rows.processed_seq, event)))
            await asyncio.sleep(max(0.0, _PERIOD_S - (loop.time() - began)))
            while not moved.is_set():
                try:
                    await asyncio.wait_for(moved.wait(), _HEARTBEAT_S)
                except TimeoutError:
                    await send(_body(b": heartbeat %d\n\n" % now_ms()))


def _body(payload: bytes, *, more: bool = True) -> dict[str, Any]:
    return {"type": "http.response.body", "body": payload, "more_body": more}


def _refusal(error: TopicsError) -> bytes:
    return error_frame(STATUS_OF[error.code], error.message)
