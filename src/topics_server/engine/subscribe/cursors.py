"""A reader's position in one incarnation of a topic. Pure.

A cursor is moved in place: the stream that reads and the session that outlives it share the object,
so that whoever asks the session (a checkpoint, the next stream) sees the last position. Loop thread
only. Used by `subscription` and `feeds` (move) and by `sessions` (keep).
"""

from __future__ import annotations


class SharedCursor:
    """A seq at which several readers stand; it is moved once for all of them."""

    __slots__ = ("seq",)

    def __init__(self, seq: int) -> None:
        self.seq = seq


class Cursor:
    """Everything up to `seq` (it included) was handed over, of epoch `epoch` of topic `name`.

    A cursor of epoch 0, which no topic has, waits for the first topic of its name and starts there
    at 0. `spot`: where it stands together with others, if it does; then only all of them are moved.
    """

    __slots__ = ("_seq", "epoch", "name", "spot", "topic_id")

    def __init__(self, name: str, topic_id: int, epoch: int, seq: int) -> None:
        assert seq >= 0
        self.name = name
        self.topic_id = topic_id
        self.epoch = epoch
        self._seq = seq
        self.spot: SharedCursor | None = None

    @classmethod
    def waiting(cls, name: str) -> Cursor:
        """A cursor in a topic that does not exist yet."""
        return cls(name, 0, 0, 0)

    @property
    def is_waiting(self) -> bool:
        """Whether its topic does not exist yet."""
        return self.epoch == 0

    def arrive(self, topic_id: int, epoch: int) -> None:
        """The topic is there: it is read from its start."""
        assert self.is_waiting
        assert self.seq == 0
        self.topic_id, self.epoch = topic_id, epoch

    @property
    def seq(self) -> int:
        """The last seq that was handed over."""
        return self._seq if self.spot is None else self.spot.seq

    @seq.setter
    def seq(self, seq: int) -> None:
        assert self.spot is None, "who stands with others is not moved alone"
        self._seq = seq

    def __repr__(self) -> str:
        return f"Cursor({self.name!r}, {self.topic_id}, {self.epoch}, {self.seq})"
