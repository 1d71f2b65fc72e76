"""What a snapshot says about the manifests that a backup must hold.

A manifest that is missing is not a topic without sealed records: a start would refuse a restore of
such a backup, and so would `topics verify`. So the backup itself is judged as a start judges a data
directory (`values/file_inventory`), before it exists. Called by `backup`.
"""

from __future__ import annotations

from topics_server.values.entries import Entry, TopicDropped
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
        self._found: dict[int, FoundTopic] = {}

    def expect(self, part: TopicPart) -> None:
        """The snapshot holds this topic."""
        anchor = Anchor(part.manifest_generation, part.next_segment_id, {}, {})
        self._expected[part.topic_id] = Expected(part.topic_id, part.name, part.head_seq, anchor)

    def note_entry(self, entry: Entry) -> None:
        """The journal drops a topic, and its files with it."""
        if isinstance(entry, TopicDropped):
            self._expected.pop(entry.topic_id, None)

    def note_found(self, manifest: Manifest) -> None:
        """The backup holds this manifest."""
        self._found[manifest.topic_id] = FoundTopic(
            manifest.topic_id,
            self._path_of(manifest.topic_id),
            manifest.generation,
            manifest.next_segment_id,
        )

    def begin_anew(self) -> None:
        """Another snapshot counts."""
        self._expected.clear()

    def forget_found(self) -> None:
        """Every manifest is read once more."""
        self._found.clear()

    def check(self) -> None:
        """Raise `Corrupt` for a manifest that is missing, or older than the one that was there."""
        for topic_id, expected in self._expected.items():
            for path, reason in objections_to(expected, self._found.get(topic_id), self._path_of):
                raise Corrupt(reason, path)

    def _path_of(self, topic_id: int) -> str:
        return layout.join(self._tiers.folder(HOT, topic_id), layout.MANIFEST)
