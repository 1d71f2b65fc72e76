"""What every handler is given: settings, the store once there is one, and the server's phase.

`server.py` makes one `ServerState`, sets `store` and moves `phase` forward: replaying -> ready ->
draining, never back. `Store` names what the API asks of the engine; `engine/store.py` satisfies it.
Loop thread only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Literal, Protocol

from topics_server.appends import DecodedAppend
from topics_server.clock import monotonic_ms
from topics_server.engine.answers import (
    Appended,
    Deleted,
    Page,
    PutOutcome,
    ReadRequest,
    TopicPage,
    TopicState,
)
from topics_server.metrics import ShardFacts
from topics_server.model import Durability, TagMatch, TopicConfig
from topics_server.rendered import RenderCache

Phase = Literal["replaying", "ready", "draining"]


class ApiSettings(Protocol):
    """The settings that the API reads; `settings.Settings` has them."""

    @property
    def max_body_bytes(self) -> int:
        """Bytes of one request body, as sent and as inflated."""
        ...

    @property
    def max_limit(self) -> int:
        """Records of one page."""
        ...

    @property
    def ready_degraded(self) -> int:
        """Status of `/v0/ready` while a shard is read-only: 200 or 503."""
        ...


class Store(Protocol):
    """The engine as the API sees it. Names are valid topic names; refusals are `TopicsError`."""

    async def append(
        self,
        name: str,
        body: bytes,
        decoded: DecodedAppend,
        *,
        header_key: str | None,
        config: TopicConfig | None,
    ) -> Appended:
        """Append the records of one call, all or none; `config` only if this creates the topic."""
        ...

    async def read(self, name: str, request: ReadRequest) -> Page:
        """One page after a cursor; waits while there is nothing to tell."""
        ...

    async def delete(self, name: str, *, before_seq: int | None, match: TagMatch | None) -> Deleted:
        """Delete what both conditions hit; at least one is given."""
        ...

    async def put_topic(self, name: str, config: TopicConfig, *, keep_type: bool) -> PutOutcome:
        """Create a topic or replace its configuration; `keep_type`: its type was left out."""
        ...

    async def drop_topic(self, name: str, *, if_empty: bool) -> bool:
        """Drop a topic with all it holds; False if it was not there."""
        ...

    def state(self, name: str, *, touch: bool) -> TopicState:
        """A topic's state; `touch` counts as interest in it."""
        ...

    def list_topics(
        self, *, prefix: str, after: str | None, page_size: int, touch: bool
    ) -> TopicPage:
        """Topics in name order, those after `after`."""
        ...

    @property
    def topic_count(self) -> int:
        """How many topics exist."""
        ...

    @property
    def records_live(self) -> int:
        """Records that can be read."""
        ...

    @property
    def bytes_live(self) -> int:
        """Bytes of those records."""
        ...

    @property
    def queue_topics(self) -> int:
        """How many topics are queues."""
        ...

    @property
    def damaged_records(self) -> int:
        """Sealed records whose bytes are damaged."""
        ...

    def counts_by_class(self) -> dict[Durability, int]:
        """How many topics each durability class has."""
        ...

    def read_only_shards(self) -> Sequence[int]:
        """Journal shards that take no writes until a restart."""
        ...

    def topic_states(self, limit: int) -> tuple[list[TopicState], bool]:
        """States of at most `limit` topics, and whether there are more."""
        ...


@dataclasses.dataclass(slots=True, kw_only=True)
class ServerState:
    """The one shared state of all handlers.

    `progress` tells how far recovery is (0 to 1); `started_ms` is of the monotonic clock; `shards`
    tells the journal's figures.
    """

    settings: ApiSettings
    progress: Callable[[], float]
    store: Store | None = None
    phase: Phase = "replaying"
    started_ms: float = dataclasses.field(default_factory=monotonic_ms)
    shards: Callable[[], Sequence[ShardFacts]] = tuple
    rendered: RenderCache = dataclasses.field(default_factory=RenderCache)
