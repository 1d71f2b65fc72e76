"""Decodes large appends one at a time in the helper process.

A decoded append is within the limits and can be applied without copying its payloads, so no loop
turn takes as long as a body. If the caller is cancelled, a started decoding continues. The caller
decides after its last `await`, as with any append. Called by the handlers of appends,
`streams.service` and `recovery`; loop thread only.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Callable
from functools import partial
from typing import Final, TypeVar

import msgspec

from topics_server.engine.background.append_decoder import DecoderError, DecoderProcess
from topics_server.runtime.metrics import log
from topics_server.values.appends import GRAMMAR, AppendLimits, DecodedAppend, check_limits
from topics_server.values.blocks import Payloads, ends_in_blocks, payloads_of
from topics_server.values.errors import Code, TopicsError
from topics_server.values.limits import (
    LARGE_APPEND_BYTES_MIN,
    LARGE_APPENDS_WAITING_BYTES_MAX,
    U32_MAX,
)
from topics_server.values.record_codecs import (
    MESSAGES_GRAMMAR,
    bytes_body,
    decode_body,
    decode_bytes,
    with_trace,
)

T = TypeVar("T")

# Bodies from the journal were accepted once, so they are not checked against limits again.
_ANY: Final = AppendLimits(U32_MAX, U32_MAX, U32_MAX, U32_MAX, U32_MAX)


class LargeAppends:
    """The queue before the helper process. `limits`: the limits of an append."""

    def __init__(self, limits: AppendLimits) -> None:
        self._limits = limits
        self._process = DecoderProcess()
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "decoder")
        # Bytes of the submitted bodies, including the one that is being decoded.
        self._waiting_bytes = 0

    @property
    def process(self) -> DecoderProcess:
        """The helper process."""
        return self._process

    def takes(self, body: bytes) -> bool:
        """Whether a body is too large to decode on the loop."""
        return len(body) > LARGE_APPEND_BYTES_MIN

    async def decode(self, body: bytes, trace: bytes = b"") -> DecodedAppend:
        """The records of an append's body, with the request's trace.

        Raises the errors of decoding and admission, and `throttled` if too many wait or there is no
        helper process.
        """
        return await self._run(body, partial(self._decode, body, GRAMMAR, self._limits, trace))

    async def decode_messages(self, body: bytes, trace: bytes = b"") -> DecodedAppend:
        """The JSON messages of a stream's body; there may be none.

        Raises the errors of `decode`.
        """
        call = partial(self._decode, body, MESSAGES_GRAMMAR, self._limits, trace)
        return await self._run(body, call)

    def _decode(
        self, body: bytes, grammar: int, limits: AppendLimits, trace: bytes
    ) -> DecodedAppend:
        """*Blocking.* Decode in the helper process; with a trace, build the payloads again."""
        decoded = self._process.decode(body, grammar, limits)
        return _in_blocks(with_trace(decoded, trace)) if trace else decoded

    async def decode_bytes(
        self, content_type: str, data: bytes, trace: bytes = b""
    ) -> tuple[bytes, DecodedAppend]:
        """The body of an append of one bytes record, and that record."""
        decoded = decode_bytes(content_type, data)
        # Check the size before anything is copied.
        check_limits(decoded, self._limits)

        def put_together() -> tuple[bytes, DecodedAppend]:
            traced = with_trace(decoded, trace)
            payloads = payloads_of(traced.datas, traced.metas)
            kept = bytes_body(content_type, data)
            return kept, msgspec.structs.replace(traced, payloads=(payloads,))

        return await self._run(data, put_together)

    async def decode_kept(self, body: bytes, grammar: int, trace: bytes = b"") -> DecodedAppend:
        """The records of a body from the journal, with its trace, whatever the limits are now.

        The records are required: if the helper process fails, the calling thread decodes them.
        """
        if grammar <= GRAMMAR or grammar == MESSAGES_GRAMMAR:
            try:
                call = partial(self._decode, body, grammar, _ANY, trace)
                return await self._call(body, call)
            except DecoderError as error:
                log.error("the helper process for large appends failed twice: %s", error)
        return await self._call(body, lambda: _in_blocks(decode_body(body, grammar, trace)))

    async def _run(self, body: bytes, call: Callable[[], T]) -> T:
        if self._waiting_bytes + len(body) > LARGE_APPENDS_WAITING_BYTES_MAX:
            raise TopicsError(
                Code.THROTTLED,
                "too many large appends wait to be decoded",
                {"limit": "large_appends", "max": LARGE_APPENDS_WAITING_BYTES_MAX},
            )
        try:
            return await self._call(body, call)
        except DecoderError as error:
            log.error("the helper process for large appends failed twice: %s", error)
            raise TopicsError(
                Code.THROTTLED,
                "the helper process for large appends failed",
                {"limit": "large_appends"},
            ) from None

    async def _call(self, body: bytes, call: Callable[[], T]) -> T:
        size = len(body)
        under_way = self._thread.submit(call)
        self._waiting_bytes += size
        # The caller may be cancelled; a started decoding counts as waiting until it ends.
        finished = asyncio.wrap_future(under_way)
        finished.add_done_callback(partial(self._note_end, size))
        try:
            return await asyncio.shield(finished)
        finally:
            # An error refers to this frame. If the frame referred to the futures, which refer to
            # the error, only a collection would free the body.
            del under_way, finished

    def _note_end(self, size: int, finished: asyncio.Future[T]) -> None:
        self._waiting_bytes -= size
        # Retrieve the exception if no task waits for it any more.
        if not finished.cancelled():
            finished.exception()

    def close(self) -> None:
        """*Blocking.* Wait for the call under way, then end the helper process."""
        self._thread.shutdown(cancel_futures=True)
        self._process.close()


def _in_blocks(decoded: DecodedAppend) -> DecodedAppend:
    """The append with its payloads joined block by block."""
    metas = decoded.metas if decoded.has_metas else None
    payloads: list[Payloads] = []
    row = 0
    for ends in ends_in_blocks(decoded.datas, metas):
        part = slice(row, row + len(ends) // 2)
        payloads.append(payloads_of(decoded.datas[part], None if metas is None else metas[part]))
        row = part.stop
    return msgspec.structs.replace(decoded, payloads=tuple(payloads))
