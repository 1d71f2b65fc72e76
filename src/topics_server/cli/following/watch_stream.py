"""Follows topics over server-sent events without loss or repeats (§7).

Holds the common code of `tail` and `watch`: the session, its stream, and reconnecting after the
stream ends. It opens the next stream with the id of the last frame that it yielded; if the session
is gone, it makes a new one from that id. A frame moves a topic's `Position`; records at or below
that position are removed from later frames, so that no record is yielded twice.

`Positions` is plain state. `WatchFollower` drives it: blocking, one thread, frames as an iterator.
The socket's read timeout detects a dead server, because heartbeats arrive even without records.
"""

from __future__ import annotations

import functools
import ssl
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, ParamSpec, TypeVar

import click
import httpx
import httpx_sse
import msgspec

from topics_server.cli.amounts import duration
from topics_server.cli.connection import (
    CONNECT_S,
    CallRefused,
    Failure,
    ServerConnection,
    ServerUnreachable,
    reason_of,
    refusal,
    refused,
)
from topics_server.cli.output import note
from topics_server.cli.record_filters import filter_options

HEARTBEAT_MS: Final = 15_000
# How late a heartbeat may be before the connection counts as dead.
SLACK_S: Final = 5.0
# The wait before reconnecting, until the server sets another; and the longest wait, even if the
# server asks for more.
RETRY_MS: Final = 2000
RETRY_MAX_MS: Final = 30_000
# Answers and error frames after which the client must make a new session.
_GONE: Final = frozenset({404, 410})
_TAKEN_OVER: Final = 409


class RecordsFrame(msgspec.Struct):
    """`event: record`; records stay the server's bytes."""

    topic: str
    records: list[msgspec.Raw]
    from_seq: int
    to_seq: int


class TombstoneFrame(msgspec.Struct):
    """`event: tombstone`: seqs that are gone for good."""

    topic: str
    reason: str
    gap_from: int
    gap_to: int


class CaughtUpFrame(msgspec.Struct):
    """`event: caught-up`: later records are live."""

    topic: str
    head_seq: int


class TopicDeletedFrame(msgspec.Struct):
    """`event: topic-deleted`: this stream sends nothing more for this topic."""

    topic: str


class Trouble(msgspec.Struct):
    """`event: error`; `code` resembles an HTTP status."""

    code: int
    error: str = ""
    retry_after_ms: int = 0


Body = RecordsFrame | TombstoneFrame | CaughtUpFrame | TopicDeletedFrame | Trouble
_KINDS: Final[Mapping[str, msgspec.json.Decoder[Any]]] = {
    "record": msgspec.json.Decoder(RecordsFrame),
    "tombstone": msgspec.json.Decoder(TombstoneFrame),
    "caught-up": msgspec.json.Decoder(CaughtUpFrame),
    "topic-deleted": msgspec.json.Decoder(TopicDeletedFrame),
    "error": msgspec.json.Decoder(Trouble),
}


class Frame(msgspec.Struct, frozen=True):
    """One frame: its payload as sent and as a value (None for an unknown kind)."""

    id: str
    event: str
    payload: bytes
    body: Body | None


class _Opened(msgspec.Struct):
    from_seq: int


class _Session(msgspec.Struct):
    stream_url: str
    topics: dict[str, _Opened]
    ignored: list[str] = []


_SESSION: Final = msgspec.json.Decoder(_Session)


class _Seq(msgspec.Struct):
    seq: int = msgspec.field(name="$seq")


_SEQ: Final = msgspec.json.Decoder(_Seq)


def seq_of(record: msgspec.Raw) -> int:
    """The seq of a record."""
    return _SEQ.decode(record).seq


class Positions:
    """The position in each topic, and the topics that are deleted."""

    def __init__(self, start: Mapping[str, int]) -> None:
        self._seqs = dict(start)
        self._deleted: set[str] = set()

    @property
    def live(self) -> dict[str, int]:
        """Topics that are not deleted, each with the seq of its last yielded record."""
        return {name: seq for name, seq in self._seqs.items() if name not in self._deleted}

    def unseen(self, frame: RecordsFrame) -> list[msgspec.Raw]:
        """The frame's records that were not yielded before."""
        seq = self._seqs.get(frame.topic, 0)
        if frame.from_seq >= seq or frame.topic in self._deleted:
            return frame.records
        return [record for record in frame.records if seq_of(record) > seq]

    def take(self, body: Body) -> bool:
        """Move the position behind a frame.

        Returns False if the frame only repeats a topic's deletion.
        """
        match body:
            case RecordsFrame(topic=topic, to_seq=to_seq):
                self._move(topic, to_seq)
            case TombstoneFrame(topic=topic, reason="recreated", gap_to=gap_to):
                # a new log of the same name, whose seqs start at 1 again
                self._seqs[topic] = gap_to
                self._deleted.discard(topic)
            case TombstoneFrame(topic=topic, gap_to=gap_to):
                self._move(topic, gap_to)
            case CaughtUpFrame(topic=topic, head_seq=head_seq):
                self._move(topic, head_seq)
            case TopicDeletedFrame(topic=topic):
                is_news = topic not in self._deleted
                self._deleted.add(topic)
                return is_news
            case Trouble():
                pass
        return True

    def lost(self, remaining: set[str]) -> list[str]:
        """Store which topics a new session found. Returns those that were deleted since."""
        lost = [name for name in self.live if name not in remaining]
        self._deleted.update(lost)
        return lost

    def _move(self, topic: str, seq: int) -> None:
        # a new log replaced the old one, so the old position does not count
        is_new = topic in self._deleted
        self._seqs[topic] = seq if is_new else max(seq, self._seqs.get(topic, 0))
        self._deleted.discard(topic)


class _Ended(Exception):
    """The stream has ended and should be opened again after `wait_ms` (None: after `retry`)."""

    def __init__(self, reason: str, *, wait_ms: int | None = None, anew: bool = False) -> None:
        super().__init__(reason)
        self.wait_ms = wait_ms
        self.anew = anew


class WatchFollower:
    """Follows topics until the caller stops or all of them are deleted.

    `topics` and `options` are the body of `POST /v0/watch`. If the server refuses the first
    request, or later refuses permanently, `frames` raises `CallRefused`. If no server answers the
    first request, that is an error; later the follower waits for the server.
    """

    def __init__(
        self,
        client: ServerConnection,
        topics: Mapping[str, Mapping[str, Any]],
        options: Mapping[str, Any],
    ) -> None:
        assert topics, "at least one topic is followed"
        self._client = client
        self._options = {"heartbeat_ms": HEARTBEAT_MS, **options}
        self._last_id = ""
        self._retry_ms = RETRY_MS
        self._attempts = 0  # tries to open a stream since the last frame
        self._asked = topics
        self._stream_url = ""
        self._positions: Positions | None = None

    def frames(self) -> Iterator[Frame]:
        """Yield every frame in order; return when no topic is left."""
        self._positions = self._open()
        read_s = 2 * int(self._options["heartbeat_ms"]) / 1000 + SLACK_S
        timeout = httpx.Timeout(CONNECT_S, read=read_s)
        # SSL_CERT_FILE may name trusted certificates, as for the session's own connection.
        trusted = ssl.create_default_context() if self._client.url.startswith("https:") else False
        with httpx.Client(
            timeout=timeout,
            trust_env=False,
            verify=trusted,
            headers=self._client.authorization,
        ) as http:
            while self._positions.live:
                try:
                    if not self._stream_url:
                        yield from self._reopen()
                        continue
                    yield from self._stream(http)
                except _Ended as end:
                    self._prepare(end)
                except httpx.TransportError as error:
                    self._prepare(_Ended(_in_words(error)))

    # -- the session -----------------------------------------------------------------------------

    def _open(self) -> Positions:
        """Open the first session; errors go to the caller."""
        session = self._post("/v0/watch", {"topics": self._asked})
        return Positions({name: topic.from_seq for name, topic in session.topics.items()})

    def _reopen(self) -> Iterator[Frame]:
        """Make a new session that continues at the current positions; yields topics that no longer
        exist.
        """
        assert self._positions is not None
        topics = {name: {"from_seq": seq} for name, seq in self._positions.live.items()}
        body: dict[str, Any] = {"topics": topics}
        if self._last_id:
            body["cursor"] = self._last_id
        try:
            found = set(self._post("/v0/watch?lenient=true", body).topics)
        except ServerUnreachable as error:
            raise _Ended(error.message) from None
        except CallRefused as error:
            if error.status not in _GONE:
                raise _end_of(error) from None
            found = set()
        for name in self._positions.lost(found):
            payload = msgspec.json.encode({"topic": name, "reason": "deleted"})
            yield Frame(self._last_id, "topic-deleted", payload, TopicDeletedFrame(name))

    def _post(self, path: str, body: dict[str, Any]) -> _Session:
        text = msgspec.json.encode({**self._options, **body})
        # Safe to repeat: a surplus session expires.
        answer = self._client.call("POST", path, text, repeatable=True)
        self._client.close()  # a stream follows, which may last for days
        try:
            session = _SESSION.decode(answer)
        except msgspec.DecodeError as error:
            raise refused(
                200, "bad_answer", f"the answer is not from a topics server: {error}"
            ) from None
        if "filter" in session.ignored:
            raise Failure("the server is too old for a filter: it would send all records")
        self._stream_url = session.stream_url
        return session

    # -- the stream ------------------------------------------------------------------------------

    def _stream(self, http: httpx.Client) -> Iterator[Frame]:
        """Yield the frames of one stream; raises `_Ended` or a transport error at its end."""
        assert self._positions is not None
        headers = {"Last-Event-ID": self._last_id} if self._last_id else {}
        url = self._client.url + self._stream_url
        with httpx_sse.connect_sse(http, "GET", url, headers=headers) as source:
            response = source.response
            if response.status_code in _GONE:
                raise _Ended("the session is gone", wait_ms=0, anew=True)
            if response.status_code != 200:
                answer = response.read()
                retry_after = response.headers.get("Retry-After")
                raise _end_of(refusal(response.status_code, retry_after, answer))
            for event in source.iter_sse():
                if event.retry is not None:
                    self._retry_ms = event.retry
                if not event.data:
                    # If a filter left records out, a frame may hold a position alone.
                    self._last_id = event.id or self._last_id
                    continue
                frame = _frame(event)
                if isinstance(frame.body, Trouble):
                    yield frame
                    _heed(frame.body)
                elif self._hands_out(frame):
                    yield frame
                # Move the position only now: a frame that the caller did not finish must be sent
                # again.
                self._last_id = event.id or self._last_id
                self._attempts = 0
                if not self._positions.live:
                    return
        raise _Ended("the server ended the stream")

    def _hands_out(self, frame: Frame) -> bool:
        """Remove repeated records from a frame. Returns whether the caller gets the frame."""
        assert self._positions is not None
        if frame.body is None:
            return True
        if isinstance(frame.body, RecordsFrame):
            frame.body.records = self._positions.unseen(frame.body)
        return self._positions.take(frame.body)

    def _prepare(self, end: _Ended) -> None:
        """Print the reason once, and wait as long as the server asked, longer after each failed
        try.
        """
        if end.anew:
            self._stream_url = ""
        self._attempts += 1
        wait_ms = end.wait_ms
        if wait_ms is None or self._attempts > 1:
            # Make only one new session in a row without a wait.
            longer = self._retry_ms * 2 ** min(self._attempts - 1, 10)
            wait_ms = max(wait_ms or 0, min(longer, max(self._retry_ms, RETRY_MAX_MS)))
        if end.anew:
            note(f"{end}; opening a new session at the same position")
        elif self._attempts == 1:
            note(f"{end}; reconnecting")
        threading.Event().wait(wait_ms / 1000)


def _in_words(error: httpx.TransportError) -> str:
    if isinstance(error, httpx.ReadTimeout):
        return "the server is silent"
    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
        return f"cannot connect: {reason_of(error)}"
    if isinstance(error, httpx_sse.SSEError):
        return str(error)
    return "the connection broke"


def _frame(event: httpx_sse.ServerSentEvent) -> Frame:
    payload = event.data.encode()
    decoder = _KINDS.get(event.event)
    try:
        body = None if decoder is None else decoder.decode(payload)
    except msgspec.DecodeError as error:
        raise refused(200, "bad_frame", f"a {event.event} frame: {error}") from None
    return Frame(event.id, event.event, payload, body)


def _heed(trouble: Trouble) -> None:
    """React to an error frame: ignore it (429 is advice), make a new session, or reconnect."""
    text = f"{trouble.code} {trouble.error}".strip()
    if trouble.code == 429:
        return
    if trouble.code in _GONE or trouble.code == _TAKEN_OVER:
        raise _Ended(text, anew=True)
    raise _Ended(text, wait_ms=trouble.retry_after_ms)


def _end_of(error: CallRefused) -> Exception:
    """The `_Ended` for a temporary refusal."""
    if error.status == 429 or error.status >= 500:
        wait_ms = None if error.retry_after_s is None else int(error.retry_after_s * 1000)
        return _Ended(error.message, wait_ms=wait_ms)
    return error


# -- common options of both verbs ---------------------------------------------------

P = ParamSpec("P")
R = TypeVar("R")


def watch_options(verb: Callable[P, R]) -> Callable[..., R]:
    """Add the options of a watch; the verb gets them as `options`, fields of the request body."""

    @click.option("--node", multiple=True, help="Leave out what this node wrote; may be repeated.")
    @filter_options
    @click.option("--strong", is_flag=True, help="Only records that are synced to the disk.")
    @click.option("--meta/--no-meta", default=True, help="Show meta.")
    @click.option("--tags/--no-tags", default=False, help="Show tags.")
    @click.option(
        "--heartbeat-ms",
        "--heartbeat",
        "heartbeat_ms",
        type=duration(1000, 60_000),
        default="15s",
        show_default=True,
        help="How often an idle server sends a sign of life; reconnect after twice that time.",
    )
    @functools.wraps(verb)
    def with_options(
        *args: Any,
        node: tuple[str, ...],
        strong: bool,
        meta: bool,
        tags: bool,
        heartbeat_ms: int,
        passing: Any,
        **kwargs: Any,
    ) -> R:
        options: dict[str, Any] = {
            "heartbeat_ms": heartbeat_ms,
            "include_meta": meta,
            "include_tags": tags,
        }
        if strong:
            options["consistency"] = "strong"
        if passing is not None:
            options["filter"] = passing
        if node:
            options["node"] = node[0] if len(node) == 1 else list(node)
        return verb(*args, options=options, **kwargs)  # type: ignore[arg-type]

    return with_options
