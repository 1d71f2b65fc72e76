"""Compares a topic's files at start with what is expected of them.

A missing file does not count as an empty one. The newest snapshot has *anchors*: for each topic the
generation of the last published manifest, and for each segment a digest of its delete flags.
`open_topic` reports the files on disk and changes nothing. After replay, recovery calls this module
to compare files and anchors, for the topics that still exist. If a file is missing or older, the
start is refused with the file's name. A segment whose flags lack deletes counts as damaged. Files
are removed only after this check.

Pure. Called by `engine/background/recovery.py`, and by `wal/tools/verify.py`, which must decide the
same way.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Final, NamedTuple

import msgspec
import numpy as np

from topics_server.values.storage_types import TopicFacts, TopicPart

# The generation of a part that is older than manifest generations: only its next segment id is
# compared.
NO_GENERATION: Final = -1
# A reserved id: `topics repair` fills damaged parts of a journal with drops of this topic. Such a
# journal may lack deletes, so segments may have more dead rows than the journal explains.
NO_TOPIC: Final = 0


class FlagsDigest(NamedTuple):
    """The digest of a segment's delete flags: number of dead rows, XXH3-64 of all flags."""

    dead_count: int
    checksum: int


class KnownFlags(msgspec.Struct, frozen=True):
    """The facts of a running server about the flags of a segment that is mended.

    `digest`: that of the flags that were synced last. `deleted`: one byte a row, 1 for a row that
    was deleted and whose flag was synced. `deleted` says nothing about rows below `first_row`.
    """

    digest: FlagsDigest
    deleted: bytes
    first_row: int


class Anchor(msgspec.Struct, frozen=True):
    """The expectations of a snapshot about a topic's files.

    `generation`: that of the last published manifest; 0: there was none; `NO_GENERATION`: not
    known. `next_segment_id`: every id below it was assigned. `flags`: by segment, the digest of
    synced flags. `flips`: by segment, `<u4` rows that are dead while their flag may not be set yet.
    `whole_flips`: segments for which `flips` holds all deleted rows, so that an older file can be
    corrected.
    """

    generation: int
    next_segment_id: int
    flags: Mapping[int, FlagsDigest]
    flips: Mapping[int, bytes]
    whole_flips: Collection[int] = ()


def anchor_of(part: TopicPart) -> Anchor:
    """The expectations about a topic's files, from the topic's part of a snapshot."""
    digests = {segment_id: FlagsDigest(*digest) for segment_id, digest in part.flags.items()}
    return Anchor(
        part.manifest_generation, part.next_segment_id, digests, part.flips, part.whole_flips
    )


class Stray(msgspec.Struct, frozen=True):
    """A segment file that the manifest does not list, and whose id it has not assigned yet."""

    path: str
    last_seq: int


class Suspect(msgspec.Struct):
    """A segment whose flags differ from the anchored flags.

    `is_touched`: a flip in the snapshot or a replayed delete concerns this segment, so it may have
    more dead rows than the anchor. `known_dead`: the number of rows that are dead by the flags on
    disk, or by the snapshot's flips if these are complete. `has_damaged_flags`: some flags are
    neither live nor dead, so that a later start cannot compare the flags with this state.
    """

    first_seq: int
    last_seq: int
    known_dead: int
    anchored_dead: int
    is_touched: bool
    has_damaged_flags: bool = False

    @property
    def has_lost_deletes(self) -> bool:
        """Whether deletes are lost: no valid history of the store leads to these flags."""
        return not self.is_touched or self.known_dead < self.anchored_dead


class Objection(NamedTuple):
    """The reason why a topic's files cannot be served; `path` names the file."""

    path: str
    reason: str


class FoundTopic(msgspec.Struct):
    """The files found on disk under a topic's id. Nothing was changed to find them.

    `generation`: that of the manifest; 0: there is none. `objections`: errors that do not depend on
    a snapshot. `strays`: files of an unfinished seal, or of a segment whose manifest is missing.
    `first_free_id`: no file has this segment id or a higher one. `last_seq`: the last seq of the
    last listed segment. `flags`: by listed segment whose flags are readable. `suspects`: segments
    that differ from the anchor.
    """

    topic_id: int
    path: str
    generation: int = 0
    next_segment_id: int = 1
    first_free_id: int = 1
    facts: TopicFacts | None = None
    last_seq: int = 0
    objections: list[Objection] = []
    strays: list[Stray] = []
    flags: dict[int, FlagsDigest] = {}
    suspects: dict[int, Suspect] = {}


class Expected(NamedTuple):
    """A topic that exists after replay."""

    topic_id: int
    name: str
    head_seq: int
    anchor: Anchor | None


class Verdict(NamedTuple):
    """`objections` refuse the start. `dropped`: ids of dropped topics whose files are deleted."""

    objections: list[Objection]
    dropped: list[int]


def judge(
    topics: Iterable[Expected],
    found: Mapping[int, FoundTopic],
    on_disk: Collection[int],
    next_topic_id: int,
    path_of: Callable[[int], str],
) -> Verdict:
    """Check every topic that exists and every folder on disk.

    `path_of` returns the path of a topic id's manifest.

    A folder is deleted only if its id was assigned and its topic exists neither in the snapshot,
    which has every topic, nor after replay.
    """
    objections: list[Objection] = []
    existing = set[int]()
    for topic in topics:
        existing.add(topic.topic_id)
        files, anchor = found.get(topic.topic_id), topic.anchor
        # Most topics have no files, and should have none.
        if files is not None or (anchor is not None and anchor.generation != 0):
            objections += objections_to(topic, files, path_of)
    dropped: list[int] = []
    for topic_id in sorted(on_disk):
        if topic_id >= next_topic_id:
            reason = (
                f"segments of topic {topic_id} are here, but neither the snapshots nor the journal "
                "know that topic: a part of the data directory is missing"
            )
            objections.append(Objection(path_of(topic_id), reason))
        elif topic_id not in existing:
            dropped.append(topic_id)
    return Verdict(objections, dropped)


def objections_to(
    topic: Expected, found: FoundTopic | None, path_of: Callable[[int], str]
) -> list[Objection]:
    """The reasons why the files found under a topic's id cannot be the topic's files."""
    path = path_of(topic.topic_id)
    if found is None:
        found = FoundTopic(topic.topic_id, path)
    anchor = topic.anchor
    whose = f"the manifest of topic {topic.name} (id {topic.topic_id})"
    if anchor is not None:
        must_be = max(anchor.generation, 0)
        if anchor.generation == NO_GENERATION:
            must_be = int(anchor.next_segment_id > 1)
        if 0 < found.generation < must_be:
            text = f"{whose} is older than the one last published"
            return [Objection(path, f"{text} (generation {found.generation} of {must_be})")]
        is_behind = found.generation > 0 and found.next_segment_id < anchor.next_segment_id
        if anchor.generation == NO_GENERATION and is_behind:
            return [Objection(path, f"{whose} is older than the one last published")]
        if found.generation == 0 and must_be > 0 and not found.objections:
            return [Objection(path, f"{whose} is missing; it lists sealed records")]
    return found.objections or [
        Objection(stray.path, f"holds records of {topic.name} that nothing else knows of")
        for stray in found.strays
        if stray.last_seq > topic.head_seq
    ]


def note_delete(found: FoundTopic, firsts: bytes, lasts: bytes) -> None:
    """Note a replayed delete: it explains why a segment has more dead rows than its anchor.

    `firsts` and `lasts`: the delete's runs of seqs, ascending, `<u8`.
    """
    for suspect in found.suspects.values():
        starts, ends = np.frombuffer(firsts, "<u8"), np.frombuffer(lasts, "<u8")
        at = int(np.searchsorted(ends, suspect.first_seq))
        if at < len(starts) and int(starts[at]) <= suspect.last_seq:
            suspect.is_touched = True
