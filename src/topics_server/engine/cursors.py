"""Where one reader is in one incarnation of one topic.

A cursor is moved in place: the stream that reads and the session that outlives it share the object,
so that whoever asks the session (a checkpoint, the next stream) sees the last position. Loop thread
only. Used by `subscription` and `feeds` (move) and by `sessions` (keep).
"""

from __future__ import annotations


class Cursor:
    """Everything up to `seq` (it included) was handed over, of epoch `epoch` of topic `name`."""

    __slots__ = ("epoch", "name", "seq", "topic_id")

    def __init__(self, name: str, topic_id: int, epoch: int, seq: int) -> None:
        assert seq >= 0
        self.name = name
        self.topic_id = topic_id
        self.epoch = epoch
        self.seq = seq

    def __repr__(self) -> str:
        return f"Cursor({self.name!r}, {self.topic_id}, {self.epoch}, {self.seq})"
