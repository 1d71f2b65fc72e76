"""Random calls through both APIs of one node on a fake disk: each shows a fold of the same history.

Writes come as `/v0` appends and as stream appends, in any mix, with and without traces. Streams are
made, forked, closed and deleted. Records are deleted by range, by tag and by seq, or lost to a cap.
Segments are tiny, checkpoints are taken, and the node stops, is killed, or loses its power (class
fsync only). Between the calls the test reads through each API: whole diffs in pages of any size,
streams from offsets kept since the beginning of the run, waiting long-polls, and followers as of a
watch. The model is one list of records for each topic (`doors_truth`). The seed decides the whole
run.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import replace
from typing import Any, Final

from tests.model.two_apis.doors_truth import PlainStream, Rec
from tests.model.world import World
from topics_server.api.messages.responses import render_page
from topics_server.engine.answers import ReadRequest
from topics_server.engine.subscribe.cursors import Cursor
from topics_server.engine.subscribe.dispatcher import Writes
from topics_server.engine.subscribe.subscription import (
    EventBatch,
    Records,
    Subscription,
    SubscriptionOptions,
)
from topics_server.node.node import Node
from topics_server.streams.offsets import position_of, text_of
from topics_server.streams.values import (
    BEGINNING,
    AppendAsked,
    CreateAsked,
    ForkAsked,
    Position,
    StreamPage,
)
from topics_server.values.appends import decode_append
from topics_server.values.errors import Code, StorageError, TopicsError
from topics_server.values.json_cache import DATA, META, TAGS, JsonCache
from topics_server.values.model import Durability, TagMatch, TopicConfig
from topics_server.values.record_codecs import with_trace
from topics_server.wal.tools.dump import verify

JSON: Final = "application/json"
PATHS: Final = ("chat", "logs/2024 é", "blob", "forks/a", "forks/b", "deep")
_TYPES: Final = (JSON, JSON, "text/plain; charset=utf-8", "application/octet-stream")
_ALL: Final = TAGS | META | DATA
_WAIT_MS: Final = 100.0


class Follower:
    """One topic followed as by a watch: the records it got so far."""

    def __init__(self, node: Node, stream: PlainStream) -> None:
        self.dispatcher = node.fanout.dispatcher
        self.stream = stream
        self.from_seq = stream.head
        self.seen: dict[int, bytes] = {}
        self.is_over = False
        cursor = Cursor(stream.name, stream.topic_id, 1, stream.head)
        subscription = self.dispatcher.follow(self, cursor, SubscriptionOptions(limit=3))
        assert subscription is not None
        subscription.was_away = False
        self.subscription = subscription

    def notify(self, subscription: Subscription) -> None:
        """See `dispatcher.Reader`."""

    def give(
        self, subscription: Subscription, batch: EventBatch, now: float, writes: Writes
    ) -> bool:
        """See `dispatcher.Reader`: it accepts no direct delivery."""
        return False

    def fail(self, subscription: Subscription, error: TopicsError | StorageError) -> None:
        """See `dispatcher.Reader`."""
        raise error

    def pump(self) -> None:
        """See `dispatcher.Reader`."""
        if self.is_over or self.subscription.is_fetching:
            return
        batch = self.dispatcher.read(self, self.subscription, may_fetch=True)
        if batch is None:
            return
        for event in batch.events:
            if isinstance(event, Records):
                self._take(event)
        self.subscription.move(batch, batch.end_seq)
        self.is_over = batch.is_last
        if batch.more:
            self.dispatcher.again(self)

    def _take(self, event: Records) -> None:
        for piece in event.page.pieces:
            for row in piece.rows:
                seq = piece.block.first_seq + row
                assert seq > max(self.seen, default=self.from_seq), "told twice, or out of order"
                self.seen[seq] = bytes(piece.block.data(row))

    def check(self) -> None:
        """Check that it got all live records, and none that never existed."""
        history, records = self.stream.history, self.stream.records
        told = {seq: rec.data for seq, rec in history.items() if seq in self.seen}
        assert self.seen == told, f"{self.stream.path}: a follower was told {self.seen}"
        missing = [seq for seq in records if seq > self.from_seq and seq not in self.seen]
        assert not missing, f"{self.stream.path}: a follower was not told of {missing}"


def _traced(new: list[Rec], trace: bytes) -> list[Rec]:
    return [replace(rec, trace=trace.decode()) for rec in new]


class DoorsSimulation:
    """One run of this many calls."""

    def __init__(self, seed: int, *, calls: int = 60) -> None:
        self.seed = seed
        self.rng = rng = random.Random(f"doors {seed}")
        self.calls = calls
        self.is_fsync = rng.random() < 0.5
        changes: dict[str, Any] = {"wal_shards": rng.choice((1, 2))}
        changes["segment_max_events"] = rng.choice((2, 5, 12))
        if rng.random() < 0.4:
            changes["cold_dir"] = "cold"
            changes["hot_retain_segments"] = 1
        if rng.random() < 0.5:
            changes["checkpoint_interval_ms"] = rng.choice((300, 900))
        self.world = World(seed, **changes)
        self.streams: dict[str, PlainStream] = {}
        self.offsets: dict[str, list[str]] = {path: [] for path in PATHS}
        self.followers: list[Follower] = []
        self.counts: Counter[str] = Counter()
        # A random generator of its own, so that earlier seeds still give the same runs.
        self._trace_dice = random.Random(f"traces {seed}")
        # While a reader waits on a stream, the next write goes to that stream.
        self._aim: list[str] = []
        self._ids = 0

    def run(self) -> None:
        """Run all calls and a last check."""
        steps: list[tuple[int, Callable[[], Coroutine[Any, Any, None]]]] = [
            (6, self._create),
            (14, self._append),
            (14, self._append_stream),
            (2, self._close),
            (2, self._drop),
            (5, self._delete),
            (4, self._fork),
            (6, self._diff),
            (10, self._read),
            (6, self._wait),
            (3, self._follow),
            (4, self._tend),
        ]
        names = [step for weight, step in steps for _ in range(weight)]
        with self.world.life(self.seed):
            self.world.start()
            for _ in range(self.calls):
                if self.rng.random() < 0.06:
                    self._restart()
                step = self.rng.choice(names)
                self.counts[step.__name__.strip("_")] += 1
                self.world.run(self._quiet(step))
            self._restart()
            self.world.stop()
            problems = verify(self.world.disk, "data", self.world.changes.get("cold_dir")).problems
            assert problems == [], problems

    @property
    def node(self) -> Node:
        """The running node."""
        assert self.world.node is not None
        return self.world.node

    async def _quiet(self, step: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Do one step, until all notified readers have read."""
        await step()
        await asyncio.sleep(0.02)
        for follower in self.followers:
            is_there = self.streams.get(follower.stream.path) is follower.stream
            assert follower.is_over != is_there
            if is_there:
                follower.check()
        self.followers = [follower for follower in self.followers if not follower.is_over]

    def _restart(self) -> None:
        """Stop, die or lose the power; then read every topic completely through both APIs."""
        ends = ("clean", "kill", "power") if self.is_fsync else ("clean", "kill")
        end = self.rng.choice(ends)
        self.counts[end] += 1
        self.followers = []
        if end == "clean":
            self.world.stop()
        else:
            self.world.crash("kill" if end == "kill" else "power")
        self.world.start()
        self.world.run(self._look_at_all())

    async def _look_at_all(self) -> None:
        for path in PATHS:
            stream = self.streams.get(path)
            if stream is not None:
                await self._check_diff(stream)
                for text in self.offsets[path][-12:]:
                    await self._check_read(path, text)

    # -- creating and removing -------------------------------------------------------------

    async def _create(self) -> None:
        rng = self.rng
        path = rng.choice(PATHS)
        content_type = rng.choice(_TYPES)
        body, new = b"", list[Rec]()
        if rng.random() < 0.4:
            body, new = self._body(content_type)
        closes = rng.random() < 0.08
        trace = self._trace()
        new = _traced(new, trace)
        asked = CreateAsked(content_type, body=body, closes=closes, trace=trace)
        old = self.streams.get(path)
        if old is None and self._is_held(path):
            await self._refused(self.node.streams.create(path, asked), Code.STREAM_CONFLICT)
            return
        if old is not None:
            is_same = (old.content_type, old.is_closed) == (content_type, closes)
            if is_same and not old.ancestors:
                made = await self.node.streams.create(path, asked)
                assert not made.is_new
                assert made.view.tail == old.position(old.head)
            else:
                await self._refused(self.node.streams.create(path, asked), Code.STREAM_CONFLICT)
            return
        made = await self.node.streams.create(path, asked)
        assert made.is_new
        stream = PlainStream(path, made.view.topic, made.view.topic_id, content_type)
        stream.is_closed = closes
        stream.append(new)
        await self._adopt(stream)
        self._keep(stream, made.view.tail)
        assert made.view.tail == stream.position(stream.head)

    async def _adopt(self, stream: PlainStream) -> None:
        self.streams[stream.path] = stream
        if not stream.ancestors and self.rng.random() < 0.25:
            stream.cap_records = self.rng.choice((3, 8))
            stream.append([])
        durability = Durability.FSYNC if self.is_fsync else Durability.DISK
        config = TopicConfig(durability=durability, cap_records=stream.cap_records)
        await self.node.store.put_topic(stream.name, config, keep_type=False)

    def _is_held(self, path: str) -> bool:
        above = [each for stream in self.streams.values() for each in stream.ancestors]
        return any(ancestor[0] == path for ancestor in above)

    async def _drop(self) -> None:
        path = self.rng.choice(PATHS)
        if path not in self.streams:
            await self._refused(self.node.streams.delete(path), self._absent(path))
            return
        if self.rng.random() < 0.3:
            assert await self.node.store.drop_topic(self.streams[path].name, if_empty=False)
        else:
            await self.node.streams.delete(path)
        del self.streams[path]

    def _absent(self, path: str) -> Code:
        return Code.STREAM_GONE if self._is_held(path) else Code.STREAM_NOT_FOUND

    async def _close(self) -> None:
        stream = self._any()
        if stream is not None:
            done = await self.node.streams.close(stream.path, None)
            assert done.tail == stream.position(stream.head)
            stream.is_closed = True

    def _any(self, *, path: str | None = None) -> PlainStream | None:
        found = [each for each in self.streams.values() if path in (None, each.path)]
        return self.rng.choice(found) if found else None

    # -- writing ---------------------------------------------------------------------------

    async def _append(self) -> None:
        """Append through `/v0`, which creates a missing topic."""
        rng = self.rng
        path = rng.choice(self._aim or [*self.streams, "chat", "blob"])
        stream = self.streams.get(path)
        new = [self._json(tagged=True) for _ in range(rng.choice((1, 1, 2, 5)))]
        body = b'{"records":[%b]}' % b",".join(map(_as_record, new))
        trace = self._trace()
        decoded, new = with_trace(decode_append(body), trace), _traced(new, trace)
        name = path if stream is None else stream.name
        call = self.node.store.append(name, body, decoded, header_key=None, config=None)
        if stream is not None and stream.is_closed:
            await self._refused(call, Code.STREAM_CLOSED)
            return
        if stream is None and self._is_held(path):
            # A deleted stream that has forks holds its name for both APIs.
            await self._refused(call, Code.STREAM_GONE)
            return
        done = await call
        if stream is None:
            topic_id = self.node.store.topic(name).topic_id
            stream = PlainStream(path, name, topic_id, JSON)
            stream.append(new)
            await self._adopt(stream)
        else:
            stream.append(new)
        assert (done.first_seq, done.last_seq) == (stream.head - len(new) + 1, stream.head)

    async def _append_stream(self) -> None:
        path = self.rng.choice(self._aim or [*self.streams, self.rng.choice(PATHS)])
        stream = self.streams.get(path)
        body, new = self._body(stream.content_type if stream is not None else JSON)
        closes = self.rng.random() < 0.03
        trace = self._trace()
        content_type = stream.content_type if stream is not None else JSON
        asked, new = AppendAsked(content_type, closes=closes, trace=trace), _traced(new, trace)
        call = self.node.streams.append(path, body, asked)
        if stream is None:
            await self._refused(call, self._absent(path))
            return
        if stream.is_closed:
            error = await self._refused(call, Code.STREAM_CLOSED)
            assert error.detail is not None
            assert error.detail["next_offset"] == text_of(stream.position(stream.head))
            return
        done = await call
        stream.append(new)
        stream.is_closed = closes
        assert (done.tail, done.is_closed) == (stream.position(stream.head), closes)
        self._keep(stream, done.tail)

    def _body(self, content_type: str) -> tuple[bytes, list[Rec]]:
        rng = self.rng
        if content_type == JSON:
            new = [self._json() for _ in range(rng.choice((1, 1, 2, 4)))]
            if len(new) == 1 and not new[0].data.startswith(b"[") and rng.random() < 0.5:
                return b" %b\n" % new[0].data, new
            return b"[ %b]" % b" ,\n".join(rec.data for rec in new), new
        self._ids += 1
        odd = rng.choice((b"", b"\x00\xff\r\n", b'{"data":', b"\n", b" ", "é".encode()))
        data = b"%d%b%b" % (self._ids, odd, b"x" * rng.choice((0, 2, 300)))
        return data, [Rec(data, content_type)]

    def _json(self, *, tagged: bool = False) -> Rec:
        rng = self.rng
        self._ids += 1
        forms = (b"%d", b'{"id": %d , "id":1e400}', b'["\\u00e9",  %d]', b'"%d\\n"')
        data = rng.choice(forms) % self._ids
        if not tagged:
            return Rec(data)
        meta = b'{"m":%d }' % self._ids if rng.random() < 0.3 else b""
        tag = rng.choice((None, "a", "a:1", "a:2", "b"))
        return Rec(data, None, meta, tag, rng.choice((None, None, "n1")))

    def _trace(self) -> bytes:
        """The trace of the next write, if it has one."""
        number = self._trace_dice.randint(1, 2**64)
        return b"00-%032x-00f067aa0ba902b7-01" % number if number % 2 else b""

    async def _delete(self) -> None:
        stream, rng = self._any(), self.rng
        if stream is None:
            return
        store = self.node.store
        if rng.random() < 0.4:
            seqs = sorted({rng.randint(1, stream.head + 2) for _ in range(rng.randint(1, 4))})
            done = await store.delete_seqs(stream.name, seqs)
            assert done.seqs == stream.delete(seqs)
            return
        before_seq = rng.randint(stream.earliest, stream.head + 1)
        matches = (TagMatch("a"), TagMatch("a:", is_prefix=True), TagMatch("", is_prefix=True))
        match = rng.choice((None, *matches))
        if match is not None and rng.random() < 0.5:
            found = await store.delete(stream.name, before_seq=None, match=match)
            hit = stream.hits(None, match)
        else:
            found = await store.delete(stream.name, before_seq=before_seq, match=match)
            hit = stream.hits(before_seq, match)
        assert found.deleted == len(stream.delete(hit))

    async def _fork(self) -> None:
        source, rng = self._any(), self.rng
        path = rng.choice(PATHS)
        if source is None or path in self.streams or self._is_held(path):
            return
        at = None
        if rng.random() < 0.7:
            at = source.position(rng.randint(0, source.head))
        upto = source.head if at is None else at.seq
        live = [seq for seq in source.records if seq > upto]
        fork = PlainStream(path, "", 0, source.content_type, source.cap_records)
        sub_offset, prefix = 0, b""
        if at is not None and live and not source.cap_records and rng.random() < 0.4:
            sub_offset = rng.randint(1, 3)
            if source.is_json:
                sub_offset = min(sub_offset, len(live))
                upto = live[sub_offset - 1]
            else:
                data = source.records[live[0]].data
                sub_offset = min(sub_offset, len(data))
                prefix = data[:sub_offset]
                upto = live[0] if sub_offset == len(data) else upto
                prefix = b"" if sub_offset == len(data) else prefix
        body, new = b"", list[Rec]()
        if not source.cap_records and rng.random() < 0.3:
            body, new = self._body(source.content_type)
        trace = self._trace()
        asked = CreateAsked(fork=ForkAsked(source.path, at, sub_offset), body=body, trace=trace)
        made = await self.node.streams.create(path, asked)
        assert made.is_new
        fork.name, fork.topic_id = made.view.topic, made.view.topic_id
        tail = made.view.tail.seq - len(new) - bool(prefix)
        # The fork may also share deleted records after the last requested message.
        assert upto <= tail < min([seq for seq in source.records if seq > upto], default=tail + 1)
        fork.head, fork.floor = tail, min(source.floor, tail + 1)
        fork.records = {seq: rec for seq, rec in source.records.items() if seq <= tail}
        fork.history = dict(fork.records)
        above = [(each[0], each[1], min(each[2], tail)) for each in source.ancestors]
        fork.ancestors = [*above, (source.path, source.topic_id, tail)]
        fork.append([Rec(prefix, source.content_type)] if prefix else [])
        fork.append(_traced(new, trace))
        assert made.view.tail == fork.position(fork.head)
        self.streams[path] = fork
        self.counts["forked"] += 1
        self._keep(fork, made.view.tail)
        await self._check_diff(fork)
        await self._check_read(path, "-1")

    # -- reading ---------------------------------------------------------------------------

    async def _diff(self) -> None:
        stream = self._any()
        if stream is not None:
            await self._check_diff(stream, self.rng.randint(0, stream.head))

    async def _check_diff(self, stream: PlainStream, from_seq: int = 0) -> None:
        """Read to the head in pages of any size: records as in the contract, and the gap."""
        cache = JsonCache()
        shown: list[dict[str, Any]] = []
        gaps: list[tuple[int, int]] = []
        cursor = from_seq
        while True:
            request = ReadRequest(cursor, self.rng.choice((1, 3, 100)), self.rng.choice((1, 1000)))
            page = await self.node.store.read(stream.name, request)
            body = b"".join(render_page(stream.name, page, _ALL, cache)) + b'"performance":{}}'
            told = json.loads(body)
            shown += told["records"]
            if told["tombstone"] is not None:
                gaps.append((told["tombstone"]["gap_from"], told["tombstone"]["gap_to"]))
            for rec in told["records"]:
                kept = stream.records.get(rec["$seq"])
                is_verbatim = kept is None or kept.content_type or b'"data":' + kept.data in body
                assert is_verbatim, f"{kept} is not verbatim in {body!r}"
            cursor = told["next_from_seq"]
            if told["caught_up"]:
                break
        wanted = [rec.shown(seq) for seq, rec in stream.records.items() if seq > from_seq]
        for rec in shown:
            assert rec.pop("$ts") <= self.world.clock.max_ms
        assert shown == wanted, f"{stream.path}: a diff from {from_seq} shows {shown}"
        gap_to = stream.gap_after(from_seq)
        assert gaps == ([] if gap_to is None else [(from_seq + 1, gap_to)])
        assert cursor == stream.head

    async def _read(self) -> None:
        path = self.rng.choice(PATHS)
        texts = ["-1", *self.offsets[path]]
        await self._check_read(path, self.rng.choice(texts))

    async def _check_read(self, path: str, text: str) -> None:
        """Read a stream to its end from an offset of any age: the live records' bytes, or 410."""
        stream = self.streams.get(path)
        at = BEGINNING if text == "-1" else position_of(text, "offset")
        explicit = self.rng.random() < 0.7
        if stream is None:
            await self._refused(self._page(path, at, explicit), self._absent(path))
            return
        wanted, then = stream.after(at, explicit=explicit)
        if isinstance(wanted, Code):
            error = await self._refused(self._page(path, at, explicit), wanted)
            self.counts["410"] += 1
            if then is not None:
                assert (error.detail or {}).get("next_offset") == text_of(then)
                await self._check_read(path, text_of(then))
            return
        assert then is not None
        datas: list[bytes] = []
        ends: list[Position] = []
        for _ in range(1000):
            page = await self._page(path, at, explicit)
            datas += map(bytes, page.datas)
            ends += page.ends
            at, explicit = page.next, True
            if page.is_up_to_date:
                break
            assert page.datas
        records = [stream.records[seq] for seq in wanted]
        assert datas == [rec.data for rec in records], f"{path} from {text}: {datas}"
        assert ends == [stream.position(seq) for seq in wanted]
        assert (at, page.is_closed) == (then, stream.is_closed)
        texts = [text_of(end) for end in ends]
        assert texts == sorted(set(texts)), "offsets sort as positions do"
        for end in (*ends[-2:], at):
            self._keep(stream, end)

    async def _page(self, path: str, at: Position, explicit: bool) -> StreamPage:
        max_bytes = self.rng.choice((1, 50, 1 << 20))
        return await self.node.streams.read(path, at, max_bytes, explicit=explicit)

    def _keep(self, stream: PlainStream, position: Position) -> None:
        if position != BEGINNING:
            assert position_of(text_of(position), "offset") == position
            self.offsets[stream.path].append(text_of(position))

    async def _wait(self) -> None:
        """Wait at the end with a long-poll while another call happens."""
        stream, rng = self._any(), self.rng
        if stream is None:
            return
        path, head = stream.path, stream.head
        at = stream.position(head)
        if stream.gap_after(head) is not None:
            return
        was_closed = stream.is_closed
        waiting = asyncio.ensure_future(self.node.streams.wait(path, at, 1 << 20, _WAIT_MS))
        await asyncio.sleep(0.01)
        assert waiting.done() == was_closed
        what = rng.choice(
            (self._append, self._append_stream, self._close, self._delete, self._drop)
        )
        # The other call may be on another stream: then this one gets nothing.
        self._aim = [path]
        await what()
        self._aim = []
        if self.streams.get(path) is not stream:
            await asyncio.wait([waiting])
            error = waiting.exception()
            if not was_closed:
                assert isinstance(error, TopicsError)
                gone = (Code.STREAM_GONE, Code.STREAM_NOT_FOUND)
                assert error.code in gone, "the stream was deleted under who waited"
            return
        wanted = stream.after(at, explicit=True)
        if wanted[0] is Code.STREAM_GONE:
            await self._refused(waiting, Code.STREAM_GONE)
            return
        page = await waiting
        news = [bytes(data) for data in page.datas]
        assert news == [rec.data for seq, rec in stream.records.items() if seq > head]
        assert page.next == stream.position(stream.head)
        assert page.is_closed == stream.is_closed
        self.counts["woken"] += bool(news)

    async def _follow(self) -> None:
        stream = self._any()
        if stream is not None and len(self.followers) < 4:
            self.followers.append(Follower(self.node, stream))

    async def _tend(self) -> None:
        stream = self._any()
        if stream is not None and self.rng.random() < 0.7:
            await self.node.sealer.tend(self.node.store.topic(stream.name), force_seal=True)
        if self.rng.random() < 0.5:
            await self.node.checkpointer.take()

    async def _refused(self, call: Awaitable[object], code: Code) -> TopicsError:
        error: TopicsError | None = None
        try:
            await call
        except TopicsError as raised:
            error = raised
        assert error is not None, f"accepted, not {code}"
        assert error.code is code, f"{error.code}: {error.message}, not {code}"
        return error


def _as_record(rec: Rec) -> bytes:
    fields = [b'"data":' + rec.data]
    if rec.meta:
        fields.append(b'"meta":' + rec.meta)
    if rec.tag is not None:
        fields.append(b'"tag":"%b"' % rec.tag.encode())
    if rec.node is not None:
        fields.append(b'"node":"%b"' % rec.node.encode())
    return b"{" + b",".join(fields) + b"}"
