"""The values that the stream service takes and returns. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from topics_server.values.model import Ancestor, ProducerStamp


class Position(msgspec.Struct, frozen=True, order=True):
    """A position between records: after `seq` of topic `topic_id`; 0, 0 is before the first.

    Positions of one stream are ordered by seq. Up to a fork's origin, its positions are the
    source's.
    """

    seq: int
    topic_id: int


# The position before the first record of any stream: for the offset `-1`, or no offset.
BEGINNING = Position(0, 0)


def position_of_seq(topic_id: int, ancestors: tuple[Ancestor, ...], seq: int) -> Position:
    """The position after a seq of a topic that has these ancestors."""
    if seq == 0:
        return BEGINNING
    for ancestor in ancestors:
        if seq <= ancestor.upto_seq:
            return Position(seq, ancestor.topic_id)
    return Position(seq, topic_id)


class ForkAsked(msgspec.Struct, frozen=True):
    """A request to begin a stream as a copy of another.

    `at`: the end of the copy; None for the source's end. `sub_offset`: further messages, or bytes
    of one message; it needs an `at` unless it is 0.
    """

    source_path: str
    at: Position | None = None
    sub_offset: int = 0


class CreateAsked(msgspec.Struct, frozen=True):
    """A decoded request to create a stream.

    `content_type` is None for the default type; a fork then has the type of its source.

    `ttl_s` and `expires_at` (as it was sent, with its time in ms) exclude each other. `trace`: the
    request's `traceparent`, or empty.
    """

    content_type: str | None = None
    ttl_s: int | None = None
    expires_at: str | None = None
    expires_at_ms: int | None = None
    closes: bool = False
    body: bytes = b""
    fork: ForkAsked | None = None
    trace: bytes = b""


class AppendAsked(msgspec.Struct, frozen=True):
    """An append with a body and its options. `seq`: the value of `Stream-Seq`.

    `key`: its idempotency key. `trace`: the request's `traceparent`, or empty.
    """

    content_type: str
    seq: str | None = None
    producer: ProducerStamp | None = None
    closes: bool = False
    key: str | None = None
    trace: bytes = b""


class StreamView(msgspec.Struct, frozen=True):
    """The stream's state for answers; `tail`: the position after its last record."""

    path: str
    topic: str
    topic_id: int
    content_type: str
    is_json: bool
    tail: Position
    is_closed: bool
    ttl_s: int | None = None
    expires_at: str | None = None
    ancestors: tuple[Ancestor, ...] = ()

    def position_after(self, seq: int) -> Position:
        """The position after a seq; before a fork's origin it is a position of the source."""
        return position_of_seq(self.topic_id, self.ancestors, seq)


class Created(msgspec.Struct, frozen=True):
    """The result of a create: the stream, and whether it is new."""

    view: StreamView
    is_new: bool


class StreamAppended(msgspec.Struct, frozen=True):
    """The result of an append or a close; `tail`: the position after its records.

    `epoch` and `seq`: the highest ones accepted from a producer. `is_repeat`: the request was
    accepted before, and nothing was appended.
    """

    tail: Position
    is_closed: bool
    epoch: int | None = None
    seq: int | None = None
    is_repeat: bool = False


class StreamPage(msgspec.Struct, frozen=True):
    """Messages of one read; `seqs[i]` is the seq of `datas[i]`.

    `next`: the position of the next read. `is_up_to_date`: the page reaches the stream's end at the
    time of the read; `is_closed`: and the stream is closed. `view`: the stream at that time.
    `encoded`: empty, or one cursor and the events that a live reader with this cursor gets; readers
    that wait for the same messages share the page.
    """

    view: StreamView
    datas: Sequence[bytes | memoryview]
    seqs: Sequence[int]
    next: Position
    is_up_to_date: bool
    is_closed: bool
    encoded: list[tuple[int, bytes]] = msgspec.field(default_factory=list)

    @property
    def ends(self) -> list[Position]:
        """The position after each message."""
        return [self.view.position_after(seq) for seq in self.seqs]
