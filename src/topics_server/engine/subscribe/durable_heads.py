"""Tracks how far topics are synced, for `consistency: strong` (§7.2). Pure.

Kept only for topics with strong followers: per topic the applied heads that are not synced yet,
each with the lsn of its entry. Records of an ephemeral topic are never synced and count at once.
Commits report every applied entry and every sync. Called by `dispatcher`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from topics_server.engine.log.runs import OpenBlock, TailBlock
from topics_server.engine.topic.topic import Topic


class SyncedHeads:
    """The synced seq of every followed topic. `synced_lsn` returns the synced lsn of its shard."""

    __slots__ = ("_followed", "_synced_lsn")

    def __init__(self, synced_lsn: Callable[[int], int]) -> None:
        self._synced_lsn = synced_lsn
        self._followed: dict[int, _Followed] = {}

    def __len__(self) -> int:
        return len(self._followed)

    def follow(self, topic: Topic) -> None:
        """Add a reader of a topic; the caller removes it with one call of `unfollow`."""
        followed = self._followed.get(topic.topic_id)
        if followed is None:
            followed = _Followed(topic, self._synced_lsn(topic.topic_id))
            self._followed[topic.topic_id] = followed
        followed.readers += 1

    def unfollow(self, topic_id: int) -> None:
        """Remove a reader."""
        followed = self._followed[topic_id]
        followed.readers -= 1
        if followed.readers == 0:
            del self._followed[topic_id]

    def seq(self, topic_id: int) -> int:
        """The synced seq of a followed topic."""
        return self._followed[topic_id].seq

    def note(self, topic_id: int, lsn: int) -> None:
        """Note an applied entry; the notifier is called after this if the synced seq moves."""
        followed = self._followed.get(topic_id)
        if followed is not None:
            followed.note(lsn, self._synced_lsn(topic_id))

    def advance(self) -> list[int]:
        """Note the sync of a shard; returns the topics whose synced seq moved."""
        return [
            topic_id
            for topic_id, followed in self._followed.items()
            if followed.unsynced and followed.advance(self._synced_lsn(topic_id))
        ]


class _Followed:
    """One topic: its synced seq, and (lsn, head) of each entry that was applied later."""

    __slots__ = ("readers", "seq", "topic", "unsynced")

    def __init__(self, topic: Topic, synced_lsn: int) -> None:
        self.topic = topic
        self.readers = 0
        self.unsynced: deque[tuple[int, int]] = deque()
        head = topic.log.head_seq
        self.seq = head
        if topic.is_ephemeral:
            return
        for run in reversed(topic.log.runs):
            if not isinstance(run, TailBlock | OpenBlock) or run.last_lsn <= synced_lsn:
                break
            self.seq = run.first_seq - 1
            self.unsynced.appendleft((run.last_lsn, run.last_seq))

    def note(self, lsn: int, synced_lsn: int) -> None:
        """Note a new head. Waiting heads stay: `advance` returns the topics to notify."""
        head, unsynced = self.topic.log.head_seq, self.unsynced
        if head == (unsynced[-1][1] if unsynced else self.seq):
            return
        if unsynced:
            # A record that is never synced still comes after the records that wait for a sync.
            unsynced.append((unsynced[-1][0] if self.topic.is_ephemeral else lsn, head))
        elif self.topic.is_ephemeral or lsn <= synced_lsn:
            self.seq = head
        else:
            unsynced.append((lsn, head))

    def advance(self, synced_lsn: int) -> bool:
        """Move the synced seq up to `synced_lsn`; returns whether it moved."""
        before = self.seq
        unsynced = self.unsynced
        while unsynced and unsynced[0][0] <= synced_lsn:
            self.seq = unsynced.popleft()[1]
        return self.seq != before
