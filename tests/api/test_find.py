"""`GET …/records` over a real node: what is deleted while a page is read from the disk."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import pytest

from tests.api.watch.streams import Live
from tests.storage.fake_disk import FakeDisk
from topics_server.engine.read.segment_reader import Fetcher

pytestmark = pytest.mark.anyio


@pytest.fixture
async def live(disk: FakeDisk) -> AsyncIterator[Live]:
    server = await Live.start(disk)
    yield server
    await server.stop()


async def delete_some(live: Live) -> None:
    answer = await live.http.post("/v0/topics/t/delete", json={"match": "gone"})
    assert answer.json()["deleted"] == 1, answer.text


async def drop_and_make_again(live: Live) -> None:
    await live.http.delete("/v0/topics/t")
    await fill(live)


async def fill(live: Live) -> None:
    records = [{"data": 1}, {"data": 2, "tag": "gone"}, {"data": 3}, {"data": 4}, {"data": 5}]
    await live.http.post("/v0/topics/t", json={"records": records})


@pytest.mark.parametrize("query", ["limit=3", "order=desc&before_seq=4"])
@pytest.mark.parametrize("change", [delete_some, drop_and_make_again])
async def test_a_page_that_shows_a_deleted_record_has_no_tag(
    live: Live,
    query: str,
    change: Callable[[Live], Coroutine[Any, Any, None]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its ETag would be that of the later page without the record, so a client's copy would still
    validate.
    """
    await fill(live)
    complete = Fetcher.complete

    async def meanwhile(fetcher: Fetcher, *given: Any) -> Any:
        page = await complete(fetcher, *given)
        monkeypatch.undo()
        await change(live)
        return page

    monkeypatch.setattr(Fetcher, "complete", meanwhile)
    at = f"/v0/topics/t/records?{query}"
    answer = await live.http.get(at)
    assert sorted(each["$seq"] for each in answer.json()["records"]) == [1, 2, 3]
    assert "etag" not in answer.headers
    assert answer.headers["cache-control"] == "no-store"
    assert "etag" in (await live.http.get(at)).headers
