"""`queue.leases.lease_log`: batches after the answers, in order, bounded; a loss is logged once."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from tests.unit.queue.rig import turns
from topics_server.engine.answers import Appended
from topics_server.queue.leases.lease_log import (
    WAITING_EVENTS_MAX,
    LeaseEvent,
    LeaseLogs,
    lease_event,
)
from topics_server.values.appends import DecodedAppend
from topics_server.values.errors import Code, StorageError, TopicsError
from topics_server.values.model import TopicConfig

pytestmark = pytest.mark.anyio


class Appends:
    """Satisfies `Appender`."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, list[Any]]] = []
        self.trouble: Exception | None = None
        self.gate = asyncio.Event()
        self.gate.set()

    async def append(
        self,
        name: str,
        body: bytes,
        decoded: DecodedAppend,
        *,
        header_key: str | None,
        config: TopicConfig | None,
    ) -> Appended:
        assert header_key is None
        assert config is None
        await self.gate.wait()
        if self.trouble is not None:
            raise self.trouble
        records = json.loads(body)["records"]
        assert decoded.count == len(records)
        self.calls.append((name, records))
        return Appended(1, len(records), len(records))

    def seqs(self, name: str) -> list[int]:
        return [r["data"]["seq"] for told, records in self.calls if told == name for r in records]


def events(first: int, count: int) -> list[LeaseEvent]:
    return [lease_event("acked", "jobs", 1, seq, 5) for seq in range(first, first + count)]


def test_what_is_not_there_is_left_out() -> None:
    shown = lease_event("claimed", "jobs", 3, 1, 5, node="w", lease_id=255, deliveries=2)
    assert (shown.lease_id, shown.deadline) == ("lease_ff", 0)


async def test_events_of_a_turn_are_one_append_tagged_by_their_kind() -> None:
    store = Appends()
    logs = LeaseLogs(store)
    logs.note("log", events(1, 2))
    logs.note("log", events(3, 1))
    assert store.calls == [], "never in the turn of a claim"
    await logs.flush()
    assert len(store.calls) == 1
    assert store.calls[0][1][0] == {
        "data": {"event": "acked", "queue": "jobs", "epoch": 1, "seq": 1, "ts": 5},
        "tag": "acked",
    }
    assert store.seqs("log") == [1, 2, 3]


async def test_many_go_in_batches_and_logs_take_turns() -> None:
    store = Appends()
    logs = LeaseLogs(store)
    logs.note("a", events(1, 2_500))
    logs.note("b", events(1, 10))
    await logs.flush()
    assert [(name, len(records)) for name, records in store.calls] == [
        ("a", 1000),
        ("b", 10),
        ("a", 1000),
        ("a", 500),
    ]
    assert store.seqs("a") == [*range(1, 2_501)]


async def test_what_comes_while_it_writes_follows() -> None:
    store = Appends()
    store.gate.clear()
    logs = LeaseLogs(store)
    logs.note("log", events(1, 1))
    await turns()
    logs.note("log", events(2, 2))
    store.gate.set()
    await logs.flush()
    assert store.seqs("log") == [1, 2, 3]
    await logs.flush()


@pytest.mark.parametrize(
    "trouble", [TopicsError(Code.TOPIC_FULL, "it is full"), StorageError("it is full")]
)
async def test_a_refusal_is_logged_once_until_it_ends(
    trouble: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    store = Appends()
    logs = LeaseLogs(store)
    for trouble_now in (trouble, trouble, None, trouble):
        store.trouble = trouble_now
        logs.note("log", events(1, 2))
        await logs.flush()
    assert logs.lost_count == 6
    assert [record.getMessage() for record in caplog.records] == [
        "lease log log loses events: it is full"
    ] * 2


async def test_a_log_that_is_too_slow_loses_the_oldest(caplog: pytest.LogCaptureFixture) -> None:
    store = Appends()
    logs = LeaseLogs(store)
    logs.note("log", events(1, WAITING_EVENTS_MAX + 5))
    await logs.flush()
    assert logs.lost_count == 5
    assert store.seqs("log")[0] == 6
    assert "slower than the queue" in caplog.text
