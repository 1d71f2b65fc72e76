"""`feed`: views of one topic share what they read, and send it to the apply process once."""

from __future__ import annotations

import asyncio
import contextlib
from array import array
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.garbage import nothing_for_the_collector
from topics_server.engine.answers import Page, Piece, ReadRequest
from topics_server.engine.store import Store
from topics_server.engine.topic.topic import Topic
from topics_server.values.blocks import make_block
from topics_server.values.model import OnDelete, ViewDefinition
from topics_server.views.definition import make_definition
from topics_server.views.feed import Feed, SharedDeath
from topics_server.views.messages import (
    REQUESTS,
    Answer,
    Apply,
    ApplyAll,
    Batch,
    Create,
    Done,
    FailedAt,
    Moved,
    Request,
    encode,
)
from topics_server.views.pacing import Pacer
from topics_server.views.processes import ProcessDied
from topics_server.views.workers.apply_worker import Applier

pytestmark = pytest.mark.anyio


def _definition(schema: str) -> ViewDefinition:
    return make_definition(
        schema=schema,
        apply="INSERT INTO rows VALUES (:seq, :tag)",
        queries={},
        shortcut=None,
        on_delete=OnDelete.KEEP,
    )


GOOD = _definition("CREATE TABLE rows (seq INTEGER PRIMARY KEY, tag)")
BAD = _definition("CREATE TABLE rows (seq INTEGER PRIMARY KEY, tag CHECK (tag <> 't3'))")


class Topics:
    """Replaces the store: every topic has records 1 to 5. `reads`: the reads so far."""

    def __init__(self) -> None:
        self.reads: list[ReadRequest] = []

    async def read(self, name: str, request: ReadRequest) -> Page:
        self.reads.append(request)
        count = 5 - request.from_seq
        if count == 0:
            return Page([], 5, 5, 1)
        tags: list[str | None] = [f"t{seq}" for seq in range(request.from_seq + 1, 6)]
        datas = [b"{}"] * count
        times = array("q", [1_000] * count)
        block = make_block(request.from_seq + 1, times, datas, [b""] * count, tags, [None] * count)
        return Page([Piece(block, range(count))], 5, 5, 1)


class Process:
    """The apply process, in this one. It dies where `is_deadly` says so."""

    def __init__(self, is_deadly: Callable[[Request], bool] = lambda request: False) -> None:
        self.applier = Applier()
        self.asked: list[Request] = []
        self._is_deadly = is_deadly

    async def ask(self, request: Request, *, seconds: float) -> Answer:
        self.asked.append(request)
        await asyncio.sleep(0)
        if self._is_deadly(request):
            raise ProcessDied(was_late=False)
        return self.applier.answer(REQUESTS.decode(encode(request)))

    async def close(self) -> None:
        self.applier.close()


def _feed(topics: Topics, process: Process) -> Feed:
    return Feed(cast(Store, topics), process, Pacer())


def _topic(**facts: Any) -> Topic:
    facts = {"topic_id": 1, "name": "t", "applied_lsn": 7} | facts
    return cast(Topic, SimpleNamespace(**facts))


def _batch(pieces: list[Any], count: int) -> Batch:
    return Batch(0, 5, 7, 1, [], count, pieces)


async def test_views_at_the_same_record_share_a_page() -> None:
    topics = Topics()
    feed = _feed(topics, Process())
    request = ReadRequest(0, 500, 1_000)
    one = await feed.read(_topic(), request)
    assert await feed.read(_topic(), request) is one
    assert one.pieces(with_payloads=True) is one.pieces(with_payloads=True)
    assert one.pieces(with_payloads=True) != one.pieces(with_payloads=False)
    assert len(topics.reads) == 1


@pytest.mark.parametrize("facts", [{"topic_id": 2}, {"applied_lsn": 8}])
async def test_a_page_is_not_shared_once_the_topic_changed(facts: dict[str, int]) -> None:
    """A read after a delete in the same turn shows the delete."""
    topics = Topics()
    feed = _feed(topics, Process())
    request = ReadRequest(0, 500, 1_000)
    await feed.read(_topic(), request)
    await feed.read(_topic(**facts), request)
    await feed.read(_topic(), ReadRequest(2, 500, 1_000))
    await feed.read(_topic(), ReadRequest(0, 250, 1_000))
    assert len(topics.reads) == 4


async def test_a_page_is_kept_for_one_turn() -> None:
    topics = Topics()
    feed = _feed(topics, Process())
    request = ReadRequest(0, 500, 1_000)
    await feed.read(_topic(), request)
    await asyncio.sleep(0)
    await feed.read(_topic(), request)
    assert len(topics.reads) == 2


async def test_the_batches_of_one_turn_are_one_message(tmp_path: Path) -> None:
    """Shared pieces are in the message once, and each part gets an answer of its own."""
    process = Process()
    feed = _feed(Topics(), process)
    paths = {name: str(tmp_path / name / "1.db") for name in ("bad", "one", "two", "closed")}
    for name, path in paths.items():
        if name != "closed":
            definition = BAD if name == "bad" else GOOD
            process.applier.answer(Create(path, definition, "1", 1, 64 << 20))
    page = await feed.read(_topic(), ReadRequest(0, 500, 1_000))
    later = await feed.read(_topic(), ReadRequest(3, 500, 1_000))
    pieces = page.pieces(with_payloads=False)
    batches = {name: _batch(pieces, 5) for name in ("bad", "one", "closed")}
    batches["two"] = Batch(3, 5, 7, 1, [], 2, later.pieces(with_payloads=False))
    answers = await asyncio.gather(
        *(feed.apply(paths[name], batch, alone=False) for name, batch in batches.items())
    )
    found = dict(zip(batches, answers, strict=True))
    assert isinstance(found["bad"], FailedAt)
    assert found["bad"].seq == 3
    assert isinstance(found["one"], Done)
    assert found["one"].processed_seq == 5
    # One file is not open; the other is not at the position where its batch begins.
    assert found["closed"] == found["two"] == Moved()
    (message,) = process.asked
    assert isinstance(message, ApplyAll)
    assert len(message.pieces) == 2
    assert [part.batch.pieces for part in message.parts] == [[]] * 4
    # The process keeps nothing of a message after its answer.
    assert process.applier._records is None
    await process.close()


async def test_a_batch_alone_is_a_message_of_its_own(tmp_path: Path) -> None:
    process = Process()
    feed = _feed(Topics(), process)
    path = str(tmp_path / "1.db")
    first = feed.apply(path, _batch([], 0), alone=False)
    second = feed.apply(path, _batch([], 0), alone=True)
    assert list(await asyncio.gather(first, second)) == [Moved(), Moved()]
    assert [type(request) for request in process.asked] == [Apply, Apply]
    await process.close()


async def test_a_caller_that_goes_away_before_the_message_is_not_in_it(tmp_path: Path) -> None:
    process = Process()
    feed = _feed(Topics(), process)
    waiting = [
        asyncio.ensure_future(feed.apply(str(tmp_path / name), _batch([], 0), alone=False))
        for name in ("a", "b")
    ]
    # After both batches, and before the message is made.
    asyncio.get_running_loop().call_soon(waiting[0].cancel)
    assert await waiting[1] == Moved()
    assert [getattr(request, "path", "") for request in process.asked] == [str(tmp_path / "b")]
    await process.close()


async def test_a_death_with_others_is_told_as_such(tmp_path: Path) -> None:
    """No view is blamed for the batch of another view."""
    process = Process(lambda request: True)
    feed = _feed(Topics(), process)
    died = await asyncio.gather(
        *(feed.apply(str(tmp_path / name), _batch([], 0), alone=False) for name in "ab"),
        return_exceptions=True,
    )
    assert [type(error) for error in died] == [SharedDeath, SharedDeath]
    for alone in (True, False):
        with pytest.raises(ProcessDied) as caught:
            await feed.apply(str(tmp_path / "a"), _batch([], 0), alone=alone)
        assert type(caught.value) is ProcessDied


@pytest.mark.parametrize("views", [1, 3])
async def test_a_process_that_dies_leaves_nothing_for_the_collector(views: int) -> None:
    feed = _feed(Topics(), Process(lambda request: True))

    async def died() -> None:
        with contextlib.suppress(ProcessDied):
            await feed.apply("path", _batch([], 5), alone=False)

    with nothing_for_the_collector():
        await asyncio.gather(*(died() for _ in range(views)))
        await asyncio.sleep(0)
