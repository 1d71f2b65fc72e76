"""A topic's priority: manual, or fading with its last read. Pure.

Called by the store for topic states, and by the throttle.
"""

from __future__ import annotations

from typing import Final

from topics_server.values.model import TopicConfig

_JUST_READ: Final = 500
_HALF_LIFE_MS: Final = 30_000


def effective_priority(config: TopicConfig, last_read_ts: int | None, now_ms: int) -> int:
    """The manual priority if set; else 500, halved every 30 s after the last read; 0 if never read.

    A topic that has opted out of the automatic priority has 0 as well.
    """
    if config.priority is not None:
        return config.priority
    if last_read_ts is None or not config.auto_priority:
        return 0
    # A clock that stepped back does not raise the priority above 500.
    age_ms = max(0, now_ms - last_read_ts)
    return int(_JUST_READ * 2.0 ** (-age_ms / _HALF_LIFE_MS))
