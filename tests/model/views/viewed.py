"""Random views over a node on a failing disk, each run from one seed, judged by a plain fold.

A run is a few boots of one data directory. Writers append, delete, configure, drop and recreate two
topics of every class; one driver defines, changes, rebuilds, skips and deletes views; another one
queries with `after`. A boot ends cleanly, with `kill -9` or with a power cut at any disk operation;
the views' files lose power by a model of their own (`view_disk`). Whenever everything has settled,
and at the end:

- each view's rows are the fold of exactly the records that were applied (`view_fold`);
- these are all live records up to its position, except skipped ones, and no record that the log
lost; other records only if they were deleted or evicted since;
- a view with `on_delete: rebuild` has no deleted record;
- a rebuild has the rows of the fold of what is live.

Called by `test_viewed` and `tests/crash/views`.
"""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import tempfile
from pathlib import Path
from typing import Any, Final

import numpy as np

from tests.model.judging import End, look
from tests.model.views.view_disk import (
    Delivered,
    SimulatedApplier,
    SimulatedQuerier,
    ViewDisk,
)
from tests.model.views.view_fold import DEFINITIONS, fold
from tests.model.world import World
from tests.storage.fake_disk import Mode, SimulatedCrash
from topics_server.engine.store import Store
from topics_server.engine.topic.applied import Applied
from topics_server.node.boot import Boot, Writers
from topics_server.node.ground import Ground
from topics_server.node.node import Node
from topics_server.values.appends import decode_append
from topics_server.values.entries import Entry, RecordsDeleted
from topics_server.values.errors import Code, StorageError, TopicsError
from topics_server.values.model import (
    Durability,
    OnDelete,
    TagMatch,
    TopicConfig,
    ViewDefinition,
)
from topics_server.views.definition import make_definition
from topics_server.views.view import View

TOPICS: Final = ("t0", "t1")
VIEWS: Final = ("v0", "v1", "v2")
TTL_MS: Final = 60_000
_TAGS: Final = (None, "a", "a:1", "b")
_NODES: Final = (None, None, "n1")
_EXPECTED: Final = frozenset(
    {
        Code.TOPIC_NOT_FOUND,
        Code.VIEW_NOT_FOUND,
        Code.VIEW_TIMEOUT,
        Code.NOT_READY,
        Code.STORAGE_READ_ONLY,
        Code.QUERY_FAILED,
        Code.INVALID_REQUEST,
    }
)
# Longer than every debounce, retry and wait of a view together.
_QUIET_S: Final = 40.0


class ViewedBoot(Boot):
    """A start whose view processes are simulated; deletes of its node are noted."""

    run_of: ViewedSimulation

    async def start(self) -> Node:
        """See `Boot.start`."""
        disk = self.run_of.disk
        self.ground.views_dir = disk.root
        self.ground.view_process = self.run_of.applier = SimulatedApplier(disk)
        self.ground.view_queries = SimulatedQuerier(disk)
        return await super().start()

    def open_journal(self, replay: Any, next_lsn: int, published: Any) -> Writers:
        """See `Boot.open_journal`."""
        self.run_of.note_recovered(self.ground)
        writers = super().open_journal(replay, next_lsn, published)
        writers.commits.observers.append(self.run_of.observe)
        return writers


class ViewedSimulation:
    """One run. `calls`: of one driver in one boot."""

    def __init__(self, seed: int, *, boots: int = 3, calls: int = 10) -> None:
        self.seed = seed
        self.rng = rng = random.Random(f"viewed {seed}")
        self.boots = boots
        self.calls = calls
        self.root = Path(tempfile.mkdtemp(prefix="views-", dir=_memory()))
        self.disk = ViewDisk(rng, self.root)
        self.applier: SimulatedApplier
        changes: dict[str, Any] = {"wal_shards": rng.choice((1, 1, 2))}
        changes["segment_max_events"] = rng.choice((3, 8, 20))
        if rng.random() < 0.6:
            changes["checkpoint_interval_ms"] = rng.choice((50, 300, 900))
        self.world = World(seed, **changes)
        self.world.boot_type = ViewedBoot
        self.kinds: dict[tuple[str, str], str] = {}
        self._lost: dict[int, set[int]] = {}
        self._deleted: dict[int, set[int]] = {}
        self._n = 0
        self.crashes = self.ahead = self.judged = self.records = self.rebuilt = 0

    def run(self) -> None:
        """Run all boots and check once more at the end. Raises `AssertionError` with the seed."""
        try:
            with self.world.life(self.seed):
                for number in range(self.boots + 1):
                    self._boot(is_last=number == self.boots)
        finally:
            self.disk.kill()
            shutil.rmtree(self.root, ignore_errors=True)

    # -- boots -----------------------------------------------------------------------------

    def _boot(self, *, is_last: bool) -> None:
        world, rng = self.world, self.rng
        self._start(may_crash=not is_last)
        if is_last:
            world.run(self._settle())
            world.run(self._rebuild_all())
            world.stop()
            return
        end: End = rng.choice(("clean", "kill", "power", "power"))
        if end != "clean" and rng.random() < 0.7:
            world.disk.crash_at(rng.randint(1, 200))
        try:
            world.run(self._live())
            if end == "clean":
                world.disk.heal()
                world.stop()
                return
        except SimulatedCrash:
            pass
        self._crash("kill" if end == "kill" else "power")

    def _crash(self, mode: Mode) -> None:
        self.crashes += 1
        self.world.crash(mode)
        if mode == "kill":
            self.disk.kill()
        else:
            self.disk.lose_power()

    def _start(self, *, may_crash: bool) -> None:
        world, rng = self.world, self.rng
        while True:
            if may_crash and rng.random() < 0.25:
                world.disk.crash_at(rng.randint(1, 60))
            ViewedBoot.run_of = self
            try:
                world.start()
                world.disk.heal()
                return
            except SimulatedCrash:
                self._crash(rng.choice(("kill", "power")))

    @property
    def node(self) -> Node:
        """The running node."""
        assert self.world.node is not None
        return self.world.node

    @property
    def store(self) -> Store:
        """The store of the running node."""
        return self.node.store

    # -- truth -----------------------------------------------------------------------------

    def note_recovered(self, ground: Ground) -> None:
        """Note which seqs each log lost, before anything new can hide that.

        Those without a record that no hole covers were deleted, maybe by a call that the crash cut
        off.
        """
        known = set().union(*self.disk.delivered.values())
        for topic in ground.registry:
            log = topic.log
            lost = self._lost.setdefault(topic.topic_id, set())
            deleted = self._deleted.setdefault(topic.topic_id, set())
            for seq in known:
                if not log.evict_floor <= seq <= log.head_seq or log.next_live(seq) == seq:
                    continue
                hole = log.hole_at_or_after(seq) if log.holes else None
                is_lost = hole is not None and hole.first_seq <= seq
                (lost if is_lost else deleted).add(seq)

    def observe(self, lsn: int, entry: Entry, applied: Applied) -> None:
        """Note which records a delete hit."""
        if isinstance(entry, RecordsDeleted):
            deleted = self._deleted.setdefault(entry.topic_id, set())
            columns = (np.frombuffer(column, "<u8") for column in (entry.firsts, entry.lasts))
            for first, last in zip(*columns, strict=True):
                deleted.update(range(int(first), int(last) + 1))

    # -- one boot --------------------------------------------------------------------------

    async def _live(self) -> None:
        await asyncio.gather(self._define(), self._disturb(), self._write(), self._write())
        self.world.disk.heal()
        if self.rng.random() < 0.5:
            await self._settle()

    async def _disturb(self) -> None:
        rng, world = self.rng, self.world
        for _ in range(self.calls):
            await asyncio.sleep(rng.choice((0.0, 0.01, 0.05, 0.4)))
            dice = rng.random()
            if dice < 0.3:
                try:
                    await self.node.checkpointer.take()
                except StorageError:
                    continue
            elif dice < 0.4:
                world.clock.step(rng.choice((50, 5000, TTL_MS // 2, TTL_MS)))
            elif dice < 0.7:
                await self._tried(self._query())

    async def _query(self) -> None:
        name, view = self.rng.choice(TOPICS), self.rng.choice(VIEWS)
        head = self.store.topic(name).log.head_seq
        sql = self.node.views.named_query(name, view, "all")
        answer = await self.node.views.query(name, view, sql, {}, after=head)
        assert answer.processed_seq >= head

    async def _tried(self, call: Any) -> None:
        try:
            await call
        except TopicsError as error:
            if error.code not in _EXPECTED:
                raise
        except StorageError:
            pass

    # -- writers ---------------------------------------------------------------------------

    async def _write(self) -> None:
        rng = self.rng
        for _ in range(self.calls):
            name = rng.choice(TOPICS)
            dice = rng.random()
            if dice < 0.62:
                await self._tried(self._append(name))
            elif dice < 0.76:
                await self._tried(self._delete(name))
            elif dice < 0.84:
                put = self.store.put_topic(name, self._config(), keep_type=False)
                await self._tried(put)
            elif dice < 0.87:
                await self._tried(self.store.drop_topic(name, if_empty=False))
            else:
                await asyncio.sleep(rng.choice((0.0, 0.01, 0.3, 1.5)))

    def _config(self) -> TopicConfig:
        rng = self.rng
        kind = rng.choice(("plain", "plain", "plain", "cap", "ttl"))
        return TopicConfig(
            durability=rng.choice(tuple(Durability)),
            cap_records=rng.choice((1, 5, 12)) if kind == "cap" else 0,
            ttl_ms=TTL_MS if kind == "ttl" else 0,
        )

    async def _append(self, name: str) -> None:
        rng = self.rng
        records = []
        for _ in range(rng.choice((1, 1, 2, 5, 11))):
            self._n += 1
            record: dict[str, Any] = {"data": {"n": self._n, "k": f"k{self._n % 5}"}}
            if rng.random() < 0.3:
                record["meta"] = {"m": self._n}
            tag, node = rng.choice(_TAGS), rng.choice(_NODES)
            record |= {} if tag is None else {"tag": tag}
            record |= {} if node is None else {"node": node}
            records.append(record)
        body = json.dumps({"records": records}).encode()
        config = self._config() if rng.random() < 0.5 else TopicConfig()
        await self.store.append(name, body, decode_append(body), header_key=None, config=config)

    async def _delete(self, name: str) -> None:
        rng = self.rng
        log = self.store.topic(name).log
        if rng.random() < 0.5:
            before_seq = rng.randint(log.earliest_seq, log.head_seq + 1)
            await self.store.delete(name, before_seq=before_seq, match=None)
        else:
            match = rng.choice((TagMatch("a"), TagMatch("", is_prefix=True), TagMatch("b")))
            await self.store.delete(name, before_seq=None, match=match)

    # -- views -----------------------------------------------------------------------------

    async def _define(self) -> None:
        rng, views = self.rng, self.node.views
        for _ in range(self.calls):
            await asyncio.sleep(rng.choice((0.0, 0.0, 0.02, 0.3)))
            topic, name = rng.choice(TOPICS), rng.choice(VIEWS)
            dice = rng.random()
            if dice < 0.5:
                await self._tried(self._put(topic, name))
            elif dice < 0.6:
                await self._tried(views.rebuild(topic, name, skip_seq=None))
            elif dice < 0.68:
                await self._tried(views.delete(topic, name))
            elif dice < 0.8:
                await self._tried(self._skip(topic, name))

    async def _put(self, topic: str, name: str) -> None:
        kind = self.rng.choice(tuple(DEFINITIONS))
        on_delete = self.rng.choice((OnDelete.KEEP, OnDelete.KEEP, OnDelete.REBUILD))
        await self.node.views.put(topic, name, definition_of(kind, on_delete))

    async def _skip(self, topic: str, name: str) -> None:
        failure = self.node.views.get(topic, name).failure
        if failure is not None and failure.seq:
            await self.node.views.rebuild(topic, name, skip_seq=failure.seq)

    # -- judging ---------------------------------------------------------------------------

    async def _settle(self) -> None:
        self.applier.may_die = False
        for view in list(self.node.views._views.values()):
            if await self._settled(view):
                await self._judge(view)
        self.applier.may_die = True

    async def _settled(self, view: View) -> bool:
        """Wait until the view has nothing left to do; False if its topic is gone."""
        loop = asyncio.get_running_loop()
        end = loop.time() + _QUIET_S
        while loop.time() < end:
            try:
                state = view.state()
            except TopicsError:
                return False
            if state.failure is not None and state.failure.seq:
                await view.skip(state.failure.seq)
            elif state.status == "ready" and state.lag == 0 and view._delete_timer is None:
                head = state.head_seq
                sql = view.definition.queries["all"]
                await self.node.views.query(view.topic_name, view.name, sql, {}, after=head)
                if view.state().status == "ready" and view._delete_timer is None:
                    return True
            await asyncio.sleep(0.1)
        raise AssertionError(f"view {view.name} of {view.topic_name} never settles: {view.state()}")

    async def _judge(self, view: View) -> None:
        """Compare a view's rows with the fold, and the applied records with the log."""
        name = view.topic_name
        active = view.active
        assert active is not None
        path = active.path
        rows = await self._rows(view)
        seen = await look(self.store, name, self.world.clock)
        if seen is None or view.active is not active:
            return
        delivered, skipped = self.disk.delivered[path], self.disk.skipped[path]
        where = f"{name}/{view.name}, {view.definition.shortcut or 'custom'}"
        kind = _kind_of(view.definition)
        assert _sorted(rows) == _sorted(fold(kind, delivered)), where
        topic = self.store.topic(name)
        live = seen.records
        missing = live.keys() - delivered.keys() - skipped
        assert not missing, f"{where}: lacks the live records {sorted(missing)}"
        for seq in live.keys() & delivered.keys():
            rec = live[seq]
            payload = (rec.data, rec.meta) if delivered[seq].data else (b"", b"")
            told = Delivered(rec.ts, rec.node, rec.tag, *payload)
            assert delivered[seq] == told, f"{where}: record {seq} is another one"
        lost = self._lost.get(topic.topic_id, set()) & delivered.keys()
        assert not lost, f"{where}: holds the lost records {sorted(lost)}"
        dead = {seq for seq in delivered.keys() - live.keys() if seq >= seen.earliest}
        unexplained = dead - self._deleted.get(topic.topic_id, set())
        unexplained = {seq for seq in unexplained if seq >= topic.log.evict_floor}
        assert not unexplained, f"{where}: holds {sorted(unexplained)} that nobody deleted"
        if view.definition.on_delete is OnDelete.REBUILD:
            assert not dead, f"{where}: holds the deleted records {sorted(dead)}"
        self.judged += 1
        self.records += len(delivered)
        self.ahead += view.rebuilds_total

    async def _rows(self, view: View) -> list[list[Any]]:
        sql = view.definition.queries["all"]
        answer = await self.node.views.query(view.topic_name, view.name, sql, {})
        assert not answer.is_cut
        return list(json.loads(answer.rows))

    async def _rebuild_all(self) -> None:
        """Incremental = rebuilt: build the same definition anew from the records that the log holds
        now.
        """
        self.applier.may_die = False
        for view in list(self.node.views._views.values()):
            if not await self._settled(view):
                continue
            before, old = await self._rows(view), view.active
            assert old is not None
            was = dict(self.disk.delivered[old.path])
            skipped = self.disk.skipped[old.path]
            await self.node.views.rebuild(view.topic_name, view.name, skip_seq=None)
            if not await self._settled(view):
                continue
            await self._judge(view)
            assert view.active is not None
            assert view.active is not old
            if self.disk.delivered[view.active.path] == was and not skipped:
                assert await self._rows(view) == before
                self.rebuilt += 1


def definition_of(kind: str, on_delete: OnDelete) -> ViewDefinition:
    """The definition of this kind, as the API makes it from its body."""
    body = DEFINITIONS[kind]
    return make_definition(
        schema=body.get("schema"),
        apply=body.get("apply"),
        queries=body.get("queries", {}),
        shortcut=body.get("shortcut"),
        on_delete=on_delete,
    )


_KINDS: Final = {tuple(definition_of(kind, OnDelete.KEEP).apply): kind for kind in DEFINITIONS}


def _kind_of(definition: ViewDefinition) -> str:
    return _KINDS[tuple(definition.apply)]


def _sorted(rows: list[list[Any]]) -> list[list[Any]]:
    return sorted(rows, key=repr)


def _memory() -> str | None:
    """A folder in memory if the machine has one, because the run makes thousands of small files."""
    return "/dev/shm" if Path("/dev/shm").is_dir() else None
