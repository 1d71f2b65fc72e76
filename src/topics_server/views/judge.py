"""Finds files of views that reflect lost records of their topics.

After recovery a log may have fewer records than before, because a power cut made the journal
shorter. Directly after recovery the log's last entry, head and holes show which files are ahead of
it. New entries would hide this: they use the numbers of lost entries again, and may evict a hole.
So `node/boot` stores the facts of the logs before anything is written. A start after an unclean
stop, or one that lost the records of an ephemeral topic, removes such files before the server is
ready; a view compares files that it opens later with these facts.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Final

import msgspec

from topics_server.engine.topic.registry import Registry
from topics_server.engine.topic.topic import Topic
from topics_server.runtime.metrics import log
from topics_server.values.model import Hole
from topics_server.values.storage_types import Offload
from topics_server.views.messages import Answer, FileFacts, Open, Remove
from topics_server.views.processes import Applying, ProcessDied
from topics_server.views.view_table import ViewTable
from topics_server.views.workers.view_folder import files_in

_SECONDS: Final = 15.0
_TRIES_MAX: Final = 3
# No limit here: a view opens its files again with its own limit.
_ANY_BYTES: Final = 1 << 50


class LogFacts(msgspec.Struct, frozen=True):
    """A topic's log directly after recovery. `lsn`: its last entry."""

    head_seq: int
    lsn: int
    holes: tuple[Hole, ...]


class RecoveredLogs(msgspec.Struct, frozen=True):
    """How the server started. `logs`: by topic id. `ahead`: views with removed files."""

    logs: dict[int, LogFacts]
    was_clean: bool
    ahead: frozenset[int] = frozenset()


def facts_of_log(topic: Topic) -> LogFacts:
    """The facts of a topic's log now."""
    return LogFacts(topic.log.head_seq, topic.applied_lsn, tuple(topic.log.holes))


def is_ahead(facts: FileFacts, log_facts: LogFacts) -> bool:
    """Whether a file reflects records or deletes that its topic's log has lost.

    That is so if the log's last entry is older than one that the file reflects (an append, or a
    delete that was lost), if its head is below the file's position, or if a hole up to that
    position is not in the file's gaps.
    """
    if facts.lsn > log_facts.lsn or facts.processed_seq > log_facts.head_seq:
        return True
    return any(
        _has_more(hole.first_seq, min(hole.last_seq, facts.processed_seq), facts.gaps)
        for hole in log_facts.holes
    )


def _has_more(first: int, last: int, gaps: list[tuple[int, int]]) -> bool:
    """Whether a seq of `first..last` is in no gap."""
    for gap_first, gap_last in sorted(gaps):
        if gap_first <= first <= gap_last:
            first = gap_last + 1
    return first <= last


async def judge_files(
    table: ViewTable,
    registry: Registry,
    directory: Path,
    process: Applying,
    offload: Offload,
    *,
    was_clean: bool,
) -> RecoveredLogs:
    """Note the logs of all views; remove every file that is ahead of its log.

    After a clean stop only logs with holes are checked: a restart loses the records of ephemeral
    topics, and the next crash may happen before a view has opened its file.

    Called before anything is written. Never refuses a start: a file that cannot be opened now is
    compared again by its view.
    """
    topics = {row.topic: registry.find(row.topic) for row in table}
    logs = {topic.topic_id: facts_of_log(topic) for topic in topics.values() if topic is not None}
    ahead: set[int] = set()
    for row in table:
        topic = topics[row.topic]
        if topic is None:
            continue  # the view removes its files itself
        if was_clean and not logs[topic.topic_id].holes:
            continue
        try:
            files = await offload.run(partial(files_in, directory / str(row.view_id)))
        except OSError as error:
            log.warning("the files of view %s cannot be listed: %s", row.name, error)
            continue
        for _, path in files:
            facts = await _ask(process, Open(path, _ANY_BYTES))
            if (
                isinstance(facts, FileFacts)
                and facts.topic_id == str(topic.topic_id)
                and is_ahead(facts, logs[topic.topic_id])
            ):
                await _ask(process, Remove(path))
                ahead.add(row.view_id)
    return RecoveredLogs(logs, was_clean, frozenset(ahead))


async def _ask(process: Applying, request: Open | Remove) -> Answer | None:
    for _ in range(_TRIES_MAX):
        try:
            return await process.ask(request, seconds=_SECONDS)
        except ProcessDied as died:
            log.warning("a file of a view cannot be judged: %s", died)
    return None
