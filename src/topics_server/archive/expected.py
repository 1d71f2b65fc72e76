"""The manifests that a backup must have, according to its snapshot.

A missing manifest does not mean that the topic has no sealed records: a start would refuse a
restore of such a backup, and `topics verify` would report it. So before the backup exists, it is
checked as a start checks a data directory (`values/file_inventory`). Called by `backup`.
"""

from __future__ import annotations

from topics_server.values.entries import Entry, RecordsAppended, TopicDropped, TopicPut
from topics_server.values.errors import Corrupt
from topics_server.values.file_inventory import Anchor, Expected, FoundTopic, objections_to
from topics_server.values.storage_types import TopicPart
from topics_server.wal import layout
from topics_server.wal.format.manifest import HOT, Manifest
from topics_server.wal.segments.files import Tiers


class ExpectedManifests:
    """Topics of the snapshot that the journal does not drop, and the manifests that were found."""

    def __init__(self, tiers: Tiers) -> None:
        self._tiers = tiers
        self._expected: dict[int, Expected] = {}
        self._topics: set[int] = set()
        self._found: dict[int, FoundTopic] = {}

    def expect(self, part: TopicPart) -> None:
        """Note a topic of the snapshot."""
        anchor = Anchor(part.manifest_generation, part.next_segment_id, {}, {})
        self._expected[part.topic_id] = Expected(part.topic_id, part.name, part.head_seq, anchor)
        self._topics.add(part.topic_id)

    def note_entry(self, entry: Entry) -> None:
        """Note an entry of the journal that creates a topic, or drops one with its files."""
        creation = entry.creation if isinstance(entry, RecordsAppended) else entry
        if isinstance(creation, TopicPut):
            self._topics.add(creation.topic_id)
        elif isinstance(entry, TopicDropped):
            self._expected.pop(entry.topic_id, None)
            self._topics.discard(entry.topic_id)

    @property
    def topic_count(self) -> int:
        """The number of topics in the backup, with or without sealed records."""
        return len(self._topics)

    def note_found(self, manifest: Manifest) -> None:
        """Note a manifest in the backup."""
        self._found[manifest.topic_id] = FoundTopic(
            manifest.topic_id,
            self._path_of(manifest.topic_id),
            manifest.generation,
            manifest.next_segment_id,
        )

    def begin_anew(self) -> None:
        """Begin again with another snapshot."""
        self._expected.clear()
        self._topics.clear()

    def forget_found(self) -> None:
        """Forget the found manifests: every manifest is read again."""
        self._found.clear()

    def check(self) -> None:
        """Raise `Corrupt` if a manifest is missing, or older than expected."""
        for topic_id, expected in self._expected.items():
            for path, reason in objections_to(expected, self._found.get(topic_id), self._path_of):
                raise Corrupt(reason, path)

    def _path_of(self, topic_id: int) -> str:
        return layout.join(self._tiers.folder(HOT, topic_id), layout.MANIFEST)
