"""A client of queues: enqueue jobs, work them off.

    from topics_server.client import Job, Queue, worker

    Queue("mails").enqueue({"to": "ada@example.org"}, key="welcome-ada")

    @worker("mails", concurrency=4)
    def send(job: Job) -> None:
        deliver(job.data["to"])

    send.run()  # until SIGTERM

Imports nothing else of the server, so that it can leave with its folder. Map: `working` (the
decorator), `engine` (a run of it), `sources` (push and poll), `settling` (acks and nacks),
`flight` (leases held), `queue` and `blocking` (the calls, async and not), `calls` (requests as
values), `values`, `errors`, `backoff`, `patience`, `threads`, `effects`.
"""

from topics_server.client.backoff import Backoff
from topics_server.client.blocking import Queue
from topics_server.client.engine import Dead, Drop, Retry
from topics_server.client.errors import (
    BadAnswer,
    ClientError,
    InvalidRequest,
    NotAQueue,
    NotFound,
    QueueFull,
    Refused,
    Throttled,
    Unauthorized,
    Unavailable,
    Unreachable,
)
from topics_server.client.queue import AsyncQueue
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
    "AsyncQueue",
    "Queue",
    "Worker",
    "worker",
    "Backoff",
    "Dead",
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
    "Stats",
    "BadAnswer",
    "ClientError",
    "InvalidRequest",
    "NotAQueue",
    "NotFound",
    "QueueFull",
    "Refused",
    "Throttled",
    "Unauthorized",
    "Unavailable",
    "Unreachable",
]
