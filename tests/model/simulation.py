"""Random scripts over a node on a failing disk, each from one seed, judged against the plain model.

A run is a few boots of one data directory. In each, every topic has a driver that makes one call
after the other (sometimes several appends at once), while others take checkpoints, step the clock,
let time pass and break the disk. A boot ends cleanly, with `kill -9`, or with a power loss at any
disk operation. Then the next node opens the remaining files, and every topic must be one of the
states that its calls allow. Called by tests/model and tests/crash.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine, Sequence
from typing import Any, Final

from tests.model.judging import End, Entry, Ledger, TopicHistory, differs, look
from tests.model.plain import Answer, Append, Delete, Drop, Put, Rec, Step
from tests.model.world import World
from tests.storage.fake_disk import Fault, Look, Op, SimulatedCrash
from topics_server.engine.store import Store
from topics_server.values.appends import decode_append
from topics_server.values.errors import Code, StorageError, TopicsError
from topics_server.values.model import Discard, Durability, ProducerStamp, TagMatch, TopicConfig

TTL_MS: Final = 60_000
_DURABLE: Final = (Durability.FSYNC, Durability.DISK, Durability.MEMORY)
_PRODUCERS_CODES: Final = (
    Code.PRODUCER_FENCED,
    Code.PRODUCER_SEQ_CONFLICT,
    Code.INVALID_REQUEST,
)
# The answer to a producer's request that changed nothing.
_REFUSALS: Final = ("fenced", "gap", "no beginning", "repeated")
_FAULTS: Final[tuple[tuple[Op, Fault], ...]] = (
    ("write", "eio"),
    ("write", "enospc"),
    ("write", "partial"),
    ("sync", "eio"),
    ("open", "emfile"),
    ("rename", "eio"),
    ("sync_dir", "eio"),
    ("truncate", "enospc"),
)


def topic_kinds(rng: random.Random) -> dict[str, TopicConfig]:
    """Some topics of a run: name to configuration."""
    some = rng.choice(_DURABLE)
    kinds = {
        "fsync": TopicConfig(durability=Durability.FSYNC),
        "disk": TopicConfig(durability=Durability.DISK),
        "memory": TopicConfig(durability=Durability.MEMORY),
        "ephemeral": TopicConfig(durability=Durability.EPHEMERAL),
        "capped": TopicConfig(durability=some, cap_records=rng.choice((1, 7, 20))),
        "heavy": TopicConfig(durability=some, cap_bytes=rng.choice((90, 700, 2500))),
        "expiring": TopicConfig(durability=some, ttl_ms=TTL_MS),
        "refusing": TopicConfig(durability=some, cap_records=12, discard=Discard.REJECT),
    }
    names = rng.sample(sorted(kinds), 4)
    return {name: kinds[name] for name in names}


class Simulation:
    """One run. `faults`: whether the disk also refuses calls; `calls`: of one topic in one boot."""

    def __init__(self, seed: int, *, boots: int = 3, calls: int = 8, faults: bool = True) -> None:
        self.seed = seed
        self.rng = rng = random.Random(f"simulation {seed}")
        self.boots = boots
        self.calls = calls
        self.faults = faults
        changes: dict[str, Any] = {"wal_shards": rng.choice((1, 2, 3))}
        changes["segment_max_events"] = rng.choice((3, 8, 20))
        if rng.random() < 0.6:
            changes["cold_dir"] = "cold"
            changes["hot_retain_segments"] = rng.choice((1, 2))
        if rng.random() < 0.5:
            changes["checkpoint_interval_ms"] = rng.choice((50, 300, 900))
        self.world = World(seed, **changes)
        self.histories = {
            name: TopicHistory(name, config) for name, config in topic_kinds(rng).items()
        }
        self._ids = 0
        self._end: End = "clean"
        self.ledger = Ledger()
        self.fault_kinds: Sequence[tuple[Op | Look, Fault]] = _FAULTS
        self.ends: Sequence[End] = ("clean", "kill", "power", "power")
        self.drop_share = 0.03
        self.clock_steps: Sequence[int] = (-5000, -1, 50, 5000, TTL_MS // 2)
        self.crashes = 0
        self.acknowledged = 0

    def run(self) -> None:
        """Run all boots and check once more at the end. Raises `AssertionError` with the seed."""
        with self.world.life(self.seed):
            for _ in range(self.boots):
                self._boot()
            self._boot(is_last=True)

    # -- boots -----------------------------------------------------------------------------

    def _boot(self, *, is_last: bool = False) -> None:
        world, rng = self.world, self.rng
        if rng.random() < 0.3:
            world.changes["wal_shards"] = rng.choice((1, 2, 3))
        while not self._has_started(may_crash=not is_last):
            pass
        if is_last:
            world.stop()
            return
        end = rng.choice(self.ends)
        if end != "clean" and rng.random() < 0.7:
            world.disk.crash_at(rng.randint(1, 150))
        try:
            world.run(self._live())
            if end == "clean":
                self._stop()
        except SimulatedCrash:
            end = "power" if end == "clean" else end
        if end != "clean":
            self._crash(end)
        self._end = end

    def _stop(self) -> None:
        world = self.world
        world.disk.heal()
        node = world.node
        assert node is not None
        is_broken = bool(node.store.read_only_shards())
        world.stop()
        if is_broken:
            # Written entries in the read-only shard are not known to be synced.
            self._note_crash("kill")
            world.disk.crash("kill")
            world.disk = world.disk.reopen()
            self._end = "kill"
            raise SimulatedCrash

    def _note_crash(self, mode: End) -> None:
        self.crashes += 1

    def _crash(self, end: End) -> None:
        assert end in ("kill", "power")
        self._note_crash(end)
        self.world.crash("kill" if end == "kill" else "power")

    def _has_started(self, *, may_crash: bool) -> bool:
        """Try one start, which may be killed too; then check everything."""
        world, rng = self.world, self.rng
        if may_crash and rng.random() < 0.15:
            world.disk.crash_at(rng.randint(1, 40))
        try:
            world.start()
            world.disk.heal()
            world.run(self._check_all(self._end))
        except SimulatedCrash:
            mode: End = rng.choice(("kill", "power"))
            self._crash(mode)
            if self._end != "power":
                self._end = mode
            return False
        self._end = "none"
        return True

    async def _check_all(self, end: End) -> None:
        store, clock = self._store(), self.world.clock
        for history in self.histories.values():
            seen = await look(store, history.name, clock)
            self.ledger.note_all(history.name, seen)
            history.check(seen, end, clock.max_ms, was_doubted=self.world.was_doubted)
            if seen is not None:
                history.live.tell(seen.now_ms)

    def _store(self) -> Store:
        assert self.world.node is not None
        return self.world.node.store

    # -- one boot ---------------------------------------------------------------------------

    async def _live(self) -> None:
        drivers = [self._drive(history) for history in self.histories.values()]
        await asyncio.gather(*drivers, self._disturb())
        self.world.disk.heal()
        for history in self.histories.values():
            await self._look_live(history)

    async def _look_live(self, history: TopicHistory) -> None:
        clock = self.world.clock
        try:
            seen = await look(self._store(), history.name, clock)
        except StorageError:
            return  # the disk refuses to read: an error, not a wrong answer
        self.ledger.note_all(history.name, seen)
        history.live.expire(clock.max_ms)
        states = [history.live.copy()]
        if history.live.lazy:
            evicted = history.live.copy()
            evicted.evict()
            states.append(evicted)
        wrong = [differs(state, seen, may_jump=False) for state in states]
        assert None in wrong, f"{history.name}, live: {wrong}"
        if seen is not None:
            history.live.tell(seen.now_ms)

    async def _drive(self, history: TopicHistory) -> None:
        rng = self.rng
        for _ in range(self.calls):
            if not history.live.exists:
                await self._create(history)
                continue
            dice = rng.random()
            if history.live.lazy or dice < 0.5:
                await self._do(history, [self._append(history)])
            elif dice < 0.62:
                await self._do(history, [self._append(history) for _ in range(rng.randint(2, 5))])
            elif dice < 0.80:
                await self._do(history, [self._delete(history)])
            elif dice < 0.86:
                await self._do(history, [Put(self._other_config(history))])
            elif dice < 0.86 + self.drop_share:
                await self._do(history, [Drop()])
            elif dice < 0.94:
                await self._look_live(history)
            else:
                await asyncio.sleep(rng.choice((0.01, 0.3, 1.2)))

    async def _create(self, history: TopicHistory) -> None:
        if self.rng.random() < 0.5:
            await self._do(history, [Put(history.config)])
        else:
            step = self._append(history)
            step.creates = history.config
            await self._do(history, [step])

    async def _disturb(self) -> None:
        rng, world = self.rng, self.world
        node = world.node
        assert node is not None
        for _ in range(self.calls):
            await asyncio.sleep(rng.choice((0.0, 0.0, 0.05, 0.4)))
            dice = rng.random()
            if dice < 0.25:
                certain = [
                    entry
                    for history in self.histories.values()
                    for entry in history.entries
                    if entry.is_fact
                ]
                try:
                    await node.checkpointer.take()
                except StorageError:
                    continue
                for entry in certain:
                    entry.synced = True
            elif dice < 0.45:
                world.clock.step(rng.choice(self.clock_steps))
            elif dice < 0.6 and self.faults:
                op, error = rng.choice(self.fault_kinds)
                if op == "sync" and rng.random() < 0.7:
                    continue  # a failed sync ends the boot for a shard, so it happens only rarely
                times = rng.choice((1, 1, 2, None))
                world.disk.fail(op, error, nth=rng.randint(1, 4), times=times)
            elif dice < 0.8:
                world.disk._rules.clear()

    # -- calls ------------------------------------------------------------------------------

    def _append(self, history: TopicHistory) -> Append:
        rng = self.rng
        keys = list(history.live.keys)
        key = None
        if keys and rng.random() < 0.15:
            key = rng.choice(keys)
        elif rng.random() < 0.4:
            key = f"k{self._next_id()}"
        records = [self._record() for _ in range(rng.choice((1, 1, 1, 2, 5, 11)))]
        in_header = rng.random() < 0.5
        return Append(records, key, in_header, producer=self._producer(history))

    def _producer(self, history: TopicHistory) -> ProducerStamp | None:
        """Sometimes return a request of one of two producers: mostly its next seq, else a seq close
        to it.
        """
        rng = self.rng
        if rng.random() < 0.6:
            return None
        producer = rng.choice("pq")
        last = history.live.producers.get(producer)
        if last is None:
            return ProducerStamp(producer, rng.choice((0, 0, 3)), rng.choice((0, 0, 0, 2)))
        epoch, seq = last[:2]
        stamps = ((epoch, seq + 1),) * 4 + (
            *((epoch, seq), (epoch, max(0, seq - 1)), (epoch, seq + 2)),
            *((epoch + 1, 0), (epoch + 1, 1), (max(0, epoch - 1), 0)),
        )
        return ProducerStamp(producer, *rng.choice(stamps))

    def _record(self) -> Rec:
        rng = self.rng
        data = b'{"id": %d,"pad":"%b"}' % (self._next_id(), b"x" * rng.choice((0, 3, 60)))
        meta = b'{"m":%d }' % self._ids if rng.random() < 0.3 else b""
        tag = rng.choice((None, "a", "a:1", "a:2", "b", "c"))
        return Rec(data, meta, tag, rng.choice((None, None, "n1", "n2")), 0)

    def _next_id(self) -> int:
        self._ids += 1
        return self._ids

    def _delete(self, history: TopicHistory) -> Delete:
        rng = self.rng
        before_seq = match = None
        kind = rng.choice(("before", "tag", "prefix", "both"))
        if kind in ("before", "both"):
            low = min(history.live.records, default=1)
            before_seq = rng.randint(low, history.live.head + 1)
        if kind in ("tag", "both"):
            match = TagMatch(rng.choice(("a", "b", "a:1")))
        elif kind == "prefix":
            match = TagMatch(rng.choice(("a:", "", "b")), is_prefix=True)
        return Delete(before_seq, match)

    def _other_config(self, history: TopicHistory) -> TopicConfig:
        rng, config = self.rng, history.config
        if config.durability is Durability.EPHEMERAL or config.discard is Discard.REJECT:
            return config
        return TopicConfig(
            durability=rng.choice(_DURABLE),
            ttl_ms=rng.choice((0, TTL_MS)) if config.ttl_ms else 0,
            cap_records=rng.choice((0, 5, config.cap_records)) if config.cap_records else 0,
            cap_bytes=rng.choice((0, 300, config.cap_bytes)) if config.cap_bytes else 0,
        )

    async def _do(self, history: TopicHistory, steps: Sequence[Step]) -> None:
        """Make calls at once; note their answers in the order of the calls."""
        entries = [Entry(step) for step in steps]
        history.entries += entries
        # Tasks start in this order, and every call is decided before it waits.
        await asyncio.gather(*(self._call(history, entry) for entry in entries))
        if any(entry.answer is None for entry in entries):
            # Calls that the disk refused counted for the caps while they were in flight.
            for entry in [entry for entry in entries if _is_judged(entry)]:
                history.entries.remove(entry)
                entries.remove(entry)
        for entry in entries:
            if entry.answer is not None:
                self.acknowledged += 1
                history.settle(entry)

    async def _call(self, history: TopicHistory, entry: Entry) -> None:
        entry.step.now_ms = self.world.clock.now_ms()
        entry.step.max_ms = self.world.clock.max_ms
        is_synced = self._is_synced(history, entry.step)
        try:
            entry.answer = await self._ask(history.name, entry.step)
        except TopicsError as error:
            if error.code is Code.TOPIC_FULL:
                entry.answer = ("full",)
            elif error.code in _PRODUCERS_CODES:
                entry.answer = _refusal_of(error)
            elif error.code is Code.THROTTLED:
                # No part of the refused write was stored, and none may appear later.
                history.entries.remove(entry)
            elif error.code is not Code.STORAGE_READ_ONLY:
                raise
        except StorageError:
            # The index of a segment could not be read: nothing was decided.
            assert _needs_index(history, entry.step), entry.step
            history.entries.remove(entry)
        else:
            # The clock may have been set during the search for a tag.
            entry.step.max_ms = self.world.clock.max_ms
            entry.synced = is_synced
            entry.is_fact = _is_fact(history, entry)
            self._note_appended(history.name, entry)

    def _note_appended(self, name: str, entry: Entry) -> None:
        step, answer = entry.step, entry.answer
        if isinstance(step, Append) and answer is not None and answer[0] == "appended":
            epoch, first = self._store().topic(name).epoch, answer[1]
            assert isinstance(first, int)
            for seq, rec in enumerate(step.records, first):
                self.ledger.note(name, epoch, seq, rec)

    def _is_synced(self, history: TopicHistory, step: Step) -> bool:
        if isinstance(step, Put | Drop) or not history.live.exists:
            return True
        return history.live.config.durability is Durability.FSYNC

    def _ask(self, name: str, step: Step) -> Coroutine[Any, Any, Answer]:
        match step:
            case Append():
                return self._ask_append(name, step)
            case Delete():
                return self._ask_delete(name, step)
            case Put():
                return self._ask_put(name, step)
            case Drop():
                return self._ask_drop(name)

    async def _ask_append(self, name: str, step: Append) -> Answer:
        body = body_of(step)
        key = step.key if step.in_header else None
        found = await self._store().append(
            name,
            body,
            decode_append(body),
            header_key=key,
            config=step.creates,
            producer=step.producer,
        )
        repeat = found.repeat
        if repeat is not None:
            where = (found.first_seq, found.last_seq - found.first_seq + 1)
            return ("repeated", repeat.epoch, repeat.seq, *(where if repeat.is_last else ()))
        count = found.last_seq - found.first_seq + 1
        return ("deduped" if found.deduped else "appended", found.first_seq, count)

    async def _ask_delete(self, name: str, step: Delete) -> Answer:
        found = await self._store().delete(name, before_seq=step.before_seq, match=step.match)
        return ("deleted", found.deleted)

    async def _ask_put(self, name: str, step: Put) -> Answer:
        found = await self._store().put_topic(name, step.config, keep_type=False)
        return ("put", found.created)

    async def _ask_drop(self, name: str) -> Answer:
        return ("dropped", await self._store().drop_topic(name, if_empty=False))


def _needs_index(history: TopicHistory, step: Step) -> bool:
    """Whether the decision may read sealed segments: for tags, or evictions by caps and TTL."""
    config = history.live.config
    evicts = bool(config.cap_bytes or config.ttl_ms)
    return isinstance(step, Delete) or (isinstance(step, Append | Put) and evicts)


def _is_fact(history: TopicHistory, entry: Entry) -> bool:
    assert entry.answer is not None
    step = entry.step
    if isinstance(step, Put):
        return not history.live.exists or step.config != history.live.config
    if entry.answer[0] == "deduped":
        return isinstance(step, Append) and step.producer is not None
    nothing = (("deleted", 0), ("dropped", False), ("full",))
    return entry.answer[0] not in _REFUSALS and entry.answer not in nothing


def _is_judged(entry: Entry) -> bool:
    """Whether the refusal is due to present records or calls in flight."""
    return entry.answer is not None and entry.answer[0] in ("full", *_REFUSALS)


def _refusal_of(error: TopicsError) -> Answer:
    if error.code is Code.PRODUCER_FENCED:
        return ("fenced", error.detail["epoch"])
    if error.code is Code.PRODUCER_SEQ_CONFLICT:
        return ("gap", error.detail["expected_seq"])
    assert error.detail == {"field": "Producer-Seq"}, error.message
    return ("no beginning",)


def body_of(step: Append) -> bytes:
    """The bytes of the request."""
    records = []
    for rec in step.records:
        fields = [b'"data":' + rec.data]
        if rec.meta:
            fields.append(b'"meta":' + rec.meta)
        if rec.tag is not None:
            fields.append(b'"tag":"%b"' % rec.tag.encode())
        if rec.node is not None:
            fields.append(b'"node":"%b"' % rec.node.encode())
        records.append(b"{" + b",".join(fields) + b"}")
    key = b""
    if step.key is not None and not step.in_header:
        key = b',"idempotency_key":"%b"' % step.key.encode()
    return b'{"records":[' + b",".join(records) + b"]" + key + b"}"
