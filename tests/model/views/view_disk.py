"""The helper processes of views, in one thread, over real SQLite files that can lose power.

`ViewDisk` stands for what the disk keeps of them. Its model: the database writes a file in WAL mode
with `synchronous = NORMAL`, so the main file changes only at checkpoints, behind a synced WAL; all
of the WAL behind the last checkpoint may be lost, from any byte on. After a power cut a file is as
it was after some change since it was made: the last one, an older one, one with a torn WAL, a file
of length 0, or none at all. Copies of the real files represent these states. A removal is durable.

`SimulatedApplier` and `SimulatedQuerier` run the code of the real processes. The applier dies from
time to time, before or after it carries out a request. It records which records it delivered to
each file, so that the judge can fold exactly these.
"""

from __future__ import annotations

import asyncio
import os
import random
from pathlib import Path
from typing import NamedTuple

import msgspec

from topics_server.views.messages import (
    ANSWERS,
    REQUESTS,
    AllApplied,
    Answer,
    Apply,
    ApplyAll,
    Create,
    Done,
    FailedAt,
    FileFacts,
    Open,
    Remove,
    Request,
    Skip,
    ViewQuery,
    encode,
)
from topics_server.views.processes import ProcessDied
from topics_server.views.workers.apply_worker import Applier
from topics_server.views.workers.query_worker import Querier
from topics_server.views.workers.records import RecordColumns

_COPIES_MAX = 12


class Delivered(NamedTuple):
    """A record as `apply` got it; without payload for a view that needs none."""

    ts: int
    node: str | None
    tag: str | None
    data: bytes
    meta: bytes


class _Copy(NamedTuple):
    main: bytes
    wal: bytes


class ViewDisk:
    """The folder of all views, and what a power cut may leave of each file."""

    def __init__(self, rng: random.Random, root: Path) -> None:
        self.rng = rng
        self.root = root
        self.applier = Applier()
        self.querier = Querier()
        self.delivered: dict[str, dict[int, Delivered]] = {}
        self.skipped: dict[str, set[int]] = {}
        self.older = self.torn = self.gone = self.deaths = self.joined = 0
        self._copies: dict[str, list[_Copy]] = {}

    # -- at work ---------------------------------------------------------------------------

    def perform(self, request: Request) -> Answer:
        """Carry out a request to the applier, and note which states a power cut may leave."""
        answer = self.applier.answer(REQUESTS.decode(encode(request)))
        answer = ANSWERS.decode(encode(answer))
        if isinstance(request, ApplyAll):
            assert isinstance(answer, AllApplied)
            self.joined += 1
            for part, one in zip(request.parts, answer.answers, strict=True):
                pieces = request.pieces[part.pieces]
                batch = msgspec.structs.replace(part.batch, pieces=pieces)
                self._noted(Apply(part.path, batch), one)
            return answer
        return self._noted(request, answer)

    def _noted(self, request: Request, answer: Answer) -> Answer:
        path = getattr(request, "path", "")
        if isinstance(request, Create) and isinstance(answer, FileFacts):
            self.delivered[path], self.skipped[path] = {}, set()
            self._copies[path] = []
        if isinstance(request, Open) and isinstance(answer, FileFacts):
            self._forget_after(path, answer.processed_seq)
        if isinstance(request, Apply) and isinstance(answer, Done | FailedAt):
            upto = answer.processed_seq if isinstance(answer, Done) else answer.seq - 1
            self._note(path, request, upto)
        if isinstance(request, Skip) and isinstance(answer, Done):
            self.skipped[path].add(request.seq)
        if isinstance(request, Remove) and isinstance(answer, Done):
            self._copies.pop(path, None)
            return answer
        if path and os.path.exists(path):
            if self.rng.random() < 0.05:
                self._checkpoint(path)
            copies = self._copies.setdefault(path, [])
            if not copies or self.rng.random() < 0.5:
                copies.append(_Copy(_bytes(path), _bytes(path + "-wal")))
                del copies[:-_COPIES_MAX]
        return answer

    def _note(self, path: str, request: Apply, upto: int) -> None:
        records = RecordColumns(request.batch)
        columns = [records.column(name) for name in ("seq", "ts", "node", "tag", "data", "meta")]
        delivered = self.delivered[path]
        for seq, ts, node, tag, data, meta in zip(*columns, strict=True):
            if seq <= upto:
                assert seq not in delivered, f"record {seq} is delivered to {path} twice"
                delivered[seq] = Delivered(ts, node, tag, data.encode(), (meta or "").encode())

    def _forget_after(self, path: str, seq: int) -> None:
        """A power cut left an older file: later records will be delivered again."""
        delivered = self.delivered.setdefault(path, {})
        for later in [one for one in delivered if one > seq]:
            del delivered[later]
        self.skipped[path] = {one for one in self.skipped.get(path, ()) if one <= seq}

    def _checkpoint(self, path: str) -> None:
        file = self.applier._files.get(path)
        if file is not None:
            file._connection.set_authorizer(None)
            file._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
            file._connection.set_authorizer(file._sandbox._authorize)
            # Earlier writes are synced.
            self._copies[path] = []

    # -- deaths ----------------------------------------------------------------------------

    def kill(self) -> None:
        """The processes die: the files stay as they are, with a WAL without a checkpoint."""
        self._restart({path: self._now(path) for path in self._paths()})

    def lose_power(self) -> None:
        """The machine dies: each file goes back to its state at some moment since it was made."""
        self._restart({path: self._left_of(path) for path in self._paths()})

    def _restart(self, left: dict[str, _Copy | None]) -> None:
        for path in list(self.applier._files):
            self.applier._forget(path)
        for path in list(self.querier._files):
            self.querier._forget(path)
        for path, copy in left.items():
            for suffix in ("-wal", "-shm", ""):
                Path(path + suffix).unlink(missing_ok=True)
            if copy is None:
                self._copies.pop(path, None)
                continue
            Path(path).write_bytes(copy.main)
            if copy.wal:
                Path(path + "-wal").write_bytes(copy.wal)
            self._copies[path] = [copy]
        self.applier, self.querier = Applier(), Querier()

    def _left_of(self, path: str) -> _Copy | None:
        now, rng = self._now(path), self.rng
        dice = rng.random()
        if dice < 0.35:
            return now
        if dice < 0.6 and self._copies.get(path):
            self.older += 1
            return rng.choice(self._copies[path])
        if dice < 0.9:
            self.torn += 1
            return now._replace(wal=now.wal[: rng.randint(0, len(now.wal))])
        self.gone += 1
        return None if dice < 0.95 else _Copy(b"", b"")

    def _now(self, path: str) -> _Copy:
        return _Copy(_bytes(path), _bytes(path + "-wal"))

    def _paths(self) -> list[str]:
        return [str(path) for path in sorted(self.root.glob("*/*.db"))]


def _bytes(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except FileNotFoundError:
        return b""


class SimulatedApplier:
    """The apply process. With `may_die` it sometimes dies, before or after its work."""

    def __init__(self, disk: ViewDisk) -> None:
        self._disk = disk
        self._turn = asyncio.Lock()
        self.may_die = True
        self.is_closed = False

    async def ask(self, request: Request, *, seconds: float) -> Answer:
        """See `processes.ViewProcess.ask`: the request is served even without a waiting caller."""
        under_way = asyncio.ensure_future(self._ask(request))
        under_way.add_done_callback(lambda done: done.cancelled() or done.exception())
        return await asyncio.shield(under_way)

    async def _ask(self, request: Request) -> Answer:
        disk, rng = self._disk, self._disk.rng
        async with self._turn:
            if self.is_closed:
                raise ProcessDied(was_late=False)
            await self._turns()
            dice = rng.random() if self.may_die else 1.0
            if dice < 0.01:
                self._die()
            answer = disk.perform(request)
            await self._turns()
            if dice < 0.02:
                self._die()
            return answer

    def _die(self) -> None:
        self._disk.deaths += 1
        self._disk.kill()
        raise ProcessDied(was_late=False)

    async def _turns(self) -> None:
        for _ in range(self._disk.rng.choice((0, 0, 1, 2, 30))):
            await asyncio.sleep(0)
        if self._disk.rng.random() < 0.05:
            await asyncio.sleep(self._disk.rng.choice((0.001, 0.2)))

    async def close(self) -> None:
        """See `processes.ViewProcess.close`."""
        async with self._turn:
            self.is_closed = True
            for path in list(self._disk.applier._files):
                self._disk.applier._forget(path)


class SimulatedQuerier:
    """The query processes."""

    def __init__(self, disk: ViewDisk) -> None:
        self._disk = disk

    async def ask(self, query: ViewQuery, *, seconds: float) -> Answer:
        """See `processes.QueryPool.ask`."""
        await asyncio.sleep(0)
        answer = self._disk.querier.answer(query)
        await asyncio.sleep(0)
        return ANSWERS.decode(encode(answer))

    async def warm(self) -> None:
        """See `processes.QueryPool.warm`."""

    async def close(self) -> None:
        """See `processes.QueryPool.close`."""
        for path in list(self._disk.querier._files):
            self._disk.querier._forget(path)
