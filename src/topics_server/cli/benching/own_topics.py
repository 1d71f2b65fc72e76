"""The topics of a run: made below a prefix and a random name, and removed when they are not needed.

No other topic is touched. `remove_all` is called at the end of every run, also after an error and
after Ctrl-C.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from topics_server.cli.connection import (
    CallRefused,
    Failure,
    ServerConnection,
    ServerUnreachable,
    topic_path,
)
from topics_server.runtime.clock import random_hex

# A server that does not answer must not hold the end of a run for long.
REMOVE_S = 10.0
# After these answers, a server's or a proxy's, a topic may exist all the same.
IN_DOUBT = (500, 502, 504)


class _Made(msgspec.Struct):
    topic: str
    created: bool


_MADE: Final = msgspec.json.Decoder(_Made)


class OwnTopics:
    """Topics of one run; `left` are those that may exist."""

    def __init__(self, client: ServerConnection, prefix: str) -> None:
        self._client = client
        self._prefix = f"{prefix}{random_hex(16)[:12]}."
        self.left: list[str] = []

    def create(self, name: str, **config: Any) -> str:
        """The name of a new topic. Raises `CallRefused`, `ServerUnreachable`."""
        topic = self._prefix + name
        path, body = topic_path(topic), msgspec.json.encode(config)
        self.left.append(topic)  # an interrupt must not lose it
        try:
            made = _MADE.decode(self._client.call("PUT", path, body))
        except CallRefused as error:
            if error.status not in IN_DOUBT:
                self.left.remove(topic)
            raise
        except msgspec.DecodeError:
            self.left.remove(topic)
            raise
        except ServerUnreachable as error:
            if not error.sent:
                self.left.remove(topic)
            raise
        if not made.created:
            self.left.remove(topic)
            raise Failure(f"there is a topic {topic} already")
        return topic

    def remove(self, topic: str) -> None:
        """Remove a topic, if it exists. Raises `CallRefused`, `ServerUnreachable`."""
        try:
            self._client.call("DELETE", topic_path(topic), timeout_s=REMOVE_S, repeatable=True)
        except CallRefused as error:
            if error.code != "topic_not_found":
                raise
        self.left.remove(topic)

    def remove_all(self) -> Failure | None:
        """Remove all that are left; the first error, after which `left` names those that remain."""
        first: Failure | None = None
        for topic in list(self.left):
            try:
                self.remove(topic)
            except (CallRefused, ServerUnreachable) as error:
                first = first or error
                if isinstance(error, ServerUnreachable):
                    break
        return first
