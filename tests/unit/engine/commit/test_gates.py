"""The gate of each entry: the table in the code is the one in docs/GUARANTEES.md."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import msgspec
import pytest

from tests.unit.engine.drive import Driver
from topics_server.engine.commit import gates
from topics_server.engine.commit.gates import GATES, GateRow, gate_of, gate_of_service
from topics_server.values.entries import (
    ConsumerDeleted,
    ConsumerMoved,
    CursorMoved,
    Entry,
    Floor,
    FloorMoved,
    HeadReserved,
    LeasesGranted,
    ProducerMoved,
    RecordsAppended,
    RecordsDeleted,
    RouterDeleted,
    SessionsClosed,
    Source,
    StreamChanged,
    TopicDropped,
    TopicPut,
    ViewDeleted,
)
from topics_server.values.model import Durability, Gate, LossReason, StreamStep, TopicConfig

DOCUMENT = Path(__file__).parents[4] / "docs" / "GUARANTEES.md"
WORDS = {"memory": Gate.NONE, "written": Gate.WRITTEN, "synced": Gate.SYNCED}
# Each row of the document and its row in the code.
ROWS: dict[str, GateRow] = {
    "append": GATES[RecordsAppended],
    "append that creates its topic": gates.CREATES_TOPIC,
    "append of jobs or records moved from another topic": gates.TAKES_OVER,
    "append that closes its stream": gates.CLOSES_STREAM,
    "delete, ack, or floor moved by a cap or TTL": GATES[RecordsDeleted],
    "the same, of records that the journal holds": gates.REMOVES_JOURNALED,
    "producer's next request whose records are stored already": GATES[ProducerMoved],
    "facts of a stream (closed, used)": GATES[StreamChanged],
    "cursor of a router without new copies": GATES[CursorMoved],
    "consumer made, moved or removed": GATES[ConsumerMoved],
    "cursor of a router that is changed or removed": gates.LAST_CURSOR,
    "topic created, configured or removed": GATES[TopicPut],
    "seqs reserved ahead": GATES[HeadReserved],
    "router created, changed or removed": GATES[RouterDeleted],
    "view defined, changed or removed": GATES[ViewDeleted],
    "lease of a queue with `leases_durable`": GATES[LeasesGranted],
    "watch session": GATES[SessionsClosed],
}


def documented() -> dict[str, list[Gate]]:
    """The rows of the document's table, each with its gates in the order of `Durability`."""
    section = DOCUMENT.read_text("utf-8").split("## What each change waits for")[1]
    lines = [line for line in section.split("\n## ")[0].splitlines() if line.startswith("| ")]
    head, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    assert head[1:] == [f"`{durability.value}`" for durability in Durability]
    return {change: [WORDS[word] for word in words] for change, *words in rows}


def test_the_document_and_the_code_have_the_same_table() -> None:
    in_code = {change: [row[d] for d in Durability] for change, row in ROWS.items()}
    assert documented() == in_code


def test_every_kind_of_entry_has_a_row() -> None:
    assert set(GATES) == set(get_args(Entry))
    assert GATES[FloorMoved] is GATES[RecordsDeleted]
    assert GATES[ConsumerDeleted] is GATES[ConsumerMoved]
    assert GATES[TopicDropped] is GATES[TopicPut]


def test_what_belongs_to_no_topic_waits_alike_in_every_class() -> None:
    for kind in get_args(Entry):
        if "topic_id" not in kind.__struct_fields__:
            assert len(set(GATES[kind].values())) == 1, kind
    assert gate_of_service(SessionsClosed([], 1)) is Gate.WRITTEN
    assert gate_of_service(RouterDeleted(1, "r", 1)) is Gate.SYNCED


# -- appends that do several things ----------------------------------------------------------------


def driver_of(durability: Durability) -> Driver:
    return Driver(TopicConfig(durability=durability))


def appended(driver: Driver) -> RecordsAppended:
    entry = driver.decide(driver.body(1))
    assert isinstance(entry, RecordsAppended)
    return entry


@pytest.mark.parametrize("durability", list(Durability))
def test_an_append_waits_for_the_strictest_of_what_it_does(durability: Durability) -> None:
    driver = driver_of(durability)
    entry, topic = appended(driver), driver.topic
    assert gate_of(entry, topic) is GATES[RecordsAppended][durability]
    moved = msgspec.structs.replace(entry, source=Source(7, [1]))
    assert gate_of(moved, topic) is gates.TAKES_OVER[durability]
    closing = msgspec.structs.replace(entry, step=StreamStep(closes=True))
    assert gate_of(closing, topic) is gates.CLOSES_STREAM[durability]
    creating = msgspec.structs.replace(closing, creation=TopicPut(1, "t", 1, topic.config, 5))
    assert gate_of(creating, topic) is Gate.SYNCED


def test_an_ephemeral_append_that_evicts_journaled_records_is_written() -> None:
    driver = driver_of(Durability.DISK)
    driver.commit(appended(driver))
    driver.put(TopicConfig(durability=Durability.EPHEMERAL))
    entry = appended(driver)
    assert gate_of(entry, driver.topic) is Gate.NONE
    evicting = msgspec.structs.replace(entry, floor=Floor(2, LossReason.CAP))
    assert gate_of(evicting, driver.topic) is Gate.WRITTEN
    floor = FloorMoved(1, 5, Floor(2, LossReason.CAP))
    assert gate_of(floor, driver.topic) is Gate.WRITTEN
