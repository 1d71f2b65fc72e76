"""Writers of a watch chaos run: one task a topic appends, deletes, trims, drops and recreates.

A turn is one to three calls at once, or one call alone if the order matters (caps, a drop). After a
broken connection the writer repeats the call with its idempotency key until it has an answer;
records sent to an ephemeral topic before a crash float (see `watch_ledger`). Each writer has its
own seed. Any answer but success ends the run.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass
from typing import Final

from tests.crash.kills.ledger import Delete, Json
from tests.crash.watch.watch_ledger import Caps, Incarnation, Ledger, Sort
from tests.crash.watch.watch_wire import Broken, Http, Unreached

NODES: Final = ("n0", "n1", "n2", "n3")
_AGAIN_S: Final = 0.03
_KEEP_SEQS: Final = 150
# Framing, tag, node, id, meta: the size of a record beside its pad.
_BESIDE_PAD_BYTES: Final = 300
_RARE_PAD_BYTES: Final = 30_000
_WINDOW_MS: Final = 600_000


@dataclass(slots=True, frozen=True)
class Kind:
    """The operations on a topic. Topics with byte caps get small records only."""

    durability: str
    caps: str = ""  # "", "records" or "bytes"
    is_dropped: bool = False
    has_long_name: bool = False

    def name(self, number: int) -> str:
        """Names of 220 characters make ids of many topics too long for a map."""
        parts = [f"t{number}", self.durability, self.caps, "dropped" if self.is_dropped else ""]
        name = "-".join(part for part in parts if part)
        return name.ljust(220, "x") if self.has_long_name else name


KINDS: Final = (
    Kind("fsync"),
    Kind("fsync", "records", has_long_name=True),
    Kind("disk", has_long_name=True),
    Kind("disk", "bytes"),
    Kind("disk", "records", is_dropped=True),
    Kind("disk", is_dropped=True, has_long_name=True),
    Kind("memory", has_long_name=True),
    Kind("memory", "records", has_long_name=True),
    Kind("memory", is_dropped=True, has_long_name=True),
    Kind("ephemeral"),
    Kind("ephemeral", "records", has_long_name=True),
    Kind("ephemeral", is_dropped=True),
)


class TopicWriter:
    """Owns one topic: no other writer changes it."""

    def __init__(self, port: int, number: int, ledger: Ledger, seed: str, pause_s: float) -> None:
        self.kind = KINDS[number % len(KINDS)]
        self.name = self.kind.name(number)
        self._https = [Http(port) for _ in range(3)]
        self._number = number
        self._ledger = ledger
        self._rng = random.Random(f"{seed}/{self.name}")
        self._pause_s = pause_s
        self._calls = 0
        self._life: Incarnation

    @property
    def _is_ephemeral(self) -> bool:
        return self.kind.durability == "ephemeral"

    async def create(self) -> None:
        """Make the topic, for the first time or anew."""
        pad_bytes = 400 if self.kind.caps == "bytes" else _RARE_PAD_BYTES
        self._life = self._ledger.create(
            self.name,
            is_ephemeral=self._is_ephemeral,
            record_bytes_max=pad_bytes + _BESIDE_PAD_BYTES,
        )
        await self._configure()
        self._life.created_acked = self._ledger.moment()

    async def run(self, stop: asyncio.Event) -> None:
        """Turn after turn."""
        while not stop.is_set():
            await self._turn()
            await asyncio.sleep(self._rng.expovariate(1 / self._pause_s))

    async def finish(self) -> int:
        """Append a last record that no filter removes; return the head."""
        await self._append(0, [(None, None, 5, False)])
        head_seq = await self._note_head()
        for http in self._https:
            http.close()
        return head_seq

    # -- turns -----------------------------------------------------------------------------

    async def _turn(self) -> None:
        dice = self._rng.random()
        if self.kind.is_dropped and dice < 0.05:
            await self._drop()
            if self._rng.random() < 0.5:
                await asyncio.sleep(self._rng.uniform(0, 0.4))
            await self.create()
        elif self.kind.caps and dice < 0.08:
            await self._configure()
        else:
            await asyncio.gather(
                *(self._some_call(lane) for lane in range(self._rng.choice((1, 1, 2, 3))))
            )

    async def _some_call(self, lane: int) -> None:
        if self._rng.random() < 0.15:
            await self._delete(lane)
        else:
            await self._append(lane, [self._sort() for _ in range(self._rng.choice((1, 1, 2, 7)))])

    def _sort(self) -> Sort:
        rng = self._rng
        node = rng.choice(NODES) if rng.random() < 0.7 else None
        tag = f"g{self._calls // 8}" if rng.random() < 0.7 else None
        is_large = self.kind.caps != "bytes" and rng.random() < 0.03
        pad_bytes = _RARE_PAD_BYTES if is_large else rng.randrange(400)
        return node, tag, pad_bytes, rng.random() < 0.3

    async def _append(self, lane: int, sorts: list[Sort]) -> None:
        life = self._life
        path = f"/v0/topics/{self.name}"
        while True:
            self._calls += 1
            number = self._number * 1_000_000 + self._calls
            records = self._ledger.compose(life, number, *sorts)
            body = {
                "records": [written.body() for written in records],
                "idempotency_key": str(number),
                "create": False,
            }
            if not self._is_ephemeral:
                answer = await self._ask(lane, "POST", path, body)
                break
            try:
                answer = await self._ask_once(lane, "POST", path, body)
                break
            except Broken:
                # A crash loses these records and their key: their result stays unknown.
                life.floating.update({written.id: written for written in records})
        assert answer["last_seq"] == answer["first_seq"] + len(records) - 1, answer
        acked = self._ledger.moment()
        for seq, written in enumerate(records, answer["first_seq"]):
            problem = life.bind(seq, written)
            assert problem is None, f"{self.name}: {problem}"
            written.acked = acked

    async def _delete(self, lane: int) -> None:
        rng = self._rng
        body: Json = {}
        before_seq = tag = prefix = None
        kind = rng.choice(("tag", "tag", "tag", "prefix", "before", "both"))
        if kind in ("tag", "both"):
            tag = body["match"] = f"g{max(0, self._calls // 8 - rng.randint(0, 5))}"
        if kind == "prefix":
            prefix = f"g{rng.randint(0, 9)}"
            body["match"] = ["tag", "Glob", prefix + "*"]
        if kind in ("before", "both"):
            before_seq = body["before_seq"] = max(1, self._life.head_seq - _KEEP_SEQS)
        delete = Delete(before_seq, tag, prefix, self._ledger.moment())
        self._life.deletes.append(delete)
        await self._ask(lane, "POST", f"/v0/topics/{self.name}/delete", body)
        delete.acked = self._ledger.moment()

    async def _configure(self) -> None:
        """Create the topic or change its caps while no other call runs, so that the head at the
        change is known.
        """
        life = self._life
        if life.caps:
            life.caps[-1].head_end = await self._note_head()
        config: Json = {
            "durability": self.kind.durability,
            "idempotency_window_ms": _WINDOW_MS,
        }
        cap_records = cap_bytes = 0
        if self.kind.caps == "records":
            cap_records = config["cap_records"] = self._rng.choice((0, 20, 60, 200))
        elif self.kind.caps == "bytes":
            cap_bytes = config["cap_bytes"] = self._rng.choice((0, 15_000, 50_000))
        life.caps.append(Caps(cap_records, cap_bytes, self._ledger.moment()))
        await self._ask(0, "PUT", f"/v0/topics/{self.name}", config)

    async def _drop(self) -> None:
        self._life.dropped_sent = self._ledger.moment()
        while True:
            # After a crash the head of an ephemeral topic is higher, and readers get a tombstone.
            await self._note_head()
            try:
                await self._ask_once(0, "DELETE", f"/v0/topics/{self.name}")
                break
            except Broken:
                continue
        self._life.dropped_acked = self._ledger.moment()

    async def _note_head(self) -> int:
        """Ask for the head while no own call is in flight."""
        path = f"/v0/topics/{self.name}?touch=false"
        life = self._life
        status, answer = await self._until_answered(0, "GET", path)
        if status == 404 and life.dropped_sent is not None:
            return life.head_seq
        assert status == 200, f"{self.name}: {status} {answer}"
        head_seq = int(answer["head_seq"])
        is_expected = head_seq == life.head_seq or (self._is_ephemeral and head_seq > life.head_seq)
        assert is_expected, f"{self.name}: the head is {head_seq}, not {life.head_seq}"
        life.head_seq = head_seq
        return head_seq

    # -- calls -----------------------------------------------------------------------------

    async def _ask(self, lane: int, method: str, path: str, body: Json | None = None) -> Json:
        """Repeat a request until it has an answer, which must be a success."""
        status, answer = await self._until_answered(lane, method, path, body)
        assert status in (200, 201), f"{method} {path}: {status} {answer}"
        return answer

    async def _until_answered(
        self, lane: int, method: str, path: str, body: Json | None = None
    ) -> tuple[int, Json]:
        while True:
            try:
                return await self._served(lane, method, path, body)
            except Broken:
                await asyncio.sleep(_AGAIN_S)

    async def _ask_once(self, lane: int, method: str, path: str, body: Json | None = None) -> Json:
        """Send it once; `Broken` if the result is unknown."""
        while True:
            try:
                status, answer = await self._served(lane, method, path, body)
            except Unreached:
                await asyncio.sleep(_AGAIN_S)
                continue
            assert status in (200, 201), f"{method} {path}: {status} {answer}"
            return answer

    async def _served(
        self, lane: int, method: str, path: str, body: Json | None
    ) -> tuple[int, Json]:
        """An answer other than "retry later"; requests with that answer had no effect."""
        while True:
            status, answer = await self._https[lane].ask(method, path, body)
            if status not in (429, 503):
                return status, answer
            await asyncio.sleep(_AGAIN_S)
