"""A whole node on a failing disk, in one thread and in virtual time: its seed decides every run.

`VirtualLoop` is an event loop without files or sockets: when nothing is ready it moves its clock to
the next timer, and it ends the run as soon as the disk is gone. `World` opens nodes on one disk one
after the other, runs them until closed or killed, and gives the next one what a crash left. Called
by the simulations of `tests/model`, `tests/crash` and `tests/design7`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import random
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, Final, TypeVar

from tests.storage.fake_disk import FakeDisk, Mode, SimulatedCrash
from topics_server.node.boot import Boot
from topics_server.node.ground import Ground
from topics_server.node.node import Node
from topics_server.settings import Settings
from topics_server.wal.journal.wal_file import Sizes
from topics_server.wal.journal.workers import BlockingWorker, InlineWorker
from topics_server.wal.segments.packing_process import InlinePacker

T = TypeVar("T")

SMALL: Final = Sizes(file_bytes=16_384, fill_step_bytes=4_096, reserve_bytes=1_024)
# Longer than any retry or interval of the server; a loop that runs longer is a defect.
_TURNS_MAX: Final = 200_000
# Tasks that end start others, which start others.
_BURIALS_MAX: Final = 20


class Stalled(AssertionError):
    """Every task waits for an event that will never come."""


class VirtualLoop(asyncio.BaseEventLoop):
    """An event loop whose time stands still while there is work, and jumps when there is none."""

    def __init__(self, disk: FakeDisk) -> None:
        super().__init__()
        self._now = 0.0
        self._turns = 0
        self._disk = disk
        self.defects: list[BaseException] = []
        # BaseEventLoop asks its selector how long to wait; the selector has no other use.
        self._selector = self
        self.set_exception_handler(self._note)

    def _note(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if error is not None and not isinstance(error, SimulatedCrash):
            self.defects.append(error)

    def time(self) -> float:
        """Virtual seconds."""
        return self._now

    def select(self, timeout: float | None) -> list[Any]:
        """No event comes from outside: jump to the next timer."""
        self._turns += 1
        if self._disk.crashed:
            raise SimulatedCrash
        if timeout is None or self._turns > _TURNS_MAX:
            raise Stalled(f"after {self._turns} turns, at {self._now:.1f} s")
        self._now += timeout
        return []

    def _process_events(self, event_list: list[Any]) -> None:
        """Do nothing: there are no events."""

    def _write_to_self(self) -> None:
        """Do nothing: there is no other thread."""


class FakeClock:
    """A wall clock that only tests move, and the loop's own time as the monotonic one."""

    def __init__(self, now_ms: int = 1_700_000_000_000) -> None:
        self.base_ms = now_ms
        self.max_ms = now_ms
        self.steps = 0
        self.loop: VirtualLoop | None = None
        # Whether heads may have jumped in the last start although the machine kept running: a sync
        # had failed in that boot, or a write was torn.
        self.was_doubted = False

    def now_ms(self) -> int:
        """See `engine.ports.Clock`."""
        now_ms = self.base_ms + int(self.monotonic_ms())
        self.max_ms = max(self.max_ms, now_ms)
        return now_ms

    def monotonic_ms(self) -> float:
        """See `engine.ports.Clock`."""
        return 0.0 if self.loop is None else self.loop.time() * 1000

    def step(self, by_ms: int) -> None:
        """Set the wall clock."""
        self.base_ms += by_ms
        self.steps += 1

    def hand_over(self, loop: VirtualLoop | None) -> None:
        """Use another loop's time from now on; the wall clock does not jump."""
        self.base_ms = self.now_ms()
        self.loop = loop


class LaterOffload:
    """Runs blocking calls on the loop, some turns later; their results arrive later still."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    async def run(self, call: Callable[[], T]) -> T:
        """See `values.storage_types.Offload`."""
        await self._turns()
        result = call()
        await self._turns()
        return result

    async def _turns(self) -> None:
        # Sometimes long enough for a whole checkpoint in between.
        for _ in range(self._rng.choice((0, 0, 0, 1, 3, 40))):
            await asyncio.sleep(0)


_SETTINGS: Final[dict[str, Settings]] = {}


def settings_of(changes: dict[str, Any]) -> Settings:
    """Settings with these fields; each kind is made once, because making it takes longer than many
    runs.
    """
    name = repr(sorted(changes.items()))
    found = _SETTINGS.get(name)
    if found is None:
        found = _SETTINGS[name] = Settings(**changes)
    return found


class World:
    """One disk, one clock, one node at a time. `changes`: settings that differ from small ones."""

    def __init__(self, seed: int, **changes: Any) -> None:
        self.rng = random.Random(seed)
        self.disk = FakeDisk(seed)
        self.disk.is_cached = seed % 2 == 1
        self.clock = FakeClock()
        self.changes: dict[str, Any] = {
            "data_dir": Path("data"),
            "wal_shards": 2,
            "min_free_bytes": 0,
            "segment_max_events": 8,
            "segment_max_age_ms": 3_600_000,
            "checkpoint_interval_ms": 3_600_000,
            **changes,
        }
        # The class that starts a node; simulations that look inside a start have their own.
        self.boot_type: type[Boot] = Boot
        self.node: Node | None = None
        self.loop: VirtualLoop | None = None

    @property
    def is_up(self) -> bool:
        """Whether a node is running."""
        return self.node is not None

    @contextlib.contextmanager
    def life(self, seed: int) -> Iterator[None]:
        """Run a whole life without output: a failure prints the seed, and no task stays running."""
        logger = logging.getLogger("topics_server")
        level = logger.level
        logger.setLevel(logging.CRITICAL)
        try:
            yield
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
        finally:
            logger.setLevel(level)
            self.abandon()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine to its end. Raises `SimulatedCrash` as soon as the disk has crashed."""
        loop = self.loop
        assert loop is not None
        task = loop.create_task(work)
        try:
            result = loop.run_until_complete(task)
        finally:
            # Errors during a crash prove nothing.
            if loop.defects and not self.disk.crashed:
                raise loop.defects[0]
        # Another task may have met the crash in the turn in which this one ended.
        self.disk.check_alive()
        return result

    def start(self) -> Node:
        """Open and recover. Raises the node's errors; `SimulatedCrash` if the disk goes."""
        assert self.node is None
        is_same_boot = self._noted_boot() == self.disk.boot_id
        self.loop = loop = VirtualLoop(self.disk)
        self.clock.hand_over(loop)
        ground = Ground.open(
            settings_of(self.changes),
            64,
            fs=self.disk,
            clock=self.clock,
            offload=LaterOffload(self.rng),
            workers=self._workers,
            packer=InlinePacker(),
            boot_id=self.disk.boot_id,
            sizes=SMALL,
        )
        node = self.run(self.boot_type(ground).start())
        self.node = node
        self.was_doubted = not is_same_boot or "torn write" in node.report
        return node

    def _noted_boot(self) -> str:
        """The boot that `FORMAT` names, read without touching the disk."""
        if not self.disk.exists("data/FORMAT"):
            return ""
        try:
            return str(json.loads(self.disk.content("data/FORMAT"))["boot_id"])
        except (ValueError, KeyError):
            return ""  # torn (where syncs do nothing) or damaged: the start refuses it

    def _workers(self, loop: asyncio.AbstractEventLoop) -> Callable[[str], BlockingWorker]:
        return lambda name: InlineWorker(loop, lambda: self.rng.choice((0, 0, 1, 2)))

    def stop(self) -> None:
        """A clean stop: drain, final snapshot, mark."""
        node = self.node
        assert node is not None
        node.begin_drain()
        self.run(node.close())
        self._end()

    def crash(self, mode: Mode) -> None:
        """The process (or the machine) dies now; afterwards the disk is ready for the next node."""
        self.disk.crash(mode)
        self._end()
        self.disk = self.disk.reopen()

    def abandon(self) -> None:
        """Release everything that still runs: the test is over."""
        if not self.disk.crashed:
            self.disk.crash("kill")
        self._end()

    def _end(self) -> None:
        self.node = None
        loop, self.loop = self.loop, None
        self.clock.hand_over(None)
        if loop is not None:
            _bury(loop)


def _bury(loop: VirtualLoop) -> None:
    """Cancel the remaining tasks, and those that they start; they cannot touch the disk any more.

    Raises `AssertionError` if tasks go on: a suspended one would end in a later test.
    """
    loop._disk = FakeDisk()
    for _ in range(_BURIALS_MAX):
        tasks = asyncio.all_tasks(loop)
        if not tasks:
            break
        for task in tasks:
            task.cancel()
        burial = loop.create_task(_end_of(tasks))
        # A burial may stop at the end of the tasks that ran when the disk went.
        with contextlib.suppress(RuntimeError):
            loop.run_until_complete(burial)
    assert not asyncio.all_tasks(loop), asyncio.all_tasks(loop)
    loop.close()


async def _end_of(tasks: set[asyncio.Task[Any]]) -> None:
    await asyncio.gather(*tasks, return_exceptions=True)
