"""Maps a stream's path to a topic's name. Pure.

A path that is a valid topic name maps to the topic of that name; any other path maps to `ds:` and a
hash of the path, and the topic stores the path. A path that itself looks like such a hashed name
cannot be created (`Registry.check_free`); a stream whose topic has such a name has another path.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache

from topics_server.values.model import HASH_CHARS, HASHED_PREFIX, is_topic_name


# Cached, because a client appends to one stream many times.
@lru_cache(maxsize=1024)
def topic_of(path: str) -> str:
    """The name of the topic for the stream at `path` (decoded, without a leading slash)."""
    if is_topic_name(path):
        return path
    return HASHED_PREFIX + hashlib.sha256(path.encode()).hexdigest()[:HASH_CHARS]
