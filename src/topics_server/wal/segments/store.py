"""Sealed segments of all topics, hot and cold. Implements the segments port.

Owns `segments/`, `quarantine/` and the cold folder. The manifest is the durable list: a segment
exists from the moment its manifest is synced, and its files are removed only after a manifest
without it is synced. Methods block and run on worker threads. Changes of one topic run one at a
time (a lock per topic, so that no flip happens while files are copied); reads may run at the same
time. At start `open_topic` only reads; `finish_recovery` changes the disk, after recovery has
checked the files. `bytes_of`, `is_cold`, `generation_of` and `flags_digest` answer from memory.

Invariants: a listed segment's files are complete and synced; while a segment may be in both tiers a
flip is made in both; no file that the manifest on disk may list is ever removed, nor a file whose
id was never assigned by a manifest.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Final

from topics_server.values.errors import StorageError
from topics_server.values.file_inventory import Anchor, FlagsDigest, FoundTopic, KnownFlags
from topics_server.values.model import TopicConfig
from topics_server.values.storage_types import PackedSegment, SegmentPlan, TopicFacts
from topics_server.wal import layout
from topics_server.wal.atomic_write import remove_quietly, rename_temp, write_temp
from topics_server.wal.folders import make_durable_dirs
from topics_server.wal.format.manifest import COLD, HOT
from topics_server.wal.fs import Fs
from topics_server.wal.segments.file_handles import FileHandles
from topics_server.wal.segments.files import (
    Tiers,
    copy_to_temp,
    digest_of,
    entry_of,
    flip_file,
)
from topics_server.wal.segments.index import SealedColumns
from topics_server.wal.segments.maps import IndexMaps
from topics_server.wal.segments.mending import (
    IndexFiles,
    PreparedMend,
    SegmentCopies,
    check_data,
    discard,
    prepare,
    put,
)
from topics_server.wal.segments.packing_process import Packer
from topics_server.wal.segments.quarantine import Quarantine
from topics_server.wal.segments.reading import SegmentReads
from topics_server.wal.segments.topic_manifest import Entries, ManifestStore, TopicManifest
from topics_server.wal.segments.topic_scan import (
    FoundFiles,
    objection_of,
    scan,
    tidy,
)


class SealedSegments:
    """See the module. `max_open_files`: its share of the process's descriptors, mappings included.

    `cold_dir` mirrors `segments/`; `dir_mode` is the mode of new folders. `store_id` and `run` are
    those of the directory; manifests carry them.
    """

    def __init__(
        self,
        fs: Fs,
        data_dir: str,
        cold_dir: str | None,
        packer: Packer,
        max_open_files: int = 512,
        dir_mode: int = 0o700,
        store_id: str = "",
        run: Callable[[], int] = lambda: 0,
    ) -> None:
        assert max_open_files >= 4
        self._fs: Final = fs
        self._tiers: Final = Tiers(layout.join(data_dir, layout.SEGMENTS), cold_dir)
        self._packer: Final = packer
        self._dir_mode: Final = dir_mode
        self._file_handles: Final = FileHandles(fs, max_open_files // 4)
        self._quarantine: Final = Quarantine(fs, data_dir, dir_mode)
        self._maps: Final = IndexMaps(
            fs,
            self._tiers,
            self._file_handles,
            max_open_files * 3 // 4,
            lambda topic_id, segment_id: self._index_files.mend_soon(topic_id, segment_id),
        )
        self._index_files: Final = IndexFiles(
            fs, self._tiers, self._maps, self._quarantine, self._topic
        )
        self._store_id: Final = store_id
        self._run: Final = run
        self._topics: dict[int, TopicManifest] = {}
        # The files found at start, until `finish_recovery` has handled them.
        self._found: Final[dict[int, FoundFiles]] = {}
        self._lock: Final = threading.Lock()
        reads = self._reads = SegmentReads(
            self._file_handles, self._maps, self._topic, self._index_files.mend
        )
        self.read, self.read_now = reads.read, reads.read_now
        self.read_json, self.read_json_now = reads.read_json, reads.read_json_now
        self.read_rows, self.find_tags = reads.read_rows, reads.find_tags
        self._roots_synced = False
        self._safe_roots: Final[set[str]] = set()

    def close(self) -> None:
        """End the packer, close files; indexes in use stay readable."""
        self._packer.close()
        self._file_handles.close()

    # -- sealing ---------------------------------------------------------------------------

    def pack(self, plan: SegmentPlan) -> PackedSegment:
        """See `ports.Segments.pack`."""
        return PackedSegment(
            *self._packer.pack(plan.topic_id, plan.segment_id, plan.blocks, plan.dead)
        )

    def put(
        self, plan: SegmentPlan, facts: TopicFacts, packed: PackedSegment | None = None
    ) -> SealedColumns:
        """See `ports.Segments.put`."""
        topic_id, segment_id = plan.topic_id, plan.segment_id
        assert topic_id == facts.topic_id
        packed = packed or self.pack(plan)
        data, idx = packed.data, packed.idx
        entry = entry_of(segment_id, data, idx)
        assert entry.first_seq == plan.blocks[0].first_seq
        assert entry.last_seq == plan.blocks[-1].last_seq
        topic = self._topic(topic_id)
        with topic.lock:
            self._finish_drops(topic, facts)
            assert segment_id not in topic.entries
            folder = self._make_folder(topic, HOT)
            if topic.is_unsure:
                # The manifest on disk may list files of an earlier attempt under this id.
                self._write_manifest(topic, facts, topic.entries)
            entries = {**topic.entries, segment_id: entry}
            paths = self._tiers.paths(HOT, topic_id, segment_id)
            try:
                for path, content in zip(paths, (idx, data), strict=True):
                    write_temp(self._fs, path, [content])
                for path in paths:
                    rename_temp(self._fs, path)
                self._fs.sync_dir(folder)
                generation = self._prepare(topic, facts, entries)
            except StorageError:
                # No manifest lists these files yet, and a full disk needs the room.
                for path in paths:
                    remove_quietly(self._fs, layout.temp(path))
                    remove_quietly(self._fs, path)
                raise
            self._publish(topic, facts, entries, generation)
            index = self._maps.make(topic, entry)
            topic.indexes = {**topic.indexes, segment_id: index}
            topic.digests[segment_id] = digest_of(data[entry.data_bytes - entry.record_count :])
        return index

    # -- reading ---------------------------------------------------------------------------

    def check_index(self, topic_id: int, segment_id: int) -> None:
        """See `ports.Segments.check_index`.

        Skips a segment that was dropped meanwhile, and one whose index is in memory because its
        file is known to be damaged. A damaged index is mended.
        """
        topic = self._topic(topic_id)
        entry, index = topic.entries.get(segment_id), topic.indexes.get(segment_id)
        if entry is None or index is None or (index.is_held and index.is_reported):
            return
        try:
            with topic.lock:
                known = None if segment_id in topic.torn else topic.digests.get(segment_id)
                columns = self._index_files.check(topic, entry, index)
                data_path = self._tiers.data_path(entry.tier, topic_id, segment_id)
                check_data(self._fs, data_path, columns, entry, known)
        except StorageError:
            moved = topic.entries.get(segment_id)
            if moved is not None and moved.tier == entry.tier:
                raise
            # The segment was dropped or is moving to the cold folder: the next pass reads it there.

    # -- changing --------------------------------------------------------------------------

    def flip(self, topic_id: int, rows: dict[int, Sequence[int]]) -> dict[int, FlagsDigest]:
        """See `ports.Segments.flip`. Segments that were dropped meanwhile are skipped."""
        topic = self._topic(topic_id)
        flipped: dict[int, FlagsDigest] = {}
        with topic.lock:
            for segment_id, hit in rows.items():
                entry = topic.entries.get(segment_id)
                if entry is None or not len(hit):
                    continue
                digest = None
                known = None if segment_id in topic.torn else topic.digests.get(segment_id)
                topic.torn.add(segment_id)
                tiers = (HOT, COLD) if segment_id in topic.doubled else (entry.tier,)
                for tier in tiers:
                    path = self._tiers.data_path(tier, topic_id, segment_id)
                    if tier == entry.tier:
                        digest = flip_file(self._fs, path, entry, hit, known)
                    elif self._fs.exists(path):
                        flip_file(self._fs, path, entry, hit, None)
                if known is not None or digest is not None:
                    topic.torn.discard(segment_id)
                if digest is not None:
                    flipped[segment_id] = topic.digests[segment_id] = digest
        return flipped

    def drop(self, topic_id: int, segment_ids: Sequence[int], facts: TopicFacts) -> None:
        """See `ports.Segments.drop`.

        If it fails, the topic's next change of any kind repeats it.
        """
        topic = self._topic(topic_id)
        with topic.lock:
            topic.dropping.update(segment_ids)
            self._finish_drops(topic, facts)

    def _finish_drops(self, topic: TopicManifest, facts: TopicFacts) -> None:
        if not topic.dropping:
            return
        gone = topic.dropping
        kept = {key: entry for key, entry in topic.entries.items() if key not in gone}
        self._write_manifest(topic, facts, kept)
        indexes = topic.indexes
        topic.indexes = {key: index for key, index in indexes.items() if key not in gone}
        for segment_id in sorted(gone):
            self._reads.forget(topic.topic_id, segment_id, indexes.get(segment_id))
            for tier in (HOT,) if self._tiers.cold is None else (HOT, COLD):
                for path in self._tiers.paths(tier, topic.topic_id, segment_id):
                    self._fs.unlink(path, missing_ok=True)
            self._quarantine.drop_segment(topic.quarantined, segment_id)
            topic.doubled.discard(segment_id)
            topic.disputed.discard(segment_id)
            topic.torn.discard(segment_id)
            topic.digests.pop(segment_id, None)
            gone.discard(segment_id)

    def drop_topic(self, topic_id: int) -> None:
        """See `ports.Segments.drop_topic`.

        The manifest is removed first, so no partial topic is left.
        """
        topic = self._topic(topic_id)
        with topic.lock:
            indexes, topic.indexes, topic.entries = topic.indexes, {}, {}
            topic.dropping.clear()
            for segment_id, index in indexes.items():
                self._reads.forget(topic_id, segment_id, index)
            for folder in self._tiers.folders(topic_id):
                if not self._fs.exists(folder):
                    continue
                names = self._fs.list_dir(folder)
                if layout.MANIFEST in names:
                    self._fs.unlink(layout.join(folder, layout.MANIFEST))
                    self._fs.sync_dir(folder)
                    names.remove(layout.MANIFEST)
                for name in names:
                    self._fs.unlink(layout.join(folder, name), missing_ok=True)
                self._fs.remove_dir(folder)
            self._quarantine.drop_topic(topic_id)
        with self._lock:
            self._topics.pop(topic_id, None)
            self._found.pop(topic_id, None)

    def relocate(self, topic_id: int, segment_id: int, facts: TopicFacts) -> None:
        """See `ports.Segments.relocate`. Does nothing for a dropped or cold segment."""
        topic = self._topic(topic_id)
        with topic.lock:
            self._finish_drops(topic, facts)
            entry = topic.entries.get(segment_id)
            if entry is None or entry.tier == COLD or topic.indexes[segment_id].is_held:
                return
            if segment_id in topic.disputed:
                return  # its copy in the cold folder may be the good one
            folder = self._make_folder(topic, COLD)
            hot_paths = self._tiers.paths(HOT, topic_id, segment_id)
            cold_paths = self._tiers.paths(COLD, topic_id, segment_id)
            # From here on the segment may be in both tiers, even if a step fails.
            topic.doubled.add(segment_id)
            try:
                for source, target in zip(hot_paths, cold_paths, strict=True):
                    copy_to_temp(self._fs, source, target)
            except StorageError:
                for target in cold_paths:
                    remove_quietly(self._fs, layout.temp(target))
                raise
            for target in cold_paths:
                rename_temp(self._fs, target)
            self._fs.sync_dir(folder)
            moved = {**topic.entries, segment_id: replace(entry, tier=COLD)}
            self._write_manifest(topic, facts, moved)
            self._reads.forget(topic_id, segment_id, topic.indexes.get(segment_id))
            for path in hot_paths:
                self._fs.unlink(path, missing_ok=True)
            topic.doubled.discard(segment_id)

    # -- mending ---------------------------------------------------------------------------

    def prepare_mend(
        self, topic_id: int, segment_id: int, copies: SegmentCopies, known: KnownFlags
    ) -> PreparedMend:
        """*Blocking.* Write undamaged copies beside a segment's damaged files."""
        entry = self._topic(topic_id).entry(segment_id)
        return prepare(self._fs, self._tiers, topic_id, entry, copies, known)

    def finish_mend(self, mend: PreparedMend, known: KnownFlags) -> SealedColumns:
        """*Blocking.* Put the copies in place of the damaged files, which go to quarantine.

        The topic's lock excludes flips, moves and drops meanwhile. Raises `StorageError`.
        """
        topic_id, segment_id = mend.topic_id, mend.entry.segment_id
        topic = self._topic(topic_id)

        def keep(path: str) -> None:
            copy = self._quarantine.keep(topic_id, path)
            topic.quarantined[copy] = self._fs.file_size(copy)

        with topic.lock:
            entry = topic.entries.get(segment_id)
            if entry is None or entry != mend.entry:
                discard(self._fs, mend)
                raise StorageError("was dropped or moved meanwhile", mend.data_path)
            put(self._fs, mend, known, keep)
            damaged = topic.index(segment_id)
            damaged.release()
            self._reads.forget(topic_id, segment_id, damaged)
            index = self._maps.make(topic, entry)
            topic.indexes = {**topic.indexes, segment_id: index}
            topic.digests[segment_id] = known.digest
            topic.disputed.discard(segment_id)
            topic.torn.discard(segment_id)
        return index

    def discard_mend(self, mend: PreparedMend) -> None:
        """*Blocking.* Abandon a prepared mend: remove its files."""
        discard(self._fs, mend)

    # -- manifests and folders -------------------------------------------------------------

    def write_manifest(self, facts: TopicFacts) -> None:
        """See `ports.Segments.write_manifest`."""
        topic = self._topic(facts.topic_id)
        with topic.lock:
            self._finish_drops(topic, facts)
            self._write_manifest(topic, facts, topic.entries)

    def _write_manifest(self, topic: TopicManifest, facts: TopicFacts, entries: Entries) -> None:
        self._make_folder(topic, HOT)
        generation = self._prepare(topic, facts, entries)
        self._publish(topic, facts, entries, generation)

    def _prepare(self, topic: TopicManifest, facts: TopicFacts, entries: Entries) -> int:
        path, store = self.manifest_path(topic.topic_id), ManifestStore(self._store_id, self._run())
        return topic.prepare(self._fs, path, facts, entries, store)

    def _publish(
        self, topic: TopicManifest, facts: TopicFacts, entries: Entries, generation: int
    ) -> None:
        """Publish the prepared manifest. Strays whose id it has assigned may be removed now."""
        path = self.manifest_path(topic.topic_id)
        topic.publish(self._fs, path, facts, entries, generation)
        for segment_id in [key for key in topic.strays if key < topic.next_segment_id]:
            for stray in topic.strays.pop(segment_id):
                if segment_id not in entries:
                    remove_quietly(self._fs, stray)

    def manifest_path(self, topic_id: int) -> str:
        """See `ports.Segments.manifest_path`."""
        return layout.join(self._tiers.folder(HOT, topic_id), layout.MANIFEST)

    def _make_folder(self, topic: TopicManifest, tier: str) -> str:
        """The topic's folder in a tier, its name durable (also if an earlier sync of it failed)."""
        folder = self._tiers.folder(tier, topic.topic_id)
        if tier not in topic.safe_folders:
            root = layout.parent(folder)
            if root not in self._safe_roots:
                make_durable_dirs(self._fs, root, self._dir_mode)
                self._safe_roots.add(root)
            make_durable_dirs(self._fs, folder, self._dir_mode)
            topic.safe_folders.add(tier)
        return folder

    # -- recovery --------------------------------------------------------------------------

    def open_topic(
        self, topic_id: int, anchor: Anchor | None = None
    ) -> tuple[FoundTopic, list[SealedColumns]]:
        """See `ports.Segments.open_topic`."""
        files = scan(self._fs, self._tiers, topic_id, self._store_id, anchor)
        report, manifest = files.report, files.manifest
        if manifest is None or report.objections:
            if not report.objections:
                self._note_strays(topic_id, files)
            return report, []
        topic = TopicManifest(topic_id, next_segment_id=manifest.next_segment_id)
        topic.entries = {found.entry.segment_id: found.entry for found in files.segments}
        topic.generation = topic.written_generation = manifest.generation
        assert report.facts is not None
        topic.config = report.facts.config
        topic.digests = dict(report.flags)
        topic.strays = files.strays
        topic.quarantined = self._quarantine.sizes(topic_id)
        with self._lock:
            self._topics[topic_id] = topic
            self._found[topic_id] = files
        try:
            indexes = [self._maps.open(topic, found) for found in files.segments]
        except StorageError as error:
            report.objections.append(objection_of(error, report.path))
            return report, []
        topic.indexes = {index.segment_id: index for index in indexes}
        return report, indexes

    def _note_strays(self, topic_id: int, files: FoundFiles) -> None:
        """Note the files of a topic without a manifest: they stay until the topic has one."""
        with self._lock:
            self._topics[topic_id] = TopicManifest(topic_id, strays=files.strays)
            self._found[topic_id] = files

    def finish_recovery(self, topic_id: int, untrusted: Collection[int] = ()) -> None:
        """See `ports.Segments.finish_recovery`."""
        self._sync_roots()
        files = self._found.pop(topic_id, None)
        if files is None:
            return
        topic = self._topic(topic_id)
        with topic.lock:
            tidy(self._fs, self._tiers, files, untrusted)
            for found in files.segments:
                index = topic.indexes[found.entry.segment_id]
                index.found_flags = None
                if found.index is not None:
                    self._index_files.replace(topic, found.entry, found.index, index)
            topic.disputed = {
                found.entry.segment_id for found in files.segments if found.keeps_seconds
            }
            topic.doubled |= topic.disputed
            manifest = files.manifest
            if manifest is not None and manifest.segments != tuple(topic.entries.values()):
                assert files.report.facts is not None
                self._write_manifest(topic, files.report.facts, topic.entries)

    def damaged_indexes(self, topic_id: int) -> dict[int, str]:
        """The indexes to rebuild, by segment; call it before `finish_recovery` of the topic."""
        files = self._found[topic_id]
        return {
            found.entry.segment_id: self._tiers.idx_path(
                found.entry.tier, topic_id, found.entry.segment_id
            )
            for found in files.segments
            if found.index is not None
        }

    def remake_indexes(self, topic_id: int) -> None:
        """Write the rebuilt indexes. For offline tools: a start calls `finish_recovery`."""
        files, topic = self._found[topic_id], self._topic(topic_id)
        with topic.lock:
            for found in files.segments:
                if found.index is not None:
                    index = topic.indexes[found.entry.segment_id]
                    self._index_files.replace(topic, found.entry, found.index, index)

    def topics_on_disk(self) -> list[int]:
        """See `ports.Segments.topics_on_disk`."""
        found: set[int] = set()
        for root in (self._tiers.hot, self._tiers.cold):
            names = [] if root is None else self._fs.list_dir(root)
            numbers = map(layout.parse_topic_dir, names)
            found.update(number for number in numbers if number is not None)
        found.update(self._quarantine.topics())
        return sorted(found)

    def _sync_roots(self) -> None:
        """Sync the names of the topics' folders once: recovery relies on them."""
        if self._roots_synced:
            return
        for root in (self._tiers.hot, self._tiers.cold):
            if root is not None and self._fs.exists(root):
                self._fs.sync_dir(root)
        self._roots_synced = True

    # -- from memory -----------------------------------------------------------------------

    def bytes_of(self, topic_id: int) -> tuple[int, int]:
        """See `ports.Segments.bytes_of`."""
        sizes = {HOT: 0, COLD: 0}
        topic = self._topics.get(topic_id)
        for entry in topic.entries.values() if topic else ():
            sizes[entry.tier] += entry.data_bytes + entry.idx_bytes
        sizes[HOT] += sum(topic.quarantined.values()) if topic else 0
        return sizes[HOT], sizes[COLD]

    def totals(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """(files, bytes) of all sealed segments, hot and cold. Safe on any thread."""
        files, sizes = {HOT: 0, COLD: 0}, {HOT: 0, COLD: 0}
        for topic in list(self._topics.values()):
            for entry in topic.entries.values():
                files[entry.tier] += 1
                sizes[entry.tier] += entry.data_bytes + entry.idx_bytes
            files[HOT] += len(topic.quarantined)
            sizes[HOT] += sum(topic.quarantined.values())
        return (files[HOT], sizes[HOT]), (files[COLD], sizes[COLD])

    def generation_of(self, topic_id: int) -> int:
        """See `ports.Segments.generation_of`."""
        topic = self._topics.get(topic_id)
        return topic.generation if topic else 0

    def published_config(self, topic_id: int) -> TopicConfig | None:
        """See `ports.Segments.published_config`."""
        topic = self._topics.get(topic_id)
        return topic.config if topic else None

    def flags_digest(self, topic_id: int, segment_id: int) -> FlagsDigest:
        """See `ports.Segments.flags_digest`."""
        return self._topics[topic_id].digests[segment_id]

    def is_cold(self, topic_id: int, segment_id: int) -> bool:
        """See `ports.Segments.is_cold`."""
        topic = self._topics.get(topic_id)
        entry = topic.entries.get(segment_id) if topic else None
        return entry is not None and entry.tier == COLD

    def _topic(self, topic_id: int) -> TopicManifest:
        with self._lock:
            topic = self._topics.get(topic_id)
            if topic is None:
                topic = self._topics[topic_id] = TopicManifest(topic_id)
            return topic
