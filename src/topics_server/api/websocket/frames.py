"""Renders WebSocket events and answers as JSON messages. Pure.

`WS` is the dialect of `broadcast` for sockets: one message per event, `data` and `meta` byte for
byte. The answers to commands are `subscribed`, `unsubscribed`, `ack`, `pong` and `error`. Absent
members are left out, never null. JSON need not escape any character of a topic name. Called by
`api/watch/broadcast` (the dialect) and `api/websocket/handlers`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from topics_server.engine.answers import Appended
from topics_server.engine.subscribe.subscription import (
    CaughtUp,
    Event,
    Records,
    Tombstone,
    TopicDeleted,
)
from topics_server.http.error_responses import described
from topics_server.values.errors import Code, TopicsError
from topics_server.values.json_cache import JsonCache
from topics_server.values.model import ProducerStamp

# The code for a client that did not read its socket; not an HTTP code.
SLOW_CONSUMER: Final = "slow_consumer"

_encode: Final = msgspec.json.Encoder().encode


class Subscribed(NamedTuple):
    """The start of reading one topic, and the range of its records.

    `is_waiting`: the topic does not exist yet.
    """

    from_seq: int
    head_seq: int
    earliest_seq: int
    is_waiting: bool = False


# --- events -------------------------------------------------------------------------------


class SocketDialect:
    """The dialect of WebSockets; see `send_queue.Dialect`."""

    # A message is one frame.
    is_joined: Final = False

    def render(self, event: Event, cache: JsonCache) -> bytes:
        """An event as one message; every socket gets the same bytes."""
        match event:
            case Records():
                return _records(event, cache)
            case Tombstone():
                return (
                    b'{"op":"tombstone","topic":"%b","reason":"%b","gap_from":%d,"gap_to":%d,'
                    b'"earliest_seq":%d,"head_seq":%d}'
                ) % (
                    event.topic.encode("ascii"),
                    event.reason.encode("ascii"),
                    event.gap_from,
                    event.gap_to,
                    event.earliest_seq,
                    event.head_seq,
                )
            case CaughtUp():
                fields = (event.topic.encode("ascii"), event.head_seq)
                return b'{"op":"caught_up","topic":"%b","head_seq":%d}' % fields
            case TopicDeleted():
                return b'{"op":"topic_deleted","topic":"%b","head_seq":%d,"reason":"%b"}' % (
                    event.topic.encode("ascii"),
                    event.head_seq,
                    event.reason.encode("ascii"),
                )

    def message(self, payload: bytes) -> dict[str, Any]:
        """The ASGI message that carries one payload."""
        return {"type": "websocket.send", "text": payload.decode()}

    def wire(self, payload: bytes) -> bytes:
        """One text frame from a server: final, not masked (RFC 6455, 5.2)."""
        size = len(payload)
        if size < 126:
            return b"\x81%c%b" % (size, payload)
        if size < 65_536:
            return b"\x81\x7e%b%b" % (size.to_bytes(2), payload)
        return b"\x81\x7f%b%b" % (size.to_bytes(8), payload)

    def last(self, code: int) -> dict[str, Any]:
        """The ASGI message that closes the socket."""
        return {"type": "websocket.close", "code": code}

    def position(self, topic: str, seq: int, head_seq: int) -> bytes:
        """A `skipped` message: no record up to `to_seq` passed the filter."""
        fields = (topic.encode("ascii"), seq, head_seq)
        return b'{"op":"skipped","topic":"%b","to_seq":%d,"head_seq":%d}' % fields

    def heartbeat(self, now_ms: int) -> bytes | None:
        """None: WebSocket pings serve as heartbeats."""
        return None

    def too_slow(self) -> bytes:
        """The last message to a client that does not read."""
        return _encode(
            {
                "op": "error",
                "code": SLOW_CONSUMER,
                "message": "the client did not read in time; connect and subscribe again",
            }
        )

    def failed(self, code: int, message: str) -> bytes:
        """The last message before a failed socket is closed."""
        assert code == 500, "the only reason there is"
        return _encode({"op": "error", "code": Code.INTERNAL.value, "message": message})


WS: Final = SocketDialect()


def _records(event: Records, cache: JsonCache) -> bytes:
    parts: list[bytes | memoryview] = [
        b'{"op":"record","topic":"%b","from_seq":%d,"to_seq":%d,"head_seq":%d,"records":['
        % (event.topic.encode("ascii"), event.from_seq, event.to_seq, event.head_seq)
    ]
    for piece in event.page.pieces:
        for part in cache.slices(piece.block, piece.rows, event.shown):
            parts.append(part)
            parts.append(b",")
    assert len(parts) > 1, "a frame has at least one record"
    parts[-1] = b"]}"
    return b"".join(parts)


# --- answers ------------------------------------------------------------------------------


def _opening(op: bytes, request_id: str | None) -> bytes:
    if request_id is None:
        return b'{"op":"%b"' % op
    return b'{"op":"%b","request_id":%b' % (op, _encode(request_id))


def subscribed(
    request_id: str | None,
    topics: Iterable[tuple[str, Subscribed]],
    left_out: Sequence[str] = (),
) -> bytes:
    """The answer to a subscribe: the start of each topic.

    `left_out`: topics with its prefixes beyond the limit of a socket.
    """
    topics_json = b",".join(
        b'"%b":{"from_seq":%d,"head_seq":%d,"earliest_seq":%d%b}'
        % (name.encode("ascii"), *fields[:3], b',"waiting":true' if fields.is_waiting else b"")
        for name, fields in topics
    )
    more = b',"left_out":%b' % _encode(left_out) if left_out else b""
    return b'%b,"topics":{%b}%b}' % (_opening(b"subscribed", request_id), topics_json, more)


def unsubscribed(
    request_id: str | None, names: Sequence[str], prefixes: Sequence[str] = (), *, is_list: bool
) -> bytes:
    """The answer to an unsubscribe: its topic (a list if the command had a list) and its prefixes.

    The answer to a command of prefixes alone names no topic.
    """
    parts = [_opening(b"unsubscribed", request_id)]
    if is_list:
        parts.append(b',"topics":%b' % _encode(names))
    elif names:
        parts.append(b',"topic":%b' % _encode(names[0]))
    if prefixes:
        parts.append(b',"prefixes":%b' % _encode(prefixes))
    return b"%b}" % b"".join(parts)


def topic_created(name: str, epoch: int) -> bytes:
    """The message that reports a new topic of a followed prefix.

    The topic is read from its first record.
    """
    return b'{"op":"topic_created","topic":"%b","epoch":%d}' % (name.encode("ascii"), epoch)


def left_out(most: int, names: Sequence[str]) -> bytes:
    """The message that names topics which match a prefix, but exceed the limit of a socket."""
    message = f"the socket follows {most} topics, its maximum; it leaves out more that match"
    detail = {"limit": "max_watch_topics", "topics": names}
    return error(None, TopicsError(Code.THROTTLED, message, detail))


def pong(request_id: str | None) -> bytes:
    """The answer to a ping."""
    return _opening(b"pong", request_id) + b"}"


def ack(
    request_id: str | None,
    name: str,
    done: Appended,
    *,
    with_seqs: bool,
    total_ms: float,
    producer: ProducerStamp | None = None,
    is_met: bool = False,
) -> bytes:
    """The answer to a publish: the fields of an append's answer, without those that are false.

    The answer to a producer's repeat has no seqs, unless it repeats that producer's last request.
    """
    fields = b"" if producer is None else _producer(producer, done)
    if is_met:
        fields += b'"condition":"met",'
    if done.repeat is not None and not done.repeat.is_last:
        return (
            b'%b,"topic":"%b","head_seq":%d,"deduped":true,%b'
            b'"performance":{"server_total_ms":%.3f}}'
        ) % (
            _opening(b"ack", request_id),
            name.encode("ascii"),
            done.head_seq,
            fields,
            total_ms,
        )
    first, last = done.first_seq, done.last_seq
    assert 0 < first <= last <= done.head_seq
    count = last - first + 1 if done.seqs is None else len(done.seqs)
    seqs = b""
    if with_seqs:
        seq_list = b"[%d]" % first
        if done.seqs is not None or first != last:
            seq_list = _encode(done.seqs or list(range(first, last + 1)))
        seqs = b'"seqs":%b,' % seq_list
    return (
        b'%b,"topic":"%b","first_seq":%d,"last_seq":%d,%b"head_seq":%d,"count":%d,%b%b%b'
        b'"performance":{"server_total_ms":%.3f,"wal_append_ms":%.3f,"fsync_ms":%.3f,'
        b'"throttle_wait_ms":%.3f}}'
    ) % (
        _opening(b"ack", request_id),
        name.encode("ascii"),
        first,
        last,
        seqs,
        done.head_seq,
        count,
        b'"created":true,' if done.created else b"",
        b'"deduped":true,' if done.deduped else b"",
        fields,
        total_ms,
        done.write_ms,
        done.sync_ms,
        done.throttle_wait_ms,
    )


def _producer(stamp: ProducerStamp, done: Appended) -> bytes:
    repeat = done.repeat
    epoch, seq = (stamp.epoch, stamp.seq) if repeat is None else (repeat.epoch, repeat.seq)
    return b'"producer_epoch":%d,"producer_seq":%d,' % (epoch, seq)


def error(request_id: str | None, refusal: TopicsError) -> bytes:
    """The answer to a command that was refused; `detail` as in the envelope."""
    fields: dict[str, Any] = {"op": "error"}
    if request_id is not None:
        fields["request_id"] = request_id
    return _encode(fields | described(refusal))
