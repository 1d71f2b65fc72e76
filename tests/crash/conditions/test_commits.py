"""No consumer is behind its acknowledged commit, however often the server is killed."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.contract.driver import Server, good
from tests.crash.conditions.commits import RECORDS, Committers
from tests.ports import lasting_port
from topics_server.runtime.metrics import ROUTERS_SHOWN_MAX


async def _commit_over_kills(server: Server, committers: Committers, kills: int) -> None:
    running = asyncio.create_task(committers.run())
    try:
        for _ in range(kills):
            due = committers.commits + min(400, 2 * len(committers.acknowledged))
            reaching = asyncio.create_task(committers.until(due))
            await asyncio.wait((running, reaching), return_when=asyncio.FIRST_COMPLETED)
            reaching.cancel()
            await asyncio.to_thread(server.crash)
        committers.stop()
        await running
    finally:
        running.cancel()


def _listed(server: Server) -> dict[str, Any]:
    found: dict[str, Any] = {}
    query: dict[str, Any] = {"page_size": 1000}
    while True:
        page = good(server.api.http.get("/v0/topics/t/consumers", params=query))
        found |= {each["consumer"]: each for each in page["consumers"]}
        if "next_cursor" not in page:
            return found
        query["cursor"] = page["next_cursor"]


@pytest.mark.crash
@pytest.mark.timeout(0)
def test_no_consumer_is_behind_its_acknowledged_commit(
    tmp_path: Path, consumers: int, kills: int
) -> None:
    """`--consumers` sets the number of consumers, `--kills` the number of kills."""
    port = lasting_port()
    env = {"TOPICS_PORT": str(port), "TOPICS_CHECKPOINT_INTERVAL_MS": "500"}
    server = Server(tmp_path, env)
    try:
        api = server.start()
        for start in range(0, RECORDS, 500):
            good(api.append("t", [{"data": start + number} for number in range(500)]))
        committers = Committers(port, consumers)
        for name in committers.acknowledged:
            good(api.http.put(f"/v0/topics/t/consumers/{name}"))
        asyncio.run(_commit_over_kills(server, committers, kills))
        server.crash()
        found = _listed(server)
        assert found.keys() == committers.acknowledged.keys()
        for name, acknowledged in committers.acknowledged.items():
            # If the answer to a commit was lost, the consumer may be one step further.
            assert acknowledged <= found[name]["seq"] <= acknowledged + 7, name
            assert found[name]["lag"] == RECORDS - found[name]["seq"]
        scraped = good(server.api.http.get("/v0/metrics", headers={"accept": "application/json"}))
        assert scraped["topics_consumer_metrics_truncated"] == (consumers > ROUTERS_SHOWN_MAX)
        shown = {row["labels"]["consumer"]: row["value"] for row in scraped["topics_consumer_lag"]}
        assert len(shown) == min(consumers, ROUTERS_SHOWN_MAX)
        assert shown.items() <= {f"t/{name}": each["lag"] for name, each in found.items()}.items()
    finally:
        server.stop()
    print(f"\n{committers.commits} commits of {consumers} consumers, {kills} kills")
