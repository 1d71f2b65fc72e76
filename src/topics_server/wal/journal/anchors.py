"""Compares the journal with the facts that other files hold about it.

A journal file itself does not show that it was emptied, shortened, removed or replaced by an older
copy. End marks, `FORMAT` and the snapshot can: each is an *anchor*. `read_marks` reads the required
end marks and compares them with `FORMAT`; `judge_files` compares the files of a shard with its
mark; `judge_end` judges a shard that ends before its mark. All raise `Corrupt` with the path of the
damaged file; nothing is changed. Called by `replay`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from topics_server.values.errors import Corrupt
from topics_server.values.limits import U64_MAX
from topics_server.values.storage_types import ShardSync, SnapshotImage
from topics_server.wal import layout
from topics_server.wal.directory import FormatMark
from topics_server.wal.format.end_marks import EndMark
from topics_server.wal.fs import Fs
from topics_server.wal.journal.end_mark_file import end_mark_path, read_end_mark
from topics_server.wal.journal.file_chain import JournalFile, Key


class Anchors(msgspec.Struct, frozen=True):
    """The facts of `FORMAT` and the snapshot.

    `marked_sets`: wal sets whose shards have end marks. `run`: the number of starts that wrote.
    `journal_run`: the last run that created its journal files and end marks. `same_boot`: whether
    the last run was in this boot, so that its writes are in the page cache. `snapshot_run`,
    `shards`: the run of the snapshot, and its facts about each shard.
    """

    marked_sets: frozenset[int] = frozenset()
    run: int = 0
    journal_run: int = 0
    same_boot: bool = False
    snapshot_run: int = 0
    shards: Sequence[ShardSync] = ()


NO_ANCHORS: Final = Anchors()


def anchors_of(
    format_mark: FormatMark,
    newest: SnapshotImage | None,
    oldest: SnapshotImage | None,
    *,
    same_boot: bool,
) -> Anchors:
    """The newest snapshot's knowledge of the journal, for a replay from the oldest snapshot on."""
    starts = {(s.wal_set, s.shard): s.start_lsn for s in oldest.shards} if oldest else {}
    return Anchors(
        frozenset(s.wal_set for s in format_mark.wal_sets if s.has_marks),
        run=format_mark.run,
        journal_run=format_mark.journal_run,
        same_boot=same_boot,
        snapshot_run=newest.run if newest else 0,
        shards=[
            ShardSync(s.wal_set, s.shard, s.synced_lsn, starts.get((s.wal_set, s.shard), U64_MAX))
            for s in (newest.shards if newest else ())
        ],
    )


def is_needed(wal_sets: Sequence[tuple[int, int, int]], index: int, start_lsn: int) -> bool:
    """Whether a listed wal set may hold entries from `start_lsn` on; the last set always may."""
    return index + 1 == len(wal_sets) or wal_sets[index + 1][2] > start_lsn


def read_marks(
    fs: Fs,
    wal_dir: str,
    wal_sets: Sequence[tuple[int, int, int]],
    anchors: Anchors,
    start_lsn: int,
) -> dict[Key, EndMark]:
    """*Blocking.* The end marks of every shard of the required wal sets that have marks."""
    format_path = layout.join(layout.parent(wal_dir), layout.FORMAT)
    if anchors.snapshot_run > anchors.run:
        raise Corrupt(
            f"is an older copy: it counts {anchors.run} runs, and the snapshot is of run "
            f"{anchors.snapshot_run}",
            format_path,
        )
    marks: dict[Key, EndMark] = {}
    for index, (wal_set, shard_count, _) in enumerate(wal_sets):
        if wal_set not in anchors.marked_sets or not is_needed(wal_sets, index, start_lsn):
            continue
        for shard in range(shard_count):
            mark = marks[wal_set, shard] = read_end_mark(fs, wal_dir, wal_set, shard)
            path = end_mark_path(wal_dir, wal_set, shard)
            if mark.run > anchors.run:
                raise Corrupt(
                    f"is an older copy: it counts {anchors.run} runs, and {path} is of run "
                    f"{mark.run}",
                    format_path,
                )
            if index + 1 == len(wal_sets) and mark.run < anchors.journal_run:
                raise Corrupt(
                    f"is an older copy: it is of run {mark.run}, and the journal was last opened "
                    f"in run {anchors.journal_run}",
                    path,
                )
    return marks


def is_excused(mark: EndMark, wal_sets: Sequence[tuple[int, int, int]], key: Key, lsn: int) -> bool:
    """Whether this shard's files may be missing: its wal set is old and ends below `lsn`."""
    return key[0] != wal_sets[-1][0] and mark.written_lsn < lsn


def judge_files(wal_dir: str, key: Key, files: Sequence[JournalFile], mark: EndMark) -> None:
    """Compare the files of a shard with its end mark. Raises `Corrupt`."""
    mark_path = end_mark_path(wal_dir, *key)
    live_path = layout.join(wal_dir, layout.wal_file(layout.WalName(*key, mark.number)))
    live = next((found for found in files if found.header.number == mark.number), None)
    if live is None:
        raise Corrupt(
            "this journal file is missing, emptied or its header is gone: the end mark says it "
            f"was written up to {mark.written_end} and synced up to {mark.synced_end}",
            live_path,
        )
    if live.header.file_id != mark.file_id:
        raise Corrupt(f"this is another file than the one that {mark_path} names", live_path)
    for found in files:
        if found.header.number > mark.number and found.first is not None:
            raise Corrupt(
                f"is an older copy: it names journal file {mark.number}, and {found.path} holds "
                "groups",
                mark_path,
            )


def judge_end(found: JournalFile, position: int, mark: EndMark, *, same_boot: bool) -> bool:
    """Whether written groups are missing from the file that the end mark names.

    The groups on disk end at `position`. Raises `Corrupt` if no crash can have lost them: they were
    synced, or they were written in this boot without a failed or unfinished sync.
    """
    header = found.header
    if position < mark.synced_end:
        raise Corrupt(
            f"its groups end at {position}, and the end mark says it was synced up to "
            f"{mark.synced_end}",
            found.path,
        )
    if position < mark.written_end and same_boot and not mark.is_syncing:
        raise Corrupt(
            f"its groups end at {position}, and the end mark says it was written up to "
            f"{mark.written_end}; the machine was not restarted since",
            found.path,
        )
    if found.size < header.declared_bytes and found.size != position:
        raise Corrupt(
            f"it has {found.size} bytes, and had {header.declared_bytes} when its header was "
            "synced",
            found.path,
        )
    return position < mark.written_end
