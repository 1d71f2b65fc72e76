"""Collects the seqs, ids and epochs that a new history must not use again.

Reads them from a snapshot's parts and from journal entries, so that backups of a running and of a
stopped server give the same result. Called by `backup`, `repository` and the continuous archive.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from topics_server.values.entries import (
    RESERVED_ID_MIN,
    Entry,
    HeadReserved,
    RecordsAppended,
    TopicPut,
)
from topics_server.values.errors import Corrupt
from topics_server.values.storage_types import EPOCHS_PART, EncodedPart, KnownPositions, TopicPart
from topics_server.wal.format.frames import RawFrame
from topics_server.wal.snapshots.parts import decode_part


class KnownBuilder:
    """Collects positions; `result` returns them."""

    def __init__(self) -> None:
        self._next_topic_id = 1
        self._epoch = 0
        self._heads: dict[int, int] = {}

    def note_next_id(self, next_topic_id: int) -> None:
        """Note that ids below this one may have been used."""
        self._next_topic_id = max(self._next_topic_id, next_topic_id)

    def note_part(self, part_id: int, encoded: EncodedPart) -> TopicPart | None:
        """Note a part of a snapshot; returns a topic's part decoded. Raises `Corrupt`."""
        if part_id == EPOCHS_PART:
            self._note_epochs(encoded)
        elif part_id < RESERVED_ID_MIN:
            part = decode_part(encoded)
            self._note_seq(part.topic_id, max(part.head_seq, part.ceiling_seq))
            self._note_topic(part.topic_id, part.epoch)
            return part
        return None

    def note_entry(self, entry: Entry) -> None:
        """Note an entry of the journal."""
        creation: object = entry
        if isinstance(entry, RecordsAppended):
            self._note_seq(entry.topic_id, entry.first_seq + entry.count - 1)
            creation = entry.creation
        elif isinstance(entry, HeadReserved):
            self._note_seq(entry.topic_id, entry.ceiling_seq)
        if isinstance(creation, TopicPut):
            self._note_topic(creation.topic_id, creation.epoch)

    def note_frame(self, frame: RawFrame) -> None:
        """Note an entry that is not decoded; has the same effect as `note_entry`."""
        if frame.last_seq:
            self._note_seq(frame.topic_id, frame.last_seq)
        if frame.creation is not None:
            self._note_topic(frame.creation.topic_id, frame.creation.epoch)

    def note(self, known: KnownPositions) -> None:
        """Add the positions of another backup."""
        self.note_next_id(known.next_topic_id)
        self._epoch = max(self._epoch, known.epoch)
        for topic_id, seq in known.heads.items():
            self._note_seq(topic_id, seq)

    def result(self) -> KnownPositions:
        """All collected positions."""
        return KnownPositions(self._next_topic_id, self._epoch, dict(self._heads))

    def _note_seq(self, topic_id: int, seq: int) -> None:
        if topic_id < RESERVED_ID_MIN:
            self._heads[topic_id] = max(self._heads.get(topic_id, 0), seq)

    def _note_topic(self, topic_id: int, epoch: int) -> None:
        self.note_next_id(topic_id + 1)
        self._epoch = max(self._epoch, epoch)

    def _note_epochs(self, encoded: EncodedPart) -> None:
        """Note the epochs of dropped names; the part has a version, epochs by name, and a floor."""
        try:
            _, epochs, *floor = msgspec.msgpack.decode(encoded, type=list[Any])
            values: Iterable[int] = (*epochs.values(), *(each or 0 for each in floor))
            self._epoch = max(self._epoch, *values, 0)
        except (msgspec.DecodeError, ValueError, TypeError, AttributeError) as error:
            raise Corrupt(f"captured epochs: {error}") from None
