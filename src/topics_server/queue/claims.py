"""Claims that are answered at once (§10.2).

If the jobs were never leased and no claimer waits on the queue, a claim needs no dispatcher, no
entry and no task: it is decided and applied in one call. Every other claim (with a coalescing
window, waiting claimers, durable leases, a lease log, returned jobs, records that are not in
memory) takes the general path of `queue/service`, which gives the same answer. Loop thread only.
"""

from __future__ import annotations

from collections.abc import Callable

from topics_server.engine.ports import Clock
from topics_server.engine.store import Store
from topics_server.engine.topic.topic import Topic
from topics_server.queue.answers import FirstLeases
from topics_server.queue.dispatch.dispatcher import ClaimDispatcher
from topics_server.queue.leases.lease_book import LeaseBook
from topics_server.queue.leases.lease_table import LeaseTable, live_jobs


class ImmediateClaims:
    """Claims of all queues. `on_moved` is called for a change without an entry in the journal."""

    def __init__(
        self,
        store: Store,
        lease_table: LeaseTable,
        clock: Clock,
        dispatcher: ClaimDispatcher,
        *,
        on_moved: Callable[[], None],
    ) -> None:
        self._store = store
        self._lease_table = lease_table
        self._clock = clock
        self._dispatcher = dispatcher
        self._on_moved = on_moved

    def claim(
        self, topic: Topic, book: LeaseBook, node: str, max_jobs: int, lease_ms: int | None
    ) -> FirstLeases | None:
        """Claim jobs without waiting; None, without effect, if the claim needs the general path.

        If there is no job, the result has no jobs; the caller may then wait.
        """
        config, dispatcher = topic.config, self._dispatcher
        if (
            topic.topic_id in dispatcher.queues
            or dispatcher.is_draining
            or config.claim_jitter_ms
            or config.leases_durable
            or isinstance(config.lease_log, str)
        ):
            return None
        now_ms = self._clock.now_ms()
        live = live_jobs(topic, now_ms)
        seqs = book.first_unclaimed(now_ms, max_jobs, live, topic.log.live_from)
        if seqs is None:
            return None
        rows = self._store.resident_rows(topic, seqs) if seqs else []
        if rows is None:
            return None
        topic.last_read_ts = now_ms
        first_id = 0
        deadline_ms = now_ms + (config.lease_ms if lease_ms is None else lease_ms)
        if seqs:
            first_id = self._lease_table.reserve_ids(len(seqs))
            book.lease_unclaimed(now_ms, seqs, first_id, node, deadline_ms)
            self._on_moved()
        return FirstLeases(seqs, rows, first_id, deadline_ms, book.ready(live))
