"""A reader's position in one incarnation of a topic. Pure.

A stream and the session that outlives it share one cursor object. The stream moves the cursor in
place, so a checkpoint or the session's next stream sees the latest position. Loop thread only.
`subscription` and `dispatcher` move cursors; `sessions` keeps them.
"""

from __future__ import annotations


class SharedCursor:
    """One seq for several readers at the same position; one assignment moves all of them."""

    __slots__ = ("seq",)

    def __init__(self, seq: int) -> None:
        self.seq = seq


class Cursor:
    """The reader received every record up to and including `seq` of topic `name`, epoch `epoch`.

    A cursor of epoch 0 (no topic has epoch 0) waits for a topic of this name to be created and
    starts there at seq 0. `shared_cursor`: set while the reader belongs to a broadcast group; then
    the group's seq counts and this cursor cannot move alone.
    """

    __slots__ = ("_seq", "epoch", "name", "shared_cursor", "topic_id")

    def __init__(self, name: str, topic_id: int, epoch: int, seq: int) -> None:
        assert seq >= 0
        self.name = name
        self.topic_id = topic_id
        self.epoch = epoch
        self._seq = seq
        self.shared_cursor: SharedCursor | None = None

    @classmethod
    def waiting(cls, name: str) -> Cursor:
        """A cursor in a topic that does not exist yet."""
        return cls(name, 0, 0, 0)

    @property
    def is_waiting(self) -> bool:
        """Whether the cursor's topic does not exist yet."""
        return self.epoch == 0

    def arrive(self, topic_id: int, epoch: int) -> None:
        """Read the created topic from its start."""
        assert self.is_waiting
        assert self.seq == 0
        self.topic_id, self.epoch = topic_id, epoch

    @property
    def seq(self) -> int:
        """The last seq that the reader received."""
        return self._seq if self.shared_cursor is None else self.shared_cursor.seq

    @seq.setter
    def seq(self, seq: int) -> None:
        assert self.shared_cursor is None, "a cursor in a broadcast group does not move alone"
        self._seq = seq

    def __repr__(self) -> str:
        return f"Cursor({self.name!r}, {self.topic_id}, {self.epoch}, {self.seq})"
