"""Notifies listeners that a topic changed; listeners read from their cursor. Pure.

Callbacks run on the loop in the order in which they were added and may add or remove bells while
they are told. Called by commits (ring) and by whoever waits (add, remove).
"""

from __future__ import annotations

from collections.abc import Callable

Bell = Callable[[], None]


class Notifier:
    """Bells by topic id. The same callback may be added more than once."""

    __slots__ = ("_bells",)

    def __init__(self) -> None:
        self._bells: dict[int, list[Bell]] = {}

    def add(self, topic_id: int, bell: Bell) -> None:
        """Ring this bell whenever the topic moves."""
        self._bells.setdefault(topic_id, []).append(bell)

    def remove(self, topic_id: int, bell: Bell) -> None:
        """Take one bell off; it must be there."""
        bells = self._bells[topic_id]
        bells.remove(bell)
        if not bells:
            del self._bells[topic_id]

    def ring(self, topic_id: int) -> None:
        """The topic moved, or is gone."""
        bells = self._bells.get(topic_id)
        if bells is not None:
            for bell in tuple(bells):
                bell()

    def ring_all(self) -> None:
        """Everybody is to look: the server is going down."""
        for topic_id in tuple(self._bells):
            self.ring(topic_id)

    @property
    def bell_count(self) -> int:
        """How many bells there are."""
        return sum(map(len, self._bells.values()))
