"""Pages, messages and pauses that views share while they follow the heads of their topics.

Without this module, many views of one topic would each read the same page, send it to the apply
process and wait for the answer, and each of these steps would delay appends. So paused views
continue in the same turn (`pacing`), views at the same record share the page that the first of them
reads, and all batches of one turn are sent to the apply process in one message, which has each page
once. Loop thread only; called by `build`.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Final, NamedTuple

import msgspec

from topics_server.engine.answers import Page, ReadRequest
from topics_server.engine.store import Store
from topics_server.engine.topic.topic import Topic
from topics_server.views.messages import (
    AllApplied,
    Answer,
    Apply,
    ApplyAll,
    Batch,
    BatchPart,
    BlockRows,
    Moved,
)
from topics_server.views.pacing import Pacer
from topics_server.views.pieces import pieces_of
from topics_server.views.processes import Applying, ProcessDied

# More than twice `view_file.BATCH_SECONDS`: a failed batch is applied again up to the failed
# record.
_BATCH_SECONDS: Final = 30.0


class SharedDeath(ProcessDied):
    """The process died of a message with batches of several views; one of them may be the cause."""


class SharedPage:
    """A page, and its records as encoded for the apply process."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self._pieces: dict[bool, list[BlockRows]] = {}

    def pieces(self, *, with_payloads: bool) -> list[BlockRows]:
        """The records; every caller gets the same list."""
        found = self._pieces.get(with_payloads)
        if found is None:
            found = pieces_of(self.page, with_payloads=with_payloads)
            self._pieces[with_payloads] = found
        return found


class _Waiting(NamedTuple):
    path: str
    batch: Batch
    answer: asyncio.Future[Answer]


# The topic of a page, the topic's last entry, the cursor and the limit.
_Place = tuple[int, int, int, int]


class Feed:
    """The pages and batches of all views of a server."""

    def __init__(self, store: Store, process: Applying, pacer: Pacer) -> None:
        self._store = store
        self._process = process
        self._pacer = pacer
        self._pages: dict[_Place, SharedPage] = {}
        self._waiting: list[_Waiting] = []
        self._sending: set[asyncio.Task[list[Answer]]] = set()

    def rest(self) -> asyncio.Future[None]:
        """A future that ends when the paused views continue; to end its pause, a view sets it."""
        return self._pacer.rest()

    async def read(self, topic: Topic, request: ReadRequest) -> SharedPage:
        """The page that `Store.read` returns; calls for the same records share one page.

        A page is shared only within one turn of the loop, and while the topic does not change.
        """
        place = (topic.topic_id, topic.applied_lsn, request.from_seq, request.limit)
        found = self._pages.get(place)
        if found is None:
            found = SharedPage(await self._store.read(topic.name, request))
            if not self._pages:
                asyncio.get_running_loop().call_soon(self._pages.clear)
            self._pages[place] = found
        return found

    async def apply(self, path: str, batch: Batch, *, alone: bool) -> Answer:
        """Apply a batch to a file. Raises `ProcessDied`, or `SharedDeath` with several batches.

        Unless `alone`, the batch is sent together with others of this turn of the loop. Cancelling
        the caller does not stop a sent batch.
        """
        if alone:
            return await self._process.ask(Apply(path, batch), seconds=_BATCH_SECONDS)
        loop = asyncio.get_running_loop()
        if not self._waiting:
            loop.call_soon(self._send)
        answer: asyncio.Future[Answer] = loop.create_future()
        self._waiting.append(_Waiting(path, batch, answer))
        try:
            return await answer
        finally:
            # An error refers to this frame, so the frame must not refer to the future.
            del answer

    def _send(self) -> None:
        waiting = [one for one in self._waiting if not one.answer.done()]
        self._waiting.clear()
        # Put batches with the same pieces next to each other: the process makes their columns once.
        waiting.sort(key=lambda one: id(one.batch.pieces))
        if waiting:
            task = asyncio.get_running_loop().create_task(self._answers(waiting))
            self._sending.add(task)
            task.add_done_callback(partial(self._resolve, waiting))

    def _resolve(self, waiting: list[_Waiting], task: asyncio.Task[list[Answer]]) -> None:
        self._sending.discard(task)
        error = None if task.cancelled() else task.exception()
        for index, one in enumerate(waiting):
            if one.answer.done():
                continue
            if task.cancelled():
                one.answer.cancel()
            elif error is None:
                one.answer.set_result(task.result()[index])
            else:
                # Without its traceback, whose frames refer to `waiting`.
                cause = _error_for_each(error.with_traceback(None), len(waiting))
                one.answer.set_exception(cause)
                # The view may have stopped waiting; asyncio would then report the error as lost.
                one.answer.exception()

    async def _answers(self, waiting: list[_Waiting]) -> list[Answer]:
        seconds = _BATCH_SECONDS * len(waiting)
        if len(waiting) == 1:
            ((path, batch, _),) = waiting
            return [await self._process.ask(Apply(path, batch), seconds=seconds)]
        answer = await self._process.ask(_joined(waiting), seconds=seconds)
        if isinstance(answer, AllApplied) and len(answer.answers) == len(waiting):
            return list(answer.answers)
        return [Moved()] * len(waiting)


def _joined(waiting: list[_Waiting]) -> ApplyAll:
    """Join batches into one message, with shared pieces only once."""
    places: dict[int, int] = {}
    pieces: list[list[BlockRows]] = []
    parts: list[BatchPart] = []
    for path, batch, _ in waiting:
        place = places.setdefault(id(batch.pieces), len(pieces))
        if place == len(pieces):
            pieces.append(batch.pieces)
        parts.append(BatchPart(path, msgspec.structs.replace(batch, pieces=[]), place))
    return ApplyAll(pieces, parts)


def _error_for_each(error: BaseException, views: int) -> BaseException:
    if isinstance(error, ProcessDied) and views > 1:
        return SharedDeath(was_late=error.was_late)
    return error
