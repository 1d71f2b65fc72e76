"""The judgement of files on disk: which refuse the start, which are removed, which are
explained.
"""

from __future__ import annotations

import numpy as np
import pytest

from topics_server.values.file_inventory import (
    NO_GENERATION,
    Anchor,
    Expected,
    FoundTopic,
    Objection,
    Stray,
    Suspect,
    Verdict,
    judge,
    note_delete,
)


def path_of(topic_id: int) -> str:
    return f"segments/{topic_id}/manifest"


def verdict(
    anchor: Anchor | None, found: FoundTopic | None, *, head_seq: int = 10, on_disk: bool = True
) -> Verdict:
    """The judgement of one topic, id 1."""
    topics = [Expected(1, "t", head_seq, anchor)]
    files = {} if found is None else {1: found}
    return judge(topics, files, [1] if on_disk else [], 2, path_of)


def anchored(generation: int, next_segment_id: int = 1) -> Anchor:
    return Anchor(generation, next_segment_id, {}, {})


def manifest(generation: int, next_segment_id: int = 5) -> FoundTopic:
    return FoundTopic(1, path_of(1), generation, next_segment_id)


@pytest.mark.parametrize(
    ("anchor", "found", "word"),
    [
        (None, None, None),
        (None, manifest(3), None),
        (anchored(0), None, None),
        (anchored(0), manifest(3), None),
        (anchored(3), manifest(3), None),
        (anchored(3), manifest(4), None),
        (anchored(3), manifest(2), "older"),
        (anchored(3), manifest(0), "missing"),
        (anchored(3), None, "missing"),
        # Parts of older versions: a topic that ever had a segment has a manifest.
        (anchored(NO_GENERATION, 1), None, None),
        (anchored(NO_GENERATION, 5), manifest(1, 5), None),
        (anchored(NO_GENERATION, 5), manifest(1, 6), None),
        (anchored(NO_GENERATION, 5), manifest(1, 4), "older"),
        (anchored(NO_GENERATION, 5), None, "missing"),
    ],
)
def test_a_manifest_must_be_as_new_as_the_snapshot_says(
    anchor: Anchor | None, found: FoundTopic | None, word: str | None
) -> None:
    objections = verdict(anchor, found).objections
    assert len(objections) == (word is not None)
    for path, reason in objections:
        assert path == path_of(1)
        assert word is not None
        assert word in reason


def test_an_old_manifest_is_told_before_the_files_that_it_lists_in_vain() -> None:
    found = manifest(2)
    found.objections = [Objection("segments/1/0000000001.data", "a listed file is missing")]
    assert "older" in verdict(anchored(3), found).objections[0].reason
    assert verdict(anchored(2), found).objections == found.objections


def test_a_manifest_that_cannot_be_read_is_not_told_as_missing() -> None:
    found = FoundTopic(1, path_of(1), objections=[Objection(path_of(1), "checksum fails")])
    assert verdict(anchored(3), found).objections == found.objections


@pytest.mark.parametrize(("last_seq", "count"), [(10, 0), (11, 1)])
def test_a_stray_file_of_records_that_nobody_knows_refuses_the_start(
    last_seq: int, count: int
) -> None:
    found = FoundTopic(1, path_of(1), strays=[Stray("segments/1/0000000007.data", last_seq)])
    objections = verdict(None, found).objections
    assert [objection.path for objection in objections] == ["segments/1/0000000007.data"][:count]


def test_a_folder_goes_only_if_its_topic_is_known_to_be_gone() -> None:
    judged = judge([Expected(2, "t", 0, None)], {}, [1, 2, 3, 9], 4, path_of)
    assert judged.dropped == [1, 3]
    ((path, reason),) = judged.objections
    assert path == path_of(9)
    assert "topic 9" in reason


@pytest.mark.parametrize(
    ("runs", "touched"),
    [
        ([(1, 9)], False),
        ([(1, 10)], True),
        ([(20, 30)], True),
        ([(21, 30)], False),
        ([(1, 2), (12, 12), (40, 41)], True),
        ([(1, 2), (40, 41)], False),
        ([(5, 50)], True),
    ],
)
def test_a_replayed_delete_explains_flags_of_the_segments_it_is_in(
    runs: list[tuple[int, int]], touched: bool
) -> None:
    found = manifest(1)
    found.suspects[4] = Suspect(10, 20, known_dead=3, anchored_dead=2, is_touched=False)
    firsts, lasts = (np.array(column, "<u8").tobytes() for column in zip(*runs, strict=True))
    note_delete(found, firsts, lasts)
    assert found.suspects[4].is_touched == touched
    assert found.suspects[4].has_lost_deletes == (not touched)


def test_fewer_dead_rows_than_were_synced_are_never_explained() -> None:
    assert Suspect(10, 20, known_dead=1, anchored_dead=2, is_touched=True).has_lost_deletes
