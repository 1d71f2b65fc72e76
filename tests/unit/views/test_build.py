"""`build`: a batch that kills the apply process stops its view, and no other view."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.unit.views.test_feed import GOOD, Process, Topics
from topics_server.engine.commit.notifier import Notifier
from topics_server.engine.store import Store
from topics_server.engine.topic.topic import Topic
from topics_server.values.storage_types import Offload
from topics_server.views.build import Build, ViewContext
from topics_server.views.feed import Feed
from topics_server.views.messages import Answer, Apply, ApplyAll, Create, Request
from topics_server.views.pacing import Pacer

pytestmark = pytest.mark.anyio

TOPIC = cast(
    Topic,
    SimpleNamespace(
        topic_id=1, epoch=1, name="t", applied_lsn=7, staging=SimpleNamespace(has_drop=False)
    ),
)


class OneTopic(Topics):
    """The store as a build sees it."""

    is_disk_low = False

    def topic_of(self, topic_id: int) -> Topic:
        return TOPIC


class Events:
    """No caller waits for the build."""

    is_awaited = False

    def opened(self, build: Build) -> None:
        """Do nothing."""

    moved = caught_up = lost_topic = unusable = opened


class DiesOf(Process):
    """A process that dies at every batch for these files. `is_late`: it hangs and must be
    killed.
    """

    def __init__(self, paths: set[str]) -> None:
        super().__init__(self._is_of_these)
        self._paths = paths

    def _is_of_these(self, request: Request) -> bool:
        if isinstance(request, ApplyAll):
            return not self._paths.isdisjoint(part.path for part in request.parts)
        return isinstance(request, Apply) and request.path in self._paths


def _builds(process: Process, paths: list[str]) -> list[Build]:
    store = cast(Store, OneTopic())
    context = ViewContext(
        store, Notifier(), process, cast(Offload, None), 64 << 20, Feed(store, process, Pacer())
    )
    return [
        Build(path, context, Events(), topic=TOPIC, definition=GOOD, deletes_seen=0)
        for path in paths
    ]


async def _until(is_met: Any) -> None:
    async with asyncio.timeout(30):
        while not is_met():
            await _turn()


async def _turn() -> None:
    """One turn of the loop."""
    await asyncio.sleep(0)


async def test_a_record_that_kills_the_process_stops_its_view_alone(tmp_path: Path) -> None:
    """The view reports the failure and tries again once its definition is fixed; other views have
    all records.
    """
    paths = [str(tmp_path / name / "1.db") for name in ("a", "b", "c")]
    process = DiesOf({paths[1]})
    builds = _builds(process, paths)
    for build in builds:
        build.start(None)
    bad = builds[1]
    await _until(lambda: bad.failure is not None and builds[0].is_ready and builds[2].is_ready)
    failures = [build.failure for build in builds]
    assert failures[0] is failures[2] is None
    assert failures[1] is not None
    assert failures[1].seq == 1
    assert "made it fail repeatedly" in failures[1].message
    assert [build.processed_seq for build in builds] == [5, 0, 5]
    process._paths.clear()
    bad.mend()
    await _until(lambda: bad.is_ready)
    # The view is ready only after it applied the record at which it had stopped.
    assert (bad.processed_seq, bad.failure) == (5, None)
    for build in builds:
        await build.stop()
    await process.close()


async def test_a_few_deaths_stop_no_view(tmp_path: Path) -> None:
    """A record is not always the cause of the process's death."""
    path = str(tmp_path / "1.db")
    process = DiesOf({path})
    (build,) = _builds(process, [path])
    build.start(None)
    deaths = 0

    async def ask(request: Request, *, seconds: float) -> Answer:
        nonlocal deaths
        if isinstance(request, Apply):
            deaths += 1
            if deaths > 5:
                process._paths.clear()
        return await Process.ask(process, request, seconds=seconds)

    process.ask = ask  # type: ignore[method-assign]
    await _until(lambda: build.is_ready)
    assert deaths == 6
    assert build.failure is None
    assert build.processed_seq == 5
    assert sum(isinstance(request, Create) for request in process.asked) == 1
    await build.stop()
    await process.close()
