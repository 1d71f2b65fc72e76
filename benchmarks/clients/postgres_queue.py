"""A queue in a table of PostgreSQL, with `FOR UPDATE SKIP LOCKED`: the wires in addition to
`queue_wires`. Pure. A job is a row with the time from which it may be claimed. A claim takes the
oldest due jobs, moves their time to the end of the lease, skips rows that another worker holds, and
counts each try. An ack deletes the rows by id and try, so that it is fenced like ours. A job whose
worker dies is due again when its lease ends. `synchronous_commit` is off, like class `disk`.

In the phases of a round no worker waits, so the first wire sends no notifications. For a waiting
worker, the second wire notifies with each enqueue; the worker then claims, and its latency includes
both steps.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final

from benchmarks.clients import postgres
from benchmarks.clients.queue_wires import LEASE_MS, Wire, WireError

TABLE: Final = (
    "CREATE TABLE IF NOT EXISTS jobs ("
    "id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, "
    "due timestamptz NOT NULL DEFAULT now(), "
    "tries int NOT NULL DEFAULT 0, worker text, data json NOT NULL)"
)
INDEX: Final = "CREATE INDEX IF NOT EXISTS jobs_by_due ON jobs (due, id)"
# Settings: every statement uses an index and is planned once, even while the table has no
# statistics.
SETTINGS: Final = {
    "synchronous_commit": "off",
    "plan_cache_mode": "force_generic_plan",
    "enable_seqscan": "off",
    "enable_bitmapscan": "off",
    "enable_hashjoin": "off",
    "enable_mergejoin": "off",
}
ENQUEUE_ONE: Final = "INSERT INTO jobs (data) VALUES ($1)"
ENQUEUE: Final = "INSERT INTO jobs (data) SELECT data FROM unnest($1) AS job (data)"
CLAIM: Final = (
    f"UPDATE jobs SET due = now() + interval '{LEASE_MS} milliseconds', tries = tries + 1, "
    "worker = $1 WHERE id = ANY (ARRAY(SELECT id FROM jobs WHERE due <= now() "
    "ORDER BY due, id LIMIT $2 FOR UPDATE SKIP LOCKED)) RETURNING id, tries, data"
)
ACK: Final = (
    "DELETE FROM jobs USING unnest($1, $2) AS done (id, try) "
    "WHERE jobs.id = done.id AND jobs.tries = done.try"
)
LEFT: Final = "SELECT count(*) FROM jobs"
NOTIFY: Final = "WITH job AS (INSERT INTO jobs (data) VALUES ($1)) SELECT pg_notify('jobs', '')"
# the numbers of the array types
_JSONS, _INT4S, _INT8S = 199, 1007, 1016


def tagged(data: bytes, tag: bytes) -> bool:
    """Whether an answer is complete. Raises `WireError` unless its command tag is `tag`."""
    if not data.endswith(postgres.READY):
        return False
    if not data.endswith(postgres.ending(tag)):
        try:
            postgres.rows(data)
        except postgres.PostgresError as error:
            raise WireError(str(error)) from None
        raise WireError(f"{tag.decode()} expected: {data[-60:]!r}")
    return True


class Postgres:
    """The table as a queue without waiting workers."""

    is_stream = False

    def greeting(self, worker: int) -> bytes:
        # These calls change nothing. They load the catalogue into the process of this connection,
        # as in a worker's pool of used connections.
        return postgres.greeting(
            SETTINGS,
            postgres.parse(b"one", ENQUEUE_ONE, postgres.JSON),
            postgres.parse(b"enqueue", ENQUEUE, _JSONS),
            postgres.parse(b"claim", CLAIM, postgres.TEXT, postgres.INT8),
            postgres.parse(b"ack", ACK, _INT8S, _INT4S),
            postgres.parse(b"left", LEFT),
            postgres.parse(b"notify", NOTIFY, postgres.JSON),
            self._warm(b"enqueue", postgres.array(postgres.JSON, [])),
            self._warm(b"claim", b"w", struct.pack(">q", 0)),
            self._warm(
                b"ack", postgres.array(postgres.INT8, []), postgres.array(postgres.INT4, [])
            ),
        )

    @staticmethod
    def _warm(name: bytes, *parameters: bytes) -> bytes:
        return postgres.bind(name, *parameters, binary=True) + postgres.execute()

    def greeted(self, data: bytes) -> bool:
        try:
            return postgres.is_greeted(data)
        except postgres.PostgresError as error:
            raise WireError(str(error)) from None

    def setup(self) -> list[bytes]:
        # The greeting prepares statements, so the table must exist before (`cases/queues`).
        return []

    def is_set_up(self, data: bytes) -> bool:
        return data.endswith(postgres.READY)

    def enqueue(self, worker: int, jobs: Sequence[bytes]) -> bytes:
        if len(jobs) == 1:
            return postgres.call(b"one", jobs[0], binary=True)
        return postgres.call(b"enqueue", postgres.array(postgres.JSON, jobs), binary=True)

    def enqueued(self, data: bytes, count: int) -> bool:
        return tagged(data, b"INSERT 0 %d" % count)

    def claim(self, worker: int, count: int, now_ms: int) -> bytes:
        return postgres.call(b"claim", b"w-%d" % worker, struct.pack(">q", count), binary=True)

    def claimed(self, data: bytes, count: int) -> bool:
        return tagged(data, b"UPDATE %d" % count)

    def ack(self, worker: int, answer: bytes) -> bytes:
        claimed = [row for row in postgres.rows(answer) if len(row) == 3]
        ids = [struct.pack(">q", int(row[0])) for row in claimed]
        tries = [struct.pack(">i", int(row[1])) for row in claimed]
        return postgres.call(
            b"ack",
            postgres.array(postgres.INT8, ids),
            postgres.array(postgres.INT4, tries),
            binary=True,
        )

    def acked(self, data: bytes, count: int) -> bool:
        return tagged(data, b"DELETE %d" % count)

    def left(self, worker: int) -> bytes:
        return postgres.call(b"left")

    def left_count(self, data: bytes) -> int | None:
        if not tagged(data, b"SELECT 1"):
            return None
        return int(postgres.rows(data)[0][0])

    def wait(self, worker: int) -> bytes:
        raise WireError("this side notifies nobody")

    def waited(self, data: bytes) -> bool:
        return False

    def fetch(self, worker: int) -> bytes:
        return b""

    def hold(self, answer: bytes, now_ms: int) -> bytes:
        return b""


class PostgresNotified(Postgres):
    """The table whose enqueues notify a worker, which then claims."""

    is_stream = True  # after its LISTEN

    def enqueue(self, worker: int, jobs: Sequence[bytes]) -> bytes:
        return b"".join(postgres.call(b"notify", job, binary=True) for job in jobs)

    def enqueued(self, data: bytes, count: int) -> bool:
        return tagged(data, b"SELECT 1")

    def wait(self, worker: int) -> bytes:
        return postgres.query("LISTEN jobs")

    def waited(self, data: bytes) -> bool:
        return any(kind == b"A" for kind, _ in postgres.messages(data))

    def fetch(self, worker: int) -> bytes:
        return self.claim(worker, 1, 0)


POSTGRES_WIRES: dict[str, Wire] = {
    "PostgreSQL": Postgres(),
    "PostgreSQL, notified": PostgresNotified(),
}
