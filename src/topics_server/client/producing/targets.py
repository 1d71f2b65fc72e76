"""The requests of a producer: to a topic of `/v0` or a Durable Stream.

A `Target` turns records into bytes, batches into bodies, and a response into one of the verdicts
below; `batches` handles verdicts and contains no HTTP. A stream's records are messages if its
content type is JSON, and otherwise bytes that are appended to each other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeAlias

import msgspec

from topics_server.client import calls
from topics_server.client.addresses import checked_header, checked_path, checked_url
from topics_server.client.errors import (
    BadAnswer,
    ClientError,
    InvalidRequest,
    StreamClosed,
    refusal,
)

JSON: Final = "application/json"
STREAM_EXAMPLE: Final = "http://127.0.0.1:4000/v1/stream/NAME"
TOPICS: Final = "/v0/topics/"
NUMBER_MAX: Final = 2**53 - 1
PRODUCER_CHARS_MAX: Final = 256


class Accepted(msgspec.Struct, frozen=True):
    """The server stored the batch because of this request.

    `first_seq`: the seq of its first record on a topic (None: not reported). `offset`: the end of
    the stream behind the batch.
    """

    first_seq: int | None = None
    offset: str | None = None


class Repeated(msgspec.Struct, frozen=True):
    """The seq was accepted before under this epoch; `highest`: the last accepted seq."""

    highest: int
    first_seq: int | None = None
    offset: str | None = None


class StampGap(msgspec.Struct, frozen=True):
    """Not accepted: the server expects the seq `expected` next."""

    expected: int


class Beaten(msgspec.Struct, frozen=True):
    """Not accepted: the producer's current epoch on the server is this later one."""

    epoch: int


Verdict: TypeAlias = Accepted | Repeated | StampGap | Beaten | ClientError


class _Stored(msgspec.Struct):
    first_seq: int


_read_stored: Final = calls.reader(_Stored)


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """The target of a producer's writes."""

    url: str
    path: str
    content_type: str
    is_topic: bool

    @property
    def takes_json(self) -> bool:
        """Whether records are JSON values; if not, they are bytes."""
        return self.is_topic or self.content_type.partition(";")[0].strip().lower() == JSON

    def encode(self, record: Any, tag: str | None, meta: Mapping[str, Any] | None) -> bytes:
        """One record as bytes of a body.

        `msgspec.Raw` is sent byte for byte. Raises `TypeError` for a value that the target does not
        take.
        """
        if not self.is_topic and (tag is not None or meta is not None):
            raise TypeError("records of a stream cannot have tag or meta")
        if not self.takes_json:
            if not isinstance(record, bytes | bytearray | memoryview) or not record:
                raise TypeError(
                    f"a record of a {self.content_type} stream must be bytes, and not empty"
                )
            return bytes(record)
        if isinstance(record, bytes | bytearray | memoryview):
            raise TypeError("a record must be a JSON value; pass encoded JSON as msgspec.Raw(...)")
        data = bytes(record) if isinstance(record, msgspec.Raw) else msgspec.json.encode(record)
        if not self.is_topic:
            return data
        found = b'{"data":' + data
        if tag is not None:
            found += b',"tag":' + msgspec.json.encode(tag)
        if meta is not None:
            found += b',"meta":' + msgspec.json.encode(meta)
        return found + b"}"

    def body(self, records: Sequence[bytes], key: str | None) -> bytes:
        """The body of a batch; `key` is an idempotency key, for topics only."""
        if not self.takes_json:
            return b"".join(records)
        if not self.is_topic:
            return b"[" + b",".join(records) + b"]"
        end = b"]" if key is None else b'],"idempotency_key":' + msgspec.json.encode(key)
        return b'{"records":[' + b",".join(records) + end + b"}"

    def headers(self, producer: str, epoch: int, seq: int) -> list[tuple[bytes, bytes]]:
        """The headers of a request of this producer."""
        return [
            (b"Content-Type", self.content_type.encode()),
            (b"Producer-Id", producer.encode()),
            (b"Producer-Epoch", b"%d" % epoch),
            (b"Producer-Seq", b"%d" % seq),
        ]

    def verdict(self, status: int, headers: Mapping[str, str], answer: bytes) -> Verdict:
        """The verdict of a response; `headers` have lower-case names."""
        if status == 204:
            return Repeated(
                number(headers, "producer-seq") or 0,
                number(headers, "topic-first-seq"),
                headers.get("stream-next-offset"),
            )
        if 200 <= status < 300:
            if not self.is_topic:
                return Accepted(offset=headers.get("stream-next-offset"))
            try:
                return Accepted(_read_stored(answer).first_seq)
            except BadAnswer as bad:
                return bad
        expected = number(headers, "producer-expected-seq")
        if status == 409 and expected is not None:
            return StampGap(expected)
        epoch = number(headers, "producer-epoch")
        if status == 403 and epoch is not None:
            return Beaten(epoch)
        error = refusal(status, headers.get("retry-after"), answer)
        most = error.detail.get("max_batch_records")
        if isinstance(most, int):
            message = f"{str(error).partition(': ')[2]} in a batch; make the producer with "
            message += f"batch_records={most}, or raise TOPICS_MAX_BATCH_RECORDS of the server"
            return InvalidRequest(status, error.code, message, error.detail)
        if status == 409 and headers.get("stream-closed", "").lower() == "true":
            return StreamClosed(status, "stream_closed", "the stream is closed")
        return error


def number(headers: Mapping[str, str], name: str) -> int | None:
    """A header that holds a number of the protocol; None if it is missing or malformed."""
    text = headers.get(name, "").strip()
    if not (text.isascii() and text.isdigit()):
        return None
    found = int(text)
    return found if found <= NUMBER_MAX else None


def target(place: str, url: str | None, content_type: str | None) -> Target:
    """A topic by name or URL, or a stream by its URL. Raises `ValueError` for anything else."""
    if "://" not in place or TOPICS in place:
        if content_type is not None:
            raise ValueError("the records of a topic are JSON: leave content_type out")
        where = calls.place(place, url)
        path = where.path("?return_seqs=false")
        return Target(url=where.url, path=path, content_type=JSON, is_topic=True)
    if url is not None:
        raise ValueError("the URL already names the stream: leave url out")
    parts = checked_url(place, STREAM_EXAMPLE)
    if parts.query or parts.fragment or parts.path in {"", "/"}:
        raise ValueError(f"{place!r} is not the URL of a stream, which has an origin and a path")
    return Target(
        url=f"{parts.scheme}://{parts.netloc}",
        path=checked_path(parts.path),
        content_type=checked_header(content_type or JSON, "a content type"),
        is_topic=False,
    )
