"""A cache of the JSON objects of pages that are read again and again, bounded in bytes. Pure.

Objects are kept at once if a page has only a small part of them: the next page of the same reader
has the next part. Others are kept at their second read within the last `_SEEN_MAX` others: readers
that walk through a topic in large pages keep none, and their memory is used again while the
processor has it at hand. The least
recently used objects are evicted first. Segment ids are never reused; the objects of a mended
segment are removed. So no entry is ever out of date.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from topics_server.values.columns.json_rows import JsonBlock

# Topic id, segment id, first row, end row, and the members, see `json_rows`.
ObjectKey = tuple[int, int, int, int, int]
_SEEN_MAX: Final = 128
_OFFSET_BYTES: Final = 4


class ObjectCache:
    """See the module; `max_bytes` counts objects and their offsets."""

    def __init__(self, max_bytes: int) -> None:
        assert max_bytes > 0
        self.max_bytes: Final = max_bytes
        self.held_bytes = 0
        self._kept: OrderedDict[ObjectKey, JsonBlock] = OrderedDict()
        self._seen: OrderedDict[ObjectKey, None] = OrderedDict()

    def get(self, key: ObjectKey) -> JsonBlock | None:
        """The objects, which become the most recently used ones; None if they must be read."""
        objects = self._kept.get(key)
        if objects is not None:
            self._kept.move_to_end(key)
        return objects

    def note(self, key: ObjectKey, objects: JsonBlock, *, is_part: bool) -> None:
        """Objects were read: keep them if they have been read before.

        `is_part`: whether the page has only a small part of them.
        """
        if key in self._kept:
            return  # two readers have read them at the same time
        if not is_part and key not in self._seen:
            self._seen[key] = None
            if len(self._seen) > _SEEN_MAX:
                self._seen.popitem(last=False)
            return
        self._seen.pop(key, None)
        if _cost(objects) > self.max_bytes:
            return
        self._kept[key] = objects
        self.held_bytes += _cost(objects)
        while self.held_bytes > self.max_bytes:
            _, oldest = self._kept.popitem(last=False)
            self.held_bytes -= _cost(oldest)

    def forget(self, topic_id: int, segment_id: int) -> None:
        """Remove the objects of a segment."""
        for key in [key for key in self._kept if key[:2] == (topic_id, segment_id)]:
            self.held_bytes -= _cost(self._kept.pop(key))


def _cost(objects: JsonBlock) -> int:
    return len(objects.body) + _OFFSET_BYTES * len(objects.offsets)
