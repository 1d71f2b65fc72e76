"""Bounds over all topics of a server (§11), and the refusal that names one. Pure."""

from __future__ import annotations

import msgspec

from topics_server.engine.registry import Registry
from topics_server.errors import Code, TopicsError


class Quotas(msgspec.Struct, frozen=True):
    """Bounds over all topics; 0 is unlimited (§11). A longer or larger tail parks appends."""

    max_topics: int
    max_total_bytes: int
    max_tail_records: int
    max_tail_bytes: int

    def check_topics(self, registry: Registry, count: int) -> None:
        """Raises `throttled` unless so many topics more may be made."""
        limit = self.max_topics
        if count and limit and len(registry) + len(registry.pending) + count > limit:
            raise limit_reached("max_topics", "the server holds as many topics as it may", limit)

    def check_bytes(self, registry: Registry, payload_bytes: int) -> None:
        """Raises `throttled` unless so many bytes more may be held."""
        limit = self.max_total_bytes
        if limit and registry.bytes_live + payload_bytes > limit:
            raise limit_reached("max_total_bytes", "the server holds all it may", limit)


def limit_reached(limit: str, message: str, maximum: int | None = None) -> TopicsError:
    """429 `throttled` that names the limit."""
    detail: dict[str, object] = {"limit": limit}
    if maximum is not None:
        detail["max"] = maximum
    return TopicsError(Code.THROTTLED, message, detail)
