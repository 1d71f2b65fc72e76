"""The cache of objects that are read again and again."""

from __future__ import annotations

from array import array

from topics_server.engine.read.object_cache import _SEEN_MAX, ObjectCache, ObjectKey
from topics_server.values.columns.json_rows import JsonBlock


def objects_of(size: int) -> JsonBlock:
    return JsonBlock(b"x" * (size - 8), array("I", (0, size - 8)))


def key_of(row: int, segment_id: int = 1) -> ObjectKey:
    return 1, segment_id, row, row + 256, 1


def test_objects_are_kept_at_their_second_read() -> None:
    cache, objects = ObjectCache(1000), objects_of(100)
    for expected in (None, None, objects, objects):
        assert cache.get(key_of(0)) is expected
        if expected is None:
            cache.note(key_of(0), objects, is_part=False)
    assert cache.held_bytes == 100


def test_objects_of_which_a_page_has_a_small_part_are_kept_at_once() -> None:
    cache, objects = ObjectCache(1000), objects_of(100)
    cache.note(key_of(0), objects, is_part=True)
    assert cache.get(key_of(0)) is objects
    # Two readers have read them at the same time.
    cache.note(key_of(0), objects, is_part=True)
    cache.note(key_of(0), objects, is_part=False)
    assert cache.held_bytes == 100
    cache.note(key_of(1), objects, is_part=False)
    cache.note(key_of(1), objects, is_part=True)
    assert cache.held_bytes == 200


def test_a_walk_keeps_nothing() -> None:
    cache = ObjectCache(1000)
    for _ in range(3):
        for row in range(_SEEN_MAX + 1):
            cache.note(key_of(row), objects_of(100), is_part=False)
    assert cache.held_bytes == 0
    assert len(cache._seen) == _SEEN_MAX


def test_the_least_recently_used_objects_are_evicted_first() -> None:
    cache = ObjectCache(300)
    for row in range(3):
        for _ in range(2):
            cache.note(key_of(row), objects_of(100), is_part=False)
    assert cache.get(key_of(0)) is not None
    for _ in range(2):
        cache.note(key_of(3), objects_of(100), is_part=False)
    assert [cache.get(key_of(row)) is not None for row in range(4)] == [True, False, True, True]
    assert cache.held_bytes == 300


def test_objects_larger_than_the_cache_are_not_kept() -> None:
    cache = ObjectCache(300)
    for _ in range(4):
        cache.note(key_of(0), objects_of(301), is_part=False)
    assert cache.held_bytes == 0
    assert cache.get(key_of(0)) is None


def test_the_objects_of_one_segment_are_forgotten() -> None:
    cache = ObjectCache(1000)
    for segment_id in (1, 2):
        for _ in range(2):
            cache.note(key_of(0, segment_id), objects_of(100), is_part=False)
    cache.forget(1, 1)
    assert cache.get(key_of(0, 1)) is None
    assert cache.get(key_of(0, 2)) is not None
    assert cache.held_bytes == 100
