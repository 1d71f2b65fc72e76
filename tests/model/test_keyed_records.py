"""Batches with a key for each record, over kills, power cuts and clean restarts.

A dictionary holds the seq of each key. Nothing that was acknowledged may be appended again, and no
record may be missing, whatever mixture of batches and single appends used the keys.
"""

from __future__ import annotations

import asyncio
import json
import random

import pytest

from tests.design7.bench import TOPIC, Bench
from tests.storage.fake_disk import Mode
from topics_server.engine.answers import Appended
from topics_server.values.appends import decode_append
from topics_server.values.errors import Code, TopicsError
from topics_server.values.model import Durability

_DAYS_MS = 10 * 86_400_000


class _Keys:
    """The topic as a dictionary: the seq of each key, the payload of each seq."""

    def __init__(self, seed: int, durability: Durability) -> None:
        self.rng = random.Random(seed)
        self.bench = Bench(seed)
        self.bench.put(durability, idempotency_window_ms=_DAYS_MS)
        self.seqs: dict[str, int] = {}
        self.payloads: dict[int, object] = {}
        self._number = 0

    def batch(self, base: str, count: int) -> tuple[list[str], bytes]:
        """Payloads that no other call has, and the body that carries them."""
        self._number += 1
        payloads = [f"{base} {self._number} {index}" for index in range(count)]
        body = {
            "records": [{"data": payload} for payload in payloads],
            "idempotency_key": base,
            "idempotency": "per_record",
        }
        return payloads, json.dumps(body).encode()

    async def append(self, body: bytes) -> Appended:
        """Append the records of one call."""
        return await self.bench.store.append(
            TOPIC, body, decode_append(body), header_key=None, config=None
        )

    def judge(self, base: str, payloads: list[str], done: Appended) -> None:
        """Check that known keys keep their seqs, and that the other records get the next seqs in
        order.
        """
        assert done.seqs is not None
        names = [f"{base}:{index}" for index in range(len(payloads))]
        known = [self.seqs.get(name) for name in names]
        assert done.deduped is (None not in known)
        newest = max(self.payloads, default=0)
        for name, seq, before, payload in zip(names, done.seqs, known, payloads, strict=True):
            if before is not None:
                assert seq == before
                continue
            assert seq > newest
            newest = self.seqs[name] = seq
            self.payloads[seq] = payload
        assert (done.first_seq, done.last_seq) == (min(done.seqs), max(done.seqs))
        new = [seq for seq, before in zip(done.seqs, known, strict=True) if before is None]
        assert new == list(range(new[0], new[0] + len(new))) if new else True

    def look(self) -> None:
        """Check that a reader sees each record once."""
        records = self.bench.look().records
        assert {seq: json.loads(rec.data) for seq, rec in records.items()} == self.payloads

    def step(self, crash: Mode) -> None:
        """One call, two calls at once, or one end of the server."""
        rng, bench = self.rng, self.bench
        dice = rng.random()
        base = rng.choice("abc")
        if dice < 0.5:
            payloads, body = self.batch(base, rng.choice((1, 2, 3, 6)))
            self.judge(base, payloads, bench.world.run(self.append(body)))
        elif dice < 0.65:
            first, second = self.batch(base, rng.randint(1, 4)), self.batch(base, rng.randint(1, 6))

            async def both() -> tuple[Appended, Appended]:
                return await asyncio.gather(self.append(first[1]), self.append(second[1]))

            for (payloads, _), done in zip((first, second), bench.world.run(both()), strict=True):
                self.judge(base, payloads, done)
        elif dice < 0.8:
            key = f"{base}:{rng.randrange(7)}"
            done = bench.append(1, key=key)
            assert done.deduped is (key in self.seqs)
            assert self.seqs.setdefault(key, done.first_seq) == done.first_seq
            stored = bench.look().records[done.first_seq]
            self.payloads.setdefault(done.first_seq, json.loads(stored.data))
        elif dice < 0.87:
            bench.checkpoint()
        elif dice < 0.94:
            bench.restart()
        else:
            bench.crash(crash)
        self.look()


@pytest.mark.parametrize(
    ("durability", "crash"),
    [(Durability.DISK, "kill"), (Durability.FSYNC, "kill"), (Durability.FSYNC, "power")],
)
def test_each_record_counts_once_over_restarts(durability: Durability, crash: Mode) -> None:
    for seed in range(12):
        keys = _Keys(seed, durability)
        with keys.bench.world.life(seed):
            for _ in range(25):
                keys.step(crash)


def test_a_batch_that_fails_leaves_its_keys_free() -> None:
    """If the disk refused a group, the server forgets the keys of its records."""
    keys = _Keys(1, Durability.FSYNC)
    world = keys.bench.world
    with world.life(1):
        payloads, body = keys.batch("a", 2)
        keys.judge("a", payloads, world.run(keys.append(body)))
        world.disk.fail("write", "enospc", path="data/wal/*.wal", times=None)
        _, refused = keys.batch("a", 4)
        with pytest.raises(TopicsError) as error:
            world.run(keys.append(refused))
        assert error.value.code in (Code.THROTTLED, Code.STORAGE_READ_ONLY)
        world.disk.heal()
        again, body = keys.batch("a", 4)
        keys.bench.wait(5)
        keys.judge("a", again, world.run(keys.append(body)))
        keys.look()
