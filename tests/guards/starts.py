"""Guards of decisions 0349 (a step of recovery leaves out no topic that it concerns) and 0376."""

from __future__ import annotations

from typing import Final

from tests.guards.guard import Guard, guards

STARTS: Final[list[Guard]] = [
    *guards(
        "engine/background/recovery.py",
        "unit/engine/background/test_recovery_steps.py",
        (
            "a topic whose folder is missing is examined",
            "sorted(self._on_disk | self._anchored)",
            "sorted(self._on_disk)",
        ),
        (
            "recovery notes the topics that should have files",
            "self._anchored.add(topic_id)",
            "pass",
        ),
        (
            "files of topics that only the journal has are finished",
            "        if files is not None:\n"
            "            self._files[topic_id] = files\n"
            "        return indexes",
            "        return indexes",
        ),
        (
            "a start counts a stream's last use as late as it may have been",
            "and topic.stream is None and not topic.is_ephemeral",
            "and not topic.is_ephemeral",
        ),
        (
            "seqs of a shard that may have lost entries are skipped",
            "stop.same_boot and not self._replay.may_have_lost(topic.topic_id)",
            "stop.same_boot",
        ),
        (
            "the end of the replay is forgotten after it",
            "            topic.log.replayed_seq = None\n",
            "",
        ),
    ),
    *guards(
        "node/boot.py",
        "model/queues/test_leases_restart.py",
        (
            "a store with queues keeps their leases over a start",
            "queues = ground.registry if ground.registry.queue_topics else ()",
            "queues = ()",
        ),
        (
            "jobs whose file was put back are claimed again",
            "                _readmit_jobs(topic, node.queues)\n",
            "                pass\n",
        ),
    ),
    *guards(
        "routers/router_table.py",
        "unit/routers/test_router_table.py",
        (
            "a deleted router leaves no cursor after a start",
            "            if topic.cursors:\n",
            "            if False:\n",
        ),
    ),
    *guards(
        "api/watch/stream_timer.py",
        "unit/api/watch/test_stream_timer.py",
        (
            "a turn of the loop has a bounded number of checks",
            "for _ in range(_LOOKS_MAX):",
            "while True:",
        ),
        (
            "a heartbeat that follows one sent in time is not a step late",
            "(due_ms - EARLY_MS) / step_ms",
            "due_ms / step_ms",
        ),
        (
            "a timer does not end before its check is due",
            "ceil(max(0.0, due_ms - monotonic_ms())) / 1000",
            "max(0.0, due_ms - monotonic_ms()) / 1000",
        ),
    ),
]
