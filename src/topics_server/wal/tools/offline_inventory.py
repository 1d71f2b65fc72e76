"""Checks sealed files offline, by the rules of recovery.

`AnchoredFiles` takes the newest snapshot and the files on disk, observes every entry of the
journal, and then checks with `file_inventory`, as `engine/background/recovery.py` does. Read-only;
used by `wal/tools/verify.py`.
"""

from __future__ import annotations

import msgspec

from topics_server.values.entries import (
    RESERVED_ID_MIN,
    Entry,
    RecordsAppended,
    RecordsDeleted,
    RouterPut,
    TopicDropped,
    TopicPut,
)
from topics_server.values.file_inventory import (
    NO_TOPIC,
    Anchor,
    Expected,
    FoundTopic,
    anchor_of,
    judge,
    note_delete,
)
from topics_server.values.storage_types import EPOCHS_PART, SnapshotImage
from topics_server.wal import layout
from topics_server.wal.format.manifest import HOT
from topics_server.wal.fs import Fs
from topics_server.wal.segments.files import Tiers
from topics_server.wal.segments.topic_scan import scan
from topics_server.wal.snapshots.parts import decode_part


class _Topic(msgspec.Struct):
    name: str
    head_seq: int
    applied_lsn: int = 0
    anchor: Anchor | None = None


class AnchoredFiles:
    """See the module. *Blocking.*"""

    def __init__(self, fs: Fs, tiers: Tiers, store_id: str, newest: SnapshotImage | None) -> None:
        self._tiers = tiers
        self._topics: dict[int, _Topic] = {}
        self._next_topic_id = newest.next_topic_id if newest else 1
        self._is_mended = False
        for topic_id, encoded in newest.parts if newest else ():
            if topic_id != EPOCHS_PART and topic_id < RESERVED_ID_MIN:
                part = decode_part(encoded)
                self._topics[topic_id] = _Topic(
                    part.name, part.head_seq, part.applied_lsn, anchor_of(part)
                )
        self._found: dict[int, FoundTopic] = {}
        for topic_id in topics_on_disk(fs, tiers):
            topic = self._topics.get(topic_id)
            anchor = topic.anchor if topic else None
            self._found[topic_id] = scan(fs, tiers, topic_id, store_id, anchor).report

    def note(self, lsn: int, entry: Entry) -> None:
        """Observe an entry of the journal, in lsn order."""
        if entry.topic_id < RESERVED_ID_MIN:
            self._note_ids(entry.topic_id)
        if isinstance(entry, RouterPut):
            self._note_ids(entry.source_id, entry.dest_id)
        topic = self._topics.get(entry.topic_id)
        creation = entry.creation if isinstance(entry, RecordsAppended) else entry
        if topic is None and isinstance(creation, TopicPut) and creation.created:
            topic = self._topics[entry.topic_id] = _Topic(creation.name, creation.head_seq)
        if isinstance(entry, TopicDropped) and entry.topic_id == NO_TOPIC:
            self._is_mended = True
        if topic is None or lsn <= topic.applied_lsn:
            return
        if isinstance(entry, TopicDropped):
            del self._topics[entry.topic_id]
        elif isinstance(entry, RecordsAppended):
            topic.head_seq = max(topic.head_seq, entry.first_seq + entry.count - 1)
            if entry.source is not None:
                self._note_ids(entry.source.topic_id)
        elif isinstance(entry, RecordsDeleted) and entry.topic_id in self._found:
            note_delete(self._found[entry.topic_id], entry.firsts, entry.lasts)

    def _note_ids(self, *topic_ids: int) -> None:
        self._next_topic_id = max(self._next_topic_id, *(number + 1 for number in topic_ids))

    def problems(self) -> list[str]:
        """The faults that refuse the start or are reported as damage, one line each."""
        topics = (
            Expected(topic_id, topic.name, self._head_of(topic_id, topic), topic.anchor)
            for topic_id, topic in self._topics.items()
        )
        verdict = judge(topics, self._found, self._found, self._next_topic_id, self._path_of)
        found = [f"{path}: {reason}" for path, reason in verdict.objections]
        for topic_id, topic in self._topics.items():
            report = self._found.get(topic_id)
            for segment_id, suspect in report.suspects.items() if report else ():
                suspect.is_touched |= self._is_mended
                if suspect.has_lost_deletes:
                    found.append(
                        f"topic {topic.name}: segment {segment_id} (seqs {suspect.first_seq} to "
                        f"{suspect.last_seq}) has other delete flags than those that were synced"
                    )
        return found

    def _head_of(self, topic_id: int, topic: _Topic) -> int:
        """The head as recovery computes it: at least the last listed seq."""
        report = self._found.get(topic_id)
        return max(topic.head_seq, report.last_seq if report else 0)

    def _path_of(self, topic_id: int) -> str:
        return layout.join(self._tiers.folder(HOT, topic_id), layout.MANIFEST)


def topics_on_disk(fs: Fs, tiers: Tiers) -> list[int]:
    """Ids that have a folder, in either tier."""
    found: set[int] = set()
    for root in (tiers.hot, tiers.cold):
        names = [] if root is None else fs.list_dir(root)
        found.update(
            number for name in names if (number := layout.parse_topic_dir(name)) is not None
        )
    return sorted(found)
