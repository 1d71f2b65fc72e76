"""Random producer requests through both APIs of a node on a failing disk, each run from one seed.

A run is a few boots of one data directory. Its topics have all classes: made by `/v0`, streams of
JSON, streams of bytes. Each has a driver that sends requests, sometimes several at once, one after
another: next ones, repeats, gaps, old and new epochs, with and without keys, through either API,
some of which close the stream; and retries of requests that a crash left unanswered. Meanwhile
checkpoints are taken and the disk refuses calls. A boot ends cleanly, with `kill -9` or with a
power loss at any disk operation. Every answer must be the contract's (`produced_truth`). After
every start the topic must equal the result of some prefix of its requests, with everything in it
that an answer promised: records, producers, keys and the closed stream are kept together or not at
all.

Called by `tests/model/test_produced` and `tests/crash/test_producer_sequences`.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from tests.model.producers.produced_truth import Answer, Ask, Truth, is_fact
from tests.model.world import World
from tests.storage.fake_disk import Fault, Mode, Op, SimulatedCrash
from topics_server.engine.answers import Appended, ReadRequest
from topics_server.node.node import Node
from topics_server.streams.offsets import position_of
from topics_server.streams.values import AppendAsked, CreateAsked, StreamAppended
from topics_server.values.appends import decode_append
from topics_server.values.errors import Code, StorageError, TopicsError
from topics_server.values.model import Durability, ProducerStamp, TopicConfig

End = Literal["none", "clean", "kill", "power"]
JSON: Final = "application/json"
BYTES: Final = "application/octet-stream"
_TYPES: Final = {"topic": JSON, "messages": JSON, "bytes": BYTES}
_FAULTS: Final[tuple[tuple[Op, Fault], ...]] = (
    ("write", "eio"),
    ("write", "enospc"),
    ("write", "partial"),
    ("sync", "eio"),
)


@dataclass(slots=True, eq=False)
class Sent:
    """One request of this boot: its answer once there is one, and the promise of that answer.

    `due`: the answer if nothing before it fails; `is_open`: the result is unknown. `certain`: a
    client learned of it, so a kill must not undo it; `synced`: nor a power loss.
    """

    ask: Ask
    due: Answer
    is_open: bool = True
    answer: Answer | None = None
    certain: bool = False
    synced: bool = False


@dataclass(slots=True, eq=False)
class Subject:
    """One topic of a run. `base`: at the last start; `live`: now."""

    name: str
    kind: str
    durability: Durability
    base: Truth = field(default_factory=Truth)
    live: Truth = field(default_factory=Truth)
    sent: list[Sent] = field(default_factory=list)
    # All requests that a client may repeat: those with a producer or a key.
    history: list[Ask] = field(default_factory=list)

    @property
    def is_ephemeral(self) -> bool:
        return self.durability is Durability.EPHEMERAL


class ProducedSimulation:
    """One run. `calls`: of one topic in one boot; `faults`: whether the disk also refuses."""

    def __init__(self, seed: int, *, boots: int = 3, calls: int = 9, faults: bool = True) -> None:
        self.seed = seed
        self.rng = rng = random.Random(f"produced {seed}")
        self.boots = boots
        self.calls = calls
        self.faults = faults
        changes: dict[str, Any] = {"wal_shards": rng.choice((1, 2))}
        changes["segment_max_events"] = rng.choice((3, 8, 50))
        if rng.random() < 0.6:
            changes["checkpoint_interval_ms"] = rng.choice((50, 300))
        self.world = World(seed, **changes)
        self.subjects = [self._subject(number) for number in range(2)]
        self.answers: Counter[object] = Counter()
        self.crashes = 0
        self._ids = 0
        self._end: End = "clean"

    def _subject(self, number: int) -> Subject:
        rng = self.rng
        kind = rng.choice(("topic", "messages", "bytes"))
        classes = [Durability.FSYNC, Durability.FSYNC, Durability.DISK, Durability.MEMORY]
        if kind == "topic":
            classes.append(Durability.EPHEMERAL)
        name = f"s{number}" if rng.random() < 0.7 else f"a path/{number}"
        return Subject(name if kind != "topic" else f"t{number}", kind, rng.choice(classes))

    def run(self) -> None:
        """Run all boots and check once more at the end. Raises `AssertionError` with the seed."""
        with self.world.life(self.seed):
            self.world.start()
            self.world.run(self._create())
            for number in range(self.boots):
                self._boot()
                self._start(may_crash=number + 1 < self.boots)
            self.world.stop()

    @property
    def node(self) -> Node:
        """The running node."""
        assert self.world.node is not None
        return self.world.node

    # -- boots -----------------------------------------------------------------------------

    async def _create(self) -> None:
        for subject in self.subjects:
            config = TopicConfig(durability=subject.durability)
            if subject.kind == "topic":
                await self.node.store.put_topic(subject.name, config, keep_type=False)
                continue
            made = await self.node.streams.create(subject.name, CreateAsked(_TYPES[subject.kind]))
            await self.node.store.put_topic(made.view.topic, config, keep_type=False)

    def _boot(self) -> None:
        """Live until the boot ends: by itself, or with the disk."""
        world, rng = self.world, self.rng
        ends: tuple[End, ...] = ("clean", "kill", "kill", "power", "power")
        end = rng.choice(ends)
        if end != "clean" and rng.random() < 0.7:
            world.disk.crash_at(rng.randint(1, 60))
        try:
            world.run(self._live())
            if end == "clean":
                world.disk.heal()
                is_broken = bool(self.node.store.read_only_shards())
                world.stop()
                if is_broken:
                    # Entries in the read-only shard are written, and not known to be synced.
                    self._crash("kill")
                    return
                self._end = "clean"
                return
        except SimulatedCrash:
            pass
        self._crash("kill" if end == "kill" else "power")

    def _crash(self, mode: Mode) -> None:
        self.crashes += 1
        if self.world.is_up or self.world.loop is not None:
            self.world.crash(mode)
        else:
            self.world.disk.crash(mode)
            self.world.disk = self.world.disk.reopen()
        if self._end != "power":
            self._end = mode

    def _start(self, *, may_crash: bool) -> None:
        """Start the server, sometimes with crashes, and compare every topic with its requests."""
        world, rng = self.world, self.rng
        while True:
            if may_crash and rng.random() < 0.15:
                world.disk.crash_at(rng.randint(1, 40))
            try:
                world.start()
                world.disk.heal()
                world.run(self._check_all())
            except SimulatedCrash:
                self._crash(rng.choice(("kill", "power")))
                continue
            self._end = "none"
            return

    # -- one boot --------------------------------------------------------------------------

    async def _live(self) -> None:
        await asyncio.gather(*map(self._drive, self.subjects), self._disturb())
        self.world.disk.heal()
        for subject in self.subjects:
            wrong = _differs(subject.live, await self._look(subject), may_jump=False)
            assert wrong is None, f"{subject.name}, live: {wrong}"

    async def _drive(self, subject: Subject) -> None:
        rng = self.rng
        for _ in range(self.calls):
            if rng.random() < 0.1:
                await asyncio.sleep(rng.choice((0.01, 0.3)))
            count = 1 if rng.random() < 0.7 else rng.randint(2, 5)
            # Clients that do not wait continue from their last request.
            expected = subject.live.copy()
            batch: list[Sent] = []
            for _ in range(count):
                ask = self._ask(subject, expected)
                batch.append(Sent(ask, expected.apply(ask)))
            await self._send(subject, batch)

    async def _disturb(self) -> None:
        rng, world = self.rng, self.world
        for _ in range(self.calls):
            await asyncio.sleep(rng.choice((0.0, 0.0, 0.05, 0.3)))
            dice = rng.random()
            if dice < 0.3:
                told = [sent for each in self.subjects for sent in each.sent if sent.certain]
                try:
                    await self.node.checkpointer.take()
                except StorageError:
                    continue
                for sent in told:
                    sent.synced = True
            elif dice < 0.45 and self.faults:
                op, error = rng.choice(_FAULTS)
                if op == "sync" and rng.random() < 0.7:
                    continue  # a failed sync ends the boot for a shard, so it happens only rarely
                world.disk.fail(op, error, nth=rng.randint(1, 4), times=rng.choice((1, 1, 2)))
            elif dice < 0.7:
                world.disk._rules.clear()

    # -- requests --------------------------------------------------------------------------

    def _ask(self, subject: Subject, expected: Truth) -> Ask:
        """One request of a client that saw `expected`; sometimes one that was sent before."""
        rng = self.rng
        if subject.history and rng.random() < 0.15:
            return rng.choice(subject.history[-6:])
        stamp = self._stamp(expected) if rng.random() < 0.75 else None
        doors: list[Literal["v0", "stream", "close"]] = ["v0"]
        if not subject.is_ephemeral:
            doors += ["v0", "stream", "stream", "stream"]
            if rng.random() < 0.015:
                doors = ["close"]
        ask = Ask(rng.choice(doors), [], stamp)
        if ask.door != "close":
            count = rng.choice((1, 1, 1, 2, 5))
            is_bytes = ask.door == "stream" and subject.kind == "bytes"
            ask.datas = [self._data(is_bytes) for _ in range(1 if is_bytes else count)]
        if ask.door == "v0" and rng.random() < 0.35:
            known = list(expected.keys)
            ask.key = rng.choice(known) if known and rng.random() < 0.4 else f"k{self._next_id()}"
            ask.in_header = rng.random() < 0.5
        if ask.door == "stream":
            ask.closes = rng.random() < 0.015
            if rng.random() < 0.3:
                last = expected.last_seq or "0"
                ask.seq = rng.choice((last + "1", last + "1", last, f"{rng.randrange(100)}"))
        if ask.producer is not None or ask.key is not None:
            subject.history.append(ask)
        return ask

    def _stamp(self, expected: Truth) -> ProducerStamp:
        """The stamp of one of three producers: mostly its next seq, else one close to it."""
        rng = self.rng
        producer = rng.choice("ppqr")
        last = expected.producers.get(producer)
        if last is None:
            return ProducerStamp(producer, rng.choice((0, 0, 3)), rng.choice((0, 0, 0, 0, 2)))
        epoch, seq = last[:2]
        near = ((epoch, seq + 1),) * 8 + (
            *((epoch, seq), (epoch, seq), (epoch, max(0, seq - 1)), (epoch, seq + 2)),
            *((epoch + 1, 0), (epoch + 2, 1), (max(0, epoch - 1), rng.choice((0, seq + 1)))),
        )
        return ProducerStamp(producer, *rng.choice(near))

    def _data(self, is_bytes: bool) -> bytes:
        number, pad = self._next_id(), self.rng.choice((0, 3, 70))
        return (
            b"\x00%d\xff%b" % (number, b"\n" * pad) if is_bytes else b"%d%b" % (number, b"0" * pad)
        )

    def _next_id(self) -> int:
        self._ids += 1
        return self._ids

    async def _send(self, subject: Subject, batch: Sequence[Sent]) -> None:
        """Send requests at once; judge their answers in the order of sending."""
        subject.sent += batch
        is_alone = len(batch) == 1
        # Tasks start in this order, and every request is decided before it waits.
        await asyncio.gather(*(self._call(subject, sent) for sent in batch))
        if any(sent.answer is None for sent in batch):
            # If requests were refused because of others that the disk then refused, that proves
            # nothing.
            idle = [each for each in batch if each.answer and not is_fact(each.ask, each.answer)]
            subject.sent = [sent for sent in subject.sent if sent not in idle]
            batch = [sent for sent in batch if sent.answer is not None and sent not in idle]
        for sent in batch:
            assert sent.answer is not None
            expected = subject.live.apply(sent.ask)
            self.answers[expected[0]] += 1
            assert _fits(sent.answer, expected, is_alone=is_alone), (
                f"{subject.name}: {sent.ask} was answered {sent.answer}, not {expected}"
            )

    async def _call(self, subject: Subject, sent: Sent) -> None:
        try:
            sent.answer = await self._answer(subject, sent.ask)
        except TopicsError as error:
            if error.code is Code.THROTTLED:
                # No part of the request was stored, and no part may be stored later.
                subject.sent.remove(sent)
            elif error.code is not Code.STORAGE_READ_ONLY:
                sent.answer = _refusal_of(sent.ask, error)
        sent.is_open = False
        if sent.answer is not None:
            self._note_promises(subject, sent, sent.answer)

    def _note_promises(self, subject: Subject, sent: Sent, answer: Answer) -> None:
        """Records that an answer names must still exist after a kill."""
        told = [sent] if is_fact(sent.ask, answer) else []
        waiting = [each for each in subject.sent if each.is_open and is_fact(each.ask, each.due)]
        if answer[0] == "repeated":
            assert sent.ask.producer is not None
            named = (sent.ask.producer.producer_id, *answer[1:3])
            told += [each for each in waiting if _name_of(each.ask.producer) == named]
            if len(answer) == 5 and answer[4] is True:
                told += [each for each in waiting if each.ask.closes or each.ask.door == "close"]
        elif answer[0] == "deduped":
            told += [
                each
                for each in waiting
                if each.ask.key == sent.ask.key and each.due[0] == "appended"
            ]
        for each in told:
            each.certain = True
            each.synced |= subject.durability is Durability.FSYNC

    def _answer(self, subject: Subject, ask: Ask) -> Coroutine[Any, Any, Answer]:
        match ask.door:
            case "v0":
                return self._append(self._topic_name(subject), ask)
            case "stream":
                return self._append_stream(subject, ask)
            case "close":
                return self._close(subject, ask)

    def _topic_name(self, subject: Subject) -> str:
        return self.node.streams.head(subject.name).topic

    async def _append(self, name: str, ask: Ask) -> Answer:
        records = b",".join(b'{"data":%b}' % data for data in ask.datas)
        key = b""
        if ask.key is not None and not ask.in_header:
            key = b',"idempotency_key":"%b"' % ask.key.encode()
        body = b'{"records":[%b]%b}' % (records, key)
        done = await self.node.store.append(
            name,
            body,
            decode_append(body),
            header_key=ask.key if ask.in_header else None,
            config=None,
            producer=ask.producer,
        )
        return _told_by_v0(done)

    async def _append_stream(self, subject: Subject, ask: Ask) -> Answer:
        content_type = _TYPES[subject.kind]
        body = ask.datas[0] if content_type == BYTES else b"[%b]" % b", ".join(ask.datas)
        asked = AppendAsked(content_type, ask.seq, ask.producer, ask.closes)
        return _told_by_stream(await self.node.streams.append(subject.name, body, asked))

    async def _close(self, subject: Subject, ask: Ask) -> Answer:
        return _told_by_stream(await self.node.streams.close(subject.name, ask.producer))

    # -- looking ---------------------------------------------------------------------------

    async def _look(self, subject: Subject) -> Truth:
        """Read the topic through its first API, together with producers, keys and whether it is
        closed.
        """
        node, name = self.node, self._topic_name(subject)
        topic = node.store.topic(name)
        records: dict[int, bytes] = {}
        from_seq = 0
        while True:
            page = await node.store.read(name, ReadRequest(from_seq, 500, 1 << 20))
            for piece in page.pieces:
                for row in piece.rows:
                    records[piece.block.first_seq + row] = bytes(piece.block.data(row))
            from_seq = page.next_from_seq
            if page.caught_up:
                break
        facts = None if topic.stream is None else topic.stream.facts
        return Truth(
            records=records,
            head=page.head_seq,
            producers={
                name: (last.epoch, last.seq, last.first_seq, last.count)
                for name, last in topic.producers.known.items()
            },
            keys={key: known[:2] for key, known in topic.keys.remembered.items()},
            last_seq=None if facts is None else facts.last_seq,
            is_closed=facts is not None and facts.is_closed,
            closed_by=None if facts is None else facts.closed_by,
        )

    async def _check_all(self) -> None:
        for subject in self.subjects:
            self._check(subject, await self._look(subject))

    def _check(self, subject: Subject, seen: Truth) -> None:
        """Find the prefix of its requests that survived, and begin anew from it."""
        once = Counter(seen.records.values())
        assert len(once) == len(seen.records), f"{subject.name}: appended twice: {once}"
        end = self._end
        found: list[Truth] = [subject.base.copy()]
        for sent in subject.sent:
            found.append(found[-1].copy())
            found[-1].apply(sent.ask)
        closest: list[str] = []
        for count in range(len(subject.sent), _kept_at_least(subject, end) - 1, -1):
            truth = found[count]
            if subject.is_ephemeral and end != "none":
                truth.forget()
            was_doubted = self.world.was_doubted or subject.is_ephemeral
            may_jump = end == "power" or (end == "kill" and was_doubted)
            wrong = _differs(truth, seen, may_jump=may_jump)
            if wrong is None:
                truth.head = seen.head
                subject.base, subject.live, subject.sent = truth, truth.copy(), []
                return
            closest.append(f"first {count} of {len(subject.sent)}: {wrong}")
        told = "\n  ".join(
            f"{sent.ask} -> {sent.answer} certain={sent.certain} synced={sent.synced}"
            for sent in subject.sent
        )
        raise AssertionError(
            f"{subject.name} ({subject.durability.value}) after {end}: no prefix fits\n "
            + "\n ".join(closest)
            + f"\n sent:\n  {told}"
        )


def _kept_at_least(subject: Subject, end: End) -> int:
    if end in ("none", "clean"):
        return len(subject.sent)
    kept = [
        number + 1
        for number, sent in enumerate(subject.sent)
        if sent.certain and (sent.synced or end != "power")
    ]
    return max(kept, default=0)


def _name_of(stamp: ProducerStamp | None) -> tuple[str, int, int] | None:
    return None if stamp is None else (stamp.producer_id, stamp.epoch, stamp.seq)


def _differs(truth: Truth, seen: Truth, *, may_jump: bool) -> str | None:
    """The difference between `seen` and `truth`; None if there is none."""
    if seen.head < truth.head or (seen.head > truth.head and not may_jump):
        return f"head {seen.head}, not {truth.head}"
    for name in ("records", "producers", "keys", "last_seq", "is_closed", "closed_by"):
        there, wanted = getattr(seen, name), getattr(truth, name)
        if there != wanted:
            return f"{name}: {_apart(there, wanted)}"
    return None


def _apart(there: Any, wanted: Any) -> str:
    if not isinstance(there, dict):
        return f"{there!r}, not {wanted!r}"
    more = {name: value for name, value in there.items() if wanted.get(name) != value}
    less = {name: value for name, value in wanted.items() if there.get(name) != value}
    return f"{more}, not {less}"


def _fits(answer: Answer, expected: Answer, *, is_alone: bool) -> bool:
    if answer[0] == expected[0] == "repeated" and not is_alone and len(answer) == 5:
        # With concurrent requests the answer has the end of the stream, and whether it was closed,
        # at the time of the answer.
        return answer[:3] == expected[:3]
    return answer == expected


def _told_by_v0(done: Appended) -> Answer:
    count = done.last_seq - done.first_seq + 1
    repeat = done.repeat
    if repeat is not None:
        where = (done.first_seq, count) if repeat.is_last else ()
        return ("repeated", repeat.epoch, repeat.seq, *where)
    return ("deduped" if done.deduped else "appended", done.first_seq, count)


def _told_by_stream(done: StreamAppended) -> Answer:
    if done.is_repeat:
        return ("repeated", done.epoch, done.seq, done.tail.seq, done.is_closed)
    echo = () if done.epoch is None else (done.epoch, done.seq)
    return ("appended", done.tail.seq, done.is_closed, *echo)


def _refusal_of(ask: Ask, error: TopicsError) -> Answer:
    detail = error.detail or {}
    match error.code:
        case Code.PRODUCER_FENCED:
            return ("fenced", detail["epoch"])
        case Code.PRODUCER_SEQ_CONFLICT:
            assert ask.producer is not None
            assert detail["received_seq"] == ask.producer.seq
            return ("gap", detail["expected_seq"])
        case Code.INVALID_REQUEST:
            assert detail == {"field": "Producer-Seq"}, error.message
            return ("no beginning",)
        case Code.STREAM_CONFLICT:
            assert detail["field"] == "Stream-Seq", error.message
            return ("low", detail["last_seq"])
        case Code.STREAM_CLOSED if ask.door == "v0":
            return ("closed",)
        case Code.STREAM_CLOSED:
            return ("closed", position_of(detail["next_offset"], "next_offset").seq)
        case _:
            raise error
