"""Random transfers of jobs between two topics of a node on a failing disk, each run from one seed.

Jobs are appended to `jobs`, moved to `dead` as dead letters, moved back, and deleted from either,
several at once, while checkpoints are taken, runs are sealed, the disk refuses calls, and the
process or the machine dies at any disk operation. After every start each job must be in at most one
of the two topics, once, and only where the answers (or the calls in flight) allow it. Called by
`test_moves`.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import defaultdict
from typing import Final

from tests.model.world import World
from tests.storage.fake_disk import Mode, SimulatedCrash
from topics_server.engine.answers import ReadRequest
from topics_server.engine.commit.transfers import OutcomeUnknown
from topics_server.engine.store import Store
from topics_server.values.appends import decode_append
from topics_server.values.entries import Source
from topics_server.values.errors import Code, StorageError, TopicsError
from topics_server.values.model import Durability, TopicConfig, TopicType
from topics_server.wal.tools.dump import verify

JOBS: Final = "jobs"
DEAD: Final = "dead"
GONE: Final = "gone"
_CLASSES: Final = (Durability.FSYNC, Durability.DISK, Durability.MEMORY)
_WORKERS: Final = 3
_CALLS: Final = 8


class Job:
    """Where a job may be found after a kill, and after a loss of power; `seq` if it is known."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.place = GONE
        self.seq = 0
        self.after_kill = {GONE}
        self.after_power = {GONE}
        # A call is in flight; if a sync failed meanwhile, this holds until the next start.
        self.is_busy = False
        self.calls = 0
        self._before = (self.after_kill, self.after_power)

    def begin(self, place: str) -> None:
        """Begin a call that may move the job to `place`."""
        assert not self.is_busy
        self.is_busy = True
        self.calls += 1
        self._before = (self.after_kill, self.after_power)
        self.after_kill = self.after_kill | {place}
        self.after_power = self.after_power | {place}

    def undo(self) -> None:
        """Note that the call was refused and changed nothing."""
        self.after_kill, self.after_power = self._before
        self.is_busy = False

    def end(self, place: str, seq: int, *, synced: bool) -> None:
        """The call has its answer; `synced`: it also survives a power loss."""
        self.place, self.seq = place, seq
        self.after_kill = {place}
        self.after_power = {place} if synced else self.after_power
        self.is_busy = False

    def seen(self, place: str, seq: int) -> None:
        """Note that a start found the job there, so its place is now certain."""
        self.place, self.seq = place, seq
        self.after_kill = self.after_power = {place}
        self.is_busy = False


class MovingSimulation:
    """One life of a data directory. `moves`: the number of successful answers."""

    def __init__(self, seed: int, *, boots: int = 4, faults: bool = True) -> None:
        self.rng = rng = random.Random(f"moving {seed}")
        self.seed = seed
        self.boots = boots
        self.faults = faults
        self.world = World(
            seed,
            wal_shards=rng.choice((1, 2, 3)),
            segment_max_events=rng.choice((3, 8, 50)),
            checkpoint_interval_ms=rng.choice((60, 400, 3_600_000)),
        )
        self.classes = {JOBS: rng.choice(_CLASSES), DEAD: rng.choice(_CLASSES)}
        self.jobs: dict[int, Job] = {}
        self.dead_lettered = 0
        self.moves = self.crashes = self.unknown = self.ended_at_start = 0

    def run(self) -> None:
        """Run all boots and check once more at the end. Raises `AssertionError` with the seed."""
        with self.world.life(self.seed):
            end = "clean"
            for number in range(self.boots + 1):
                end = self._boot(end, is_last=number == self.boots)
            assert verify(self.world.disk, "data").problems == []

    # -- boots -----------------------------------------------------------------------------

    def _boot(self, end: str, *, is_last: bool) -> str:
        world, rng = self.world, self.rng
        if rng.random() < 0.3:
            world.changes["wal_shards"] = rng.choice((1, 2, 3))
        end = self._start(end, may_crash=not is_last)
        if is_last:
            world.stop()
            return "clean"
        next_end = rng.choice(("clean", "kill", "power", "power"))
        if next_end != "clean":
            world.disk.crash_at(rng.randint(1, 160))
        try:
            world.run(self._live())
            if next_end == "clean":
                world.disk.heal()
                assert world.node is not None
                if not world.node.store.read_only_shards():
                    world.stop()
                    return "clean"
                next_end = "kill"
        except SimulatedCrash:
            pass
        return self._crash("kill" if next_end == "kill" else "power")

    def _crash(self, mode: Mode) -> str:
        self.crashes += 1
        self.world.crash(mode)
        return mode

    def _start(self, end: str, *, may_crash: bool) -> str:
        """Start the server, sometimes with crashes, until it is ready; then check every job."""
        world, rng = self.world, self.rng
        while True:
            if may_crash and rng.random() < 0.4:
                world.disk.crash_at(rng.randint(1, 60))
            try:
                node = world.start()
                world.disk.heal()
                world.run(self._look(end))
                if " 0 moves ended" not in node.report:
                    self.ended_at_start += 1
                return end
            except SimulatedCrash:
                mode = self._crash(rng.choice(("kill", "power")))
                end = "power" if "power" in (end, mode) else mode

    async def _look(self, end: str) -> None:
        """Check that every job is where it may be, once. What is seen is certain from now on."""
        found: dict[int, list[tuple[str, int]]] = defaultdict(list)
        for name in (JOBS, DEAD):
            for number, seq in await self._read(name):
                found[number].append((name, seq))
        for number, places in found.items():
            assert len(places) == 1, f"job {number} is at {places}"
        for number, job in self.jobs.items():
            place, seq = found[number][0] if number in found else (GONE, 0)
            allowed = job.after_power if end == "power" else job.after_kill
            assert place in allowed, f"job {number} is {place}, may be {allowed} after {end}"
            self.dead_lettered += (job.place, place) == (JOBS, DEAD)
            job.seen(place, seq)
        self._check_count()

    def _check_count(self) -> None:
        """The queue's own count of its dead letters is exact, if no job can be lost by itself."""
        node = self.world.node
        assert node is not None
        topic = node.registry.find(JOBS)
        if topic is None or topic.config.type is not TopicType.QUEUE:
            return
        if topic.config.durability is Durability.FSYNC:
            counts = node.lease_table.counts(topic, self.world.clock.now_ms())
            assert counts.dead_lettered == self.dead_lettered

    def _has(self, name: str) -> bool:
        try:
            self.store.topic(name)
        except TopicsError:
            return False
        return True

    async def _read(self, name: str) -> list[tuple[int, int]]:
        """(job, seq) of every record."""
        if not self._has(name):
            return []
        rows: list[tuple[int, int]] = []
        from_seq = 0
        while True:
            page = await self.store.read(name, ReadRequest(from_seq, 1000, 1 << 20))
            for piece in page.pieces:
                for row in piece.rows:
                    rows.append((int(piece.block.data(row)), piece.block.first_seq + row))
            from_seq = page.next_from_seq
            if page.caught_up:
                return rows

    @property
    def store(self) -> Store:
        """The store of the running node."""
        assert self.world.node is not None
        return self.world.node.store

    # -- one boot --------------------------------------------------------------------------

    async def _live(self) -> None:
        await asyncio.gather(self._disturb(), *[self._work() for _ in range(_WORKERS)])

    async def _disturb(self) -> None:
        rng, world = self.rng, self.world
        node = world.node
        assert node is not None
        for _ in range(_CALLS):
            await asyncio.sleep(rng.choice((0.0, 0.0, 0.05, 0.4)))
            dice = rng.random()
            if dice < 0.4:
                idle = [(job, job.calls) for job in self.jobs.values() if not job.is_busy]
                try:
                    await node.checkpointer.take()
                except StorageError:
                    continue
                for job, calls in idle:
                    if job.calls == calls:
                        job.after_power = job.after_kill
            elif dice < 0.55 and self.faults:
                op, error = rng.choice((("write", "enospc"), ("write", "eio"), ("sync", "eio")))
                if op == "sync" and rng.random() < 0.6:
                    continue
                world.disk.fail(op, error, nth=rng.randint(1, 4), times=rng.choice((1, 2)))  # type: ignore[arg-type]
            else:
                world.disk._rules.clear()

    async def _work(self) -> None:
        rng = self.rng
        for _ in range(_CALLS):
            dice = rng.random()
            if dice < 0.3:
                await self._append()
            elif dice < 0.6:
                await self._move(JOBS, DEAD)
            elif dice < 0.75:
                await self._move(DEAD, JOBS)
            elif dice < 0.9:
                await self._delete(rng.choice((JOBS, DEAD)))
            else:
                await asyncio.sleep(rng.choice((0.0, 0.01, 0.3)))

    def _pick(self, place: str) -> list[Job]:
        idle = [job for job in self.jobs.values() if job.place == place and not job.is_busy]
        picked = self.rng.sample(idle, min(len(idle), self.rng.randint(1, 4)))
        return sorted(picked, key=lambda job: job.seq)

    async def _append(self) -> None:
        jobs = [Job(len(self.jobs) + number) for number in range(self.rng.randint(1, 4))]
        for job in jobs:
            job.begin(JOBS)
            self.jobs[job.number] = job
        body = json.dumps({"records": [{"data": job.number} for job in jobs]}).encode()
        config = TopicConfig(type=TopicType.QUEUE, durability=self.classes[JOBS])
        try:
            done = await self.store.append(
                JOBS, body, decode_append(body), header_key=None, config=config
            )
        except TopicsError as error:
            self._refused(jobs, error)
            return
        for seq, job in enumerate(jobs, done.first_seq):
            job.end(JOBS, seq, synced=self._is_synced(JOBS))

    async def _move(self, origin: str, target: str) -> None:
        if not self._has(target) and self.rng.random() < 0.5:
            try:
                config = TopicConfig(type=TopicType.QUEUE, durability=self.classes[target])
                await self.store.put_topic(target, config, keep_type=False)
            except TopicsError:
                return
        jobs = self._pick(origin)
        if not jobs:
            return
        for job in jobs:
            job.begin(target)
        body = json.dumps({"records": [{"data": job.number} for job in jobs]}).encode()
        topic_id = self.store.topic(origin).topic_id
        source = Source(topic_id, [job.seq for job in jobs], is_redrive=origin == DEAD)
        try:
            done = await self.store.append_derived(target, body, source)
        except OutcomeUnknown:
            self.unknown += 1
            return  # the job stays busy, so no call touches it, until a restart decides
        except TopicsError:
            for job in jobs:
                job.undo()
            return
        self.moves += 1
        self.dead_lettered += len(jobs) if target == DEAD else 0
        for seq, job in enumerate(jobs, done.first_seq):
            job.end(target, seq, synced=True)

    async def _delete(self, place: str) -> None:
        jobs = self._pick(place)
        if not jobs:
            return
        for job in jobs:
            job.begin(GONE)
        seqs = [job.seq for job in jobs]
        try:
            deleted = await self.store.delete_seqs(place, seqs)
        except TopicsError as error:
            self._refused(jobs, error)
            return
        assert deleted.seqs == seqs, "nobody else deletes these"
        for job in jobs:
            job.end(GONE, 0, synced=self._is_synced(place))

    def _is_synced(self, name: str) -> bool:
        return self.store.topic(name).config.durability is Durability.FSYNC

    def _refused(self, jobs: list[Job], error: TopicsError) -> None:
        """Nothing changed, unless a sync failed: then the result is unknown until a restart."""
        if error.code is not Code.STORAGE_READ_ONLY:
            for job in jobs:
                job.undo()
