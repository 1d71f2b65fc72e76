"""The preconditions of every kind of write: one table, one check for each need.

`NEEDS` lists the needs of each kind of write, in the order of the checks. If a need is not met, the
write waits where the table says so; otherwise it is refused and nothing is staged.
`tests/unit/engine/test_preconditions.py` compares the table with every call of the store. Called by
`appends`, `topic_admin` and `stream_writes`.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import Final

from topics_server.engine.commit.notifier import Notifier
from topics_server.engine.commit.topic_waits import TopicWaits
from topics_server.engine.ports import Clock
from topics_server.engine.topic.quotas import Quotas, limit_reached
from topics_server.engine.topic.registry import Registry
from topics_server.engine.topic.topic import Topic
from topics_server.values.errors import TopicsError

# The time for which an append waits until its topic's tail is sealed; then it is refused.
_SEAL_WAIT_MS_MAX: Final = 5_000


class Need(enum.Enum):
    """One precondition of a write."""

    STABLE_NAME = "no create, configure or drop of the name is in flight"
    DISK_ROOM = "the disk has more than its minimum of free bytes"
    SEALED_TAIL = "sealing is not far behind"
    TOTAL_BYTES = "the server may hold the bytes"
    TOPICS = "the server may hold the topics, and their names are free"


class Write(enum.Enum):
    """The kinds of write that are checked."""

    APPEND = "append to a topic that exists"
    CREATING_APPEND = "append that creates its topic"
    MOVE = "append of records moved from another topic"
    ROUTER_PAGE = "append of a router's page"
    FORK_PAGE = "append of a page to a fork that is being made"
    CREATE_STREAM = "creation of a stream"
    CREATE = "creation of a topic"
    CONFIGURE = "new configuration of a topic"
    DELETE = "delete of records"
    DROP = "removal of a topic"


# These need no room: deletes and drops free space, and a move deletes the records that it copies.
NEEDS: Final[dict[Write, tuple[Need, ...]]] = {
    Write.APPEND: (Need.STABLE_NAME, Need.DISK_ROOM, Need.SEALED_TAIL, Need.TOTAL_BYTES),
    Write.CREATING_APPEND: (Need.STABLE_NAME, Need.DISK_ROOM, Need.TOTAL_BYTES, Need.TOPICS),
    Write.MOVE: (Need.SEALED_TAIL, Need.STABLE_NAME, Need.DISK_ROOM, Need.TOPICS),
    Write.ROUTER_PAGE: (Need.STABLE_NAME, Need.DISK_ROOM, Need.SEALED_TAIL, Need.TOTAL_BYTES),
    Write.FORK_PAGE: (Need.TOTAL_BYTES,),
    Write.CREATE_STREAM: (Need.STABLE_NAME, Need.DISK_ROOM, Need.TOPICS, Need.TOTAL_BYTES),
    Write.CREATE: (Need.STABLE_NAME, Need.TOPICS),
    Write.CONFIGURE: (Need.STABLE_NAME,),
    Write.DELETE: (Need.STABLE_NAME,),
    Write.DROP: (Need.STABLE_NAME,),
}


class Preconditions:
    """The checks of disk, tails and quotas. `commit/pending_names` waits for names.

    `is_disk_low`: whether `Need.DISK_ROOM` is not met; the space watch sets it. `is_seal_refused`:
    whether the disk refuses to seal the topic with this id.
    """

    def __init__(
        self, registry: Registry, quotas: Quotas, notifier: Notifier, clock: Clock
    ) -> None:
        self._registry = registry
        self._quotas = quotas
        self._waits = TopicWaits(notifier)
        self._clock = clock
        self.is_disk_low = False
        self.is_seal_refused: Callable[[int], bool] = lambda topic_id: False

    def check_bytes(self, payload_bytes: int) -> None:
        """`Need.TOTAL_BYTES`. Raises `throttled`."""
        limit = self._quotas.max_total_bytes
        if limit and self._registry.bytes_live + payload_bytes > limit:
            message = "the server has reached its limit of bytes"
            raise limit_reached("max_total_bytes", message, limit)

    def check_topics(self, paths: Sequence[str]) -> None:
        """`Need.TOPICS`. Raises `throttled`, or what `Registry.check_free` raises."""
        self._quotas.check_topics(self._registry, paths)
        self._registry.check_free(paths)

    def has_long_tail(self, topic: Topic) -> bool:
        """Whether sealing is so late that memory would grow with the load."""
        log, quotas = topic.log, self._quotas
        is_long = log.tail_count > quotas.max_tail_records or log.tail_bytes > quotas.max_tail_bytes
        return is_long and not topic.is_ephemeral

    async def until_sealed(self, topic: Topic) -> float:
        """Wait until the tail is shorter; returns the wait in ms. Raises `throttled`."""
        began_ms = self._clock.monotonic_ms()
        while self.has_long_tail(topic):
            left_ms = began_ms + _SEAL_WAIT_MS_MAX - self._clock.monotonic_ms()
            if left_ms <= 0:
                raise self.tail_too_long(topic)
            await self._waits.change_or_timeout(topic.topic_id, left_ms)
        return self._clock.monotonic_ms() - began_ms

    def tail_too_long(self, topic: Topic) -> TopicsError:
        """429: the topic's tail has not been sealed in time."""
        message = "records come faster than they can be sealed"
        if self.is_seal_refused(topic.topic_id):
            message = "the disk is full, or refuses the files into which records are sealed"
        return limit_reached("unsealed", message)


def disk_nearly_full() -> TopicsError:
    """429: fewer bytes are free than required."""
    return limit_reached("min_free_bytes", "the disk is nearly full")
