"""The query of a read: columns, ranges, names, and how strict the read is.

Pure. `options` makes it from texts, and `narrow` narrows it by pushed filters. Partitions carry it
to executors, pickled.
"""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass, replace
from typing import Any, Final

COLUMNS: Final = ("topic", "epoch", "seq", "ts", "node", "tag", "data", "meta")
EXTRA_COLUMNS: Final = ("deleted", "kind", "hop", "bytes")
PAYLOAD_COLUMNS: Final = frozenset({"data", "meta"})

SEQ_LIMIT: Final = 2**63 - 1
TS_LOW: Final = -(2**63)
TS_HIGH: Final = 2**63 - 1

# Columns and the Spark types each may have; the first one is the default.
TYPES: Final[dict[str, tuple[str, ...]]] = {
    "topic": ("string",),
    "epoch": ("bigint",),
    "seq": ("bigint",),
    "ts": ("timestamp", "bigint"),
    "node": ("string",),
    "tag": ("string",),
    "data": ("string", "binary", "variant", "struct"),
    "meta": ("string", "binary"),
    "deleted": ("boolean",),
    "kind": ("string",),
    "hop": ("int",),
    "bytes": ("bigint",),
}


class BadOption(ValueError):
    """A bad option; the message names it and the allowed values."""


@dataclass(frozen=True, slots=True)
class Names:
    """A set of names: any, or those that equal one of `exact`, or match a prefix or a glob."""

    exact: frozenset[str] | None = None
    prefixes: tuple[str, ...] = ()
    globs: tuple[str, ...] = ()

    @property
    def is_any(self) -> bool:
        """Whether the set contains every name, and records without a name."""
        return self.exact is None and not self.prefixes and not self.globs

    def has(self, name: str) -> bool:
        """Whether the set contains a name."""
        return (
            self.is_any
            or (self.exact is not None and name in self.exact)
            or any(name.startswith(prefix) for prefix in self.prefixes)
            or any(fnmatch.fnmatchcase(name, glob) for glob in self.globs)
        )


ANY: Final = Names()


@dataclass(frozen=True, slots=True)
class Query:
    """All bounds are inclusive except `end_ts`. A tag or node must be in every one of its
    `Names`.
    """

    columns: tuple[tuple[str, str], ...] = tuple((name, TYPES[name][0]) for name in COLUMNS)
    topics: tuple[Names, ...] = ()
    first_seq: int = 0
    last_seq: int = SEQ_LIMIT
    start_ts: int = TS_LOW
    end_ts: int = TS_HIGH
    tags: tuple[Names, ...] = ()
    nodes: tuple[Names, ...] = ()
    tier: str = "both"
    with_deleted: bool = False
    is_tolerant: bool = False
    # Whether a read uses the delete flags of the listing, or those at the time of reading a
    # segment.
    flags_at_listing: bool = True
    # Whether executors read the flags if there are too many for the driver.
    flags_may_wait: bool = False
    report_dir: str | None = None
    # The Arrow struct for columns of type `struct`; and whether the read fails at a payload that
    # does not fit it, or is no VARIANT.
    payload_type: Any = None
    is_failfast: bool = False

    @property
    def needs_payload(self) -> bool:
        """Whether the read needs the records and not only the index."""
        return any(name in PAYLOAD_COLUMNS for name, _ in self.columns)

    @property
    def is_empty(self) -> bool:
        """Whether no record can match."""
        return self.first_seq > self.last_seq or self.start_ts >= self.end_ts

    def wants_topic(self, name: str) -> bool:
        """Whether the query selects a topic."""
        return all(names.has(name) for names in self.topics)

    def narrow_seqs(self, first: int | None, last: int | None) -> Query:
        """Narrow to these seqs; None keeps a bound."""
        return replace(
            self,
            first_seq=self.first_seq if first is None else max(self.first_seq, first),
            last_seq=self.last_seq if last is None else min(self.last_seq, last),
        )

    def narrow_times(self, start: int | None, end: int | None) -> Query:
        """Narrow to times in `[start, end)`, in ms."""
        return replace(
            self,
            start_ts=self.start_ts if start is None else max(self.start_ts, start),
            end_ts=self.end_ts if end is None else min(self.end_ts, end),
        )
