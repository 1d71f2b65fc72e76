"""Stream path to topic name. Pure.

A path that is a valid topic name is that topic; any other path maps to `ds:` and a hash of it, and
the topic keeps the path. A path that itself looks like such a hashed name cannot be created
(`Registry.check_free`); the stream whose topic has that name has another path.
"""

from __future__ import annotations

import hashlib

from topics_server.values.model import HASH_CHARS, HASHED_PREFIX, is_topic_name


def topic_of(path: str) -> str:
    """The name of the topic that is the stream at `path` (decoded, without a leading slash)."""
    if is_topic_name(path):
        return path
    return HASHED_PREFIX + hashlib.sha256(path.encode()).hexdigest()[:HASH_CHARS]
