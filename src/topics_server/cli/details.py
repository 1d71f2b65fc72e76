"""Prints topics, routers and queues for people: types, ages, sizes, lag.

The server's lists contain neither types nor ages nor lags. So a table requests the state of each of
the first `DETAILED_MAX` entries.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, Final, TypeVar

import msgspec

from topics_server.cli.connection import CallRefused, ServerConnection
from topics_server.values.texts.amounts import duration_text, size_text

# Each entry costs a request of about a millisecond, so a table of this length takes a second.
DETAILED_MAX: Final = 1000
T = TypeVar("T")


class QueueDetails(msgspec.Struct):
    """The counts of jobs of a queue."""

    ready: int = 0
    in_flight: int = 0
    delayed: int = 0
    dead_lettered: int = 0


class Stream(msgspec.Struct):
    """The additional state of a topic that is a Durable Stream."""

    path: str = ""
    content_type: str = ""
    closed: bool = False


class TopicDetails(msgspec.Struct):
    """A topic's state; times are milliseconds since 1970, sizes are bytes."""

    topic: str
    head_seq: int
    earliest_seq: int
    count: int
    bytes: int
    type: str = "log"
    epoch: int = 1
    disk_bytes: int = 0
    damaged_records: int = 0
    effective_priority: int = 0
    last_write_ts: int | None = None
    last_read_ts: int | None = None
    queue: QueueDetails | None = None
    stream: Stream | None = None
    config: dict[str, Any] = {}


class RouterDetails(msgspec.Struct):
    """A router's state; `lag` counts seqs of its source."""

    router: str
    source: str
    dest: str
    guarantee: str
    forwarded_total: int
    lag: int = 0
    state: str = "running"


def fetched(client: ServerConnection, path: str, kind: type[T]) -> T | None:
    """The state at a path, or `None` if the entry was removed since it was listed."""
    try:
        return msgspec.json.Decoder(kind).decode(client.call("GET", path, repeatable=True))
    except CallRefused as refused:
        if refused.status != 404:
            raise
        return None


def age(then_ms: int | None, now_ms: int) -> str:
    """The age of a server's timestamp by the local clock: `3 s ago`, `never`, `now`."""
    if then_ms is None or then_ms == 0:
        return "never"
    passed_ms = now_ms - then_ms
    # The two clocks may differ a little.
    return "now" if passed_ms < 1000 else f"{duration_text(_rounded(passed_ms))} ago"


def _rounded(ms: int) -> int:
    return ms if ms >= 60_000 else ms // 1000 * 1000


def moment(then_ms: int | None, now_ms: int) -> str:
    """The age of a timestamp, and its local time."""
    if then_ms is None or then_ms == 0:
        return "never"
    return f"{age(then_ms, now_ms)} ({clock_time(then_ms)})"


def clock_time(then_ms: int) -> str:
    """The local time of a timestamp, to the second."""
    return datetime.fromtimestamp(then_ms / 1000).isoformat(sep=" ", timespec="seconds")


def jobs(queue: QueueDetails | None) -> str:
    """A queue's counts of jobs in words; empty for a log."""
    if queue is None:
        return ""
    counts = {
        "ready": queue.ready,
        "in flight": queue.in_flight,
        "delayed": queue.delayed,
        "dead": queue.dead_lettered,
    }
    return ", ".join(f"{count:,} {name}" for name, count in counts.items() if count) or "no jobs"


def _off(show: Callable[[int], str], zero: str) -> Callable[[Any], str]:
    return lambda value: show(value) if value else zero


def _switch(value: Any) -> str:
    return "yes" if value else "no"


def _word(value: Any) -> str:
    return "none" if value is None else str(value)


_COUNT: Final = "{:,}".format
# The names of the options of `topics set`; other fields keep their own names.
_SETTINGS: Final[Mapping[str, tuple[str, Callable[[Any], str]]]] = {
    "durability": ("durability", _word),
    "ttl_ms": ("ttl", _off(duration_text, "keeps for ever")),
    "cap_records": ("cap-records", _off(_COUNT, "no cap")),
    "cap_bytes": ("cap-bytes", _off(size_text, "no cap")),
    "discard": ("discard", _word),
    "priority": ("priority", lambda value: "derived" if value is None else str(value)),
    "auto_priority": ("auto-priority", _switch),
    "auto_create": ("auto-create", _switch),
    "idempotency_window_ms": ("idempotency-window", duration_text),
    "dedupe_node": ("dedupe-node", _switch),
    "lease_ms": ("lease", duration_text),
    "claim_jitter_ms": ("claim-jitter", _off(duration_text, "none")),
    "max_deliveries": ("max-deliveries", _off(_COUNT, "no limit")),
    "dead_letter": ("dead-letter", _word),
    "leases_durable": ("leases-durable", _switch),
}
_OF_QUEUES: Final = frozenset(
    {"lease_ms", "claim_jitter_ms", "max_deliveries", "dead_letter", "leases_durable"}
)
# Not shown, because other fields imply them: the state has `type`, `durability` implies `durable`.
_SHOWN_ELSEWHERE: Final = frozenset({"type", "durable"})


def settings(topic: TopicDetails) -> list[tuple[str, str]]:
    """The configuration as rows; rows that only queues use are left out for a log."""
    rows: list[tuple[str, str]] = []
    for name, value in topic.config.items():
        if name in _SHOWN_ELSEWHERE or (name in _OF_QUEUES and topic.type == "log"):
            continue
        label, show = _SETTINGS.get(name, (name.replace("_", "-"), _plain))
        rows.append((label, show(value)))
    return rows


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def facts(topic: TopicDetails, now_ms: int) -> list[tuple[str, str]]:
    """A topic's state as rows."""
    seqs = "" if not topic.count else f" (seqs {topic.earliest_seq:,} to {topic.head_seq:,})"
    rows = [
        ("topic", topic.topic),
        ("type", topic.type),
        ("records", f"{topic.count:,}{seqs}"),
        ("head", f"{topic.head_seq:,}"),
        ("size", f"{size_text(topic.bytes)} ({size_text(topic.disk_bytes)} in sealed files)"),
        ("written", moment(topic.last_write_ts, now_ms)),
        ("read", moment(topic.last_read_ts, now_ms)),
    ]
    if topic.queue is not None:
        rows.append(("jobs", jobs(topic.queue)))
    if topic.stream is not None:
        ended = ", closed" if topic.stream.closed else ""
        rows.append(("stream", f"{topic.stream.path}, {topic.stream.content_type}{ended}"))
    if topic.damaged_records:
        rows.append(("damaged", f"{topic.damaged_records:,} records are lost"))
    return [
        *rows,
        ("effective priority", str(topic.effective_priority)),
        ("epoch", str(topic.epoch)),
    ]
