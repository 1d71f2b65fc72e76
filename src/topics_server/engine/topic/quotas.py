"""Server-wide limits over all topics (§11)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Protocol

import msgspec

from topics_server.engine.topic.registry import Registry
from topics_server.values.errors import Code, TopicsError
from topics_server.values.limits import MIB

# A tail may have the size of four segments, and at least this many bytes.
_TAIL_RECORDS_MIN: Final = 262_144
_TAIL_BYTES_MIN: Final = 64 * MIB


class QuotaSettings(Protocol):
    """The settings from which the bounds are made; `settings.Settings` has them."""

    @property
    def max_topics(self) -> int:
        """The maximum of topics of the server; 0 is unlimited."""
        ...

    @property
    def max_topics_per_prefix(self) -> int:
        """The maximum of topics for each prefix of a key; 0 is unlimited."""
        ...

    @property
    def max_total_bytes(self) -> int:
        """The maximum of retained bytes of all topics; 0 is unlimited."""
        ...

    @property
    def segment_max_events(self) -> int:
        """The maximum of records of a segment."""
        ...

    @property
    def segment_max_bytes(self) -> int:
        """The maximum of bytes of a segment."""
        ...


def _no_prefixes() -> frozenset[str]:
    return frozenset()


class Quotas(msgspec.Struct, frozen=True):
    """Bounds over all topics; 0 is unlimited (§11). Appends to a longer or larger tail wait.

    `prefixes` returns the current prefixes of all keys.
    """

    max_topics: int
    max_total_bytes: int
    max_tail_records: int
    max_tail_bytes: int
    max_topics_per_prefix: int = 0
    prefixes: Callable[[], frozenset[str]] = _no_prefixes

    def check_topics(self, registry: Registry, paths: Sequence[str]) -> None:
        """Raise `throttled` unless topics with these own paths may be created."""
        limit = self.max_topics
        if paths and limit and len(registry) + len(registry.pending) + len(paths) > limit:
            raise limit_reached("max_topics", "the server has reached its limit of topics", limit)
        if paths and self.max_topics_per_prefix:
            self._check_prefixes(registry, paths)

    def _check_prefixes(self, registry: Registry, paths: Sequence[str]) -> None:
        limit = self.max_topics_per_prefix
        for prefix in sorted(self.prefixes()):
            wanted = sum(path.startswith(prefix) for path in paths)
            if wanted and registry.count_of(prefix, self.prefixes()) + wanted > limit:
                message = f'the prefix "{prefix}" has reached its limit of topics'
                raise limit_reached("max_topics_per_prefix", message, limit, prefix)


def quotas_of(settings: QuotaSettings, prefixes: Callable[[], frozenset[str]]) -> Quotas:
    """Make the bounds from the settings and the keys."""
    return Quotas(
        max_topics=settings.max_topics,
        max_total_bytes=settings.max_total_bytes,
        max_tail_records=max(_TAIL_RECORDS_MIN, 4 * settings.segment_max_events),
        max_tail_bytes=max(_TAIL_BYTES_MIN, 2 * settings.segment_max_bytes),
        max_topics_per_prefix=settings.max_topics_per_prefix,
        prefixes=prefixes,
    )


def limit_reached(
    limit: str, message: str, maximum: int | None = None, prefix: str | None = None
) -> TopicsError:
    """429 `throttled` with the name of the limit."""
    detail: dict[str, object] = {"limit": limit}
    if maximum is not None:
        detail["max"] = maximum
    if prefix is not None:
        detail["prefix"] = prefix
    return TopicsError(Code.THROTTLED, message, detail)
