"""Readers that wait for topics that do not exist yet, by name and by prefix.

They are notified of a new topic in later turns, a few readers at a time, so that a creation does
not wait for readers. While no reader waits, no entry is observed. Loop thread only. Used by
`dispatcher` and by the streams.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from topics_server.engine.commit.pipeline import CommitPipeline
from topics_server.engine.subscribe.cursors import Cursor
from topics_server.engine.topic.applied import Applied
from topics_server.values.entries import Entry, RecordsAppended, TopicPut

# The maximum of readers that are called before other work continues.
_CALLED_AT_ONCE: Final = 16

# Called with the name of a created topic.
PrefixWatcher = Callable[[str], None]


class Creations:
    """The waiting readers of one server. `begin` runs an iterator of calls in later turns."""

    def __init__(self, commits: CommitPipeline, begin: Callable[[Iterator[int]], None]) -> None:
        self._commits = commits
        self._begin = begin
        self._awaited: dict[str, dict[Cursor, Callable[[], None]]] = {}
        self._prefixes: dict[str, dict[PrefixWatcher, None]] = {}
        # The lengths of the prefixes: a name needs one look-up for each length.
        self._lengths: list[int] = []

    def wait(self, cursor: Cursor, arrived: Callable[[], None]) -> None:
        """Call `arrived` in a later turn once the topic of a waiting cursor exists."""
        self._observe()
        self._awaited.setdefault(cursor.name, {})[cursor] = arrived

    def stop_waiting(self, cursor: Cursor) -> None:
        """Remove a reader that left, or whose topic was created."""
        waiting = self._awaited.get(cursor.name)
        if waiting is None or waiting.pop(cursor, None) is None:
            return
        if not waiting:
            del self._awaited[cursor.name]
        self._stop_observing()

    def watch(self, prefix: str, watcher: PrefixWatcher) -> None:
        """Call `watcher` in a later turn for each topic that is created with this prefix."""
        self._observe()
        self._prefixes.setdefault(prefix, {})[watcher] = None
        self._lengths = sorted({*map(len, self._prefixes)})

    def stop_watching(self, prefix: str, watcher: PrefixWatcher) -> None:
        """Remove a watcher whose reader left; an unknown watcher is ignored."""
        watchers = self._prefixes.get(prefix)
        if watchers is None or watcher not in watchers:
            return
        del watchers[watcher]
        if not watchers:
            del self._prefixes[prefix]
            self._lengths = sorted({*map(len, self._prefixes)})
        self._stop_observing()

    def _observe(self) -> None:
        if not self._awaited and not self._prefixes:
            self._commits.change_observers.append(self._on_change)

    def _stop_observing(self) -> None:
        if not self._awaited and not self._prefixes:
            self._commits.change_observers.remove(self._on_change)

    def _on_change(self, lsn: int, entry: Entry, applied: Applied) -> None:
        created = entry.creation if isinstance(entry, RecordsAppended) else entry
        if not isinstance(created, TopicPut):
            return
        name = created.name
        if name in self._awaited:
            self._begin(self._arrive(name))
        for length in self._lengths:
            if length <= len(name) and name[:length] in self._prefixes:
                self._begin(self._tell(name[:length], name))

    def _arrive(self, name: str) -> Iterator[int]:
        """Call the readers that waited for a topic; yields regularly."""
        waiting = list(self._awaited.get(name, {}).items())
        for start in range(0, len(waiting), _CALLED_AT_ONCE):
            for cursor, arrived in waiting[start : start + _CALLED_AT_ONCE]:
                # If this is false, the reader left or began to wait again while others were called.
                if self._awaited.get(name, {}).get(cursor) is arrived:
                    self.stop_waiting(cursor)
                    arrived()
            yield start

    def _tell(self, prefix: str, name: str) -> Iterator[int]:
        """Call the watchers of a prefix; yields regularly."""
        watchers = list(self._prefixes.get(prefix, ()))
        for start in range(0, len(watchers), _CALLED_AT_ONCE):
            for watcher in watchers[start : start + _CALLED_AT_ONCE]:
                if watcher in self._prefixes.get(prefix, ()):
                    watcher(name)
            yield start
