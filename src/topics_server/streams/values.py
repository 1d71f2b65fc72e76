"""The values that the stream service takes and returns. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from topics_server.values.model import Ancestor, ProducerStamp


class Position(msgspec.Struct, frozen=True, order=True):
    """A place between two records: after `seq` of the topic `topic_id`; 0, 0 is before the first.

    Positions of one stream are ordered by seq. Those of a fork up to where it left its source are
    the source's.
    """

    seq: int
    topic_id: int


# Before the first record of any stream: the sentinel `-1`, and no offset at all.
BEGINNING = Position(0, 0)


def position_of_seq(topic_id: int, ancestors: tuple[Ancestor, ...], seq: int) -> Position:
    """The position after a seq of this topic, whose ancestors those are."""
    if seq == 0:
        return BEGINNING
    for ancestor in ancestors:
        if seq <= ancestor.upto_seq:
            return Position(seq, ancestor.topic_id)
    return Position(seq, topic_id)


class ForkAsked(msgspec.Struct, frozen=True):
    """A stream is to begin as a copy of another.

    `at`: up to there; None for the source's end. `sub_offset`: so many messages, or bytes of one
    message, beyond; it takes an `at` unless it is 0.
    """

    source_path: str
    at: Position | None = None
    sub_offset: int = 0


class CreateAsked(msgspec.Struct, frozen=True):
    """A stream as it was asked for; `content_type` None means the default, or the source's.

    `ttl_s` and `expires_at` (as it was sent, with its time in ms) exclude each other.
    """

    content_type: str | None = None
    ttl_s: int | None = None
    expires_at: str | None = None
    expires_at_ms: int | None = None
    closes: bool = False
    body: bytes = b""
    fork: ForkAsked | None = None


class AppendAsked(msgspec.Struct, frozen=True):
    """An append with a body, and what it asks for beside. `seq`: the value of `Stream-Seq`.

    `key`: its idempotency key.
    """

    content_type: str
    seq: str | None = None
    producer: ProducerStamp | None = None
    closes: bool = False
    key: str | None = None


class StreamView(msgspec.Struct, frozen=True):
    """A stream as its answers tell of it; `tail`: after its last record."""

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
        """The position after a seq; of a fork, up to where it left its source, the source's."""
        return position_of_seq(self.topic_id, self.ancestors, seq)


class Created(msgspec.Struct, frozen=True):
    """Outcome of a create: the stream, and whether it was not there before."""

    view: StreamView
    is_new: bool


class StreamAppended(msgspec.Struct, frozen=True):
    """Outcome of an append or a close; `tail`: after its records.

    `epoch` and `seq`: of a producer's answer, the highest accepted. `is_repeat`: the request was
    accepted before, and nothing was appended.
    """

    tail: Position
    is_closed: bool
    epoch: int | None = None
    seq: int | None = None
    is_repeat: bool = False


class StreamPage(msgspec.Struct, frozen=True):
    """Messages of one read; `seqs[i]` is the seq of `datas[i]`.

    `next`: where the next read goes on. `is_up_to_date`: it reaches the stream's end as it was
    then; `is_closed`: and there will never be more. `view`: the stream as it was then.
    """

    view: StreamView
    datas: Sequence[bytes | memoryview]
    seqs: Sequence[int]
    next: Position
    is_up_to_date: bool
    is_closed: bool

    @property
    def ends(self) -> list[Position]:
        """The position after each message."""
        return [self.view.position_after(seq) for seq in self.seqs]
