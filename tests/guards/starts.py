"""Guards of decisions 0349 and 0371: recovery's steps concern all topics; reserved journal room."""

from __future__ import annotations

from typing import Final

from tests.guards.guard import Guard, guards

STARTS: Final[list[Guard]] = [
    *guards(
        "wal/journal/wal_file.py",
        "storage/journal/test_reserved_room.py",
        (
            "room is reserved for large groups only",
            "            and written >= groups * self._sizes.file_bytes // _LARGE_GROUP_PART\n",
            "",
        ),
        (
            "room is reserved only if few groups are synced",
            "            and written >= syncs * self._sizes.fill_step_bytes // _LARGE_SYNC_PART\n",
            "",
        ),
        (
            "room is filled where none can be reserved",
            "        self._live.fill(upto)\n",
            "",
        ),
    ),
    *guards(
        "wal/fs.py",
        "storage/test_fs.py",
        (
            "a file system may be unable to reserve room",
            "            if error.errno in _CANNOT_RESERVE:\n                return False\n",
            "",
        ),
    ),
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
]
