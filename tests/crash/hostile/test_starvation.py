"""Beside a flood on one topic, low-rate writers of every topic are served.

A real server; closed-loop connections append to one urgent topic as fast as they get answers.
Twenty clients append every 50 ms to topics of every priority. Each of their appends is acknowledged
within a second or three tries, and no client gives up. The throughput of the flood is printed
(`-rP`). At full scale: `./run test-crash tests/crash/hostile/test_starvation.py --flood 600`;
`flood_pairs` compares two builds.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.contract.driver import Server, good
from tests.crash.hostile.flood import Flood, HonestClients, append_request
from tests.crash.hostile.flood_pairs import FLOODS, PRIORITIES
from tests.crash.hostile.test_hostile_clients import port_of

pytestmark = pytest.mark.crash

WITHIN_S: Final = 1.0
TRIES: Final = 3


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    made = Server(tmp_path / "server")
    made.start()
    try:
        yield made
        made.stop()
    finally:
        if made.process is not None:
            made.process.kill()
            made.process.wait()


@pytest.mark.parametrize(("priority", "records"), FLOODS)
def test_low_rate_writers_are_served_beside_a_flood(
    server: Server, request: pytest.FixtureRequest, priority: int, records: int
) -> None:
    connections = int(request.config.getoption("--flood", default=128))
    count = int(request.config.getoption("--flood-appends", default=10))
    # Bound the retained records, so that a long flood does not grow the tail.
    good(server.api.put("flood", {"priority": priority, "cap_records": 50_000}))
    topics = []
    for number, own in enumerate(PRIORITIES):
        topics.append(f"honest-{number}")
        good(server.api.put(topics[-1], {"priority": own}))
    honest = HonestClients(port_of(server), topics, count)
    with Flood(port_of(server), connections, append_request("flood", records)) as flood:
        time.sleep(0.5)
        taken, began = flood.taken, time.monotonic()
        honest.run()
        rate = (flood.taken - taken) / (time.monotonic() - began)
        refused = flood.refused
    seconds = sorted(one.seconds for one in honest.served)
    tries = max((one.tries for one in honest.served), default=0)
    print(
        f"{connections} connections of priority {priority}, {records} records each: "
        f"flood {rate:.0f}/s, {refused} refused; {len(seconds)} honest appends, p50 "
        f"{statistics.median(seconds) * 1000:.1f} ms, longest {seconds[-1] * 1000:.0f} ms, at most "
        f"{tries} tries, {sum(one.tries - 1 for one in honest.served)} refused; starved: "
        f"{sorted(honest.starved)}"
    )
    assert not honest.starved
    assert not honest.unfair(WITHIN_S, TRIES)
    assert flood.taken > taken
