"""One node on a disk in memory, called step by step; used by the tests of known mistakes.

Everything is synchronous from outside: each call runs the virtual loop until it has its answer.
"""

from __future__ import annotations

import asyncio
from typing import Any

from tests.model.judging import Seen, look
from tests.model.world import World
from tests.storage.fake_disk import Mode
from topics_server.engine.answers import Appended
from topics_server.engine.store import Store
from topics_server.node.node import Node
from topics_server.values.appends import decode_append
from topics_server.values.model import Durability, TagMatch, TopicConfig

TOPIC = "t"


class Bench:
    """A started node; `crash`, `restart` and the store's calls on the topic `t`."""

    def __init__(self, seed: int = 1, **changes: Any) -> None:
        self.world = World(seed, **{"wal_shards": 1, **changes})
        self.world.start()
        self._number = 0

    @property
    def node(self) -> Node:
        """The running node."""
        assert self.world.node is not None
        return self.world.node

    @property
    def store(self) -> Store:
        """The store of the running node."""
        return self.node.store

    def put(self, durability: Durability = Durability.FSYNC, **config: Any) -> None:
        """Create or configure the topic."""
        made = TopicConfig(durability=durability, **config)
        self.world.run(self.store.put_topic(TOPIC, made, keep_type=False))

    def body(self, count: int, tag: str | None = None, key: str | None = None) -> bytes:
        """An append body of `count` numbered records."""
        records = []
        for _ in range(count):
            self._number += 1
            tagged = "" if tag is None else f',"tag":"{tag}"'
            records.append(f'{{"data":{self._number}{tagged}}}')
        keyed = "" if key is None else f',"idempotency_key":"{key}"'
        return f'{{"records":[{",".join(records)}]{keyed}}}'.encode()

    def append(
        self,
        count: int = 1,
        *,
        tag: str | None = None,
        key: str | None = None,
        header_key: str | None = None,
        name: str = TOPIC,
    ) -> Appended:
        """Append numbered records."""
        body = self.body(count, tag, key)
        return self.world.run(
            self.store.append(name, body, decode_append(body), header_key=header_key, config=None)
        )

    def delete(self, *, before_seq: int | None = None, tag: str | None = None) -> int:
        """Delete records; return their number."""
        match = None if tag is None else TagMatch(tag)
        return self.world.run(self.store.delete(TOPIC, before_seq=before_seq, match=match)).deleted

    def look(self, name: str = TOPIC) -> Seen:
        """Everything that a reader sees."""
        seen = self.world.run(look(self.store, name, self.world.clock))
        assert seen is not None
        return seen

    def seqs(self) -> list[int]:
        """The seqs of the records that a reader sees."""
        return list(self.look().records)

    def checkpoint(self) -> None:
        """Take a checkpoint."""
        self.world.run(self.node.checkpointer.take())

    def tend(self, *, force_seal: bool = False) -> None:
        """Run the topic's background work now; `force_seal`: seal its tail whatever its size."""
        topic = self.node.registry.find(TOPIC)
        assert topic is not None
        self.world.run(self.node.sealer.tend(topic, force_seal=force_seal))

    def wait(self, seconds: float) -> None:
        """Let virtual time pass."""
        self.world.run(asyncio.sleep(seconds))

    def crash(self, mode: Mode) -> None:
        """Crash and start again."""
        self.world.crash(mode)
        self.world.start()

    def restart(self) -> None:
        """Stop cleanly and start again."""
        self.world.stop()
        self.world.start()
