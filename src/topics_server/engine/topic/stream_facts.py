"""The stream state of one topic.

Requests are checked against those in flight, as with producers: after a request that closes a
stream, nothing is appended, even if the close is not written yet. Called by `engine/topic/topic.py`
and `engine/background/capture.py`.
"""

from __future__ import annotations

from collections import deque

import msgspec

from topics_server.values.errors import Code, TopicsError
from topics_server.values.model import ProducerStamp, StreamFacts, StreamStep

# A use is journaled when the last journaled use is older than this part of the time to live.
USES_PER_LIFE = 16


class StreamState:
    """One topic's facts as a stream. `used_ms`: the time of its last known use."""

    __slots__ = ("_staged", "facts", "used_ms")

    def __init__(self, facts: StreamFacts) -> None:
        self.facts = facts
        self.used_ms = facts.used_ms
        self._staged: deque[tuple[int, StreamFacts]] = deque()

    @property
    def newest(self) -> StreamFacts:
        """The facts after all entries in flight."""
        return self._staged[-1][1] if self._staged else self.facts

    def check(self, name: str, step: StreamStep | None) -> None:
        """Check whether records may be appended. Raises `TopicsError`:

        `stream_closed`; `stream_conflict` for a `Stream-Seq` that is not higher than the last;
        `throttled` while the stream is being made.
        """
        facts = self.newest
        if facts.is_copying:
            raise TopicsError(
                Code.THROTTLED, f'"{name}" is being forked', {"limit": "fork", "topic": name}
            )
        if facts.is_closed:
            raise closed(name)
        seq = None if step is None else step.last_seq
        if seq is not None and facts.last_seq is not None and seq <= facts.last_seq:
            raise TopicsError(
                Code.STREAM_CONFLICT,
                "Stream-Seq must be higher than the last one",
                {"field": "Stream-Seq", "last_seq": facts.last_seq},
            )

    def stage(self, lsn: int, facts: StreamFacts) -> None:
        """Note the facts of an entry in flight."""
        self._staged.append((lsn, facts))

    def undo(self, lsn: int) -> None:
        """Undo the change of this entry and of all entries behind it."""
        while self._staged and self._staged[-1][0] >= lsn:
            self._staged.pop()

    def apply(self, lsn: int, facts: StreamFacts) -> None:
        """Set the facts."""
        while self._staged and self._staged[0][0] <= lsn:
            self._staged.popleft()
        self.facts = facts
        self.used(facts.used_ms)

    def used(self, ms: int) -> None:
        """Note a use of the stream at this time."""
        self.used_ms = max(self.used_ms, ms)

    def is_use_due(self) -> bool:
        """Whether the last use must be journaled: the last journaled use is too old."""
        ttl_s = self.facts.ttl_s
        return bool(ttl_s) and self.used_ms - self.newest.used_ms > _slack_ms(ttl_s or 0)

    def allow_for_uses(self) -> None:
        """After a start, count the last use as late as unjournaled uses may have been."""
        if self.facts.ttl_s:
            self.used_ms += _slack_ms(self.facts.ttl_s)

    def ends_ms(self) -> int | None:
        """The known expiry time of the stream; None for never."""
        facts = self.facts
        if facts.ttl_s is not None:
            return self.used_ms + 1000 * facts.ttl_s
        return facts.expires_ms if facts.expires_at is not None else None


def _slack_ms(ttl_s: int) -> int:
    return 1000 * ttl_s // USES_PER_LIFE


def closed(name: str) -> TopicsError:
    """409: the stream is closed."""
    return TopicsError(Code.STREAM_CLOSED, f'stream "{name}" is closed', {"topic": name})


def stepped(facts: StreamFacts, step: StreamStep, producer: ProducerStamp | None) -> StreamFacts:
    """The facts after an append with this stream step."""
    return msgspec.structs.replace(
        facts,
        last_seq=facts.last_seq if step.last_seq is None else step.last_seq,
        is_closed=facts.is_closed or step.closes,
        closed_by=producer if step.closes else facts.closed_by,
    )


def plain_facts(name: str) -> StreamFacts:
    """The facts of a topic that was not created as a stream: a stream of JSON messages."""
    return StreamFacts(name, "application/json")
