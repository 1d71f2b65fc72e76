"""A client of the server: topics, queues and their workers, live events, views and streams.

    from topics_server.client import Client, Job

    with Client("http://127.0.0.1:4000") as client:
        client.append("orders", {"total": 12}, tag="paid")
        for item in client.read("orders"):
            print(item)

        @client.worker("mails", concurrency=4)
        def send(job: Job) -> None:
            deliver(job.data["to"])

        send.run()  # until SIGTERM

`AsyncClient` has the same methods for coroutines; docs/CLIENT.md has recipes. The parts can also be
used alone: `Queue`, `worker`, `TopicClient`, `ViewClient`, `DurableStream`, `IdempotentProducer`,
`live`.

This package imports nothing else of the server, so that its folder can be used alone.

- `following/`: the events of topics as they happen.
- `front/`: one client of a server: `Client` and `AsyncClient`.
- `producing/`: idempotent producers.
- `records/`: records and consumers of one topic.
- `streaming/`: Durable Streams.
- `viewing/`: views of topics.
- `working/`: workers of queues.
- `addresses`: checks tokens and URLs when a program gives them.
- `backoff`: computes retry delays: exponential with full jitter.
- `blocking`: `Queue`: one queue of one server, without an event loop.
- `blocking_client`: `BlockingClient`: one HTTP client with retries; the base of the clients without
  a loop.
- `calls`: queue requests (§10) as values: what to send, how to read the response.
- `coroutine_client`: `CoroutineClient`: the same base for coroutines.
- `effects`: the client's clock, sleep, randomness and host name.
- `errors`: the client's errors, and reading an error response.
- `event_frames`: event streams over HTTP: the frames of a connection, and reconnecting.
- `exchange`: the request headers and the answer handling of every HTTP client.
- `queue`: `AsyncQueue`: one queue of one server, for coroutines.
- `retries`: when and how often a call is tried again.
- `values`: the values of queue calls.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from topics_server.client.backoff import Backoff
    from topics_server.client.blocking import Queue
    from topics_server.client.errors import (
        BadAnswer,
        ClientError,
        ConditionFailed,
        Fenced,
        Forgotten,
        Forked,
        InDoubt,
        InvalidRequest,
        NotAQueue,
        NotFound,
        ProducerClosed,
        QueueFull,
        Refused,
        StreamClosed,
        Throttled,
        Unauthorized,
        Unavailable,
        Undelivered,
        Unreachable,
    )
    from topics_server.client.following.async_live import live_async
    from topics_server.client.following.blocking_live import live
    from topics_server.client.following.live_events import LiveEvent, LiveRecord
    from topics_server.client.front.admin_calls import TopicDescription
    from topics_server.client.front.async_client import AsyncClient, AsyncConsumer
    from topics_server.client.front.client import Client, Consumer
    from topics_server.client.front.cursors import CursorStore, FileCursor
    from topics_server.client.front.items import (
        CaughtUpItem,
        DeletedItem,
        GapItem,
        LiveItem,
        NoticeItem,
        ReadItem,
        RecordItem,
    )
    from topics_server.client.producing.async_producer import AsyncIdempotentProducer
    from topics_server.client.producing.blocking_producer import IdempotentProducer
    from topics_server.client.producing.receipts import Delivered, Receipt
    from topics_server.client.queue import AsyncQueue
    from topics_server.client.records.async_topic import AsyncTopicClient
    from topics_server.client.records.topic import TopicClient
    from topics_server.client.records.topic_calls import (
        AppendResult,
        ConsumerPlace,
        Hold,
        NewRecord,
        RecordsPage,
        StoredRecord,
    )
    from topics_server.client.streaming.async_stream import AsyncDurableStream
    from topics_server.client.streaming.durable_stream import DurableStream
    from topics_server.client.streaming.stream_requests import StreamChunk, StreamEnd, StreamGap
    from topics_server.client.values import (
        Acked,
        Claimed,
        Counters,
        Enqueued,
        Extended,
        Job,
        Nacked,
        NewJob,
        QueueState,
        Stats,
    )
    from topics_server.client.viewing.async_view import AsyncViewClient
    from topics_server.client.viewing.blocking_view import ViewClient
    from topics_server.client.viewing.view_calls import (
        Defined,
        QueryResult,
        RecordError,
        ViewProgress,
    )
    from topics_server.client.working.worker import Worker, worker
    from topics_server.client.working.worker_run import Dead, Drop, Retry

# The module of each public name. A program imports those of the names that it uses, and a verb
# of the command line needs few (docs/decisions/0342).
_MODULES: Final = {
    name: module
    for module, names in {
        "backoff": "Backoff",
        "blocking": "Queue",
        "errors": """
            BadAnswer ClientError ConditionFailed Fenced Forgotten Forked InDoubt InvalidRequest
            NotAQueue NotFound ProducerClosed QueueFull Refused StreamClosed Throttled
            Unauthorized Unavailable Undelivered Unreachable""",
        "following.async_live": "live_async",
        "following.blocking_live": "live",
        "following.live_events": "LiveEvent LiveRecord",
        "front.admin_calls": "TopicDescription",
        "front.async_client": "AsyncClient AsyncConsumer",
        "front.client": "Client Consumer",
        "front.cursors": "CursorStore FileCursor",
        "front.items": "CaughtUpItem DeletedItem GapItem LiveItem NoticeItem ReadItem RecordItem",
        "producing.async_producer": "AsyncIdempotentProducer",
        "producing.blocking_producer": "IdempotentProducer",
        "producing.receipts": "Delivered Receipt",
        "queue": "AsyncQueue",
        "records.async_topic": "AsyncTopicClient",
        "records.topic": "TopicClient",
        "records.topic_calls": "AppendResult ConsumerPlace Hold NewRecord RecordsPage StoredRecord",
        "streaming.async_stream": "AsyncDurableStream",
        "streaming.durable_stream": "DurableStream",
        "streaming.stream_requests": "StreamChunk StreamEnd StreamGap",
        "values": "Acked Claimed Counters Enqueued Extended Job Nacked NewJob QueueState Stats",
        "viewing.async_view": "AsyncViewClient",
        "viewing.blocking_view": "ViewClient",
        "viewing.view_calls": "Defined QueryResult RecordError ViewProgress",
        "working.worker": "Worker worker",
        "working.worker_run": "Dead Drop Retry",
    }.items()
    for name in names.split()
}
# The parts that the docstring names, of which some have no public name here.
_PARTS: Final = frozenset(
    [
        *(module.partition(".")[0] for module in _MODULES.values()),
        *"addresses blocking_client calls coroutine_client effects event_frames".split(),
        *"exchange retries".split(),
    ]
)


def __getattr__(name: str) -> Any:
    """Import the module of a public name, or a part of this package, at its first use."""
    if name in _PARTS:
        return importlib.import_module(f"{__name__}.{name}")
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


__all__ = [
    "AsyncClient",
    "AsyncConsumer",
    "Client",
    "Consumer",
    "CursorStore",
    "FileCursor",
    "CaughtUpItem",
    "DeletedItem",
    "GapItem",
    "LiveItem",
    "NoticeItem",
    "ReadItem",
    "RecordItem",
    "TopicDescription",
    "AsyncDurableStream",
    "DurableStream",
    "StreamChunk",
    "StreamEnd",
    "StreamGap",
    "AsyncTopicClient",
    "AsyncIdempotentProducer",
    "AsyncQueue",
    "AsyncViewClient",
    "IdempotentProducer",
    "LiveEvent",
    "LiveRecord",
    "Queue",
    "TopicClient",
    "ViewClient",
    "Worker",
    "live",
    "live_async",
    "worker",
    "Backoff",
    "Dead",
    "Delivered",
    "Drop",
    "Retry",
    "Acked",
    "Claimed",
    "Counters",
    "Defined",
    "Enqueued",
    "Extended",
    "Job",
    "Nacked",
    "NewJob",
    "QueryResult",
    "QueueState",
    "RecordError",
    "ViewProgress",
    "Receipt",
    "Stats",
    "BadAnswer",
    "ClientError",
    "ConditionFailed",
    "ConsumerPlace",
    "Hold",
    "NewRecord",
    "RecordsPage",
    "AppendResult",
    "StoredRecord",
    "Fenced",
    "Forgotten",
    "Forked",
    "InDoubt",
    "InvalidRequest",
    "NotAQueue",
    "NotFound",
    "ProducerClosed",
    "QueueFull",
    "Refused",
    "StreamClosed",
    "Throttled",
    "Unauthorized",
    "Unavailable",
    "Undelivered",
    "Unreachable",
]
