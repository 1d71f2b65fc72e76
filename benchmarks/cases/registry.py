"""All cases by name, in the order they run."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.bench import Bench
from benchmarks.cases.against_floor import append_1, append_100, diff_1000
from benchmarks.cases.larger_than_memory import memory
from benchmarks.cases.many_topics import many_topics, pauses
from benchmarks.cases.recovery import recovery
from benchmarks.cases.redis import redis
from benchmarks.cases.syncs import fsync_16, fsync_lone
from benchmarks.cases.while_sealing import while_sealing
from benchmarks.figures import Figure

Case = Callable[[Bench], list[Figure]]

CASES: dict[str, Case] = {
    "append-1": append_1,
    "append-100": append_100,
    "diff-1000": diff_1000,
    "fsync-lone": fsync_lone,
    "fsync-16": fsync_16,
    "many-topics": many_topics,
    "while-sealing": while_sealing,
    "pauses": pauses,
    "recovery": recovery,
    "memory": memory,
    "redis": redis,
}
