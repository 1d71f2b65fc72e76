"""The simulation with worse faults: each seed gets two kinds of misfortune.

Kinds (`KINDS`), each with the rule that the store must keep:

- `evicted`: syncs fail, and after a `kill` the cache has lost what they did not get to the platter;
  where the disk refused to note the failure as well, a refused start is repaired;
- `nested`: data and cold folder lie deep in directories that the first start makes;
- `errors`: looks and calls fail with EIO, EACCES or EMFILE, live and during a start: a start is
  refused by name and succeeds once they are over, and no record is lost by them;
- `files`: between two boots one file is lost, emptied, cut, changed, stale, of its neighbour, or
  cannot be read; on a copy of the disk, judged by `tests/storage/damage.py`;
- `second`: another server is started on the folders in use, also when somebody removed `LOCK`;
- `cold`: the cold folder is another store's, or one of the two halves is empty (not mounted);
- `clock`: the wall clock is set by an hour, and what was told as expired stays so;
- `moves`: segments move to the cold folder while calls on both folders fail, or a kill or power cut
  comes at one; between two boots the folder holds what an interrupted move leaves;
- `names`: names are dropped and made again, more than are remembered, beside slow captures.

In all of them (name, epoch, seq) never names two records (`judging.Ledger`). Called by
tests/model/test_misfortunes.py and tests/crash/simulated/test_misfortunes.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import random
from collections.abc import Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, Literal
from unittest import mock

from tests.model.judging import End, TopicHistory
from tests.model.plain import Append
from tests.model.simulation import TTL_MS, Simulation
from tests.model.world import World, settings_of
from tests.storage import damage
from tests.storage.fake_disk import DiskImage, FakeDisk, Fault, Look, Op, SimulatedCrash
from topics_server.engine.background import checkpointer
from topics_server.node.ground import Ground
from topics_server.values import limits
from topics_server.values.errors import Corrupt, StartRefused, StorageError
from topics_server.values.model import TopicConfig
from topics_server.wal import layout
from topics_server.wal.directory import read_format
from topics_server.wal.format.manifest import HOT, decode_manifest
from topics_server.wal.segments.packing_process import InlinePacker
from topics_server.wal.snapshots.store import PublishedSnapshots
from topics_server.wal.tools.repair import mend, survey

Kind = Literal["evicted", "nested", "errors", "files", "second", "cold", "clock", "names", "moves"]
# Each seed draws two of these.
DRAWN: Final[tuple[Kind, ...]] = (
    *("evicted", "nested", "errors", "files"),
    *("second", "cold", "clock", "names"),
)
KINDS: Final[tuple[Kind, ...]] = (*DRAWN, "moves")
# How many of these lives also have moves under faults.
_MOVES_SHARE: Final = 0.3
_HOUR_MS: Final = 3_600_000
_BOOT_ID: Final = "/proc/sys/kernel/random/boot_id"
_ERRORS: Final[tuple[tuple[Op | Look, Fault], ...]] = (
    *(("stat", "eacces"), ("stat", "eio"), ("list", "eacces"), ("list", "eio")),
    *(("read", "eio"), ("map", "eio"), ("map", "emfile")),
    *(("open", "eacces"), ("open", "eio"), ("open", "emfile"), ("sync_dir", "emfile")),
    *(("unlink", "eacces"), ("rename", "eacces"), ("make_dir", "eacces")),
)
_MOVE_FAULTS: Final[tuple[tuple[Op | Look, Fault], ...]] = (
    *(("open", "eacces"), ("open", "emfile"), ("make_dir", "eacces"), ("read", "eio")),
    *(("write", "enospc"), ("write", "partial"), ("write", "crash")),
    *(("sync", "eio"), ("sync", "crash"), ("sync_dir", "eio"), ("sync_dir", "crash")),
    *(("rename", "eio"), ("rename", "crash"), ("unlink", "eacces"), ("unlink", "crash")),
)


class Misfortunes(Simulation):
    """One life. `kinds`: its misfortunes; by default two, chosen by the seed."""

    def __init__(
        self, seed: int, kinds: Sequence[Kind] = (), *, boots: int = 2, calls: int = 5
    ) -> None:
        super().__init__(seed, boots=boots, calls=calls)
        self.dice = dice = random.Random(f"misfortunes {seed}")
        self.kinds: frozenset[Kind] = frozenset(kinds or dice.sample(DRAWN, 2))
        # These faults have a random generator of their own, so that earlier seeds still give the
        # same runs.
        self.more_dice = random.Random(f"more misfortunes {seed}")
        if not kinds and self.more_dice.random() < _MOVES_SHARE:
            self.kinds |= {"moves"}
        # Earlier states of the disks, which an operator may put back by mistake.
        self._images: list[DiskImage] = []
        # The sync of some shard has failed since the last start.
        self._is_doubtful = False
        self.struck = 0
        # Damage to bytes that nothing proves to have existed.
        self.unproven = 0
        # The names in refusals.
        self._named: list[str | None] = []
        self._prepare()

    def _prepare(self) -> None:
        world = self.world
        if "moves" in self.kinds:
            world.changes["segment_max_events"] = 3
        if self.kinds & {"files", "second", "cold", "moves"}:
            world.changes.setdefault("cold_dir", "cold")
            world.changes.setdefault("hot_retain_segments", 1)
        if "nested" in self.kinds:
            world.changes["data_dir"] = Path("srv/topics/data")
            if "cold_dir" in world.changes:
                world.changes["cold_dir"] = "mnt/slow/topics/cold"
        if "evicted" in self.kinds:
            world.disk.evicts = True
            self.ends = ("kill", "kill", "kill", "clean", "power")
        if "errors" in self.kinds:
            self.fault_kinds = _ERRORS
        elif "files" in self.kinds:
            # If the disk refuses to write an end mark, the mark stays older; the real one is a
            # mapped page.
            self.faults = False
        if "clock" in self.kinds:
            self.clock_steps = (-_HOUR_MS, _HOUR_MS, -60_001, 60_001)
            expiring = TopicConfig(ttl_ms=TTL_MS)
            self.histories.setdefault("expiring", TopicHistory("expiring", expiring))
        if "names" in self.kinds:
            self.drop_share = 0.08

    def run(self) -> None:
        """See `Simulation.run`."""
        with self._patches():
            super().run()
        assert all(self._named), "a start was refused, but not by name"

    @contextlib.contextmanager
    def _patches(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            if "names" in self.kinds:
                stack.enter_context(mock.patch.object(limits, "DROPPED_NAMES_MAX", 1))
                stack.enter_context(mock.patch.object(checkpointer, "CAPTURE_SLICE_MS", 0))
            yield

    # -- between two boots -----------------------------------------------------------------

    def _has_started(self, *, may_crash: bool) -> bool:
        self._strike_at_rest()
        if "errors" in self.kinds and may_crash and self.dice.random() < 0.8:
            return self._has_started_over_errors()
        try:
            return super()._has_started(may_crash=may_crash)
        except Corrupt as error:
            if not self._is_unnoted(error.path):
                raise
            self._repair()
            return False

    def _is_unnoted(self, path: str | None) -> bool:
        """Whether a sync of this journal file failed, and the disk refused to note that as well.

        Then a loss by the failed sync cannot be distinguished from a shortened file.
        """
        folder, _, name = (path or "").rpartition("/")
        wal = layout.parse_wal_file(name)
        if wal is None or "evicted" not in self.kinds:
            return False
        disk = self.world.disk
        return disk.has_failed_sync and (
            f"{folder}/{layout.end_mark(wal.wal_set, wal.shard)}" in disk.refused
        )

    def _repair(self) -> None:
        """`topics repair --accept-loss`; what was synced must be there afterwards."""
        self._crash("kill")
        disk, data_dir = self.world.disk, str(self.world.changes["data_dir"])
        disk.put(_BOOT_ID, disk.boot_id.encode())
        mark = read_format(disk, data_dir)
        assert mark is not None
        image = PublishedSnapshots(disk, data_dir).newest()
        found = survey(disk, data_dir, mark, image)
        assert found.is_damaged
        mend(disk, data_dir, mark, found, lambda: self.dice.getrandbits(64))
        disk.lose(_BOOT_ID)
        self._is_doubtful = True
        self.struck += 1

    def _has_started_over_errors(self) -> bool:
        """Some calls of the start fail: it is refused by name, or succeeds nevertheless."""
        world, dice = self.world, self.dice
        for _ in range(dice.randint(1, 2)):
            op, error = dice.choice(_ERRORS)
            nth = dice.choice((1, 1, 2, 3, dice.randint(1, 12)))
            world.disk.fail(op, error, nth=nth, times=dice.choice((1, 2, None)))
        self.struck += 1
        try:
            world.start()
        except StorageError as error:
            self._named.append(error.path)
            self._crash("kill")
            if self._end != "power":
                self._end = "kill"
            return False
        world.disk.heal()
        world.run(self._check_all(self._end))
        self._end = "none"
        return True

    def _strike_at_rest(self) -> None:
        world, dice = self.world, self.dice
        image = world.disk.image()
        if "files" in self.kinds and self._images:
            self._damage_a_file(image)
        if "cold" in self.kinds and dice.random() < 0.7:
            self._unmount(image)
        if world.disk.image().files:
            self._images.append(image)
        if "moves" in self.kinds and self.more_dice.random() < 0.5:
            self._leave_a_copy(image)

    def _leave_a_copy(self, image: DiskImage) -> None:
        """Give a hot segment the files of a move that ended before the manifest was published."""
        data, cold = str(self.world.changes["data_dir"]), str(self.world.changes["cold_dir"])
        folder = f"{data}/segments/"
        hot = [path for path in self._listed_hot(image, folder) if path + ".data" in image.files]
        if f"{cold}/STORE" not in image.files or not hot:
            return
        source = self.more_dice.choice(hot)
        target = source.replace(folder, f"{cold}/")
        idx, records = image.files[source + ".idx"], image.files[source + ".data"]
        half = records[: self.more_dice.randrange(len(records))]
        left = self.more_dice.choice(
            (
                {".idx.tmp": idx, ".data.tmp": half},
                {".idx.tmp": idx, ".data.tmp": records},
                {".idx": idx, ".data.tmp": records},
                {".idx": idx, ".data": records},
            )
        )
        for suffix, content in left.items():
            self.world.disk.put(target + suffix, content)
        self.struck += 1

    def _listed_hot(self, image: DiskImage, folder: str) -> Iterator[str]:
        """Paths, without a suffix, of segments that manifests list as hot."""
        for path, content in sorted(image.files.items()):
            if path.startswith(folder) and path.endswith("/manifest"):
                topic = path.removesuffix("manifest")
                for entry in decode_manifest(content).segments:
                    if entry.tier == HOT:
                        yield topic + layout.segment_data(entry.segment_id).removesuffix(".data")

    def _damage_a_file(self, image: DiskImage) -> None:
        """Damage a file on a copy of the disk; the life continues undamaged."""
        world, dice = self.world, self.dice
        end: damage.End = "clean" if self._end == "clean" else "killed"
        older = dice.choice(self._images)
        changes = {**world.changes, "checkpoint_interval_ms": _HOUR_MS}
        try:
            store = damage.copied(end, image, older, world.clock.base_ms, changes)
        except Corrupt as error:
            if not self._is_unnoted(error.path):
                raise
            return  # the undamaged store would be refused too: `_has_started` repairs it
        heads = {each.name: each.live.head for each in self.histories.values()}
        store = dataclasses.replace(store, is_quiet=False, told_heads=heads)
        every = list(damage.cases_of(store, dice.randrange(1 << 30), cuts=2, flips=3))
        # Flags are rare, so each life that has any takes one back.
        flags = [case for case in every if case.kind in ("revived", "old_flags")]
        cases = [case for case in every if case not in flags]
        chosen = dice.sample(cases, min(2, len(cases)))
        for case in [*chosen, *self.more_dice.sample(flags, min(1, len(flags)))]:
            if damage.is_behind_every_anchor(store, case):
                self.unproven += 1
                continue
            self.struck += 1
            found = damage.judge(store, case)
            assert not isinstance(found, damage.Finding), str(found)

    def _unmount(self, image: DiskImage) -> None:
        """One folder of the store is empty, or another store's cold folder is named."""
        world, dice = self.world, self.dice
        data, cold = str(world.changes["data_dir"]), str(world.changes["cold_dir"])
        has_data = any(path.startswith(f"{data}/FORMAT") for path in image.files)
        has_cold = any(path.startswith(f"{cold}/") for path in image.files)
        if not (has_data and has_cold and f"{cold}/STORE" in image.files):
            return
        what = dice.choice(("cold", "data", "other"))
        if what == "cold" and not any(path.endswith(".data") for path in image.files):
            return  # nothing was ever stored, and an interrupted start may not have noted it
        self.struck += 1
        changes = dict(world.changes)
        gone = cold if what == "cold" else data
        files = {path: c for path, c in image.files.items() if not path.startswith(f"{gone}/")}
        if what == "other":
            files, changes["data_dir"] = image.files, Path("another")
        dirs = frozenset(path for path in image.dirs if not path.startswith(f"{gone}/"))
        other = World(1, **changes)
        other.disk = FakeDisk.of(
            DiskImage(files, dirs if what != "other" else image.dirs, "boot-1")
        )
        other.clock.base_ms = world.clock.base_ms
        with other.life(0):
            try:
                other.start()
            except StartRefused as error:
                self._named.append(error.path)
            else:
                raise AssertionError(f"started with {what} not mounted, or another's")
            kept = other.disk.image().files
            lost = [path for path, content in files.items() if kept.get(path) != content]
            lost = [path for path in lost if not path.endswith(("/LOCK", "/FORMAT"))]
            assert not lost, f"a refused start changed {lost}"

    # -- in a boot -------------------------------------------------------------------------

    async def _disturb(self) -> None:
        others: list[Coroutine[Any, Any, None]] = []
        if "second" in self.kinds:
            others.append(self._start_others())
        if "evicted" in self.kinds:
            others.append(self._fail_a_sync())
        if "moves" in self.kinds:
            others.append(self._fail_moves())
        await asyncio.gather(super()._disturb(), *others)

    def _append(self, history: TopicHistory) -> Append:
        step = super()._append(history)
        if "clock" in self.kinds and step.key in history.live.keys:
            # The test leaves open whether a window has passed while the clock was set back and
            # forth.
            step.key = None
        return step

    async def _live(self) -> None:
        await super()._live()
        if "clock" in self.kinds:
            # Set the clock ahead for a moment and let all readers look; then set it back and let
            # them look again.
            for step_ms in (_HOUR_MS, -2 * _HOUR_MS):
                self.world.clock.step(step_ms)
                for history in self.histories.values():
                    await self._look_live(history)
            self.struck += 1

    async def _fail_a_sync(self) -> None:
        """Make a sync fail; bytes written before it may or may not be on the platter."""
        await asyncio.sleep(self.dice.choice((0.0, 0.05, 0.15, 0.3)))
        self.world.disk.fail("sync", "eio", path="*.wal", nth=self.dice.randint(1, 2))
        self.struck += 1
        await asyncio.sleep(self.dice.choice((0.2, 0.5)))

    async def _fail_moves(self) -> None:
        """Make a move fail somewhere between the copy and the removal of the original, in either
        folder.
        """
        dice = self.more_dice
        folders = [f"{self.world.changes[name]}/*" for name in ("cold_dir", "data_dir")]
        folders[1] = folders[1].replace("*", "segments/*")
        for _ in range(3):
            await asyncio.sleep(dice.choice((0.0, 0.05, 0.2, 0.5)))
            op, error = dice.choice(_MOVE_FAULTS)
            times = 1 if error == "crash" else dice.choice((1, 2, None))
            path = dice.choice(folders)
            self.world.disk.fail(op, error, path=path, nth=dice.randint(1, 6), times=times)
            self.struck += 1

    async def _start_others(self) -> None:
        for _ in range(2):
            await asyncio.sleep(self.dice.choice((0.0, 0.1, 0.6)))
            self._start_another()

    def _start_another(self) -> None:
        """A second server finds the folders in use and changes nothing."""
        world, dice = self.world, self.dice
        changes = dict(world.changes)
        data, cold = str(changes["data_dir"]), str(changes["cold_dir"])
        what = dice.choice(("same", "unlocked", "cold", "inside", "around"))
        if what == "unlocked":
            # Remove the locks as a user might; older servers lock only these files.
            for folder in (data, cold):
                if f"{folder}/LOCK" in world.disk._files:
                    world.disk.lose(f"{folder}/LOCK")
        elif what == "cold":
            changes["data_dir"] = Path("another")
        elif what == "inside":
            changes.update(data_dir=Path("another"), cold_dir=f"{data}/segments")
        elif what == "around":
            changes.update(data_dir=Path(f"{cold}/data"))
        before = world.disk.image().files
        rules, world.disk._rules = world.disk._rules, []
        try:
            ground = Ground.open(
                settings_of(changes),
                64,
                fs=world.disk,
                clock=world.clock,
                packer=InlinePacker(),
                boot_id=world.disk.boot_id,
            )
        except StartRefused:
            self.struck += 1
        except SimulatedCrash:
            raise
        else:
            del ground
            raise AssertionError(f"a second server has started ({what})")
        finally:
            world.disk._rules = rules
        after = world.disk.image().files
        for path, content in before.items():
            assert after.get(path) == content, f"a second server changed {path} ({what})"

    # -- ends ------------------------------------------------------------------------------

    def _note_crash(self, mode: End) -> None:
        super()._note_crash(mode)
        if "evicted" in self.kinds and self.world.disk.failed_syncs:
            self._is_doubtful = True

    async def _check_all(self, end: End) -> None:
        if self._is_doubtful:
            # Bytes left by a failed sync may be lost as in a power cut; synced bytes may not.
            end = "power"
        await super()._check_all(end)
        self._is_doubtful = False
