"""The shared state of all handlers: settings, store, services, server phase. Loop thread only.

`node/` makes one `ServerState`, sets `store` and the services, and moves `phase` forward:
replaying -> ready or failed -> draining, never back; `closed` is the phase without a store.
`StorePort` and `Routers` declare what the API needs of `engine/store` and `routers/service`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Literal, Protocol, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from topics_server.api.api_settings import ApiSettings
from topics_server.api.watch.broadcast import Fanout
from topics_server.auth.api_keys import KeyRing
from topics_server.auth.hosts import Hosts
from topics_server.auth.tickets import Tickets
from topics_server.engine.answers import (
    Appended,
    BackwardPage,
    BackwardRequest,
    ConsumerState,
    Deleted,
    JsonPage,
    Page,
    PutOutcome,
    RangeMark,
    ReadRequest,
    TopicPage,
    TopicState,
)
from topics_server.engine.background.large_appends import LargeAppends
from topics_server.engine.filters import Filter
from topics_server.engine.pressure.body_turns import BodyTurns
from topics_server.engine.pressure.throttle import Throttle
from topics_server.engine.subscribe.session_service import WatchSessions
from topics_server.engine.topic.writes.condition import (
    Condition,
    ConditionCheck,
    ConditionCounts,
)
from topics_server.http.read_scheduler import ReadScheduler
from topics_server.http.timeouts import ConnectionTimeouts
from topics_server.http.upload_budget import UploadBudget
from topics_server.http.upload_turns import UploadTurns
from topics_server.queue.service import QueueService
from topics_server.runtime.busy_polling import BusyPolling
from topics_server.runtime.clock import monotonic_ms
from topics_server.runtime.metrics import (
    ArchiveMetrics,
    BackupMetrics,
    DiskFacts,
    MendingMetrics,
    RecoveryFacts,
    RouteFacts,
    ScrubMetrics,
    ShardFacts,
)
from topics_server.streams.service import Streams
from topics_server.values.appends import AppendLimits, DecodedAppend
from topics_server.values.errors import StartRefused
from topics_server.values.json_cache import JsonCache
from topics_server.values.limits import INFLATED_APPENDS_MAX
from topics_server.values.model import (
    ConsumerHold,
    Durability,
    ProducerStamp,
    TagMatch,
    TopicConfig,
)
from topics_server.values.router_answers import (
    RouterListPage,
    RouterOutcome,
    RouterSpec,
    RouterState,
)
from topics_server.values.storage_types import BackupState
from topics_server.values.texts.key_list import KeyGrant
from topics_server.views.service import Views

T = TypeVar("T")
Phase = Literal["closed", "replaying", "ready", "failed", "draining"]


class AppendService(Protocol):
    """An append on its way."""

    def when_resolved(self, callback: Callable[[], object]) -> None:
        """Call `callback` once there is an outcome; `callback` must not raise."""
        ...

    def outcome(self, *, throttle_wait_ms: float = 0.0) -> Appended:
        """The append's result;

        `throttle_wait_ms` becomes part of the result. Raises the append's `TopicsError`.
        """
        ...


class StorePort(Protocol):
    """The engine's methods for the API. Names are valid topic names; refusals are `TopicsError`."""

    async def append(
        self,
        name: str,
        body: bytes,
        decoded: DecodedAppend,
        *,
        header_key: str | None,
        config: TopicConfig | None,
        producer: ProducerStamp | None = None,
        submitted: Callable[[], None] | None = None,
        check: ConditionCheck | None = None,
    ) -> Appended:
        """Append the records of one call, all or none. `config` applies if this creates the topic.

        `append` may call `submitted` before it returns; appends begun after that call get later
        seqs.
        """
        ...

    def begin_append(
        self,
        name: str,
        body: bytes,
        decoded: DecodedAppend,
        *,
        header_key: str | None,
        producer: ProducerStamp | None = None,
        flush_now: bool = False,
        check: ConditionCheck | None = None,
    ) -> AppendService | None:
        """Begin an append without waiting.

        If it would have to wait, change nothing and return None.
        """
        ...

    async def read(self, name: str, request: ReadRequest) -> Page:
        """One page after a cursor; waits while there is nothing to report."""
        ...

    def read_json(self, name: str, request: ReadRequest, shown: int) -> Page | JsonPage | None:
        """The page of `read` with these members, without waiting; None if it is not in memory."""
        ...

    async def read_json_from_disk(
        self, name: str, request: ReadRequest, shown: int
    ) -> Page | JsonPage | None:
        """`read_json` for a page that is not in memory; None if only `read` can make it."""
        ...

    async def read_backward(
        self, name: str, request: BackwardRequest, wanted: Filter | None
    ) -> BackwardPage:
        """One page of the records below a cursor, newest first."""
        ...

    async def cursor_of(self, name: str, request: ReadRequest) -> int:
        """The cursor at which a read of the topic begins now."""
        ...

    def upto_seq(self, name: str, request: ReadRequest) -> int:
        """The last seq that a read examines."""
        ...

    def range_mark(self, name: str, first_seq: int, last_seq: int) -> RangeMark:
        """A value that changes when this range of seqs gets or loses a record."""
        ...

    def dead_slots(self, name: str) -> tuple[int, int]:
        """The id of the topic and the number of its seqs without a record."""
        ...

    def check_of(self, condition: Condition) -> ConditionCheck:
        """The check of a write with this condition."""
        ...

    async def decided(self, check: ConditionCheck | None, attempt: Callable[[], Awaitable[T]]) -> T:
        """Attempt a write with this check, and repeat it until its condition can be decided."""
        ...

    @property
    def condition_counts(self) -> ConditionCounts:
        """How many conditions of writes held, and how many did not."""
        ...

    async def delete(
        self,
        name: str,
        *,
        before_seq: int | None,
        match: TagMatch | None,
        check: ConditionCheck | None = None,
    ) -> Deleted:
        """Delete the records that meet both conditions; at least one is given."""
        ...

    async def put_topic(
        self,
        name: str,
        config: TopicConfig,
        *,
        keep_type: bool,
        check: ConditionCheck | None = None,
    ) -> PutOutcome:
        """Create a topic or replace its configuration. `keep_type`: the request left `type` out."""
        ...

    async def configure(
        self,
        name: str,
        change: Callable[[TopicConfig | None], TopicConfig],
        *,
        check: ConditionCheck | None = None,
    ) -> PutOutcome:
        """Set a topic's configuration to what `change` returns.

        `change` gets the current configuration, or None for a new topic.
        """
        ...

    async def drop_topic(
        self, name: str, *, if_empty: bool, check: ConditionCheck | None = None
    ) -> bool:
        """Drop a topic with all its records; False if it did not exist."""
        ...

    async def put_consumer(
        self,
        name: str,
        consumer: str,
        from_seq: int | None,
        hold: ConsumerHold | UnsetType | None = UNSET,
    ) -> tuple[ConsumerState, bool]:
        """Create a consumer at `from_seq` (None: at the head), unless it exists.

        Returns its state and whether it was created. An unset `hold` leaves the hold of an existing
        consumer as it is.
        """
        ...

    async def commit_consumer(
        self,
        name: str,
        consumer: str,
        seq: int,
        *,
        rewind: bool = False,
        if_seq: int | None = None,
        topic_id: int | None = None,
    ) -> tuple[ConsumerState, bool]:
        """Commit a seq; return the consumer's state and whether it moved."""
        ...

    async def delete_consumer(self, name: str, consumer: str) -> bool:
        """Forget a consumer; False if it did not exist."""
        ...

    def consumer(self, name: str, consumer: str) -> ConsumerState:
        """The state of a consumer."""
        ...

    def read_start(self, name: str, consumer: str) -> int:
        """The seq behind which a consumer reads; counts as a use of the consumer."""
        ...

    def list_consumers(
        self, name: str, after: str | None, page_size: int
    ) -> tuple[list[ConsumerState], str | None]:
        """A page of consumers in name order, after `after`, and the `after` of the next page."""
        ...

    def consumer_lags(self) -> Iterable[tuple[str, str, int, int]]:
        """Topic, consumer, lag in seqs and held records of every consumer."""
        ...

    def state(self, name: str, *, touch: bool) -> TopicState:
        """A topic's state. `touch`: the read counts as a use of the topic."""
        ...

    def list_topics(
        self,
        *,
        prefix: str,
        after: str | None,
        page_size: int,
        touch: bool,
        keep: Callable[[str], bool] | None = None,
    ) -> TopicPage:
        """Topics in name order, after the name `after`; with `keep`, only names that it accepts."""
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
        """Bytes of the records that can be read."""
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


class Routers(Protocol):
    """The part of the routers that the API uses. Names are valid; refusals are `TopicsError`."""

    async def put(self, name: str, spec: RouterSpec) -> RouterOutcome:
        """Create a router, with the topics it needs, or replace its definition."""
        ...

    def get(self, name: str) -> RouterState:
        """A router's definition and its progress."""
        ...

    def page(
        self,
        *,
        prefix: str,
        source: str | None,
        dest: str | None,
        after: str | None,
        page_size: int,
        may_name: Callable[[str], bool] | None = None,
    ) -> RouterListPage:
        """A page of routers in name order, after `after`; `may_name` must accept all their
        names.
        """
        ...

    async def delete(self, name: str) -> bool:
        """Drop a router; False if it did not exist."""
        ...

    def routers_of(self, topic_name: str) -> list[str]:
        """The routers from and into a topic, sorted."""
        ...

    def __len__(self) -> int:
        """How many routers exist."""
        ...


class Sealing(Protocol):
    """Seals on demand; `engine.background.sealer.Sealer` satisfies it."""

    async def seal_topics(self, names: Iterable[str]) -> tuple[int, int]:
        """Seal the records of these topics.

        Returns counts: records left unsealed, segments made.
        """
        ...


class BackupsPort(Protocol):
    """Makes backups; `node.backups.Backups` satisfies it."""

    @property
    def state(self) -> BackupState:
        """The backup that was begun last."""
        ...

    def begin(self) -> BackupState:
        """Start a backup, unless one is running."""
        ...

    def metrics(self) -> BackupMetrics:
        """Facts for a scrape."""
        ...


class ArchivingPort(Protocol):
    """Keeps the continuous archive; `node.archiver.Archiver` satisfies it."""

    def metrics(self) -> ArchiveMetrics:
        """Facts for a scrape."""
        ...


def _inflated_slots() -> asyncio.Semaphore:
    return asyncio.Semaphore(INFLATED_APPENDS_MAX)


def _large_appends() -> LargeAppends:
    return LargeAppends(AppendLimits())


class ServerState(msgspec.Struct, kw_only=True):
    """The one shared state of all handlers.

    `progress` is recovery's progress (0 to 1). `keys` are the API keys, `tickets` those for
    streams, `hosts` the accepted names of this server. `started_ms` is of the monotonic clock.
    `shards` returns the journal's metrics. `connections` counts open streams and WebSockets
    (`api/readiness`). `requests` counts answers, `disk` (*blocking*) the files on disk. `timeouts`
    holds the connection timeouts, `read_scheduler` the received bytes that are read later.
    `busy_polling` polls for a lone client's next request.
    `uploads` counts the bytes of bodies and messages being received, `upload_turns` the connections
    that wait to send, `body_turns` the requests whose bodies wait to be decoded.
    """

    settings: ApiSettings
    progress: Callable[[], float]
    keys: KeyRing = msgspec.field(default_factory=KeyRing)
    hosts: Hosts = msgspec.field(default_factory=Hosts)
    tickets: Tickets = msgspec.field(default_factory=Tickets)
    store: StorePort | None = None
    fanout: Fanout | None = None
    sessions: WatchSessions | None = None
    queues: QueueService | None = None
    routers: Routers | None = None
    views: Views | None = None
    streams: Streams | None = None
    sealing: Sealing | None = None
    backups: BackupsPort | None = None
    archiver: ArchivingPort | None = None
    scrub: Callable[[], ScrubMetrics] | None = None
    mending: Callable[[], MendingMetrics] | None = None
    phase: Phase = "replaying"
    started_ms: float = msgspec.field(default_factory=monotonic_ms)
    shards: Callable[[], Sequence[ShardFacts]] = tuple
    json_cache: JsonCache = msgspec.field(default_factory=JsonCache)
    timeouts: ConnectionTimeouts = msgspec.field(default_factory=ConnectionTimeouts)
    throttle: Throttle = msgspec.field(default_factory=Throttle)
    read_scheduler: ReadScheduler | None = None
    busy_polling: BusyPolling = msgspec.field(default_factory=BusyPolling)
    inflated: asyncio.Semaphore = msgspec.field(default_factory=_inflated_slots)
    large_appends: LargeAppends = msgspec.field(default_factory=_large_appends)
    uploads: UploadBudget = msgspec.field(default_factory=UploadBudget)
    upload_turns: UploadTurns = msgspec.field(default_factory=UploadTurns)
    body_turns: BodyTurns = msgspec.field(default_factory=BodyTurns)
    connections: int = 0
    requests: Callable[[], Sequence[RouteFacts]] = tuple
    # Metrics that `node` and `server` provide.
    disk: Callable[[], DiskFacts] | None = None
    recovery: RecoveryFacts | None = None
    # Failures of background work, for `/v0/ready`. They hold no names and no paths.
    reasons: Callable[[], Sequence[str]] = tuple
    log_lines_dropped: Callable[[], int] | None = None
    _waiting: set[asyncio.Future[None]] = msgspec.field(default_factory=set)

    def __post_init__(self) -> None:
        """Make the turns of uploads from this state's own upload budget."""
        self.upload_turns = UploadTurns(self.uploads)

    def restrict_to(self, grants: Iterable[KeyGrant]) -> None:
        """Require one of these keys (none: serve everybody) and a host name of the settings."""
        self.keys = KeyRing(grants, covers_probes=self.settings.probe_auth)
        self.hosts = Hosts(self.settings.host_names)

    def defer_reads(self) -> None:
        """Read connections with much input in short turns, in the order of the throttle."""
        self.read_scheduler = ReadScheduler(self.throttle)

    def enter(self, phase: Phase) -> None:
        """Move to a later phase, and wake the tasks that wait for it."""
        self.phase = phase
        for waiting in list(self._waiting):
            if not waiting.done():
                waiting.set_result(None)

    async def until_ready(self) -> None:
        """Return once the store takes requests. Raises `StartRefused` if it never will."""
        while self.phase == "replaying":
            await self.next_phase()
        if self.phase != "ready":
            raise StartRefused(f"the store is {self.phase}")

    def next_phase(self) -> asyncio.Future[None]:
        """A future that resolves when the phase changes next, even if no task awaits it yet."""
        waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.add(waiting)
        waiting.add_done_callback(self._waiting.discard)
        return waiting

    def watching(self) -> tuple[Fanout, WatchSessions]:
        """The fan-out and the watch sessions; they exist once the server is ready."""
        assert self.fanout is not None
        assert self.sessions is not None
        return self.fanout, self.sessions

    @property
    def waiting(self) -> int:
        """How many futures wait for the next phase."""
        return len(self._waiting)
