"""Notifies listeners that a topic changed; listeners read from their cursor. Pure.

Listeners run on the loop in the order in which they were added; a listener may add or remove
listeners. Commits call `notify`; readers call `add` and `remove`.
"""

from __future__ import annotations

from collections.abc import Callable

Listener = Callable[[], None]


class Notifier:
    """`listeners` by topic id. The same callback may be added more than once."""

    __slots__ = ("listeners",)

    def __init__(self) -> None:
        self.listeners: dict[int, list[Listener]] = {}

    def add(self, topic_id: int, listener: Listener) -> None:
        """Call this listener whenever the topic changes."""
        self.listeners.setdefault(topic_id, []).append(listener)

    def remove(self, topic_id: int, listener: Listener) -> None:
        """Remove one listener; it must have been added."""
        listeners = self.listeners[topic_id]
        listeners.remove(listener)
        if not listeners:
            del self.listeners[topic_id]

    def notify(self, topic_id: int) -> None:
        """Call the topic's listeners: it changed, or was dropped."""
        listeners = self.listeners.get(topic_id)
        if listeners is not None:
            for listener in tuple(listeners):
                listener()

    def notify_all(self) -> None:
        """Notify the listeners of every topic: the server is shutting down."""
        for topic_id in tuple(self.listeners):
            self.notify(topic_id)

    @property
    def listener_count(self) -> int:
        """The number of listeners."""
        return sum(map(len, self.listeners.values()))
