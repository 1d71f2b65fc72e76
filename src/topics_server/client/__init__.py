"""A client: enqueue jobs and work them off; write topics and streams once; query views.

    from topics_server.client import Job, Queue, worker

    Queue("mails").enqueue({"to": "ada@example.org"}, key="welcome-ada")

    @worker("mails", concurrency=4)
    def send(job: Job) -> None:
        deliver(job.data["to"])

    send.run()  # until SIGTERM

    with IdempotentProducer("orders", "till-7") as till:
        till.send({"total": 12})

    ViewClient("orders", "by-tag").query("SELECT * FROM counts", after=seq).dicts()

Imports nothing else of the server, so that it can leave with its folder.

- `following/`: the events of topics as they come.
- `producing/`: idempotent producers.
- `viewing/`: views of topics.
- `working/`: workers of queues.
- `addresses`: checks tokens and URLs when a program gives them.
- `backoff`: computes retry delays: exponential with full jitter.
- `blocking`: `Queue`: one queue of one server, without an event loop.
- `blocking_client`: `BlockingClient`: one HTTP client and its patience; the base of the clients
  without a loop.
- `calls`: queue requests (§10) as values: what to send, how to read the response.
- `effects`: the client's clock, sleep, randomness and host name.
- `errors`: the client's errors, and reading an error response.
- `queue`: `AsyncQueue`: one queue of one server, for coroutines.
- `retries`: when and how often a call is tried again.
- `topic`: `TopicClient`: records and consumers of one topic, without an event loop.
- `topic_calls`: requests on the records and consumers of a topic as values.
- `values`: the values of queue calls.
"""

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
from topics_server.client.producing.async_producer import AsyncIdempotentProducer
from topics_server.client.producing.blocking_producer import IdempotentProducer
from topics_server.client.producing.receipts import Delivered, Receipt
from topics_server.client.queue import AsyncQueue
from topics_server.client.topic import TopicClient
from topics_server.client.topic_calls import (
    AppendResult,
    ConsumerPlace,
    NewRecord,
    RecordsPage,
    StoredRecord,
)
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
from topics_server.client.viewing.view_calls import Defined, QueryResult, RecordError, ViewProgress
from topics_server.client.working.worker import Worker, worker
from topics_server.client.working.worker_run import Dead, Drop, Retry

__all__ = [
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
