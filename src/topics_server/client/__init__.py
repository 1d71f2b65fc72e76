"""A client: enqueue jobs and work them off; write to topics and streams, each record once.

    from topics_server.client import Job, Queue, worker

    Queue("mails").enqueue({"to": "ada@example.org"}, key="welcome-ada")

    @worker("mails", concurrency=4)
    def send(job: Job) -> None:
        deliver(job.data["to"])

    send.run()  # until SIGTERM

    with IdempotentProducer("orders", "till-7") as till:
        till.send({"total": 12})

Imports nothing else of the server, so that it can leave with its folder. Map: `working` (the
decorator), `engine` (a run of it), `sources` (push and poll), `settling` (acks and nacks),
`flight` (leases held), `queue` and `blocking` (the calls, async and not), `calls` (requests as
values), `values`, `errors`, `addresses` (tokens and URLs, checked), `backoff`, `patience`,
`threads`, `effects`. Producers: `producer` and `producer_threads` (what a program sees), `carrying`
(requests on a loop), `sending` (the rules), `targets` (requests and answers as values), `receipts`.
"""

from topics_server.client.backoff import Backoff
from topics_server.client.blocking import Queue
from topics_server.client.engine import Dead, Drop, Retry
from topics_server.client.errors import (
    BadAnswer,
    ClientError,
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
from topics_server.client.producer import AsyncIdempotentProducer
from topics_server.client.producer_threads import IdempotentProducer
from topics_server.client.queue import AsyncQueue
from topics_server.client.receipts import Delivered, Receipt
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
from topics_server.client.working import Worker, worker

__all__ = [
    "AsyncIdempotentProducer",
    "AsyncQueue",
    "IdempotentProducer",
    "Queue",
    "Worker",
    "worker",
    "Backoff",
    "Dead",
    "Delivered",
    "Drop",
    "Retry",
    "Acked",
    "Claimed",
    "Counters",
    "Enqueued",
    "Extended",
    "Job",
    "Nacked",
    "NewJob",
    "QueueState",
    "Receipt",
    "Stats",
    "BadAnswer",
    "ClientError",
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
