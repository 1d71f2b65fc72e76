"""A node under load that is backed up, and what a restore of the backup must hold.

`Ledger` observes every applied entry of the node, so for any lsn it can compute the live records of
every topic: the log's prefix. `BackedUp` runs writers, deletes, seals and checkpoints beside
backups, all in virtual time and decided by one seed.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.model.judging import look
from tests.model.world import SMALL, World
from topics_server.archive.format import BackupFacts
from topics_server.archive.object_store import FolderStore
from topics_server.archive.repository import Repository
from topics_server.archive.restore import restore
from topics_server.engine.store import Store
from topics_server.engine.topic.applied import Applied
from topics_server.node.backups import Backups
from topics_server.values.appends import decode_append
from topics_server.values.copies import ReplayPayloads
from topics_server.values.entries import (
    Entry,
    FloorMoved,
    RecordsAppended,
    RecordsDeleted,
    TopicDropped,
    TopicPut,
)
from topics_server.values.errors import TopicsError
from topics_server.values.model import (
    Durability,
    RouterDefinition,
    TagMatch,
    TopicConfig,
    TopicType,
)
from topics_server.values.record_codecs import decode_body
from topics_server.values.router_answers import RouterSpec
from topics_server.wal.tools.dump import verify

FOLDER = "backups"
Records = dict[int, bytes]


class Ledger:
    """Every applied entry by lsn; computes the records that are live after a prefix of them."""

    def __init__(self) -> None:
        self.entries: dict[int, Entry] = {}

    def note(self, lsn: int, entry: Entry, applied: Applied) -> None:
        """Observe an applied entry."""
        self.entries[lsn] = entry

    def prefix(self, last_lsn: int) -> dict[str, Records]:
        """Live records by topic after the entries up to `last_lsn`."""
        names: dict[int, str] = {}
        topics: dict[int, Records] = {}
        # The source of the router: its copies may be journaled without payloads.
        payloads = ReplayPayloads({1})
        for lsn in sorted(self.entries):
            if lsn > last_lsn:
                break
            entry = self.entries[lsn]
            creation = entry.creation if isinstance(entry, RecordsAppended) else entry
            if isinstance(creation, TopicPut):
                names[creation.topic_id] = creation.name
                topics.setdefault(creation.topic_id, {})
                if creation.floor is not None:
                    _move_floor(topics[creation.topic_id], creation.floor.seq)
            records = topics.get(entry.topic_id)
            if records is None:
                continue
            match entry:
                case TopicDropped():
                    del topics[entry.topic_id], names[entry.topic_id]
                case RecordsAppended():
                    met = payloads.meet(entry)
                    decoded = met.decoded or decode_body(met.body, met.grammar)
                    first_seq = met.first_seq + met.slot_count
                    records.update(enumerate(map(bytes, decoded.datas), first_seq))
                    if met.floor is not None:
                        _move_floor(records, met.floor.seq)
                case RecordsDeleted():
                    for first, last in zip(_seqs(entry.firsts), _seqs(entry.lasts), strict=True):
                        for seq in range(first, last + 1):
                            records.pop(seq, None)
                case FloorMoved():
                    _move_floor(records, entry.floor.seq)
                case _:
                    pass
        return {names[topic_id]: records for topic_id, records in topics.items()}

    def highest(self, name: str) -> int:
        """The highest seq that any record of a name ever had."""
        found = [0]
        ids = set()
        for entry in self.entries.values():
            creation = entry.creation if isinstance(entry, RecordsAppended) else entry
            if isinstance(creation, TopicPut) and creation.name == name:
                ids.add(creation.topic_id)
            if isinstance(entry, RecordsAppended) and entry.topic_id in ids:
                found.append(entry.first_seq + entry.count - 1)
        return max(found)


def _seqs(column: bytes) -> list[int]:
    return [int.from_bytes(column[at : at + 8], "little") for at in range(0, len(column), 8)]


def _move_floor(records: Records, floor: int) -> None:
    for seq in [seq for seq in records if seq < floor]:
        del records[seq]


class BackedUp:
    """A world with topics of class fsync and disk, a queue, a router, and a folder for backups."""

    def __init__(self, seed: int, **changes: Any) -> None:
        self.rng = random.Random(seed)
        self.world = World(seed, backup_dir=Path(FOLDER), **changes)
        self.world.disk.make_dir(FOLDER)
        self.world.disk.sync_dir(".")
        self.ledger = Ledger()
        self.number = 0

    def start(self) -> None:
        """Start a node and observe its entries."""
        node = self.world.start()
        node.commits.observers.append(self.ledger.note)

    @property
    def store(self) -> Store:
        assert self.world.node is not None
        return self.world.node.store

    @property
    def backups(self) -> Backups:
        assert self.world.node is not None
        assert self.world.node.backups is not None
        return self.world.node.backups

    async def put_topics(self) -> None:
        """Make the topics."""
        for name, config in {
            "a": TopicConfig(durability=Durability.FSYNC),
            "b": TopicConfig(durability=Durability.DISK, cap_records=30),
            "q": TopicConfig(type=TopicType.QUEUE, durability=Durability.FSYNC),
        }.items():
            await self.store.put_topic(name, config, keep_type=False)
        assert self.world.node is not None
        router = RouterSpec(RouterDefinition("a", "copies"))
        await self.world.node.routers.put("r", router)

    async def append(self, name: str, count: int) -> None:
        """Append numbered records, some with tags."""
        records = []
        for _ in range(count):
            self.number += 1
            records.append(f'{{"data":{self.number},"tag":"t{self.number % 5}"}}')
        body = f'{{"records":[{",".join(records)}]}}'.encode()
        await self.store.append(name, body, decode_append(body), header_key=None, config=None)

    async def load(self, steps: int, pauses: Sequence[float] = (0, 0, 0.001, 0.3)) -> None:
        """Some random calls, one after the other, with a pause between them."""
        assert self.world.node is not None
        node = self.world.node
        for _ in range(steps):
            what, name = self.rng.random(), self.rng.choice("aabbqx")
            try:
                if what < 0.6:
                    await self.append(name, self.rng.choice((1, 1, 3, 12)))
                elif what < 0.75:
                    tag = TagMatch(f"t{self.rng.randrange(5)}")
                    await self.store.delete(name, before_seq=None, match=tag)
                elif what < 0.8:
                    seq = self.store.state(name, touch=False).head_seq
                    await self.store.delete(name, before_seq=max(1, seq - 20), match=None)
                elif what < 0.84:
                    await self.store.drop_topic("x", if_empty=False)
                elif what < 0.94:
                    topic = node.registry.find(name)
                    if topic is not None:
                        await node.sealer.tend(topic, force_seal=self.rng.random() < 0.5)
                else:
                    await node.checkpointer.take()
            except TopicsError:
                pass  # a missing topic
            await asyncio.sleep(self.rng.choice(pauses))

    async def back_up(self) -> None:
        """Make one backup; returns its state at the end."""
        self.backups.begin()
        await self.backups.wait()

    async def back_up_under_load(self) -> None:
        """One backup beside loads that do not pause.

        A backup takes no virtual time, so a load that slept would not see it.
        """
        self.backups.begin()

        async def load() -> None:
            while self.backups.state.status == "running":
                await self.load(1, pauses=(0,))

        await asyncio.gather(load(), load(), load())

    def repository(self) -> Repository:
        """The backups as they are on the disk."""
        return Repository(FolderStore.open(self.world.disk, FOLDER, write=False))

    def restore(self, target: str, number: int | None = None) -> BackupFacts:
        """Restore, compare the directory with itself, and make it the world's data directory."""
        disk = self.world.disk
        made = restore(
            disk, FolderStore.open(disk, FOLDER, write=False), target, number, sizes=SMALL
        )
        problems = verify(disk, target).problems
        assert not problems, problems
        self.world.changes["data_dir"] = Path(target)
        return self.repository().facts(made.backup)

    def records(self) -> dict[str, Records]:
        """Live records by topic, as a reader sees them now."""
        assert self.world.node is not None
        found: dict[str, Records] = {}
        for topic in self.world.node.registry:
            seen = self.world.run(look(self.store, topic.name, self.world.clock))
            assert seen is not None
            found[topic.name] = {seq: record.data for seq, record in seen.records.items()}
        return found

    def heads(self) -> dict[str, int]:
        """The head of every topic."""
        assert self.world.node is not None
        return {topic.name: topic.log.head_seq for topic in self.world.node.registry}

    def check(self, facts: BackupFacts) -> None:
        """Check that the started node has exactly the log's prefix, and uses no seq again."""
        highest = {name: self.ledger.highest(name) for name in self.heads()}
        self.check_records(self.ledger.prefix(facts.last_lsn), highest)

    def check_records(self, expected: dict[str, Records], heads: dict[str, int]) -> None:
        """Check that the node holds these records; records that its router copied since are above
        these heads.
        """
        assert all(self.heads()[name] >= head for name, head in heads.items())
        found = {
            name: {seq: data for seq, data in records.items() if seq <= heads[name]}
            for name, records in self.records().items()
        }
        assert found == expected
