"""A catch-up read of several pages in one response.

Clients of this protocol that read without `live` may expect the whole stream in one answer. So an
answer reaches to the end that the stream has when the answer starts. Its headers name that end.
Pages follow as the socket takes them, with one page in memory at a time. If records are lost
meanwhile, or the server shuts down, the connection is broken, so that a partial answer never looks
complete. Used by `api/streams/handlers`.
"""

from __future__ import annotations

import asyncio

from topics_server.api.request import Receive, Send
from topics_server.api.streams.live_reader import Follower, StalledError, left
from topics_server.http.sockets import Socket
from topics_server.runtime.metrics import log
from topics_server.streams.values import StreamPage
from topics_server.values.errors import StorageError, TopicsError


class WholeReader(Follower):
    """One answer. Its first page was read before."""

    __slots__ = ("upto_seq",)
    # The end of the answer, which its headers name.
    upto_seq: int

    async def run(self, receive: Receive, send: Send) -> None:
        """Send page after page up to the end that the head names, or break the connection."""
        self._send, self._socket = send, Socket(send)
        telling = asyncio.ensure_future(self._tell())
        leaving = asyncio.ensure_future(left(receive))
        try:
            await asyncio.wait((telling, leaving), return_when=asyncio.FIRST_COMPLETED)
            if telling.done():
                telling.result()
        except StalledError:
            self._socket.abort()
        except (TopicsError, StorageError) as error:
            log.info("an answer of a stream is broken off: %s", error)
            self._socket.abort()
        finally:
            telling.cancel()
            leaving.cancel()
            # An error of `telling` refers to this frame, so the frame must not refer to the task.
            del telling

    async def _tell(self) -> None:
        page, self._page = self._page, None
        assert page is not None
        is_json, upto_seq = page.view.is_json, self.upto_seq
        before = b"[" if is_json else b""
        most = self._state.settings.streams_page_bytes
        while True:
            body = _body(page, upto_seq)
            if body:
                await self._put(before + body)
                before = b"," if is_json else b""
            if page.next.seq >= upto_seq:
                break
            page = await self._streams.read(self._path, page.next, most, explicit=True)
        end = b"" if not is_json else b"[]" if before == b"[" else b"]"
        await self._send({"type": "http.response.body", "body": end, "more_body": False})


def _body(page: StreamPage, upto_seq: int) -> bytes:
    """The messages of a page up to the end that the headers name."""
    datas = page.datas
    if page.next.seq > upto_seq:
        datas = [data for data, seq in zip(datas, page.seqs, strict=True) if seq <= upto_seq]
    return (b"," if page.view.is_json else b"").join(datas)
