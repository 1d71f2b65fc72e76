"""The moments of an archive, and the cut of a restore.

A *cut* is one lsn: a restore has every entry of every shard up to it, and none after it. It needs a
base of the same stretch that does not go beyond the cut, and the parts between them. Called by
`restoring` and the command line.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Final, NamedTuple

from topics_server.archive.continuous.bases import ArchiveBase
from topics_server.archive.continuous.history import ArchiveHistory, NeededPart
from topics_server.values.entries import RESERVED_ID_MIN, Entry, RecordsAppended, TopicPut
from topics_server.values.errors import Corrupt, StartRefused
from topics_server.values.storage_types import EPOCHS_PART, JOURNAL_PART
from topics_server.wal.format.snapshot import HEADER_BYTES, check_table, decode_header, spans
from topics_server.wal.format.snapshot import decode_parts as decode_snapshot_parts
from topics_server.wal.snapshots.parts import decode_part


class RestorePoint(NamedTuple):
    """A cut: its base, its part, its lsn and time, and the parts between the base and it.

    `part`: 0 for a cut at a base, which needs no part.
    """

    base: ArchiveBase
    part: int
    lsn: int
    ts_ms: int
    needed: tuple[NeededPart, ...] = ()


class Moments:
    """The moments of one archive. `bases`: the readable ones, newest first."""

    def __init__(self, history: ArchiveHistory, bases: Sequence[ArchiveBase]) -> None:
        """Raise `StartRefused` if there is nothing to restore."""
        self._history: Final = history
        self._bases: Final = bases
        self._numbers: Final = history.numbers()
        if not bases:
            raise StartRefused("the archive has no base yet: nothing can be restored")

    def newest(self) -> RestorePoint:
        """The newest moment."""
        return self._at_part(self._numbers[-1]) if self._numbers else self._at_base(self._bases[0])

    def at_base(self, part: int) -> RestorePoint:
        """The moment of the base that a part names. Raises `StartRefused` for another part."""
        for base in self._bases:
            if base.part == part:
                return self._at_base(base)
        there = ", ".join(str(base.part) for base in reversed(self._bases))
        raise StartRefused(f"there is no base {part}, only {there}")

    def at_time(self, ts_ms: int) -> RestorePoint:
        """The newest moment up to a time. Raises `StartRefused` where entries are missing."""
        number = self._history.last_part(self._numbers, lambda facts: facts.ts_ms <= ts_ms)
        following = self._following(number)
        if following is not None:
            # A stretch begins at its base, which is earlier than the end of its first part.
            facts = self._history.facts(following)
            if facts.begins_stretch:
                for base in self._bases:
                    if base.part == following and base.ts_ms <= ts_ms:
                        return self._at_base(base)
                if number is not None and self._history.facts(number).ts_ms < ts_ms:
                    raise self._refused(
                        f"entries around {shown(ts_ms)} are missing in the archive", ts_ms
                    )
        if number is None:
            raise self._refused(f"{shown(ts_ms)} lies before the archive's parts", ts_ms)
        return self._at_part(number)

    def at_seq(self, topic: str, seq: int) -> RestorePoint:
        """The moment at which the append of a record was the newest entry.

        If several topics had this name in turn, the last one that has the seq counts.
        """
        found: tuple[int, int, int, int] | None = None
        ids: set[int] = set()
        stretch = 0
        for number in self._numbers:
            facts = self._history.facts(number)
            if facts.stretch != stretch:
                stretch = facts.stretch
                oldest = [base for base in self._bases if base.stretch == stretch]
                if oldest:
                    names = names_of(oldest[-1])
                    ids |= {topic_id for topic_id, name in names.items() if name == topic}
            ids |= {topic_id for topic_id, name in facts.created if name == topic}
            wanted = {each for each in ids if facts.known.heads.get(each, 0) >= seq}
            if not wanted or (found is not None and max(wanted) <= found[0]):
                continue
            for lsn, entry in self._history.part(number)[1]:
                if _holds(entry, wanted, seq) and (found is None or entry.topic_id > found[0]):
                    found = (entry.topic_id, number, lsn, facts.stretch)
        if found is None:
            raise self._refused(
                f"no part of the archive has the append of seq {seq} of topic {topic!r}", None
            )
        _, number, lsn, stretch = found
        return self._with_base(stretch, number, lsn, self._history.facts(number).ts_ms)

    def _at_part(self, number: int) -> RestorePoint:
        facts = self._history.facts(number)
        return self._with_base(facts.stretch, number, facts.last_lsn, facts.ts_ms)

    def _at_base(self, base: ArchiveBase) -> RestorePoint:
        return RestorePoint(base, 0, base.last_lsn, base.ts_ms)

    def _with_base(self, stretch: int, number: int, lsn: int, ts_ms: int) -> RestorePoint:
        """The newest base of the stretch from which the parts reach the lsn."""
        reason = f"no base that can be read lies before lsn {lsn}"
        for base in self._bases:
            if base.stretch != stretch or base.last_lsn > lsn:
                continue
            try:
                needed = tuple(self._history.needed_parts(stretch, base.last_lsn, number))
            except Corrupt as error:
                # An older base would need the same parts too.
                reason = str(error)
                break
            return RestorePoint(base, number, lsn, ts_ms, needed)
        raise self._refused(reason, ts_ms)

    def _following(self, number: int | None) -> int | None:
        """The part after a number; the first part for None."""
        behind = [each for each in self._numbers if number is None or each > number]
        return behind[0] if behind else None

    def _refused(self, reason: str, ts_ms: int | None) -> StartRefused:
        """The error, with the nearest moments before and after."""
        points = sorted({(base.ts_ms, base.last_lsn) for base in self._bases})
        before = [each for each in points if ts_ms is None or each[0] <= ts_ms]
        after = [each for each in points if ts_ms is not None and each[0] > ts_ms]
        near = [f"{shown(ts)} (base at lsn {lsn})" for ts, lsn in (*before[-1:], *after[:1])]
        return StartRefused(f"{reason}. The nearest moments: {', '.join(near)}")


def _holds(entry: Entry, topic_ids: set[int], seq: int) -> bool:
    return (
        isinstance(entry, RecordsAppended)
        and entry.topic_id in topic_ids
        and entry.first_seq <= seq < entry.first_seq + entry.count
    )


def names_of(base: ArchiveBase) -> dict[int, str]:
    """The names of a base's topics by id, including topics that its journal drops.

    Raises `Corrupt`.
    """
    found = names_in_snapshot(base)
    for _, entry in base.backup.entries():
        note_name(entry, found)
    return found


def names_in_snapshot(base: ArchiveBase) -> dict[int, str]:
    """The names of the topics in a base's snapshot, by id. Raises `Corrupt`."""
    found: dict[int, str] = {}
    backup = base.backup
    if backup.facts.snapshot is not None:
        content = backup.piece(backup.facts.snapshot)
        for part_id, encoded in _snapshot_parts(content):
            if part_id < RESERVED_ID_MIN and part_id not in (EPOCHS_PART, JOURNAL_PART):
                found[part_id] = decode_part(encoded).name
    return found


def note_name(entry: Entry, names: dict[int, str]) -> None:
    """Note the name that an entry gives to a topic."""
    creation = entry.creation if isinstance(entry, RecordsAppended) else entry
    if isinstance(creation, TopicPut):
        names[creation.topic_id] = creation.name


def _snapshot_parts(content: bytes) -> Iterator[tuple[int, memoryview]]:
    header = decode_header(content[:HEADER_BYTES])
    table = check_table(
        content[:HEADER_BYTES],
        content[header.table_offset : header.table_offset + header.table_bytes],
    )
    for first, end, offset, length in spans(table):
        yield from decode_snapshot_parts(content[offset : offset + length], table[first:end])


def shown(ts_ms: int) -> str:
    """A time as readable text, in UTC."""
    text = datetime.fromtimestamp(ts_ms / 1000, UTC).isoformat(timespec="milliseconds")
    return text.replace("+00:00", "Z")
