"""Mends damaged sealed segments from undamaged copies, without a restart.

A segment is noted when a reader, the scrub or the start finds damage in it. Segments are mended one
at a time. Undamaged copies are written beside the damaged files and checked. Then, while no other
job on sealed files runs, the copies replace the damaged files, and the records become live again,
except those that were deleted meanwhile. A failed mend changes nothing; it is tried again after a
longer and longer pause. A segment that is damaged repeatedly is no longer mended: its disk is
failing. Made only where there is an archive. Loop thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, Generic, Protocol, TypeVar

import msgspec
import numpy as np

from topics_server.engine.background.sealer import Sealer
from topics_server.engine.log.runs import DELETED, SealedRun
from topics_server.engine.ports import Clock, SealedIndex
from topics_server.engine.topic.registry import Registry
from topics_server.engine.topic.topic import Topic
from topics_server.runtime.metrics import MendingMetrics, log
from topics_server.values.errors import StorageError
from topics_server.values.file_inventory import KnownFlags

_RETRY_S: Final = 2.0
_RETRY_MAX_S: Final = 600.0
# The maximum of mends of one segment in a run of the server.
_MENDS_MAX: Final = 3
# Topics examined in one loop turn.
_SLICE: Final = 256

FilesT = TypeVar("FilesT")
Key = tuple[int, int]


class MendingPort(Protocol[FilesT]):
    """Writes copies and puts them in place; `node.mending.ArchiveMending` satisfies it."""

    async def prepare(self, topic_id: int, segment_id: int, known: KnownFlags) -> FilesT:
        """Write undamaged copies beside a segment's damaged files. Raises `StorageError`."""
        ...

    async def finish(self, files: FilesT, known: KnownFlags) -> tuple[SealedIndex, bytes]:
        """Put the copies in place; return the new columns and flags. Raises `StorageError`."""
        ...

    async def discard(self, files: FilesT) -> None:
        """Remove the copies."""
        ...


class _Wait(msgspec.Struct):
    """A segment that waits for a mend: when it is due, how often it failed, and why."""

    due_ms: float = 0.0
    tries: int = 0
    reason: str = ""


class Mender(Generic[FilesT]):
    """See the module."""

    def __init__(
        self,
        registry: Registry,
        sealer: Sealer,
        files: MendingPort[FilesT],
        clock: Clock,
        on_mended: Callable[[Topic, SealedIndex], None],
    ) -> None:
        """`on_mended` is called in the loop turn in which the records become live again."""
        self._registry = registry
        self._sealer = sealer
        self._files = files
        self._clock = clock
        self._on_mended = on_mended
        self._waits: dict[Key, _Wait] = {}
        self._mends: dict[Key, int] = {}
        self._woken = asyncio.Event()
        self._segments = self._records = self._failures = 0

    def metrics(self) -> MendingMetrics:
        """Facts for a scrape."""
        return MendingMetrics(self._segments, self._records, self._failures, len(self._waits))

    @property
    def failed(self) -> int:
        """Segments whose last mend failed."""
        return sum(wait.tries > 0 for wait in self._waits.values())

    def note(self, topic_id: int, segment_id: int) -> None:
        """Note a segment with damage, or with a file that could not be read."""
        key = topic_id, segment_id
        if key not in self._waits:
            self._waits[key] = _Wait()
            self._woken.set()

    async def run(self) -> None:
        """Mend until cancelled."""
        await self._find_damage()
        while True:
            self._woken.clear()
            now_ms = self._clock.monotonic_ms()
            key = next((key for key, wait in self._waits.items() if wait.due_ms <= now_ms), None)
            if key is not None:
                await self._try(key)
                continue
            due_ms = min((wait.due_ms for wait in self._waits.values()), default=float("inf"))
            seconds = min(_RETRY_MAX_S, max(0.0, (due_ms - now_ms) / 1000))
            try:
                async with asyncio.timeout(seconds):
                    await self._woken.wait()
            except TimeoutError:
                pass

    async def _find_damage(self) -> None:
        """Note the damaged segments that the start found, in slices."""
        for number, topic_id in enumerate([topic.topic_id for topic in self._registry]):
            if number % _SLICE == 0:
                await asyncio.sleep(0)
            topic = self._registry.get(topic_id)
            if topic is None or not (topic.log.damaged_records or topic.files.untrusted):
                continue
            for run in topic.log.sealed():
                if run.has_damage or run.segment_id in topic.files.untrusted:
                    self.note(topic_id, run.segment_id)

    async def _try(self, key: Key) -> None:
        wait = self._waits[key]
        topic = self._registry.get(key[0])
        if topic is None or _run_of(topic, key[1]) is None:
            del self._waits[key]  # dropped meanwhile
            return
        if self._mends.get(key, 0) >= _MENDS_MAX:
            reason = f"it was mended {_MENDS_MAX} times since the start: is its disk dying?"
            self._note_failure(topic, key, wait, reason)
            return
        try:
            came = await self._mend(topic, key[1])
        except StorageError as error:
            self._note_failure(topic, key, wait, str(error))
            return
        except Exception as error:
            log.error("defect in a mend of topic %s", topic.name, exc_info=error)
            self._note_failure(topic, key, wait, f"an internal error: {error}")
            return
        del self._waits[key]
        if came is not None:
            self._mends[key] = self._mends.get(key, 0) + 1
            self._segments += 1
            self._records += came
            log.warning(
                "topic %s: segment %d was mended from the archive, %d records are back; "
                "the damaged files are in quarantine",
                topic.name,
                key[1],
                came,
            )

    def _note_failure(self, topic: Topic, key: Key, wait: _Wait, reason: str) -> None:
        self._failures += 1
        pause_s = min(_RETRY_MAX_S, _RETRY_S * 2 ** min(wait.tries, 16))
        wait.tries += 1
        wait.due_ms = self._clock.monotonic_ms() + pause_s * 1000
        if reason != wait.reason:
            log.error("topic %s: segment %d stays damaged: %s", topic.name, key[1], reason)
        wait.reason = reason
        # Other segments come first.
        self._waits[key] = self._waits.pop(key)

    async def _mend(self, topic: Topic, segment_id: int) -> int | None:
        """Mend a segment; return how many records came back; None if it was dropped."""
        run = _run_of(topic, segment_id)
        assert run is not None
        known = _known_flags(topic, run)
        files = await self._files.prepare(topic.topic_id, segment_id, known)
        async with self._sealer.turn:
            current = _run_of(topic, segment_id)
            if current is None or self._registry.get(topic.topic_id) is not topic:
                await self._files.discard(files)
                return None
            known = _known_flags(topic, current)
            index, flags = await self._files.finish(files, known)
            if self._registry.get(topic.topic_id) is not topic:
                return None  # dropped meanwhile
            came = topic.note_mended(index, flags)
            self._registry.recount(topic)
            self._sealer.note_mended(topic)
            self._on_mended(topic, index)
        return came


def _run_of(topic: Topic, segment_id: int) -> SealedRun | None:
    return next((run for run in topic.log.sealed() if run.segment_id == segment_id), None)


def _known_flags(topic: Topic, run: SealedRun) -> KnownFlags:
    """The facts in memory about the last synced flags. Raises `StorageError` if there are none."""
    digest = topic.files.digests.get(run.segment_id)
    if digest is None:
        raise StorageError(
            "its delete flags are damaged, and no snapshot knows what they were: a copy might "
            "bring deleted records back"
        )
    deleted = np.frombuffer(run.dead, np.uint8) == DELETED
    pending = topic.files.pending.get(run.segment_id)
    if pending:
        deleted[np.frombuffer(pending, np.uint32)] = False
    first_row = max(0, topic.log.evict_floor - run.first_seq)
    return KnownFlags(digest, deleted.astype(np.uint8).tobytes(), first_row)
