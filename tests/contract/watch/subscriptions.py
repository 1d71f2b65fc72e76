"""Following topics over any carrier: one `Follower` over SSE, one over a WebSocket.

A follower converts each carrier's frames into the same five values, checks what §7 promises for
every single one (its exact fields, its order, its position after the one before) and keeps a
ledger: `seen`, `gaps`, `positions`. So the cases of `test_subscriptions.py` run over both carriers.
A frame that breaks a promise fails when it is read. `Clients` opens followers and closes them all.
"""

from __future__ import annotations

import base64
import contextlib
import copy
import json
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final

import httpx

from tests.contract.driver import Api, Json, eventually, good
from tests.contract.streams.streams import (
    DEADLINE_S,
    Event,
    NothingCame,
    RawWs,
    SseStream,
    StreamEnded,
    WsClient,
    gauges,
)

Topics = Mapping[str, Json]
REASONS: Final = frozenset(
    ("cap", "ttl", "mixed", "recreated", "from_seq_too_old", "damaged", "restart", "source_trim")
)


@dataclass(frozen=True, slots=True)
class Records:
    """New records of one topic; `text` is the frame's JSON as it came."""

    topic: str
    records: list[Json]
    from_seq: int
    to_seq: int
    head_seq: int
    text: bytes

    @property
    def seqs(self) -> list[int]:
        """The `$seq`s."""
        return [record["$seq"] for record in self.records]


@dataclass(frozen=True, slots=True)
class Gap:
    """A reported loss."""

    topic: str
    reason: str
    gap_from: int
    gap_to: int
    earliest_seq: int
    head_seq: int


@dataclass(frozen=True, slots=True)
class CaughtUp:
    """The topic is read up to its head."""

    topic: str
    head_seq: int


@dataclass(frozen=True, slots=True)
class Deleted:
    """The topic is gone."""

    topic: str
    head_seq: int
    reason: str


@dataclass(frozen=True, slots=True)
class Trouble:
    """An error frame."""

    code: int | str
    fields: Json


Frame = Records | Gap | CaughtUp | Deleted | Trouble
_FIELDS: Final[dict[str, frozenset[str]]] = {
    "record": frozenset(("topic", "records", "from_seq", "to_seq", "head_seq")),
    "tombstone": frozenset(("topic", "reason", "gap_from", "gap_to", "earliest_seq", "head_seq")),
    "caught-up": frozenset(("topic", "head_seq")),
    "topic-deleted": frozenset(("topic", "head_seq", "reason")),
}


def frame_of(kind: str, fields: Json, text: bytes) -> Frame:
    """A frame with exactly the fields its kind has."""
    if kind == "error":
        return Trouble(fields["code"], fields)
    assert kind in _FIELDS, f"unknown frame {kind!r}: {fields}"
    assert set(fields) == _FIELDS[kind], f"{kind} has {sorted(fields)}"
    for name, value in fields.items():
        if name.endswith("_seq") or name.startswith("gap_"):
            assert type(value) is int, f"{kind}.{name} is {value!r}"
            assert value >= 0, f"{kind}.{name} is {value!r}"
    if kind == "record":
        return Records(**fields, text=text)
    if kind == "tombstone":
        return Gap(**fields)
    return CaughtUp(**fields) if kind == "caught-up" else Deleted(**fields)


class Follower(ABC):
    """One reader of several topics on one connection, and its ledger."""

    def __init__(self, answered: Json) -> None:
        for facts in answered.values():
            assert set(facts) == {"from_seq", "head_seq", "earliest_seq"}, facts
        self.answered = answered
        self.positions: dict[str, int] = {n: f["from_seq"] for n, f in answered.items()}
        self.seen: dict[str, list[Json]] = {name: [] for name in answered}
        self.gaps: dict[str, list[Gap]] = {name: [] for name in answered}
        self.caught_up: set[str] = set()
        self.deleted: set[str] = set()

    @abstractmethod
    def _next(self, within_s: float) -> Frame: ...

    @abstractmethod
    def close(self) -> None:
        """Hang up."""

    def frame(self, within_s: float = DEADLINE_S) -> Frame:
        """The next frame, checked and added to the ledger."""
        frame = self._next(within_s)
        if isinstance(frame, Trouble):
            return frame
        assert frame.topic in self.positions, f"nobody asked for {frame}"
        assert frame.topic not in self.deleted, f"after topic-deleted: {frame}"
        position = self.positions[frame.topic]
        if isinstance(frame, Records):
            seqs = frame.seqs
            assert seqs, "a record frame has records"
            assert seqs == sorted(set(seqs)), seqs
            assert position <= frame.from_seq < seqs[0], (position, frame)
            assert seqs[-1] <= frame.to_seq <= frame.head_seq, frame
            self.seen[frame.topic] += frame.records
            self.positions[frame.topic] = frame.to_seq
        elif isinstance(frame, Gap):
            assert frame.reason in REASONS, frame
            if frame.reason == "recreated":
                assert frame.gap_from == 1, frame
                assert frame.gap_to == frame.earliest_seq - 1, frame
            else:
                assert position < frame.gap_from <= frame.gap_to <= frame.head_seq, (
                    position,
                    frame,
                )
                # A range that a router's source lost lies among existing records.
                assert frame.gap_to < frame.earliest_seq or frame.reason == "source_trim", frame
            self.gaps[frame.topic].append(frame)
            self.positions[frame.topic] = frame.gap_to
        elif isinstance(frame, CaughtUp):
            assert frame.head_seq >= position, (position, frame)
            self.caught_up.add(frame.topic)
            self.positions[frame.topic] = frame.head_seq
        else:
            assert frame.reason == "deleted", frame
            self.deleted.add(frame.topic)
        return frame

    def until(
        self, check: Callable[[Frame], bool], what: str = "", within_s: float = DEADLINE_S
    ) -> list[Frame]:
        """The frames up to and including the first that `check` accepts."""
        deadline = time.monotonic() + within_s
        frames: list[Frame] = []
        while not frames or not check(frames[-1]):
            try:
                frames.append(self.frame(deadline - time.monotonic()))
            except NothingCame:
                raise AssertionError(
                    f"not within {within_s} s: {what}; came: {str(frames[-5:])[:2000]}"
                ) from None
        return frames

    def drained(self, *topics: str, within_s: float = DEADLINE_S) -> list[Frame]:
        """The frames until each of these topics (default: all) sent caught-up."""
        wanted = set(topics or self.positions)
        if wanted <= self.caught_up:
            return []
        return self.until(lambda _: wanted <= self.caught_up, f"caught-up of {wanted}", within_s)

    def reads(self, topic: str, seq: int, within_s: float = DEADLINE_S) -> list[Frame]:
        """The frames until the record `seq` of the topic."""

        def is_there(_: Frame) -> bool:
            return bool(self.seen[topic]) and self.seen[topic][-1]["$seq"] >= seq

        return self.until(is_there, f"record {seq} of {topic}", within_s)

    def rest(self, within_s: float = DEADLINE_S) -> list[Frame]:
        """The frames until the server ends the connection, which it must do in time."""
        frames: list[Frame] = []
        deadline = time.monotonic() + within_s
        try:
            while True:
                frames.append(self.frame(deadline - time.monotonic()))
        except StreamEnded:
            return frames
        except NothingCame:
            raise AssertionError(f"not ended within {within_s} s") from None

    def quiet(self, for_s: float) -> None:
        """Check that only heartbeats come in this time."""
        try:
            frame = self.frame(for_s)
        except NothingCame:
            return
        raise AssertionError(f"came although nothing should: {str(frame)[:2000]}")

    def seqs(self, topic: str) -> list[int]:
        """Every received `$seq` of the topic, in order."""
        return [record["$seq"] for record in self.seen[topic]]

    def accounted(self, topic: str) -> list[int]:
        """The seqs of all received records and gaps, in order."""
        lost = [seq for gap in self.gaps[topic] for seq in range(gap.gap_from, gap.gap_to + 1)]
        return sorted(self.seqs(topic) + lost)


def map_of(id_: str) -> dict[str, int] | None:
    """The positions an id encodes, None if it is an opaque token."""
    try:
        padded = id_ + "=" * (-len(id_) % 4)
        decoded = json.loads(base64.b64decode(padded, altchars=b"-_", validate=True))
    except (ValueError, RecursionError):
        return None
    if not isinstance(decoded, dict):
        return None
    return decoded if all(type(seq) is int for seq in decoded.values()) else None


def id_of(positions: object) -> str:
    """The id of these positions, as the server writes it."""
    text = json.dumps(positions, separators=(",", ":"), ensure_ascii=False)
    return base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")


class SseFollower(Follower):
    """A follower over one event stream of a session; `ids` are the received ids."""

    def __init__(self, answered: Json, stream: SseStream) -> None:
        super().__init__(answered)
        self.stream = stream
        self.ids: list[str] = []

    def _next(self, within_s: float) -> Frame:
        event = self.stream.event(within_s)
        frame = frame_of(event.name, json.loads(event.data), event.data.encode())
        self._check(event, frame)
        return frame

    def _check(self, event: Event, frame: Frame) -> None:
        if isinstance(frame, Trouble):
            assert event.id is None, "an error never moves the position"
            return
        assert event.id, f"no id: {event.raw[:500]!r}"
        assert event.id.isascii()
        assert event.id.isprintable()
        self.ids.append(event.id)
        positions = map_of(event.id)
        if positions is None:
            return
        assert event.id == id_of(positions), "base64url without padding of compact JSON"
        assert list(positions) == list(self.positions), (positions, self.positions)
        if isinstance(frame, Records):
            after = frame.to_seq
        else:
            after = frame.gap_to if isinstance(frame, Gap) else frame.head_seq
        assert positions[frame.topic] == after, (positions, frame)
        for name, seq in positions.items():
            # Silently skipped records (a node's own, deleted ones) may be ahead of the received
            # ones.
            assert name == frame.topic or seq >= self.positions[name], (name, positions)

    def close(self) -> None:
        """Hang up."""
        self.stream.close()


_WS_KINDS: Final = {"caught_up": "caught-up", "topic_deleted": "topic-deleted"}


class WsFollower(Follower):
    """A follower over one WebSocket with one subscription."""

    def __init__(self, client: WsClient, topics: Topics, options: Json) -> None:
        client.send(op="subscribe", request_id="follower", topics=topics, **options)
        first = client.frame()
        assert first["op"] == "subscribed", first
        assert set(first) == {"op", "request_id", "topics"}, first
        assert first["request_id"] == "follower"
        super().__init__(first["topics"])
        self.client = client

    def _next(self, within_s: float) -> Frame:
        text = self.client.text(within_s)
        fields = json.loads(text)
        kind = fields.pop("op")
        return frame_of(_WS_KINDS.get(kind, kind), fields, text)

    def close(self) -> None:
        """Close the socket."""
        self.client.close()


class Session:
    """A watch session: the answer to its POST, and its streams."""

    def __init__(self, clients: Clients, api: Api, topics: Topics, options: Json) -> None:
        self.answer = good(api.http.post("/v0/watch", json={"topics": topics, **options}))
        self.wid: str = self.answer["wid"]
        self._clients = clients

    def stream(self, api: Api, last_id: str | None = None, **how: Any) -> SseFollower:
        """A GET on the session, with this `Last-Event-ID`."""
        headers = [] if last_id is None else [f"Last-Event-ID: {last_id}"]
        raw = self._clients.get(api, self.answer["stream_url"], headers, **how)
        if raw.status != 200:
            raise AssertionError(f"{raw.status} {raw.refusal().body[:500]!r}")
        follower = SseFollower(self.answer["topics"], raw)
        # The ledger's positions are lower bounds: an id may take the session back.
        places = map_of(last_id or "") or {}
        for name, seq in places.items():
            if name in follower.positions:
                follower.positions[name] = min(seq, follower.positions[name])
        return follower

    def of(self, clients: Clients) -> Session:
        """The same session, with its streams opened by other `clients`."""
        other = copy.copy(self)
        other._clients = clients
        return other

    def resumed(self, api: Api, before: SseFollower) -> SseFollower:
        """A GET that continues after `before`, with its ledger of positions."""
        follower = self.stream(api)
        follower.positions = dict(before.positions)
        return follower


def hang_up(api: Api, follower: Follower) -> None:
    """Close the connection and wait until the server has noticed, so that it sends nothing more."""
    before = gauges(api)[0]
    follower.close()
    eventually(lambda: gauges(api)[0] < before, "the server noticed the end")


def _at_most(api: Api, streams: int) -> None:
    eventually(lambda: gauges(api)[0] <= streams, "the streams are let go of")


class Clients:
    """Opens streams, sockets and followers; closes all at the end.

    At the end the server must have released each of them too. So a leaked stream is noticed, and
    the next test finds the gauges unchanged.
    """

    def __init__(self) -> None:
        self._open: list[SseStream | WsClient | RawWs] = []
        self._at_rest: dict[Api, int] = {}

    def _opens_at(self, api: Api) -> None:
        if api not in self._at_rest:
            self._at_rest[api] = gauges(api)[0]

    def __enter__(self) -> Clients:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close everything, and wait until the running servers noticed."""
        while self._open:
            self._open.pop().close()
        for api, streams in self._at_rest.items():
            # Send no request to a server that a test has stopped.
            with contextlib.suppress(httpx.TransportError, RuntimeError):
                _at_most(api, streams)
        self._at_rest.clear()

    def get(
        self,
        api: Api,
        target: str,
        headers: Sequence[str] = (),
        *,
        accept: str | None = "text/event-stream",
        receive_buffer_bytes: int = 0,
    ) -> SseStream:
        """A GET of an event stream, whatever it answers."""
        self._opens_at(api)
        lines = [*headers] if accept is None else [f"Accept: {accept}", *headers]
        stream = SseStream(api.url, target, lines, receive_buffer_bytes=receive_buffer_bytes)
        self._open.append(stream)
        return stream

    def session(self, api: Api, topics: Topics, **options: Any) -> Session:
        """A POST of a session."""
        return Session(self, api, topics, options)

    def ws(self, api: Api, **how: Any) -> WsClient:
        """A WebSocket."""
        self._opens_at(api)
        client = WsClient(api.url, **how)
        self._open.append(client)
        return client

    def raw_ws(self, api: Api, headers: Sequence[str] = ()) -> RawWs:
        """A WebSocket by hand."""
        self._opens_at(api)
        raw = RawWs.open(api.url, headers)
        self._open.append(raw)
        return raw

    def follow(
        self, carrier: str, api: Api, topics: Topics, receive_buffer_bytes: int = 0, **options: Any
    ) -> Follower:
        """Follow these topics over `sse` or `ws`."""
        if carrier == "sse":
            session = self.session(api, topics, **options)
            return session.stream(api, receive_buffer_bytes=receive_buffer_bytes)
        client = self.ws(api, receive_buffer_bytes=receive_buffer_bytes)
        return WsFollower(client, topics, options)
