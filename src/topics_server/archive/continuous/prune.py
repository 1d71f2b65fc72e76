"""Removes the bases that no rule keeps, and the parts before the oldest base of the window.

Rules of days and of counts make the *window*: from its oldest base on, every moment stays. Rules of
weeks and months keep bases before it, as single moments. First the object `pruned/NUMBER` is
written: it lists what is kept, and the positions in the other objects that clients may have seen.
So a prune that is killed at any point loses nothing, and the next prune removes the rest. Segments
that no base needs are removed last. The lock of the bases is held meanwhile. Called by the command
line.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from topics_server.archive.continuous.bases import ArchiveBase, ArchiveBases
from topics_server.archive.continuous.format import (
    ARCHIVE_VERSION,
    BASES,
    PARTS,
    PRUNED,
    KeptBase,
    PrunedFacts,
    base_folder,
    encode_pruned,
    is_part_group,
    parse_base,
    parse_part,
    part_group,
    part_name,
    pruned_name,
)
from topics_server.archive.continuous.history import ArchiveHistory
from topics_server.archive.continuous.places.shared_folder import ArchiveStore, put_same
from topics_server.archive.known import KnownBuilder
from topics_server.archive.repository import remove_segments, segment_objects
from topics_server.archive.retention import KeepRule, kept
from topics_server.values.errors import StorageError


@dataclass(slots=True)
class PrunePlan:
    """The objects that a prune keeps: bases by their naming part, parts from `first_part`."""

    bases: list[ArchiveBase]
    gone: list[KeptBase]
    first_part: int
    gone_parts: int
    skipped: Collection[int] = ()


@dataclass(slots=True)
class PrunedArchive:
    """The numbers of objects that a prune kept and removed."""

    kept: list[int] = field(default_factory=list)
    removed: list[int] = field(default_factory=list)
    parts: int = 0
    segments: int = 0
    bytes: int = 0


def plan_prune(
    store: ArchiveStore, rules: Sequence[KeepRule], skipped: Collection[int] = ()
) -> PrunePlan:
    """*Blocking.* Find what these rules keep. Changes nothing.

    `skipped`: parts whose bases are lost and are removed. Raises `StorageError` if another base
    cannot be read, because its segments are unknown.
    """
    history = ArchiveHistory(store)
    opener = ArchiveBases(store, history)
    every = opener.kept()
    bases = [opener.opened(each) for each in every if each.part not in skipped]
    if not bases:
        raise StorageError("the archive has no base yet", store.path_of(BASES))
    times = [(base.part, base.ts_ms) for base in bases]
    parts = kept(times, rules)
    window = kept(times, [rule for rule in rules if rule.unit in ("", "d")])
    oldest = next(base for base in reversed(bases) if base.part in window)
    first = history.first_behind(oldest.stretch, oldest.last_lsn, oldest.part)
    numbers = history.numbers()
    return PrunePlan(
        bases=[base for base in bases if base.part in parts],
        gone=[each for each in every if each.part not in parts],
        first_part=first,
        gone_parts=sum(number < first for number in numbers),
        skipped=skipped,
    )


def prune_archive(store: ArchiveStore, plan: PrunePlan) -> PrunedArchive:
    """*Blocking.* Carry out a plan. The caller has held the lock of the bases since the plan."""
    history = ArchiveHistory(store)
    found = PrunedArchive(
        kept=sorted(base.part for base in plan.bases),
        removed=sorted(each.part for each in plan.gone),
    )
    judged = max(found.kept)
    needed = {name for base in plan.bases for name in segment_objects(base.backup)}
    if plan.gone or plan.gone_parts:
        _note(store, history, plan, judged)
    found.parts = _remove_parts(store, plan.first_part)
    _remove_bases(store, {base.name for base in plan.bases}, judged)
    found.segments, found.bytes = remove_segments(store, needed)
    return found


def _note(store: ArchiveStore, history: ArchiveHistory, plan: PrunePlan, judged: int) -> None:
    """Write the note: kept bases, and positions in removed objects; remove the old note."""
    opener = ArchiveBases(store, history)
    builder = KnownBuilder()
    earlier = history.pruned()
    if earlier is not None:
        builder.note(earlier.known)
    for each in plan.gone:
        if each.part not in plan.skipped:
            builder.note(opener.opened(each).backup.known())
    for number in history.numbers():
        if number < plan.first_part:
            builder.note(history.facts(number).known)
    bases = [KeptBase(base.name, base.backup_xxh3, base.part, base.stretch) for base in plan.bases]
    facts = PrunedFacts(ARCHIVE_VERSION, judged, plan.first_part, bases, builder.result())
    number = max([judged, *_notes(store)]) + 1
    if not put_same(store, pruned_name(number), encode_pruned(facts)):
        raise StorageError("another prune is under way", store.path_of(pruned_name(number)))
    for other in _notes(store):
        if other < number:
            store.delete(pruned_name(other))


def _notes(store: ArchiveStore) -> list[int]:
    return [each for each in map(parse_part, store.names(PRUNED)) if each is not None]


def _remove_parts(store: ArchiveStore, first: int) -> int:
    removed = 0
    for group in filter(is_part_group, store.names(PARTS)):
        folder = f"{PARTS}/{group}"
        if folder > part_group(first):
            # The folder may be new and empty: the server is about to put a part into it.
            continue
        for number in map(parse_part, store.names(folder)):
            if number is not None and number < first:
                store.delete(part_name(number))
                removed += 1
        if folder < part_group(first) and not store.names(folder):
            store.delete_folder(folder)
    return removed


def _remove_bases(store: ArchiveStore, names: Collection[str], judged: int) -> None:
    """Remove the folders that are not kept, except those of later bases."""
    for name in store.names(BASES):
        number = parse_base(name)
        if number is not None and number <= judged and name not in names:
            store.delete_folder(base_folder(name))
