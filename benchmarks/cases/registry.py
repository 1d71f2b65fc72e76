"""All cases by name, in the order in which they run."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.bench import Bench
from benchmarks.cases.against_floor import append_1, append_100, diff_1000, diff_sealed, tail_read
from benchmarks.cases.compared.builds import builds
from benchmarks.cases.compared.layers import layers
from benchmarks.cases.compared.postgres import postgres
from benchmarks.cases.compared.redis import redis
from benchmarks.cases.crowds.throttle import throttle
from benchmarks.cases.crowds.uploads import uploads
from benchmarks.cases.finding import find
from benchmarks.cases.keeping.archived import archive
from benchmarks.cases.larger_than_memory import memory
from benchmarks.cases.leases import claim_flat, expiry
from benchmarks.cases.many_topics import many_topics, pauses
from benchmarks.cases.operating import operate_cost
from benchmarks.cases.queues import queue_calls, queue_delivery, queue_rounds, queues
from benchmarks.cases.recovery import recovery
from benchmarks.cases.routers import routed_recovery, routers
from benchmarks.cases.scaling.case import scaling
from benchmarks.cases.syncs import fsync_16, fsync_lone
from benchmarks.cases.views.applied import views, views_rebuild
from benchmarks.cases.watch.fanout import fanout, wake_up
from benchmarks.cases.watch.many_streams import idle_watchers, sessions, stuck_watchers
from benchmarks.cases.watch.streams import appends as stream_appends
from benchmarks.cases.watch.streams import fan_out as stream_fan_out
from benchmarks.cases.watch.streams import producer_headers, producer_rates
from benchmarks.cases.watch.streams import reads as stream_reads
from benchmarks.cases.while_sealing import while_sealing
from benchmarks.report.figures import Figure

Case = Callable[[Bench], list[Figure]]

STORE_CASES: dict[str, Case] = {
    "append-1": append_1,
    "append-100": append_100,
    "diff-1000": diff_1000,
    "diff-sealed": diff_sealed,
    "tail-read": tail_read,
    "fsync-lone": fsync_lone,
    "fsync-16": fsync_16,
    "many-topics": many_topics,
    "while-sealing": while_sealing,
    "pauses": pauses,
    "recovery": recovery,
    "memory": memory,
    "redis": redis,
    "postgres": postgres,
}

LAYER_CASES: dict[str, Case] = {"layers": layers}

FIND_CASES: dict[str, Case] = {"find": find}

LIVE_CASES: dict[str, Case] = {
    "fanout": fanout,
    "wake-up": wake_up,
    "idle-watchers": idle_watchers,
    "stuck-watchers": stuck_watchers,
    "sessions": sessions,
}

ROUTER_CASES: dict[str, Case] = {
    "routers": routers,
    "routed-recovery": routed_recovery,
}

QUEUE_CASES: dict[str, Case] = {
    "queues": queues,
    "queue-calls": queue_calls,
    "queue-rounds": queue_rounds,
    "queue-delivery": queue_delivery,
}

LEASE_CASES: dict[str, Case] = {
    "claim-flat": claim_flat,
    "expiry": expiry,
}

OPERATE_CASES: dict[str, Case] = {
    "throttle": throttle,
    "uploads": uploads,
    "operate-cost": operate_cost,
}

SCALING_CASES: dict[str, Case] = {"scaling": scaling}

VIEW_CASES: dict[str, Case] = {"views": views, "views-rebuild": views_rebuild}

ARCHIVE_CASES: dict[str, Case] = {"archive": archive}

BUILD_CASES: dict[str, Case] = {"builds": builds}

STREAM_CASES: dict[str, Case] = {
    "streams-append": stream_appends,
    "streams-read": stream_reads,
    "streams-fanout": stream_fan_out,
    "streams-headers": producer_headers,
    "streams-headers-rate": producer_rates,
}

CASES = (
    STORE_CASES
    | LAYER_CASES
    | FIND_CASES
    | LIVE_CASES
    | QUEUE_CASES
    | LEASE_CASES
    | ROUTER_CASES
    | OPERATE_CASES
    | STREAM_CASES
    | SCALING_CASES
    | VIEW_CASES
    | ARCHIVE_CASES
    | BUILD_CASES
)
