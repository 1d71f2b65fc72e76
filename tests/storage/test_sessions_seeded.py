"""Watch sessions on a disk that dies: journaled facts survive a kill, captured facts survive a
power cut, and a recovered position is never behind them.

One `Run` is one process: recovery, journal, commits, checkpoints as `node.py` wires them, over the
fake disk. `Promised` outlives them.
"""

from __future__ import annotations

import asyncio
import random

import pytest

from tests.storage.fake_disk import FakeDisk, Mode, SimulatedCrash
from tests.storage.journal.journal_rig import SMALL, WAL, Life, new_disk
from tests.unit.engine.rig import HandClock, ListSegments, NowOffload
from topics_server.engine.background.checkpointer import Checkpointer
from topics_server.engine.background.large_appends import LargeAppends
from topics_server.engine.background.recovery import Recovery, Stop
from topics_server.engine.commit.notifier import Notifier
from topics_server.engine.commit.pipeline import CommitPipeline
from topics_server.engine.subscribe.cursors import Cursor
from topics_server.engine.subscribe.session_service import WatchSessions
from topics_server.engine.subscribe.sessions import SessionTable, WatchSession
from topics_server.engine.topic.registry import Registry
from topics_server.values.appends import AppendLimits
from topics_server.values.entries import SESSIONS_ID, SessionOptions
from topics_server.values.errors import StorageError
from topics_server.wal.journal.journal import Journal
from topics_server.wal.journal.replay import JournalReplay
from topics_server.wal.journal.workers import InlineWorker
from topics_server.wal.snapshots.store import PublishedSnapshots

TTL_MS = 1_000
OPTIONS = SessionOptions(["u"], 256, 262_144, 15_000, 6, False)
FILTERS = ('["Not","sent"]', None)


class Promised:
    """The state that recovery finds. `answered`: position last journaled; `captured`: in the last
    snapshot.

    `live`: the real position of each session. `gone`: ids that were reported as expired. `filters`:
    those that sessions were opened with.
    """

    def __init__(self) -> None:
        self.answered: dict[str, int] = {}
        self.captured: dict[str, int] = {}
        self.live: dict[str, int] = {}
        self.gone: set[str] = set()
        self.filters: dict[str, str | None] = {}

    def check(self, table: SessionTable, mode: Mode | None) -> None:
        """Compare the recovered sessions with the promises."""
        found = {session.wid: session for session in table}
        floor = dict(self.captured)
        if mode != "power":
            for wid, seq in self.answered.items():
                floor[wid] = max(seq, floor.get(wid, 0))
        for wid, seq in floor.items():
            if wid in self.gone:
                continue
            assert wid in found, f"{wid} was promised after {mode}"
            assert found[wid].cursors["t"].seq >= seq, f"{wid} went back after {mode}"
        for wid, session in found.items():
            assert session.options == OPTIONS
            # A session whose opening was cut off may have either filter.
            may_have = (self.filters[wid],) if wid in self.filters else FILTERS
            assert session.filter in may_have, f"{wid} has another filter after {mode}"
            assert session.is_restored
            assert wid not in self.live or session.cursors["t"].seq <= self.live[wid]
        self.live = {wid: session.cursors["t"].seq for wid, session in found.items()}
        # Recovered sessions were made durable before they were served.
        self.answered, self.captured = dict(self.live), dict(self.live)


class Run:
    """One process, from its recovery on."""

    def __init__(self, disk: FakeDisk, promised: Promised, clock: HandClock) -> None:
        self.disk = disk
        self.promised = promised
        self.clock = clock
        self.rng = disk.rng
        self.loop = asyncio.new_event_loop()
        self.defects: list[BaseException] = []
        self.loop.set_exception_handler(self._on_exception)
        self.table = SessionTable()
        self.sessions: WatchSessions
        self.checkpointer: Checkpointer
        self.commits: CommitPipeline

    def _on_exception(self, loop: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
        error = context.get("exception")
        # Errors during a crash prove nothing.
        if isinstance(error, BaseException) and not self.disk.crashed:
            self.defects.append(error)

    def recover(self, mode: Mode | None) -> None:
        projections = {SESSIONS_ID: self.table}
        snapshots = PublishedSnapshots(self.disk, "data")
        image = snapshots.newest()
        replay = JournalReplay(self.disk, WAL, synced_lsn=image.last_lsn if image else 0)
        registry = Registry()
        recovery = Recovery(
            registry,
            ListSegments(),
            image,
            replay,
            NowOffload(),
            LargeAppends(AppendLimits()),
            projections,
        )
        stop = Stop(was_clean=mode is None, same_boot=mode != "power")
        found = self.loop.run_until_complete(recovery.run(stop, lambda: None))
        journal = Journal.create(
            self.disk,
            WAL,
            replay,
            wal_set=1,
            shard_count=2,
            loop=self.loop,
            workers=lambda name: InlineWorker(self.loop, lambda: self.rng.choice((0, 1, 3))),
            sync_interval_ms=self.rng.choice((0, 100_000)),
            sizes=SMALL,
            file_ids=lambda: self.rng.getrandbits(64),
        )
        self.commits = CommitPipeline(
            registry, journal, Notifier(), found.last_lsn + 1, projections
        )
        self.sessions = WatchSessions(
            self.table, self.commits, self.clock, ttl_ms=TTL_MS, max_sessions=0
        )
        self.promised.check(self.table, mode)

        async def seal_nothing(bound_bytes: int) -> None:
            pass

        self.checkpointer = Checkpointer(
            registry,
            self.commits,
            journal,
            snapshots,
            NowOffload(),
            self.clock,
            seal_nothing,
            projections,
        )

    async def live(self, steps: int) -> None:
        """Take so many random steps, several in flight at once."""
        under_way: set[asyncio.Task[None]] = set()
        for _ in range(steps):
            step = self.rng.choice(
                (self.open, self.open, self.stream, self.stream, self.stream, self.expire)
            )
            if self.rng.random() < 0.05:
                step = self.checkpoint
            under_way.add(self.loop.create_task(step()))
            for _ in range(self.rng.choice((0, 1, 1, 4))):
                await asyncio.sleep(0)
            if self.disk.crashed:
                break
        for _ in range(1_000):
            if self.disk.crashed or all(task.done() for task in under_way):
                return
            await asyncio.sleep(0)
        raise AssertionError("a step does not end")

    async def open(self) -> None:
        self._reclaim()
        wanted = FILTERS[len(self.promised.filters) % 2]
        session = await self.sessions.open(OPTIONS, [Cursor("t", 1, 1, 10)], wanted=wanted)
        if self.disk.crashed:
            return
        self.promised.filters[session.wid] = wanted
        self.promised.answered[session.wid] = 10
        self.promised.live.setdefault(session.wid, 10)

    async def stream(self) -> None:
        if not len(self.table):
            return
        session = self.rng.choice(list(self.table))
        self.sessions.begin(session)
        for _ in range(self.rng.choice((1, 3))):
            await asyncio.sleep(0)
            session.cursors["t"].seq += self.rng.choice((0, 1, 5))
            self.promised.live[session.wid] = session.cursors["t"].seq
        seq = session.cursors["t"].seq
        self.sessions.end(session)
        ticket = self.commits.newest(SESSIONS_ID)
        if session.is_streaming or ticket is None:
            return  # another stream has the session; that stream notes its end
        ticket.waiters.append(lambda: self._ended(session, seq, ticket.error is None))

    def _ended(self, session: WatchSession, seq: int, is_written: bool) -> None:
        if is_written and not self.disk.crashed:
            before = self.promised.answered.get(session.wid, 0)
            self.promised.answered[session.wid] = max(before, seq)

    async def expire(self) -> None:
        self.clock.move(self.rng.choice((1, TTL_MS // 3)))
        self._reclaim()

    def _reclaim(self) -> None:
        before = {session.wid for session in self.table}
        self.sessions.find("")
        self.promised.gone |= before - {session.wid for session in self.table}

    async def checkpoint(self) -> None:
        there = {session.wid: session.cursors["t"].seq for session in self.table}
        try:
            await self.checkpointer.take()
        except StorageError:
            return
        if not self.disk.crashed:
            self.promised.captured = there

    def end(self) -> None:
        """Forget the process; raise its errors."""
        tasks = asyncio.all_tasks(self.loop)
        for task in tasks:
            task.cancel()
        if not self.disk.crashed:
            self.disk.crash("kill")

        async def bury() -> None:
            await asyncio.gather(*tasks, return_exceptions=True)

        self.loop.run_until_complete(bury())
        self.loop.close()
        if self.defects:
            raise self.defects[0]


def run_seed(seed: int) -> tuple[int, int]:
    """Several lives of one directory; return how many ended abruptly, and the sessions at the
    end.
    """
    disk = new_disk(seed)
    disk.make_dir("data")
    disk.make_dir("data/snapshots")
    disk.sync_dir("data")
    promised, clock = Promised(), HandClock()
    rng = random.Random(seed)
    mode: Mode | None = None
    cut = 0
    for _ in range(6):
        run = Run(disk, promised, clock)
        try:
            run.recover(mode)
            if rng.random() < 0.7:
                disk.crash_at(rng.randint(1, 60))
            run.loop.run_until_complete(run.live(rng.randint(5, 60)))
        except SimulatedCrash:
            pass
        cut += disk.crashed
        died: Mode = rng.choice(("kill", "kill", "power"))
        if not disk.crashed or died == "power":
            disk.crash(died)
        mode = died
        run.end()
        disk = disk.reopen()
    last = Run(disk, promised, clock)
    last.recover(mode)
    count = len(last.table)
    last.end()
    return cut, count


@pytest.mark.parametrize("chunk", range(5))
def test_no_promise_is_broken(chunk: int) -> None:
    cut = found = 0
    for seed in range(chunk * 20, chunk * 20 + 20):
        try:
            ended, count = run_seed(seed)
        except BaseException:
            print(f"seed {seed}")
            raise
        cut += ended
        found += count
    assert cut > 20, "most lives end in mid-flight"
    assert found > 20, "sessions are found"


def test_sessions_that_expired_before_a_kill_are_gone_soon_after_it() -> None:
    """No caller waits for their closing, so the closing may be lost, but not their age."""
    disk = new_disk(1)
    disk.make_dir("data")
    disk.make_dir("data/snapshots")
    disk.sync_dir("data")
    promised, clock = Promised(), HandClock()
    run = Run(disk, promised, clock)
    run.recover(None)
    run.loop.run_until_complete(run.open())
    run.loop.run_until_complete(run.checkpointer.take())
    clock.move(TTL_MS)
    disk.fail("write", "enospc", path="*.wal", times=None)
    run.sessions.find("")
    assert len(run.table) == 0
    run.end()
    disk = disk.reopen()
    promised.gone |= set(promised.live)
    again = Run(disk, promised, clock)
    again.recover("kill")
    assert len(again.table) == 1
    assert again.sessions.find(next(iter(again.table)).wid) is None
    again.end()


def test_a_full_disk_stops_no_watcher() -> None:
    disk = new_disk(2)
    disk.make_dir("data")
    disk.make_dir("data/snapshots")
    disk.sync_dir("data")
    run = Run(disk, Promised(), HandClock())
    run.recover(None)
    disk.fail("write", "enospc", path="*.wal", times=None)
    session = run.loop.run_until_complete(
        asyncio.wait_for(run.sessions.open(OPTIONS, [Cursor("t", 1, 1, 10)]), 5)
    )
    assert run.sessions.find(session.wid) is session
    run.sessions.begin(session)
    run.sessions.end(session)
    disk.heal()
    run.loop.run_until_complete(run.checkpointer.take())
    run.end()
    again = Run(disk.reopen(), Promised(), HandClock())
    again.recover("kill")
    assert again.sessions.find(session.wid) is not None, "the checkpoint has it"
    again.end()


def test_what_is_no_topics_goes_to_the_first_shard_however_many_there_are() -> None:
    for shards in (1, 2, 3, 7):
        life = Life(new_disk(0), shards=shards)
        life.recover()
        assert life.journal.shard_of(SESSIONS_ID) == 0
        assert life.journal.shard_of(8) == 8 % shards
        life.close()
