"""One file of a small data directory is damaged: what the next start may do.

A *store* is a directory that a node made on a disk in memory, with every reader's view of it. A
`Case` names one path of it and one damage. `judge` starts a node on the damaged copy. Allowed
results:

- *exact*: readers see what they saw before;
- *skipped*: as *exact*, but heads have jumped over seqs that may have been assigned, and say so;
- *told*: missing records are in a tombstone with their seqs, and nothing else differs;
- *refused*: the start is refused, and the message names the damaged path.

After *refused* or *told*, everything is complete again once the original is back; `verify` reports
the same copy; and no undamaged file is lost. Everything else is a `Finding`: a silent loss is never
allowed. Called by tests/storage/test_damage.py (the judge) and tests/crash/simulated/test_damage.py
(the cases).
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import fnmatch
import json
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal
from unittest import mock

import numpy as np

from tests.model.judging import Seen, covers, look
from tests.model.plain import Rec
from tests.model.world import World
from tests.storage.fake_disk import DiskImage, FakeDisk
from topics_server.engine.answers import Gap
from topics_server.engine.store import Store
from topics_server.engine.topic import retention
from topics_server.node.node import Node
from topics_server.values.appends import decode_append
from topics_server.values.entries import RecordsDeleted
from topics_server.values.errors import Code, StorageError, TopicsError
from topics_server.values.model import Durability, LossReason, TagMatch, TopicConfig, TopicType
from topics_server.wal import layout
from topics_server.wal.directory import read_format
from topics_server.wal.format.end_marks import decode
from topics_server.wal.format.segment import DATA_HEADER_BYTES, DEAD, decode_data_header
from topics_server.wal.snapshots.parts import decode_part
from topics_server.wal.snapshots.store import age_of, load_snapshot
from topics_server.wal.tools.dump import verify
from topics_server.wal.tools.verify import open_journal

Kind = Literal[
    "removed",
    "emptied",
    "cut",
    "flipped",
    "older",
    "swapped",
    "eacces",
    "eio",
    "stat_eacces",
    "revived",
    "old_flags",
]
Outcome = Literal["exact", "skipped", "told", "refused"]
# How the last run of a store ended: killed in the same boot, after a power cut, cleanly.
End = Literal["killed", "power", "clean"]
OUTCOMES: Final[tuple[Outcome, ...]] = ("exact", "skipped", "told", "refused")
ENDS: Final[tuple[End, ...]] = ("killed", "power", "clean")
CUTS: Final = 20
FLIPS: Final = 200
# Flags of one file, each of which is reset alone.
FLAGS: Final = 20
_UNREADABLE: Final[tuple[Kind, ...]] = ("eacces", "eio", "stat_eacces")
_SETTINGS: Final[dict[str, Any]] = {
    "data_dir": Path("data"),
    "wal_shards": 2,
    "segment_max_events": 6,
    "cold_dir": "cold",
    "hot_retain_segments": 1,
}
_JOURNAL_HEADER_BYTES: Final = 64
# Files that every start may rewrite; a refused start may leave them rewritten.
_WRITTEN_BY_STARTS: Final = re.compile(r"/(FORMAT|LOCK|STORE|ballast)$|\.end$|\.tmp$|\.lock$")


@dataclass(frozen=True)
class Truth:
    """One topic as readers saw it; `epoch` and `topic_id` name its incarnation.

    `evictable`: records that the undamaged start found, and then evicted by a cap that had been
    tightened; `told_before`: the gaps before it did. A start that finds fewer, because of the
    damage, may keep them, and so may one whose background has not come to them yet.
    """

    seen: Seen
    topic_id: int
    epoch: int
    evictable: Mapping[int, Rec] = field(default_factory=dict)
    told_before: Sequence[Gap] = ()


@dataclass(frozen=True)
class StoreCopy:
    """A store at rest. `older`: the same directory some time before; `epochs` of dropped names.

    `superseded`: files that a start on the undamaged store removes or replaces; `flipped`: segments
    whose deletes it completes, as it leaves them. `settings`: of every node on it. `is_quiet`:
    nothing is sealed, moved, dropped or trimmed by itself; otherwise only a read after the original
    is back shows whether something good is gone.
    """

    end: End
    image: DiskImage
    older: DiskImage
    topics: Mapping[str, Truth]
    epochs: Mapping[str, int]
    superseded: frozenset[str]
    now_ms: int
    settings: Mapping[str, Any]
    is_quiet: bool = True
    # The same directory in its last run, some time before its end; None if no copy was made.
    same_run: DiskImage | None = None
    # Heads that a client saw, by topic; entries above may be an interrupted write.
    told_heads: Mapping[str, int] = field(default_factory=dict)
    flipped: Mapping[str, bytes] = field(default_factory=dict)

    @property
    def data_dir(self) -> str:
        """The path of the store."""
        return str(self.settings["data_dir"])

    @property
    def cold_dir(self) -> str | None:
        """The path of its cold files, if it has such a folder."""
        found = self.settings.get("cold_dir")
        return None if found is None else str(found)


@dataclass(frozen=True, order=True)
class Case:
    """One damage. `place`: the byte at which the file is cut or flipped; `bit` of it."""

    end: End
    path: str
    kind: Kind
    place: int = 0
    bit: int = 0


@dataclass
class Finding:
    """A result that must not happen."""

    case: Case
    what: str

    def __str__(self) -> str:
        case = self.case
        return f"{case.end} {case.path} {case.kind} {case.place}.{case.bit}: {self.what}"


@dataclass
class Tally:
    """The results of cases by kind, and the findings."""

    ended: dict[tuple[Kind, Outcome], int] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    # Flags that were taken back, but nothing can prove that they had been set; these cases are not
    # judged.
    unproven: int = 0

    def note(self, case: Case, outcome: Outcome | Finding) -> None:
        """Note the result of one case."""
        if isinstance(outcome, Finding):
            self.findings.append(outcome)
        else:
            key = (case.kind, outcome)
            self.ended[key] = self.ended.get(key, 0) + 1

    def add(self, other: Tally) -> None:
        """Add the results of another process."""
        self.findings += other.findings
        self.unproven += other.unproven
        for key, count in other.ended.items():
            self.ended[key] = self.ended.get(key, 0) + count

    @property
    def count(self) -> int:
        """The number of all cases."""
        return sum(self.ended.values()) + len(self.findings) + self.unproven

    def table(self) -> str:
        """A line for each kind."""
        kinds = sorted({kind for kind, _ in self.ended})
        rows = [
            f"{kind:12} "
            + " ".join(f"{outcome} {self.ended.get((kind, outcome), 0)}" for outcome in OUTCOMES)
            for kind in kinds
        ]
        return "\n".join([*rows, f"behind every anchor {self.unproven}"])


# -- making a store ------------------------------------------------------------------------


class _Maker:
    """Drives one node through a small life."""

    def __init__(self, seed: int) -> None:
        self.world = World(seed, **_SETTINGS)
        self.number = 0
        self.same_run: DiskImage | None = None

    @property
    def store(self) -> Store:
        assert self.world.node is not None
        return self.world.node.store

    def put(self, name: str, config: TopicConfig) -> None:
        self.world.run(self.store.put_topic(name, config, keep_type=False))

    def append(self, name: str, count: int, *, tag: str = "") -> None:
        for _ in range(count):
            self.number += 1
            text = f'{{"id":{self.number},"pad":"{"x" * (self.number % 37)}"}}'
            tagged = f',"tag":"{tag}{self.number % 3}"' if tag else ""
            body = f'{{"records":[{{"data":{text}{tagged}}}]}}'.encode()
            decoded = decode_append(body)
            self.world.run(self.store.append(name, body, decoded, header_key=None, config=None))

    def delete(self, name: str, before_seq: int | None, tag: str | None) -> None:
        match = None if tag is None else TagMatch(tag)
        self.world.run(self.store.delete(name, before_seq=before_seq, match=match))

    def drop(self, name: str) -> None:
        self.world.run(self.store.drop_topic(name, if_empty=False))

    def checkpoint(self) -> None:
        assert self.world.node is not None
        self.world.run(self.world.node.checkpointer.take())

    def rest(self) -> None:
        """Let the background seal, flip, move and sync."""
        self.world.run(asyncio.sleep(3))

    def first_part(self) -> None:
        for durability in (Durability.FSYNC, Durability.DISK):
            self.put(durability.value, TopicConfig(durability=durability))
        self.put("capped", TopicConfig(durability=Durability.DISK, cap_records=9))
        self.put("jobs", TopicConfig(type=TopicType.QUEUE, durability=Durability.FSYNC))
        self.put("ephemeral", TopicConfig(durability=Durability.EPHEMERAL))
        for name in ("gone", "again"):
            self.append(name, 3)
            self.drop(name)
        for name in ("fsync", "disk"):
            self.append(name, 20, tag="t")
        self.append("capped", 14)
        self.append("jobs", 4)
        self.rest()
        self.delete("disk", None, "t1")
        self.delete("fsync", 4, None)
        self.rest()
        self.checkpoint()

    def last_part(self) -> None:
        self.append("again", 2)
        for name in ("fsync", "disk"):
            self.append(name, 8, tag="t")
        self.rest()
        self.delete("fsync", None, "t2")
        self.delete("jobs", 3, None)
        self.rest()
        self.checkpoint()
        self.same_run = self.world.disk.image()
        self.append("capped", 2)
        for name in ("fsync", "disk"):
            self.append(name, 5, tag="t")
            self.delete(name, None, "t0")
        self.append("late", 3)


def make_store(end: End) -> StoreCopy:
    """A store whose life ended in this way; always the same one."""
    maker = _Maker(7)
    world = maker.world
    with world.life(7):
        world.start()
        maker.first_part()
        older = world.disk.image()
        world.stop()
        world.start()
        maker.last_part()
        if end == "clean":
            world.stop()
        else:
            world.run(asyncio.sleep(0.5))
            world.crash("kill" if end == "killed" else "power")
        # Readers see from then on what a start makes of the undamaged store.
        image = world.disk.image()
        store = copied(end, image, older, world.clock.base_ms, _SETTINGS)
        return dataclasses.replace(store, same_run=maker.same_run)


def copied(
    end: End, image: DiskImage, older: DiskImage, now_ms: int, settings: Mapping[str, Any]
) -> StoreCopy:
    """The store of a disk, with what readers see after a start on it."""
    store = StoreCopy(end, image, older, {}, {}, frozenset(), now_ms, settings)
    world = _world_on(store)
    with world.life(0):
        node = world.start()
        floors = _floors_of(node)
        # Background work enforces caps behind the start, in turns of the loop.
        world.run(_turns())
        topics = _topics_of(world)
        after = world.disk.image().files
        epochs = dict(node.registry.dropped_epochs)
        if _floors_of(node) != floors:
            topics = _with_evictable(store, topics)
    superseded = frozenset(
        path for path, content in store.image.files.items() if after.get(path) != content
    )
    flipped = {path: after[path] for path in superseded & after.keys() if path.endswith(".data")}
    return dataclasses.replace(
        store, topics=topics, epochs=epochs, superseded=superseded, flipped=flipped
    )


async def _turns() -> None:
    for _ in range(500):
        await asyncio.sleep(0)


def _floors_of(node: Node) -> dict[str, int]:
    return {topic.name: topic.log.evict_floor for topic in node.registry}


def _with_evictable(store: StoreCopy, topics: Mapping[str, Truth]) -> dict[str, Truth]:
    """The same topics, with what a start shows before it enforces any cap."""
    world = _world_on(store)
    with world.life(0), mock.patch.object(retention, "standing_floor", return_value=None):
        world.start()
        before = _topics_of(world)
    return {
        name: dataclasses.replace(
            truth,
            evictable={
                seq: record
                for seq, record in before[name].seen.records.items()
                if seq not in truth.seen.records
            },
            told_before=before[name].seen.gaps,
        )
        for name, truth in topics.items()
    }


def _world_on(store: StoreCopy) -> World:
    world = World(1, **store.settings)
    world.disk = FakeDisk.of(store.image)
    world.clock.base_ms = store.now_ms
    return world


def _topics_of(world: World) -> dict[str, Truth]:
    node = world.node
    assert node is not None
    found: dict[str, Truth] = {}
    for topic in node.registry:
        seen = world.run(look(node.store, topic.name, world.clock))
        assert seen is not None
        found[topic.name] = Truth(seen, topic.topic_id, topic.epoch)
    return found


# -- cases ---------------------------------------------------------------------------------


def cases_of(
    store: StoreCopy, seed: int = 0, *, cuts: int = CUTS, flips: int = FLIPS
) -> Iterator[Case]:
    """Every file, every damage; `seed` chooses the positions of cuts and flips."""
    for path, content in sorted(store.image.files.items()):
        rng = random.Random(f"{store.end} {path} {seed}")
        size = len(content)
        yield Case(store.end, path, "removed")
        for kind in _UNREADABLE:
            yield Case(store.end, path, kind)
        if store.older.files.get(path, content) != content:
            yield Case(store.end, path, "older")
        for number in range(len(_siblings(store, path))):
            yield Case(store.end, path, "swapped", number)
        if not size:
            continue
        yield Case(store.end, path, "emptied")
        ends = {1, size - 1, *(rng.randrange(size) for _ in range(cuts))} - {0}
        for place in sorted(rng.sample(sorted(ends), min(cuts, len(ends)))):
            yield Case(store.end, path, "cut", place)
        places = rng.sample(range(size), min(size, flips))
        for place in sorted(places):
            yield Case(store.end, path, "flipped", place, rng.randrange(8))
        yield from _flag_cases(store, path)


def _flag_cases(store: StoreCopy, path: str) -> Iterator[Case]:
    """Deletes that are taken back in a `.data` that is otherwise as it was: one, or many."""
    if not path.endswith(".data"):
        return
    content = store.image.files[path]
    at = _flags_at(content)
    for place in [place for place in range(at, len(content)) if content[place] == DEAD][:FLAGS]:
        yield Case(store.end, path, "revived", place)
    older = store.older.files.get(path, b"")
    if len(older) == len(content) and older[:at] == content[:at] and older != content:
        yield Case(store.end, path, "old_flags")


def _flags_at(data: bytes) -> int:
    """Where the delete flags of a `.data` begin; its end if its header cannot be read."""
    try:
        return decode_data_header(data[:DATA_HEADER_BYTES]).flags_offset
    except StorageError:
        return len(data)


def is_behind_every_anchor(store: StoreCopy, case: Case) -> bool:
    """Whether nothing proves that the damaged bytes of a file were ever synced.

    After a power cut the end mark may be older than the last syncs (docs/decisions/0080), and after
    a kill in the middle of a sync nothing shows whether it failed (0083): bytes after the mark look
    like an unfinished write, even if they were acknowledged. Computed from the mark alone. What a
    failed sync took from the journal, the newest snapshot may hold alone (0100).
    """
    if "/snapshots/" in case.path:
        return _holds_alone(store, case.path)
    if case.kind in ("revived", "old_flags"):
        return not _are_flags_anchored(store, case)
    name = layout.parse_wal_file(case.path.rpartition("/")[2])
    if name is None or case.kind not in ("cut", "flipped"):
        return False
    mark_path = f"{store.data_dir}/wal/{layout.end_mark(name.wal_set, name.shard)}"
    slots = decode(store.image.files.get(mark_path, b""), name.wal_set, name.shard)
    if not slots:
        return False
    mark = max(slots.values())[1]
    noted = json.loads(store.image.files[f"{store.data_dir}/FORMAT"])["boot_id"]
    is_proven = noted == store.image.boot_id and not mark.is_syncing
    end = mark.written_end if is_proven else mark.synced_end
    return name.number == mark.number and case.place >= end


def _holds_alone(store: StoreCopy, path: str) -> bool:
    """Whether a snapshot was taken beside a read-only shard: what its sync lost may be here."""
    try:
        image = load_snapshot(FakeDisk.of(store.image), path)
    except StorageError:
        return False
    return any(each.start_lsn < image.start_lsn for each in image.shards)


def _are_flags_anchored(store: StoreCopy, case: Case) -> bool:
    """Whether the newest snapshot proves that a delete was taken back in this segment.

    It has a digest of the flags that it saw. Of a segment that was deleted from since, only how
    many rows were dead is compared (docs/decisions/0102): one flag taken back may go unnoticed.
    """
    disk, number = FakeDisk.of(store.image), int(case.path.split("/")[-2])
    name = layout.parse_segment_file(case.path.rpartition("/")[2])
    images = []
    for path in store.image.files:
        if path.endswith(".snap"):
            with contextlib.suppress(StorageError):
                images.append(load_snapshot(disk, path))
    if name is None or not images:
        return False
    image = max(images, key=age_of)
    part = next((decode_part(part) for at, part in image.parts if at == number), None)
    anchored = None if part is None else part.flags.get(name[0])
    if part is None or anchored is None:
        return False
    content = damaged(store, case).content(case.path)
    header = decode_data_header(content[:DATA_HEADER_BYTES])
    flags = content[header.flags_offset :]
    first, last = header.first_seq, header.first_seq + len(flags) - 1
    is_touched = name[0] in part.flips
    mark = read_format(disk, store.data_dir)
    assert mark is not None
    for lsn, entry in open_journal(disk, store.data_dir, mark, image, image).entries(
        image.start_lsn
    ):
        if isinstance(entry, RecordsDeleted) and entry.topic_id == number:
            firsts, lasts = np.frombuffer(entry.firsts, "<u8"), np.frombuffer(entry.lasts, "<u8")
            hits = bool(np.any((firsts <= last) & (lasts >= first)))
            is_touched |= lsn > part.applied_lsn and hits
    return not (is_touched and flags.count(DEAD) >= anchored[0])


def _siblings(store: StoreCopy, path: str) -> list[str]:
    """Two other files of the same kind, whose content somebody may copy here by mistake."""
    kind = re.sub(r"\d+", "#", path)
    return [
        other
        for other, content in sorted(store.image.files.items())
        if other != path
        and re.sub(r"\d+", "#", other) == kind
        and content != store.image.files[path]
    ][:2]


def damaged(store: StoreCopy, case: Case) -> FakeDisk:
    """A copy of the store with this damage."""
    disk = FakeDisk.of(store.image)
    path, content = case.path, store.image.files[case.path]
    match case.kind:
        case "removed":
            disk.lose(path)
        case "emptied":
            disk.put(path, b"")
        case "cut":
            disk.put(path, content[: case.place])
        case "flipped":
            disk.corrupt(path, case.place, 1 << case.bit)
        case "older":
            disk.put(path, store.older.files[path])
        case "revived":
            disk.corrupt(path, case.place, DEAD)
        case "old_flags":
            at = _flags_at(content)
            disk.put(path, content[:at] + store.older.files[path][at:])
        case "swapped":
            disk.put(path, store.image.files[_siblings(store, path)[case.place]])
        case "eacces":
            disk.forbid(path, "eacces", "open", "map")
        case "eio":
            disk.forbid(path, "eio", "read", "map")
        case "stat_eacces":
            disk.forbid(path, "eacces", "stat", "open", "map")
    return disk


# Files that an administrator may restore together: by name, patterns of paths.
TOGETHER: Final[dict[str, tuple[str, ...]]] = {
    "journal": ("data/wal/*.wal",),
    "end marks": ("data/wal/*.end",),
    "FORMAT": ("data/FORMAT",),
    "snapshots": ("data/snapshots/*",),
    "manifests": ("data/segments/*/manifest",),
    "segments": ("data/segments/*.data", "data/segments/*.idx"),
    "cold folder": ("cold/*",),
}


def judge_together(store: StoreCopy, older: DiskImage, names: Sequence[str]) -> Outcome | str:
    """Replace all files of these kinds by older ones; return the result, or the problem."""
    world = _world_on(store)
    disk = world.disk
    for path in [path for path in store.image.files if _is_one_of(path, names)]:
        if path not in older.files:
            disk.lose(path)
    for path, content in older.files.items():
        if _is_one_of(path, names):
            disk.put(path, content)
    with world.life(0):
        try:
            world.start()
            return _compare(store, _topics_of(world))
        except StorageError:
            return "refused"
        except _Wrong as wrong:
            return str(wrong)


def _is_one_of(path: str, names: Sequence[str]) -> bool:
    return any(fnmatch.fnmatch(path, pattern) for name in names for pattern in TOGETHER[name])


# -- judging -------------------------------------------------------------------------------


def judge(store: StoreCopy, case: Case) -> Outcome | Finding:
    """Start on the damaged copy, check, put the original back, check again."""
    try:
        return _judge(store, case)
    except _Wrong as wrong:
        return Finding(case, str(wrong))
    except Exception as error:
        return Finding(case, f"a defect instead of an answer: {error!r}")


class _Wrong(Exception):
    """A finding as an exception."""


def _judge(store: StoreCopy, case: Case) -> Outcome:
    world = _world_on(store)
    world.disk = damaged(store, case)
    with world.life(0):
        outcome = _first_start(store, case, world)
        if outcome != "refused" and store.end == "clean":
            # A stop that writes all its state must not make the reported loss permanent.
            world.stop()
    # Without this stop the node's life ends with a kill.
    disk = world.disk.reopen()
    _check_nothing_lost(store, case, outcome, disk)
    if outcome != "exact":
        if _check_verify(store, case, outcome):
            _check_heals(store, case, disk)
    else:
        world = _world_on(store)
        world.disk = damaged(store, case)
        with world.life(0):
            world.start()
            _check_goes_on(store, world)
    return outcome


def _first_start(store: StoreCopy, case: Case, world: World) -> Outcome:
    try:
        world.start()
    except StorageError as error:
        if not _names(str(error), case.path):
            raise _Wrong(f"refused, but not by name: {error}") from None
        return "refused"
    try:
        return _compare(store, _topics_of(world))
    except StorageError as error:
        # A reader's error counts as a report; only unreadable data may cause one.
        if case.kind not in _UNREADABLE:
            raise _Wrong(f"a reader gets an error: {error}") from None
        return "told"


def _names(message: str, path: str) -> bool:
    """Whether the message names the file. `FORMAT` and `STORE` stand for their folders."""
    folder, _, name = path.rpartition("/")
    if name in ("FORMAT", "STORE"):
        return re.search(rf"(^|\s){folder}[\s:/]", message) is not None
    return path in message or name in message


def _compare(store: StoreCopy, found: Mapping[str, Truth]) -> Outcome:
    """Compare what readers see now with what they saw."""
    if extra := found.keys() - store.topics.keys():
        raise _Wrong(f"topics are back: {sorted(extra)}")
    outcome: Outcome = "exact"
    for name, truth in store.topics.items():
        now = found.get(name)
        if now is None:
            raise _Wrong(f"topic {name} is gone in silence")
        if (now.topic_id, now.epoch) != (truth.topic_id, truth.epoch):
            raise _Wrong(f"topic {name} is another one: {now.topic_id}, epoch {now.epoch}")
        told = _compare_topic(name, truth, now.seen, store.told_heads.get(name))
        outcome = max(outcome, told, key=OUTCOMES.index)
    return outcome


def _compare_topic(name: str, known: Truth, now: Seen, told_head: int | None) -> Outcome:
    truth = known.seen
    if now.config != truth.config:
        raise _Wrong(f"{name}: configuration {now.config}")
    if now.head < truth.head and now.head >= _lowest_head(truth, told_head):
        records = {seq: rec for seq, rec in truth.records.items() if seq <= now.head}
        truth = dataclasses.replace(truth, head=now.head, records=records)
    if now.head < truth.head:
        raise _Wrong(f"{name}: head {now.head} instead of {truth.head}: seqs are used again")
    for seq, record in now.records.items():
        expected = truth.records.get(seq, known.evictable.get(seq))
        if expected != record:
            raise _Wrong(f"{name}: seq {seq} is {record} instead of {expected}")
    told = [gap for gap in now.gaps if gap.reason in _allowed(truth.config)]
    missing = [seq for seq in truth.records if seq not in now.records]
    for seq in missing:
        if not covers(told, seq, seq):
            raise _Wrong(f"{name}: seq {seq} is missing in silence (gaps {now.gaps})")
    if now.head > truth.head and not covers(now.gaps, truth.head + 1, now.head):
        raise _Wrong(f"{name}: head {now.head} instead of {truth.head} in silence")
    silent = _silent(truth.gaps, now, truth.head)
    if silent is not None and known.evictable:
        # Before the cap was enforced, fewer losses were reported.
        gone = [Gap(seq, seq, LossReason.CAP, 1) for seq in known.evictable.keys() - now.records]
        silent = _silent([*known.told_before, *gone], now, truth.head)
    if silent is not None:
        raise _Wrong(f"{name}: {silent} is not told any more (gaps {now.gaps})")
    if truth.config.durability is Durability.EPHEMERAL:
        # Every restart removes its records and may skip seqs: that is no damage.
        return "exact"
    # A cap that was tightened may be enforced only now.
    evicted = [gap for gap in now.gaps if gap.reason is LossReason.CAP]
    lost = [seq for seq in missing if not covers(evicted, seq, seq)]
    told_before = [*known.told_before, *truth.gaps]
    told_before = [gap for gap in told_before if gap.reason is not LossReason.CAP]
    anew = [gap for gap in now.gaps if gap.reason is not LossReason.CAP]
    if lost or _silent(anew, dataclasses.replace(truth, gaps=told_before), truth.head):
        return "told"
    return "exact" if now.head == truth.head else "skipped"


def _silent(gaps: Sequence[Gap], seen: Seen, head: int) -> Gap | None:
    """A gap up to this head that no tombstone reports to a reader with this view."""
    for gap in gaps:
        last = min(gap.gap_to, head)
        if gap.gap_from <= last and not covers(seen.gaps, gap.gap_from, last):
            return gap
    return None


def _lowest_head(truth: Seen, told_head: int | None) -> int:
    """The lowest head with which no seq is used again; no client saw a record above it."""
    return truth.head if told_head is None else min(told_head, truth.head)


def _allowed(config: TopicConfig) -> set[LossReason]:
    """The allowed reports about a record that existed: damage, or background changes."""
    reasons = {LossReason.DAMAGED, LossReason.MIXED}
    if config.ttl_ms:
        reasons.add(LossReason.TTL)
    if config.cap_records or config.cap_bytes:
        reasons.add(LossReason.CAP)
    return reasons


def _check_goes_on(store: StoreCopy, world: World) -> None:
    """Check that new records have new seqs, and that a recreated name has a higher epoch."""
    node = world.node
    assert node is not None
    for name, truth in store.topics.items():
        body = b'{"records":[{"data":"new"}]}'
        try:
            made = world.run(
                node.store.append(name, body, decode_append(body), header_key=None, config=None)
            )
        except TopicsError as error:
            if error.code is not Code.TOPIC_FULL:
                raise
            continue
        if made.first_seq <= _lowest_head(truth.seen, store.told_heads.get(name)):
            raise _Wrong(f"{name}: seq {made.first_seq} is used again")
    for name, epoch in store.epochs.items():
        world.run(node.store.put_topic(name, TopicConfig(), keep_type=False))
        if node.store.topic(name).epoch <= epoch:
            raise _Wrong(f"{name}: epoch {node.store.topic(name).epoch} is used again")


def _check_nothing_lost(store: StoreCopy, case: Case, outcome: Outcome, disk: FakeDisk) -> None:
    """Check that every undamaged file still exists, or was moved aside complete.

    A refused start changes nothing. Other starts may write manifests, everything that a start on
    the undamaged store writes, and, after a clean stop, snapshots that make older files useless.
    """
    now = disk.image().files
    contents = set(now.values())
    for path, content in store.image.files.items():
        if path == case.path or now.get(path) == content or _WRITTEN_BY_STARTS.search(path):
            continue
        if path.endswith(".wal") and not any(content[_JOURNAL_HEADER_BYTES:]):
            continue  # made ahead, still empty
        has_started = outcome != "refused"
        if not store.is_quiet and (has_started or path.endswith(".wal")):
            continue  # replay cuts a torn end, and keeps its bytes, before files are judged
        # If everything is served, the remaining copy is the good one (its flags repaired).
        is_left = outcome == "exact" or not _is_other_copy(store, path, case.path)
        is_useless = path in store.superseded and is_left
        if has_started and (is_useless or path.endswith("/manifest")):
            continue
        if has_started and store.end == "clean" and path.endswith((".wal", ".snap")):
            continue
        if has_started and path.endswith((".data", ".idx", ".snap")) and content in contents:
            continue
        what = "changed" if path in now else "gone"
        raise _Wrong(f"{path} is {what} after a start that {outcome}")


def _is_other_copy(store: StoreCopy, path: str, damaged_path: str) -> bool:
    """Whether a `.data` is of the same segment in the other tier: then it may be the good one."""
    roots = (f"{store.data_dir}/segments/", f"{store.cold_dir}/")
    names = [
        each.removeprefix(root)
        for each in (path, damaged_path)
        for root in roots
        if each.startswith(root)
    ]
    is_pair = len(names) == 2 and names[0] == names[1]
    return is_pair and path != damaged_path and path.endswith(".data")


def _check_verify(store: StoreCopy, case: Case, outcome: Outcome) -> bool:
    """Whether `verify` proves the damage, so that the start must have left it to be healed.

    It need not name a torn end of the journal without an anchor, which a power cut may leave as
    well: readers get a tombstone for its entries, and the cut bytes are kept in `wal/torn`. Nor can
    it detect that a file of an unfinished job cannot be written.
    """
    disk = damaged(store, case)
    # Use the machine's own boot id: bytes written in this boot must exist.
    disk.put("/proc/sys/kernel/random/boot_id", store.image.boot_id.encode())
    try:
        report = verify(disk, store.data_dir, store.cold_dir)
    except StorageError:
        return True
    is_tail = case.path.endswith(".wal") and outcome != "refused"
    if is_tail and not report.problems and any(case.path in info for info in report.infos):
        return False
    if not report.problems and not case.path.endswith(".tmp"):
        raise _Wrong("verify finds nothing")
    return True


def _check_heals(store: StoreCopy, case: Case, disk: FakeDisk) -> None:
    """Put the original back at the file's current place: everything is as before.

    If the first start completed deletes, that copy is older than they are. If it is then reported
    as damaged, the copy with those deletes must be the right one.
    """
    path = case.path
    if store.cold_dir is not None and path not in disk.image().files and case.kind != "removed":
        moved = path.replace(f"{store.data_dir}/segments/", f"{store.cold_dir}/")
        path = moved if moved in disk.image().files else path
    right = [store.image.files[case.path]]
    if path in store.flipped:
        right.append(store.flipped[path])
    for number, content in enumerate(right, 1):
        disk.put(path, content)
        disk = _check_heals_with(store, disk, is_last=number == len(right)).reopen()


def _check_heals_with(store: StoreCopy, disk: FakeDisk, *, is_last: bool) -> FakeDisk:
    """The disk that a start leaves; it serves everything if it `is_last`."""
    world = _world_on(store)
    world.disk = disk
    with world.life(0):
        try:
            world.start()
            outcome = _compare(store, _topics_of(world))
        except StorageError as error:
            raise _Wrong(f"the original is back, and still refused: {error}") from None
        if is_last and outcome not in ("exact", "skipped"):
            gaps = {
                name: now.seen.gaps
                for name, now in _topics_of(world).items()
                if now.seen.gaps != store.topics[name].seen.gaps
            }
            raise _Wrong(f"the original is back, and still told as damaged: {gaps}")
    return world.disk


def run_cases(store: StoreCopy, cases: list[Case]) -> Tally:
    """Judge the server's answer to each damaged copy of the store."""
    tally = Tally()
    for case in cases:
        if case.kind in ("revived", "old_flags") and is_behind_every_anchor(store, case):
            tally.unproven += 1
            continue
        tally.note(case, judge(store, case))
    return tally


def undamaged(store: StoreCopy) -> Outcome:
    """The undamaged store must be shown exactly, or no other result means anything."""
    world = _world_on(store)
    with world.life(0):
        world.start()
        return _compare(store, _topics_of(world))
