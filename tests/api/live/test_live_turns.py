"""Live streams whose filters find nothing for a long time yield the loop to other tasks."""

from __future__ import annotations

from typing import Any

import pytest

from tests.api.watch.streams import Live, Reader, kinds
from tests.storage.fake_disk import FakeDisk
from topics_server.api.watch import broadcast
from topics_server.engine.read import filtered
from topics_server.values.limits import BLOCK_RECORDS_MAX

pytestmark = pytest.mark.anyio


async def test_a_filtered_stream_that_finds_nothing_reads_a_page_at_a_time(
    disk: FakeDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(filtered, "PAGE_LOOKUPS_MAX", 1)
    # Each page takes longer than a stream's turn may last.
    monkeypatch.setattr(broadcast, "_PUMP_MS", -1.0)
    reads: list[int] = []
    pump, take = broadcast.BroadcastStream.pump, broadcast.BroadcastStream._take

    def counted_pump(self: broadcast.BroadcastStream) -> None:
        reads.append(0)
        pump(self)

    def counted_take(self: broadcast.BroadcastStream, *args: Any) -> int:
        reads[-1] += 1
        return take(self, *args)

    monkeypatch.setattr(broadcast.BroadcastStream, "pump", counted_pump)
    monkeypatch.setattr(broadcast.BroadcastStream, "_take", counted_take)
    live = await Live.start(disk)
    for block in range(4):
        sent = [{"data": 0, "tag": f"k{block}:{row}"} for row in range(BLOCK_RECORDS_MAX)]
        answer = await live.http.post("/v0/topics/t", json={"records": sent})
        assert answer.status_code in (200, 201), answer.text
    reader = Reader(live.app, "/v0/topics/t/live", query=b"tag=none")
    assert kinds(await reader.take(1)) == ["caught-up"]
    assert sum(reads) >= 2
    assert max(reads) == 1
    await reader.left()
    await live.stop()
