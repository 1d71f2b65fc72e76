"""Decodes the body of a stream request into records.

The stream's content type decides how a body is decoded. A large body is decoded off the loop;
meanwhile the stream may be dropped and made again, so the caller looks it up again afterwards. Used
by `service`.
"""

from __future__ import annotations

from topics_server.engine.background.large_appends import LargeAppends
from topics_server.streams.positions import is_json
from topics_server.values.appends import AppendLimits, DecodedAppend
from topics_server.values.errors import Code, TopicsError
from topics_server.values.record_codecs import bytes_body, decode_bytes, decode_messages, with_trace

# A body as it is stored, and its records; None if the body has no records.
Records = tuple[bytes, DecodedAppend] | None


class Content:
    """One body, decoded for one content type at a time; its records get the request's trace."""

    __slots__ = ("_body", "_content_type", "_large_appends", "_limits", "_read", "_trace")

    def __init__(
        self, large_appends: LargeAppends, body: bytes, limits: AppendLimits, trace: bytes
    ) -> None:
        self._large_appends = large_appends
        self._body = body
        self._limits = limits
        self._trace = trace
        # The content type for which a large body was decoded, and the result.
        self._content_type: str | None = None
        self._read: Records = None

    async def is_read_off_loop(self, content_type: str) -> bool:
        """Decode a large body for this content type, unless that was done; True if this waited.

        Raises the errors of `LargeAppends`, with the error codes of streams.
        """
        body = self._body
        if self._content_type == content_type or not self._large_appends.takes(body):
            return False
        try:
            if is_json(content_type):
                decoded = await self._large_appends.decode_messages(body, self._trace)
                self._read = (body, decoded) if decoded.count else None
            else:
                self._read = await self._large_appends.decode_bytes(content_type, body, self._trace)
        except TopicsError as error:
            raise in_words_of_streams(error) from None
        self._content_type = content_type
        return True

    def records(self, content_type: str) -> Records:
        """The records of the body. Raises `batch_too_large`, `record_too_large`, `invalid_request`.

        A large body was decoded for this content type.
        """
        body = self._body
        if not body:
            return None
        if self._large_appends.takes(body):
            assert self._content_type == content_type
            return self._read
        if not is_json(content_type):
            kept, decoded = bytes_body(content_type, body), decode_bytes(content_type, body)
        else:
            kept, decoded = body, decode_messages(body, self._limits.max_batch_records)
        if self._trace:
            decoded = with_trace(decoded, self._trace)
        return (kept, decoded) if decoded.count else None


def in_words_of_streams(error: TopicsError) -> TopicsError:
    """Translate an error about a body: a too large record is a too large payload."""
    if error.code is not Code.RECORD_TOO_LARGE:
        return error
    return TopicsError(Code.PAYLOAD_TOO_LARGE, error.message, error.detail)
