"""Chaos of watchers: hundreds of streams come and go while writers write and the server is killed.

Owns the server, the writers, the watchers and the phases of a run: start, storm, calm, verdict. In
the calm phase nobody writes, and every watcher reads up to the head of all its topics; then
`watch_history` judges the events of each watcher, and a diff of every topic is compared with them.
One seed decides all random choices; only the scheduling of processes and sockets is not repeatable.
"""

from __future__ import annotations

import asyncio
import random
import signal
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tests.contract.driver import Server, eventually
from tests.crash.kills.ledger import Json
from tests.crash.kills.torture import read_view
from tests.crash.kills.writers import Connection
from tests.crash.watch.watch_history import (
    CaughtUp,
    Event,
    Gap,
    Gone,
    History,
    Loose,
    Records,
    Resume,
    Shown,
    Start,
    bind_sightings,
    check,
    compare_with_diff,
    read_record,
)
from tests.crash.watch.watch_ledger import Ledger
from tests.crash.watch.watch_wire import Broken, Frame, Frames, Http, Socket, Sse, Unreached
from tests.crash.watch.watch_writers import KINDS, NODES, TopicWriter
from tests.ports import lasting_port
from topics_server.wal.fs import OsFs
from topics_server.wal.tools.dump import verify

ENVIRONMENT: Final = {
    "TOPICS_SEGMENT_MAX_EVENTS": "200",
    "TOPICS_SEGMENT_MAX_AGE_MS": "500",
    "TOPICS_HOT_RETAIN_SEGMENTS": "1",
    "TOPICS_CHECKPOINT_INTERVAL_MS": "300",
    "TOPICS_WAL_FSYNC_INTERVAL_MS": "50",
    "TOPICS_WAL_SHARDS": "2",
    "TOPICS_BUFFER_GRACE_MS": "200",
    "TOPICS_SLOW_CONSUMER_TIMEOUT_MS": "1500",
}
_TOPICS_MAX: Final = 8
_MARKS: Final = 40
_AGAIN_S: Final = 0.05
_CALM_S: Final = 60.0
_SLOW_RECEIVE_BYTES: Final = 4096
# One stop in this many is clean: a drain and not a kill.
_CLEAN_STOP: Final = 0.2
_EVENTS_SHOWN: Final = 14
_ERRORS: Final = {408, 409, "slow_consumer"}


class Wrong(AssertionError):
    """The server broke a rule."""


@dataclass(slots=True)
class Storm:
    """The shared state of a run. `starts` counts the server's starts; `changes` is odd while the
    server is down: an end of a stream that saw it odd, or saw it change, is explained.
    """

    port: int
    ledger: Ledger
    topics: list[str]
    starts: int = 1
    changes: int = 0
    is_calm: asyncio.Event = field(default_factory=asyncio.Event)
    heads: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class Mark:
    """A received id, and the length of each history at that time."""

    id: str
    lengths: dict[str, int]


class Watcher:
    """One client: its requests, its histories, and how it disconnects and reconnects."""

    def __init__(self, name: str, storm: Storm, seed: str) -> None:
        self.name = name
        self.rng = random.Random(f"{seed}/{name}")
        self.storm = storm
        self.http = Http(storm.port)
        rng = self.rng
        self.topics = rng.sample(storm.topics, rng.randint(1, min(_TOPICS_MAX, len(storm.topics))))
        nodes = rng.sample(NODES, rng.choice((0, 0, 1, 2)))
        self.nodes = frozenset(nodes)
        data = rng.random() < 0.8
        self.shown = Shown(meta=rng.random() < 0.6, tags=rng.random() < 0.5, data=data)
        self.options: Json = {
            "limit": rng.choice((1, 3, 20, 256)),
            "max_batch_bytes": rng.choice((1, 500, 20_000, 262_144)),
            "include_meta": self.shown.meta,
            "include_tags": self.shown.tags,
            "include_data": self.shown.data,
        }
        if nodes:
            self.options["node"] = nodes[0] if len(nodes) == 1 else nodes
        self.is_slow = rng.random() < 0.2
        self.past: list[History] = []
        self.followed: dict[str, History] = {}
        self.frames = 0
        self.errors = 0
        self.at_start = 0  # the start of the server to which the last stream belonged
        self.changes = 0

    @property
    def histories(self) -> Iterable[History]:
        """All histories, also of topics that it no longer follows."""
        return [*self.past, *self.followed.values()]

    async def run(self) -> None:
        """Connect and disconnect until the calm, then read everything."""
        try:
            while not await self._once():
                pass
        finally:
            self.close()

    def close(self) -> None:
        """Close open connections."""
        self.http.close()

    async def _once(self) -> bool:
        """Use one connection; True when the watcher has read everything."""
        is_last = self.storm.is_calm.is_set() and not self.has_next()
        stream: Frames | None = None
        self.errors = 0
        self.opening()
        try:
            stream = await self.connect(is_last)
            if not is_last:
                await self._read_some(stream)
                return False
            await self._read_all(stream)
            return True
        except Unreached:
            await asyncio.sleep(_AGAIN_S)
        except Broken as error:
            if not self.is_explained() and self.errors == 0:
                raise Wrong(f"{self.name}: the connection ended for no reason: {error}") from None
        finally:
            if stream is not None:
                stream.abort()
        return False

    def has_next(self) -> bool:
        """Whether the next stream is already open."""
        return False

    def opening(self) -> None:
        """Note that a connection is requested: from now on an end of the server explains the
        connection's end.
        """
        self.changes = self.storm.changes

    def is_explained(self) -> bool:
        """Whether the server was, or is, stopping."""
        return self.changes % 2 == 1 or self.changes != self.storm.changes

    async def connect(self, is_last: bool) -> Frames:
        """Open a stream, and note its effect in the histories."""
        raise NotImplementedError

    def took(self, frame: Frame) -> None:
        """Note more of a frame."""

    # -- reading ---------------------------------------------------------------------------

    async def _read_some(self, stream: Frames) -> None:
        rng = self.rng
        loop = asyncio.get_running_loop()
        until = loop.time() + rng.choice((0.05, 0.5, 2.0, 5.0)) * rng.random()
        left = rng.choice((1, 10, 1000, 100_000))
        while left > 0 and loop.time() < until and not self.storm.is_calm.is_set():
            left -= await self.read(stream, max(0.0, until - loop.time()))
            if self.is_slow:
                await asyncio.sleep(rng.uniform(0.02, 0.4))

    async def _read_all(self, stream: Frames) -> None:
        while not self.has_all():
            await self.read(stream, _CALM_S)

    def has_all(self) -> bool:
        """Whether every followed topic is read up to its head."""
        heads = self.storm.heads
        return all(
            not history.is_gone and history.position == heads[name]
            for name, history in self.followed.items()
        )

    async def read(self, stream: Frames, within_s: float) -> int:
        """Read once and note the frames; return their number."""
        try:
            async with asyncio.timeout(within_s):
                frames = await stream.read()
        except TimeoutError:
            return 0
        for frame in frames:
            self._note(frame)
            self.took(frame)
        return len(frames)

    def _note(self, frame: Frame) -> None:
        self.frames += 1
        data = frame.data
        if frame.event == "error":
            self.errors += 1
            if data["code"] not in _ERRORS:
                raise Wrong(f"{self.name}: error frame {data}")
            return
        history = self.followed.get(data["topic"])
        if history is None:
            raise Wrong(f"{self.name}: a frame of {data['topic']}, which it does not follow")
        history.add(self._event(frame.event, data))

    def _event(self, event: str, data: Json) -> Event:
        at = self.storm.ledger.moment()
        head_seq = data["head_seq"]
        if event == "record":
            seen = []
            for record in data["records"]:
                one, problem = read_record(record, self.shown, self.storm.ledger)
                if problem is not None:
                    raise Wrong(f"{self.name}: {data['topic']}: {problem}")
                seen.append(one)
            return Records(at, data["from_seq"], data["to_seq"], head_seq, tuple(seen))
        if event == "tombstone":
            gap = data["reason"], data["gap_from"], data["gap_to"], data["earliest_seq"]
            return Gap(at, *gap, head_seq)
        if event == "caught-up":
            return CaughtUp(at, head_seq)
        assert event == "topic-deleted", event
        return Gone(at, head_seq)

    def story(self) -> str:
        """A description for reports."""
        return f"{self.name} {self.options} {'slow' if self.is_slow else ''}"


class SseWatcher(Watcher):
    """A session and its streams."""

    def __init__(self, name: str, storm: Storm, seed: str) -> None:
        super().__init__(name, storm, seed)
        rng = self.rng
        self.options["heartbeat_ms"] = rng.choice((1000, 15_000))
        self.options["consistency"] = rng.choice(("eventual", "eventual", "strong"))
        self.wid: str | None = None
        self.last: Mark | None = None  # the last id of the session, which a browser would send
        self.marks: deque[Mark] = deque(maxlen=_MARKS)
        self.is_fresh = True  # no stream of this session was requested
        self.next_stream: Sse | None = None  # another one has taken the session over

    def has_next(self) -> bool:
        return self.next_stream is not None

    def close(self) -> None:
        super().close()
        if self.next_stream is not None:
            self.next_stream.abort()

    async def connect(self, is_last: bool) -> Frames:
        if self.next_stream is not None:
            stream, self.next_stream = self.next_stream, None
            return stream
        how = self.rng.choice(("id", "id", "id", "older", "older", "none", "anew", "cursor"))
        if is_last:
            how = "id" if self.followed else "anew"
        if self.wid is None or how == "anew" or (how == "cursor" and self.last is not None):
            await self._open_session(self.last if how == "cursor" else None)
        return await self._stream(how)

    def _start(self, topic: str) -> Json:
        choices: list[Json] = [{}, {"from_seq": 0}, {"tail": True}]
        if "dropped" not in topic:  # a head only grows there, so this is not `recreated`
            head_seq = self.storm.ledger.topics[topic][-1].head_seq
            choices.append({"from_seq": self.rng.randint(0, head_seq)})
        return self.rng.choice(choices)

    async def _open_session(self, cursor: Mark | None) -> None:
        body: Json = {"topics": {topic: self._start(topic) for topic in self.topics}}
        if cursor is not None:
            body["cursor"] = cursor.id
        at = self.storm.ledger.moment()
        path = "/v0/watch?lenient=true"
        self.http.close()  # an idle connection may be closed at this very moment
        status, answer = await self.http.ask("POST", path, {**body, **self.options})
        if status in (429, 503):
            raise Unreached("later")
        if status != 200:
            raise Wrong(f"{self.name}: POST {path}: {status} {answer}")
        self.wid = answer["wid"]
        before = self.followed
        self.followed = {}
        for topic, place in answer["topics"].items():
            history = before.pop(topic, None)
            # The id of an earlier session has no position for a topic that was not in it.
            if cursor is None or history is None or topic not in cursor.lengths:
                self.past += [history] if history is not None else []
                history = History(topic, self.nodes)
                history.add(Start(at, place["from_seq"]))
            else:
                history.add(Resume(at, cursor.lengths[topic], "cursor"))
            self.followed[topic] = history
        self.past += before.values()
        self.at_start = self.storm.starts
        self.is_fresh = True
        self.last = None  # like a browser: the cursor was for this call and not for the stream
        self.marks.clear()

    async def _stream(self, how: str) -> Sse:
        """Open the session's stream, with or without an id."""
        stream = await self._dial()
        try:
            if self.is_fresh:
                self.is_fresh = False  # it begins at the session's start position
                await self._get(stream, None)
            elif how == "none" or self.last is None:
                await self._get_without_id(stream)
            else:
                if how == "older" and self.marks:
                    self._go_back()
                else:
                    self._resume("id")
                await self._get(stream, self.last.id)
        except BaseException:
            stream.abort()
            raise
        return stream

    def _go_back(self) -> None:
        """Choose an earlier id. Ids only move a session back, so later ids are now invalid."""
        index = self.rng.randrange(len(self.marks))
        self.last = self.marks[index]
        self.marks = deque(list(self.marks)[: index + 1], maxlen=_MARKS)
        self._resume("older", self.last.lengths)

    def _resume(
        self, how: str, lengths: dict[str, int] | None = None, at: int | None = None
    ) -> None:
        at = self.storm.ledger.moment() if at is None else at
        for topic, history in self.followed.items():
            history.add(Resume(at, None if lengths is None else lengths[topic], how))

    async def _get_without_id(self, stream: Sse) -> None:
        at = self.storm.ledger.moment()
        at_start = self.at_start
        try:
            await self._get(stream, None)
        finally:
            # The old stream may have continued until the new request arrived, and broke or got an
            # answer.
            self._go_on_without_id(at, at_start)

    def _go_on_without_id(self, at: int, at_start: int) -> None:
        is_restored = at_start != self.storm.starts
        if is_restored:
            # The session may be behind these, and an id leads forward on the first stream only.
            self.marks.clear()
            self.last = None
        cut = self.storm.ledger.moment()
        for history in self.followed.values():
            history.add(Loose(at, cut, is_restored))

    async def _dial(self) -> Sse:
        is_calm = self.storm.is_calm.is_set()
        size = _SLOW_RECEIVE_BYTES if self.is_slow and not is_calm else None
        return await Sse.dial(self.storm.port, size)

    async def _get(self, stream: Sse, last_id: str | None) -> None:
        await stream.ask(f"/v0/watch/{self.wid}", last_id)
        if stream.status != 200:
            raise Wrong(f"{self.name}: GET {self.wid}: {stream.status} {stream.refusal}")
        self.at_start = self.storm.starts

    def took(self, frame: Frame) -> None:
        if frame.event == "error":
            return
        if frame.id is None:
            raise Wrong(f"{self.name}: a frame without an id: {frame}")
        lengths = {topic: len(history.events) for topic, history in self.followed.items()}
        self.last = Mark(frame.id, lengths)
        self.marks.append(self.last)

    async def _read_some(self, stream: Frames) -> None:
        await super()._read_some(stream)
        if not self.storm.is_calm.is_set() and self.rng.random() < 0.15:
            await self._take_over(stream)

    async def _take_over(self, stream: Frames) -> None:
        """Request the session again; the server notifies and ends the older stream; nothing is
        lost.
        """
        at = self.storm.ledger.moment()
        at_start = self.at_start
        newer = await self._dial()
        try:
            await self._get(newer, None)
            while True:
                await self.read(stream, _CALM_S)
        except Broken:
            if not self.errors:
                self._go_on_without_id(at, at_start)
                raise
            self._resume("takeover", at=at)
            self.next_stream = newer
        finally:
            if self.next_stream is not newer:
                newer.abort()


@dataclass(slots=True, frozen=True)
class _Asked:
    """A subscribe without an answer yet."""

    at: int
    topic: str
    from_seq: int | None


class SocketWatcher(Watcher):
    """Subscriptions on a WebSocket; the client keeps its positions itself."""

    def __init__(self, name: str, storm: Storm, seed: str) -> None:
        super().__init__(name, storm, seed)
        self.asked: dict[str, _Asked] = {}
        self.number = 0

    async def connect(self, is_last: bool) -> Frames:
        stream = await Socket.open(self.storm.port)
        self.asked = {}
        self.past += self.followed.values()
        before, self.followed = self.followed, {}
        try:
            for topic in self.topics:
                await self._subscribe(stream, topic, before.get(topic))
            # If a topic was refused, it was just dropped; the last connection follows all topics.
            while self.asked:
                await self.read(stream, _CALM_S)
        except Broken:
            stream.abort()
            raise
        return stream

    async def _subscribe(self, stream: Socket, topic: str, before: History | None) -> None:
        rng = self.rng
        self.number += 1
        command = {"op": "subscribe", "request_id": f"{self.number}", "topic": topic}
        start: Json = rng.choice(({}, {"from_seq": 0}, {"tail": True}))
        if before is not None and not before.is_gone:
            start = {"from_seq": before.position}
        at = self.storm.ledger.moment()
        self.asked[f"{self.number}"] = _Asked(at, topic, start.get("from_seq"))
        await stream.send({**command, **start, **self.options})

    def _note(self, frame: Frame) -> None:
        request = self.asked.pop(frame.data.get("request_id", ""), None)
        if frame.event == "subscribed":
            assert request is not None, frame
            ((topic, place),) = frame.data["topics"].items()
            assert topic == request.topic, frame
            if request.from_seq not in (None, place["from_seq"]):
                raise Wrong(f"{self.name}: asked {request}, subscribed {place}")
            history = History(topic, self.nodes)
            history.add(Start(request.at, place["from_seq"]))
            self.followed[topic] = history
        elif frame.event == "error" and request is not None:
            if frame.data["code"] != "topic_not_found":
                raise Wrong(f"{self.name}: subscribe: {frame.data}")
        else:
            super()._note(frame)


class Chaos:
    """One run: watchers follow topics of a server that is killed again and again."""

    def __init__(self, directory: Path, seed: int, watchers: int, kills: int) -> None:
        self.seed = f"{seed}"
        self.kills = kills
        self.server = Server(directory, dict(ENVIRONMENT))
        self.rng = random.Random(f"{seed}/stops")
        self.ledger = Ledger()
        self.count = watchers
        self.watchers: list[Watcher] = []
        self.clean_stops = 0
        self.live: dict[str, dict[int, str]] = {}  # by topic, the diff at the end

    def run(self) -> None:
        """Run all phases; raises `Wrong` with the problem."""
        try:
            asyncio.run(self._storm_and_calm())
            problems = self._verdict()
        except* AssertionError as group:
            problems = [str(error) for error in group.exceptions]
        if problems:
            shown = "\n  ".join(problems[:12])
            raise Wrong(
                f"--seed {self.seed} --watchers {self.count} --kills {self.kills}, data kept in "
                f"{self.server.directory}; {len(problems)} problems:\n  {shown}"
            )

    def tear_down(self) -> None:
        """End the server in any state."""
        if self.server.process is not None:
            self.server.signal(signal.SIGKILL)

    def story(self) -> str:
        """One line of figures."""
        frames = sum(watcher.frames for watcher in self.watchers)
        events = [e for w in self.watchers for h in w.histories for e in h.events]
        kinds = {
            kind.__name__: sum(isinstance(event, kind) for event in events)
            for kind in (Records, Gap, CaughtUp, Gone, Start, Resume, Loose)
        }
        records = sum(len(event.seen) for event in events if isinstance(event, Records))
        reasons = sorted({event.reason for event in events if isinstance(event, Gap)})
        lives = sum(len(lives) for lives in self.ledger.topics.values())
        return (
            f"{self.count} watchers, {self.kills} kills and {self.clean_stops} clean stops; "
            f"{len(self.ledger.written)} records written into {lives} incarnations of "
            f"{len(self.ledger.topics)} topics; {records} delivered in {frames} frames; "
            f"{kinds}; tombstones {reasons}"
        )

    # -- the run ---------------------------------------------------------------------------

    async def _storm_and_calm(self) -> None:
        port = lasting_port()
        self.server.env = {**ENVIRONMENT, "TOPICS_PORT": str(port)}
        await asyncio.to_thread(self.server.start)
        # Few enough records that the watchers wait for the server and not for this process.
        pause_s = 0.1 + 0.002 * self.count
        writers = [
            TopicWriter(port, number, self.ledger, self.seed, pause_s)
            for number in range(len(KINDS))
        ]
        for writer in writers:
            await writer.create()
        storm = Storm(port, self.ledger, [writer.name for writer in writers])
        self.watchers = [
            (SocketWatcher if number % 5 == 4 else SseWatcher)(f"w{number}", storm, self.seed)
            for number in range(self.count)
        ]
        async with asyncio.TaskGroup() as group:
            watching = {group.create_task(w.run(), name=w.name) for w in self.watchers}
            stop_writing = asyncio.Event()
            writing = [group.create_task(writer.run(stop_writing)) for writer in writers]
            await self._stops(storm)
            stop_writing.set()
            await asyncio.wait(writing)
            for writer in writers:
                storm.heads[writer.name] = await writer.finish()
            storm.is_calm.set()
            _, late = await asyncio.wait(watching, timeout=_CALM_S)
            if late:
                raise Wrong(f"not all has arrived after {_CALM_S} s: {self._stuck(late)}")

    async def _stops(self, storm: Storm) -> None:
        """Kill and restart; sometimes stop the server cleanly instead."""
        kills = 0
        while kills < self.kills:
            await asyncio.sleep(self.rng.uniform(0.7, 2.0))
            is_clean = self.rng.random() < _CLEAN_STOP
            process = self.server.process
            assert process is not None
            if process.poll() is not None:
                raise Wrong(f"the server ended by itself, see {self.server.log}")
            storm.changes += 1
            end = self.server.stop if is_clean else self._kill
            await asyncio.to_thread(end)
            kills += not is_clean
            self.clean_stops += is_clean
            self.ledger.stops.append(self.ledger.moment())
            storm.starts += 1
            await asyncio.to_thread(self.server.start)
            storm.changes += 1
        await asyncio.sleep(0.7)

    def _kill(self) -> None:
        self.server.signal(signal.SIGKILL)

    def _stuck(self, late: set[asyncio.Task[None]]) -> list[str]:
        names = {task.get_name(): _where(task) for task in late}
        heads = self.watchers[0].storm.heads
        return [
            f"{w.name} {w.options} in {names[w.name]}: "
            + ", ".join(
                f"{name[:24]} at {h.position}{' gone' if h.is_gone else ''} of {heads[name]}, last "
                + "; ".join(map(_brief, h.events[-_EVENTS_SHOWN:]))
                for name, h in w.followed.items()
                if h.is_gone or h.position != heads[name]
            )
            for w in self.watchers
            if w.name in names
        ][:5]

    # -- the verdict -----------------------------------------------------------------------

    def _verdict(self) -> list[str]:
        """Judge every history; then compare a diff of every topic with the histories that reached
        it.
        """
        everything = [history for watcher in self.watchers for history in watcher.histories]
        problems = bind_sightings(everything, self.ledger)
        self.live = live = self._live()
        for watcher in self.watchers:
            found: list[str] = []
            for history in watcher.past:
                found += check(history, self.ledger, is_complete=False)
            for history in watcher.followed.values():
                found += check(history, self.ledger)
                found += compare_with_diff(history, live[history.topic], self.ledger)
            problems += [f"{watcher.name} {watcher.options}: {problem}" for problem in found]
        return problems + self._clean_end()

    def _live(self) -> dict[str, dict[int, str]]:
        """The records of a diff from 0 of each topic."""
        connection = Connection(self.watchers[0].storm.port)
        live: dict[str, dict[int, str]] = {}
        try:
            for name in self.ledger.topics:
                view = read_view(connection, name)
                assert view is not None, f"{name} is gone"
                live[name] = {record["$seq"]: record["data"]["id"] for record in view.records}
        finally:
            connection.close()
        return live

    def _clean_end(self) -> list[str]:
        """Check that no stream remains, that the server ends cleanly, and that its files are
        whole.
        """
        api = self.server.api

        def open_streams() -> int:
            gauges = api.http.get("/v0/metrics", headers={"Accept": "application/json"}).json()
            return int(gauges["topics_sse_connections"])

        eventually(lambda: open_streams() == 0, "all streams are closed")
        self.server.stop()
        report = verify(OsFs(), str(self.server.data_dir), None)
        return [f"verify: {problem}" for problem in report.problems]


def _brief(event: Event) -> str:
    """An event without its records."""
    if isinstance(event, Records):
        seqs = f"{event.from_seq}..{event.to_seq} of {event.head_seq}"
        return f"{event.at} records {seqs} ({len(event.seen)})"
    return str(event)


def _where(task: asyncio.Task[None]) -> str:
    """The coroutines in which a task waits, outermost first."""
    names: list[str] = []
    inner: Any = task.get_coro()
    while inner is not None and hasattr(inner, "cr_code"):
        line = inner.cr_frame.f_lineno if inner.cr_frame else 0
        names.append(f"{inner.cr_code.co_name}:{line}")
        inner = inner.cr_await
    return " > ".join(names)
