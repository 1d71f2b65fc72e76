"""Diffs of sealed JSON records: also in a turn and from the disk, no record is made anew."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.api.watch.streams import Live
from tests.storage.fake_disk import FakeDisk
from topics_server.engine.pressure.throttle import Throttle

pytestmark = pytest.mark.anyio

RECORDS = 300


async def not_called(*_: Any) -> None:
    raise AssertionError("the page is read in another way")


@pytest.fixture
async def live(disk: FakeDisk) -> AsyncIterator[Live]:
    """A topic of sealed records that no reader has read yet."""
    disk.is_cached = True
    live = await Live.start(disk, segment_max_events=1000)
    await live.append("t", *range(RECORDS))
    sealed = await live.http.post("/v0/admin/seal", json={"topics": ["t"]})
    assert sealed.json()["unsealed_records"] == 0
    assert (await live.http.put("/v0/topics/t/consumers/c", json={})).status_code < 300
    yield live
    await live.stop()


async def diffed(live: Live, **asked: Any) -> list[int]:
    answer = await live.http.post("/v0/topics/t/diff", json={"limit": RECORDS, **asked})
    assert answer.status_code == 200, answer.text
    return [record["data"] for record in answer.json()["records"]]


@pytest.mark.parametrize("asked", [{}, {"wait_ms": 1000}, {"consumer": "c"}])
@pytest.mark.parametrize("is_cached", [True, False])
async def test_a_page_is_made_of_objects_with_and_without_a_turn(
    live: Live, disk: FakeDisk, monkeypatch: pytest.MonkeyPatch, asked: Any, is_cached: bool
) -> None:
    disk.is_cached = is_cached
    throttle = Throttle()
    throttle.is_active = True
    # So many requests of this turn have started that the next one waits.
    throttle._passed = 10**9
    monkeypatch.setattr(live.node.store, "read", not_called)
    # The first read opens the file.
    assert await diffed(live, **asked) == list(range(RECORDS))
    if is_cached:
        monkeypatch.setattr(live.node.store, "read_json_from_disk", not_called)
    assert await diffed(live, **asked) == list(range(RECORDS))
    monkeypatch.setattr(live.node.state, "throttle", throttle)
    assert await diffed(live, **asked) == list(range(RECORDS))
    assert throttle.queued_total == 1
