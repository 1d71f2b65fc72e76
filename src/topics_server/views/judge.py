"""Removes files of views that reflect what their topics lost, before the server is ready.

Recovery may lower what a log holds: its journal ends earlier than it did before a power cut. Right
behind recovery the log's last entry and its holes tell which files are ahead of it. New entries
would hide that, since they use the same numbers again and may evict a hole; so every start behind
an unclean stop judges the files first. Called by `node`.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Final

from topics_server.engine.ports import Offload
from topics_server.engine.topic.registry import Registry
from topics_server.runtime.metrics import log
from topics_server.views.build import is_ahead
from topics_server.views.messages import FileFacts, Open, Remove
from topics_server.views.processes import Applying, ProcessDied
from topics_server.views.view_file import files_in
from topics_server.views.view_table import ViewTable

_SECONDS: Final = 15.0


async def judge_files(
    table: ViewTable, registry: Registry, directory: Path, process: Applying, offload: Offload
) -> frozenset[int]:
    """Remove every file that is ahead of its log; the ids of the views that it belonged to.

    Never refuses a start: a file that cannot be opened now is looked at again by its view.
    """
    ahead: set[int] = set()
    try:
        for row in table:
            topic = registry.find(row.topic)
            if topic is None:
                continue  # its view removes what is there
            for _, path in await offload.run(partial(files_in, directory / str(row.view_id))):
                # The largest bound: the view opens the file again with its own.
                facts = await process.ask(Open(path, _ANY_BYTES), seconds=_SECONDS)
                if (
                    isinstance(facts, FileFacts)
                    and facts.topic_id == str(topic.topic_id)
                    and is_ahead(facts, topic.log, topic.applied_lsn)
                ):
                    await process.ask(Remove(path), seconds=_SECONDS)
                    ahead.add(row.view_id)
    except (ProcessDied, OSError) as error:
        log.warning("the files of views could not be judged: %s", error)
    return frozenset(ahead)


_ANY_BYTES: Final = 1 << 50
