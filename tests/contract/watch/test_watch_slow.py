"""§7.6: readers that do not read fall behind, get a reported loss, then a reported end, and nothing
else.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Final

import pytest

from tests.contract.conftest import URL
from tests.contract.driver import Api, Server, eventually
from tests.contract.streams.streams import gauges
from tests.contract.watch.subscriptions import Clients, SseFollower, Trouble, map_of

Names = Callable[[str], str]
CARRIERS = ["sse", "ws"]
BUFFER_GRACE_MS = 200
TIMEOUT_MS = 4000
FEW_BYTES = 16 * 1024


@pytest.fixture(scope="module")
def strict(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    """A server with a short timeout for slow consumers."""
    if URL:
        pytest.skip("needs a server of its own; TOPICS_CONTRACT_URL names a shared one")
    env = {
        "TOPICS_BUFFER_GRACE_MS": str(BUFFER_GRACE_MS),
        "TOPICS_SLOW_CONSUMER_TIMEOUT_MS": str(TIMEOUT_MS),
    }
    server = Server(tmp_path_factory.mktemp("strict"), env)
    yield server.start()
    server.stop()


def _fill(api: Api, topic: str, batches: int) -> None:
    for _ in range(batches):
        api.append(topic, [{"data": "x" * 10_000}] * 100)


@pytest.mark.parametrize("carrier", CARRIERS)
def test_past_the_grace_a_lossy_topic_is_cut_and_another_only_lags(
    strict: Api, names: Names, clients: Clients, carrier: str
) -> None:
    """§7.6: frames are larger and fewer meanwhile. [7.6-01, 7.6-02, 7.5-04]"""
    lossy, whole = names("lossy"), names("whole")
    strict.put(lossy, {"cap_records": 50, "durability": "memory"})
    strict.put(whole, {"durability": "memory"})
    follower = clients.follow(
        carrier, strict, {lossy: {}, whole: {}}, receive_buffer_bytes=FEW_BYTES
    )
    follower.drained()
    _fill(strict, whole, 10)
    time.sleep(BUFFER_GRACE_MS / 1000 * 2)
    _fill(strict, lossy, 5)
    follower.until(lambda _: follower.positions[lossy] == 500 and follower.positions[whole] == 1000)
    assert follower.seqs(whole) == list(range(1, 1001))
    assert follower.gaps[whole] == []
    assert follower.accounted(lossy) == list(range(1, 501))
    assert {gap.reason for gap in follower.gaps[lossy]} == {"from_seq_too_old"}
    for name in (lossy, whole):
        strict.drop(name)


_OWN_PINGS: Final = pytest.mark.connection(
    reason="other protocols find a WebSocket client that reads nothing by their own pings"
)


@pytest.mark.parametrize(
    "carrier",
    [pytest.param(each, marks=_OWN_PINGS) if each == "ws" else each for each in CARRIERS],
)
def test_past_the_timeout_the_connection_ends_with_an_error(
    strict: Api, names: Names, clients: Clients, carrier: str
) -> None:
    """§7.6: a client that reconnects has lost nothing. [7.6-03, 7.5-09, 11-15]"""
    topic = names("slow")
    strict.put(topic, {"durability": "memory"})
    before = gauges(strict)
    follower = clients.follow(carrier, strict, {topic: {}}, receive_buffer_bytes=FEW_BYTES)
    follower.drained()
    _fill(strict, topic, 12)
    eventually(lambda: gauges(strict)[0] == before[0], "it was ended", within_s=30)
    frames = follower.rest()
    last = frames[-1]
    assert isinstance(last, Trouble), str(last)[:300]
    if isinstance(follower, SseFollower):
        assert last.code == 408
        assert last.fields.get("retry_after_ms", 0) == 0
        assert isinstance(last.fields["error"], str)
        assert gauges(strict)[1] == before[1] + 1, "the session is kept"
        assert map_of(follower.ids[-1]) == {topic: follower.positions[topic]}
    read = follower.seqs(topic)
    assert 0 < len(read) < 1200
    again = clients.follow(carrier, strict, {topic: {"from_seq": read[-1]}})
    again.drained()
    assert read + again.seqs(topic) == list(range(1, 1201))
    strict.drop(topic)


@pytest.mark.parametrize("with_id", [True, False])
def test_the_session_of_a_slow_reader_goes_on_where_it_was_ended(
    strict: Api, names: Names, clients: Clients, with_id: bool
) -> None:
    """§7.6: with the header of an EventSource it continues exactly; without it, records that the
    socket never took come again. [7.6-03, 7.4-03]
    """
    topic = names("slow")
    strict.put(topic, {"durability": "memory"})
    session = clients.session(strict, {topic: {}})
    follower = session.stream(strict, receive_buffer_bytes=FEW_BYTES)
    follower.drained()
    _fill(strict, topic, 12)
    eventually(lambda: gauges(strict)[0] == 0, "it was ended", within_s=30)
    follower.rest()
    read = follower.seqs(topic)
    again = session.stream(strict, follower.ids[-1] if with_id else None)
    again.drained()
    rest = again.seqs(topic)
    assert rest == list(range(rest[0], 1201))
    assert rest[0] == read[-1] + 1 if with_id else rest[0] <= read[-1] + 1
    strict.drop(topic)
