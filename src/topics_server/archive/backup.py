"""Makes one backup, in steps that may run beside a server.

The order makes the backup consistent. First, the existing segments are copied ahead. Then, while
the journal keeps its files, a snapshot is copied, the manifests with their new segments, and last
the journal from the snapshot's start up to an lsn that is synced on every shard. Such a copy is
recovered like a server that was killed at this lsn and whose sealer was a little late. The file
`backup.json`, written last, makes the backup exist; the next backup removes one that still has the
mark `unfinished` instead. All calls block. Called by `node/backups`, `node/archiver` and `offline`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Final, Self

import xxhash

from topics_server.archive.expected import ExpectedManifests
from topics_server.archive.folder_owner import judge_folder, own_folder, refuse_same_place
from topics_server.archive.format import (
    BACKUPS,
    FACTS,
    KNOWN,
    NUMBER_MAX,
    PIECE_BYTES,
    SNAPSHOT,
    UNFINISHED,
    VERSION,
    BackupFacts,
    SealedTopic,
    StoredPiece,
    encode_journal,
    encode_json,
    encode_known,
    encode_sealed,
    folder_of,
    parse_folder,
)
from topics_server.archive.known import KnownBuilder
from topics_server.archive.object_store import FolderStore, ObjectStore
from topics_server.archive.repository import FolderState, number_state
from topics_server.archive.sealed import SealedCopier
from topics_server.values.entries import Entry
from topics_server.values.errors import Corrupt, StorageError
from topics_server.values.limits import MIB
from topics_server.values.storage_types import JOURNAL_PART
from topics_server.wal import layout
from topics_server.wal.format.frames import encode_entry
from topics_server.wal.format.snapshot import (
    HEADER_BYTES,
    check_table,
    decode_header,
    decode_journal,
    decode_parts,
    spans,
)
from topics_server.wal.fs import File, Fs
from topics_server.wal.segments.files import Tiers


class BackupStopped(StorageError):
    """The server is stopping, so the backup was abandoned and does not exist."""


class BackupWriter:
    """One backup that is being made. See the module for the order of the calls."""

    def __init__(
        self,
        fs: Fs,
        store: ObjectStore,
        data_dir: str,
        cold_dir: str | None,
        store_id: str,
        number: int,
        folder: str,
        check: Callable[[], None],
    ) -> None:
        """`folder`: a new folder in the store for this backup.

        `check` is called between chunks, from any thread; an error that it raises ends the backup.
        """
        self._fs: Final = fs
        self._store: Final = store
        self._data_dir: Final = data_dir
        self._store_id: Final = store_id
        self.number: Final = number
        self._folder: Final = folder
        tiers = Tiers(layout.join(data_dir, layout.SEGMENTS), cold_dir)
        self._expected: Final = ExpectedManifests(tiers)
        self._check: Final = check
        self._sealed: Final = SealedCopier(fs, store, tiers, check, self._expected)
        self._known: Final = KnownBuilder()
        self._topics: list[SealedTopic] = []
        self._topics_bytes = 0
        self._sealed_pieces: list[StoredPiece] = []
        self._journal_pieces: list[StoredPiece] = []
        self._snapshot: StoredPiece | None = None
        self._run = 0
        self.start_lsn = 1
        self._last_lsn = 0
        # The last lsn of the snapshot and the copied journal together.
        self.entries_lsn = 0

    @classmethod
    def open(
        cls,
        fs: Fs,
        folder: str,
        data_dir: str,
        cold_dir: str | None,
        store_id: str,
        check: Callable[[], None] = lambda: None,
    ) -> Self:
        """Lock the backup folder; if it is empty, it becomes a folder of this store.

        Raises `StorageError`, `StartRefused`.
        """
        refuse_same_place(fs, folder, data_dir, cold_dir)
        # Check this before locking, because the lock is a file in the folder.
        judge_folder(fs, FolderStore.open(fs, folder, write=False), data_dir, store_id)
        store = FolderStore.open(fs, folder, write=True)
        try:
            own_folder(fs, store, data_dir, store_id)
            number = _begin(store)
            folder_name = folder_of(number)
            return cls(fs, store, data_dir, cold_dir, store_id, number, folder_name, check)
        except BaseException:
            store.close()
            raise

    def close(self) -> None:
        """Release the folder's lock."""
        self._store.close()

    # -- steps ---------------------------------------------------------------------------------

    def topic_ids(self) -> list[int]:
        """Topics that have sealed segments now."""
        return self._sealed.topic_ids()

    def copy_ahead(self, topic_id: int) -> None:
        """Store the topic's segments, so that fewer are new while the journal keeps its files."""
        self._check()
        self._sealed.copy(topic_id)

    def begin_cut(self) -> None:
        """Reset the counts; from here on the caller lets the journal keep its files."""
        counts = self._sealed.counts
        counts.segments = counts.bytes = 0
        self._expected.forget_found()

    def put_snapshot(self) -> None:
        """Copy the newest undamaged snapshot; without one, the whole journal is copied."""
        folder = layout.join(self._data_dir, layout.SNAPSHOTS)
        numbers = map(layout.parse_snapshot_file, self._fs.list_dir(folder))
        for number in sorted((each for each in numbers if each is not None), reverse=True):
            file = self._fs.open(layout.join(folder, layout.snapshot_file(number)))
            try:
                if self._read_snapshot(file):
                    self._snapshot = self._put(SNAPSHOT, _chunks(file, self._check))
                    return
            finally:
                file.close()

    def _read_snapshot(self, file: File) -> bool:
        """Note the facts in the parts; False if the file is damaged or not usable."""
        self._expected.begin_anew()
        try:
            encoded = file.pread(HEADER_BYTES, 0)
            header = decode_header(encoded)
            if header.file_bytes != file.size():
                return False
            table = check_table(encoded, file.pread(header.table_bytes, header.table_offset))
            for first, end, offset, length in spans(table):
                self._check()
                for part_id, part in decode_parts(file.pread(length, offset), table[first:end]):
                    if part_id == JOURNAL_PART:
                        journal = decode_journal(part)
                        self._run = journal.run
                        if any(each.start_lsn < header.start_lsn for each in journal.shards):
                            # This snapshot is of a run with a read-only shard, and needs an earlier
                            # journal.
                            return False
                    else:
                        topic = self._known.note_part(part_id, part)
                        if topic is not None:
                            self._expected.expect(topic)
        except Corrupt:
            return False
        self._known.note_next_id(header.next_topic_id)
        self.start_lsn, self._last_lsn = header.start_lsn, header.last_lsn
        self.entries_lsn = header.last_lsn
        return True

    def put_topic(self, topic_id: int) -> None:
        """Copy the topic's current manifest and flags, and its new segments."""
        self._check()
        topic = self._sealed.copy(topic_id)
        if topic is None:
            return
        self._topics.append(topic)
        self._topics_bytes += len(topic.manifest) + sum(
            len(segment.flags or b"") for segment in topic.segments
        )
        if self._topics_bytes >= PIECE_BYTES:
            self.end_topics()

    def end_topics(self) -> None:
        """Write the manifests and flags that are collected so far."""
        if self._topics:
            name = f"sealed-{len(self._sealed_pieces) + 1}"
            self._sealed_pieces.append(self._put(name, [encode_sealed(self._topics)]))
        self._topics, self._topics_bytes = [], 0

    def put_journal(self, entries: Iterable[tuple[int, Entry]]) -> None:
        """Write the entries from `start_lsn` on, by lsn."""
        frames = bytearray()
        count = first_lsn = last_lsn = 0
        for lsn, entry in entries:
            self._check()
            assert lsn > last_lsn
            first_lsn, last_lsn = first_lsn or lsn, lsn
            for buffer in encode_entry(lsn, entry):
                frames += buffer
            count += 1
            self.entries_lsn = max(self.entries_lsn, lsn)
            self._known.note_entry(entry)
            self._expected.note_entry(entry)
            if len(frames) >= PIECE_BYTES:
                self._put_journal(frames, count, first_lsn, last_lsn)
                frames, count, first_lsn = bytearray(), 0, 0
        if count:
            self._put_journal(frames, count, first_lsn, last_lsn)

    def _put_journal(self, frames: bytearray, count: int, first_lsn: int, last_lsn: int) -> None:
        name = f"journal-{len(self._journal_pieces) + 1}"
        content = encode_journal(bytes(frames), count, first_lsn, last_lsn)
        self._journal_pieces.append(self._put(name, [content]))

    def finish(self, last_lsn: int, run: int, now_ms: int) -> BackupFacts:
        """Make the backup exist. `last_lsn`: it has every entry up to this lsn, and none after it.

        Raises `Corrupt` if a manifest that the snapshot expects is missing.
        """
        self._expected.check()
        counts = self._sealed.counts
        facts = BackupFacts(
            format=VERSION,
            number=self.number,
            store_id=self._store_id,
            run=max(run, self._run),
            ts_ms=now_ms,
            start_lsn=self.start_lsn,
            last_lsn=max(last_lsn, self._last_lsn),
            topics=self._expected.topic_count,
            segments=counts.segments,
            segment_bytes=counts.bytes,
            copied_bytes=counts.copied_bytes,
            damaged_segments=sorted(self._sealed.damaged),
            snapshot=self._snapshot,
            sealed=self._sealed_pieces,
            journal=self._journal_pieces,
            known=self._put(KNOWN, [encode_known(self._known.result())]),
        )
        self._check()
        name = f"{self._folder}/{FACTS}"
        if not self._store.put_if_absent(name, [encode_json(facts)]):
            raise StorageError("another backup has this number", self._store.path_of(name))
        self._store.delete(f"{self._folder}/{UNFINISHED}")
        return facts

    def _put(self, name: str, pieces: Iterable[bytes]) -> StoredPiece:
        digest, size = xxhash.xxh3_64(), 0

        def counted() -> Iterator[bytes]:
            nonlocal size
            for piece in pieces:
                self._check()
                digest.update(piece)
                size += len(piece)
                yield piece

        path = f"{self._folder}/{name}"
        if not self._store.put_if_absent(path, counted()):
            raise StorageError("another backup has this number", self._store.path_of(path))
        return StoredPiece(name, size, digest.hexdigest())


def _begin(store: ObjectStore) -> int:
    """Begin a new backup: return its number, and remove the remains of unfinished ones.

    A backup that lost its `backup.json` does not count as unfinished, and stays.
    """
    numbers = [0]
    for name in store.names(BACKUPS):
        number = parse_folder(name)
        if number is None:
            continue
        numbers.append(number)
        if number_state(store, number) is FolderState.UNFINISHED:
            store.delete_folder(folder_of(number))
    number = max(numbers) + 1
    if number > NUMBER_MAX:
        raise StorageError("no number is left for a backup", store.path_of(BACKUPS))
    store.put_if_absent(f"{folder_of(number)}/{UNFINISHED}", [])
    return number


def _chunks(file: File, check: Callable[[], None]) -> Iterator[bytes]:
    size = file.size()
    for at in range(0, size, MIB):
        check()
        yield file.pread(min(MIB, size - at), at)
