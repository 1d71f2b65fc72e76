"""Random routers over a node on a failing disk, each run from one seed, judged by `routed_judge`.

A run is a few boots of one data directory. Its topics are a tree, a chain, a fan-out, several
routers from one source into one destination, or a cycle. Writers append, delete, configure, drop
and recreate; one driver puts, changes and deletes routers; others take checkpoints, set the clock,
break the disk. A boot ends cleanly, with `kill -9` or with a power loss at any disk operation; the
next may have another number of shards, or find its newest snapshot damaged. Called by
`test_routed`.

These lines were removed by hand; the number is the first seed that failed (odd seeds with faults):
in `RouterPages.may_omit_payloads` the freshness (0) and the shard (29); `begin_capture` moving what
is fresh (10), or keeping its sources (0); `observe` (10); `quiesced` waiting (4); pages of records
before the snapshot's start (`Recovery._met`, 3); the sources that `RouterPut` names in replay (1);
`Log.lose_slot` below the head (1); `evidence` (2); the cascade of a drop (8); a cursor that never
goes back (61); `capture._adopt_newer` (103). `test_routed_found` tests those that random runs meet
too seldom. No run needs two further lines. One submits no page without payloads while a capture
waits: it only keeps captures from waiting for ever. The other is the wait of `Pump.hold` for a page
in flight, which `RouterService._quiesce` repeats.
"""

from __future__ import annotations

import asyncio
import random
from typing import Any, Final
from unittest import mock

from tests.model.routers.routed_judge import End, Judge
from tests.model.world import World
from tests.storage.fake_disk import Fault, Mode, Op, SimulatedCrash
from topics_server.engine.store import Store
from topics_server.node.boot import Boot, Writers
from topics_server.node.node import Node
from topics_server.routers import pump, routes
from topics_server.values.appends import decode_append
from topics_server.values.errors import Code, StartRefused, StorageError, TopicsError
from topics_server.values.model import (
    Discard,
    Durability,
    Guarantee,
    RouterDefinition,
    TagMatch,
    TopicConfig,
    TopicType,
)
from topics_server.values.router_answers import RouterSpec
from topics_server.values.storage_types import ReplayStart
from topics_server.wal.tools.dump import verify

TTL_MS: Final = 60_000
_DURABLE: Final = (Durability.FSYNC, Durability.DISK, Durability.MEMORY)
_TAGS: Final = (None, "a", "a:1", "a:2", "b")
_NODES: Final = (None, None, "n1", "n2")
_FILTERS: Final = (None, None, TagMatch("a"), TagMatch("a:", is_prefix=True), TagMatch("b"))
_FAULTS: Final[tuple[tuple[Op, Fault], ...]] = (
    ("write", "eio"),
    ("write", "enospc"),
    ("write", "partial"),
    ("sync", "eio"),
    ("open", "emfile"),
    ("rename", "eio"),
)
_REFUSED: Final = frozenset(
    {Code.TOPIC_FULL, Code.THROTTLED, Code.STORAGE_READ_ONLY, Code.TOPIC_NOT_FOUND}
)
_OF_TYPE: Final = frozenset({Code.NOT_A_QUEUE, Code.TOPIC_EXISTS_INCOMPATIBLE})
_TOO_SHORT: Final = ("files of wal set", "begins after lsn")
# Longer than all retries of a router together.
_QUIET_S: Final = 20.0


class WatchedBoot(Boot):
    """A start whose judge sees its recovered state and every later entry."""

    judge: Judge
    end: End

    def open_journal(self, replay: Any, next_lsn: int, published: ReplayStart) -> Writers:
        """Judge what recovery found, then watch what is written."""
        ground = self.ground
        self.judge.recovered(
            ground,
            self.end,
            damaged=ground.snapshots.found_damaged,
            was_doubted=not ground.directory.same_boot or bool(replay.report.torn),
        )
        writers = super().open_journal(replay, next_lsn, published)
        self.judge.watch(self, writers.commits)
        return writers


def graph(rng: random.Random) -> list[tuple[str, str, bool]]:
    """The routers at the start of a run: source, destination, allow_cycle."""
    kind = rng.choice(("pair", "chain", "tree", "fan", "several", "cycle", "cycle"))
    if kind == "pair":
        return [("t0", "t1", False)]
    if kind == "chain":
        length = rng.choice((2, 3, 5, 10))
        return [(f"t{n}", f"t{n + 1}", False) for n in range(length)]
    if kind == "tree":
        count = rng.randint(3, 8)
        return [(f"t{rng.randrange(n)}", f"t{n}", False) for n in range(1, count)]
    if kind == "fan":
        return [("t0", f"t{n}", False) for n in range(1, rng.randint(3, 8))]
    if kind == "several":
        return [("t0", "t1", False)] * rng.randint(2, 3) + [("t1", "t2", False)]
    length = rng.randint(2, 4)
    ring = [(f"t{n}", f"t{(n + 1) % length}", n == length - 1) for n in range(length)]
    return [*ring, ("t0", "out", False)]


class RoutedSimulation:
    """One run. `faults`: whether the disk also refuses calls; `calls`: of one driver in one
    boot.
    """

    def __init__(self, seed: int, *, boots: int = 3, calls: int = 8, faults: bool = True) -> None:
        self.seed = seed
        self.rng = rng = random.Random(f"routed {seed}")
        self.boots = boots
        self.calls = calls
        self.faults = faults
        changes: dict[str, Any] = {"wal_shards": rng.choice((1, 1, 2, 3))}
        changes["segment_max_events"] = rng.choice((3, 8, 20))
        if rng.random() < 0.5:
            changes["cold_dir"] = "cold"
            changes["hot_retain_segments"] = rng.choice((1, 2))
        if rng.random() < 0.6:
            changes["checkpoint_interval_ms"] = rng.choice((50, 300, 900))
        self.world = World(seed, **changes)
        self.world.boot_type = WatchedBoot
        self.judge = Judge(self.world.clock)
        self.edges = graph(rng)
        names = {name for edge in self.edges for name in edge[:2]}
        self.names = sorted(names)
        self.queue = rng.choice([edge[1] for edge in self.edges])
        self.page_records = rng.choice((1, 3, 10, 1000))
        self.unnoted_max = rng.choice((2, 16_384))
        self.configs = {name: self._config(name) for name in self.names}
        self._ids = 0
        self._damaged: tuple[str, int] | None = None
        self.crashes = self.older_snapshots = self.resharded = 0
        self.refused = self.stalls = 0

    def run(self) -> None:
        """Run all boots and check once more at the end. Raises `AssertionError` with the seed."""
        with self.world.life(self.seed):
            with (
                mock.patch.object(pump, "PAGE_RECORDS", self.page_records),
                mock.patch.object(routes, "PAGE_RECORDS", self.page_records),
                mock.patch.object(pump, "_UNNOTED_SEQS_MAX", self.unnoted_max),
            ):
                end: End = "new"
                for number in range(self.boots + 1):
                    end = self._boot(end, is_last=number == self.boots)
            problems = verify(self.world.disk, "data", self.world.changes.get("cold_dir")).problems
            assert problems == [], problems

    # -- boots -----------------------------------------------------------------------------

    def _boot(self, end: End, *, is_last: bool) -> End:
        world, rng = self.world, self.rng
        if rng.random() < 0.3:
            world.changes["wal_shards"] = rng.choice((1, 2, 3))
            self.resharded += 1
        if rng.random() < 0.25:
            self._damage_newest()
        self._start(end, may_crash=not is_last)
        if is_last:
            world.run(self._settle())
            world.stop()
            return "clean"
        next_end: End = rng.choice(("clean", "kill", "power", "power"))
        if next_end != "clean" and rng.random() < 0.7:
            world.disk.crash_at(rng.randint(1, 250))
        try:
            world.run(self._live())
            if next_end == "clean":
                world.disk.heal()
                assert world.node is not None
                if not world.node.store.read_only_shards():
                    world.stop()
                    self.judge.note_end()
                    return "clean"
                next_end = "kill"
        except SimulatedCrash:
            pass
        return self._crash("kill" if next_end == "kill" else "power")

    def _damage_newest(self) -> None:
        """Damage the newest of two snapshots, so that the older one counts."""
        disk = self.world.disk
        found = sorted(path for path in disk._files if path.endswith(".snap"))
        if len(found) == 2:
            self._damaged = (found[-1], len(disk.content(found[-1])) // 2)
            disk.corrupt(*self._damaged)
            self.older_snapshots += 1

    def _is_repaired(self, refusal: StartRefused) -> bool:
        """Repair the newest snapshot if the journal does not reach back to the older one: a start
        relies only on its own snapshot.
        """
        damaged, self._damaged = self._damaged, None
        if damaged is None or not any(text in str(refusal) for text in _TOO_SHORT):
            return False
        self.world.crash("kill")
        self.world.disk.corrupt(*damaged)
        self.older_snapshots -= 1
        return True

    def _crash(self, mode: Mode) -> End:
        self.crashes += 1
        self.judge.note_end()
        self.world.crash(mode)
        return mode

    def _start(self, end: End, *, may_crash: bool) -> None:
        """Start the server, sometimes with crashes, until it is ready."""
        world, rng = self.world, self.rng
        synced = self.judge.synced
        while True:
            if may_crash and rng.random() < 0.25:
                world.disk.crash_at(rng.randint(1, 60))
            WatchedBoot.judge, WatchedBoot.end = self.judge, end
            try:
                world.start()
                world.disk.heal()
                self._damaged = None
                return
            except StartRefused as refusal:
                if not self._is_repaired(refusal):
                    raise
            except SimulatedCrash:
                mode: Mode = rng.choice(("kill", "power"))
                is_judged = self.judge.boot is not None
                self._crash(mode)
                if is_judged:
                    # The node had recovered, so the next start begins with this state.
                    end = mode
                else:
                    self.judge.synced = synced
                    end = "power" if "power" in (end, mode) else mode

    @property
    def node(self) -> Node:
        """The running node."""
        assert self.world.node is not None
        return self.world.node

    @property
    def store(self) -> Store:
        """The store of the running node."""
        return self.node.store

    # -- one boot --------------------------------------------------------------------------

    async def _live(self) -> None:
        writers = [self._write() for _ in range(3)]
        await asyncio.gather(self._route(), self._disturb(), *writers)
        self.world.disk.heal()
        if not self.store.read_only_shards() and self.rng.random() < 0.5:
            await self._settle()

    async def _settle(self) -> None:
        """Wait until everything is forwarded, or make room where a router waits for it."""
        for rounds in range(40):
            behind = await self._quiet()
            await self.judge.look(self.node)
            if not behind:
                return
            self.stalls += 1
            for name in behind:
                await self._make_room(name, for_ever=rounds > 3)
        raise AssertionError(f"routers {behind} never go on")

    async def _quiet(self) -> list[str]:
        behind: list[str] = []
        for _ in range(int(_QUIET_S / 0.5)):
            behind = self.judge.caught_up(self.node)
            if not behind:
                # Entries in flight may be ahead of every notification.
                await asyncio.sleep(0.5)
                behind = self.judge.caught_up(self.node)
                if not behind:
                    return behind
            await asyncio.sleep(0.5)
        return behind

    async def _make_room(self, router_name: str, *, for_ever: bool) -> None:
        router = self.node.router_table.find(router_name)
        assert router is not None
        stalled = self.node.pump.stalled(router)
        if stalled is None:
            return  # room was made for it meanwhile
        dest = self.store.topic_of(router.dest_id)
        assert dest is not None
        assert stalled[0] == Code.TOPIC_FULL.value, stalled
        if dest.config.discard is not Discard.REJECT:
            return  # not tried again since the topic was configured for another router
        if for_ever:
            await self.store.put_topic(dest.name, TopicConfig(), keep_type=True)
        else:
            await self.store.delete(dest.name, before_seq=dest.log.head_seq + 1, match=None)

    async def _disturb(self) -> None:
        rng, world = self.rng, self.world
        for _ in range(self.calls):
            await asyncio.sleep(rng.choice((0.0, 0.0, 0.05, 0.4)))
            dice = rng.random()
            if dice < 0.4:
                try:
                    await self.node.checkpointer.take()
                except StorageError:
                    continue
            elif dice < 0.55:
                world.clock.step(rng.choice((-5000, 50, 5000, TTL_MS // 2, TTL_MS)))
            elif dice < 0.7 and self.faults:
                op, error = rng.choice(_FAULTS)
                if op == "sync" and rng.random() < 0.7:
                    continue
                times = rng.choice((1, 1, 2, None))
                world.disk.fail(op, error, nth=rng.randint(1, 4), times=times)
            elif dice < 0.9:
                world.disk._rules.clear()

    # -- writers ---------------------------------------------------------------------------

    async def _write(self) -> None:
        rng = self.rng
        for _ in range(self.calls):
            name = rng.choice(self.names)
            if rng.random() < 0.4:
                name = self.edges[0][0]
            dice = rng.random()
            try:
                if dice < 0.6:
                    await self._append(name)
                elif dice < 0.75:
                    await self._delete(name)
                elif dice < 0.82:
                    await self._put(name)
                elif dice < 0.85:
                    await self.store.drop_topic(name, if_empty=False)
                elif dice < 0.92:
                    await self._work()
                else:
                    await asyncio.sleep(rng.choice((0.0, 0.01, 0.3, 1.2)))
            except TopicsError as error:
                if error.code not in _REFUSED | _OF_TYPE:
                    raise
            except StorageError:
                continue

    def _config(self, name: str) -> TopicConfig:
        rng = self.rng
        kind = rng.choice(("plain", "plain", "plain", "cap", "bytes", "ttl", "reject"))
        classes = (*_DURABLE, Durability.EPHEMERAL) if rng.random() < 0.3 else _DURABLE
        return TopicConfig(
            type=TopicType.QUEUE if name == self.queue else TopicType.LOG,
            durability=rng.choice(classes),
            cap_records=rng.choice((1, 5, 12)) if kind in ("cap", "reject") else 0,
            cap_bytes=rng.choice((90, 700)) if kind == "bytes" else 0,
            ttl_ms=TTL_MS if kind == "ttl" else 0,
            discard=Discard.REJECT if kind == "reject" else Discard.OLD,
        )

    async def _put(self, name: str) -> None:
        await self.store.put_topic(name, self._config(name), keep_type=False)

    async def _append(self, name: str) -> None:
        rng = self.rng
        records = []
        for _ in range(rng.choice((1, 1, 2, 5, 11))):
            self._ids += 1
            pad = b"x" * rng.choice((0, 3, 60))
            fields = [b'"data":{"id":%d,"pad":"%b"}' % (self._ids, pad)]
            if rng.random() < 0.3:
                fields.append(b'"meta":{"m":%d }' % self._ids)
            tag, node = rng.choice(_TAGS), rng.choice(_NODES)
            if tag is not None:
                fields.append(b'"tag":"%b"' % tag.encode())
            if node is not None:
                fields.append(b'"node":"%b"' % node.encode())
            records.append(b"{" + b",".join(fields) + b"}")
        body = b'{"records":[' + b",".join(records) + b"]}"
        await self.store.append(
            name, body, decode_append(body), header_key=None, config=self.configs[name]
        )

    async def _delete(self, name: str) -> None:
        rng = self.rng
        topic = self.store.topic(name)
        before_seq = match = None
        if rng.random() < 0.6:
            before_seq = rng.randint(topic.log.earliest_seq, topic.log.head_seq + 1)
        else:
            match = rng.choice((TagMatch("a"), TagMatch("", is_prefix=True), TagMatch("b")))
        await self.store.delete(name, before_seq=before_seq, match=match)

    async def _work(self) -> None:
        """Claim jobs of the queue and complete some."""

        async def never() -> None:
            await asyncio.Event().wait()

        claimed = await self.node.queues.claim(self.queue, "w", 5, 1000, wait_ms=0, gone=never)
        if claimed is not None and claimed.jobs and self.rng.random() < 0.8:
            seqs = [job.seq for job in claimed.jobs]
            await self.node.queues.ack(self.queue, "w", seqs, None)

    # -- routers ---------------------------------------------------------------------------

    async def _route(self) -> None:
        rng = self.rng
        for number, (source, dest, allow_cycle) in enumerate(self.edges):
            name = f"r{number}"
            if self.node.router_table.find(name) is None:
                await self._put_router(name, source, dest, allow_cycle)
        for _ in range(self.calls):
            await asyncio.sleep(rng.choice((0.0, 0.02, 0.3)))
            number = rng.randrange(len(self.edges))
            name = f"r{number}"
            source, dest, allow_cycle = self.edges[number]
            dice = rng.random()
            if dice < 0.45:
                await self._put_router(name, source, dest, allow_cycle)
            elif dice < 0.6:
                await self._delete_router(name)
                if rng.random() < 0.8:
                    await self._put_router(name, source, dest, allow_cycle)
            elif dice < 0.75:
                await self._put_refused(dest)

    async def _put_router(self, name: str, source: str, dest: str, allow_cycle: bool) -> None:
        rng = self.rng
        for topic in (source, dest):
            if rng.random() < 0.7:
                try:
                    self.store.topic(topic)
                except TopicsError:
                    await self._try_put(topic)
        known = self.node.router_table.find(name)
        guarantee = rng.choice(tuple(Guarantee))
        if known is not None and rng.random() < 0.5:
            guarantee = known.definition.guarantee
        definition = RouterDefinition(
            source,
            dest,
            preserve_node=rng.random() < 0.8,
            preserve_tag=rng.random() < 0.8,
            filter=rng.choice(_FILTERS),
            allow_cycle=allow_cycle,
            guarantee=guarantee,
        )
        spec = RouterSpec(definition, from_earliest=rng.random() < 0.6)
        try:
            await self.node.routers.put(name, spec)
        except TopicsError as error:
            if error.code not in _REFUSED and error.code is not Code.ROUTER_CYCLE:
                raise

    async def _try_put(self, name: str) -> None:
        try:
            await self.store.put_topic(name, self.configs[name], keep_type=False)
        except TopicsError as error:
            if error.code not in _REFUSED | _OF_TYPE:
                raise

    async def _delete_router(self, name: str) -> None:
        try:
            await self.node.routers.delete(name)
        except TopicsError as error:
            if error.code not in _REFUSED:
                raise

    async def _put_refused(self, dest: str) -> None:
        """Put a router from a second source to a destination: it is refused and creates nothing."""
        table = self.node.router_table
        if not any(router.definition.dest == dest for router in table):
            return
        before = [router.name for router in table]
        refusal = None
        try:
            await self.node.routers.put("second", RouterSpec(RouterDefinition("phantom", dest)))
        except TopicsError as error:
            refusal = error
        assert refusal is not None, f"a second source of {dest}, beside {before}"
        assert refusal.code is Code.TOPIC_EXISTS_INCOMPATIBLE
        assert (refusal.detail or {})["reason"] == "router_dest_fan_in"
        self.refused += 1
        assert table.find("second") is None
        assert self.node.registry.find("phantom") is None
