"""The gate of each entry: the write or sync before it is applied and acknowledged. Pure.

`GATES` is the table of docs/GUARANTEES.md: kind of entry x durability class. `gate_of` reads it and
takes the strictest row of an append that does several things at once. Called where an entry is
submitted: `engine/store`, `engine/commit`, `engine/background`, `engine/subscribe`, `queue/`,
`routers/`.
"""

from __future__ import annotations

from typing import Final

from topics_server.engine.topic.topic import Topic
from topics_server.values.entries import (
    ConsumerDeleted,
    ConsumerMoved,
    CursorMoved,
    Entry,
    FloorMoved,
    HeadReserved,
    LeasesExtended,
    LeasesGranted,
    LeasesReleased,
    ProducerMoved,
    RecordsAppended,
    RecordsDeleted,
    RouterDeleted,
    RouterPut,
    SessionMoved,
    SessionOpened,
    SessionsClosed,
    StreamChanged,
    TopicDropped,
    TopicPut,
    ViewDeleted,
    ViewPut,
)
from topics_server.values.model import Durability, Gate

GateRow = dict[Durability, Gate]


def _row(ephemeral: Gate, memory: Gate, disk: Gate, fsync: Gate) -> GateRow:
    return {
        Durability.EPHEMERAL: ephemeral,
        Durability.MEMORY: memory,
        Durability.DISK: disk,
        Durability.FSYNC: fsync,
    }


BY_CLASS: Final = _row(Gate.NONE, Gate.WRITTEN, Gate.WRITTEN, Gate.SYNCED)
# Entries that need a frame in the journal in every class.
JOURNALED: Final = _row(Gate.WRITTEN, Gate.WRITTEN, Gate.WRITTEN, Gate.SYNCED)
WRITTEN: Final = _row(*[Gate.WRITTEN] * 4)
SYNCED: Final = _row(*[Gate.SYNCED] * 4)

GATES: Final[dict[type[Entry], GateRow]] = {
    RecordsAppended: BY_CLASS,
    RecordsDeleted: BY_CLASS,
    FloorMoved: BY_CLASS,
    ProducerMoved: BY_CLASS,
    StreamChanged: JOURNALED,
    CursorMoved: JOURNALED,
    ConsumerMoved: JOURNALED,
    ConsumerDeleted: JOURNALED,
    TopicPut: SYNCED,
    TopicDropped: SYNCED,
    HeadReserved: SYNCED,
    RouterPut: SYNCED,
    RouterDeleted: SYNCED,
    ViewPut: SYNCED,
    ViewDeleted: SYNCED,
    LeasesGranted: SYNCED,
    LeasesReleased: SYNCED,
    LeasesExtended: SYNCED,
    SessionOpened: WRITTEN,
    SessionMoved: WRITTEN,
    SessionsClosed: WRITTEN,
}
# An append that creates its topic, in every class: if a power cut removed an acknowledged creation,
# the same topic id, epoch and seqs would be assigned again.
CREATES_TOPIC: Final = SYNCED
# Copies of records whose originals are deleted next. An ephemeral topic loses its records in a
# restart anyway.
TAKES_OVER: Final = _row(Gate.NONE, Gate.SYNCED, Gate.SYNCED, Gate.SYNCED)
# An append that closes its stream.
CLOSES_STREAM: Final = JOURNALED
# A delete or a moved floor, for records that have frames although the topic is ephemeral now.
REMOVES_JOURNALED: Final = JOURNALED
# The last cursor of a router that is changed or removed: later entries rely on it.
LAST_CURSOR: Final = SYNCED


def gate_of(entry: Entry, topic: Topic) -> Gate:
    """The gate of an entry of this topic."""
    durability = topic.config.durability
    if isinstance(entry, RecordsAppended):
        if entry.creation is not None:
            return CREATES_TOPIC[durability]
        gate = BY_CLASS[durability]
        if entry.source is not None:
            gate = TAKES_OVER[durability]
        if entry.step is not None and entry.step.closes:
            gate = max(gate, CLOSES_STREAM[durability])
        if entry.floor is not None:
            gate = max(gate, _gate_of_removal(topic))
        return gate
    if isinstance(entry, RecordsDeleted | FloorMoved):
        return _gate_of_removal(topic)
    return GATES[type(entry)][durability]


def gate_of_service(entry: Entry) -> Gate:
    """The gate of an entry without a topic: of a router, a view, a lease or a watch session."""
    return GATES[type(entry)][Durability.DISK]


def _gate_of_removal(topic: Topic) -> Gate:
    touches_journaled = topic.journaled_seq >= topic.log.earliest_seq
    row = REMOVES_JOURNALED if touches_journaled else BY_CLASS
    return row[topic.config.durability]
